"""Settings of the native listener. (Pure.)"""

from dataclasses import dataclass, fields

from raftq.client.wire.errors import ConfigError
from raftq.client.wire.frames import FRAME_BYTES_MAX
from raftq.client.wire.messages import VERSION_MAX, VERSION_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Limits of the native listener, per connection unless said otherwise."""

    version_min: int = VERSION_MIN
    version_max: int = VERSION_MAX
    connections_max: int = 20_000
    """Of the whole listener; beyond it new ones are refused. Each takes a file descriptor."""
    backlog: int = 1_024
    """Connections that the kernel holds until they are accepted."""
    handshake_ms: int = 5_000
    """From the connection to a whole Hello. Too long: silent callers hold connections."""
    idle_ms: int = 600_000
    """Without a whole request and with none in flight. It also ends a caller that sends one request
    for so long."""
    in_flight_max: int = 256
    """Requests without an answer; no more are read until one is answered."""
    in_flight_bytes_max: int = 32 * 1024 * 1024
    """Bytes of those requests; a connection holds at most this and one frame."""
    memory_bytes_max: int = 512 * 1024 * 1024
    """Of the whole listener: requests that arrive or are in flight. Beyond it, big requests are
    read one connection after the other."""
    frame_stall_ms: int = 10_000
    """A caller must send at least 64 KiB of a big request in this time, and when memory is short
    all of it. Too short: slow networks cannot send big requests."""
    write_bytes_high: int = 1024 * 1024
    """Unsent replies beyond which no more requests are read."""
    write_bytes_max: int = 256 * 1024 * 1024
    """Unsent replies beyond which the connection is closed. It leaves room for the replies of
    requests that were in flight when the caller stopped reading."""
    write_stall_ms: int = 30_000
    """For how long a caller may leave the unsent replies over `write_bytes_high`."""
    linger_ms: int = 1_000
    """After a refusal: for how long the caller may read the reason before the connection is cut."""
    handshake_bytes_max: int = 64 * 1024
    """Of a frame before the handshake."""
    frame_bytes_max: int = FRAME_BYTES_MAX

    def __post_init__(self) -> None:
        wrong = [
            f"{one.name} must be at least 1" for one in fields(self) if getattr(self, one.name) < 1
        ]
        if self.version_min > self.version_max:
            wrong.append("version_min is over version_max")
        if self.write_bytes_high > self.write_bytes_max:
            wrong.append("write_bytes_high is over write_bytes_max")
        if wrong:
            raise ConfigError("; ".join(wrong))
