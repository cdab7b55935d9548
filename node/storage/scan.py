"""Walk the batches of a segment file and tell good bytes from bad ones. (Shell.)

Used by recovery, by a rebuild of an index and by scrub. Reads in large windows, so memory is
bounded by the largest batch however large the file is. Nothing is changed on disk here.
"""

from dataclasses import dataclass

from crc32c import crc32c

from raftq.client.common.disk import File
from raftq.client.common.errors import CorruptBatch
from raftq.client.wire.batch import (
    BATCH_BYTES_MAX,
    FLAG_OFFSET_DELTAS,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Batch,
)
from raftq.client.wire.headers import (
    CHECKED,
    CRCS_AT,
    REST_AT,
    STAMP_AT,
    facts_make_sense,
    position_of,
    read_front,
)
from raftq.node.storage.damage import DamagedRange
from raftq.node.storage.index import SegmentIndex

WINDOW_BYTES = 4 * 1024 * 1024
_LENGTH_AT = position_of("length")
_NEEDLE = MAGIC + bytes([VERSION])


@dataclass(slots=True)
class TornTail:
    """The position from which on nothing readable follows, and why."""

    position: int
    reason: str


def scan(
    file: File, path: str, index: SegmentIndex, end: int, bytes_max: int | None = None
) -> TornTail | None:
    """Add every batch between `index.size` and byte `end` to the index.

    Bad bytes with a good batch behind them are added as damage. Bad bytes without one are returned:
    the caller decides between a torn tail and damage. `bytes_max` ends the scan early, at the first
    batch boundary after that many bytes.
    """
    stop = end if bytes_max is None else min(end, index.size + bytes_max)
    while index.size < stop:
        reason = _scan_good(file, index, end, stop)
        if reason is None:
            return None
        found = resync(file, index.size, end, index.end_offset)
        if found is None:
            return TornTail(index.size, reason)
        position, base = found
        start = index.end_offset
        index.add_damage(DamagedRange(start, base, path, index.size, position, reason))
    return None


def _scan_good(file: File, index: SegmentIndex, end: int, stop: int) -> str | None:
    """Add batches up to `stop`, and return None, or up to a bad batch, and return why it is bad."""
    needed = 0
    while index.size < stop:
        position = index.size
        window = file.read(position, _window(end - position, needed))
        _add_window(window, index, stop - position)
        if index.size == position:
            front = read_front(window, 0)
            if front is None or not len(window) < front.length <= end - position:
                return _why_not(window, index.end_offset)
            if needed >= front.length:
                return _why_not(window, index.end_offset)  # the file is shorter than it was
            needed = front.length
    return None


def _add_window(window: bytes, index: SegmentIndex, stop: int) -> None:
    """Add the good batches that lie wholly in the window and start before `stop`."""
    unpack, checksum, add = CHECKED.unpack_from, crc32c, index.add
    stamp_end, facts_at, epoch_now = CRCS_AT, REST_AT, -1
    at, expected, size = 0, index.end_offset, len(window)
    headers_until = min(size - HEADER_BYTES + 1, stop)
    with memoryview(window) as view:
        while at < headers_until:
            (
                magic, version, length, base, epoch, stamp_crc, crc, flags, lane, count, span,
                _, _, _, _, time,
            ) = unpack(window, at)  # fmt: skip
            end = at + length
            if (
                base != expected
                or magic != MAGIC
                or version != VERSION
                or not at + HEADER_BYTES <= end <= size
                or checksum(window[at : at + stamp_end]) != stamp_crc
                or checksum(view[at + facts_at : end]) != crc
                or not facts_make_sense(lane, count, span)
            ):
                return
            if flags & FLAG_OFFSET_DELTAS:
                if not _add_sparse(index, window, at):
                    return
            else:
                add(length, base, span, lane, time)
            if epoch != epoch_now:
                index.add_epoch(epoch, base)
                epoch_now = epoch
            at = end
            expected += span


def _why_not(window: bytes, expected: int) -> str:
    """Return what is wrong with the batch at the start of the window."""
    try:
        batch = Batch(window)
        batch.check_crc()
        batch.offsets()
    except CorruptBatch as error:
        return str(error)
    return f"a batch with offset {batch.base_offset} stands where {expected} is due"


def _window(left: int, needed: int) -> int:
    return min(left, max(WINDOW_BYTES, needed))


def _add_sparse(index: SegmentIndex, window: bytes, at: int) -> bool:
    try:
        batch = Batch(window, at)
        offsets = batch.offsets()
    except CorruptBatch:
        return False
    bounds = (batch.base_offset, batch.end_offset)
    index.add_sparse(batch.length, offsets, bounds, batch.lane, batch.max_timestamp)
    return True


def resync(file: File, position: int, end: int, expected: int) -> tuple[int, int] | None:
    """Return (position, base_offset) of the first good batch after bad bytes at `position`, or
    None.

    The search starts behind the bad batch where its length can be known: a record may contain a
    batch (a dead letter does), which must not be mistaken for a batch of this log.
    """
    front = read_front(file.read(position, HEADER_BYTES), 0)
    if front is not None:
        if front.base_offset > expected and _good_base(file, position, end, expected) is not None:
            return position, front.base_offset
        position += front.length
    else:
        position += _proven_length(file, position, end) or 1
    while position + HEADER_BYTES <= end:
        window = file.read(position, _window(end - position, 0))
        at = window.find(_NEEDLE)
        while at >= 0 and at + HEADER_BYTES <= len(window):
            if read_front(window, at) is not None:
                base = _good_base(file, position + at, end, expected)
                if base is not None:
                    return position + at, base
            at = window.find(_NEEDLE, at + 1)
        # A header may lie across the end of this window.
        position += max(len(window) - HEADER_BYTES + 1, 1)
    return None


def _proven_length(file: File, position: int, end: int) -> int | None:
    """Return the length of a batch with a bad stamp, where a checksum still proves it.

    Damage outside the length leaves a body that matches its own checksum. When one bit of the
    length is flipped, flipping it back makes the stamp right again.
    """
    header = file.read(position, HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    _, _, length, _, _, stamp_crc, crc, *_ = CHECKED.unpack_from(header)
    length_max = min(end - position, BATCH_BYTES_MAX)
    if HEADER_BYTES <= length <= length_max:
        body = file.read(position + REST_AT, length - REST_AT)
        if crc32c(body) == crc:
            return int(length)
    for bit in range(32):
        other = int(length) ^ 1 << bit
        front = header[:_LENGTH_AT] + other.to_bytes(4, "little") + header[STAMP_AT:CRCS_AT]
        if HEADER_BYTES <= other <= length_max and crc32c(front) == stamp_crc:
            return other
    return None


def _good_base(file: File, position: int, end: int, expected: int) -> int | None:
    """Return the base offset of the batch at `position`, if all of it is good and it fits the
    log."""
    front = read_front(file.read(position, HEADER_BYTES), 0)
    if front is None or front.base_offset < expected or position + front.length > end:
        return None
    try:
        Batch(window := file.read(position, front.length)).check_crc()
    except CorruptBatch:
        return None
    assert len(window) == front.length
    return front.base_offset
