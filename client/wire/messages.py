"""Every request and response of the native protocol, one Struct each. (Pure.)

    kind  request        reply
    0                    ErrorReply, to any request or (correlation id 0) about the connection
    1     Hello          HelloReply         first on every connection, and only there
    3     Ping           PingReply
    5     Metadata       MetadataReply
    7     Produce +raw   ProduceReply
    9     Fetch          FetchReply +raw
    11    ListOffsets    ListOffsetsReply
    13    InitProducer   InitProducerReply

The kind of a reply is that of its request plus one. `+raw` messages are followed by record batches,
back to back and unchanged, outside the header. To add a message: a class with a free `kind`,
registered; to add a field: one with a default, at the end (see schema.py for the rules).

`encode_message` and `decode_message` check types, ranges and the relations between fields; whether
a topic exists or an epoch is right is for those who know.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from msgspec import Meta, field

from raftq.client.common.errors import (
    LocalProtocolError,
    Outcome,
    RaftqError,
    RemoteProtocolError,
    UnknownCode,
)
from raftq.client.common.types import Buffer
from raftq.client.wire.frames import FRAME_BYTES_MAX, Frame, encode_frame
from raftq.client.wire.schema import (
    TEXT_MAX,
    Bad,
    Codec,
    Details,
    Items,
    WireStruct,
    no_details,
)

VERSION_MIN = 1
VERSION_MAX = 1

U8 = Annotated[int, Meta(ge=0, le=0xFF)]
U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
U31 = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF)]
I64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Offset = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
WaitMs = Annotated[int, Meta(ge=0, le=600_000)]
NodeId = U31
Nodes = Annotated[tuple[NodeId, ...], Meta(max_length=64)]
Settings = Annotated[Details, Meta(max_length=64)]
Epoch = U32
ErrorCode = Annotated[str, Meta(max_length=64)]  # "" where there is none
Name = Annotated[str, Meta(max_length=255)]
Acks = Literal["none", "leader", "all"]
Role = Literal["client", "node"]

EPOCH_ANY = 0xFFFF_FFFF  # of a caller that does not know the epoch and does not want to be fenced
MESSAGE_CHARACTERS_MAX = 2048

M = TypeVar("M", bound="WireMessage")


class WireMessage(WireStruct, frozen=True):
    """Base of everything that is sent: knows its kind and whether batches follow the header."""

    kind: ClassVar[int] = -1
    carries_raw: ClassVar[bool] = False

    def check(self, raw_bytes: int) -> None:
        """Raise Bad when the fields contradict each other or the size of the raw part."""


R_co = TypeVar("R_co", bound=WireMessage, covariant=True)


class Request(WireMessage, Generic[R_co], frozen=True):
    """A message that asks for the reply `R_co`."""


_classes: dict[int, type[WireMessage]] = {}
_codecs: dict[int, Codec[Any]] = {}


def register(cls: type[M]) -> type[M]:
    """Make a message known under its kind; a repeated or misplaced kind is refused."""
    kind = cls.kind
    if not 0 <= kind <= 0xFF or kind in _classes:
        raise TypeError(f"{cls.__name__} needs a kind of its own in 0..255, not {kind}")
    if issubclass(cls, Request) != (kind % 2 == 1):
        raise TypeError(f"{cls.__name__}: requests have odd kinds and replies even ones")
    _classes[kind] = cls
    _codecs[kind] = Codec(cls)
    return cls


def request_kinds() -> frozenset[int]:
    """What a node accepts."""
    return frozenset(kind for kind in _classes if kind % 2 == 1)


def reply_kinds() -> frozenset[int]:
    """What a client accepts."""
    return frozenset(kind for kind in _classes if kind % 2 == 0)


def class_of(kind: int) -> type[WireMessage]:
    return _classes[kind]


def encode_message(
    message: WireMessage,
    correlation_id: int,
    raw: Sequence[Buffer] = (),
    bytes_max: int = FRAME_BYTES_MAX,
) -> list[Buffer]:
    """The message as fragments to be written in order; a bad one is a LocalProtocolError."""
    kind = message.kind
    codec = _codecs.get(kind)
    if codec is None:
        raise LocalProtocolError(f"{type(message).__name__} is not a registered message")
    header = codec.encode(message)
    try:
        _check_raw(message, sum(map(len, raw)))
    except Bad as error:
        raise LocalProtocolError(f"{type(message).__name__}{error}") from None
    return encode_frame(kind, correlation_id, header, raw, bytes_max)


def decode_message(frame: Frame) -> WireMessage:
    """The message in a frame; a bad one is a RemoteProtocolError that names the field."""
    codec = _codecs.get(frame.kind)
    if codec is None:
        raise RemoteProtocolError(f"message kind {frame.kind} is not known here")
    message: WireMessage = codec.decode(frame.header)
    try:
        _check_raw(message, len(frame.raw))
    except Bad as error:
        raise RemoteProtocolError(f"{type(message).__name__}{error}") from None
    return message


class Ranged(Protocol):
    """Something that takes the bytes [start, start + length) of the raw part."""

    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...


def check_ranges(partitions: Sequence[Ranged], raw_bytes: int) -> None:
    """The ranges follow each other without gap or overlap and cover the raw part."""
    end = 0
    for at, one in enumerate(partitions):
        if one.length:
            if one.start != end:
                raise Bad(f".partitions[{at}].start: {one.start} is not {end}")
            end += one.length
    if end != raw_bytes:
        raise Bad(f".partitions: they cover {end} of {raw_bytes} bytes")


def _check_raw(message: WireMessage, raw_bytes: int) -> None:
    if raw_bytes and not message.carries_raw:
        raise Bad(f": {raw_bytes} bytes follow a message that has no raw part")
    message.check(raw_bytes)


@register
class ErrorReply(WireMessage, frozen=True):
    """A refusal with the decision it carries; `to_error` gives the class that was raised."""

    kind: ClassVar[int] = 0

    code: ErrorCode
    message: Annotated[str, Meta(max_length=TEXT_MAX)]
    outcome: Literal["failed", "unknown"] = "unknown"
    retriable: bool = False
    refresh_route: bool = False
    details: Annotated[Details, Meta(max_length=32)] = field(default_factory=no_details)

    @classmethod
    def from_error(cls, error: RaftqError) -> "ErrorReply":
        """What the other side needs to raise the same error."""
        text = str(error).encode(errors="replace").decode()[:MESSAGE_CHARACTERS_MAX]
        return cls(
            error.code,
            text,
            error.outcome,
            error.retriable,
            error.refresh_route,
            error.details,
        )

    def to_error(self) -> RaftqError:
        """The error to raise here; a code of a newer version becomes an UnknownCode."""
        known = RaftqError.registry.get(self.code)
        details = self.details
        if known is None:
            known, details = UnknownCode, {**details, "code": self.code}
        error = known(self.message)
        outcome: Outcome = self.outcome
        error.outcome = outcome
        error.retriable = self.retriable
        error.refresh_route = self.refresh_route
        if details:
            error.details = details
        return error


@register
class HelloReply(WireMessage, frozen=True):
    """The connection is open, in this version."""

    kind: ClassVar[int] = 2

    version: U16
    node_id: NodeId
    cluster_id: Name
    frame_bytes_max: U32 = FRAME_BYTES_MAX
    incarnation: Offset = 0  # of the process that answers


@register
class Hello(Request[HelloReply], frozen=True):
    """Who calls, and the protocol versions it speaks, both ends included."""

    kind: ClassVar[int] = 1

    version_min: U16
    version_max: U16
    role: Role
    name: Name = ""
    cluster_proof: Annotated[bytes, Meta(max_length=256)] = b""

    def check(self, raw_bytes: int) -> None:
        if self.version_min > self.version_max:
            raise Bad(f".version_min: {self.version_min} is over {self.version_max}")


@register
class PingReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 4


@register
class Ping(Request[PingReply], frozen=True):
    """Answered at once by any node."""

    kind: ClassVar[int] = 3


class NodeInfo(WireStruct, frozen=True):
    """Where a node listens, and how it is."""

    node_id: NodeId
    host: Name
    port: U16
    http_port: U16 = 0
    raft_address: Name = ""
    rack: Name = ""
    incarnation: Offset = 0
    alive: bool = True
    draining: bool = False


class PartitionInfo(WireStruct, frozen=True):
    """Who leads a partition (None: no node at the moment) and who holds copies."""

    partition: U31
    leader: NodeId | None
    epoch: Epoch
    replicas: Nodes
    isr: Nodes
    target: Nodes = ()  # of a move under way; () when there is none
    version: Offset = 0  # grows with every change of the partition
    waits_for: Nodes = ()  # they have to say where their copies end before any node leads


class TopicInfo(WireStruct, frozen=True):
    """A topic's partitions, or why there are none."""

    topic: Name
    partitions: Items[PartitionInfo] = ()
    error: ErrorCode = ""
    topic_id: Offset = 0
    config: Settings = field(default_factory=no_details)


@register
class MetadataReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 6

    cluster_id: Name
    nodes: Annotated[tuple[NodeInfo, ...], Meta(max_length=1024)]
    topics: Items[TopicInfo]
    controller: NodeId | None = None


@register
class Metadata(Request[MetadataReply], frozen=True):
    """Asks for nodes and topics; None asks for all topics."""

    kind: ClassVar[int] = 5

    topics: Items[Name] | None = None


@register
class ProduceReply(WireMessage, frozen=True):
    """Where each batch begins, in the order they were sent."""

    kind: ClassVar[int] = 8

    base_offsets: Items[Offset]
    epoch: Epoch = 0
    throttle_ms: WaitMs = 0


@register
class Produce(Request[ProduceReply], frozen=True):
    """Appends the batches that follow to one partition. Without any it asks whether one would be
    taken: it is answered or refused as one would be."""

    kind: ClassVar[int] = 7
    carries_raw: ClassVar[bool] = True

    topic: Name
    partition: U31
    epoch: Epoch = EPOCH_ANY
    acks: Acks = "all"
    timeout_ms: WaitMs = 30_000
    delayed: bool = False
    """The batches wait in the partition's delays until their records are due."""
    copies: bool = False
    """They are a node's copies of records that were taken before, dead letters and redrives: the
    topic's limit for values does not hold. From nodes only."""


class FetchPartition(WireStruct, frozen=True):
    """From where to read one partition, and how much at most."""

    topic: Name
    partition: U31
    offset: Offset
    bytes_max: U31 = 1024 * 1024
    epoch: Epoch = EPOCH_ANY
    outlines: bool = False
    """Leave out keys, values and headers, see outline.py. `bytes_max` is then what the node reads.
    One that does not know this sends everything."""


class FetchedPartition(WireStruct, frozen=True):
    """Batches of one partition: the bytes [start, start + length) of the raw part."""

    topic: Name
    partition: U31
    error: ErrorCode = ""
    high_watermark: Offset = 0
    start_offset: Offset = 0
    start: U32 = 0
    length: U32 = 0
    epoch: Epoch = 0


@register
class FetchReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 10
    carries_raw: ClassVar[bool] = True

    partitions: Items[FetchedPartition]
    throttle_ms: WaitMs = 0

    def check(self, raw_bytes: int) -> None:
        check_ranges(self.partitions, raw_bytes)


@register
class Fetch(Request[FetchReply], frozen=True):
    """Waits until `bytes_min` can be read from these partitions together, or `wait_ms` pass."""

    kind: ClassVar[int] = 9

    partitions: Items[FetchPartition]
    wait_ms: WaitMs = 0
    bytes_min: U31 = 1


class OffsetQuery(WireStruct, frozen=True):
    """`at` is a timestamp in ms when `by` is "time", and not used otherwise."""

    topic: Name
    partition: U31
    by: Literal["earliest", "latest", "time"]
    at: I64 = 0


class OffsetAnswer(WireStruct, frozen=True):
    topic: Name
    partition: U31
    error: ErrorCode = ""
    offset: Offset = 0
    epoch: Epoch = 0


@register
class ListOffsetsReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 12

    answers: Items[OffsetAnswer]


@register
class ListOffsets(Request[ListOffsetsReply], frozen=True):
    """Where partitions begin, end, or reach a time."""

    kind: ClassVar[int] = 11

    queries: Items[OffsetQuery]


@register
class InitProducerReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 14

    producer_id: Offset
    producer_epoch: U32


@register
class InitProducer(Request[InitProducerReply], frozen=True):
    """Asks for a producer id; a named producer gets its old id and a new epoch."""

    kind: ClassVar[int] = 13

    name: Name = ""
