"""How commands about partitions without a leader change the state. (Core.)

Each function refuses, by raising a RaftqError, before it changes anything.
"""

from dataclasses import replace

from raftq.client.common.errors import (
    FencedEpoch,
    InvalidArgument,
    UnknownPartition,
)
from raftq.cluster.metadata.changes import Change
from raftq.cluster.metadata.commands import Recover, TellEnds
from raftq.cluster.metadata.elections import elected, store_partition
from raftq.cluster.metadata.recovery import untold
from raftq.cluster.metadata.state import ClusterState, EndReport, PartitionState, Recovery

Answer = tuple[object, list[Change]]


def tell_ends(state: ClusterState, command: TellEnds) -> Answer:
    """Store the reported ends. Rows that are no longer asked for, or for another version, are
    ignored."""
    node_id = command.node_id
    if not state.is_alive(node_id, command.incarnation):
        raise FencedEpoch(f"node {node_id} is not alive as incarnation {command.incarnation}")
    counted = 0
    changes: list[Change] = []
    for topic_id, number, since, *ends in command.rows:
        topic = state.topic_by_id(topic_id)
        if topic is None or number >= len(topic.partitions):
            continue
        old = topic.partitions[number]
        recovery = old.recovery
        if recovery is None or recovery.since != since or node_id not in recovery.asked:
            continue
        counted += 1
        before = untold(old, node_id).recovery
        assert before is not None
        telling = EndReport(node_id, tuple(zip(ends[::2], ends[1::2], strict=True)))
        after = replace(old, recovery=replace(before, told=(*before.told, telling)))
        changes += store_partition(state, topic, number, elected(old, after, state.nodes))
    return counted, changes


def recover(state: ClusterState, command: Recover) -> Answer:
    topic = state.topic_by_id(command.topic_id)
    if topic is None or command.partition >= len(topic.partitions):
        raise UnknownPartition(
            f"there is no partition {command.partition} of a topic with the id {command.topic_id}"
        )
    old = topic.partitions[command.partition]
    name = f"{topic.name}/{command.partition}"
    if old.leader is not None:
        raise InvalidArgument(f"node {old.leader} of the isr of {name} is alive, and leads it")
    if command.version != old.version:
        raise FencedEpoch(
            f"{name} has changed since: it has version {old.version}, not {command.version}"
        ).with_details(epoch=old.epoch, version=old.version)
    alive = _alive(state, old)
    if not alive:
        raise InvalidArgument(f"none of the nodes {old.replicas} with a copy of {name} is alive")
    if old.recovery is None:
        recovery = Recovery(old.version + 1, alive)
    else:
        recovery = replace(old.recovery, asked=alive)
    after = elected(old, replace(old, recovery=recovery), state.nodes)
    return list(alive), store_partition(state, topic, command.partition, after)


def _alive(state: ClusterState, partition: PartitionState) -> tuple[int, ...]:
    return tuple(node for node in partition.replicas if state.nodes[node].alive)
