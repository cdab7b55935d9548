"""The reading half of a log: what it holds, its batches, times, lanes and epochs. (Shell-less.)

`Log` adds everything that changes a log; its docstring has the rules that both halves keep.
Nothing is written here, except that damage found while reading is remembered in memory.
"""

from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter

from raftq.client.common.errors import CorruptBatch, OffsetOutOfRange
from raftq.client.wire.batch import Batch, decode
from raftq.node.storage.durability import Durability
from raftq.node.storage.epochs import epoch_starts
from raftq.node.storage.header import DamagedRange
from raftq.node.storage.index import SegmentIndex
from raftq.node.storage.page_cache import PageCache
from raftq.node.storage.reader import SegmentReader
from raftq.node.storage.segment import Segment, Segments

NO_EPOCH = -1
_TIME_READ_BYTES = 64 * 1024
_epoch_of = itemgetter(0)


class ReadableLog:
    """What can be asked of an open log."""

    __slots__ = (
        "_durability",
        "_epoch_starts",
        "_index",
        "_page_cache",
        "_reader",
        "directory",
        "end_offset",
        "last_epoch",
        "segments",
    )

    _durability: Durability
    # Computed when asked for; None after every change of epochs, segments or start.
    _epoch_starts: list[tuple[int, int]] | None
    _index: SegmentIndex
    _page_cache: PageCache
    _reader: SegmentReader
    directory: str
    end_offset: int
    # Of the newest batch that the files still tell of, also when it lies below the start.
    last_epoch: int
    segments: Segments

    # Facts

    @property
    def start_offset(self) -> int:
        return self._durability.start_offset

    @property
    def flushed_offset(self) -> int:
        return self._durability.flushed_offset

    @property
    def readable_offset(self) -> int:
        """What was readable at some time, as its owner said: kept for him across restarts."""
        return self._durability.readable_offset

    @property
    def has_unnoted(self) -> bool:
        """Whether more is readable than a restart would know."""
        return self._durability.has_unnoted

    @property
    def size_bytes(self) -> int:
        return self.segments.size_bytes

    @property
    def segment_count(self) -> int:
        return len(self.segments.items)

    @property
    def failure(self) -> Exception | None:
        """Why the log refuses writes, or None."""
        return self._durability.failure

    @property
    def damaged(self) -> list[DamagedRange]:
        """Every damaged range known so far, in offset order."""
        start = self.start_offset
        ranges = [*self._reader.gaps, *self.segments.damaged()]
        return sorted(
            (one for one in ranges if one.end >= start), key=lambda one: (one.start, one.position)
        )

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """(epoch, start_offset) of each epoch that has records here, in order; not to be changed.

        An epoch whose first records are below the start of the log starts there.
        """
        starts = self._epoch_starts
        if starts is None:
            starts = self._epoch_starts = epoch_starts(self.segments, self.start_offset)
        # Only the last can be without a record, when the log is empty.
        return starts[:-1] if starts and starts[-1][1] >= self.end_offset else starts

    def epoch_pairs(self, limit: int) -> list[tuple[int, int]]:
        """The last `limit` of `epochs`."""
        return self.epochs[-limit:] if limit > 0 else []

    def end_offset_for_epoch(self, epoch: int) -> int:
        """Where records of epochs above `epoch` start; the end of the log when there are none."""
        epochs = self.epochs
        at = bisect_right(epochs, epoch, key=_epoch_of)
        return epochs[at][1] if at < len(epochs) else self.end_offset

    # Read

    def read(self, offset: int, bytes_max: int) -> bytes:
        """Raw batches from the one that holds `offset`, whole, at least one, of one segment.

        Empty at the end of the log. Their checksums are for whoever decodes them.
        """
        if offset == self.end_offset:
            return b""
        self._check_range(offset)
        segment, _, position, data = self._reader.read(offset, bytes_max)
        self._page_cache.note_read(segment, position, len(data))
        return data

    def batch_at(self, offset: int) -> Batch:
        """The checked batch that holds the offset."""
        if offset >= self.end_offset:
            raise OffsetOutOfRange(self._range_text(offset))
        self._check_range(offset)
        return self._reader.batch_at(offset)

    def stored_at(self, offset: int) -> tuple[Segment, int]:
        """The segment and the byte position of the batch that holds the offset."""
        if offset >= self.end_offset:
            raise OffsetOutOfRange(self._range_text(offset))
        self._check_range(offset)
        segment, _, position = self._reader.find(offset)
        return segment, position

    def batches(
        self,
        start: int,
        end: int | None = None,
        bytes_per_read: int = 1024 * 1024,
        skip_damaged: bool = False,
    ) -> Iterator[Batch]:
        """Checked batches from the one that holds `start`, up to `end`.

        Damage raises CorruptBatch, or is passed over with `skip_damaged`; either way it is in
        `damaged` from then on.
        """
        end = self.end_offset if end is None else min(end, self.end_offset)
        offset = start
        while offset < end:
            try:
                self._check_range(offset)
                segment, index, position, data = self._reader.read(offset, bytes_per_read)
                self._page_cache.note_read(segment, position, len(data))
                at = 0
                while at < len(data) and offset < end:
                    try:
                        batch = decode(data, at)
                        if not batch.base_offset <= offset < batch.end_offset:
                            raise CorruptBatch(f"no batch with offset {offset} where it is due")
                    except CorruptBatch:
                        self._reader.examine(segment, index, offset)
                        raise
                    yield batch
                    offset = batch.end_offset
                    at += batch.length
            except CorruptBatch:
                readable = self.next_readable(offset)
                if not skip_damaged or readable == offset:
                    raise
                offset = readable

    def next_readable(self, offset: int) -> int:
        """The first offset at or above this one that is not known to be damaged."""
        while (damage := self._reader.damage_at(offset)) is not None:
            offset = damage.end
        return offset

    def offset_for_time(self, timestamp_ms: int) -> int:
        """The first offset whose timestamp is at or above the given one; the end if none is."""
        start = self.start_offset
        for segment in self.segments.items:
            if segment.facts.max_timestamp < timestamp_ms or segment.facts.end_offset <= start:
                continue
            entry = self.segments.index_of(segment).entry_for_time(timestamp_ms)
            if entry is None:
                continue
            end = segment.facts.end_offset
            for batch in self.batches(max(entry, start), end, _TIME_READ_BYTES, skip_damaged=True):
                if batch.max_timestamp < timestamp_ms:
                    continue
                pairs = zip(batch.offsets(), batch.timestamps(), strict=True)
                for offset, timestamp in pairs:
                    if timestamp >= timestamp_ms and offset >= start:
                        return offset
        return self.end_offset

    def _check_range(self, offset: int) -> None:
        if not self.start_offset <= offset <= self.end_offset:
            raise OffsetOutOfRange(self._range_text(offset)).with_details(
                start_offset=self.start_offset, end_offset=self.end_offset
            )

    def _range_text(self, offset: int) -> str:
        return (
            f"offset {offset} is not kept: {self.directory} holds "
            f"[{self.start_offset}, {self.end_offset})"
        )

    # Lanes

    def next_run(self, lane: int, offset: int) -> tuple[int, int] | None:
        """The first run [start, end) of the lane with end > offset, start clipped to offset."""
        offset = max(offset, self.start_offset)
        index = self._index
        assert index.lanes is not None, "this log keeps no lanes"
        segments = self.segments
        if offset < index.base_offset:
            number = segments.number_holding(offset)
            last = len(segments.items) - 1
            while (number := segments.sealed_with_lane(lane, number)) < last:
                lanes = segments.index_of(segments.items[number]).lanes
                assert lanes is not None
                run = lanes[lane].next_run(offset)
                if run is not None:
                    return run
                number += 1
        return index.lanes[lane].next_run(offset)

    def count_from(self, lane: int, offset: int) -> int:
        """How many records of the lane are at or above the offset."""
        offset = max(offset, self.start_offset, self.segments.bases[0])
        index = self._index
        assert index.lanes is not None, "this log keeps no lanes"
        count = index.lanes[lane].count_from(offset)
        segments = self.segments
        if offset < index.base_offset:
            number = segments.number_holding(offset)
            segment = segments.items[number]
            count += segments.lane_records_after(lane, number)
            if offset <= segment.base_offset:
                count += segment.facts.lane_records[lane]
            elif segment.facts.lane_records[lane]:
                lanes = segments.index_of(segment).lanes
                assert lanes is not None
                count += lanes[lane].count_from(offset)
        return count
