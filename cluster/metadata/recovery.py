"""Partitions without a copy that is known to have everything, and who leads them. (Core.)

    in sync ──the last member of the isr lost its data──> ask all other copies
    in sync, none alive ──Recover, an operator's decision──> ask the copies that are alive
    asked ──each node reports (last epoch, end offset) of its logs──> the longest alone is in sync
    asked ──a member of the isr is back, with its data──> it leads

A copy that is longer in a later epoch has more of what was acknowledged than any other: an epoch
has one leader, and its log has everything that is left of the epochs before. Recovery waits for
copies that are not alive, because one of them may be the longest. Only an operator can decide to go
on without them.

The reported logs do not change: without a leader no node writes or follows. So a report is valid
while its process is registered and alive, and is dropped when it is not.
"""

from collections.abc import Mapping
from dataclasses import replace

from raftq.cluster.metadata.commands import Lost
from raftq.cluster.metadata.state import NodeState, PartitionState, Recovery, TopicState


def after_loss(partition: PartitionState, node_id: int, lost: Lost) -> PartitionState:
    """Return the partition after a process registered whose logs have lost that much.

    A loss removes a node from the isr where others are in sync. A lost tail costs the last member
    nothing: it is a moment at most. When the last member lost more, other copies may have more than
    it has. An empty log must not lead: all others would be cut to it.
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
    """Do not wait for a log that is known to be empty, unless there is no other."""
    recovery = partition.recovery
    if recovery is None:
        return partition
    asked = tuple(node for node in recovery.asked if node != node_id)
    return replace(partition, recovery=replace(recovery, asked=asked)) if asked else partition


def untold(partition: PartitionState, node_id: int) -> PartitionState:
    """Return the partition without the report of a process that is gone."""
    recovery = partition.recovery
    if recovery is None or all(node_id != known.node_id for known in recovery.told):
        return partition
    told = tuple(known for known in recovery.told if known.node_id != node_id)
    return replace(partition, recovery=replace(recovery, told=told))


def isr_of(partition: PartitionState, nodes: Mapping[int, NodeState]) -> tuple[int, ...]:
    """Return the isr of a partition in recovery: once all have reported, the longest copy alone."""
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
    """Describe in words what the partition waits for."""
    nodes = ", ".join(map(str, recovery.waits_for))
    return (
        f"{topic.name}/{number} has no leader: it waits for the ends of the copies on nodes {nodes}"
    )
