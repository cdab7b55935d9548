"""Settings of a node, checked as a whole. (Pure.)

Frozen dataclasses, one per concern. Each reports all of its problems at once as a ConfigError, and
NodeConfig also those between its parts. `config_source` reads the values. The defaults run a single
node that only this machine can reach.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from raftq.client.common.errors import ConfigError
from raftq.client.wire.frames import FRAME_BYTES_MAX
from raftq.client.wire.messages import VERSION_MAX, VERSION_MIN
from raftq.cluster.controller.events import ControllerConfig
from raftq.cluster.raft.config import SECRET_BYTES_MIN, RaftTimes
from raftq.node.storage.producers import IDLE_MS_MAX, PRODUCERS_MAX

KIB = 1024
MIB = 1024 * KIB
HOUR_MS = 3_600_000
NODE_ID_MAX = 2**31 - 1
NAME_CHARS_MAX = 200
VOTERS_MAX = 7
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen at or to connect to. As text `host:port`, with brackets around an
    IPv6 host."""

    host: str = LOOPBACK
    port: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host or not self.host.isprintable():
            raise ConfigError(f"host is {self.host!r}, not a name or an address")
        if any(sign in self.host for sign in " []/@"):
            raise ConfigError(f"host is {self.host!r}, not a name or an address")
        if type(self.port) is not int or not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port!r}, not in 0..65535")

    @classmethod
    def parse(cls, text: str) -> "Address":
        host, colon, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigError(f"{text!r} is not host:port (an IPv6 host needs brackets)")
        digits = port.isascii() and port.isdigit() and len(port) <= 5
        if not colon or not host or not digits:
            raise ConfigError(f"{text!r} is not host:port")
        return cls(host, int(port))

    @property
    def wildcard(self) -> bool:
        """Whether it stands for every address of the machine, which nobody can connect to."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Limits of the native listener, per connection unless said otherwise."""

    version_min: int = VERSION_MIN
    """The oldest version of the native protocol that is spoken."""
    version_max: int = VERSION_MAX
    """The newest one."""
    connections_max: int = 20_000
    """Connections of the whole listener. Beyond it new ones are refused. Each takes a file
    descriptor."""
    backlog: int = 1_024
    """Connections that the kernel holds until they are accepted."""
    handshake_ms: int = 5_000
    """Time from the connection to a whole Hello. Too long: silent callers hold connections."""
    idle_ms: int = 600_000
    """Time without a whole request and with none in flight. It also ends a caller that sends a
    single request for this long."""
    in_flight_max: int = 256
    """Requests without an answer. No more are read until one is answered."""
    in_flight_bytes_max: int = 32 * 1024 * 1024
    """Bytes of those requests; a connection holds at most this and one frame."""
    memory_bytes_max: int = 512 * 1024 * 1024
    """Bytes of the whole listener, of requests that arrive or are in flight. Beyond it, big
    requests are read one connection after the other."""
    frame_stall_ms: int = 10_000
    """A caller must send at least 64 KiB of a big request in this time, and when memory is short
    all of it. Too short: slow networks cannot send big requests."""
    write_bytes_high: int = 1024 * 1024
    """Unsent replies beyond which no more requests are read."""
    write_bytes_max: int = 256 * 1024 * 1024
    """Unsent replies beyond which the connection is closed. It leaves room for the replies of
    requests that were in flight when the caller stopped reading."""
    write_stall_ms: int = 30_000
    """How long a caller may leave the unsent replies over `write_bytes_high`."""
    linger_ms: int = 1_000
    """After a refusal, how long the caller may read the reason before the connection is cut."""
    handshake_bytes_max: int = 64 * 1024
    """Bytes of a frame before the handshake."""
    frame_bytes_max: int = FRAME_BYTES_MAX
    """The largest request or reply; a larger request closes its connection."""

    def __post_init__(self) -> None:
        wrong = [
            f"{setting.name} must be at least 1"
            for setting in fields(self)
            if getattr(self, setting.name) < 1
        ]
        if self.version_min > self.version_max:
            wrong.append("version_min is over version_max")
        if self.write_bytes_high > self.write_bytes_max:
            wrong.append("write_bytes_high is over write_bytes_max")
        if wrong:
            raise ConfigError("; ".join(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """How the logs of a node use its disk and its memory."""

    fsync_interval_ms: int = 1_000
    """Time between two syncs of topics with fsync `interval`: what a power cut can cost a
    replica."""
    page_cache_bytes: int | None = 64 * MIB
    """Bytes of freshly written data per log in the page cache of the kernel. None leaves it to
    the kernel."""
    write_behind_bytes: int = 8 * MIB
    """Ask the kernel to start writing after this many bytes, so that a sync finds little to do."""
    scrub_bytes_s: int = 4 * MIB
    """How fast old data is read again to find damage; 0 for never."""
    reserve_bytes: int = 4 * MIB
    """Bytes reserved on a node with queues, so that workers can settle while the disk is full.
    With 0, a full disk makes them do their work again."""
    producers_max: int = PRODUCERS_MAX
    """Producers whose last batches each log remembers, to recognise repeated ones. Too low:
    forgotten producers get an error, and batches they sent without an answer have an unknown
    outcome."""
    producer_idle_ms: int = IDLE_MS_MAX
    """How long a producer that sends nothing is remembered at least."""

    def __post_init__(self) -> None:
        found = _outside(self, fsync_interval_ms=(1, HOUR_MS), write_behind_bytes=(64 * KIB, None))
        found += _outside(self, scrub_bytes_s=(0, None), reserve_bytes=(0, 1024 * MIB))
        found += _outside(self, producers_max=(1, PRODUCERS_MAX))
        found += _outside(self, producer_idle_ms=(100, IDLE_MS_MAX))
        if self.page_cache_bytes is not None:
            found += _outside(self, page_cache_bytes=(self.write_behind_bytes, None))
        _refuse(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationConfig:
    """How followers keep up, and when they leave the isr."""

    lag_ms: int = 3_000
    """A follower that has not caught up for this long leaves the isr. Too low: a pause of the
    process costs a shrink and an expansion. Too high: acks=all waits that long for a dead
    follower."""
    fetch_bytes_max: int = 4 * MIB
    """Bytes of one fetch of one follower connection. A single larger batch goes alone."""
    wait_ms: int = 500
    """How long a leader holds a fetch that finds nothing new."""
    move_bytes_s: int = 64 * MIB
    """How fast replicas that are being moved or added catch up. The isr is never slowed down."""

    def __post_init__(self) -> None:
        found = _outside(self, lag_ms=(100, HOUR_MS), fetch_bytes_max=(4 * KIB, 64 * MIB))
        found += _outside(self, wait_ms=(1, 60_000), move_bytes_s=(64 * KIB, None))
        if not found and self.wait_ms >= self.lag_ms:
            found.append(f"wait_ms {self.wait_ms} must be below lag_ms {self.lag_ms}")
        _refuse(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """All settings of one node."""

    node_id: int
    """Unique in the cluster, for ever: a replaced node keeps it."""
    secret: bytes = field(repr=False)
    """A secret that only the nodes of the cluster know. It proves that a node belongs to it."""
    data_dir: str
    """The directory of everything the node keeps. One process at a time may use it."""
    cluster_id: str = "raftq"
    """Nodes of another cluster are refused even with the same secret."""
    rack: str = ""
    """What fails together: replicas are spread over racks first."""
    advertised_host: str | None = None
    """The host name at which clients and nodes reach this node; `native.host` when None."""
    advertised_port: int | None = None
    """The native port at which they reach it, where a proxy stands before the listener."""
    native: Address = Address(LOOPBACK, 7070)
    """Listener of the native protocol. With port 0 the kernel chooses one."""
    http: Address | None = Address(LOOPBACK, 8080)
    """Listener of REST, health and metrics. None for no listener, port 0 for a port that the
    kernel chooses."""
    raft: Address = Address(LOOPBACK, 7000)
    """Listener of the consensus of the metadata, used by voters only."""
    voters: Mapping[int, str] = field(default_factory=dict)
    """Node id -> "host:port" of the Raft listener of every voter, the same on every node. Addresses
    may change later, ids may not. None and no seeds either: this node alone."""
    seeds: tuple[str, ...] = ()
    """Native addresses of some nodes. A node that is not a voter finds the cluster through them."""
    peers: Mapping[int, str] = field(default_factory=dict)
    """Node id -> native address at which this node reaches it, where it differs from the address
    that the node gives: behind a proxy, or on a second network."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    replication: ReplicationConfig = field(default_factory=ReplicationConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    heartbeat_ms: int = 500
    """Time between two heartbeats to the controller; well below its lease."""
    raft_times: RaftTimes = field(default_factory=RaftTimes)
    server: ServerOptions = field(default_factory=ServerOptions)
    drain_ms: int = 10_000
    """How long a stopping node tries to hand over its leaderships first."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`: less important lines are not logged."""
    log_format: str = "text"
    """`text` (key=value) or `json`, one line each, to stderr."""

    def __post_init__(self) -> None:
        _refuse([*self._own_problems(), *self._address_problems(), *self._relations()])
        if not self.voters and not self.seeds:
            object.__setattr__(self, "voters", {self.node_id: str(self.raft)})

    @property
    def is_voter(self) -> bool:
        return self.node_id in self.voters

    @property
    def host(self) -> str:
        """The host name that other nodes and clients get."""
        return self.advertised_host or self.native.host

    @property
    def raft_address(self) -> str:
        """The address at which the other voters find this one."""
        return self.voters.get(self.node_id, str(self.raft))

    def _own_problems(self) -> Iterator[str]:
        yield from _outside(self, node_id=(0, NODE_ID_MAX), heartbeat_ms=(1, HOUR_MS))
        yield from _outside(self, drain_ms=(0, HOUR_MS))
        if self.advertised_port is not None:
            yield from _outside(self, advertised_port=(1, 65535))
        if len(self.secret) < SECRET_BYTES_MIN:
            yield f"secret must have at least {SECRET_BYTES_MIN} bytes"
        if not self.data_dir:
            yield "data_dir must be set"
        if not 0 < len(self.cluster_id) <= NAME_CHARS_MAX or not self.cluster_id.isprintable():
            yield f"cluster_id must have 1 to {NAME_CHARS_MAX} printable characters"
        if len(self.rack) > NAME_CHARS_MAX or not self.rack.isprintable():
            yield f"rack must have at most {NAME_CHARS_MAX} printable characters"
        if self.log_level not in LOG_LEVELS:
            yield f"log_level is {self.log_level!r}, not one of {', '.join(LOG_LEVELS)}"
        if self.log_format not in LOG_FORMATS:
            yield f"log_format is {self.log_format!r}, not one of {', '.join(LOG_FORMATS)}"

    def _address_problems(self) -> Iterator[str]:
        if self.advertised_host is None and self.native.wildcard:
            yield f"advertised_host must be set when native listens on {self.native.host}"
        elif self.advertised_host is not None:
            try:
                if Address(self.advertised_host).wildcard:
                    yield f"advertised_host is {self.advertised_host}, which nobody can connect to"
            except ConfigError as error:
                yield f"advertised_host: {error}"
        tables = (("voters", self.voters), ("peers", self.peers))
        for name, text in [(f"{a}.{b}", text) for a, table in tables for b, text in table.items()]:
            yield from _reachable(name, text)
        for number, text in enumerate(self.seeds):
            yield from _reachable(f"seeds[{number}]", text)
        if len(set(self.voters.values())) != len(self.voters):
            yield "voters must have different addresses"
        for voter in self.voters:
            if not 0 <= voter <= NODE_ID_MAX:
                yield f"voters.{voter} is not a node id"

    def _relations(self) -> Iterator[str]:
        count = len(self.voters)
        if count and (count % 2 == 0 or count > VOTERS_MAX):
            yield f"voters must be 1, 3, 5 or 7 nodes, not {count}"
        alone = not self.voters and not self.seeds
        if (alone or self.is_voter) and self.raft.port == 0:
            yield "raft.port must not be 0: the other voters have to know it in advance"
        if not alone and not self.is_voter and not self.seeds:
            yield f"seeds must be set: node {self.node_id} is not one of the voters"
        used = [
            address
            for address in (self.native, self.http, self.raft)
            if address is not None and address.port
        ]
        if len(set(used)) != len(used):
            yield "native, http and raft must have different addresses"
        yield from (
            problem.replace("times.", "raft_times.") for problem in self.raft_times.problems()
        )
        if self.heartbeat_ms * 2 >= self.controller.lease_ms:
            yield (
                f"heartbeat_ms {self.heartbeat_ms} must be below half of "
                f"controller.lease_ms {self.controller.lease_ms}"
            )


def _outside(part: object, **bounds: tuple[int, int | None]) -> list[str]:
    """Yield the problems of whole numbers that must lie within bounds, both included."""
    found = []
    for name, (least, most) in bounds.items():
        value = getattr(part, name)
        if type(value) is not int or value < least or (most is not None and value > most):
            where = f"at least {least}" if most is None else f"in {least}..{most}"
            found.append(f"{name} is {value!r}, not {where}")
    return found


def _reachable(name: str, text: str) -> Iterator[str]:
    try:
        address = Address.parse(text)
    except ConfigError as error:
        yield f"{name}: {error}"
        return
    if address.port == 0 or address.wildcard:
        yield f"{name}: nobody can connect to {text}"


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("; ".join(problems))
