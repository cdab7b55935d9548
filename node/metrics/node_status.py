"""What the HTTP side may read of its node. (Pure.)

The node and the fake of the tests implement `NodeFacts`. Everything in it is read on the event
loop, at the moment of a request or a scrape; nothing is kept.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from raftq.cluster.metadata.log import MetadataLog

Role = Literal["leader", "follower", "none"]


@dataclass(slots=True)
class ReplicaStats:
    """One replica on this node, as it is now. Counters began when the replica was opened."""

    topic: str
    topic_id: int
    partition: int
    role: Role
    epoch: int
    start_offset: int
    end_offset: int
    high_watermark: int
    flushed_offset: int
    isr: tuple[int, ...]
    size_bytes: int
    segments: int = 1
    appended_records: int = 0
    """What this replica accepted from producers, as the leader."""
    appended_bytes: int = 0
    append_count: int = 0
    """The number of appends to the log, whatever their size, and the total time they took."""
    append_seconds: float = 0.0
    duplicates: int = 0
    """Batches that producers sent again."""
    fetched_records: int = 0
    """What this replica handed to consumers."""
    fetched_bytes: int = 0
    truncations: int = 0
    follower_ends: Mapping[int, int] = field(default_factory=dict)
    """On a leader: the known end of the log of each other replica."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A group on a partition that this node leads. Counters began when the group was created,
    whichever node led the partition since."""

    topic: str
    partition: int
    group: str
    lag: int
    in_flight: int = 0
    waiting: int = 0
    paused: bool = False
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counters of queue groups, by what became of records. Readers have none."""


@dataclass(frozen=True, slots=True)
class DelayedStats:
    """The delayed records of a partition that this node leads. Counters began with the
    leadership."""

    topic: str
    partition: int
    pending: int
    fired: int = 0
    cancelled: int = 0
    late_ms_max: int = 0


@dataclass(frozen=True, slots=True)
class CoordinatedGroup:
    """A group that this node coordinates."""

    group: str
    members: int
    generation: int


class NodeFacts(Protocol):
    """What the HTTP side reads of its node."""

    @property
    def node_id(self) -> int: ...

    @property
    def cluster_id(self) -> str: ...

    @property
    def started_at(self) -> int:
        """Wall clock, in ms."""

    @property
    def native_address(self) -> tuple[str, int]:
        """The address at which the node itself reaches its native listener."""

    @property
    def metadata(self) -> MetadataLog: ...

    def uptime_s(self) -> float: ...

    def replicas(self) -> Iterable[ReplicaStats]: ...

    def groups(self) -> Iterable[GroupStats]: ...

    def delayed(self) -> Iterable[DelayedStats]: ...

    def coordinated(self) -> Iterable[CoordinatedGroup]: ...

    def checks(self) -> Mapping[str, tuple[bool, str]]:
        """Return the conditions of readiness: name -> (whether it holds, a sentence)."""

    def connections(self) -> int:
        """Open connections of the native listener."""
