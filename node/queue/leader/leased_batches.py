"""Reads the batches that hold leased records, each once, and says what is in them. (Shell.)

Works per batch: header and checksum are looked at, and only where a batch has expiries or gaps, or
is mostly not leased, its columns. What fails its checksum is not handed out: a worker could only
fail on it until its attempts are spent. Whole batches are handed on as they are stored. A batch of
which less than half is leased is cut: many workers that take ten records each from batches of a
thousand must not be sent a hundred times what they take. The batch that was cut last is kept per
lane, because the next lease goes on in it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from crc32c import crc32c

from raftq.client.common.errors import CorruptBatch
from raftq.client.common.types import Buffer
from raftq.client.wire.batch import (
    FLAG_CONTROL,
    FLAG_EXPIRIES,
    FLAG_OFFSET_DELTAS,
    HEADER_BYTES,
    MAGIC,
    Batch,
    decode,
)
from raftq.client.wire.cutting import cut_batch
from raftq.client.wire.headers import CHECKED, CRCS_AT, REST_AT
from raftq.node.storage.log import Log

Ranges = list[tuple[int, int]]

READ_BYTES_MIN = 8 * 1024
READ_BYTES_MAX = 4 * 1024 * 1024
CUT_BYTES_MIN = 4 * 1024
"""Smaller batches are sent whole: cutting costs more than it saves."""

GAP_BYTES_MAX = 64 * 1024
"""Ranges that are this near to each other are read together, with what is between them."""
_LOOK_INSIDE = FLAG_CONTROL | FLAG_OFFSET_DELTAS | FLAG_EXPIRIES


@dataclass(slots=True)
class LeasedBatches:
    """What was found for some ranges. `cut_at`: from there on nothing was read, it was too much."""

    buffers: list[Buffer] = field(default_factory=list)
    size: int = 0
    cut_at: int | None = None
    gone: Ranges = field(default_factory=list)
    """No records are there: control batches and what compaction dropped."""
    expired: Ranges = field(default_factory=list)
    unreadable: Ranges = field(default_factory=list)
    error: CorruptBatch | None = None
    times: list[tuple[int, int, int]] = field(default_factory=list)
    """(lane, records, timestamp) of each part of a batch."""

    def drop_from(self, offset: int) -> None:
        """Forget what was found out about offsets from there on."""
        self.gone = [(start, min(end, offset)) for start, end in self.gone if start < offset]
        self.expired = [(start, min(end, offset)) for start, end in self.expired if start < offset]
        self.unreadable = [(a, min(b, offset)) for a, b in self.unreadable if a < offset]


class _Found:
    """One batch of a chunk."""

    __slots__ = ("_crcs", "base", "batch", "chunk", "count", "end", "flags", "lane", "length",
                 "position", "timestamp")  # fmt: skip

    def __init__(self, chunk: bytes, position: int) -> None:
        if len(chunk) - position < HEADER_BYTES:
            raise CorruptBatch(f"{len(chunk) - position} bytes are left where a header is due")
        (
            magic, _, self.length, self.base, _, stamp_crc, crc, self.flags, self.lane, self.count,
            span, _, _, _, self.timestamp, _,
        ) = CHECKED.unpack_from(chunk, position)  # fmt: skip
        if magic != MAGIC or not HEADER_BYTES <= self.length <= len(chunk) - position or span < 1:
            raise CorruptBatch(f"no batch where one is due, {position} bytes into what was read")
        self.end = self.base + span
        self.chunk = chunk
        self.position = position
        self._crcs = (stamp_crc, crc)
        self.batch: Batch | None = None

    def view(self) -> memoryview:
        return memoryview(self.chunk)[self.position : self.position + self.length]

    def check(self) -> None:
        """Raise CorruptBatch unless the bytes are those that were written."""
        view = self.view()
        if (crc32c(view[:CRCS_AT]), crc32c(view[REST_AT:])) != self._crcs:
            raise CorruptBatch(f"the batch at offset {self.base} fails its checksum")

    def decoded(self) -> Batch:
        """The batch with its checksum checked; its body is kept once it is decompressed."""
        if self.batch is None:
            # On its own, so that keeping it does not keep all that was read with it.
            self.chunk = self.chunk[self.position : self.position + self.length]
            self.position = 0
            self.batch = decode(self.chunk)
        return self.batch


class LeasedBatchReader:
    """Reads for the leases of one partition."""

    __slots__ = ("_chunk", "_kept", "_log", "_now_ms", "_position", "bytes_per_record")

    def __init__(self, log: Log) -> None:
        self._log = log
        self._kept: dict[int, _Found] = {}  # by lane: batches that are leased bit by bit
        self._chunk = b""
        self._position = 0
        self._now_ms = 0
        self.bytes_per_record = 1024.0
        """As of late; a guess for what comes."""

    def cover(
        self, ranges: Sequence[tuple[int, int]], bytes_max: int, now_ms: int
    ) -> LeasedBatches:
        """Read the batches of these ranges, which ascend and do not overlap.

        At least one batch, then none that would make it more than `bytes_max`.
        """
        covered = LeasedBatches()
        self._now_ms = now_ms
        parts: Ranges = []
        found: _Found | None = None
        for (start, end), near_end in zip(ranges, self._neighbours(ranges), strict=True):
            while start < end:
                if found is None or start >= found.end:
                    if found is not None and not self._take(covered, found, parts, bytes_max):
                        found = None
                        break
                    parts = []
                    found = self._find(start, near_end, bytes_max, covered)
                    if found is None:
                        start = self._pass_over(start, end, covered)
                        continue
                parts.append((start, min(end, found.end)))
                start = found.end
            if covered.cut_at is not None:
                break
        if found is not None:
            self._take(covered, found, parts, bytes_max)
        self._chunk, self._position = b"", 0
        if covered.cut_at is not None:
            covered.drop_from(covered.cut_at)
        return covered

    def _pass_over(self, start: int, end: int, covered: LeasedBatches) -> int:
        """Note that the first records of [start, end) cannot be read; where to go on."""
        log = self._log
        if start < log.start_offset:
            stop = min(log.start_offset, end)
            covered.gone.append((start, stop))
        else:
            # As far as the damage is known; a record at least, to go on.
            stop = min(max(log.next_readable(start), start + 1), end)
            covered.unreadable.append((start, stop))
        return stop

    def _neighbours(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """For each range, up to which offset one read should go: over others that are near."""
        gap = int(GAP_BYTES_MAX / self.bytes_per_record)
        ends: list[int] = []
        end = next_start = 0
        for start, own_end in reversed(ranges):
            if not ends or next_start - own_end > gap:
                end = own_end
            ends.append(end)
            next_start = start
        ends.reverse()
        return ends

    def _find(self, offset: int, end: int, bytes_max: int, covered: LeasedBatches) -> _Found | None:
        """The batch that holds the offset; None when it cannot be read."""
        for kept in self._kept.values():
            if kept.base <= offset < kept.end:
                return kept
        if offset < self._log.start_offset:
            return None  # retention took it since it was returned
        try:
            while self._position < len(self._chunk):
                found = _Found(self._chunk, self._position)
                if offset < found.base:
                    break  # the chunk is further on than this
                self._position += found.length
                if offset < found.end:
                    found.check()
                    return found
            guess = int((end - offset) * self.bytes_per_record * 1.1)
            guess = max(min(guess, bytes_max, READ_BYTES_MAX), READ_BYTES_MIN)
            self._chunk, self._position = self._log.read(offset, guess), 0
            found = _Found(self._chunk, 0)
            if not found.base <= offset < found.end:
                raise CorruptBatch(f"no batch with offset {offset} where it is due")
            found.check()
        except CorruptBatch as error:
            covered.error = self._examined(offset, error)
        else:
            self._position = found.length
            return found
        self._chunk, self._position = b"", 0
        return None

    def _examined(self, offset: int, error: CorruptBatch) -> CorruptBatch:
        """Have the log find out what is damaged, so that it can be passed over and repaired."""
        try:
            self._log.batch_at(offset)
        except CorruptBatch as found:
            return found
        return error

    def _take(self, covered: LeasedBatches, found: _Found, parts: Ranges, bytes_max: int) -> bool:
        """Add the leased parts of a batch; False when there is no room for it any more."""
        span = found.end - found.base
        self.bytes_per_record += (found.length / span - self.bytes_per_record) / 8
        try:
            if found.flags & _LOOK_INSIDE or not found.count:
                parts = self._alive(covered, found, parts)
                if not parts:
                    return True
            records = sum(end - start for start, end in parts)
            cuts = (
                2 * records < span
                and found.length > CUT_BYTES_MIN
                and not found.flags & FLAG_OFFSET_DELTAS
            )
            size = found.length * records // span if cuts else found.length
            if covered.size and covered.size + size > bytes_max:
                covered.cut_at = parts[0][0]
                return False
            buffers: list[Buffer] = (
                [cut_batch(found.decoded(), start, end) for start, end in parts]
                if cuts
                else [found.view()]
            )
        except CorruptBatch as error:
            covered.error = error
            covered.unreadable += parts
            return True
        if parts[-1][1] == found.end:
            self._kept.pop(found.lane, None)
        elif cuts:
            self._kept[found.lane] = found
        covered.buffers += buffers
        covered.size += sum(map(len, buffers))
        covered.times.append((found.lane, records, found.timestamp))
        return True

    def _alive(self, covered: LeasedBatches, found: _Found, parts: Ranges) -> Ranges:
        """The parts of a batch that hold records whose time to live has not ended."""
        if found.flags & FLAG_CONTROL or not found.count:
            covered.gone += parts
            return []
        batch = found.decoded()
        offsets, expiries = batch.offsets(), batch.expiries()
        alive: Ranges = []
        for start, end in parts:
            first, last = bisect_left(offsets, start), bisect_left(offsets, end)
            there = _runs(offsets[first:last])
            covered.gone += without([(start, end)], there)
            if expiries is None:
                alive += there
                continue
            mine = list(zip(offsets[first:last], expiries[first:last], strict=True))
            now_ms = self._now_ms
            covered.expired += _runs([at for at, expiry in mine if 0 < expiry <= now_ms])
            alive += _runs([at for at, expiry in mine if not 0 < expiry <= now_ms])
        return alive


def _runs(offsets: Sequence[int]) -> Ranges:
    """Ascending offsets as ranges."""
    if not offsets:
        return []
    if offsets[-1] - offsets[0] == len(offsets) - 1:
        return [(offsets[0], offsets[-1] + 1)]
    runs: Ranges = []
    for offset in offsets:
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return runs


def without(ranges: Iterable[tuple[int, int]], gone: Iterable[tuple[int, int]]) -> Ranges:
    """What is left of ranges when others are taken out; both ascend."""
    left: Ranges = []
    holes = list(gone)
    at = 0
    for start, end in ranges:
        while at < len(holes) and holes[at][1] <= start:
            at += 1
        index = at
        while index < len(holes) and holes[index][0] < end:
            if start < holes[index][0]:
                left.append((start, holes[index][0]))
            start = max(start, holes[index][1])
            index += 1
        if start < end:
            left.append((start, end))
    return left
