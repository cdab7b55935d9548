"""What the cluster has decided: nodes, topics, partitions, producer ids. (Core.)

Only metadata.py changes a ClusterState, and it replaces entries and never mutates them: whoever
holds a NodeState, TopicState or PartitionState holds a fact that stays as it was.

    leader in isr, isr within replicas, and a leader is alive: at all times
    recovery nobody leads before copies have told where they end (recovery.py); only then is the
             isr empty, which it is when the last one in sync lost what it had
    epoch    grows with every change of leader, also to none and also when a node that led was
             restarted and leads again
    version  grows with every change of a PartitionState
    target   the replicas of a move under way; `replicas` then has the old and the new ones
    assignments
             of each replica, the version at which the node was made one: a node that is moved away
             and back is another replica, and what it said before means nothing

`isr` only loses a member by its leader's word or because the member lost data, so every member has
everything that was acknowledged and may be elected.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from raftq.cluster.metadata.topic_config import TopicConfig

NODES_MAX = 256
TOPICS_MAX = 8192
"""As many as one reply about all topics can hold."""
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
    """It leads only what nobody else can. A decommissioning node is also draining."""
    decommissioning: bool
    unsynced_since: int = 0
    """The index of a registration: all that the node wrote before is on its disk. Its own, if the
    process before it stopped cleanly or the machine went down; else that one's."""

    @property
    def place(self) -> str:
        """What copies of a partition should not share: the rack or, if not given, the host."""
        return self.rack or self.host


AddressOf = Callable[[NodeState], tuple[str, int]]
"""Where this node reaches another one's native listener."""


def own_address(node: NodeState) -> tuple[str, int]:
    """Where the other node says that it is."""
    return node.host, node.port


@dataclass(frozen=True, slots=True)
class EndReport:
    """Where the logs of one copy end: (last epoch, end offset) of each log."""

    node_id: int
    ends: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Recovery:
    """A partition of which nobody is known to have everything: the longest copy shall lead.

    What was told by a node that was restarted or fenced since is gone: it has to tell again.
    """

    since: int
    """The version of the partition that began it; a telling names it."""
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
    """None whenever somebody leads."""

    @property
    def wanted(self) -> tuple[int, ...]:
        """The replicas once the move under way, if any, is finished."""
        return self.replicas if self.target is None else self.target

    @property
    def adding(self) -> tuple[int, ...]:
        """Members of the target that are not in sync yet: the move waits for these."""
        return tuple(node for node in self.target or () if node not in self.isr)

    @property
    def removing(self) -> tuple[int, ...]:
        """Replicas that go when the move is finished."""
        target = self.target
        return () if target is None else tuple(node for node in self.replicas if node not in target)


@dataclass(frozen=True, slots=True)
class TopicState:
    name: str
    topic_id: int
    config: TopicConfig
    partitions: tuple[PartitionState, ...]
    queued: bool = False
    """Its partitions have a ledger and delays beside their data. Never taken back."""
    synced_since: int | None = None
    """The index since which its fsync is `always`, 0 for a topic that was never without; None while
    it is not."""

    @property
    def replication(self) -> int:
        """The fewest replicas that a partition has, once all moves are finished."""
        return min(len(partition.wanted) for partition in self.partitions)

    def isr_size_min(self, partition: PartitionState) -> int:
        """Below this size no leader shrinks the isr, and nothing is acknowledged with acks=all."""
        return min(self.config.min_insync, len(partition.replicas))


@dataclass(frozen=True, slots=True)
class PartitionSummary:
    """Counts of partitions; only members of the isr that are alive count as in sync."""

    topics: int
    partitions: int
    leaderless: int
    under_replicated: int
    under_min_insync: int
    moves: int
    recovering: int


@dataclass(slots=True)
class ClusterState:
    """Read-only for everybody but metadata.py. Dicts keep the order in which entries came."""

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
    """Of the last command that was not refused."""
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
        """Whether the node has a lease, as this incarnation if one is given."""
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
        """How many partitions the node leads."""
        return sum(partition.leader == node_id for _, _, partition in self.all_partitions())

    def replica_count(self, node_id: int) -> int:
        """How many partitions have the node as a replica, moves to it included."""
        return sum(node_id in partition.replicas for _, _, partition in self.all_partitions())
