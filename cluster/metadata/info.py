"""The state as clients see it: the structures of the native protocol. (Pure.)"""

from collections.abc import Iterable

from raftq.client.common.errors import UnknownTopic
from raftq.client.wire.messages import NodeInfo, PartitionInfo, TopicInfo
from raftq.cluster.metadata.state import ClusterState, NodeState, TopicState


def metadata_info(
    state: ClusterState, topics: Iterable[str] | None
) -> tuple[tuple[NodeInfo, ...], tuple[TopicInfo, ...]]:
    """Return all nodes, and the topics asked for (None: all). A missing topic is reported as
    such."""
    nodes = tuple(node_info(state.nodes[node_id]) for node_id in sorted(state.nodes))
    names = list(state.topics) if topics is None else list(dict.fromkeys(topics))
    return nodes, tuple(topic_info(state, name) for name in names)


def node_info(node: NodeState) -> NodeInfo:
    return NodeInfo(
        node_id=node.node_id,
        host=node.host,
        port=node.port,
        http_port=node.http_port,
        raft_address=node.raft_address,
        rack=node.rack,
        incarnation=node.incarnation,
        alive=node.alive,
        draining=node.draining,
    )


def topic_info(state: ClusterState, name: str) -> TopicInfo:
    """Return the structure of a topic. It is made once per entry, because entries never change."""
    topic = state.topics.get(name)
    if topic is None:
        return TopicInfo(name, error=UnknownTopic.code)
    kept = state.memo.get(topic.topic_id)
    if kept is not None and kept[0] is topic:
        info: TopicInfo = kept[1]
        return info
    info = _made(topic)
    state.memo[topic.topic_id] = (topic, info)
    return info


def _made(topic: TopicState) -> TopicInfo:
    partitions = tuple(
        PartitionInfo(
            *(number, partition.leader, partition.epoch, partition.replicas, partition.isr),
            target=partition.target or (),
            version=partition.version,
            waits_for=() if partition.recovery is None else partition.recovery.waits_for,
        )
        for number, partition in enumerate(topic.partitions)
    )
    return TopicInfo(
        topic.name, partitions, topic_id=topic.topic_id, config=topic.config.settings()
    )
