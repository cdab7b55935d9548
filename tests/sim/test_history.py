"""Each checker finds its anomaly, and none finds one in a good history."""

from collections.abc import Callable

import pytest
from history import History, Log, Read, Send, judge

PARTITION = ("t", 0)
Final = dict[tuple[str, int], Log]


def good() -> tuple[History, Final, list[Send]]:
    """Nothing is wrong: a and b are acknowledged, c is unknown, d failed; two readers."""
    history = History()
    sends = [
        history.send("p", PARTITION, value, "all", at)
        for at, value in enumerate((b"a", b"b", b"c", b"d"))
    ]
    history.ok(sends[0], 0, 5.0)
    history.ok(sends[1], 1, 5.0)
    history.failed(sends[2], "unknown", "timeout", 6.0)
    history.failed(sends[3], "failed", "no leader", 6.0)
    for reader in ("r", "s"):
        for offset, value in enumerate((b"a", b"b", b"c")):
            history.read(Read(reader, PARTITION, offset, value, 7.0))
    return history, {PARTITION: [(0, b"a"), (1, b"b"), (2, b"c")]}, sends


def kinds(history: History, final: Final) -> list[str]:
    return [one.kind for one in judge(history, final)]


def test_a_good_history_has_no_anomalies() -> None:
    history, final, _ = good()
    assert kinds(history, final) == []
    assert history.counts() == {"ok": 2, "failed": 1, "unknown": 1, "open": 0, "reads": 6}


def test_an_unknown_record_may_be_missing() -> None:
    history, final, _ = good()
    history.reads.clear()
    final[PARTITION] = [(0, b"a"), (1, b"b")]
    assert kinds(history, final) == []


def test_a_record_may_be_there_again_only_where_that_is_said() -> None:
    history, final, _ = good()
    final[PARTITION] = [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"b"), (4, b"c")]
    assert not judge(history, final, repeats={(PARTITION, 3), (PARTITION, 4)})
    found = judge(history, final, repeats={(PARTITION, 3)})
    assert [one.kind for one in found] == ["duplicated"]
    assert "at 4" in found[0].text


def cut_reads(history: History) -> None:
    history.reads.clear()


CASES: dict[str, Callable[[History, Final, list[Send]], None]] = {
    "lost": lambda h, f, s: (cut_reads(h), f.update({PARTITION: [(0, b"a")]}))[1],
    "misplaced": lambda h, f, s: (
        cut_reads(h),
        f.update({PARTITION: [(0, b"a"), (2, b"b")]}),
    )[1],
    "duplicated": lambda h, f, s: f.update(
        {PARTITION: [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"b")]}
    ),
    "phantom": lambda h, f, s: f.update({PARTITION: [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"x")]}),
    "revived": lambda h, f, s: f.update({PARTITION: [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]}),
    "two values": lambda h, f, s: h.reads.__setitem__(5, Read("s", PARTITION, 2, b"x", 7.0)),
    "vanished": lambda h, f, s: h.read(Read("r", PARTITION, 3, b"x", 7.0)),
    "backwards": lambda h, f, s: h.read(Read("r", PARTITION, 2, b"c", 8.0)),
    "skipped": lambda h, f, s: h.reads.__delitem__(1),
}


@pytest.mark.parametrize("kind", CASES)
def test_each_anomaly_is_found(kind: str) -> None:
    history, final, sends = good()
    CASES[kind](history, final, sends)
    found = kinds(history, final)
    assert kind in found
    assert set(found) <= {kind, "misplaced", "lost"}


def test_a_record_before_an_earlier_one_is_reordered() -> None:
    history, final, sends = good()
    history.reads.clear()
    sends[1].offset, sends[0].offset = 0, 1
    final[PARTITION] = [(0, b"b"), (1, b"a")]
    assert kinds(history, final) == ["reordered"]


def test_records_of_acks_leader_may_be_lost() -> None:
    history, final, sends = good()
    history.reads.clear()
    sends[1].acks = "leader"
    final[PARTITION] = [(0, b"a")]
    assert kinds(history, final) == []
