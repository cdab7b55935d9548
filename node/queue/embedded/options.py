"""Settings of an embedded queue. (Pure.)"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import TypedDict

from raftq.client.common.errors import ConfigError
from raftq.client.wire.codecs import CODECS
from raftq.client.wire.record import VALUE_BYTES_MAX

FSYNC_POLICIES = ("none", "interval", "always")
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """Everything `Queue.open` accepts, checked as a whole: all problems are reported at once."""

    fsync: str = "interval"
    """When data reaches the disk: `none` leaves it to the kernel, `interval` syncs every
    `fsync_interval` seconds, `always` answers only after an fsync (shared by all that wait).
    The death of the process loses nothing under any of them; a power cut can lose what was not
    synced under the first two."""
    fsync_interval: float = 1.0
    """Seconds between syncs under `interval`; what a power cut can cost."""
    visibility_timeout: float = 30.0
    """Seconds a delivered message stays hidden from others before it is delivered again."""
    max_deliveries: int = 3
    """Deliveries without an ack after which a message becomes a dead letter."""
    backoff: float = 1.0
    """Seconds before the first retry of a nacked message; doubles with each attempt."""
    backoff_max: float = 60.0
    """The longest such wait, in seconds."""
    backoff_jitter: float = 0.0
    """Share (0..1) by which a wait is shorter or longer by chance, so that retries do not come in
    step; `backoff_max` still holds."""
    in_flight_max: int = 100_000
    """Messages of one group that may be leased at a time; more wait until some are settled."""
    max_messages: int | None = None
    """Unsettled messages (delayed ones included) beyond which enqueue raises QueueFull."""
    max_bytes: int | None = None
    """Bytes of messages on disk beyond which enqueue raises QueueFull, once settled segments were
    dropped. The ledger comes on top; its snapshots keep it small."""
    value_bytes_max: int = MIB
    """The largest value accepted, at most 16 MiB."""
    retention: float | None = 168 * 3600.0
    """Seconds for which settled messages are kept for replay; None keeps them for ever. What a
    group has not settled is never dropped by age."""
    retention_bytes: int | None = None
    """Bytes of the data log beyond which settled segments are dropped before their time."""
    dead_letter_retention: float | None = 336 * 3600.0
    """Seconds for which dead letters are kept; None keeps them for ever."""
    dead_letter_expired: bool = False
    """Whether a message whose ttl ended becomes a dead letter instead of being only counted."""
    dedup_window: float = 300.0
    """Seconds for which a `dedup_id` is remembered, also across restarts."""
    compression: str = "none"
    """`none`, `lz4` or `zstd`, for batches of more than one message."""
    segment_bytes: int = 64 * MIB
    """Size at which a file of the data log is sealed. Space comes back a segment at a time."""
    reserve_bytes: int = MIB
    """Disk space set aside so that acks still work when the disk is full; 0 for none."""
    page_cache_bytes: int | None = 256 * MIB
    """Memory that freshly written data may occupy in the kernel's page cache; None for no bound."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        if self.fsync not in FSYNC_POLICIES:
            yield f"fsync is {self.fsync!r}, not one of {', '.join(FSYNC_POLICIES)}"
        if not isinstance(self.compression, str) or self.compression not in CODECS:
            yield f"compression is {self.compression!r}, not one of {', '.join(CODECS)}"
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not _is_number(name, value) or not least <= value <= most:
                yield f"{name} is {value!r}, not between {least:g} and {most:g}"
        for name in _LIMITS:
            limit = getattr(self, name)
            if limit is not None and not (_is_number(name, limit) and limit > 0):
                yield f"{name} is {limit!r}; it must be more than 0, or None for no limit"
        if self.dead_letter_expired not in (True, False):
            yield f"dead_letter_expired is {self.dead_letter_expired!r}, not True or False"


class OpenSettings(TypedDict, total=False):
    """The fields of EmbeddedOptions, as keywords."""

    fsync: str
    fsync_interval: float
    visibility_timeout: float
    max_deliveries: int
    backoff: float
    backoff_max: float
    backoff_jitter: float
    in_flight_max: int
    max_messages: int | None
    max_bytes: int | None
    value_bytes_max: int
    retention: float | None
    retention_bytes: int | None
    dead_letter_retention: float | None
    dead_letter_expired: bool
    dedup_window: float
    compression: str
    segment_bytes: int
    reserve_bytes: int
    page_cache_bytes: int | None


_BOUNDS: dict[str, tuple[float, float]] = {
    "fsync_interval": (0.001, 3600),
    "visibility_timeout": (0.001, 365 * 86400),
    "max_deliveries": (1, 1_000_000),
    "backoff": (0, 86400),
    "backoff_max": (0, 365 * 86400),
    "backoff_jitter": (0, 1),
    "in_flight_max": (1, 100_000_000),
    "value_bytes_max": (1, VALUE_BYTES_MAX),
    "dedup_window": (0, 365 * 86400),
    "segment_bytes": (4096, 1 << 31),
    "reserve_bytes": (0, 1 << 30),
}
_LIMITS = (
    "max_messages", "max_bytes", "retention", "retention_bytes", "dead_letter_retention",
    "page_cache_bytes",
)  # fmt: skip
_WHOLE = {
    "max_deliveries", "in_flight_max", "value_bytes_max", "segment_bytes", "reserve_bytes",
    "max_messages", "max_bytes", "retention_bytes", "page_cache_bytes",
}  # fmt: skip


def _is_number(name: str, value: object) -> bool:
    """Whether a setting has the type it needs; True and False are no numbers."""
    if name in _WHOLE or isinstance(value, int):
        return type(value) is int
    return isinstance(value, float) and isfinite(value)
