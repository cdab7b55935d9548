"""The next changes of leaders and replicas that the state calls for. (Core.)"""

from collections.abc import Container

from raftq.cluster.metadata.commands import MoveReplicas
from raftq.cluster.metadata.placement import Load
from raftq.cluster.metadata.state import ClusterState, PartitionState


def unbalanced(
    state: ClusterState, ready: Container[int], count_max: int
) -> dict[tuple[int, int], int]:
    """Return partitions (topic id, number) that a ready node should lead and could, but does
    not, and that node."""
    found: dict[tuple[int, int], int] = {}
    for topic, number, partition in state.all_partitions():
        preferred = partition.replicas[0]
        if partition.leader == preferred or partition.target is not None:
            continue
        if preferred in ready and preferred in partition.isr:
            found[topic.topic_id, number] = preferred
            if len(found) >= count_max:
                break
    return found


def next_move(
    state: ClusterState, moves_max: int, lost: Container[int]
) -> tuple[MoveReplicas, str] | None:
    """Return the next move away from a decommissioning node, and why, or None.

    `lost` nodes have been down for so long that a move to them is planned again and no longer
    counts.
    """
    if not any(node.decommissioning for node in state.nodes.values()):
        return None
    under_way = 0
    waiting: list[tuple[str, int, PartitionState, int]] = []
    for topic, number, partition in state.all_partitions():
        stuck = next((node for node in partition.adding if node in lost), None)
        if partition.target is not None and stuck is None:
            under_way += 1
            if under_way >= moves_max:
                return None
        leaving = next(
            (node for node in partition.wanted if state.nodes[node].decommissioning), None
        )
        if leaving is None and stuck is not None and _leaves(state, partition):
            leaving = stuck
        if leaving is not None:
            waiting.append((topic.name, number, partition, leaving))
    if not waiting:
        return None
    load = Load(state)
    # In a recovery, a copy that a move would drop may be the longest there is.
    for name, number, partition, leaving in [row for row in waiting if row[2].recovery is None]:
        replicas = load.replacement(partition, leaving)
        if replicas is not None:
            reason = f"node {leaving} is being decommissioned"
            return MoveReplicas(name, number, replicas), reason
    return None


def _leaves(state: ClusterState, partition: PartitionState) -> bool:
    """Report whether the move under way takes a replica off a decommissioning node."""
    return any(state.nodes[node].decommissioning for node in partition.removing)
