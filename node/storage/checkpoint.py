"""How far a log was known to be durable, and where it starts: two slots in one small file. (Shell.)

    byte  size  field
    0     4     magic            'RQCP'
    4     2     version          1
    6     2     flags            1 = the log was closed and nothing was written since
                                 2 = sealed segments above flushed_offset may not be durable
                                 4 = a truncation to this point has begun and may not be durable
    8     8     sequence         the valid slot with the higher one counts
    16    8     segment_base     base offset of the active segment
    24    8     position         bytes of it that are durable
    32    8     flushed_offset
    40    8     start_offset
    48    8     readable_offset  what was readable, so replicated, at some time; 0: not known
    56    4     reserved         0
    60    4     crc              CRC32C of bytes 0..60

Slots are written in turn and in place, so a torn write leaves the other one. Mostly they are not
synced: `flushed_offset` is a hint that may be too low after a crash but never too high. It is
synced where it could be too high (truncation) and where `start_offset` moves.
"""

from dataclasses import dataclass, replace
from struct import Struct

from crc32c import crc32c

from raftq.client.common.disk import Disk, File
from raftq.client.common.errors import UnknownFormat

MAGIC = b"RQCP"
VERSION = 1
SLOT_BYTES = 64
NAME = "checkpoint"
_FLAG_CLEAN = 1
_FLAG_LAZY = 2
_FLAG_CUTTING = 4

_SLOT = Struct("<4sHHqqqqqq4x")
_CRC = Struct("<I")


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """One slot of the checkpoint file."""

    sequence: int = 0
    segment_base: int = 0
    position: int = 0
    flushed_offset: int = 0
    start_offset: int = 0
    readable_offset: int = 0
    clean: bool = False
    lazy: bool = False
    cutting: bool = False
    sure: bool = False
    """Not stored: whether no newer slot can have been lost to damage."""


def encode_slot(checkpoint: Checkpoint, sequence: int) -> bytes:
    slot = _SLOT.pack(
        MAGIC,
        VERSION,
        _FLAG_CLEAN * checkpoint.clean
        | _FLAG_LAZY * checkpoint.lazy
        | _FLAG_CUTTING * checkpoint.cutting,
        sequence,
        checkpoint.segment_base,
        checkpoint.position,
        checkpoint.flushed_offset,
        checkpoint.start_offset,
        checkpoint.readable_offset,
    )
    return slot + _CRC.pack(crc32c(slot))


def decode_slot(slot: bytes, path: str) -> Checkpoint | None:
    """Return the slot, or None when it is damaged."""
    if len(slot) != SLOT_BYTES or slot[:4] != MAGIC:
        return None
    if crc32c(slot[:60]) != _CRC.unpack_from(slot, 60)[0]:
        return None
    _, version, flags, *numbers = _SLOT.unpack_from(slot)
    if version != VERSION:
        raise UnknownFormat(
            f"{path} has checkpoint version {version}, not known here (newest known: {VERSION}); "
            "it was written by a newer version of RaftQ"
        )
    sequence, base, position, flushed, start, readable = numbers
    if min(numbers) < 0 or start > flushed:
        return None
    marks = [bool(flags & flag) for flag in (_FLAG_CLEAN, _FLAG_LAZY, _FLAG_CUTTING)]
    return Checkpoint(sequence, base, position, flushed, start, readable, *marks)


class CheckpointFile:
    """The open checkpoint file. A write goes to the slot that is not the newest."""

    __slots__ = ("_file", "_sequence")

    def __init__(self, file: File, sequence: int) -> None:
        self._file = file
        self._sequence = sequence

    def write(self, checkpoint: Checkpoint, sync: bool = False) -> None:
        sequence = self._sequence + 1
        slot = encode_slot(checkpoint, sequence)
        self._file.write_at((sequence & 1) * SLOT_BYTES, slot)
        # The sequence moves only now: a write that found no room is repeated in the same slot, not
        # in the newest.
        self._sequence = sequence
        if sync:
            self._file.sync()

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def open_checkpoint(disk: Disk, directory: str) -> tuple[CheckpointFile, Checkpoint | None]:
    """Return the file, created when missing, and its newest valid slot.

    A slot is `sure` when its predecessor is valid too. Otherwise it may be that predecessor.
    """
    path = f"{directory}/{NAME}"
    file = disk.open(path, create=True)
    try:
        newest = _newest(file, path)
    except UnknownFormat:
        file.close()
        raise
    return CheckpointFile(file, 0 if newest is None else newest.sequence), newest


def newest_slot(disk: Disk, directory: str) -> Checkpoint | None:
    """Return the newest valid slot of a log that is not open, or None."""
    path = f"{directory}/{NAME}"
    if not disk.exists(path):
        return None
    file = disk.open(path)
    try:
        return _newest(file, path)
    finally:
        file.close()


def is_truncated(disk: Disk, directory: str) -> bool:
    """Report whether a closed log has lost bytes that its checkpoint knows to be durable.

    No crash removes durable bytes. When they are missing, a file was cut, emptied or removed,
    and everything appended after them is missing too; it is unknown how much that was. The log
    is not opened, so that this is cheap for a thousand logs.
    """
    slot = newest_slot(disk, directory)
    if slot is None or slot.cutting or not slot.position:
        return False
    path = f"{directory}/{slot.segment_base:020d}.log"
    return not disk.exists(path) or disk.size(path) < slot.position


def _newest(file: File, path: str) -> Checkpoint | None:
    slots = [
        slot
        for at in (0, SLOT_BYTES)
        if (slot := decode_slot(file.read(at, SLOT_BYTES), path)) is not None
    ]
    newest = max(slots, key=lambda slot: slot.sequence, default=None)
    if newest is None:
        return None
    return replace(newest, sure=newest.sequence == 1 or len(slots) == 2)
