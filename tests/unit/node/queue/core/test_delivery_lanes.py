"""Deficit round robin: shares, turns across calls, starvation."""

import random

import pytest

from raftq.node.queue.core.lanes import LANES, STARVATION_S, WEIGHTS, DeficitRoundRobin


class Supply:
    """Lanes with so many records each; takes out what a plan says."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self.asked: list[int] = []

    def available(self, lane: int, bound: int) -> int:
        self.asked.append(bound)
        return min(self.counts[lane], bound)

    def serve(self, turns: DeficitRoundRobin, records_max: int, now: float = 0.0):
        plan = turns.plan(self.available, records_max, now)
        for lane, count in plan:
            assert 0 < count <= self.counts[lane]
            self.counts[lane] -= count
        assert sum(count for _, count in plan) <= records_max
        assert len({lane for lane, _ in plan}) == len(plan)
        return plan


def busy() -> Supply:
    return Supply([10**9] * LANES)


def shares(sizes, records: int = 100_000) -> list[float]:
    turns = DeficitRoundRobin(0.0)
    supply = busy()
    got = [0] * LANES
    while sum(got) < records:
        for lane, count in supply.serve(turns, next(sizes)):
            got[lane] += count
    return [100 * count / sum(got) for count in got]


def sizes_of(kind):
    rng = random.Random(11)
    while True:
        yield rng.choice((1, 2, 7, 33, 100, 500, 1000)) if kind == "random" else kind


@pytest.mark.parametrize("kind", [1, 7, 100, 500, "random"])
def test_shares_are_within_two_points_of_the_weights_for_any_call_size(kind):
    for share, weight in zip(shares(sizes_of(kind)), WEIGHTS, strict=True):
        assert abs(share - weight) < 2


def test_mistake_02_weighted_queuing_does_not_give_each_lane_a_fifth():
    for kind in (1, 5, 500):
        got = shares(sizes_of(kind), 20_000)
        assert got[0] > 45, "one equal turn per round would give 20"
        assert got[4] < 5, "one equal turn per round would give 20"


def test_calls_for_one_record_give_the_same_sequence_of_turns_as_one_call_for_many():
    one_by_one = DeficitRoundRobin(0.0)
    at_once = DeficitRoundRobin(0.0)
    supply = busy()
    for size in (100, 37, 163, 500, 1, 250):
        counts = [0] * LANES
        for _ in range(size):
            ((lane, count),) = supply.serve(one_by_one, 1)
            counts[lane] += count
        planned = dict(supply.serve(at_once, size))
        assert [planned.get(lane, 0) for lane in range(LANES)] == counts


def test_a_call_that_runs_out_of_budget_stays_on_its_lane_with_the_rest_of_its_turn():
    turns = DeficitRoundRobin(0.0)
    supply = busy()
    assert supply.serve(turns, 30) == [(0, 30)]
    assert supply.serve(turns, 30) == [(0, 20), (1, 10)]
    assert supply.serve(turns, 15) == [(1, 15)]
    assert supply.serve(turns, 25) == [(2, 15), (3, 7), (4, 3)]


def test_a_lane_without_records_loses_its_deficit():
    turns = DeficitRoundRobin(0.0)
    supply = Supply([5, 10**6, 0, 0, 0])
    assert supply.serve(turns, 20) == [(0, 5), (1, 15)]
    supply.counts[0] = 1000
    # Lane 1 has 10 left of its turn; lane 0 gets a new turn of 50, not 50 + 45.
    assert supply.serve(turns, 60) == [(0, 50), (1, 10)]
    assert supply.serve(turns, 1) == [(1, 1)]


def test_one_busy_lane_gets_everything_at_once_without_a_loop_of_small_turns():
    turns = DeficitRoundRobin(0.0)
    supply = Supply([0, 0, 0, 0, 10**7])
    assert supply.serve(turns, 1_000_000) == [(4, 1_000_000)]
    assert len(supply.asked) <= 2 * LANES


def test_a_big_call_over_many_rounds_asks_each_lane_once():
    turns = DeficitRoundRobin(0.0)
    supply = Supply([0, 0, 0, 10**7, 10**7])
    assert supply.serve(turns, 1_000_000) == [(3, 700_000), (4, 300_000)]
    assert len(supply.asked) <= 2 * LANES
    assert max(supply.asked) <= 1_000_000


def test_lanes_that_run_dry_leave_their_share_to_the_others():
    turns = DeficitRoundRobin(0.0)
    supply = Supply([60, 3, 0, 40, 500])
    assert supply.serve(turns, 400) == [(0, 60), (1, 3), (3, 40), (4, 297)]
    assert supply.serve(turns, 400) == [(4, 203)]
    assert supply.serve(turns, 400) == []


def test_a_lane_with_records_is_served_first_when_it_starved():
    turns = DeficitRoundRobin(0.0)
    supply = busy()
    assert supply.serve(turns, 1, now=0.0) == [(0, 1)]
    assert supply.serve(turns, 1, now=STARVATION_S - 0.1) == [(0, 1)]
    assert [supply.serve(turns, 1, now=STARVATION_S)[0][0] for _ in range(4)] == [1, 2, 3, 4]
    assert supply.serve(turns, 1, now=STARVATION_S) == [(0, 1)]


def test_a_starving_lane_comes_before_critical_in_a_call_for_many():
    turns = DeficitRoundRobin(0.0)
    supply = Supply([10**6, 0, 0, 0, 10**6])
    supply.serve(turns, 40, now=1.0)
    plan = supply.serve(turns, 10, now=1.0 + STARVATION_S)
    assert plan[0][0] == 4
    assert dict(plan) == {4: 1, 0: 9}


def test_an_empty_lane_does_not_starve_and_its_wait_begins_when_it_has_records():
    turns = DeficitRoundRobin(0.0)
    supply = Supply([10**6, 0, 0, 0, 0])
    for second in range(100):
        assert supply.serve(turns, 60, now=float(second)) == [(0, 60)]
    supply.counts[4] = 10
    assert supply.serve(turns, 1, now=99.0 + STARVATION_S - 1) == [(0, 1)]
    assert supply.serve(turns, 1, now=99.0 + STARVATION_S) == [(4, 1)]


@pytest.mark.parametrize("seconds", [0.01, 1.0, 7.0])
def test_no_lane_waits_longer_than_the_bound_and_slow_calls_keep_the_shares(seconds):
    turns = DeficitRoundRobin(0.0)
    supply = busy()
    last = [0.0] * LANES
    got = [0] * LANES
    for step in range(1, 20_000):
        now = step * seconds
        ((lane, count),) = supply.serve(turns, 1, now)
        got[lane] += count
        last[lane] = now
        assert now - min(last) <= STARVATION_S + LANES * seconds
    if seconds < 1:
        for count, weight in zip(got, WEIGHTS, strict=True):
            assert abs(100 * count / sum(got) - weight) < 2
