"""Settings of the HTTP listener. (Pure.)"""

from dataclasses import dataclass, fields

from raftq.client.common.errors import ConfigError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Limits of the HTTP listener."""

    connections_max: int = 2_000
    """Of the whole listener; beyond it new ones are closed. Each takes a file descriptor."""
    backlog: int = 512
    """Connections that the kernel holds until they are accepted."""
    idle_ms: int = 75_000
    """Until a whole request head came, also on a fresh connection. It ends silent and very slow
    callers; too short, and the connections of patient clients close under their hands."""
    body_bytes_max: int = 24 * MIB
    """Of one request: a value of 16 MiB as base64, and some slack."""
    body_ms: int = 30_000
    """From the request head to the end of the body."""
    in_flight_bytes_max: int = 256 * MIB
    """Bodies and answers of all requests together; beyond it requests get 429."""
    in_flight_max: int = 1_000
    """Requests being handled; beyond it they get 429."""
    request_ms: int = 30_000
    """For the work of one request, from its body to its answer."""
    write_ms: int = 30_000
    """For how long a caller may take to read an answer before the connection is cut."""
    linger_ms: int = 1_000
    """For reading on after a refusal, so that the caller gets to see the answer."""
    read_bytes_max: int = 8 * MIB
    """Of the records of one read; a single larger record goes alone."""
    polls_max: int = 500
    """Polls that wait for messages at a time; beyond it they get 429."""
    reads_max: int = 16
    """Reads being fetched at a time; further ones wait for their turn."""
    messages_max: int = 10_000
    """Of one publish."""
    topic_wait_ms: int = 300
    """For how long an unknown topic is waited for: another node may have just created it."""
    stop_ms: int = 2_000
    """For requests under way when the node stops."""

    def __post_init__(self) -> None:
        wrong = [
            f"{one.name} must be at least 1" for one in fields(self) if getattr(self, one.name) < 1
        ]
        if self.in_flight_bytes_max < 2 * max(self.body_bytes_max, self.read_bytes_max):
            wrong.append("in_flight_bytes_max must hold two of the largest bodies or reads")
        if wrong:
            raise ConfigError("; ".join(wrong))
