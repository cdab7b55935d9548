"""What a consumer of the embedded queue holds: messages and dead letters. (Pure.)"""

from dataclasses import dataclass, field

from raftq.client.common.names import DLQ_HEADER, LANE_NAMES
from raftq.client.wire.record import Headers

DELAYED_ID_PREFIX = "d"
DLQ_FACTS = frozenset(
    DLQ_HEADER + fact
    for fact in (
        "reason", "topic", "partition", "offset", "group", "attempts", "first-delivery",
        "last-delivery", "error",
    )
)  # fmt: skip
"""The headers a dead letter has on top of its own."""


class Held:
    """One grant as its messages see it: they all share this object."""

    __slots__ = ("attempt", "group", "lane", "nonce", "queue")

    def __init__(self, queue: str, group: str, lane: int, attempt: int, nonce: int) -> None:
        self.queue = queue
        self.group = group
        self.lane = lane
        self.attempt = attempt
        self.nonce = nonce


class Message:
    """One delivery of one message."""

    __slots__ = ("_headers", "delay_offset", "expires_at_ms", "held", "key", "offset",
                 "timestamp_ms", "value")  # fmt: skip

    def __init__(  # noqa: PLR0913 - built by map() over columns, so every field is positional
        self,
        offset: int,
        value: bytes,
        key: bytes | None,
        headers: Headers | None,
        timestamp_ms: int,
        expires_at_ms: int,
        delay_offset: int,
        held: Held,
    ) -> None:
        self.offset = offset
        self.value = value
        self.key = key
        self._headers = headers
        self.timestamp_ms = timestamp_ms
        self.expires_at_ms = expires_at_ms
        self.delay_offset = delay_offset
        self.held = held

    @property
    def id(self) -> str:
        """What `enqueue` returned for it."""
        return str(self.offset) if self.delay_offset < 0 else delayed_id(self.delay_offset)

    @property
    def headers(self) -> Headers:
        if self._headers is None:
            self._headers = {}
        return self._headers

    @property
    def timestamp(self) -> float:
        """When it was enqueued (a delayed one: when it became due), in seconds since 1970."""
        return self.timestamp_ms / 1000

    @property
    def expires_at(self) -> float | None:
        """When its time to live ends, in seconds since 1970; None for never."""
        return self.expires_at_ms / 1000 if self.expires_at_ms else None

    @property
    def priority(self) -> str:
        return LANE_NAMES[self.held.lane]

    @property
    def attempt(self) -> int:
        """1 for the first delivery to this group."""
        return self.held.attempt

    @property
    def group(self) -> str:
        return self.held.group

    @property
    def receipt(self) -> str:
        """Proof of this one delivery: `queue:partition:offset:attempt:nonce`."""
        held = self.held
        name = held.queue.rpartition("/")[2]
        return f"{name}:0:{self.offset}:{held.attempt}:{held.nonce}"

    def __repr__(self) -> str:
        return (
            f"<Message id={self.id} priority={self.priority} attempt={self.attempt} "
            f"value={self.value[:32]!r}{'...' if len(self.value) > 32 else ''}>"
        )


@dataclass(slots=True)
class DeadMessage:
    """A message that was given up, with the facts of its failure."""

    dead_offset: int
    value: bytes
    key: bytes | None
    headers: Headers
    priority: str
    timestamp: float
    """When it became a dead letter."""
    reason: str
    error: str
    group: str
    offset: int
    """Where the message stood in the queue."""
    attempts: int
    first_delivery: float
    last_delivery: float
    """In seconds since 1970, to the millisecond."""


@dataclass(slots=True)
class DelayedMessage:
    """A message that is not yet due."""

    id: str
    deliver_at: float
    value: bytes
    key: bytes | None
    headers: Headers
    priority: str


@dataclass(slots=True)
class LaneStats:
    """Messages of one lane, as the default group sees them."""

    pending: int = 0
    total: int = 0


@dataclass(slots=True)
class QueueStats:
    """A moment's picture of a queue; counts are the default group's unless said otherwise."""

    total: int = 0
    """Messages in the log, settled ones included, until retention drops them."""
    pending: int = 0
    """Ready or waiting for a retry, not in flight."""
    in_flight: int = 0
    waiting: int = 0
    """The part of `pending` that waits for a retry time."""
    delayed: int = 0
    dead: int = 0
    settled: int = 0
    damaged: int = 0
    """Messages that cannot be read because their batch fails its checksum or its file is gone:
    delayed ones and dead letters included."""
    lanes: dict[str, LaneStats] = field(default_factory=dict)
    groups: dict[str, dict[str, int]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    segments: int = 0
    disk_bytes: int = 0
    start_offset: int = 0
    end_offset: int = 0
    flushed_offset: int = 0
    settled_offset: int = 0
    paused: bool = False


def record_bytes(value: bytes, key: bytes | None, headers: Headers | None) -> int:
    """About what a record takes in a batch, never less."""
    size = len(value) if key is None else len(value) + len(key)
    if headers:
        size += sum([4 * len(name) + len(item) + 10 for name, item in headers.items()])
    return size + 64


def delayed_id(delay_offset: int) -> str:
    return f"{DELAYED_ID_PREFIX}{delay_offset}"
