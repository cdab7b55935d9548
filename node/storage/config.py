"""Settings of one log. (Pure.)"""

from dataclasses import dataclass

from raftq.client.common.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
DAY_MS = 24 * 60 * 60 * 1000

SEGMENT_BYTES_MIN = 4 * KIB
SEGMENT_BYTES_MAX = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """How one log lays out its files and treats the page cache."""

    segment_bytes: int = 64 * MIB
    """Bytes after which the active segment is sealed (4 KiB .. 1 GiB). One append may exceed it.

    Small: many files and syncs. Large: slow open after a crash, retention in coarse steps.
    """

    segment_age_ms: int | None = 7 * DAY_MS
    """`retain` seals an active segment whose first record is this old, so that retention by age
    also reaches a log with little traffic. None: only size seals."""

    index_interval_bytes: int = 4 * KIB
    """One entry of the offset and time index per this many bytes. Small: more memory. Large: a
    read walks further."""

    with_lanes: bool = True
    """Keep the runs of each lane. Off for logs without leases: saves memory and time."""

    seal_sync: bool = True
    """Sync a segment when it is sealed.

    Off: rolling does not wait for the disk, and the next sync makes the sealed segment durable as
    well. After a crash a few more segments are read again.
    """

    write_behind_bytes: int = 8 * MIB
    """Ask the kernel to start writing after this many bytes, so that a sync finds little to do."""

    page_cache_bytes: int | None = 256 * MIB
    """Give pages back once the head is this far past them. None: leave pages to the kernel.

    Without a bound a fast writer fills all memory with pages that are not read.
    """

    def __post_init__(self) -> None:
        problems = []
        if not SEGMENT_BYTES_MIN <= self.segment_bytes <= SEGMENT_BYTES_MAX:
            problems.append(
                f"segment_bytes {self.segment_bytes} is not in "
                f"{SEGMENT_BYTES_MIN}..{SEGMENT_BYTES_MAX}"
            )
        if self.segment_age_ms is not None and self.segment_age_ms < 1:
            problems.append(f"segment_age_ms {self.segment_age_ms} is not positive")
        if not 0 < self.index_interval_bytes <= self.segment_bytes:
            problems.append(
                f"index_interval_bytes {self.index_interval_bytes} is not in "
                f"1..segment_bytes ({self.segment_bytes})"
            )
        if self.write_behind_bytes < 64 * KIB:
            problems.append(f"write_behind_bytes {self.write_behind_bytes} is under 64 KiB")
        if self.page_cache_bytes is not None and self.page_cache_bytes < self.write_behind_bytes:
            problems.append(
                f"page_cache_bytes {self.page_cache_bytes} is under "
                f"write_behind_bytes ({self.write_behind_bytes})"
            )
        if problems:
            raise ConfigError("; ".join(problems))
