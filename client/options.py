"""Settings of producers, consumers and admin clients. (Shell: it reads the wall clock.)

Durations are in milliseconds. Everything that is wrong is reported at once, as a ConfigError.
`wall_ms` and `rng` are settings so that a simulation can pass its own; everything else that has to
do with time is read from the event loop.
"""

import random
import re
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict

from raftq.client.common.backoff import Backoff
from raftq.client.common.errors import ConfigError, InvalidArgument
from raftq.client.common.names import LANE_NAMES
from raftq.client.wire.codecs import CODECS
from raftq.client.wire.frames import FRAME_BYTES_MAX
from raftq.client.wire.layout import BATCH_BYTES_MAX, RECORDS_MAX
from raftq.client.wire.messages import VERSION_MAX, VERSION_MIN, Acks, Role
from raftq.client.wire.record import VALUE_BYTES_MAX

PORT_DEFAULT = 7070
LANES: dict[str | int, int] = {
    **{name: lane for lane, name in enumerate(LANE_NAMES)},
    **{lane: lane for lane in range(len(LANE_NAMES))},
}

Address = tuple[str, int]
Bootstrap = str | Sequence[str]
Reset = Literal["earliest", "latest", "none"]
Compression = Literal["none", "lz4", "zstd"]
Rebalanced = Callable[[list[tuple[str, int]]], Any]
NAME_MAX = 255


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Limits of one connection. Durations are in milliseconds."""

    name: str = ""
    """What the node's log calls this caller."""
    role: Role = "client"
    cluster_proof: bytes = b""
    """Proof of knowing the cluster's secret; what it has to be is decided by the node."""
    version_min: int = VERSION_MIN
    version_max: int = VERSION_MAX
    connect_ms: int = 5_000
    """For connecting and the handshake together. Too short: slow networks never connect."""
    request_ms: int = 30_000
    """Deadline of a request that does not bring its own."""
    in_flight_max: int = 256
    in_flight_bytes_max: int = 16 * 1024 * 1024
    """More fills the node's memory and delays small requests behind big ones. A single request may
    be bigger: it then travels alone."""
    queued_max: int = 10_000
    abandoned_max: int = 1_024
    """Timed-out requests whose replies are still owed; a node that owes more is taken for dead."""
    frame_bytes_max: int = FRAME_BYTES_MAX
    ping_ms: int = 0
    """0: never. Otherwise a node that is silent for twice as long is taken for dead. Too short: a
    busy node is."""

    def __post_init__(self) -> None:
        numbers = (
            "connect_ms", "request_ms", "in_flight_max", "in_flight_bytes_max", "queued_max",
            "abandoned_max", "frame_bytes_max",
        )  # fmt: skip
        wrong = [f"{name} must be at least 1" for name in numbers if getattr(self, name) < 1]
        if self.ping_ms < 0:
            wrong.append("ping_ms must be at least 0")
        if wrong:
            raise ConfigError("; ".join(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """What every client needs to find the cluster and to keep trying."""

    name: str = ""
    """What the nodes' logs call this client."""
    connect_ms: int = 3_000
    """For connecting and the handshake. Too short: slow networks never connect."""
    ping_ms: int = 2_000
    """A node from which nothing comes for twice as long is taken for dead; 0: never."""
    request_ms: int = 10_000
    """For one attempt of a request. Too short: busy nodes are asked twice."""
    bootstrap_ms: int = 5_000
    """For how long a client that has not yet reached any node keeps trying."""
    topic_grace_ms: int = 3_000
    """For how long a topic that the nodes do not know may still turn up: a new topic is not known
    everywhere at once."""
    refresh_ms: int = 15_000
    """How often routes are asked for even if nothing fails. So long does it take at most until a
    producer uses new partitions; until then keys go where they went before, so while partitions are
    added two producers may disagree about a key."""
    refresh_ms_min: int = 20
    """Routes are not asked for more often than this."""
    retry_backoff_ms: int = 20
    """The wait before the first retry."""
    retry_backoff_ms_max: int = 500
    """Retries wait from `retry_backoff_ms` on, twice as long each time, up to this."""
    in_flight_bytes_max: int = 16 * 1024 * 1024
    """Unanswered bytes per connection. Too much delays small requests behind big ones."""
    tls: ssl.SSLContext | None = None
    """Encrypts connections, for a proxy that ends TLS; nodes have no setting for it yet."""
    wall_ms: Callable[[], int] = wall_clock_ms
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        wrong = list(self.problems())
        if wrong:
            raise ConfigError("; ".join(wrong))

    def problems(self) -> Iterable[str]:
        yield from at_least(
            self,
            1,
            "connect_ms", "request_ms", "bootstrap_ms", "refresh_ms", "refresh_ms_min",
            "retry_backoff_ms", "in_flight_bytes_max",
        )  # fmt: skip
        yield from at_least(self, 0, "topic_grace_ms", "ping_ms")
        if self.retry_backoff_ms_max < self.retry_backoff_ms:
            yield "retry_backoff_ms_max is under retry_backoff_ms"

    def backoff(self) -> Backoff:
        """The waits between retries."""
        return Backoff(self.retry_backoff_ms, self.retry_backoff_ms_max, self.rng)

    def connection(self) -> ConnectionOptions:
        return ConnectionOptions(
            name=self.name,
            connect_ms=self.connect_ms,
            request_ms=self.request_ms,
            in_flight_bytes_max=self.in_flight_bytes_max,
            ping_ms=self.ping_ms,
        )


def at_least(options: object, least: int, *names: str) -> Iterable[str]:
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, int) or isinstance(value, bool):
            yield f"{name} must be a whole number, not {value!r}"
        elif value < least:
            yield f"{name} must be at least {least}, not {value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions(ClientOptions):
    """Settings of a producer."""

    acks: Acks = "all"
    """Who has the record when it counts as appended: "none" (no node reports it), the
    "leader", or "all" replicas in sync."""
    idempotent: bool = True
    """Whether a retry is recognised by the node. Without it an attempt of unknown outcome is not
    repeated, and one request per partition is in flight. Has no meaning with acks="none"."""
    linger_ms: int = 5
    """For how long a batch waits for more records. 0: a record is sent at once when nothing of its
    partition is in flight, and rides the next batch otherwise."""
    batch_bytes: int = 512 * 1024
    """A batch of this size is closed. A single record may be bigger: it then travels alone."""
    batch_records: int = 4_000
    """A batch of this many records is closed."""
    buffer_bytes: int = 64 * 1024 * 1024
    """Records taken and not yet acknowledged. When they reach it, `send` waits for room."""
    max_block_ms: int = 30_000
    """For how long `send` waits for room, or for a first answer about its topic."""
    compression: Compression | None = None
    """"lz4" or "zstd", per batch; None: not compressed."""
    delivery_timeout_ms: int = 120_000
    """From `send` to the end of the last attempt."""
    in_flight_max: int = 5
    """Requests in flight per partition; the nodes remember no more batches than 5."""
    stall_ms: int = 500
    """After so long without an answer the routes are asked for again: the leader may be cut off."""
    value_bytes_max: int = 1024 * 1024
    """A larger value is refused; its topic has a limit, too."""

    def problems(self) -> Iterable[str]:
        # A class with slots is a new class: super() without arguments would mean the old one.
        yield from ClientOptions.problems(self)
        yield from at_least(self, 0, "linger_ms", "max_block_ms")
        yield from at_least(
            self,
            1,
            "batch_bytes", "batch_records", "buffer_bytes", "delivery_timeout_ms", "in_flight_max",
            "stall_ms", "value_bytes_max",
        )  # fmt: skip
        if self.acks not in ("none", "leader", "all"):
            yield f"acks is 'none', 'leader' or 'all', not {self.acks!r}"
        if self.compression is not None and self.compression not in CODECS:
            yield f"compression is None, 'lz4' or 'zstd', not {self.compression!r}"
        if self.in_flight_max > 5:
            yield "in_flight_max is at most 5"
        if self.value_bytes_max > VALUE_BYTES_MAX:
            yield f"value_bytes_max is at most {VALUE_BYTES_MAX}"
        if self.batch_records > RECORDS_MAX:
            yield f"batch_records is at most {RECORDS_MAX}"
        if self.batch_bytes > BATCH_BYTES_MAX // 2:
            yield f"batch_bytes is at most {BATCH_BYTES_MAX // 2}"

    @property
    def sequenced(self) -> bool:
        return self.idempotent and self.acks != "none"

    @property
    def codec(self) -> int:
        return CODECS[self.compression or "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions(ClientOptions):
    """Settings of a consumer."""

    reset: Reset = "earliest"
    """Where to go on when a position is not kept any more, and where to begin without a `seek`.
    "none": `poll` raises OffsetOutOfRange instead."""
    fetch_bytes: int = 2 * 1024 * 1024
    """Of one partition in one reply. A bigger batch still comes whole."""
    fetch_wait_ms: int = 500
    """For how long a node may wait for records before it answers."""
    prefetch_bytes_partition: int = 8 * 1024 * 1024
    """Fetched and not yet polled, per partition. Too little: polls wait for the network."""
    prefetch_bytes: int = 64 * 1024 * 1024
    """The same for all partitions together."""
    outlines: bool = False
    """Fetch records without keys, values and headers, for readers of offsets and times only: nodes
    send little then. Older ones send everything."""
    reset_grace_ms: int = 10_000
    """For how long a position past the end is taken for a new leader that still catches up."""
    group: str = ""
    """The group whose partitions this consumer shares; "" for one that assigns its own."""
    topics: Sequence[str] = ()
    """What the group's member reads."""
    pattern: str = ""
    """A regular expression: topics whose whole name matches are read too, now and later."""
    auto_commit: bool = True
    """Whether positions are stored by the consumer itself: what was handed out before the poll
    that is under way."""
    auto_commit_ms: int = 5_000
    """Between two automatic commits."""
    instance_id: str | None = None
    """A name that stays the same over restarts. A member that comes back under it within the
    session keeps its partitions."""
    session_ms: int = 30_000
    """A member from which nothing is heard for so long loses its partitions. Too short: a busy
    member does; too long: those of a dead one wait."""
    heartbeat_ms: int = 3_000
    """Between two heartbeats; at most half of `session_ms`."""
    max_poll_ms: int = 300_000
    """For how long a partition that is to be given up waits for the next poll."""
    on_assigned: Rebalanced | None = None
    """Called by a poll with the (topic, partition) that it may give records of from then on."""
    on_revoked: Rebalanced | None = None
    """Called by a poll with those that are being given up, before anybody else gets them."""

    def problems(self) -> Iterable[str]:
        yield from ClientOptions.problems(self)
        yield from at_least(self, 0, "fetch_wait_ms", "reset_grace_ms")
        yield from at_least(self, 1, "auto_commit_ms", "max_poll_ms")
        yield from group_problems(self)
        if self.group and not self.topics and not self.pattern:
            yield "a group needs topics or a pattern"
        if not self.group and (self.topics or self.pattern or self.instance_id is not None):
            yield "topics, pattern and instance_id need a group"
        yield from at_least(self, 1, "fetch_bytes", "prefetch_bytes_partition", "prefetch_bytes")
        if self.reset not in ("earliest", "latest", "none"):
            yield f"reset is 'earliest', 'latest' or 'none', not {self.reset!r}"
        if self.fetch_bytes > BATCH_BYTES_MAX:
            yield f"fetch_bytes is at most {BATCH_BYTES_MAX}"


class GroupOptions(Protocol):
    """What all members of groups have in their settings."""

    @property
    def group(self) -> str: ...
    @property
    def topics(self) -> Sequence[str]: ...
    @property
    def pattern(self) -> str: ...
    @property
    def instance_id(self) -> str | None: ...
    @property
    def session_ms(self) -> int: ...
    @property
    def heartbeat_ms(self) -> int: ...


def group_problems(options: GroupOptions) -> Iterable[str]:
    yield from at_least(options, 1, "heartbeat_ms", "session_ms")
    if options.heartbeat_ms * 2 > options.session_ms:
        yield "session_ms must be at least twice heartbeat_ms"
    if not isinstance(options.group, str) or len(options.group) > NAME_MAX:
        yield f"group must be text of at most {NAME_MAX} characters, not {options.group!r:.40}"
    if isinstance(options.topics, str) or not all(
        isinstance(topic, str) and topic for topic in options.topics
    ):
        yield f"topics must be a list of names, not {options.topics!r:.40}"
    if options.instance_id is not None and not 0 < len(options.instance_id) <= NAME_MAX:
        yield f"instance_id must be text of 1 to {NAME_MAX} characters"
    try:
        re.compile(options.pattern)
    except (re.error, TypeError) as error:
        yield f"pattern is no regular expression: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminOptions(ClientOptions):
    """Settings of an admin client."""

    timeout_ms: int = 15_000
    """For a call with all its attempts."""

    def problems(self) -> Iterable[str]:
        yield from ClientOptions.problems(self)
        yield from at_least(self, 1, "timeout_ms")


class ClientSettings(TypedDict, total=False):
    """The fields of ClientOptions, as keywords."""

    name: str
    connect_ms: int
    ping_ms: int
    request_ms: int
    bootstrap_ms: int
    topic_grace_ms: int
    refresh_ms: int
    refresh_ms_min: int
    retry_backoff_ms: int
    retry_backoff_ms_max: int
    in_flight_bytes_max: int
    tls: ssl.SSLContext | None
    wall_ms: Callable[[], int]
    rng: random.Random


class ProducerSettings(ClientSettings, total=False):
    """The fields of ProducerOptions, as keywords."""

    acks: Acks
    idempotent: bool
    linger_ms: int
    batch_bytes: int
    batch_records: int
    buffer_bytes: int
    max_block_ms: int
    compression: Compression | None
    delivery_timeout_ms: int
    in_flight_max: int
    stall_ms: int
    value_bytes_max: int


class ConsumerSettings(ClientSettings, total=False):
    """The fields of ConsumerOptions, as keywords."""

    reset: Reset
    fetch_bytes: int
    fetch_wait_ms: int
    prefetch_bytes_partition: int
    prefetch_bytes: int
    outlines: bool
    reset_grace_ms: int
    group: str
    topics: Sequence[str]
    pattern: str
    auto_commit: bool
    auto_commit_ms: int
    instance_id: str | None
    session_ms: int
    heartbeat_ms: int
    max_poll_ms: int
    on_assigned: Rebalanced | None
    on_revoked: Rebalanced | None


class AdminSettings(ClientSettings, total=False):
    """The fields of AdminOptions, as keywords."""

    timeout_ms: int


def lane_of(priority: str | int) -> int:
    """The lane of a priority given by name or number."""
    lane = LANES.get(priority) if isinstance(priority, str | int) else None
    if lane is None or isinstance(priority, bool):
        names = ", ".join(LANE_NAMES)
        raise InvalidArgument(f"priority {priority!r} is none of {names} and not 0..4")
    return lane


def addresses(bootstrap: Bootstrap) -> list[Address]:
    """The addresses in "host:port", "host:port,host:port" or a list of them."""
    parts = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    found: list[Address] = []
    for part in parts:
        if not isinstance(part, str):
            raise ConfigError(f"a bootstrap address is text like 'host:7070', not {part!r}")
        if part.strip():
            found.append(_address(part.strip()))
    if not found:
        raise ConfigError("no bootstrap address is given; one looks like '127.0.0.1:7070'")
    return list(dict.fromkeys(found))


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(PORT_DEFAULT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is no address; one looks like '127.0.0.1:7070'")
    return host, int(port)


def show(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
