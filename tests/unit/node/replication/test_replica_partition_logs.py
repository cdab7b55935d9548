"""A role over several logs: one in-sync set for all, a high watermark for each."""

from random import Random

import pytest
from decided_replicas import ALIVE, LAG_S, decided

from raftq.node.replication.replica import Replica


def leader(*ends: int, **changes: object) -> Replica:
    replica = Replica(1, LAG_S, lambda node: True)
    for _ in ends[1:]:
        replica.open_log(0, 0, 0.0)
    replica.lead(decided(**changes), [(end, end) for end in ends], 0.0)
    return replica


def tell(replica: Replica, node: int, *ends: int, now: float = 0.1) -> None:
    for progress, end in zip(replica.logs, ends, strict=False):
        progress.on_progress(node, ALIVE[node], end, now)


def watermarks(replica: Replica) -> list[int]:
    return [progress.high_watermark for progress in replica.logs]


def test_every_log_has_its_own_high_watermark() -> None:
    replica = leader(0, 0, 0)
    for progress in replica.logs:
        progress.on_append(10, 10, 0.1)
    tell(replica, 2, 10, 4, 10)
    tell(replica, 3, 7, 10)
    assert watermarks(replica) == [7, 4, 0], "node 3 has not said anything of the third"
    tell(replica, 3, 7, 10, 9)
    assert watermarks(replica) == [7, 4, 9]


def test_a_follower_is_let_in_when_it_is_ready_in_every_log() -> None:
    replica = leader(0, 5, 0, isr=(1, 2))
    replica.data.on_append(10, 10, 0.1)
    tell(replica, 2, 10, 5, 0)
    assert watermarks(replica) == [10, 5, 0]
    tell(replica, 3, 10)
    assert replica.next_change(ALIVE, 0.2) is None, "nothing is known of two logs"
    tell(replica, 3, 10, 4, 0)
    assert replica.next_change(ALIVE, 0.2) is None, "a record of the second is missing"
    tell(replica, 3, 10, 5, 0)
    change = replica.next_change(ALIVE, 0.2)
    assert change is not None
    assert [node for node, _ in change.members] == [1, 2, 3]


def test_whoever_is_let_in_counts_in_every_log_from_the_proposal_on() -> None:
    replica = leader(0, 0, isr=(1, 2))
    tell(replica, 2, 0, 0)
    tell(replica, 3, 0, 0)
    assert replica.next_change(ALIVE, 0.2) is not None
    replica.logs[1].on_append(4, 4, 0.3)
    tell(replica, 2, 0, 4)
    assert watermarks(replica) == [0, 0], "node 3 may be elected by now"
    tell(replica, 3, 0, 4)
    assert watermarks(replica) == [0, 4]


@pytest.mark.parametrize("partition_log", [0, 1, 2])
def test_a_follower_that_is_late_in_one_log_is_put_out(partition_log: int) -> None:
    replica = leader(0, 0, 0)
    for node in (2, 3):
        tell(replica, node, 0, 0, 0)
    assert not replica.is_behind()
    replica.logs[partition_log].on_append(10, 10, 1.0)
    replica.logs[partition_log].on_progress(2, 22, 10, 1.1)
    assert replica.is_behind()
    assert replica.next_change(ALIVE, LAG_S) is None
    change = replica.next_change(ALIVE, 1.0 + LAG_S + 0.1)
    assert change is not None
    assert [node for node, _ in change.members] == [1, 2]
    assert watermarks(replica)[partition_log] == 0
    replica.update(decided(version=2, isr=(1, 2)), 5.0)
    assert watermarks(replica)[partition_log] == 10


def test_a_restarted_follower_is_ready_only_in_the_logs_it_has_spoken_of_since() -> None:
    """What the process before it had of a log may be lost."""
    replica = leader(10, 10, isr=(1, 2))
    tell(replica, 2, 10, 10)
    tell(replica, 3, 10, 10)
    again = {**ALIVE, 3: 99}
    replica.logs[0].on_progress(3, 99, 10, 0.2)
    assert replica.next_change(again, 0.3) is None
    replica.logs[1].on_progress(3, 99, 8, 0.3)
    assert replica.next_change(again, 0.4) is None
    replica.logs[1].on_progress(3, 99, 10, 0.4)
    change = replica.next_change(again, 0.5)
    assert change is not None
    assert (3, 99) in change.members


def test_a_log_may_be_opened_while_the_partition_is_led() -> None:
    replica = leader(10)
    tell(replica, 2, 10)
    tell(replica, 3, 10)
    assert replica.next_change(ALIVE, 100.0) is None
    ledger = replica.open_log(0, 0, 100.0)
    assert list(ledger.followers) == [2, 3]
    assert ledger.old_epochs_replicated
    ledger.on_append(3, 3, 100.0)
    tell(replica, 2, 10, 3, now=100.1)
    assert watermarks(replica) == [10, 0]
    assert replica.next_change(ALIVE, 100.0 + LAG_S - 0.1) is None, "everyone gets the time to come"
    change = replica.next_change(ALIVE, 100.0 + LAG_S + 0.1)
    assert change is not None
    assert [node for node, _ in change.members] == [1, 2]


def test_a_log_that_a_follower_opens_counts_once_it_leads() -> None:
    replica = Replica(1, LAG_S, lambda node: True)
    replica.follow(decided(epoch=4, leader=2))
    ledger = replica.open_log(7, 7, 0.0)
    assert not ledger.followers
    ledger.advance()
    assert ledger.high_watermark == 0
    replica.lead(decided(), [(5, 5), (7, 7)], 1.0)
    assert (ledger.epoch_start, ledger.log_end) == (7, 7)
    assert not ledger.old_epochs_replicated
    tell(replica, 2, 5, 7)
    tell(replica, 3, 5, 7)
    assert watermarks(replica) == [5, 7]
    assert replica.old_epochs_replicated
    assert ledger.old_epochs_replicated


def test_all_high_watermarks_stand_while_the_set_is_too_small() -> None:
    replica = leader(0, 0, isr=(1,))
    for progress in replica.logs:
        progress.on_append(10, 10, 0.1)
    assert watermarks(replica) == [0, 0]
    replica.update(decided(version=2, isr=(1,), min_insync=1), 0.2)
    assert watermarks(replica) == [10, 10]


@pytest.mark.parametrize("seed", range(50))
def test_whoever_may_be_elected_has_everything_readable_of_every_log(seed: int) -> None:
    """Random growth, progress, restarts and changes of the set, some of unknown outcome."""
    rng = Random(seed)
    replica = leader(0, 0, 0)
    have = {node: [0, 0, 0] for node in (2, 3)}
    alive, isr, version, now = dict(ALIVE), (1, 2, 3), 1, 0.0
    for _ in range(400):
        now += rng.random()
        what = rng.randrange(8)
        if what < 2:
            progress = rng.choice(replica.logs)
            progress.on_append(progress.log_end + 1, progress.log_end + 1, now)
        elif what < 6:
            node, partition_log = rng.choice((2, 3)), rng.randrange(3)
            end = replica.logs[partition_log].log_end
            have[node][partition_log] = rng.randint(have[node][partition_log], end)
            replica.logs[partition_log].on_progress(
                node, alive[node], have[node][partition_log], now
            )
        elif what == 6 and rng.random() < 0.2:
            node = rng.choice((2, 3))
            alive[node] += 100
            if node in isr and len(isr) > 1:  # it lost its tail, and says so
                have[node] = [rng.randint(0, end) for end in have[node]]
                isr, version = tuple(one for one in isr if one != node), version + 1
                replica.update(decided(version=version, isr=isr), now)
        elif (change := replica.next_change(alive, now)) is not None:
            if rng.random() < 0.7:
                isr, version = tuple(node for node, _ in change.members), version + 1
                replica.update(decided(version=version, isr=isr), now)
            replica.end_proposal(change, version)
        for node in isr:
            if node != 1:
                readable = [progress.high_watermark for progress in replica.logs]
                assert all(a >= b for a, b in zip(have[node], readable, strict=True)), (
                    node, have[node], replica.describe(),
                )  # fmt: skip
    assert min(watermarks(replica)) > 0
