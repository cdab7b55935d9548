"""Partitions of which nobody is known to have everything, and who leads them then. (Core.)

    in sync ──the last member of the isr lost what it had──> asked: all other copies
    in sync, none alive ──Recover, an operator's decision──> asked: the copies that are alive
    asked ──each node tells (last epoch, end offset) of its logs──> the longest alone is in sync
    asked ──a member of the isr is back, with what it had──> it leads

A copy that is longer in a later epoch has more of what was acknowledged than any other: an epoch
has one leader, and its log has all that is left of the epochs before. Those that are not alive are
waited for, because theirs may be the longest; only an operator can decide to go on without them.

A node tells of logs that nobody writes to: it follows no one, because nobody leads. So a telling is
good for as long as its process is registered and alive, and gone when it is not.
"""

from collections.abc import Mapping
from dataclasses import replace

from raftq.cluster.metadata.commands import Lost
from raftq.cluster.metadata.state import NodeState, PartitionState, Recovery, TopicState


def after_loss(partition: PartitionState, node_id: int, lost: Lost) -> PartitionState:
    """The partition after a process registered whose logs lost that much.

    A loss costs a node its place where others are in sync. A tail costs the last one nothing: it is
    a moment at most. When the last one lost more, the others may have more than it has, and an
    empty log must not lead: all others would be cut to it.
    """
    if lost == "everything":
        partition = _not_asked(partition, node_id)
    if lost == "nothing" or node_id not in partition.isr:
        return partition
    isr = tuple(node for node in partition.isr if node != node_id)
    if isr:
        return replace(partition, isr=isr)
    others = tuple(node for node in partition.replicas if node != node_id)
    if lost == "tail" or not others:
        return partition
    if partition.recovery is not None:
        asked = partition.recovery.asked
        if lost == "past" and node_id not in asked:
            asked = (*asked, node_id)
        return replace(partition, isr=(), recovery=replace(partition.recovery, asked=asked))
    asked = others if lost == "everything" else partition.replicas
    if len(asked) == 1:
        return replace(partition, isr=asked)  # there is nothing to compare it with
    return replace(partition, isr=(), leader=None, recovery=Recovery(partition.version + 1, asked))


def _not_asked(partition: PartitionState, node_id: int) -> PartitionState:
    """Nobody waits for a log that is known to be empty, unless there is no other."""
    recovery = partition.recovery
    if recovery is None:
        return partition
    asked = tuple(node for node in recovery.asked if node != node_id)
    return replace(partition, recovery=replace(recovery, asked=asked)) if asked else partition


def untold(partition: PartitionState, node_id: int) -> PartitionState:
    """The partition after the process that told, if it did, is gone."""
    recovery = partition.recovery
    if recovery is None or all(node_id != known.node_id for known in recovery.told):
        return partition
    told = tuple(known for known in recovery.told if known.node_id != node_id)
    return replace(partition, recovery=replace(recovery, told=told))


def isr_of(partition: PartitionState, nodes: Mapping[int, NodeState]) -> tuple[int, ...]:
    """The isr of a partition in recovery: once all have told, the longest copy alone."""
    recovery = partition.recovery
    assert recovery is not None
    if recovery.waits_for or any(nodes[node].alive for node in partition.isr):
        return partition.isr
    told = [known for known in recovery.told if known.node_id in recovery.asked]
    best = max(
        told,
        key=lambda known: (
            known.ends,
            not nodes[known.node_id].draining,
            -partition.replicas.index(known.node_id),
        ),
    )
    return (best.node_id,)


def waiting(topic: TopicState, number: int, recovery: Recovery) -> str:
    """What the partition waits for, in words."""
    nodes = ", ".join(map(str, recovery.waits_for))
    return (
        f"{topic.name}/{number} has no leader: it waits for the ends of the copies on nodes {nodes}"
    )
