"""Which nodes hold the replicas of a partition. (Core.)

Copies of one partition go to different racks (hosts, where no rack is given) as far as there are
enough. Among equal choices, the nodes with the fewest replicas get them. First replicas, which are
the preferred leaders, are spread evenly. So are the followers of one leader, which share its work
when it is gone. Nodes that drain or are down are chosen only when there are not enough others.

The result depends only on the state and is the same on every replica of the metadata.
"""

from collections.abc import Iterable, Sequence

from raftq.cluster.metadata.state import ClusterState, NodeState, PartitionState


class Load:
    """What the nodes hold, counted once and updated while partitions are placed."""

    __slots__ = ("_nodes", "_pairs", "leaders", "replicas")

    def __init__(self, state: ClusterState) -> None:
        self._nodes = [state.nodes[node_id] for node_id in sorted(state.nodes)]
        self.replicas = dict.fromkeys(state.nodes, 0)
        self.leaders = dict.fromkeys(state.nodes, 0)
        self._pairs: dict[tuple[int, int], int] = {}
        for _, _, partition in state.all_partitions():
            self.add(partition.wanted)

    def add(self, replicas: Sequence[int]) -> None:
        self.leaders[replicas[0]] += 1
        for node_id in replicas:
            self.replicas[node_id] += 1
        if len(replicas) > 1:
            pair = replicas[0], replicas[1]
            self._pairs[pair] = self._pairs.get(pair, 0) + 1

    def place(self, replication: int) -> tuple[int, ...]:
        """Return the replicas of a new partition, which counts from then on."""
        first = min(
            self._nodes,
            key=lambda node: (
                _reluctance(node),
                self.leaders[node.node_id],
                self.replicas[node.node_id],
                node.node_id,
            ),
        )
        chosen = [first]
        while len(chosen) < replication:
            chosen.append(self._next(chosen, self._nodes))
        found = tuple(node.node_id for node in chosen)
        self.add(found)
        return found

    def replacement(
        self, partition: PartitionState, leaving: int, unwanted: Iterable[int] = ()
    ) -> tuple[int, ...] | None:
        """Return the replicas with another node in place of `leaving`, or None when no node
        fits."""
        by_id = {node.node_id: node for node in self._nodes}
        wanted = partition.wanted
        banned = {*wanted, *unwanted}
        fit = [node for node in self._nodes if node.node_id not in banned and not _reluctance(node)]
        if not fit:
            return None
        staying = [by_id[node_id] for node_id in wanted if node_id != leaving]
        taken = self._next(staying, fit).node_id
        found = tuple(taken if node_id == leaving else node_id for node_id in wanted)
        self.replicas[leaving] -= 1
        self.replicas[taken] += 1
        return found

    def _next(self, chosen: list[NodeState], among: list[NodeState]) -> NodeState:
        """Return the best further replica for a partition that has these."""
        places: dict[str, int] = {}
        for node in chosen:
            places[node.place] = places.get(node.place, 0) + 1
        taken = {node.node_id for node in chosen}
        leader = chosen[0].node_id if len(chosen) == 1 else None
        return min(
            (node for node in among if node.node_id not in taken),
            key=lambda node: (
                _reluctance(node),
                places.get(node.place, 0),
                self.replicas[node.node_id],
                0 if leader is None else self._pairs.get((leader, node.node_id), 0),
                node.node_id,
            ),
        )


def _reluctance(node: NodeState) -> int:
    """Return 0 for a node that should get replicas, more for one that should not."""
    if node.decommissioning:
        return 3
    if not node.alive:
        return 2
    return 1 if node.draining else 0


def place(state: ClusterState, partitions: int, replication: int) -> list[tuple[int, ...]]:
    """Return replicas for that many new partitions. There must be at least `replication` nodes."""
    assert 0 < replication <= len(state.nodes), (replication, len(state.nodes))
    load = Load(state)
    return [load.place(replication) for _ in range(partitions)]
