"""What the HTTP handlers ask of the cluster, and the shapes it travels in. (Pure.)

`Gateway` has two implementations: over the client library with the own node as its bootstrap, which
makes REST one more client of the single publish and read path, and the tests' fake.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from raftq.client.common.errors import Detail, RaftqError
from raftq.client.wire.record import Headers
from raftq.cluster.metadata.state import TopicState

if TYPE_CHECKING:
    from raftq.node.http.queue_gateway import Queues


@dataclass(slots=True)
class Outgoing:
    """Records to publish, as columns of equal length; a column that nobody uses is None."""

    values: list[bytes]
    keys: list[bytes | None] | None = None
    headers: list[Headers | None] | None = None
    partitions: list[int | None] | None = None
    priorities: list[int] | None = None
    ttls_ms: list[int | None] | None = None
    delays_ms: list[int | None] | None = None
    """From now on; only until the handler knows when now is, and has made times of them."""
    deliver_at: list[int | None] | None = None
    """Times in ms."""
    many: bool = field(default=False, compare=False)
    """Whether they came as `messages`, which is how errors name them."""

    def path(self, at: int, name: str) -> str:
        return f"messages[{at}].{name}" if self.many else name

    def set_times(self, now_ms: int) -> None:
        """Delays become times; what is due is not delayed at all."""
        if self.delays_ms is None and self.deliver_at is None:
            return
        nothing: list[int | None] = [None] * len(self.values)
        pairs = zip(self.delays_ms or nothing, self.deliver_at or nothing, strict=True)
        times = [at if delay is None else now_ms + delay for delay, at in pairs]
        due = [at if at is not None and at > now_ms else None for at in times]
        self.delays_ms = None
        self.deliver_at = due if any(at is not None for at in due) else None


class Placed(NamedTuple):
    """Where a record went."""

    partition: int
    offset: int


Outcome = Placed | RaftqError


@dataclass(frozen=True, slots=True)
class Position:
    """From where to read: an offset, a time in ms, or (neither) the first record kept."""

    offset: int | None = None
    time_ms: int | None = None


class Readable(Protocol):
    """A record, whichever class the reader makes of it."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, bytes]: ...
    @property
    def priority(self) -> int: ...


@dataclass(slots=True)
class Page:
    """Records in order of their offsets, and from where to read on."""

    records: Sequence[Readable]
    next_offset: int


class Gateway(Protocol):
    """Everything raises RaftqErrors. Calls may overlap."""

    @property
    def queues(self) -> "Queues": ...

    async def publish(self, topic: TopicState, records: Outgoing) -> list[Outcome]:
        """One outcome per record, in order. Raises what is wrong with all of them."""

    async def read(
        self, topic: str, partition: int, position: Position, limit: int, bytes_max: int
    ) -> Page:
        """What can be read now, without waiting: at most `limit` records and about `bytes_max`
        bytes, but one record if there is one. OffsetOutOfRange where nothing is or will be."""

    async def offsets(self, topic: str) -> Mapping[int, tuple[int, int]]:
        """Start offset and high watermark of each partition that has a leader."""

    async def create_topic(
        self, name: str, partitions: int, replication: int, config: Mapping[str, Detail]
    ) -> int:
        """The number of its partitions. 0 partitions or replicas: the cluster's default."""

    async def delete_topic(self, name: str) -> None: ...

    async def add_partitions(self, name: str, total: int) -> int:
        """The number of partitions after the call."""

    async def close(self) -> None: ...
