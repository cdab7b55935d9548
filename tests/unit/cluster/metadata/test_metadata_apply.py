"""What each command does to the state, and what it refuses."""

import time

import pytest
from metadatamodel import Cluster, register
from msgspec.structs import replace

from raftq.client.common.errors import (
    FencedEpoch,
    InvalidArgument,
    NotEnoughReplicas,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from raftq.cluster.metadata import apply_nodes as metadata_nodes
from raftq.cluster.metadata import apply_topics as metadata_topics
from raftq.cluster.metadata.apply import (
    NodeChanged,
    PartitionChanged,
    TopicChanged,
    TopicDeleted,
    apply,
    differences,
    dump,
    load,
)
from raftq.cluster.metadata.apply_topics import PRODUCER_EPOCH_LAST
from raftq.cluster.metadata.commands import (
    AddPartitions,
    AllocateProducerIds,
    AlterTopic,
    ChangeIsr,
    Command,
    CreateTopic,
    DeleteTopic,
    ElectPreferred,
    FenceNode,
    InitNamedProducer,
    MoveReplicas,
    RemoveNode,
    Resign,
    SetDraining,
)
from raftq.cluster.metadata.state import ClusterState, PartitionState


def test_a_topic_gets_replicas_leaders_and_an_id() -> None:
    cluster = Cluster()
    result = cluster.apply(CreateTopic("t", 0, 0, {}))
    assert result == {"topic_id": 1, "partitions": 3, "replication": 3}
    topic = cluster.state.topics["t"]
    assert sorted(one.leader or 0 for one in topic.partitions) == [1, 2, 3]
    assert all(sorted(one.isr) == [1, 2, 3] for one in topic.partitions)
    assert topic.config.min_insync == 2


def test_the_default_replication_is_what_the_alive_nodes_allow() -> None:
    cluster = Cluster(2)
    assert cluster.apply(CreateTopic("t")) == {"topic_id": 1, "partitions": 3, "replication": 2}
    cluster.fence(1)
    assert cluster.apply(CreateTopic("u")) == {"topic_id": 2, "partitions": 3, "replication": 1}
    cluster.fence(2)
    with pytest.raises(InvalidArgument, match="no node is alive"):
        cluster.apply(CreateTopic("v"))


def test_a_partition_on_a_node_that_is_down_begins_without_it_in_sync() -> None:
    cluster = Cluster()
    cluster.fence(2)
    cluster.create()
    assert cluster.at() == PartitionState((1, 3, 2), (1, 3), 1, 1, 1, (1, 1, 1))


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (CreateTopic("t"), TopicExists),
        (CreateTopic("no/name"), InvalidArgument),
        (CreateTopic("u", 4097), InvalidArgument),
        (CreateTopic("u", 1, 4), InvalidArgument),
        (CreateTopic("u", 1, 1, {"min_insync": 2}), InvalidArgument),
        (CreateTopic("u", 1, 1, {"x": 2}), InvalidArgument),
        (AlterTopic("u", {}), UnknownTopic),
        (AlterTopic("t", {"min_insync": 4}), InvalidArgument),
        (DeleteTopic("u"), UnknownTopic),
        (AddPartitions("u", 5), UnknownTopic),
        (AddPartitions("t", 1), InvalidArgument),
        (AddPartitions("t", 4097), InvalidArgument),
        (MoveReplicas("u", 0, (1,)), UnknownTopic),
        (MoveReplicas("t", 1, (1, 2)), UnknownPartition),
        (MoveReplicas("t", 0, ()), InvalidArgument),
        (MoveReplicas("t", 0, (1, 1)), InvalidArgument),
        (MoveReplicas("t", 0, (1,)), InvalidArgument),  # below min_insync
        (MoveReplicas("t", 0, (1, 9)), InvalidArgument),
        (FenceNode(9, 1), InvalidArgument),
        (SetDraining(9, True), InvalidArgument),
        (RemoveNode(9), InvalidArgument),
        (RemoveNode(1), InvalidArgument),
        (InitNamedProducer(""), InvalidArgument),
        (replace(register(1), host=""), InvalidArgument),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    command: Command, error: type[Exception]
) -> None:
    cluster = Cluster()
    cluster.create()
    with pytest.raises(error):
        cluster.apply(command)


def test_a_fenced_leader_is_replaced_and_stays_in_the_isr() -> None:
    cluster = Cluster()
    cluster.create()
    assert cluster.fence(1) is True
    assert cluster.at() == PartitionState((1, 2, 3), (1, 2, 3), 2, 2, 2, (1, 1, 1))
    assert cluster.fence(1) is False


def test_fencing_an_older_incarnation_does_nothing() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.apply(register(1, 2))
    assert cluster.apply(FenceNode(1, 1)) is False
    assert cluster.state.is_alive(1, 2)


def test_a_partition_whose_isr_is_gone_waits_for_the_first_of_it() -> None:
    """1. 1 is out of the isr. 2. 2 and 3 are fenced. 3. 1 is alive, yet nobody leads. 4. 3 is back,
    and leads."""
    cluster = Cluster()
    cluster.create()
    cluster.fence(1)
    cluster.isr(2, 3)
    cluster.apply(register(1, 2))
    cluster.fence(2)
    cluster.fence(3)
    assert (cluster.at().leader, cluster.at().epoch) == (None, 4)
    cluster.apply(register(3, 2))
    assert (cluster.at().leader, cluster.at().epoch) == (3, 5)


def test_a_restarted_leader_gets_a_new_epoch_even_if_it_leads_again() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.apply(register(1, 2))
    assert cluster.at() == PartitionState((1, 2, 3), (1, 2, 3), 1, 2, 2, (1, 1, 1))


def test_registering_again_with_the_same_incarnation_only_brings_the_node_back() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.apply(register(1))
    assert cluster.at().version == 1
    cluster.fence(1)
    cluster.apply(register(1, lost="tail"))
    assert cluster.state.is_alive(1, 1)
    assert cluster.at() == PartitionState((1, 2, 3), (1, 2, 3), 2, 2, 2, (1, 1, 1))


def test_a_node_that_lost_its_tail_is_no_longer_in_sync_where_others_are() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.apply(register(1, 2, lost="tail"))
    assert cluster.at() == PartitionState((1, 2, 3), (2, 3), 2, 2, 2, (1, 1, 1))
    cluster.fence(3)
    cluster.apply(register(2, 2, lost="tail"))
    assert (cluster.at().isr, cluster.at().leader) == ((3,), None)
    cluster.apply(register(3, 2, lost="tail"))
    assert (cluster.at().isr, cluster.at().leader) == ((3,), 3)


def test_with_fsync_always_a_lost_tail_costs_nothing() -> None:
    cluster = Cluster()
    cluster.create(fsync="always")
    cluster.apply(register(1, 2, lost="tail"))
    assert cluster.at().isr == (1, 2, 3)
    assert cluster.at().epoch == 2
    cluster.fence(1)
    cluster.apply(register(1, 3, lost="everything"))
    assert cluster.at().isr == (2, 3)


def test_a_node_whose_logs_went_back_in_time_is_no_longer_in_sync_whatever_was_synced() -> None:
    cluster = Cluster()
    cluster.create(fsync="always")
    cluster.apply(register(1, 2, lost="past"))
    assert cluster.at() == PartitionState((1, 2, 3), (2, 3), 2, 2, 2, (1, 1, 1))


def test_a_directory_that_is_older_than_the_last_registration_is_noticed() -> None:
    """Everything was put back to an older copy, the node's own notes included."""
    cluster = Cluster()
    cluster.create(fsync="always")
    cluster.apply(replace(register(1, 2), before=1))
    assert cluster.at().isr == (1, 2, 3)
    cluster.fence(1)
    cluster.apply(replace(register(1, 3), before=1))
    assert cluster.at().isr == (2, 3)
    assert cluster.at().leader == 2


def test_an_empty_log_never_leads_while_other_copies_exist() -> None:
    """The others were out of sync, or lost their tails; they are the best there is."""
    cluster = Cluster()
    cluster.create()
    cluster.apply(register(2, 2, lost="tail"))
    cluster.apply(register(3, 2, lost="tail"))
    assert cluster.at().isr == (1,)
    cluster.fence(1)
    cluster.apply(register(1, 2, lost="everything"))
    assert 1 not in cluster.at().isr
    for node in (2, 3):
        cluster.tell(node, (1, 5))
    assert cluster.at().isr == (2,)
    assert cluster.at().leader == 2


def test_a_leader_changes_its_isr() -> None:
    cluster = Cluster()
    cluster.create()
    assert cluster.isr(1, 3) == [1, 2]
    assert cluster.at().isr == (1, 3)
    assert cluster.isr(3, 2, 1) == [1, 3]
    assert cluster.at().isr == (1, 2, 3)
    assert cluster.isr(1, 2, 3) == [1, 3]


@pytest.mark.parametrize("other", [{"leader": 2}, {"epoch": 2}, {"epoch": 0}, {"version": 2}])
def test_a_leader_that_is_not_up_to_date_is_fenced(other: dict[str, int]) -> None:
    cluster = Cluster()
    cluster.create()
    with pytest.raises(FencedEpoch) as caught:
        cluster.isr(1, 2, **other)
    assert caught.value.details == {"epoch": 1, "version": 1}


def test_a_member_comes_in_only_as_the_incarnation_that_is_alive() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.isr(1, 2)
    cluster.fence(3)
    with pytest.raises(FencedEpoch, match="node 3 is not alive"):
        cluster.isr(1, 2, 3)
    cluster.apply(register(3, 2))
    one, topic_id = cluster.at(), cluster.state.topics["t"].topic_id
    command = ChangeIsr(topic_id, 0, 1, one.epoch, one.version, ((1, 1), (2, 1), (3, 1)))
    with pytest.raises(FencedEpoch, match="node 3 is not alive as incarnation 1"):
        cluster.apply(command)
    cluster.isr(1, 2, 3)
    assert cluster.at().isr == (1, 2, 3)


def test_members_that_stay_or_go_need_not_be_alive() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.fence(2)
    cluster.fence(3)
    cluster.isr(1, 2)
    assert cluster.at().isr == (1, 2)


def test_the_isr_is_not_shrunk_below_min_insync() -> None:
    cluster = Cluster()
    cluster.create()
    with pytest.raises(InvalidArgument, match="below min_insync 2"):
        cluster.isr(1)
    cluster.apply(AlterTopic("t", {"min_insync": 1}))
    cluster.isr(1)
    assert cluster.at().isr == (1,)
    cluster.apply(AlterTopic("t", {"min_insync": 3}))
    cluster.isr(1, 2)  # grows, although it stays below
    assert cluster.at().isr == (1, 2)


@pytest.mark.parametrize("members", [(2, 3), (1, 1, 2), (1, 4)])
def test_an_isr_that_is_none_is_refused(members: tuple[int, ...]) -> None:
    cluster = Cluster(4)
    cluster.create()
    with pytest.raises(InvalidArgument, match="isr"):
        cluster.isr(*members)


def test_a_drained_node_leads_only_what_nobody_else_can() -> None:
    cluster = Cluster()
    cluster.create(partitions=3)
    assert cluster.apply(SetDraining(1, True)) == 0
    assert [one.leader for one in cluster.state.topics["t"].partitions] == [2, 2, 3]
    cluster.fence(2)
    cluster.fence(3)
    assert cluster.state.leading(1) == 3
    cluster.apply(register(2))
    assert cluster.state.leading(1) == 0


def test_a_drain_after_which_nothing_could_be_written_needs_force() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.isr(1, 2)
    with pytest.raises(NotEnoughReplicas, match="1 of the 2 replicas"):
        cluster.apply(SetDraining(2, True))
    cluster.apply(SetDraining(3, True))
    assert cluster.apply(SetDraining(2, True, force=True)) == 0


def test_a_drain_ends_with_the_process_and_a_decommission_does_not() -> None:
    cluster = Cluster(4)
    cluster.apply(SetDraining(1, True))
    cluster.apply(SetDraining(2, True, decommissioning=True))
    cluster.apply(register(1))
    assert cluster.state.nodes[1].draining
    cluster.apply(register(1, 2))
    cluster.apply(register(2, 2))
    assert not cluster.state.nodes[1].draining
    assert cluster.state.nodes[2].draining
    assert cluster.state.nodes[2].decommissioning


def test_a_decommission_needs_nodes_that_take_over() -> None:
    cluster = Cluster()
    cluster.create()
    with pytest.raises(NotEnoughReplicas, match="2 nodes are left for the 3 replicas"):
        cluster.apply(SetDraining(1, True, decommissioning=True))
    cluster.apply(register(4))
    cluster.apply(SetDraining(1, True, decommissioning=True))
    assert cluster.state.nodes[1].draining


def test_preferred_leaders_come_back_where_they_can() -> None:
    cluster = Cluster()
    cluster.create(partitions=3)
    cluster.fence(1)
    cluster.apply(register(1))
    everything = ElectPreferred(((1, 0), (1, 1), (1, 0), (1, 7), (9, 0)))
    assert cluster.apply(everything) == 1
    assert cluster.at() == PartitionState((1, 2, 3), (1, 2, 3), 1, 3, 3, (1, 1, 1))
    cluster.apply(SetDraining(1, True))
    assert cluster.apply(everything) == 0


def test_a_leader_that_resigns_is_followed_by_another_member_of_the_set() -> None:
    cluster = Cluster()
    cluster.create()
    assert cluster.apply(Resign(1, 0, 1, 1)) is True
    assert cluster.at() == PartitionState((1, 2, 3), (1, 2, 3), 2, 2, 2, (1, 1, 1))
    for command in (Resign(1, 0, 1, 1), Resign(1, 0, 2, 1), Resign(1, 0, 1, 2)):
        with pytest.raises(FencedEpoch):
            cluster.apply(command)
    cluster.apply(SetDraining(1, True))
    assert cluster.apply(Resign(1, 0, 2, 2)) is True
    assert cluster.at().leader == 3, "not to one that drains"


def test_a_leader_that_is_alone_in_the_set_stays() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.fence(2)
    cluster.fence(3)
    before = cluster.at()
    assert cluster.apply(Resign(1, 0, 1, before.epoch)) is False
    assert cluster.at() == before


def test_a_move_finishes_when_its_target_is_in_sync() -> None:
    cluster = Cluster(5)
    cluster.create()
    assert cluster.apply(MoveReplicas("t", 0, (4, 2, 5))) is False
    assert cluster.at() == PartitionState(
        (1, 2, 3, 4, 5), (1, 2, 3), 1, 1, 2, (1, 1, 1, 2, 2), (4, 2, 5)
    )
    assert (cluster.at().adding, cluster.at().removing) == ((4, 5), (1, 3))
    cluster.isr(1, 2, 3, 4)
    assert cluster.at().target == (4, 2, 5)
    cluster.isr(1, 2, 3, 4, 5)
    assert cluster.at() == PartitionState((4, 2, 5), (4, 2, 5), 4, 2, 4, (2, 1, 2))


def test_moving_back_cancels_a_move() -> None:
    cluster = Cluster(5)
    cluster.create()
    cluster.apply(MoveReplicas("t", 0, (4, 5, 1)))
    assert cluster.apply(MoveReplicas("t", 0, (1, 2, 3))) is True
    assert cluster.at() == PartitionState((1, 2, 3), (1, 2, 3), 1, 1, 3, (1, 1, 1))


def test_another_move_replaces_the_target_and_drops_what_is_not_in_sync() -> None:
    cluster = Cluster(5)
    cluster.create()
    cluster.apply(MoveReplicas("t", 0, (1, 2, 4)))
    cluster.apply(MoveReplicas("t", 0, (1, 2, 5)))
    assert cluster.at() == PartitionState((1, 2, 3, 5), (1, 2, 3), 1, 1, 3, (1, 1, 1, 3), (1, 2, 5))
    assert cluster.apply(MoveReplicas("t", 0, (1, 2, 5))) is False
    assert cluster.at().version == 3


def test_a_move_to_other_preferences_alone_is_finished_at_once() -> None:
    cluster = Cluster()
    cluster.create()
    assert cluster.apply(MoveReplicas("t", 0, (3, 2, 1))) is True
    assert cluster.at() == PartitionState((3, 2, 1), (3, 2, 1), 1, 1, 2, (1, 1, 1))


def test_a_move_that_would_leave_nobody_to_lead_waits() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.fence(2)
    cluster.fence(3)
    assert cluster.apply(MoveReplicas("t", 0, (2, 3))) is False
    assert cluster.at().leader == 1
    cluster.apply(register(3, 2))
    assert cluster.at() == PartitionState((2, 3), (2, 3), 3, 2, 3, (1, 1))


def test_no_replica_is_moved_to_a_node_that_is_down_or_leaving() -> None:
    cluster = Cluster(5)
    cluster.create()
    cluster.fence(4)
    with pytest.raises(InvalidArgument, match="node 4 is down"):
        cluster.apply(MoveReplicas("t", 0, (1, 2, 4)))
    cluster.apply(SetDraining(5, True, decommissioning=True))
    with pytest.raises(InvalidArgument, match="node 5 is being decommissioned"):
        cluster.apply(MoveReplicas("t", 0, (1, 2, 5)))


def test_partitions_are_added_with_the_replication_of_the_topic() -> None:
    cluster = Cluster()
    cluster.create(partitions=2, replication=2)
    assert cluster.apply(AddPartitions("t", 5)) == 5
    partitions = cluster.state.topics["t"].partitions
    assert [len(one.replicas) for one in partitions] == [2] * 5
    assert cluster.state.partition_count == 5


def test_a_node_is_removed_only_when_it_is_down_and_empty() -> None:
    cluster = Cluster(4)
    cluster.create()
    cluster.fence(1)
    with pytest.raises(InvalidArgument, match="holds replicas of 1 partitions"):
        cluster.apply(RemoveNode(1))
    cluster.fence(4)
    cluster.apply(RemoveNode(4))
    assert sorted(cluster.state.nodes) == [1, 2, 3]


def test_a_topic_created_anew_has_another_id() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.apply(DeleteTopic("t"))
    assert (cluster.state.topics, cluster.state.topic_names) == ({}, {})
    cluster.create()
    assert cluster.state.topics["t"].topic_id == 2


def test_altering_keeps_the_other_settings() -> None:
    cluster = Cluster()
    cluster.create(retention_ms=5, min_insync=3)
    cluster.apply(AlterTopic("t", {"fsync": "always", "retention_ms": None}))
    config = cluster.state.topics["t"].config
    assert (config.fsync, config.retention_ms, config.min_insync) == ("always", 604_800_000, 3)
    assert config.overrides == {"fsync": "always", "min_insync": 3}


def test_min_insync_does_not_fall_when_something_else_is_altered() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.apply(MoveReplicas("t", 0, (1, 2)))
    cluster.apply(AlterTopic("t", {"retention_ms": 5}))
    assert cluster.state.topics["t"].config.min_insync == 2
    cluster.apply(AlterTopic("t", {"min_insync": None}))
    assert cluster.state.topics["t"].config.min_insync == 1


def test_named_producers_keep_their_id_until_their_epochs_are_used_up() -> None:
    cluster = Cluster()
    assert cluster.apply(AllocateProducerIds(1, 1000)) == 1
    assert cluster.apply(InitNamedProducer("p")) == [1001, 0]
    assert cluster.apply(InitNamedProducer("p")) == [1001, 1]
    cluster.state.producers["p"] = (1001, PRODUCER_EPOCH_LAST)
    state = cluster.state
    assert apply(state, InitNamedProducer("p"), 99)[0] == [1002, 0]
    state.producer_id_next = (1 << 62) - 2
    with pytest.raises(InvalidArgument, match="no producer ids"):
        cluster.apply(AllocateProducerIds(1, 1000))


def test_changes_say_what_to_look_at() -> None:
    state = ClusterState("c")
    for node_id in (1, 2, 3):
        assert apply(state, register(node_id), node_id)[1] == [NodeChanged(node_id)]
    assert apply(state, CreateTopic("t", 2, 3), 4)[1] == [TopicChanged("t", 1)]
    changes = apply(state, FenceNode(1, 1), 5)[1]
    assert changes == [NodeChanged(1), PartitionChanged("t", 1, 0)]
    assert apply(state, DeleteTopic("t"), 6)[1] == [TopicDeleted("t", 1)]
    assert state.index == 6


def test_differences_of_two_states_are_the_changes_between_them() -> None:
    cluster = Cluster()
    cluster.create(partitions=3)
    cluster.apply(CreateTopic("u", 1))
    old = load(dump(cluster.state))
    assert differences(old, cluster.state) == []
    cluster.fence(1)
    cluster.apply(DeleteTopic("u"))
    cluster.apply(CreateTopic("u", 1, 1))
    assert differences(old, cluster.state) == [
        NodeChanged(1),
        TopicDeleted("u", 2),
        PartitionChanged("t", 1, 0),
        TopicChanged("u", 3),
    ]
    cluster.apply(AlterTopic("t", {"retention_ms": 1}))
    assert TopicChanged("t", 1) in differences(old, cluster.state)


def test_a_summary_counts_what_an_operator_worries_about() -> None:
    cluster = Cluster(4)
    cluster.create(partitions=4, replication=1)
    cluster.apply(CreateTopic("u", 1, 3))
    cluster.fence(1)
    found = cluster.state.summary()
    assert (found.topics, found.partitions, found.leaderless) == (2, 5, 1)
    assert found.under_min_insync == 1
    assert found.under_replicated == 1 + (1 in cluster.state.topics["u"].partitions[0].replicas)
    cluster.apply(MoveReplicas("t", 2, (4,)))
    assert cluster.state.summary().moves == 1


def test_a_node_that_leaves_itself_is_no_room_for_another_that_leaves() -> None:
    cluster = Cluster(4)
    cluster.create()
    cluster.apply(SetDraining(4, True, decommissioning=True))
    with pytest.raises(NotEnoughReplicas, match="2 nodes are left for the 3 replicas"):
        cluster.apply(SetDraining(1, True, decommissioning=True))


@pytest.mark.parametrize(
    ("module", "limit", "command", "complaint"),
    [
        (metadata_nodes, "NODES_MAX", register(9), "3 nodes already"),
        (metadata_topics, "TOPICS_MAX", CreateTopic("u"), "3 topics already"),
        (metadata_topics, "PARTITIONS_TOTAL_MAX", CreateTopic("u", 1), "3 partitions already"),
        (metadata_topics, "PARTITIONS_TOTAL_MAX", AddPartitions("t", 2), "3 partitions already"),
        (metadata_topics, "PRODUCERS_MAX", InitNamedProducer("u"), "3 named producers already"),
        (metadata_topics, "REPLICAS_MAX", MoveReplicas("t", 0, (1, 2, 4)), "replicas at once"),
    ],
)
def test_there_is_an_end_to_everything_that_grows(
    monkeypatch: pytest.MonkeyPatch, module: object, limit: str, command: Command, complaint: str
) -> None:
    """With three of everything, and three as the limit."""
    nodes = 3 if limit == "NODES_MAX" else 4
    cluster = Cluster(nodes)
    for name in "tvw":
        cluster.apply(CreateTopic(name, 1, 3))
        cluster.apply(InitNamedProducer(name))
    cluster.apply(MoveReplicas("t", 0, (1, 2, 3)))
    cluster.isr(*cluster.at().replicas)
    assert sorted(cluster.at().replicas) == [1, 2, 3]
    monkeypatch.setattr(module, limit, 3)
    with pytest.raises(InvalidArgument, match=complaint):
        cluster.apply(command)


def test_a_node_with_a_thousand_partitions_is_fenced_in_a_moment() -> None:
    state = ClusterState("c")
    for node_id in (1, 2, 3):
        apply(state, register(node_id), node_id)
    apply(state, CreateTopic("t", 3000, 3), 4)
    begin = time.process_time()
    changes = apply(state, FenceNode(1, 1), 5)[1]
    assert len(changes) == 1001
    assert time.process_time() - begin < 0.5  # 50 times what it takes
