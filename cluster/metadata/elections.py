"""Who leads a partition, and when a move of its replicas is finished. (Core.)

It is called while a command is applied, so all replicas of the metadata elect the same leader. Any
member of the isr has everything that was acknowledged, and no other node is ever elected. When no
member is left, recovery.py decides which copy is the isr then.
"""

from collections.abc import Callable, Mapping

from raftq.cluster.metadata.changes import Change, PartitionChanged
from raftq.cluster.metadata.recovery import isr_of
from raftq.cluster.metadata.state import ClusterState, NodeState, PartitionState, TopicState

Nodes = Mapping[int, NodeState]


def electable(replicas: tuple[int, ...], isr: tuple[int, ...], nodes: Nodes) -> list[int]:
    """Return the nodes that may lead, the best first: not draining, then in the order of
    replicas."""
    found = [node for node in replicas if node in isr and nodes[node].alive]
    if len(found) > 1:
        found.sort(key=lambda node: nodes[node].draining)
    return found


def with_copies(
    partition: PartitionState,
    replicas: tuple[int, ...],
    isr: tuple[int, ...],
    leader: int | None,
    target: tuple[int, ...] | None,
) -> PartitionState:
    """Return `partition` with these values; like `replace`, which takes five times as long."""
    assignments = assigned(partition, replicas, partition.version + 1)
    return PartitionState(
        replicas,
        isr,
        leader,
        partition.epoch,
        partition.version,
        assignments,
        target,
        partition.recovery,
    )


def assigned(partition: PartitionState, replicas: tuple[int, ...], version: int) -> tuple[int, ...]:
    """Return the assignments of these replicas. New replicas get `version`."""
    if replicas == partition.replicas:
        return partition.assignments
    known = dict(zip(partition.replicas, partition.assignments, strict=True))
    return tuple(known.get(node, version) for node in replicas)


def elected(before: PartitionState, after: PartitionState, nodes: Nodes) -> PartitionState:
    """Return `after` with its move finished if possible, a leader, and the next epoch and version.

    `after` is `before` with other replicas, isr or target. Its leader is None to force an election
    although the old leader could go on, because its process is another one.
    """
    replicas, isr, leader, target = after.replicas, after.isr, after.leader, after.target
    if after is before and target is None and leader is not None:
        node = nodes[leader]
        if node.alive and not node.draining:
            return before  # the usual case
    if after.recovery is not None:
        isr = isr_of(after, nodes)
    if (
        target is not None
        and all(node in isr for node in target)
        and any(nodes[node].alive for node in target)
    ):
        # All of the target are in sync, so the isr can become exactly the target, but not while
        # that would leave no node to lead.
        replicas, isr, target = target, target, None
    candidates = electable(replicas, isr, nodes)
    if leader not in candidates or (
        leader is not None and nodes[leader].draining and not nodes[candidates[0]].draining
    ):
        leader = candidates[0] if candidates else None
    again = after.leader is None and before.leader is not None
    led = leader != before.leader or again
    recovery = after.recovery if leader is None else None
    moved = (replicas, isr, target) != (before.replicas, before.isr, before.target)
    if not led and not moved and recovery == before.recovery:
        return before
    epoch = before.epoch + 1 if led else before.epoch
    version = before.version + 1
    assignments = assigned(after, replicas, version)
    return PartitionState(replicas, isr, leader, epoch, version, assignments, target, recovery)


Edit = Callable[[TopicState, PartitionState], PartitionState]


def elect_all(state: ClusterState, node_id: int, edit: Edit | None = None) -> list[Change]:
    """Edit every partition that the node is a replica of, elect, and store what changed."""
    changes: list[Change] = []
    nodes = state.nodes
    for name, topic in state.topics.items():
        edited: list[PartitionState] | None = None
        for number, partition in enumerate(topic.partitions):
            if node_id not in partition.replicas:
                continue
            after = elected(partition, partition if edit is None else edit(topic, partition), nodes)
            if after is not partition:
                edited = list(topic.partitions) if edited is None else edited
                edited[number] = after
                changes.append(PartitionChanged(name, topic.topic_id, number))
        if edited is not None:
            state.topics[name] = with_partitions(topic, edited)
    return changes


def with_partitions(topic: TopicState, partitions: list[PartitionState]) -> TopicState:
    return TopicState(
        topic.name,
        topic.topic_id,
        topic.config,
        tuple(partitions),
        topic.queued,
        topic.synced_since,
    )


def store_partition(
    state: ClusterState, topic: TopicState, number: int, after: PartitionState
) -> list[Change]:
    """Store one partition. Does nothing when it is the same."""
    if after is topic.partitions[number]:
        return []
    edited = list(topic.partitions)
    edited[number] = after
    state.topics[topic.name] = with_partitions(topic, edited)
    return [PartitionChanged(topic.name, topic.topic_id, number)]
