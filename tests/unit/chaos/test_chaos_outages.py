"""How long partitions take nothing, and which fault it is put down to."""

import pytest

from raftq.chaos.history import History, Publish
from raftq.chaos.outages import Cost, costs, outages, worst_by_fault
from raftq.chaos.timeline import Span


def sent(at: float, ended: float | None, partition: int = 0, status: str = "ok") -> Publish:
    one = Publish(client="a", topic="t", partition=partition, at=at, value=f"{partition} {at}")
    if ended is not None:
        one.end(status, ended)  # type: ignore[arg-type]
    return one


def steady(start: float, end: float, partition: int = 0) -> list[Publish]:
    """A record every tenth of a second, acknowledged at once."""
    count = round((end - start) * 10)
    moments = [start + number / 10 for number in range(count)]
    return [sent(at, at + 0.01, partition) for at in moments]


def fault(began: float, ended: float, name: str = "kill", majority: bool = True) -> Span:
    return Span(began, ended, name, f"{name} at {began}", majority)


def lasting(history: list[Publish], ended: float = 10.0) -> list[tuple[int, float, float]]:
    found = outages(History(history), ended)
    return [
        (one.partition_key[1], round(one.began, 3), round(one.ended, 3))
        for one in found
        if one.lasted_s > 0.5
    ]


def test_a_partition_to_which_nothing_is_sent_is_not_out() -> None:
    assert lasting([sent(1.0, 1.1), sent(8.0, 8.1)]) == []


def test_a_partition_is_out_from_the_first_record_that_waits_to_the_next_acknowledgement() -> None:
    history = [sent(1.0, 1.1), sent(2.0, 6.0), sent(3.0, 6.1), sent(4.0, 4.5, status="failed")]
    assert lasting(history) == [(0, 2.0, 6.0)]


def test_a_record_of_one_client_that_waits_while_others_are_acknowledged_is_no_outage() -> None:
    assert lasting([sent(1.0, 9.0), *steady(1.0, 9.0)]) == []


def test_a_partition_that_never_comes_back_is_out_until_the_end() -> None:
    assert lasting([sent(1.0, 1.1), sent(2.0, None)]) == [(0, 2.0, 10.0)]
    assert lasting([sent(1.0, 3.0, status="unknown")]) == [(0, 1.0, 10.0)]


def test_a_partition_that_goes_on_does_not_hide_another() -> None:
    assert lasting([*steady(0.0, 9.0, 1), sent(2.0, 6.0)]) == [(0, 2.0, 6.0)]


def test_an_outage_is_put_down_to_the_fault_that_was_there_alone() -> None:
    history = History([*steady(0, 10), sent(10.05, 13.0), *steady(13.0, 40.0)])
    (first, second) = costs([fault(10, 15), fault(30, 31)], history, 40.0)
    assert (first.fault.began, first.partition_key) == (10, ("t", 0))
    assert first.outage_s == pytest.approx(2.95)
    assert second.outage_s < 0.2


@pytest.mark.parametrize(
    "other",
    [
        fault(9, 12, majority=False),
        fault(2, 7, majority=False),  # the last seconds are still its doing
        fault(9, 11),
        fault(12, 13),
    ],
)
def test_a_fault_beside_another_is_not_judged(other: Span) -> None:
    history = History([*steady(0, 10), sent(10.05, 14.0), *steady(14.0, 30.0)])
    judged = [cost.fault.began for cost in costs([fault(10, 15), other], history, 30.0)]
    assert 10 not in judged


def test_a_partition_with_most_of_its_copies_apart_is_excused_and_others_are_not() -> None:
    history = History([*steady(0, 10), sent(10.05, 15.0), *steady(0, 10, 1), sent(10.05, 12.0, 1)])
    span = Span(10, 15, "split", "split", excused=frozenset({("t", 0)}))
    (cost,) = costs([span], history, 30.0)
    assert cost.partition_key == ("t", 1)
    assert cost.outage_s == pytest.approx(1.95)


def test_the_next_fault_takes_over_the_blame() -> None:
    history = History([*steady(0, 10), sent(10.05, 25.0)])
    (first, _) = costs([fault(10, 12), fault(14, 16)], history, 30.0)
    assert first.outage_s == pytest.approx(14 - 10.05)


def test_the_worst_of_each_kind_comes_first() -> None:
    rows = [
        Cost(fault(1, 2, "kill"), 0.5),
        Cost(fault(3, 4, "pause"), 3.0),
        Cost(fault(5, 6, "kill"), 0.2),
    ]
    assert worst_by_fault(rows) == [("pause", 1, 3.0), ("kill", 2, 0.5)]
