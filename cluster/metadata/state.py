"""What the cluster has decided: nodes, topics, partitions, producer ids. (Core.)

Only the apply modules change a ClusterState, and they replace entries and never mutate them: a
NodeState, TopicState or PartitionState that a caller holds stays as it was.

    always   the leader is in the isr and alive, and the isr is within the replicas
    recovery no node leads before copies have reported where they end (recovery.py). Only then is
             the isr empty: the last member in sync has lost its data
    epoch    grows with every change of leader, also to none, and also when the leader was
             restarted and leads again
    version  grows with every change of a PartitionState
    target   the replicas of a move under way; `replicas` then has the old and the new ones
    assignments
             of each replica, the version at which the node became one: a node that is moved away
             and back is another replica, and its earlier reports have no meaning

`isr` loses a member only by a proposal of its leader or because the member lost data. So every
member has everything that was acknowledged and may be elected.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from raftq.cluster.metadata.topic_config import TopicConfig

NODES_MAX = 256
TOPICS_MAX = 8192
"""One reply about all topics can hold this many."""
PARTITIONS_MAX = 4096
"""Per topic."""
PARTITIONS_TOTAL_MAX = 65_536


@dataclass(frozen=True, slots=True)
class NodeState:
    node_id: int
    host: str
    port: int
    http_port: int
    raft_address: str
    rack: str
    incarnation: int
    alive: bool
    draining: bool
    """It leads only what no other node can lead. A decommissioning node is also draining."""
    decommissioning: bool
    unsynced_since: int = 0
    """The index of a registration: everything that the node wrote before it is on its disk. It
    is its own registration if the process before stopped cleanly or the machine went down, else
    that of the process before."""

    @property
    def place(self) -> str:
        """What copies of a partition should not share: the rack, or the host without a rack."""
        return self.rack or self.host


AddressOf = Callable[[NodeState], tuple[str, int]]
"""Returns the address at which this node reaches the native listener of another node."""


def own_address(node: NodeState) -> tuple[str, int]:
    """Return the address that the other node gave itself."""
    return node.host, node.port


@dataclass(frozen=True, slots=True)
class EndReport:
    """Where the logs of one copy end: (last epoch, end offset) of each log."""

    node_id: int
    ends: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovery of a partition without a copy that is known to have everything.

    The longest copy shall lead. A report of a node that was restarted or fenced since is dropped:
    the node has to report again.
    """

    since: int
    """The version of the partition that began it. Reports name it."""
    asked: tuple[int, ...]
    told: tuple[EndReport, ...] = ()

    @property
    def waits_for(self) -> tuple[int, ...]:
        known = [report.node_id for report in self.told]
        return tuple(node for node in self.asked if node not in known)


@dataclass(frozen=True, slots=True)
class PartitionState:
    replicas: tuple[int, ...]
    """The preferred leader first."""
    isr: tuple[int, ...]
    """In the order of `replicas`."""
    leader: int | None
    epoch: int
    version: int
    assignments: tuple[int, ...]
    """In the order of `replicas`."""
    target: tuple[int, ...] | None = None
    recovery: Recovery | None = None
    """None while the partition has a leader."""

    @property
    def wanted(self) -> tuple[int, ...]:
        """The replicas once the move under way, if any, is finished."""
        return self.replicas if self.target is None else self.target

    @property
    def adding(self) -> tuple[int, ...]:
        """Members of the target that are not in sync yet. The move waits for them."""
        return tuple(node for node in self.target or () if node not in self.isr)

    @property
    def removing(self) -> tuple[int, ...]:
        """Replicas that are dropped when the move is finished."""
        target = self.target
        return () if target is None else tuple(node for node in self.replicas if node not in target)


@dataclass(frozen=True, slots=True)
class TopicState:
    name: str
    topic_id: int
    config: TopicConfig
    partitions: tuple[PartitionState, ...]
    queued: bool = False
    """Its partitions have a ledger and delays beside their data. This is never undone."""
    synced_since: int | None = None
    """The index since which its fsync is `always`, 0 for a topic that always had it, None while
    it has another fsync."""

    @property
    def replication(self) -> int:
        """The fewest replicas that a partition has, once all moves are finished."""
        return min(len(partition.wanted) for partition in self.partitions)

    def isr_size_min(self, partition: PartitionState) -> int:
        """The size below which no leader shrinks the isr, and acks=all acknowledges nothing."""
        return min(self.config.min_insync, len(partition.replicas))


@dataclass(frozen=True, slots=True)
class PartitionSummary:
    """Counts of partitions. Only members of the isr that are alive count as in sync."""

    topics: int
    partitions: int
    leaderless: int
    under_replicated: int
    under_min_insync: int
    moves: int
    recovering: int


@dataclass(slots=True)
class ClusterState:
    """The state of the cluster. Only the apply modules change it. Dicts keep the order of
    arrival."""

    cluster_id: str
    nodes: dict[int, NodeState] = field(default_factory=dict)
    topics: dict[str, TopicState] = field(default_factory=dict)
    topic_names: dict[int, str] = field(default_factory=dict)
    partition_count: int = 0
    topic_id_next: int = 1
    producer_id_next: int = 1
    producers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Named producers: id and epoch."""
    index: int = 0
    """The index of the last command that was not refused."""
    memo: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
    """By topic id: what info.py made of an entry."""

    def topic_by_id(self, topic_id: int) -> TopicState | None:
        name = self.topic_names.get(topic_id)
        return None if name is None else self.topics[name]

    def partition(self, topic: str, partition: int) -> PartitionState | None:
        found = self.topics.get(topic)
        if found is None or not 0 <= partition < len(found.partitions):
            return None
        return found.partitions[partition]

    def is_alive(self, node_id: int, incarnation: int | None = None) -> bool:
        """Report whether the node has a lease, as this incarnation if one is given."""
        node = self.nodes.get(node_id)
        return node is not None and node.alive and incarnation in (None, node.incarnation)

    def all_partitions(self) -> Iterator[tuple[TopicState, int, PartitionState]]:
        for topic in self.topics.values():
            for number, partition in enumerate(topic.partitions):
                yield topic, number, partition

    def summary(self) -> PartitionSummary:
        alive = {node_id for node_id, node in self.nodes.items() if node.alive}
        leaderless = under_replicated = under_min_insync = moves = recovering = 0
        for topic, _, partition in self.all_partitions():
            in_sync = sum(node in alive for node in partition.isr)
            leaderless += partition.leader is None
            under_replicated += in_sync < min(len(partition.replicas), len(partition.wanted))
            under_min_insync += in_sync < topic.isr_size_min(partition)
            moves += partition.target is not None
            recovering += partition.recovery is not None
        return PartitionSummary(
            topics=len(self.topics),
            partitions=self.partition_count,
            leaderless=leaderless,
            under_replicated=under_replicated,
            under_min_insync=under_min_insync,
            moves=moves,
            recovering=recovering,
        )

    def leading(self, node_id: int) -> int:
        """Count the partitions that the node leads."""
        return sum(partition.leader == node_id for _, _, partition in self.all_partitions())

    def replica_count(self, node_id: int) -> int:
        """Count the partitions that have the node as a replica, moves to it included."""
        return sum(node_id in partition.replicas for _, _, partition in self.all_partitions())
