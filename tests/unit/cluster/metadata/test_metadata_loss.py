"""What a node that lost data costs: judged by what was promised while it wrote."""

import pytest
from metadatamodel import Cluster, register
from msgspec.structs import replace

from raftq.client.common.errors import (
    FencedEpoch,
    InvalidArgument,
    NodeIdTaken,
    UnknownPartition,
)
from raftq.cluster.metadata.apply import dump, load
from raftq.cluster.metadata.commands import AlterTopic, CreateTopic, MoveReplicas, TellEnds


def test_fsync_always_excuses_no_tail_that_was_written_before_it() -> None:
    """1. The topic syncs in intervals; 1 and 3 are in sync, and 3 loses power with its tail.
    2. The topic is altered to `always` while 3 is down, and 1 is away for a moment.
    3. 3 is back first. It must not lead: 1 has what 3 lost, and would be cut to it.
    """
    cluster = Cluster()
    cluster.create(fsync="interval", min_insync=2)
    cluster.isr(1, 3)
    cluster.fence(3)
    cluster.apply(AlterTopic("t", {"fsync": "always"}))
    cluster.fence(1)
    cluster.apply(replace(register(3, 2, lost="tail"), before=1))
    assert (cluster.at().isr, cluster.at().leader) == ((1,), None)


def test_an_excuse_ends_when_the_topic_was_not_always_synced_meanwhile() -> None:
    cluster = Cluster()
    cluster.create(fsync="always")
    cluster.apply(AlterTopic("t", {"fsync": "interval"}))
    cluster.apply(AlterTopic("t", {"fsync": "always"}))
    cluster.apply(register(1, 2, lost="tail"))
    assert cluster.at().isr == (2, 3)


def test_a_node_that_registered_after_the_change_is_excused() -> None:
    cluster = Cluster()
    cluster.create(fsync="interval")
    cluster.apply(AlterTopic("t", {"fsync": "always"}))
    cluster.apply(register(1, 2, lost="tail"))
    cluster.isr(1, 2, 3)
    cluster.apply(register(1, 3, lost="tail"))
    assert cluster.at().isr == (1, 2, 3), "all that this process wrote was synced"


def test_what_a_killed_process_left_to_the_kernel_is_judged_by_its_own_time() -> None:
    """1. A process writes under `interval` and is killed. The topic is altered to `always`.
    2. The next process of the same boot registers: its kernel still has what was not synced.
    3. The power fails: that tail may be lost, and the setting of 2 is no excuse.
    """
    cluster = Cluster()
    cluster.create(fsync="interval")
    cluster.apply(AlterTopic("t", {"fsync": "always"}))
    cluster.apply(register(1, 2))
    cluster.apply(register(1, 3, lost="tail"))
    assert cluster.at().isr == (2, 3)


def test_after_a_clean_stop_all_that_was_written_is_synced() -> None:
    cluster = Cluster()
    cluster.create(fsync="interval")
    cluster.apply(AlterTopic("t", {"fsync": "always"}))
    cluster.apply(replace(register(1, 2), synced=True))
    cluster.fence(1)
    cluster.apply(register(1, 2))
    cluster.apply(register(1, 3, lost="tail"))
    assert cluster.at().isr == (1, 2, 3)


def alone(*others: int) -> Cluster:
    """Node 1 alone is in sync; the others are alive, behind. Then 1 comes back with nothing."""
    cluster = Cluster(1 + len(others))
    cluster.create(replication=1 + len(others), min_insync=1)
    for node in others:
        cluster.fence(node)
    cluster.isr(1)
    for node in others:
        cluster.apply(register(node, 2))
    cluster.fence(1)
    return cluster


def emptied(*others: int) -> Cluster:
    cluster = alone(*others)
    cluster.apply(register(1, 2, lost="everything"))
    return cluster


def test_the_longest_copy_leads_when_the_last_one_in_sync_lost_everything() -> None:
    """1. 2 fell behind at offset 100, later 3 at 900; only 1 was in sync, and lost its disk.
    2. Nobody leads before 2 and 3 have told where they end: 3 has [100, 900), 2 has not.
    """
    cluster = emptied(2, 3)
    assert (cluster.at().isr, cluster.at().leader) == ((), None)
    epoch = cluster.at().epoch
    assert cluster.tell(2, (1, 100)) == 1
    assert cluster.at().leader is None
    cluster.tell(3, (1, 900))
    assert (cluster.at().isr, cluster.at().leader) == ((3,), 3)
    assert cluster.at().epoch == epoch + 1
    assert cluster.at().recovery is None
    cluster.isr(3, 1)


@pytest.mark.parametrize(
    ("of_2", "of_3", "leader"),
    [
        ([(3, 5)], [(2, 900)], 2),  # a later epoch counts more than length
        ([(2, 5)], [(2, 5)], 2),  # the preferred one of two that are alike
        ([(2, 5), (2, 7), (0, 0)], [(2, 5), (2, 8), (0, 0)], 3),  # the ledger, where the data agree
        ([(2, 5)], [(2, 5), (1, 1), (0, 0)], 3),
        ([(0, 0)], [(0, 0)], 2),
    ],
)
def test_epochs_come_before_ends_and_data_before_the_other_logs(
    of_2: list[tuple[int, int]], of_3: list[tuple[int, int]], leader: int
) -> None:
    cluster = emptied(2, 3)
    cluster.tell(2, *of_2)
    cluster.tell(3, *of_3)
    assert cluster.at().leader == leader


def test_a_copy_that_is_not_alive_is_waited_for() -> None:
    cluster = alone(2, 3)
    cluster.fence(3)
    cluster.apply(register(1, 2, lost="everything"))
    cluster.tell(2, (1, 100))
    recovery = cluster.at().recovery
    assert recovery is not None
    assert recovery.waits_for == (3,)
    assert load(dump(cluster.state)) == cluster.state
    cluster.apply(register(3, 3))
    assert cluster.at().leader is None
    cluster.tell(3, (1, 900))
    assert cluster.at().leader == 3


def test_a_telling_of_a_process_that_is_gone_counts_for_nothing() -> None:
    cluster = emptied(2, 3)
    cluster.tell(3, (1, 900))
    cluster.apply(register(3, 3, lost="tail"))
    cluster.tell(2, (1, 899))
    assert cluster.at().leader is None
    cluster.tell(3, (1, 890))
    assert cluster.at().leader == 2
    with pytest.raises(FencedEpoch, match="not alive as incarnation 2"):
        cluster.apply(TellEnds(3, 2, ()))


def test_a_telling_about_another_version_counts_for_nothing() -> None:
    cluster = emptied(2, 3)
    topic_id = cluster.state.topics["t"].topic_id
    rows = ((topic_id, 0, 1, 1, 900), (topic_id, 7, 1, 1, 900), (99, 0, 1, 1, 900))
    assert cluster.apply(TellEnds(3, 2, rows)) == 0
    assert cluster.at().recovery is not None
    assert not cluster.at().recovery.told
    assert cluster.tell(1, (1, 5)) == 0, "an empty log is not asked"


def test_nobody_waits_for_logs_that_are_known_to_be_empty() -> None:
    cluster = emptied(2, 3)
    cluster.fence(3)
    cluster.apply(register(3, 3, lost="everything"))
    cluster.fence(3)
    cluster.tell(2, (1, 100))
    assert cluster.at().leader == 2


def test_logs_that_went_back_in_time_are_compared_with_the_others() -> None:
    """The last one in sync has an older copy of its disk: others may have more than that."""
    cluster = alone(2, 3)
    cluster.apply(register(1, 2, lost="past"))
    assert cluster.at().leader is None
    cluster.tell(1, (1, 500))
    cluster.tell(2, (1, 100))
    cluster.tell(3, (1, 900))
    assert cluster.at().leader == 3


def test_the_only_other_copy_leads_at_once() -> None:
    cluster = emptied(2)
    assert (cluster.at().isr, cluster.at().leader) == ((2,), 2)


def test_no_copy_is_moved_away_while_it_may_be_the_longest() -> None:
    cluster = emptied(2, 3)
    with pytest.raises(InvalidArgument, match=r"t/0 has no leader: .* on nodes 2, 3"):
        cluster.apply(MoveReplicas("t", 0, (1, 2)))


def test_an_operator_gives_up_what_never_returns() -> None:
    """1. Node 1 was alone in sync, and its disk is gone for good. 2. Nobody leads.
    3. The operator decides; 2 and 3 tell, and the longest leads."""
    cluster = alone(2, 3)
    assert cluster.at().leader is None
    assert cluster.at().recovery is None
    assert cluster.recover() == [2, 3]
    assert cluster.at().isr == (1,), "if it is back after all, it leads"
    cluster.tell(2, (1, 100))
    cluster.tell(3, (1, 900))
    assert (cluster.at().isr, cluster.at().leader) == ((3,), 3)
    cluster.apply(register(1, 2))
    assert cluster.at().isr == (3,)


def test_a_member_of_the_isr_that_returns_in_time_leads() -> None:
    cluster = alone(2, 3)
    cluster.recover()
    cluster.tell(2, (1, 100))
    cluster.apply(register(1, 2))
    assert (cluster.at().isr, cluster.at().leader) == ((1,), 1)
    assert cluster.at().recovery is None


def test_an_operator_decides_not_to_wait() -> None:
    cluster = alone(2, 3)
    cluster.fence(3)
    cluster.apply(register(1, 2, lost="everything"))
    cluster.tell(2, (1, 100))
    assert cluster.at().leader is None
    cluster.recover()
    cluster.tell(1, (0, 0))
    assert cluster.at().leader == 2


def test_a_recovery_that_is_not_needed_is_refused() -> None:
    cluster = Cluster()
    cluster.create()
    with pytest.raises(InvalidArgument, match="node 1 of the isr of t/0 is alive, and leads it"):
        cluster.recover()
    with pytest.raises(UnknownPartition):
        cluster.recover(partition=1)
    for node in (1, 2, 3):
        cluster.fence(node)
    with pytest.raises(InvalidArgument, match="none of the nodes"):
        cluster.recover()
    with pytest.raises(FencedEpoch, match="has changed since"):
        cluster.recover(version=1)


def test_the_id_of_a_node_that_is_alive_is_not_given_to_another_process() -> None:
    cluster = Cluster()
    cluster.create()
    with pytest.raises(NodeIdTaken, match="node 1 is alive at host1:7070") as refused:
        cluster.apply(register(1, 2, lost="everything"))
    assert refused.value.details == {"incarnation": 1, "host": "host1", "port": 7070}
    assert cluster.at().leader == 1
    for before, silent in ((None, 1), (1, None), (7, 1), (7, 7)):
        with pytest.raises(NodeIdTaken):
            cluster.apply(replace(register(1, 2), before=before, silent=silent))
    cluster.apply(replace(register(1, 2), before=1, silent=1))
    cluster.fence(1)
    cluster.apply(register(1, 3, lost="everything"))
    assert cluster.state.is_alive(1, 3)


def test_topics_that_were_always_synced_need_no_index() -> None:
    cluster = Cluster()
    cluster.apply(CreateTopic("a", 1, 1, {"fsync": "always"}))
    cluster.apply(AlterTopic("a", {"retention_ms": 5_000_000}))
    assert cluster.state.topics["a"].synced_since == 0
