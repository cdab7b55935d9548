"""Reading single records of a log, wherever they are. (Shell.)

Records that are due or dying together may lie far apart, each in a batch of a thousand others. So
of a big batch the columns are kept: where each record's bytes are, and a checksum of each. The
batch is read and checked as a whole when that is made; from then on only the bytes of the records
that are asked for are read, neighbours together, and each is checked by itself. Small batches are
read whole, many at once. Of packed batches the unpacked records are kept, a few at a time.

What cannot be read is left out of the answer; the log knows of the damage by then.
"""

import logging
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence

from crc32c import crc32c

from raftq.client.common.errors import CorruptBatch, OffsetOutOfRange
from raftq.client.wire.batch import (
    CODEC_NONE,
    FLAG_EXPIRIES,
    FLAG_HEADERS,
    FLAG_KEY_NULLS,
    FLAG_KEYS,
    HEADER_BYTES,
    Batch,
)
from raftq.client.wire.record import BatchRecord, unpack_headers
from raftq.node.storage.log import Log
from raftq.node.storage.segment import Segment

logger = logging.getLogger(__name__)

SMALL_BYTES = 16 * 1024
READ_BYTES = 64 * 1024
GAP_BYTES = 4 * 1024
COLUMN_RECORDS_MAX = 2_000_000
LEARN_MAX = 4
"""Batches that one read looks into for the first time: that is what takes long."""
UNPACKED_BYTES_MAX = 32 * 1024 * 1024
UNLIMITED = 1 << 62


class _Section:
    """One of keys, values and headers: where it is in the file, and where its items end."""

    __slots__ = ("at", "ends")

    def __init__(self, batch: Batch, name: str, position: int) -> None:
        self.at = position + HEADER_BYTES + batch.section(name)[0]
        self.ends = array("I", batch.ends(name))


class _Columns:
    """All of a plain batch except its bytes."""

    __slots__ = (
        "base", "batch_end", "crcs", "expiries", "headers", "keys", "lane", "segment", "times",
        "valid", "values",
    )  # fmt: skip

    def __init__(self, batch: Batch, segment: Segment, position: int) -> None:
        self.base = batch.base_offset
        self.batch_end = batch.end_offset
        self.lane = batch.lane
        self.segment = segment
        flags = batch.flags
        times = batch.timestamps()
        self.times = array("q", times if min(times) != max(times) else times[:1])
        expiries = batch.expiries() if flags & FLAG_EXPIRIES else None
        self.expiries = None if expiries is None else array("q", expiries)
        self.values = _Section(batch, "values", position)
        self.keys = _Section(batch, "keys", position) if flags & FLAG_KEYS else None
        self.headers = _Section(batch, "headers", position) if flags & FLAG_HEADERS else None
        self.valid = batch.key_validity() if flags & FLAG_KEY_NULLS else None
        body, start = batch.body()
        crcs: list[int] = [0] * batch.count
        for section, name in self._sections():
            at = start + batch.section(name)[0]
            bounds = [at + end for end in section.ends]
            crcs = [
                crc32c(body[a:b], crc) for a, b, crc in zip(bounds, bounds[1:], crcs, strict=False)
            ]
        self.crcs = array("I", crcs)

    def _sections(self) -> list[tuple[_Section, str]]:
        named = ((self.keys, "keys"), (self.values, "values"), (self.headers, "headers"))
        return [(section, name) for section, name in named if section is not None]

    def fit(self, offsets: Sequence[int], bytes_max: int) -> int:
        """How many of these, at least one, have no more values than so many bytes."""
        ends = self.values.ends
        first = offsets[0] - self.base
        if ends[offsets[-1] - self.base + 1] - ends[first] <= bytes_max:
            return len(offsets)
        size = 0
        for count, offset in enumerate(offsets):
            size += ends[offset - self.base + 1] - ends[offset - self.base]
            if size > bytes_max and count:
                return count
        return len(offsets)

    def read(self, log: Log, offsets: Sequence[int]) -> dict[int, BatchRecord]:
        """The records at these offsets of the batch, in order. CorruptBatch if one is damaged."""
        if self.segment.removed:
            raise OffsetOutOfRange(f"the segment of offset {offsets[0]} is gone")
        found: dict[int, BatchRecord] = {}
        ends = self.values.ends
        rows = [offset - self.base for offset in offsets]
        start = 0
        for at in range(1, len(rows) + 1):
            if at == len(rows) or ends[rows[at]] - ends[rows[at - 1] + 1] > GAP_BYTES:
                self._read_run(log, rows[start:at], found)
                start = at
        return found

    def _read_run(self, log: Log, rows: list[int], found: dict[int, BatchRecord]) -> None:
        values = self._items(log, self.values, rows)
        keys = None if self.keys is None else self._items(log, self.keys, rows)
        headers = None if self.headers is None else self._items(log, self.headers, rows)
        crcs, times, expiries, valid = self.crcs, self.times, self.expiries, self.valid
        lane, base = self.lane, self.base
        for at, (row, value) in enumerate(zip(rows, values, strict=True)):
            key = None if keys is None else keys[at]
            packed = b"" if headers is None else headers[at]
            crc = 0 if key is None else crc32c(key, 0)
            crc = crc32c(value, crc)
            if headers is not None:
                crc = crc32c(packed, crc)
            if crc != crcs[row]:
                raise CorruptBatch(f"the record at offset {base + row} has changed on the disk")
            if valid is not None and not valid[row >> 3] >> (row & 7) & 1:
                key = None
            time = times[row] if len(times) > 1 else times[0]
            expiry = 0 if expiries is None else expiries[row]
            found[base + row] = BatchRecord(
                base + row, time, key, value, unpack_headers(packed) if packed else {}, lane, expiry
            )

    def _items(self, log: Log, section: _Section, rows: list[int]) -> list[bytes]:
        """The bytes of these rows, with one read."""
        ends = section.ends
        first, last = ends[rows[0]], ends[rows[-1] + 1]
        if first == last:
            return [b""] * len(rows)
        data = log.segments.file_of(self.segment).read(section.at + first, last - first)
        return [data[ends[row] - first : ends[row + 1] - first] for row in rows]


class _Unpacked:
    """The records of a batch whose bytes cannot be read one by one."""

    __slots__ = ("base", "batch_end", "rows", "size")

    def __init__(self, batch: Batch) -> None:
        self.base = batch.base_offset
        self.batch_end = batch.end_offset
        self.size = batch.body_length
        self.rows = batch.records()

    def read(self, log: Log, offsets: Sequence[int]) -> dict[int, BatchRecord]:
        return {offset: self.rows[offset - self.base] for offset in offsets}


class RecordReader:
    """Reads single records of one log by their offsets."""

    def __init__(
        self, log: Log, on_damage: Callable[[CorruptBatch], None] = lambda error: None
    ) -> None:
        self._log = log
        self._on_damage = on_damage
        self._known: dict[int, _Columns | _Unpacked] = {}  # by base, oldest first
        self._bases: list[int] = []
        self._column_records = 0
        self._unpacked_bytes = 0
        self._window = b""
        self._window_at = 0
        self._learned = 0

    def read(
        self, offsets: Sequence[int], bytes_max: int = UNLIMITED
    ) -> tuple[dict[int, BatchRecord], list[int]]:
        """The records at these offsets, in any order, and the offsets that were not read.

        It stops after about `bytes_max`, or when it took long, and with at least one. What cannot
        be read is in neither.
        """
        found: dict[int, BatchRecord] = {}
        wanted = sorted(offsets)
        at = size = 0
        self._window = b""
        self._learned = 0
        while at < len(wanted) and size < bytes_max and self._learned < LEARN_MAX:
            try:
                before = at
                at = self._read_batch(wanted, at, found, bytes_max - size)
                size += sum([len(found[offset].value) for offset in wanted[before:at]])
            except (CorruptBatch, OffsetOutOfRange) as error:
                logger.error(
                    "log=%s offset=%d cannot be read: %s", self._log.directory, wanted[at], error
                )
                self._forget(wanted[at])
                at += 1
                if isinstance(error, CorruptBatch):
                    self._on_damage(error)
        self._window = b""
        return found, wanted[at:]

    def forget_below(self, offset: int) -> None:
        """That part of the log is gone."""
        keep = bisect_right(self._bases, offset - 1)
        for base in self._bases[:keep]:
            if self._known[base].batch_end <= offset:
                self._drop(base)

    def _read_batch(
        self, wanted: list[int], at: int, found: dict[int, BatchRecord], bytes_max: int
    ) -> int:
        """Read what one batch holds of them; the number of the next to look for."""
        known = self._find(wanted[at])
        if known is None:
            batch = self._small(wanted[at])
            if batch is not None:
                base, end = batch.base_offset, batch.end_offset
                rows = batch.records()
                while at < len(wanted) and wanted[at] < end:
                    found[wanted[at]] = rows[wanted[at] - base]
                    at += 1
                return at
            known = self._learn(wanted[at])
        until = bisect_right(wanted, known.batch_end - 1, at)
        if isinstance(known, _Columns):
            until = at + known.fit(wanted[at:until], bytes_max)
        found.update(known.read(self._log, wanted[at:until]))
        return until

    def _find(self, offset: int) -> "_Columns | _Unpacked | None":
        number = bisect_right(self._bases, offset) - 1
        if number < 0:
            return None
        known = self._known[self._bases[number]]
        return known if offset < known.batch_end else None

    def _small(self, offset: int) -> Batch | None:
        """The batch of the offset if it is small, from a window over many of them."""
        while True:
            while self._window_at < len(self._window):
                batch = Batch(self._window, self._window_at)
                if offset < batch.base_offset:
                    break
                if offset < batch.end_offset:
                    if batch.length > SMALL_BYTES:
                        return None
                    batch.check_crc()
                    _check_dense(batch)
                    return batch
                self._window_at += batch.length
            self._window = self._log.read(offset, READ_BYTES)
            self._window_at = 0
            front = Batch(self._window)
            if not front.base_offset <= offset < front.end_offset:
                raise CorruptBatch(f"no batch with offset {offset} where it is due")

    def _learn(self, offset: int) -> "_Columns | _Unpacked":
        self._learned += 1
        return self._keep(self._log.batch_at(offset))

    def learn(self, batch: Batch) -> None:
        """Keep the columns of a batch that was just written or read, if it is worth it."""
        big = batch.length > SMALL_BYTES and batch.codec == CODEC_NONE
        if big and batch.base_offset not in self._known:
            self._keep(batch)

    def _keep(self, batch: Batch) -> "_Columns | _Unpacked":
        _check_dense(batch)
        segment, position = self._log.stored_at(batch.base_offset)
        known: _Columns | _Unpacked
        if batch.codec == CODEC_NONE:
            known = _Columns(batch, segment, position)
            self._column_records += batch.count
        else:
            known = _Unpacked(batch)
            self._unpacked_bytes += known.size
        self._known[known.base] = known
        if not self._bases or known.base > self._bases[-1]:
            self._bases.append(known.base)
        else:
            insort(self._bases, known.base)
        while len(self._known) > 1 and (
            self._column_records > COLUMN_RECORDS_MAX or self._unpacked_bytes > UNPACKED_BYTES_MAX
        ):
            self._drop(next(iter(self._known)))
        return known

    def _forget(self, offset: int) -> None:
        known = self._find(offset)
        if known is not None:
            self._drop(known.base)

    def _drop(self, base: int) -> None:
        known = self._known.pop(base)
        del self._bases[bisect_right(self._bases, base) - 1]
        if isinstance(known, _Columns):
            self._column_records -= len(known.crcs)
        else:
            self._unpacked_bytes -= known.size


def _check_dense(batch: Batch) -> None:
    if batch.count != batch.span:
        raise CorruptBatch(f"{batch} has fewer records than offsets")
