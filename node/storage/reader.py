"""Find and read batches in the segments of one log. (Shell.)

A lookup goes from the sparse index to the block that holds the offset and walks its headers.
Headers that do not fit together are examined with all checksums, noted as a DamagedRange, and
refused with a CorruptBatch from then on. Everything around them stays readable.
"""

from crc32c import crc32c

from raftq.client.common.disk import File
from raftq.client.common.errors import CorruptBatch
from raftq.client.wire.batch import HEADER_BYTES, MAGIC, VERSION, Batch, decode
from raftq.client.wire.headers import BOUNDS, CRCS_AT
from raftq.node.storage.damage import DamagedRange
from raftq.node.storage.index import SegmentIndex
from raftq.node.storage.scan import scan
from raftq.node.storage.segment import Segment, Segments

_WALK_BYTES = 64 * 1024


class SegmentReader:
    """Lookups over segments. `gaps` are offsets between segments that no file holds."""

    __slots__ = ("gaps", "segments")

    def __init__(self, segments: Segments, gaps: list[DamagedRange]) -> None:
        self.segments = segments
        self.gaps = gaps

    def damage_at(self, offset: int) -> DamagedRange | None:
        """Return the known damaged range that contains the offset, or None."""
        for gap in self.gaps:
            if gap.start <= offset < gap.end:
                return gap
        segments = self.segments
        for damage in segments.items[segments.number_holding(offset)].facts.damaged:
            if damage.start <= offset < damage.end:
                return damage
        return None

    def find(self, offset: int) -> tuple[Segment, SegmentIndex, int]:
        """Return (segment, its index, position) of the batch that holds the offset."""
        segments = self.segments
        segment = segments.items[segments.number_holding(offset)]
        index = segments.index_of(segment)
        if self.gaps or index.damaged:
            self._refuse_damage(offset)
        file = segments.file_of(segment)
        position = _walk(file, index, offset)
        if position is None:
            self.examine(segment, index, offset)
            self._refuse_damage(offset)
            position = _walk(file, index, offset)
            if position is None:
                raise CorruptBatch(f"the batch that holds offset {offset} cannot be found")
        return segment, index, position

    def _refuse_damage(self, offset: int) -> None:
        damage = self.damage_at(offset)
        if damage is not None:
            raise CorruptBatch(
                f"offsets {damage.start} to {damage.end} are damaged "
                f"({damage.path} at byte {damage.position}: {damage.reason})"
            )

    def examine(self, segment: Segment, index: SegmentIndex, offset: int) -> None:
        """Check every batch of the block that holds the offset, and note the damage."""
        start, position = index.entry_for_offset(offset)
        probe = SegmentIndex(start, index.size + 1, with_lanes=False)
        probe.size = position
        file = self.segments.file_of(segment)
        length = index.block_end(position) - position
        tail = scan(file, segment.path, probe, index.size, length)
        if tail is not None:
            probe.damaged.append(
                DamagedRange(
                    *(probe.end_offset, index.end_offset, segment.path),
                    *(tail.position, index.size, tail.reason),
                )
            )
        for damage in probe.damaged:
            index.insert_damage(damage)

    def read(self, offset: int, bytes_max: int) -> tuple[Segment, SegmentIndex, int, bytes]:
        """Return (segment, its index, position, bytes): whole batches from the one with the offset
        on.

        There is at least one batch, and all are of one segment.
        """
        segment, index, position = self.find(offset)
        file = self.segments.file_of(segment)
        limit = index.damage_position_from(position) if index.damaged else index.size
        end = position + bytes_max
        if end >= limit:
            return segment, index, position, file.read(position, limit - position)
        entry = index.last_entry_until(end)
        if entry > position:
            return segment, index, position, file.read(position, entry - position)
        return segment, index, position, _read_within_block(file, position, bytes_max, limit)

    def batch_at(self, offset: int) -> Batch:
        """Return the checked batch that holds the offset."""
        segment, index, _, data = self.read(offset, 1)
        try:
            batch = decode(data)
            if batch.base_offset <= offset < batch.end_offset:
                return batch
        except CorruptBatch:
            self.examine(segment, index, offset)
            self._refuse_damage(offset)
            raise
        raise CorruptBatch(f"the batch at offset {batch.base_offset} does not hold {offset}")

    def cut_point(self, end_offset: int) -> tuple[int, int, int]:
        """Return (segment number, position, offset) at which to cut off everything from
        `end_offset` on."""
        number = self.segments.number_holding(end_offset)
        facts = self.segments.items[number].facts
        if end_offset >= facts.end_offset:
            return number, facts.size, facts.end_offset
        try:
            batch = self.batch_at(end_offset)
        except CorruptBatch:
            for damage in facts.damaged:
                if damage.start <= end_offset < damage.end:
                    return number, damage.position, damage.start
            raise
        return number, self.find(end_offset)[2], batch.base_offset


def _walk(file: File, index: SegmentIndex, offset: int) -> int | None:
    """Return the position of the batch that holds the offset, or None when the headers do not
    fit."""
    expected, position = index.entry_for_offset(offset)
    end = index.block_end(position)
    unpack = BOUNDS.unpack_from
    window, at = b"", 0
    while position + at < end:
        if at + HEADER_BYTES > len(window):
            position += at
            at = 0
            window = file.read(position, min(end - position, _WALK_BYTES))
            if len(window) < HEADER_BYTES:
                return None
        magic, version, length, base, stamp_crc, span = unpack(window, at)
        if (
            base != expected
            or magic != MAGIC
            or version != VERSION
            or length < HEADER_BYTES
            or crc32c(window[at : at + CRCS_AT]) != stamp_crc
        ):
            return None
        expected += span
        if offset < expected:
            return position + at
        at += length
    return None


def _read_within_block(file: File, position: int, bytes_max: int, limit: int) -> bytes:
    """Return batches up to `bytes_max`, at least one. The walk has checked its header."""
    size = min(max(bytes_max, HEADER_BYTES), limit - position)
    data = file.read(position, size)
    end = 0
    while end + HEADER_BYTES <= len(data):
        length = BOUNDS.unpack_from(data, end)[2]
        if end and (end + length > bytes_max or length < HEADER_BYTES):
            break
        end += length
    if end <= len(data):
        return data[:end]
    return file.read(position, min(end, limit - position))
