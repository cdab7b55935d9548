"""The role of a replica: high watermark, in-sync set, and where two histories part."""

from random import Random

import pytest
from decided_replicas import ALIVE, LAG_S, decided

from raftq.node.replication.replica import ABSENT_LAG_SHARE, Replica, common_end


def leader(end: int = 0, now: float = 0.0, **changes: object) -> Replica:
    replica = Replica(1, LAG_S, lambda node: True)
    replica.lead(decided(**changes), [(end, end)], now)
    return replica


def grow(replica: Replica, old: int, new: int, now: float = 0.0) -> None:
    assert replica.data.log_end == old
    replica.data.on_append(new, new, now)


def test_the_high_watermark_is_the_smallest_end_of_the_set() -> None:
    replica = leader()
    seen: list[int] = []
    replica.data.on_advance = lambda: seen.append(replica.high_watermark)
    grow(replica, 0, 10)
    replica.data.on_progress(2, 22, 10, 0.1)
    assert replica.high_watermark == 0
    replica.data.on_progress(3, 33, 7, 0.1)
    assert replica.high_watermark == 7
    replica.data.on_progress(3, 33, 10, 0.2)
    assert replica.high_watermark == 10
    replica.data.on_progress(3, 33, 10, 0.3)
    assert seen == [7, 10], "each move is passed on once"


def test_a_member_not_heard_of_in_this_epoch_holds_the_high_watermark() -> None:
    replica = leader(end=10)
    replica.data.on_progress(2, 22, 10, 0.1)
    assert replica.high_watermark == 0
    assert not replica.old_epochs_replicated
    replica.data.on_progress(3, 33, 10, 0.1)
    assert replica.high_watermark == 10
    assert replica.old_epochs_replicated


def test_the_high_watermark_stands_while_the_set_is_smaller_than_min_insync() -> None:
    replica = leader(isr=(1,))
    assert not grow(replica, 0, 10)
    assert replica.high_watermark == 0
    assert not replica.may_accept()


def test_one_replica_alone_makes_everything_readable_at_once() -> None:
    replica = leader(replicas=(1,), isr=(1,), min_insync=1)
    grow(replica, 0, 10)
    assert replica.high_watermark == 10


def test_a_follower_that_is_let_in_counts_from_the_proposal_on() -> None:
    replica = leader(isr=(1, 2))
    grow(replica, 0, 10)
    replica.data.on_progress(2, 22, 10, 0.1)
    replica.data.on_progress(3, 33, 10, 0.1)
    change = replica.next_change(ALIVE, 0.2)
    assert change is not None
    assert change.members == ((1, 11), (2, 22), (3, 33))
    grow(replica, 10, 20, 0.3)
    replica.data.on_progress(2, 22, 20, 0.4)
    assert replica.high_watermark == 10, "node 3 may be in the set already, and has only 10"
    replica.data.on_progress(3, 33, 20, 0.5)
    assert replica.high_watermark == 20


def test_a_proposal_of_unknown_outcome_goes_on_to_count() -> None:
    replica = leader(isr=(1, 2))
    grow(replica, 0, 10)
    for node in (2, 3):
        replica.data.on_progress(node, ALIVE[node], 10, 0.1)
    change = replica.next_change(ALIVE, 0.2)
    assert change is not None
    assert replica.awaits(change)
    grow(replica, 10, 20)
    replica.data.on_progress(2, 22, 20, 0.4)
    assert replica.high_watermark == 10
    replica.end_proposal(change, change.version)  # it was refused
    assert not replica.awaits(change)
    assert replica.high_watermark == 20


def test_an_answer_that_came_with_a_newer_version_ends_nothing_before_that_version() -> None:
    """What was answered may be that the change is decided, and the role has not heard of it."""
    replica = leader(isr=(1, 2))
    grow(replica, 0, 10)
    for node in (2, 3):
        replica.data.on_progress(node, ALIVE[node], 10, 0.1)
    change = replica.next_change(ALIVE, 0.2)
    assert change is not None
    grow(replica, 10, 20)
    replica.data.on_progress(2, 22, 20, 0.4)
    replica.end_proposal(change, change.version + 1)
    assert replica.awaits(change)
    assert replica.high_watermark == 10
    replica.update(decided(version=2, isr=(1, 2, 3)), 0.5)
    assert not replica.awaits(change)
    assert replica.high_watermark == 10


def test_what_a_follower_said_under_another_assignment_counts_for_nothing() -> None:
    """Node 3 was moved away and back; the leader sees only that its assignment is another one."""
    replica = leader(isr=(1, 2, 3))
    grow(replica, 0, 10)
    for node in (2, 3):
        replica.data.on_progress(node, ALIVE[node], 10, 0.1)
    assert replica.accepts_reports_of(3, 5, 1)
    replica.update(decided(version=4, isr=(1, 2), assignments=(1, 1, 4)), 0.2)
    assert not replica.accepts_reports_of(3, 5, 1)
    assert replica.accepts_reports_of(3, 5, 4)
    assert not replica.data.is_known(3)
    assert replica.data.is_known(2), "nothing changed for node 2"
    assert replica.next_change(ALIVE, 0.3) is None, "node 3 has told nothing for this assignment"


def test_a_member_of_which_less_counts_than_before_is_not_late_at_once() -> None:
    """The topic asks for syncs from now on: what it had is not all synced yet."""
    replica = leader()
    grow(replica, 0, 10)
    for node in (2, 3):
        replica.data.on_progress(node, ALIVE[node], 10, 0.1)
    replica.data.on_progress(2, 22, 4, 100.0)
    assert replica.next_change(ALIVE, 100.1) is None
    assert replica.next_change(ALIVE, 100.0 + LAG_S + 0.1) is not None


def test_a_follower_that_says_the_same_again_after_a_long_rest_is_not_late() -> None:
    """
    1. It has everything for a long time, and nothing is written.
    2. A record is written; before the follower has it, it tells its old end once more.
    """
    replica = leader()
    grow(replica, 0, 10)
    for node in (2, 3):
        replica.data.on_progress(node, ALIVE[node], 10, 0.1)
    grow(replica, 10, 20, 100.0)
    replica.data.on_progress(2, 22, 10, 100.1)
    replica.data.on_progress(3, 33, 20, 100.1)
    assert replica.next_change(ALIVE, 100.2) is None


def test_a_closed_replica_has_no_role_and_proposes_nothing() -> None:
    replica = leader(isr=(1, 2))
    for node in (2, 3):
        replica.data.on_progress(node, ALIVE[node], 0, 0.1)
    change = replica.next_change(ALIVE, 0.2)
    assert change is not None
    replica.close()
    assert replica.role == "idle"
    assert not replica.awaits(change)
    assert replica.next_change(ALIVE, 9.0) is None


def test_a_member_that_is_put_out_counts_until_that_is_decided() -> None:
    replica = leader()
    grow(replica, 0, 10)
    replica.data.on_progress(2, 22, 10, 0.1)
    change = replica.next_change({1: 11, 2: 22}, 0.2)
    assert change is not None
    assert change.members == ((1, 11), (2, 22))
    assert replica.high_watermark == 0
    replica.update(decided(version=2, isr=(1, 2)), 0.3)
    assert replica.high_watermark == 10


def test_a_follower_that_keeps_up_with_a_busy_leader_is_never_late() -> None:
    """It never has everything at one instant, but is always on its way."""
    replica = leader()
    end = 0
    for second in range(1, 20):
        now = float(second)
        grow(replica, end, end + 100, now)
        end += 100
        for node in (2, 3):
            replica.data.on_progress(node, ALIVE[node], end - 50, now)
        assert replica.next_change(ALIVE, now) is None


def test_a_follower_that_stands_still_is_put_out_after_the_lag() -> None:
    replica = leader()
    replica.data.on_progress(3, 33, 0, 0.1)
    grow(replica, 0, 10, 1.0)
    replica.data.on_progress(2, 22, 10, 1.1)
    assert replica.next_change(ALIVE, LAG_S) is None
    change = replica.next_change(ALIVE, 1.0 + LAG_S + 0.1)
    assert change is not None
    assert change.members == ((1, 11), (2, 22))


def test_an_idle_follower_that_has_everything_is_not_late_however_long_it_is_silent() -> None:
    replica = leader()
    grow(replica, 0, 10, 1.0)
    for node in (2, 3):
        replica.data.on_progress(node, ALIVE[node], 10, 1.1)
    assert replica.next_change(ALIVE, 10_000.0) is None
    grow(replica, 10, 20, 10_000.0)
    assert replica.next_change(ALIVE, 10_001.0) is None


def test_the_set_is_never_proposed_smaller_than_min_insync() -> None:
    replica = leader()
    grow(replica, 0, 10, 1.0)
    change = replica.next_change({1: 11}, 2.0)
    assert change is not None
    assert len(change.members) == 2
    replica.update(decided(version=2, isr=tuple(node for node, _ in change.members)), 2.1)
    assert replica.next_change({1: 11}, 100.0) is None


def test_a_leader_whose_living_followers_all_fell_silent_resigns_once_per_lag() -> None:
    replica = leader()
    grow(replica, 0, 10, 1.0)
    assert not replica.should_resign(ALIVE, 2.9), "a new leader gives everyone the time to come"
    assert replica.should_resign(ALIVE, 3.1)
    assert not replica.should_resign(ALIVE, 6.0)
    assert replica.should_resign(ALIVE, 6.2)


@pytest.mark.parametrize("speaks", [2, 3])
def test_a_leader_that_some_follower_fetches_from_stays(speaks: int) -> None:
    replica = leader()
    grow(replica, 0, 1000, 0.1)
    for step in range(1, 80):
        now = step / 10
        replica.data.on_progress(speaks, ALIVE[speaks], step, now)  # slowly, and always behind
        assert not replica.should_resign(ALIVE, now)


def test_a_leader_that_nobody_talks_to_resigns_though_nothing_waits() -> None:
    """Clients may not get here, either; then nothing would ever wait."""
    replica = leader()
    for node in (2, 3):
        replica.data.on_progress(node, ALIVE[node], 0, 0.1)
    assert not replica.should_resign(ALIVE, 3.0, {2, 3}), "they were heard in this epoch"
    assert not replica.should_resign(ALIVE, 3.2, {2}), "one of them talks about something else"
    assert replica.should_resign(ALIVE, 3.2, {2, 3})
    assert not replica.should_resign(ALIVE, 6.0, {2, 3})


def test_a_leader_with_one_late_and_one_silent_follower_resigns() -> None:
    replica = leader()
    replica.data.on_progress(3, 33, 0, 0.1)
    grow(replica, 0, 10, 1.0)
    replica.data.on_progress(2, 22, 10, 1.1)
    assert not replica.should_resign(ALIVE, 4.2), "one has everything, so nothing is said"
    assert replica.should_resign(ALIVE, 4.2, {2, 3})


def test_a_leader_without_anything_that_waits_stays() -> None:
    replica = leader()
    for node in (2, 3):
        replica.data.on_progress(node, ALIVE[node], 0, 0.1)
    assert not replica.should_resign(ALIVE, 100.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_insync": 1},  # it goes on alone
        {"isr": (1,)},  # nobody else has everything
    ],
)
def test_a_leader_that_nobody_could_replace_stays(changes: dict[str, object]) -> None:
    replica = leader(**changes)
    grow(replica, 0, 10)
    assert not replica.should_resign(ALIVE, 10.0)


def test_a_leader_whose_followers_are_too_few_without_it_stays() -> None:
    replica = leader()
    grow(replica, 0, 10)
    assert not replica.should_resign({1: 11, 2: 22}, 10.0), "one is dead, and one may be paused"
    assert replica.should_resign(ALIVE, 10.0)


def test_a_follower_does_not_resign() -> None:
    replica = leader()
    grow(replica, 0, 10)
    replica.follow(decided(epoch=6, leader=2))
    assert not replica.should_resign(ALIVE, 10.0)


def test_a_member_that_never_came_to_a_new_leader_is_put_out_sooner_when_records_wait() -> None:
    """
    1. A leader begins, one member comes, the other never does, and records wait for it.
    2. It is put out after a part of the lag: whoever wrote has waited for the last leader already.
    """
    replica = leader(end=10)
    replica.data.on_progress(2, 22, 10, 0.1)
    assert replica.next_change(ALIVE, LAG_S * ABSENT_LAG_SHARE) is None
    change = replica.next_change(ALIVE, LAG_S * ABSENT_LAG_SHARE + 0.1)
    assert change is not None
    assert change.members == ((1, 11), (2, 22))


def test_a_member_that_came_has_all_the_time_to_catch_up() -> None:
    replica = leader(end=10)
    replica.data.on_progress(2, 22, 10, 0.1)
    replica.data.on_progress(3, 33, 4, 0.1)
    assert replica.next_change(ALIVE, LAG_S - 0.1) is None


def test_a_member_that_never_came_is_not_hurried_when_nothing_waits() -> None:
    replica = leader()
    replica.data.on_progress(2, 22, 0, 0.1)
    assert replica.next_change(ALIVE, LAG_S - 0.1) is None


def test_a_new_leader_that_nobody_came_to_keeps_the_set() -> None:
    replica = leader(end=10)
    assert replica.next_change(ALIVE, LAG_S - 0.1) is None


def test_a_late_but_living_member_is_kept_before_a_dead_one() -> None:
    replica = leader()
    grow(replica, 0, 10, 1.0)
    change = replica.next_change({1: 11, 3: 33}, 100.0)
    assert change is not None
    assert change.members == ((1, 11), (3, 33))


def test_a_restarted_follower_is_let_in_only_under_its_new_incarnation() -> None:
    replica = leader(isr=(1, 2))
    grow(replica, 0, 10)
    replica.data.on_progress(2, 22, 10, 0.1)
    replica.data.on_progress(3, 33, 10, 0.1)
    assert replica.next_change({**ALIVE, 3: 99}, 0.2) is None
    replica.data.on_progress(3, 99, 10, 0.3)
    change = replica.next_change({**ALIVE, 3: 99}, 0.4)
    assert change is not None
    assert (3, 99) in change.members


def test_a_follower_is_not_let_in_before_it_has_what_the_epoch_began_with() -> None:
    """The new leader's own high watermark may be older than what was acknowledged before."""
    replica = leader(end=50, isr=(1, 2))
    replica.data.on_progress(3, 33, 20, 0.1)
    assert replica.high_watermark == 0
    assert replica.next_change(ALIVE, 0.2) is None


def test_an_older_epoch_is_an_error_of_the_caller() -> None:
    replica = leader()
    with pytest.raises(AssertionError):
        replica.follow(decided(epoch=4, leader=2))


class _Node:
    """A log as a list of epochs, one per offset."""

    def __init__(self) -> None:
        self.log: list[int] = []

    def history(self) -> list[tuple[int, int]]:
        return [
            (epoch, at) for at, epoch in enumerate(self.log) if at == 0 or self.log[at - 1] != epoch
        ]


def _naive(one: list[int], other: list[int]) -> int:
    at = 0
    while at < min(len(one), len(other)) and one[at] == other[at]:
        at += 1
    return at


@pytest.mark.parametrize("seed", range(200))
def test_common_end_is_where_random_histories_part(seed: int) -> None:
    """Leaders come and go; followers copy some of it and are cut when they return."""
    rng = Random(seed)
    nodes = [_Node() for _ in range(3)]
    for epoch in range(1, 15):
        at = rng.randrange(3)
        chief = nodes[at]
        followers = [one for one in nodes if one is not chief and rng.random() < 0.6]
        for follower in followers:
            point = common_end(
                chief.history(), len(chief.log), follower.history(), len(follower.log)
            )
            assert point == _naive(chief.log, follower.log)
            del follower.log[point:]
            follower.log += chief.log[point : point + rng.randint(0, 40)]
        for _ in range(rng.randint(0, 5)):
            chief.log += [epoch] * rng.randint(1, 4)
            for follower in followers:
                if rng.random() < 0.7:
                    have = len(follower.log)
                    follower.log += chief.log[have : have + rng.randint(0, 6)]


def test_common_end_of_a_history_that_was_sent_in_part_is_its_start() -> None:
    leader_history = [(1, 0), (7, 10)]
    assert common_end(leader_history, 50, [(3, 20), (4, 30)], 40) == 20


def test_an_empty_log_has_nothing_to_disagree_about() -> None:
    assert common_end([(1, 0)], 50, [], 0) == 0
    assert common_end([], 0, [], 0) == 0
    assert common_end([], 0, [(2, 0)], 9) == 0
