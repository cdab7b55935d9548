"""Snapshots of the producers' state, and its rebuild from a log. (Shell.)

A snapshot is a cache of what the log says up to an offset. The newest two are kept. They are not
synced: a snapshot that a power loss damages fails its checksum and is skipped. A snapshot beyond
the end of the log describes batches that are gone, and other batches may take their offsets. So it
is removed, durably, before the log goes on. Therefore an owner calls `load_newest` and `rebuild`
whenever it has opened or truncated its log. Before it resets a log, it removes all snapshots with
`remove_above(-1)`.
"""

from raftq.client.common.disk import Disk
from raftq.client.common.errors import (
    CorruptBatch,
    CorruptFile,
    DiskFull,
    StorageFailed,
    UnknownFormat,
)
from raftq.node.storage.log import Log
from raftq.node.storage.producers import BYTES_MAX, PRODUCERS_MAX, Producers
from raftq.node.storage.segment import replace_unsynced
from raftq.node.storage.stamped import good_facts

KEPT = 2
_PREFIX, _SUFFIX = "producers-", ".snapshot"
_DIGITS = 20
_READ_BYTES = 1024 * 1024


def save(producers: Producers, disk: Disk, directory: str) -> bool:
    """Write a snapshot as of `producers.end_offset`. Returns False when the disk has no room for
    it."""
    try:
        replace_unsynced(disk, _path(directory, producers.end_offset), producers.dump())
    except DiskFull:
        return False
    for old in _offsets(disk, directory)[:-KEPT]:
        disk.remove(_path(directory, old))
    return True


def load_newest(
    disk: Disk, directory: str, end_offset_max: int, producers_max: int = PRODUCERS_MAX
) -> Producers:
    """Return the newest good snapshot at or below the end of the log, or an empty state at 0."""
    remove_above(disk, directory, end_offset_max)
    for offset in reversed(_offsets(disk, directory)):
        try:
            data = disk.read_file(_path(directory, offset), BYTES_MAX)
            producers = Producers.load(data, producers_max)
        except (CorruptFile, StorageFailed, UnknownFormat):
            continue
        if producers.end_offset == offset:
            return producers
    return Producers(producers_max=producers_max)


def remove_above(disk: Disk, directory: str, end_offset: int) -> None:
    """Remove every snapshot beyond this offset (all of them with -1). Durable on return."""
    gone = [offset for offset in _offsets(disk, directory) if offset > end_offset]
    for offset in gone:
        disk.remove(_path(directory, offset))
    if gone:
        disk.sync_directory(directory)


def rebuild(log: Log, producers: Producers) -> int:
    """Note every batch between `producers.end_offset` and the end of the log. Returns the bytes
    read.

    Bodies are not decoded. Damaged batches are skipped. A state that ends below the start of the
    log is dropped: the batches in between are gone, so it could mistake a new batch for an old one.
    """
    if producers.end_offset < log.start_offset:
        producers.clear(log.start_offset)
    offset = producers.end_offset
    end = log.end_offset
    total = 0
    while offset < end:
        try:
            data = log.read(offset, _READ_BYTES)
            facts, following = good_facts(memoryview(data), offset)
            producers.note_all(facts)
            total += len(data)
            if following == offset:
                log.batch_at(offset)  # finds how far the damage reaches
                raise CorruptBatch(f"the batch at offset {offset} cannot be read")
        except CorruptBatch:
            following = log.next_readable(offset)
            if following == offset:
                raise
        offset = following
    producers.end_offset = end
    return total


def _path(directory: str, offset: int) -> str:
    return f"{directory}/{_PREFIX}{offset:0{_DIGITS}d}{_SUFFIX}"


def _offsets(disk: Disk, directory: str) -> list[int]:
    """Return the offsets of the snapshots, lowest first."""
    names = [
        name[len(_PREFIX) : -len(_SUFFIX)]
        for name in disk.list(directory)
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX)
    ]
    return [int(name) for name in names if len(name) == _DIGITS and name.isdecimal()]
