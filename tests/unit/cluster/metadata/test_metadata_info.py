"""The state as the native protocol shows it."""

from metadatamodel import register

from raftq.client.wire.messages import MetadataReply, encode_message
from raftq.cluster.metadata.apply import apply
from raftq.cluster.metadata.commands import CreateTopic, DeleteTopic, FenceNode, MoveReplicas
from raftq.cluster.metadata.info import metadata_info
from raftq.cluster.metadata.state import ClusterState


def cluster() -> ClusterState:
    state = ClusterState("c")
    for node_id in (3, 1, 2):
        apply(state, register(node_id), node_id)
    apply(state, CreateTopic("t", 2, 2), 4)
    apply(state, CreateTopic("u", 1, 1, {"retention_ms": -1}), 5)
    return state


def test_all_nodes_and_topics_are_shown_and_fit_the_protocol() -> None:
    state = cluster()
    apply(state, FenceNode(3, 1), 6)
    leader = state.topics["u"].partitions[0].leader
    assert leader is not None
    other = 3 - leader
    apply(state, MoveReplicas("u", 0, (other,)), 7)
    nodes, topics = metadata_info(state, None)
    assert [(one.node_id, one.alive) for one in nodes] == [(1, True), (2, True), (3, False)]
    assert [one.topic for one in topics] == ["t", "u"]
    shown = topics[1].partitions[0]
    assert (shown.leader, shown.target) == (leader, (other,))
    assert topics[1].config["retention_ms"] == -1
    assert encode_message(MetadataReply("c", nodes, topics), 1)


def test_a_topic_that_is_not_there_says_so() -> None:
    _, topics = metadata_info(cluster(), ["nope", "t", "t"])
    assert [(one.topic, one.error) for one in topics] == [("nope", "unknown_topic"), ("t", "")]


def test_what_was_made_for_a_topic_is_kept_until_it_changes() -> None:
    state = cluster()
    first = metadata_info(state, None)[1]
    apply(state, FenceNode(state.topics["u"].partitions[0].leader or 0, 1), 6)
    second = metadata_info(state, None)[1]
    assert first[1].partitions[0].leader is not None
    assert second[1].partitions[0].leader is None
    third = metadata_info(state, None)[1]
    assert third[1] is second[1]
    apply(state, DeleteTopic("u"), 7)
    assert [one.topic for one in metadata_info(state, None)[1]] == ["t"]
    assert list(state.memo) == [1]
