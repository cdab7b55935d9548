"""What the HTTP handlers ask of the cluster, and the shapes it travels in. (Pure.)

`Gateway` has two implementations: over the client library with the own node as its bootstrap, which
makes REST one more client of the single publish and read path, and the tests' fake.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from raftq.client.wire.errors import Detail, RaftqError
from raftq.client.wire.record import Headers
from raftq.cluster.state import TopicState


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
    """From now on; filled only for a gateway that supports delays."""


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
    def supports_ttl(self) -> bool: ...

    @property
    def supports_delay(self) -> bool: ...

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
