"""GroupDelivery: the mistakes of others, leasing, and what receipts can do."""

import pytest
from delivery_groups import NORMAL, Lanes, ack, expire, nack, new_group, normal, offsets, row

from raftq.client.common.errors import (
    AlreadySettled,
    InvalidArgument,
    LeaseExpired,
    LeaseForeign,
    LeaseReplaced,
)

# Mistakes of others


def test_mistake_01_reading_a_high_lane_never_skips_records_of_a_lower_one():
    """1. Critical and background records alternate. 2. A reader takes critical ones first.
    3. Every background record still comes."""
    lanes = Lanes()
    for _ in range(50):
        lanes.append(4, 1).append(0, 1)
    group = new_group(lanes)
    seen: list[int] = []
    while grants := group.lease(7, 1.0):
        seen += offsets(grants)
        ack(group, grants, 1.0)
    assert offsets(grants) == []
    assert sorted(seen) == list(range(100))
    assert group.settled.prefix == 100
    assert seen[0] == 1, "critical goes first"


def test_mistake_02_busy_lanes_share_by_weight_and_not_equally():
    lanes = Lanes()
    for _ in range(30):
        for lane in range(5):
            lanes.append(lane, 100)
    group = new_group(lanes, in_flight_max=10_000)
    got = [0] * 5
    for _ in range(10):
        for grant in group.lease(100, 1.0):
            got[grant.lane] += grant.end - grant.start
    assert got == [500, 250, 150, 70, 30]


def test_mistake_03_a_nacked_record_comes_back_after_its_backoff_and_blocks_nobody():
    group = normal(10)
    first, *_ = group.lease(1, 0.0)
    nack(group, first, 0.0)
    assert offsets(group.lease(4, 0.5)) == [1, 2, 3, 4]
    assert group.next_deadline() == 1.0
    (again,) = group.lease(1, 1.0)
    assert (again.start, again.attempt, again.first) == (0, 2, 0.0)
    nack(group, again, 1.0)
    assert offsets(group.lease(1, 2.9)) == [5]
    (third,) = group.lease(1, 3.0)
    assert (third.start, third.attempt) == (0, 3)
    ack(group, [third], 3.0)
    assert group.settled.prefix == 1


def test_mistake_04_an_ack_moves_the_progress_of_the_group():
    group = normal(10)
    grants = group.lease(10, 0.0)
    group.apply(group.ack([(grants[0].nonce, 3, 10)], 1.0))
    assert (group.settled.prefix, group.settled.count_above) == (0, 7)
    group.apply(group.ack([(grants[0].nonce, 0, 3)], 1.0))
    assert (group.settled.prefix, group.settled.count_above) == (10, 0)
    assert group.state.counters.acked == 10
    assert group.in_flight == 0


def test_mistake_05_what_one_group_has_in_flight_is_nothing_to_another():
    lanes = Lanes().append(NORMAL, 5)
    one, two = new_group(lanes, "one"), new_group(lanes, "two", seed=2)
    mine, theirs = one.lease(5, 0.0), two.lease(5, 0.0)
    assert offsets(mine) == offsets(theirs) == [0, 1, 2, 3, 4]
    with pytest.raises(LeaseForeign, match=r"offset 0 .*two"):
        two.ack([row(mine[0])], 1.0)
    ack(one, mine, 1.0)
    assert two.in_flight == 5
    assert two.settled.prefix == 0


def test_mistake_06_a_dead_lettered_offset_does_not_block_the_prefix():
    group = normal(3, max_deliveries=1)
    first, rest = group.lease(1, 0.0)[0], group.lease(2, 0.0)
    ack(group, rest, 0.0)
    letters = nack(group, first, 0.0)
    assert [(each.start, each.end, each.attempt, each.reason) for each in letters] == [
        (0, 1, 1, "max_deliveries")
    ]
    assert group.settled.prefix == 0
    group.apply(group.settle_dead(letters))
    assert group.settled.prefix == 3
    assert group.state.counters.dead == 1
    assert group.lease(1, 100.0) == []


def test_mistake_17_a_lease_that_ran_out_is_reclaimed_and_delivered_again():
    group = normal(3, lease_s=30.0)
    (grant,) = group.lease(3, 0.0, "gone")
    assert group.next_deadline() == 30.0
    assert group.expire(29.9) == ([], [])
    expire(group, 30.0)
    assert group.in_flight == 0
    (again,) = group.lease(3, 30.0, "other")
    assert (again.start, again.end, again.attempt, again.first) == (0, 3, 2, 0.0)
    with pytest.raises(LeaseReplaced, match=r"offset 0 .* g"):
        group.ack([row(grant)], 30.0)
    assert group.state.counters.lease_expired == 3
    assert group.state.counters.redelivered == 3


# Leasing


def test_a_whole_run_is_one_grant_and_one_lease():
    group = normal(10_000)
    (grant,) = group.lease(500, 0.0)
    assert (grant.start, grant.end, grant.attempt, grant.fresh) == (0, 500, 1, True)
    assert len(group.leases) == 1
    assert group.in_flight == 500


def test_records_due_again_go_before_fresh_ones_of_their_lane_oldest_first():
    group = normal(10)
    grants = [group.lease(1, 0.0)[0] for _ in range(4)]
    for grant in (grants[3], grants[1], grants[2]):
        nack(group, grant, 0.0, delay=0.0)
    assert offsets(group.lease(5, 0.0)) == [1, 2, 3, 4, 5]


def test_a_due_range_is_split_when_only_a_part_fits():
    group = normal(10)
    nack(group, group.lease(10, 0.0)[0], 0.0, delay=5.0)
    assert [offsets(group.lease(4, 5.0)) for _ in range(4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [],
    ]
    group.check_invariants()


def test_fresh_grants_jump_over_settled_offsets():
    group = normal(10)
    group.apply(group.skip([(0, 2, 4), (0, 6, 7)]))
    grants = group.lease(10, 0.0)
    assert [(grant.start, grant.end) for grant in grants] == [(0, 2), (4, 6), (7, 10)]
    ack(group, grants, 0.0)
    assert group.settled.prefix == 10
    assert group.state.counters.skipped == 3


def test_each_holder_has_its_own_limit_and_all_share_the_total():
    group = normal(100, in_flight_max=10, in_flight_total_max=15)
    mine = group.lease(50, 0.0, "a")
    assert len(offsets(mine)) == 10
    assert group.lease(1, 0.0, "a") == []
    assert len(offsets(group.lease(50, 0.0, "b"))) == 5
    assert group.lease(1, 0.0, "c") == []
    group.apply(group.ack([(mine[0].nonce, 0, 3)], 0.0))
    assert len(offsets(group.lease(50, 0.0, "a"))) == 3


def test_a_paused_group_gives_nothing_and_its_receipts_still_work():
    group = normal(5)
    grants = group.lease(2, 0.0)
    group.apply(group.pause(True))
    assert group.lease(1, 0.0) == []
    assert not group.has_work(0.0)
    ack(group, grants, 0.0)
    group.apply(group.pause(False))
    assert offsets(group.lease(9, 0.0)) == [2, 3, 4]


def test_a_lease_may_have_its_own_length():
    group = normal(2)
    (grant,) = group.lease(1, 0.0, lease_s=5.0)
    assert grant.deadline == 5.0
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidArgument):
            group.lease(1, 0.0, lease_s=bad)


def test_an_empty_or_negative_request_gives_nothing():
    group = normal(2)
    assert group.lease(0, 0.0) == []
    assert group.lease(-5, 0.0) == []


def test_taking_a_lease_back_leaves_everything_as_it_was():
    """1. Some records wait, some are fresh, in two lanes. 2. A lease of all is taken back.
    3. The state is the same, and the records come again with the same attempts."""
    lanes = Lanes().append(0, 3).append(NORMAL, 3).append(0, 2).append(NORMAL, 2)
    group = new_group(lanes)
    (grant,) = [each for each in group.lease(2, 0.0) if each.start == 0]
    nack(group, grant, 0.0, delay=1.0)
    before = group.state.snapshot()
    grants = group.lease(20, 2.0, "h")
    group.take_back(grants)
    group.check_invariants()
    assert group.state.snapshot() == before
    again = group.lease(20, 2.0, "h")
    assert sorted((g.start, g.end, g.attempt, g.fresh) for g in again) == sorted(
        (g.start, g.end, g.attempt, g.fresh) for g in grants
    )


def test_only_the_last_fresh_grant_of_a_lane_can_be_taken_back():
    group = normal(5)
    first = group.lease(1, 0.0)
    group.lease(1, 0.0)
    with pytest.raises(AssertionError, match="not the lane's last"):
        group.take_back(first)


# Receipts


def test_ack_settles_all_or_nothing():
    group = normal(10)
    one, two = group.lease(3, 0.0)[0], group.lease(3, 0.0)[0]
    ack(group, [one], 1.0)
    before = group.state.snapshot()
    with pytest.raises(AlreadySettled, match=r"offset 0 .* g"):
        group.ack([row(two), row(one)], 1.0)
    assert group.state.snapshot() == before
    ack(group, [two], 1.0)
    assert group.settled.prefix == 6


def test_ack_of_a_range_names_the_first_offset_that_is_not_held():
    group = normal(10)
    (grant,) = group.lease(10, 0.0)
    group.apply(group.ack([(grant.nonce, 4, 6)], 0.0))
    with pytest.raises(AlreadySettled, match="offset 4"):
        group.ack([row(grant)], 0.0)
    with pytest.raises(LeaseExpired, match="offset 10"):
        group.ack([(grant.nonce, 8, 12)], 0.0)


def test_the_same_row_twice_in_one_ack_counts_once():
    group = normal(4)
    (grant,) = group.lease(4, 0.0)
    group.apply(group.ack([row(grant), row(grant)], 0.0))
    assert group.state.counters.acked == 4


def test_a_receipt_is_expired_at_its_deadline_even_before_anybody_looked():
    group = normal(1)
    (grant,) = group.lease(1, 0.0)
    for operation in (
        lambda: group.ack([row(grant)], 30.0),
        lambda: group.nack(*row(grant), 30.0),
        lambda: group.postpone(*row(grant), 30.0, 1.0),
        lambda: group.release([row(grant)], 30.0),
        lambda: group.reject(*row(grant), 30.0, "bad"),
        lambda: group.extend(*row(grant), 30.0, 10.0),
    ):
        with pytest.raises(LeaseExpired, match=r"offset 0 .* g"):
            operation()
    group.ack([row(grant)], 29.999)


def test_the_receipt_of_a_waiting_or_dying_record_is_expired():
    group = normal(2, max_deliveries=1)
    one, two = (group.lease(1, 0.0)[0] for _ in range(2))
    group.apply(group.postpone(*row(one), 0.0, 9.0))
    with pytest.raises(LeaseExpired, match="offset 0"):
        group.ack([row(one)], 1.0)
    letters = nack(group, two, 0.0)
    with pytest.raises(LeaseExpired, match="offset 1"):
        group.ack([row(two)], 1.0)
    with pytest.raises(LeaseExpired, match="offset 1"):
        group.nack(*row(two), 1.0)
    assert len(letters) == 1


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (1, 1), (3, 2)])
def test_a_range_that_is_none_is_an_invalid_argument(start, end):
    group = normal(5)
    (grant,) = group.lease(5, 0.0)
    with pytest.raises(InvalidArgument):
        group.ack([(grant.nonce, start, end)], 0.0)
    if start >= end:
        with pytest.raises(InvalidArgument):
            group.nack(grant.nonce, start, end, 0.0)


def test_a_huge_range_is_refused_without_being_walked():
    group = normal(5)
    (grant,) = group.lease(5, 0.0)
    with pytest.raises(LeaseExpired, match="offset 5"):
        group.ack([(grant.nonce, 0, 1 << 62)], 0.0)


def test_backoff_doubles_up_to_its_cap_and_survives_many_attempts():
    group = normal(1, max_deliveries=2000, backoff_cap_s=60.0)
    now, waits = 0.0, []
    for _ in range(1100):
        (grant,) = group.lease(1, now)
        entry, _ = group.nack(*row(grant), now)
        group.apply(entry)
        due = group.next_deadline()
        waits.append(due - now)
        now = due
    assert waits[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(waits[8:]) == {60}


def test_jitter_spreads_the_waits_within_its_fraction_and_the_cap():
    group = normal(200, jitter=0.5, backoff_s=10.0, backoff_cap_s=12.0)
    dues = set()
    for grant in [group.lease(1, 0.0)[0] for _ in range(200)]:
        entry, _ = group.nack(*row(grant), 0.0)
        dues.add(entry.rows[0].due)
    assert 5.0 <= min(dues) < 7.0
    assert 11.0 < max(dues) <= 12.0
    assert len(dues) > 100


def test_postpone_and_release_spend_no_attempt():
    group = normal(2, max_deliveries=1)
    one, two = (group.lease(1, 0.0)[0] for _ in range(2))
    group.apply(group.postpone(*row(one), 0.0, 5.0))
    group.apply(group.release([row(two)], 0.0))
    group.check_invariants()
    (two_again,) = group.lease(2, 0.0)
    assert (two_again.start, two_again.attempt) == (1, 1)
    (one_again,) = group.lease(2, 5.0)
    assert (one_again.start, one_again.attempt) == (0, 1)
    assert (group.state.counters.postponed, group.state.counters.released) == (1, 1)


def test_release_hands_back_what_is_left_and_ignores_the_rest():
    group = normal(6)
    one, two = (group.lease(3, 0.0)[0] for _ in range(2))
    ack(group, [one], 0.0)
    group.apply(group.ack([(two.nonce, 4, 5)], 0.0))
    group.apply(group.release([row(one), row(two)], 0.0))
    assert offsets(group.lease(6, 0.0)) == [3, 5]
    with pytest.raises(AlreadySettled):
        group.release([row(one)], 0.0)


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf")])
def test_a_delay_that_makes_no_sense_is_refused(delay):
    group = normal(1)
    (grant,) = group.lease(1, 0.0)
    with pytest.raises(InvalidArgument):
        group.nack(*row(grant), 0.0, delay)
    with pytest.raises(InvalidArgument):
        group.postpone(*row(grant), 0.0, delay)
    with pytest.raises(InvalidArgument):
        group.extend(*row(grant), 0.0, delay)


def test_nack_of_a_range_acts_on_the_records_still_held():
    group = normal(6)
    (grant,) = group.lease(6, 0.0)
    group.apply(group.ack([(grant.nonce, 2, 4)], 0.0))
    nack(group, grant, 0.0, delay=0.0)
    assert offsets(group.lease(9, 0.0)) == [0, 1, 4, 5]
    assert group.state.counters.nacked == 4


def test_extend_counts_from_now_and_may_cover_single_records():
    group = normal(4)
    (grant,) = group.lease(4, 0.0)
    group.apply(group.extend(*row(grant), 10.0, 30.0))
    assert group.next_deadline() == 40.0
    group.apply(group.extend(grant.nonce, 1, 2, 10.0, 90.0))
    expire(group, 40.0)
    assert offsets(group.lease(9, 40.0)) == [0, 2, 3]
    group.apply(group.ack([(grant.nonce, 1, 2)], 99.0))
    assert group.state.counters.acked == 1


def test_an_extended_lease_still_expires_when_nobody_asked_for_the_next_deadline():
    for parts in ([(0, 4)], [(0, 2), (2, 4)]):
        group = normal(4)
        (grant,) = group.lease(4, 0.0)
        for start, end in parts:
            group.apply(group.extend(grant.nonce, start, end, 10.0, 40.0))
        assert group.expire(30.0) == ([], [])
        expire(group, 50.0)
        assert group.state.waiting.count == 4


def test_extending_the_whole_lease_replaces_the_deadlines_of_its_parts():
    group = normal(4)
    (grant,) = group.lease(4, 0.0)
    group.apply(group.extend(grant.nonce, 1, 2, 0.0, 90.0))
    group.apply(group.extend(*row(grant), 0.0, 10.0))
    expire(group, 10.0)
    assert group.state.waiting.count == 4


def test_a_lease_with_a_settled_dead_letter_still_expires():
    group = normal(4)
    (grant,) = group.lease(4, 0.0)
    group.apply(group.settle_dead(group.reject(grant.nonce, 0, 2, 0.0, "bad")))
    group.check_invariants()
    assert group.next_deadline() == 30.0
    expire(group, 30.0)
    assert group.state.waiting.count == 2


def test_extend_may_also_shorten():
    group = normal(4)
    (grant,) = group.lease(4, 0.0)
    group.apply(group.extend(grant.nonce, 3, 4, 1.0, 2.0))
    assert group.next_deadline() == 3.0
    expire(group, 3.0)
    assert group.state.waiting.count == 1
    assert group.in_flight == 3
    expire(group, 30.0)
    assert group.state.waiting.count == 4
