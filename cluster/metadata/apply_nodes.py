"""How commands about nodes change the state. (Core.)

    unknown --RegisterNode--> alive --FenceNode--> fenced --RegisterNode--> alive
    fenced, without replicas --RemoveNode--> unknown

A fenced node leads nothing and stays in every isr that it is in: it has everything that was
acknowledged, and the leaders take it out when they need to. A drain ends with the process, a
decommission does not. Each function refuses, by raising a RaftqError, before it changes anything.

The id of a node that is alive belongs to its process. Another process gets the id only as its
successor: it has the directory, and has found that the process before does not answer.
"""

from dataclasses import replace

from raftq.client.common.errors import InvalidArgument, NodeIdTaken, NotEnoughReplicas
from raftq.cluster.metadata.changes import Change, NodeChanged
from raftq.cluster.metadata.commands import FenceNode, Lost, RegisterNode, RemoveNode, SetDraining
from raftq.cluster.metadata.elections import elect_all, with_copies
from raftq.cluster.metadata.recovery import after_loss, untold
from raftq.cluster.metadata.state import (
    NODES_MAX,
    ClusterState,
    NodeState,
    PartitionState,
    TopicState,
)

Answer = tuple[object, list[Change]]


def register_node(state: ClusterState, command: RegisterNode) -> Answer:
    node_id = command.node_id
    old = state.nodes.get(node_id)
    if not command.host or not command.port:
        raise InvalidArgument(f"node {node_id} registers without a host or port")
    if old is None and len(state.nodes) >= NODES_MAX:
        raise InvalidArgument(f"there are {NODES_MAX} nodes already")
    restarted = old is not None and old.incarnation != command.incarnation
    if old is not None and restarted and old.alive:
        _check_successor(old, command)
    decommissioning = old is not None and old.decommissioning
    new = NodeState(
        node_id=node_id,
        host=command.host,
        port=command.port,
        http_port=command.http_port,
        raft_address=command.raft_address,
        rack=command.rack,
        incarnation=command.incarnation,
        alive=True,
        draining=decommissioning or (old is not None and old.draining and not restarted),
        decommissioning=decommissioning,
        unsynced_since=_unsynced_since(state, old, command),
    )
    if new == old:
        return None, []
    state.nodes[node_id] = new
    if old is None or not restarted:
        return None, [NodeChanged(node_id), *elect_all(state, node_id)]
    lost = command.lost
    if lost != "everything" and command.before not in (None, old.incarnation):
        lost = "past"  # its directory is older than its last registration
    wrote_since = old.unsynced_since

    def edit(topic: TopicState, partition: PartitionState) -> PartitionState:
        after = untold(partition, node_id)
        after = after_loss(after, node_id, _lost_of(topic, lost, wrote_since))
        if partition.leader != node_id:
            return after
        # No node leads now: the epoch belonged to the process that is gone.
        return with_copies(after, after.replicas, after.isr, None, after.target)

    return None, [NodeChanged(node_id), *elect_all(state, node_id, edit)]


def _check_successor(holder: NodeState, command: RegisterNode) -> None:
    known = holder.incarnation
    if command.before != known or command.silent != known:
        raise NodeIdTaken(
            f"node {holder.node_id} is alive at {holder.host}:{holder.port}, as another process; "
            "stop it first"
        ).with_details(incarnation=known, host=holder.host, port=holder.port)


def _unsynced_since(state: ClusterState, old: NodeState | None, command: RegisterNode) -> int:
    """Return `unsynced_since` of NodeState. The next process finds what the last one left to the
    kernel; after the machine went down, what is still there was on the disk."""
    if old is not None and old.incarnation == command.incarnation:
        return old.unsynced_since
    if old is None or command.synced or command.lost in ("tail", "everything"):
        return state.index
    return old.unsynced_since


def _lost_of(topic: TopicState, lost: Lost, wrote_since: int) -> Lost:
    """Return what the logs of a topic have lost. With fsync `always` nothing is acknowledged
    before it is synced, but the setting must be older than anything that needed a sync."""
    synced_since = topic.synced_since
    if lost == "tail" and synced_since is not None and synced_since < wrote_since:
        return "nothing"
    return lost


def fence_node(state: ClusterState, command: FenceNode) -> Answer:
    node = _known(state, command.node_id)
    if not node.alive or node.incarnation != command.incarnation:
        return False, []
    node_id = node.node_id
    state.nodes[node_id] = replace(node, alive=False)
    changes = elect_all(state, node_id, lambda topic, partition: untold(partition, node_id))
    return True, [NodeChanged(node_id), *changes]


def set_draining(state: ClusterState, command: SetDraining) -> Answer:
    node_id = command.node_id
    node = _known(state, node_id)
    draining = command.draining or command.decommissioning
    after = replace(node, draining=draining, decommissioning=command.decommissioning)
    changes: list[Change] = []
    if after != node:
        if not command.force:
            if command.decommissioning:
                _check_room(state, node_id)
            elif draining and not node.draining:
                _check_writable(state, node_id)
        state.nodes[node_id] = after
        changes = [NodeChanged(node_id), *elect_all(state, node_id)]
    return state.leading(node_id), changes


def remove_node(state: ClusterState, command: RemoveNode) -> Answer:
    node = _known(state, command.node_id)
    if node.alive:
        raise InvalidArgument(f"node {node.node_id} is alive: stop it before removing it")
    if held := state.replica_count(node.node_id):
        raise InvalidArgument(
            f"node {node.node_id} holds replicas of {held} partitions: decommission it first"
        )
    del state.nodes[node.node_id]
    return None, [NodeChanged(node.node_id)]


def _known(state: ClusterState, node_id: int) -> NodeState:
    node = state.nodes.get(node_id)
    if node is None:
        raise InvalidArgument(f"there is no node {node_id}")
    return node


def _check_writable(state: ClusterState, node_id: int) -> None:
    """Refuse when partitions that can be written now could not be written without the node."""
    for topic, number, partition in state.all_partitions():
        if node_id not in partition.isr or not state.nodes[node_id].alive:
            continue
        needed = max(1, topic.isr_size_min(partition))
        in_sync = sum(state.nodes[member].alive for member in partition.isr)
        if in_sync >= needed > in_sync - 1:
            raise NotEnoughReplicas(
                f"without node {node_id}, {topic.name}/{number} would have {in_sync - 1} of the "
                f"{needed} replicas in sync that a write needs; wait, or force the drain"
            )


def _check_room(state: ClusterState, node_id: int) -> None:
    """Refuse when the replicas of the node have nowhere to go."""
    others = [
        node
        for node in state.nodes.values()
        if node.node_id != node_id and node.alive and not node.decommissioning
    ]
    for topic, number, partition in state.all_partitions():
        if node_id in partition.wanted and len(partition.wanted) > len(others):
            raise NotEnoughReplicas(
                f"without node {node_id}, {len(others)} nodes are left for the "
                f"{len(partition.wanted)} replicas of {topic.name}/{number}"
            )
