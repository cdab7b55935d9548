"""Snapshots of the producers' state, and its rebuild from a log. (Shell.)

A snapshot is a cache of what the log says up to an offset; the newest two are kept. They are not
synced: one that a power loss damages fails its checksum and is passed over. One beyond the end of
the log tells of batches that are gone, and others may take their offsets: it is removed, durably,
before the log goes on. So an owner calls `load_newest` and `rebuild` whenever it opened or
truncated its log, and before it resets one it removes all of them with `remove_above(-1)`.
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
    """Write a snapshot as of `producers.end_offset`; False when the disk has no room for it."""
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
    """The newest good snapshot at or below the end of the log, or nothing known at offset 0."""
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
    """Remove every snapshot beyond this offset (all of them with -1); durable on return."""
    gone = [offset for offset in _offsets(disk, directory) if offset > end_offset]
    for offset in gone:
        disk.remove(_path(directory, offset))
    if gone:
        disk.sync_directory(directory)


def rebuild(log: Log, producers: Producers) -> int:
    """Note every batch between `producers.end_offset` and the log's end; the bytes read.

    Bodies are not decoded. Damaged batches are passed over. A state that ends below the start of
    the log is dropped: what it does not know of is gone, so it could take a new batch for an old.
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
                log.batch_at(offset)  # finds out how far the damage goes
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
    """The offsets of the snapshots that are there, lowest first."""
    names = [
        name[len(_PREFIX) : -len(_SUFFIX)]
        for name in disk.list(directory)
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX)
    ]
    return [int(name) for name in names if len(name) == _DIGITS and name.isdecimal()]
