"""Shell: the directory of an embedded queue: its lock, its format file, its four logs, its reserve.

{directory}/queue.format     name and format version; written once
{directory}/lock             one process at a time
{directory}/reserve          space given up when the disk is full, so that acks still fit
{directory}/data/            the messages
{directory}/ledger/          what each group leased and settled, and transactions
{directory}/delays/          messages that are not yet due
{directory}/delays.snapshot  where the delays log stood; a cache, rebuilt when it is damaged
{directory}/dead/            dead letters
"""

import json
from dataclasses import dataclass

from raftq.client.common.disk import Disk, Lock
from raftq.client.common.errors import (
    CorruptFile,
    DiskFull,
    InvalidArgument,
    RaftqError,
    UnknownFormat,
)
from raftq.node.queue.embedded.options import MIB, EmbeddedOptions
from raftq.node.storage.config import LogConfig
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.log import Log

FORMAT_VERSION = 1
FORMAT_BYTES_MAX = 4096
LEDGER_SEGMENT_BYTES = 4 * MIB
SEGMENT_BYTES_MIN = 4096
SEGMENT_AGE_MS = 7 * 86_400_000
# The order of a round of syncs: a log comes after those whose offsets it names.
LOG_NAMES = ("delays", "data", "dead", "ledger")


@dataclass(slots=True)
class QueueFiles:
    """The open directory. `close` leaves it clean; dropping it is what a crash does."""

    disk: Disk
    directory: str
    lock: Lock
    data: Log
    delays: Log
    dead: Log
    ledger: Log
    flusher: Flusher
    reserve_bytes: int
    reserve_missing: bool = False

    @property
    def logs(self) -> dict[str, Log]:
        return {"data": self.data, "delays": self.delays, "dead": self.dead, "ledger": self.ledger}

    @property
    def size_bytes(self) -> int:
        return sum(log.size_bytes for log in self.logs.values())

    @property
    def message_logs(self) -> tuple[Log, Log, Log]:
        return self.data, self.delays, self.dead

    @property
    def message_bytes(self) -> int:
        """Bytes of messages; the ledger comes on top and is kept small by its snapshots."""
        return sum(log.size_bytes for log in self.message_logs)

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def give_up_reserve(self) -> bool:
        """Free the reserved space; False when there was none left to free."""
        if self.reserve_missing or not self.reserve_bytes:
            return False
        if self.disk.exists(self.path("reserve")):
            self.disk.remove(self.path("reserve"))
        self.reserve_missing = True
        return True

    def restore_reserve(self) -> bool:
        """Set the space aside again once there is plenty; True when it is there."""
        if not self.reserve_bytes:
            return True
        if self.disk.free_bytes(self.directory) < 4 * self.reserve_bytes:
            return False
        try:
            _write_reserve(self.disk, self.path("reserve"), self.reserve_bytes)
        except DiskFull:
            return False
        self.reserve_missing = False
        return True

    def close(self) -> None:
        """Close everything, whatever fails; the first failure is raised at the end."""
        failures: list[RaftqError] = []
        for close in (self.flusher.close, *(log.close for log in self.logs.values())):
            try:
                close()
            except RaftqError as error:
                failures.append(error)
        self.lock.release()
        if failures:
            raise failures[0]


def open_files(
    disk: Disk, directory: str, options: EmbeddedOptions, now_ms: int, flusher: Flusher | None
) -> QueueFiles:
    """Lock the directory, check its format, recover its logs."""
    if flusher is None:
        flusher = Flusher(options.fsync_interval if options.fsync == "interval" else None)
    disk.make_directory(directory)
    if not disk.exists(f"{directory}/queue.format"):
        _check_strangers(disk, directory)  # before a lock file is put among them
    lock = disk.lock(f"{directory}/lock")
    logs: dict[str, Log] = {}
    try:
        _check_format(disk, directory)
        for name in LOG_NAMES:
            config = _log_config(name, options)
            logs[name] = Log.open(disk, f"{directory}/{name}", config, now_ms)
        files = QueueFiles(
            disk=disk,
            directory=directory,
            lock=lock,
            flusher=flusher,
            reserve_bytes=options.reserve_bytes,
            reserve_missing=not _reserve_is_whole(disk, directory, options.reserve_bytes),
            **logs,
        )
    except BaseException:
        for log in logs.values():
            log.close(clean=False)
        lock.release()
        raise
    if files.reserve_missing:
        files.restore_reserve()
    for name in LOG_NAMES:
        files.flusher.add(logs[name])
    return files


def _log_config(name: str, options: EmbeddedOptions) -> LogConfig:
    size = options.segment_bytes
    if options.max_bytes is not None:
        # Space comes back a segment at a time, so a small queue needs small segments.
        size = max(min(size, options.max_bytes // 8), SEGMENT_BYTES_MIN)
    if name == "data":
        return LogConfig(
            segment_bytes=size,
            segment_age_ms=_segment_age_ms(options.retention),
            page_cache_bytes=options.page_cache_bytes,
        )
    size = min(size, LEDGER_SEGMENT_BYTES if name == "ledger" else 16 * MIB)
    age_ms = _segment_age_ms(options.dead_letter_retention if name == "dead" else None)
    return LogConfig(
        segment_bytes=size, segment_age_ms=age_ms, with_lanes=False, page_cache_bytes=None
    )


def _segment_age_ms(retention_s: float | None) -> int:
    """A file is sealed at this age, because only sealed ones can be dropped by theirs."""
    return (
        SEGMENT_AGE_MS if retention_s is None else min(SEGMENT_AGE_MS, int(retention_s * 1000) + 1)
    )


def _check_strangers(disk: Disk, directory: str) -> None:
    # A crash during the first open leaves a temporary name behind, at the most.
    names = [name.removesuffix(".tmp") for name in disk.list(directory)]
    strangers = [name for name in names if name not in _OWN_NAMES]
    if strangers:
        raise InvalidArgument(
            f"{directory} is not a RaftQ queue and not empty (it holds {strangers[0]!r})"
        )


def _check_format(disk: Disk, directory: str) -> None:
    path = f"{directory}/queue.format"
    if not disk.exists(path):
        text = json.dumps({"format": "raftq-queue", "version": FORMAT_VERSION})
        disk.write_file_atomic(path, text.encode() + b"\n")
        return
    name, version = _read_format(disk, path)
    if name != "raftq-queue":
        raise InvalidArgument(f"{directory} holds {name!r}, not a RaftQ queue")
    if version > FORMAT_VERSION or version < 1:
        raise UnknownFormat(
            f"{directory} has format version {version}; this RaftQ knows up to {FORMAT_VERSION}"
        )


def _read_format(disk: Disk, path: str) -> tuple[str, int]:
    try:
        if disk.size(path) > FORMAT_BYTES_MAX:
            raise ValueError(f"more than {FORMAT_BYTES_MAX} bytes")
        found = json.loads(disk.read_file(path, FORMAT_BYTES_MAX))
        return str(found["format"]), int(found["version"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptFile(
            f"{path} is damaged ({error}); the messages are not in it: write "
            f'{{"format": "raftq-queue", "version": {FORMAT_VERSION}}} into it, or the version '
            "that wrote this queue"
        ) from error


_OWN_NAMES = {"lock", "reserve", "queue.format", "delays.snapshot", *LOG_NAMES}


def _reserve_is_whole(disk: Disk, directory: str, size: int) -> bool:
    path = f"{directory}/reserve"
    return disk.exists(path) and disk.size(path) >= size


def _write_reserve(disk: Disk, path: str, size: int) -> None:
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        block = bytes(min(size, 65536))
        for start in range(0, size, len(block)):
            file.append([block[: size - start]])
        file.sync()
    except DiskFull:
        file.truncate(0)  # half a reserve is only in the way
        raise
    finally:
        file.close()
