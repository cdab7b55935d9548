"""Settings of the consensus adapter. (Pure.)"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raftq.client.common.errors import ConfigError

SECRET_BYTES_MIN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftTimes:
    """How fast a node notices, retries and gives up. All in milliseconds."""

    election_ms_min: int = 500
    """Without a leader's word for this long a node may stand for election. Too low: a busy process
    or a slow sync loses its leadership for nothing. Too high: longer without a leader."""
    election_ms_max: int = 1000
    """Upper end of the random range; far enough from the lower one that two nodes rarely tie."""
    append_ms: int = 100
    """A leader speaks at least this often. Must be well below the election timeout."""
    tick_ms: int = 20
    """The longest the thread waits for input while a proposal is open or a node is not connected;
    otherwise it waits for the next thing that is due."""
    fallback_ms: int = 1500
    """A leader that has not heard from a majority for this long stops calling itself leader."""
    abdicate_ms: int = 5000
    """For this long a node that gave up the leadership leaves it to others to stand. Too short: it
    leads again before another could; too long: no node leads when no other node can."""
    reconnect_ms: int = 200
    """Between two tries to connect to a node."""
    connection_ms: int = 4000
    """A connection without a single byte for this long is closed."""
    stuck_ms: int = 5000
    """The watchdog reports a thread that has not come round for this long."""

    def problems(self) -> list[str]:
        found = [
            f"times.{name} must be above 0" for name in self.__slots__ if getattr(self, name) <= 0
        ]
        if self.election_ms_max <= self.election_ms_min:
            found.append("times.election_ms_max must be above times.election_ms_min")
        if self.append_ms * 3 >= self.election_ms_min:
            found.append("times.append_ms must be below a third of times.election_ms_min")
        if self.tick_ms > self.append_ms:
            found.append("times.tick_ms must not be above times.append_ms")
        if self.fallback_ms < self.election_ms_min:
            found.append("times.fallback_ms must not be below times.election_ms_min")
        if self.abdicate_ms < self.election_ms_max:
            found.append("times.abdicate_ms must not be below times.election_ms_max")
        if self.connection_ms < self.election_ms_max:
            found.append("times.connection_ms must not be below times.election_ms_max")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RaftLimits:
    """What is kept, sent and accepted at most."""

    batch_bytes: int = 1 << 20
    """Commands sent to a follower in one message; a single larger command goes alone."""
    command_bytes: int = 4 << 20
    """The largest command; a larger one is refused before it is proposed."""
    frame_bytes: int = 16 << 20
    """The largest frame accepted from an authenticated node; others get far less."""
    backlog_bytes: int = 8 << 20
    """Unsent bytes to one node above which it is sent nothing new."""
    in_flight: int = 20_000
    """Proposals of this node without an answer; more are refused as Throttled."""
    in_flight_bytes: int = 64 << 20
    """The same in bytes."""
    apply_batch: int = 2_000
    """Entries applied in one round, so that a long log does not starve the timers."""
    compact_entries: int = 30_000
    """Entries in the log above which a snapshot is made. Low: often; high: slow restarts."""
    keep_entries: int = 1_000
    """Entries kept behind a snapshot, so that a node a little behind needs no snapshot."""
    chunk_bytes: int = 1 << 20
    """Part of a snapshot sent in one message."""
    recent_ids: int = 50_000
    """Commands whose id and result are remembered, so that a retry is not applied again."""
    recent_result_bytes: int = 16 << 20
    """The same in bytes of results; the oldest go first."""

    def problems(self) -> list[str]:
        found = [
            f"limits.{name} must be above 0" for name in self.__slots__ if getattr(self, name) <= 0
        ]
        if self.frame_bytes < self.command_bytes + self.batch_bytes + 65536:
            found.append("limits.frame_bytes must hold a command and a batch")
        if self.frame_bytes < self.chunk_bytes + 65536:
            found.append("limits.frame_bytes must hold a chunk")
        if self.keep_entries >= self.compact_entries:
            found.append("limits.keep_entries must be below limits.compact_entries")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsensusConfig:
    node_id: str
    """This node's name among the voters; a replaced node keeps it."""
    voters: Mapping[str, str]
    """Node id -> "host:port" of every voter, this one included. The same on every node."""
    directory: str
    """Journal and snapshot are here; nothing else may use it."""
    secret: bytes
    """Proves to the other voters that a node belongs to the cluster; at least 16 bytes."""
    cluster: str = "raftq"
    """Nodes of another cluster are refused even with the same secret."""
    bind_address: str | None = None
    """"host:port" to listen on; the node's own address when None."""
    times: RaftTimes = field(default_factory=RaftTimes)
    limits: RaftLimits = field(default_factory=RaftLimits)

    def __post_init__(self) -> None:
        found = self.times.problems() + self.limits.problems() + self._voter_problems()
        if len(self.secret) < SECRET_BYTES_MIN:
            found.append(f"secret must have at least {SECRET_BYTES_MIN} bytes")
        if not self.directory:
            found.append("directory must be set")
        if found:
            raise ConfigError("; ".join(found))

    def _voter_problems(self) -> list[str]:
        found = []
        if len(set(self.voters.values())) != len(self.voters):
            found.append("voters must have different addresses")
        if self.node_id not in self.voters:
            found.append(f"voters must name this node, {self.node_id!r}")
        if len(self.voters) % 2 == 0 or len(self.voters) > 7:
            found.append(f"voters must be 1, 3, 5 or 7 nodes, not {len(self.voters)}")
        found += [
            f"voter id {name!r} must have 1 to 200 bytes"
            for name in self.voters
            if not 0 < len(name.encode()) <= 200
        ]
        addresses = (*self.voters.values(), self.bind_address or "any:1")
        found += [
            f"address {address!r} must be host:port"
            for address in addresses
            if not _is_address(address)
        ]
        return found

    def __repr__(self) -> str:
        # The secret stays out of logs.
        return f"ConsensusConfig(node_id={self.node_id!r}, directory={self.directory!r})"


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
