"""GroupDelivery: dead letters, what its entries do, and what it costs."""

import random
import timeit

import pytest
from delivery_groups import NORMAL, Lanes, ack, nack, new_group, normal, offsets, row

from raftq.client.common.errors import (
    AlreadySettled,
    ConfigError,
    InvalidArgument,
    LeaseExpired,
    LeaseReplaced,
)
from raftq.node.queue.core import entries
from raftq.node.queue.core.group_delivery import DeliveryConfig, GroupDelivery

# Dead letters


def test_a_record_whose_attempts_are_spent_dies_at_expiry_and_only_once():
    group = normal(2, max_deliveries=1)
    (grant,) = group.lease(2, 0.0, "h")
    found, letters = group.expire(30.0)
    assert found == []
    assert [(each.nonce, each.start, each.end, each.first, each.last) for each in letters] == [
        (grant.nonce, 0, 2, 0.0, 0.0)
    ]
    assert (group.in_flight, group.leases.dying) == (0, 2)
    assert group.expire(1000.0) == ([], [])
    assert group.next_deadline() is None
    assert group.lease(2, 1000.0) == []
    group.apply(group.settle_dead(letters))
    group.check_invariants()
    assert group.settled.prefix == 2


def test_a_spared_record_is_looked_at_again_when_its_time_comes():
    group = normal(1, max_deliveries=1)
    group.lease(1, 0.0)
    before = group.state.snapshot()
    _, letters = group.expire(30.0)
    group.unmark_dying(letters, 35.0)
    assert group.state.snapshot() == before
    assert group.next_deadline() == 35.0
    assert group.expire(34.0) == ([], [])
    assert group.expire(35.0)[1] == letters


def test_a_rejected_record_that_is_spared_belongs_to_its_receipt_again():
    group = normal(3)
    (grant,) = group.lease(3, 0.0)
    letters = group.reject(grant.nonce, 1, 2, 1.0, "bad json")
    assert [(each.start, each.end, each.reason) for each in letters] == [(1, 2, "bad json")]
    with pytest.raises(LeaseExpired, match="offset 1"):
        group.ack([row(grant)], 1.0)
    group.unmark_dying(letters, 2.0)
    group.check_invariants()
    ack(group, [grant], 2.0)
    assert group.settled.prefix == 3


def test_dying_records_do_not_use_up_the_limits_of_their_holder():
    group = normal(4, max_deliveries=1, in_flight_max=2)
    (grant,) = group.lease(4, 0.0, "h")
    group.reject(*row(grant), 0.0, "bad")
    assert offsets(group.lease(4, 0.0, "h")) == [2, 3]


def test_records_whose_time_to_live_ended_are_settled_and_counted():
    group = normal(3)
    (grant,) = group.lease(3, 0.0)
    group.apply(group.expired_entry([(grant.nonce, 0, 2)]))
    group.check_invariants()
    assert group.settled.prefix == 2
    assert group.state.counters.ttl_expired == 2
    assert group.in_flight == 1


# The ledger


def test_an_operation_changes_nothing_until_its_entry_is_applied():
    group = normal(10)
    (grant,) = group.lease(10, 0.0)
    before = group.state.snapshot()
    group.ack([row(grant)], 1.0)
    group.nack(*row(grant), 1.0)
    group.postpone(*row(grant), 1.0, 1.0)
    group.release([row(grant)], 1.0)
    group.extend(*row(grant), 1.0, 1.0)
    group.reset(5)
    group.pause(True)
    group.clip(3)
    group.advance(4)
    group.expire(30.0)
    assert group.state.snapshot() == before
    assert group.expire(30.0) == group.expire(30.0)


def test_an_entry_applied_twice_does_nothing_the_second_time():
    group = normal(4)
    one, two = (group.lease(2, 0.0)[0] for _ in range(2))
    acked = group.ack([row(one)], 0.0)
    returned, _ = group.nack(*row(two), 0.0)
    group.apply(acked)
    group.apply(returned)
    before = group.state.snapshot()
    group.apply(acked)
    group.apply(returned)
    group.apply(entries.ExtendedEntry("g", (entries.ExtendRow(two.nonce, 2, 4, 99.0),)))
    assert group.state.snapshot() == before


def test_after_a_crash_every_lease_is_abandoned_with_its_attempt_spent():
    """1. One record on its last attempt, two on their first. 2. Only entries survive.
    3. abandon() gives the last one up and returns the others."""
    group = normal(3, max_deliveries=2)
    kept = []
    first = group.lease(1, 0.0, "h")
    kept.append(group.granted_entry(first, 0.0, "h"))
    returned, _ = group.nack(*row(first[0]), 0.0, 0.0)
    group.apply(returned)
    kept.append(returned)
    rest = group.lease(3, 1.0, "h")
    kept.append(group.granted_entry(rest, 1.0, "h"))

    reopened = normal(3, max_deliveries=2, seed=9)
    for entry in entries.unpack(entries.pack(kept)):
        reopened.apply(entry)
    assert reopened.state.snapshot() == group.state.snapshot()
    found, letters = reopened.abandon(5.0)
    for entry in found:
        reopened.apply(entry)
    reopened.check_invariants()
    assert [(each.start, each.attempt) for each in letters] == [(0, 2)]
    assert [(g.start, g.end, g.attempt) for g in reopened.lease(5, 5.0)] == [(1, 3, 2)]


def test_reset_replays_from_an_offset_and_forgets_leases_and_waits():
    group = normal(6)
    one, two = (group.lease(2, 0.0)[0] for _ in range(2))
    ack(group, [one], 0.0)
    nack(group, two, 0.0)
    (three,) = group.lease(2, 0.0)
    group.apply(group.reset(1))
    group.check_invariants()
    assert (group.in_flight, group.state.waiting.count) == (0, 0)
    with pytest.raises(LeaseExpired):
        group.ack([row(three)], 0.0)
    assert offsets(group.lease(9, 0.0)) == [1, 2, 3, 4, 5]
    with pytest.raises(InvalidArgument):
        group.reset(-1)


def test_reset_to_the_end_purges():
    group = normal(6)
    (grant,) = group.lease(2, 0.0)
    group.apply(group.reset(6))
    assert not group.has_work(100.0)
    with pytest.raises(AlreadySettled):
        group.ack([row(grant)], 0.0)


def test_clip_forgets_what_the_data_log_lost_and_delivers_what_comes_in_its_place():
    """1. Leased, waiting, settled and dead records on both sides of the cut. 2. Cut at 5.
    3. New records at the same offsets are fresh, and old receipts are not valid for them."""
    lanes = Lanes().append(NORMAL, 12)
    group = new_group(lanes)
    leased, waits, done = (group.lease(4, 0.0)[0] for _ in range(3))
    nack(group, waits, 0.0, delay=50.0)
    ack(group, [done], 0.0)
    group.apply(group.clip(5))
    group.check_invariants()
    assert (group.in_flight, group.state.waiting.count, group.settled.count_above) == (4, 1, 0)
    assert offsets(group.lease(20, 0.0)) == [5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(LeaseReplaced):
        group.ack([row(done)], 0.0)
    group.apply(group.clip(2))
    group.check_invariants()
    assert (group.in_flight, group.state.waiting.count) == (2, 0)
    group.apply(group.ack([(leased.nonce, 0, 2)], 0.0))
    assert group.settled.prefix == 2


def test_advance_skips_what_retention_dropped_in_whatever_state_it_is():
    group = normal(12)
    leased, waits = (group.lease(4, 0.0)[0] for _ in range(2))
    nack(group, waits, 0.0, delay=0.0)
    group.apply(group.advance(6))
    group.check_invariants()
    assert group.settled.prefix == 6
    with pytest.raises(AlreadySettled):
        group.ack([row(leased)], 0.0)
    assert offsets(group.lease(20, 0.0)) == list(range(6, 12))


def test_advance_over_a_gigantic_gap_fits_into_packed_rows_and_is_quick():
    group = normal(1)
    (entry,) = entries.unpack(entries.pack([group.advance(1 << 36)]))
    group.apply(entry)
    assert group.settled.prefix == 1 << 36
    assert group.state.cursors == [1 << 36] * 5


def test_a_deleted_group_gives_nothing_until_it_is_created_again():
    group = normal(3)
    group.lease(1, 0.0)
    group.apply(entries.DeletedEntry("g"))
    assert group.lease(1, 0.0) == []
    assert "deleted" in group.state.describe()
    group.apply(entries.CreatedEntry("g", 1))
    assert offsets(group.lease(9, 0.0)) == [1, 2]


def test_an_entry_of_another_group_is_a_broken_invariant():
    with pytest.raises(AssertionError):
        normal(1).apply(entries.CreatedEntry("other", 0))


def test_questions_about_pending_records_tell_fresh_due_and_waiting():
    lanes = Lanes().append(0, 4).append(NORMAL, 6)
    group = new_group(lanes)
    grants = group.lease(10, 0.0)
    assert not group.has_work(0.0)
    critical = next(each for each in grants if each.lane == 0)
    nack(group, critical, 0.0, delay=3.0)
    lanes.append(4, 7)
    assert group.pending_by_lane() == [4, 0, 0, 0, 7]
    assert group.pending_by_lane(1.0) == [0, 0, 0, 0, 7]
    assert group.pending(3.0) == 11
    assert group.has_work(0.0)


def test_next_deadline_does_not_name_a_due_record_that_was_announced():
    """Otherwise a shell without consumers would wake up for it again and again."""
    group = normal(1)
    nack(group, group.lease(1, 0.0)[0], 0.0, delay=2.0)
    assert group.next_deadline() == 2.0
    group.expire(2.0)
    assert group.next_deadline() is None
    assert group.has_work(2.0)


def test_config_reports_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        DeliveryConfig(
            lease_s=0, max_deliveries=0, backoff_s=-1, jitter=2, weights=(1, 2), in_flight_max=True
        )
    for name in ("lease_s", "max_deliveries", "backoff_s", "jitter", "weights", "in_flight_max"):
        assert name in str(caught.value)


# Cost


def test_nonces_are_drawn_again_when_they_collide():
    class Repeating(random.Random):
        drawn = iter([0, 5, 5, 5, 6])

        def getrandbits(self, k: int) -> int:
            return next(self.drawn)

    lanes = Lanes().append(NORMAL, 2)
    group = GroupDelivery("g", DeliveryConfig(), lanes, Repeating(), 0, 0.0)
    group._tag = 0
    assert [group.lease(1, 0.0)[0].nonce for _ in range(2)] == [5, 6]


def test_a_mass_expiry_is_handled_in_bounded_steps():
    group = normal(10_000, in_flight_max=10_000)
    for _ in range(10_000):
        group.lease(1, 0.0)
    steps = 0
    while (answer := group.expire(30.0)) != ([], []):
        for entry in answer[0]:
            assert len(entry.rows) <= 4096
            group.apply(entry)
        steps += 1
    assert steps == 3
    assert group.state.waiting.count == 10_000


def test_leases_that_were_settled_do_not_pile_up_in_the_deadline_heap():
    group = normal(20_000)
    for _ in range(20_000):
        (grant,) = group.lease(1, 0.0)
        group.apply(group.ack([row(grant)], 0.0))
    assert len(group.leases._heap) < 2000


@pytest.mark.full
def test_the_cost_of_one_record_does_not_grow_with_half_a_million_in_flight():
    group = normal(10**6, in_flight_max=10**6)

    def lease_and_ack() -> None:
        (grant,) = group.lease(1, 1.0, "h")
        group.apply(group.ack([row(grant)], 1.0))

    def refuse() -> None:
        with pytest.raises(LeaseExpired):
            group.ack([(group._tag << 48, 900_000, 900_001)], 1.0)

    before = min(timeit.repeat(lease_and_ack, number=200, repeat=10))
    refused_before = min(timeit.repeat(refuse, number=50, repeat=5))
    for _ in range(500_000):
        group.lease(1, 1.0, "h")
    after = min(timeit.repeat(lease_and_ack, number=200, repeat=10))
    refused_after = min(timeit.repeat(refuse, number=50, repeat=5))
    assert group.in_flight == 500_000
    assert after < 5 * before
    assert refused_after < 20 * refused_before


def test_a_backlog_of_any_size_costs_the_same_number_of_looks():
    looks = []
    for backlog in (1000, 10**9):
        lanes = Lanes().append(NORMAL, backlog)
        group = new_group(lanes)
        group.lease(500, 0.0)
        looks.append(lanes.looks)
    assert looks[0] == looks[1] <= 10
