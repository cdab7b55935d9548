"""The segments of one log: their files, their indexes, and which holds which offset. (Shell.)

The last segment is active: its index is in memory and grows. The others are sealed: a summary of
each stays in memory, its index and its open file are cached while they are in use.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress

from raftq.client.common.disk import Disk, File
from raftq.client.common.errors import CorruptFile, DiskFull, StorageFailed
from raftq.client.common.types import Buffer
from raftq.client.wire.batch import LANE_COUNT
from raftq.node.storage.config import LogConfig
from raftq.node.storage.damage import DamagedRange
from raftq.node.storage.index import TIME_NONE, SegmentIndex
from raftq.node.storage.index_file import (
    HEAD_BYTES_MIN,
    SegmentSummary,
    decode_head,
    decode_index,
    encode_index,
    head_length,
    summarize,
)
from raftq.node.storage.scan import scan

INDEXES_MAX = 8
FILES_MAX = 32
FILES_KEPT = 16  # the newest segments keep their files: they may still need a sync
INDEX_BYTES_MAX = 1 << 31
_HEAD_READ_BYTES = 4096


class Segment:
    """One segment. `facts` is its index while it is active, and its summary once it is sealed."""

    __slots__ = ("base_offset", "facts", "index_path", "path", "removed")

    def __init__(
        self, directory: str, base_offset: int, facts: SegmentIndex | SegmentSummary
    ) -> None:
        self.base_offset = base_offset
        self.path = f"{directory}/{base_offset:020d}.log"
        self.index_path = f"{directory}/{base_offset:020d}.index"
        self.facts = facts
        self.removed = False


def read_summary(disk: Disk, segment: Segment, with_lanes: bool) -> SegmentSummary:
    """Return the head of the index file. Raises CorruptFile unless it fits the segment."""
    if not disk.exists(segment.index_path):
        raise CorruptFile(f"{segment.index_path} is missing")
    file = disk.open(segment.index_path)
    try:
        data = file.read(0, max(_HEAD_READ_BYTES, HEAD_BYTES_MIN))
        length = head_length(data, segment.index_path)
        if length > len(data):
            data = file.read(0, length)
    finally:
        file.close()
    summary = decode_head(data[:length], segment.index_path, segment.path)
    if summary.base_offset != segment.base_offset or summary.size != disk.size(segment.path):
        raise CorruptFile(f"{segment.index_path} does not belong to its segment as it is")
    if with_lanes and not summary.with_lanes:
        raise CorruptFile(f"{segment.index_path} has no lanes")
    return summary


def write_index(disk: Disk, segment: Segment, index: SegmentIndex) -> None:
    disk.write_file_atomic(segment.index_path, encode_index(index))


def write_index_if_room(disk: Disk, segment: Segment, index: SegmentIndex) -> None:
    """Write an index, if there is room. It can be rebuilt: a full disk must not stop reads."""
    with suppress(DiskFull):
        write_index(disk, segment, index)


def replace_unsynced(disk: Disk, path: str, data: bytes) -> None:
    """Replace a file whose content is checked when it is read: a crash may leave anything."""
    temporary = path + ".tmp"
    file = disk.open(temporary, create=True)
    try:
        file.truncate(0)
        file.append([data])
    except DiskFull:
        disk.remove(temporary)
        raise
    finally:
        file.close()
    disk.rename(temporary, path)


class Segments:
    """The ordered segments of one log."""

    __slots__ = (
        "_disk",
        "_files",
        "_indexes",
        "_lane_sums",
        "_sealed_bytes",
        "bases",
        "config",
        "directory",
        "items",
    )

    def __init__(self, disk: Disk, directory: str, config: LogConfig) -> None:
        self._disk = disk
        self.directory = directory
        self.config = config
        self.items: list[Segment] = []
        self.bases: list[int] = []
        self._files: OrderedDict[int, File] = OrderedDict()
        self._indexes: OrderedDict[int, SegmentIndex] = OrderedDict()
        self._lane_sums: list[list[int]] | None = None
        self._sealed_bytes: int | None = None

    @property
    def active(self) -> Segment:
        return self.items[-1]

    @property
    def size_bytes(self) -> int:
        if self._sealed_bytes is None:
            self._sealed_bytes = sum(segment.facts.size for segment in self.items[:-1])
        return self._sealed_bytes + self.items[-1].facts.size

    def _changed(self) -> None:
        self._lane_sums = None
        self._sealed_bytes = None

    def new_index(self, base_offset: int) -> SegmentIndex:
        config = self.config
        return SegmentIndex(base_offset, config.index_interval_bytes, config.with_lanes)

    def create(self, base_offset: int, sync: bool = True) -> None:
        """Add an empty active segment. Its name is durable on return, unless `sync` is off."""
        segment = Segment(self.directory, base_offset, self.new_index(base_offset))
        file = self._disk.open(segment.path, create=True)
        try:
            if file.size:
                file.truncate(0)
            if sync:
                self._disk.sync_directory(self.directory)
        except BaseException:
            file.close()
            raise
        self.add(segment)
        self._files[base_offset] = file

    def add(self, segment: Segment) -> None:
        self.items.append(segment)
        self.bases.append(segment.base_offset)
        self._changed()

    def insert(self, base_offset: int, end_offset: int, batches: Buffer) -> None:
        """Add a sealed segment of these batches between others. Durable on return.

        A segment with the same base that has no offsets, because it lost all its bytes, is removed.
        """
        segment = Segment(self.directory, base_offset, self.new_index(base_offset))
        self._disk.write_file_atomic(segment.path, batches)
        at = bisect_left(self.bases, base_offset)
        if self.bases[at] == base_offset:
            empty = self.items[at]
            assert empty is not self.active, empty.path
            assert empty.facts.end_offset == base_offset, empty.path
            self.forget(empty)
            del self.items[at], self.bases[at]
        index = self.rebuild(segment, end_offset)
        assert index.end_offset == end_offset, f"{segment.path} lost offsets"
        segment.facts = summarize(index)
        self.items.insert(at, segment)
        self.bases.insert(at, base_offset)
        self._changed()

    def seal_active(self, sync: bool = True) -> None:
        """Write the active segment's index."""
        segment = self.items[-1]
        index = segment.facts
        assert isinstance(index, SegmentIndex)
        # On a full disk the index is left out: rolling is how a log comes to drop old segments.
        with suppress(DiskFull):
            if sync:
                write_index(self._disk, segment, index)
            else:
                replace_unsynced(self._disk, segment.index_path, encode_index(index))

    def summarize_sealed(self) -> None:
        """Keep only the summary of the segment before the active one."""
        segment = self.items[-2]
        index = segment.facts
        assert isinstance(index, SegmentIndex)
        segment.facts = summarize(index)
        index.damaged = segment.facts.damaged
        self._remember(segment.base_offset, index)
        self._changed()

    def number_holding(self, offset: int) -> int:
        """Return the position in `items` of the last segment that starts at or below the offset."""
        return max(bisect_right(self.bases, offset) - 1, 0)

    def index_of(self, segment: Segment) -> SegmentIndex:
        facts = segment.facts
        if isinstance(facts, SegmentIndex):
            return facts
        base = segment.base_offset
        index = self._indexes.get(base)
        if index is not None:
            self._indexes.move_to_end(base)
            return index
        index = self._load(segment, facts)
        self._remember(base, index)
        return index

    def _remember(self, base: int, index: SegmentIndex) -> None:
        self._indexes[base] = index
        if len(self._indexes) > INDEXES_MAX:
            self._indexes.popitem(last=False)

    def _load(self, segment: Segment, summary: SegmentSummary) -> SegmentIndex:
        interval = self.config.index_interval_bytes
        try:
            data = self._disk.read_file(segment.index_path, INDEX_BYTES_MAX)
            index = decode_index(data, segment.index_path, segment.path, interval)
            if (index.end_offset, index.size) != (summary.end_offset, summary.size):
                raise CorruptFile(f"{segment.index_path} changed")
        except (CorruptFile, StorageFailed):
            index = self.rebuild(segment, summary.end_offset)
        index.damaged = summary.damaged
        for damage in summary.damaged:
            index.ensure_entry(damage)
        return index

    def rebuild(self, segment: Segment, end_offset: int) -> SegmentIndex:
        """Rebuild the index of a sealed segment from its batches, and write it.

        What cannot be read below `end_offset`, where the next segment starts, is damaged.
        """
        index = self.new_index(segment.base_offset)
        file = self.file_of(segment)
        tail = scan(file, segment.path, index, file.size)
        if tail is not None:
            end = max(index.end_offset, end_offset)
            damage = DamagedRange(
                index.end_offset, end, segment.path, tail.position, file.size, tail.reason
            )
            index.add_damage(damage)
        file.sync()
        write_index_if_room(self._disk, segment, index)
        return index

    def file_of(self, segment: Segment) -> File:
        base = segment.base_offset
        file = self._files.get(base)
        if file is not None:
            self._files.move_to_end(base)
            return file
        file = self._disk.open(segment.path)
        self._files[base] = file
        if len(self._files) > FILES_MAX:
            kept = self.bases[-FILES_KEPT:]
            oldest = next((key for key in self._files if key not in kept), None)
            if oldest is not None:
                self._files.pop(oldest).close()
        return file

    def forget(self, segment: Segment) -> None:
        """Close the file and drop the index, because the files are about to change."""
        self._indexes.pop(segment.base_offset, None)
        file = self._files.pop(segment.base_offset, None)
        if file is not None:
            file.close()
        self._changed()

    def replace_file(self, segment: Segment, temporary: str) -> None:
        """Put a finished file, already durable, in place of that of a sealed segment.

        The old index is removed first: it could be taken for an index of the new file.
        """
        self.forget(segment)
        if self._disk.exists(segment.index_path):
            self._disk.remove(segment.index_path)
            self._disk.sync_directory(self.directory)
        self._disk.rename(temporary, segment.path)
        self._disk.sync_directory(self.directory)
        self.index_again(segment)

    def index_again(self, segment: Segment) -> None:
        """Rebuild the index of a sealed segment, because its bytes have changed."""
        end_offset = segment.facts.end_offset
        index = self.rebuild(segment, end_offset)
        assert index.end_offset == end_offset, f"{segment.path} lost offsets"
        segment.facts = summarize(index)
        index.damaged = segment.facts.damaged
        self._remember(segment.base_offset, index)

    def drop_front(self, count: int) -> int:
        """Remove the first segments from the disk, lowest first. Returns the bytes freed."""
        freed = 0
        for _ in range(count):
            segment = self.items.pop(0)
            self.bases.pop(0)
            freed += segment.facts.size
            self._remove(segment)
        if count:
            self._disk.sync_directory(self.directory)
        return freed

    def drop_back(self, count: int) -> None:
        """Remove the last segments from the disk, highest first. Durable on return."""
        for _ in range(count):
            segment = self.items.pop()
            self.bases.pop()
            self._remove(segment)
        if count:
            self._disk.sync_directory(self.directory)

    def _remove(self, segment: Segment) -> None:
        self.forget(segment)
        segment.removed = True
        if self._disk.exists(segment.index_path):
            self._disk.remove(segment.index_path)
        if self._disk.exists(segment.path):
            self._disk.remove(segment.path)

    def reactivate_last(self) -> SegmentIndex:
        """Make a sealed last segment active again, so that it can be cut and appended to."""
        segment = self.items[-1]
        if isinstance(segment.facts, SegmentIndex):
            return segment.facts
        index = self.index_of(segment)
        self._indexes.pop(segment.base_offset)
        segment.facts = index
        if self._disk.exists(segment.index_path):
            self._disk.remove(segment.index_path)
        self._changed()
        return index

    def count_droppable(
        self, now_ms: int, age_ms: int | None, bytes_max: int | None, below: int | None
    ) -> int:
        """Count the sealed segments at the front that are too old or exceed the size.

        A segment that reaches `below` does not count.
        """
        size = self.size_bytes
        count = 0
        # A segment without readable records has no time of its own: it is as old as its successor.
        times = [segment.facts.max_timestamp for segment in self.items]
        for number in range(len(times) - 2, -1, -1):
            if times[number] == TIME_NONE:
                times[number] = times[number + 1]
        for number, segment in enumerate(self.items[:-1]):
            if below is not None and self.bases[number + 1] > below:
                break
            old = age_ms is not None and TIME_NONE < times[number] <= now_ms - age_ms
            if not old and (bytes_max is None or size <= bytes_max):
                break
            size -= segment.facts.size
            count += 1
        return count

    # Lanes

    def next_run(self, lane: int, offset: int) -> tuple[int, int] | None:
        """Return the first run [start, end) of the lane with end > offset, or None.

        `start` is not below `offset`.
        """
        active = self.items[-1].facts
        assert isinstance(active, SegmentIndex)
        assert active.lanes is not None, "this log keeps no lanes"
        if offset < active.base_offset:
            number = self.number_holding(offset)
            last = len(self.items) - 1
            while (number := self._sealed_with_lane(lane, number)) < last:
                lanes = self.index_of(self.items[number]).lanes
                assert lanes is not None
                run = lanes[lane].next_run(offset)
                if run is not None:
                    return run
                number += 1
        return active.lanes[lane].next_run(offset)

    def count_from(self, lane: int, offset: int) -> int:
        """Count the records of the lane at or above the offset."""
        offset = max(offset, self.bases[0])
        active = self.items[-1].facts
        assert isinstance(active, SegmentIndex)
        assert active.lanes is not None, "this log keeps no lanes"
        count = active.lanes[lane].count_from(offset)
        if offset < active.base_offset:
            number = self.number_holding(offset)
            segment = self.items[number]
            count += self._lane_records_after(lane, number)
            if offset <= segment.base_offset:
                count += segment.facts.lane_records[lane]
            elif segment.facts.lane_records[lane]:
                lanes = self.index_of(segment).lanes
                assert lanes is not None
                count += lanes[lane].count_from(offset)
        return count

    def _lane_records_after(self, lane: int, number: int) -> int:
        """Count the records of the lane in sealed segments after position `number`."""
        sums = self._lane_sums or self._sum_lanes()
        return sums[lane][-1] - sums[lane][number + 1]

    def _sealed_with_lane(self, lane: int, number: int) -> int:
        """Return the first position at or after `number` whose sealed segment has the lane."""
        sums = (self._lane_sums or self._sum_lanes())[lane]
        return bisect_right(sums, sums[number], lo=number) - 1

    def _sum_lanes(self) -> list[list[int]]:
        sums = [[0] for _ in range(LANE_COUNT)]
        for segment in self.items[:-1]:
            for lane, records in enumerate(segment.facts.lane_records):
                sums[lane].append(sums[lane][-1] + records)
        self._lane_sums = sums
        return sums

    # Epochs and damage

    def epoch_starts(self, start: int) -> list[tuple[int, int]]:
        """Return (epoch, start_offset) of each epoch, in order; no start is below `start`."""
        merged: list[tuple[int, int]] = []
        for segment in self.items:
            for epoch, base in segment.facts.epochs:
                base = max(base, start)
                if merged and merged[-1][1] == base:
                    merged[-1] = (epoch, base)
                elif not merged or merged[-1][0] != epoch:
                    merged.append((epoch, base))
        return merged

    def last_epoch(self, default: int) -> int:
        """Return the epoch of the newest batch, or `default` when there is no batch."""
        for segment in reversed(self.items):
            if segment.facts.epochs:
                return segment.facts.epochs[-1][0]
        return default

    def damaged(self) -> Iterator[DamagedRange]:
        for segment in self.items:
            yield from segment.facts.damaged

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._indexes.clear()
