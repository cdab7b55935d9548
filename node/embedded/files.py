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

from raftq.client.wire.errors import (
    CorruptFile,
    DiskFull,
    InvalidArgument,
    RaftqError,
    UnknownFormat,
)
from raftq.node.embedded.options import MIB, QueueOptions
from raftq.node.storage.config import LogConfig
from raftq.node.storage.disk import Disk, Lock
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.log import Log

FORMAT_VERSION = 1
FORMAT_BYTES_MAX = 4096
LEDGER_SEGMENT_BYTES = 4 * MIB
SEGMENT_BYTES_MIN = 4096
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
    def message_bytes(self) -> int:
        """Bytes of messages; the ledger comes on top and is kept small by its snapshots."""
        return self.data.size_bytes + self.delays.size_bytes + self.dead.size_bytes

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def give_up_reserve(self) -> bool:
        """Free the reserved space; False when there was none left to free."""
        if self.reserve_missing or not self.reserve_bytes:
            return False
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
    disk: Disk, directory: str, options: QueueOptions, now_ms: int, flusher: Flusher | None
) -> QueueFiles:
    """Lock the directory, check its format, recover its logs."""
    if flusher is None:
        flusher = Flusher(options.fsync_interval if options.fsync == "interval" else None)
    fresh = not disk.exists(directory) or not disk.list(directory)
    disk.make_directory(directory)
    lock = disk.lock(f"{directory}/lock")
    try:
        _check_format(disk, directory, fresh)
        logs = {
            name: Log.open(disk, f"{directory}/{name}", _log_config(name, options), now_ms)
            for name in LOG_NAMES
        }
        files = QueueFiles(
            disk=disk,
            directory=directory,
            lock=lock,
            flusher=flusher,
            reserve_bytes=options.reserve_bytes,
            reserve_missing=not disk.exists(f"{directory}/reserve"),
            **logs,
        )
    except BaseException:
        lock.release()
        raise
    if files.reserve_missing:
        files.restore_reserve()
    for name in LOG_NAMES:
        files.flusher.add(logs[name])
    return files


def _log_config(name: str, options: QueueOptions) -> LogConfig:
    size = options.segment_bytes
    if options.max_bytes is not None:
        # Space comes back a segment at a time, so a small queue needs small segments.
        size = max(min(size, options.max_bytes // 8), SEGMENT_BYTES_MIN)
    if name == "data":
        return LogConfig(segment_bytes=size, page_cache_bytes=options.page_cache_bytes)
    size = min(size, LEDGER_SEGMENT_BYTES if name == "ledger" else 16 * MIB)
    return LogConfig(segment_bytes=size, with_lanes=False, page_cache_bytes=None)


def _check_format(disk: Disk, directory: str, fresh: bool) -> None:
    path = f"{directory}/queue.format"
    if not disk.exists(path):
        # A crash during the first open leaves a temporary name behind, at the most.
        names = [name.removesuffix(".tmp") for name in disk.list(directory)]
        strangers = [name for name in names if name not in _OWN_NAMES]
        if not fresh and strangers:
            raise InvalidArgument(
                f"{directory} is not a RaftQ queue and not empty (it holds {strangers[0]!r})"
            )
        text = json.dumps({"format": "raftq-queue", "version": FORMAT_VERSION})
        disk.write_file_atomic(path, text.encode() + b"\n")
        return
    data = disk.read_file(path, FORMAT_BYTES_MAX)
    try:
        found = json.loads(data)
        name, version = found["format"], int(found["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFile(
            f"{path} is damaged ({error}); it should read "
            f'{{"format": "raftq-queue", "version": {FORMAT_VERSION}}}'
        ) from error
    if name != "raftq-queue":
        raise InvalidArgument(f"{directory} holds {name!r}, not a RaftQ queue")
    if version > FORMAT_VERSION or version < 1:
        raise UnknownFormat(
            f"{directory} has format version {version}; this RaftQ knows up to {FORMAT_VERSION}"
        )


_OWN_NAMES = {"lock", "reserve", "queue.format", "delays.snapshot", *LOG_NAMES}


def _write_reserve(disk: Disk, path: str, size: int) -> None:
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        block = bytes(min(size, 65536))
        for start in range(0, size, len(block)):
            file.append([block[: size - start]])
        file.sync()
    finally:
        file.close()
