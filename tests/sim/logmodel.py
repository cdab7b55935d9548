"""The log as plain dicts, a random workload that drives log and model alike, and their comparison.

The model knows, at every moment, what a crash at that moment may leave:

    end     between `end_durable` (the highest flushed_offset the log ever reported, lowered by
            truncations) and `end`, at the end of a batch
    start   between `start_durable` (the last truncate_prefix that returned) and `start_max`
    rows    every record of that range with the content it was appended with, except those in
            `removed`, which a compaction finished or started has been allowed to take

Calls are entered into the model so that the bounds are right while the call runs: an append before
it starts, a truncation's lower bound before and its cut after it.
"""

from bisect import bisect_right
from collections.abc import Iterable
from random import Random

import pytest
from simdisk import SimDisk

from raftq.client.common.errors import DiskFull, OffsetOutOfRange
from raftq.client.wire.batch import LANE_COUNT, Batch, decode, encode, encode_one, stamp
from raftq.node.storage.compaction import compact_by_key
from raftq.node.storage.log import Log, LogConfig

DIRECTORY = "/data/log"
EPOCH_MS = 1_700_000_000_000
KEYS = [b"a", b"b", b"c", b"d"]

# timestamp, key, value, headers, lane, epoch
Row = tuple[int, bytes | None, bytes, dict[str, bytes], int, int]


class Model:
    """What a log must contain. Rows below the start are kept: a crash may bring them back."""

    def __init__(self) -> None:
        self.start = self.start_durable = self.start_max = 0
        self.end = self.end_durable = 0
        # What completed calls have written: a killed process loses nothing of it.
        self.written = 0
        self.flushed_max: int | None = None
        self.rows: dict[int, Row] = {}
        self.ends: list[int] = [0]
        self.removed: set[int] = set()
        # Keys whose newest record a truncation may have cut after an older one was compacted away.
        self.forgotten: set[bytes | None] = set()

    def append(self, batch: Batch, epoch: int) -> None:
        columns = (batch.timestamps(), batch.keys(), batch.values(), batch.headers())
        for index, row in enumerate(zip(*columns, strict=True)):
            self.rows[self.end + index] = (*row, batch.lane, epoch)
        self.end += batch.span
        self.ends.append(self.end)

    def cut(self, end: int) -> None:
        for offset in range(end, self.end):
            self.rows.pop(offset, None)
        self.removed = {offset for offset in self.removed if offset < end}
        self.ends = [known for known in self.ends if known < end] + [end]
        self.end = end
        self.end_durable = min(self.end_durable, end)
        self.written = min(self.written, end)
        self.start = self.start_max = min(self.start, end)
        self.flushed_max = None

    def truncating(self, end: int) -> None:
        """A truncation starts: from here to its end both outcomes are allowed."""
        self.flushed_max = end
        self.end_durable = min(self.end_durable, self.flushed_max)
        self.written = min(self.written, self.flushed_max)
        # Cutting the batch that the start lies in moves the start to that batch's base.
        self.start_durable = min(self.start_durable, self.flushed_max)
        self.forgotten |= {self.rows[offset][1] for offset in self.removed}

    def flushed(self, offset: int) -> None:
        """The log reported that everything below `offset` is durable."""
        if self.flushed_max is not None:
            offset = min(offset, self.flushed_max)
        self.end_durable = max(self.end_durable, offset)

    def boundary(self, offset: int) -> int:
        """The end of the last batch that ends at or below `offset`."""
        return self.ends[bisect_right(self.ends, offset) - 1]

    def resolve(self, log: Log, present: dict[int, Row]) -> None:
        """After a crash one of the allowed outcomes is the truth: the one in the log."""
        self.cut(log.end_offset)
        self.start = self.start_durable = self.start_max = log.start_offset
        self.end_durable = log.flushed_offset
        self.written = self.end
        self.removed = {
            offset
            for offset in range(log.start_offset, log.end_offset)
            if offset in self.rows and offset not in present
        }
        self.rows = {at: row for at, row in self.rows.items() if at >= self.boundary(self.start)}

    def superseded(self, end: int, below: int, tombstones_before_ms: int) -> set[int]:
        """Offsets in [start, below) a compaction by key may take when it looks at [start, end)."""
        rows = {at: row for at, row in self.rows.items() if self.start <= at < end}
        newest = {row[1]: at for at, row in sorted(rows.items())}
        return {
            at
            for at, row in rows.items()
            if at < below
            and row[1] is not None
            and (newest[row[1]] != at or (not row[2] and row[0] < tombstones_before_ms))
        }


def newest_values(rows: Iterable[Row], forgotten: set[bytes | None]) -> dict[bytes | None, bytes]:
    """What a reader by key sees; a tombstone and no record at all are the same to it."""
    view = {row[1]: row[2] for row in rows if row[1] is not None and row[1] not in forgotten}
    return {key: value for key, value in view.items() if value}


def check(log: Log, model: Model, end_min: int | None = None) -> dict[int, Row]:
    """Compare everything the log answers with what the model allows; gives the rows found."""
    start, end = log.start_offset, log.end_offset
    assert log.damaged == [], "nothing was damaged, only lost"
    assert model.start_durable <= start <= model.start_max
    assert (model.end_durable if end_min is None else end_min) <= end <= model.end
    assert start <= end
    assert end in model.ends or end == start
    assert log.flushed_offset <= end
    present = check_batches(log, model)
    for offset in range(start, end):
        row = model.rows.get(offset)
        assert offset in present or row is None or offset in model.removed, f"{offset} is gone"
    expected = [model.rows[offset] for offset in range(start, end) if offset in model.rows]
    assert newest_values(present.values(), model.forgotten) == newest_values(
        expected, model.forgotten
    )
    compacted = any(start <= offset < end for offset in model.removed)
    check_reads(log)
    check_lanes(log, present, compacted)
    check_times(log, present, compacted)
    return present


def check_batches(log: Log, model: Model) -> dict[int, Row]:
    start, end = log.start_offset, log.end_offset
    present: dict[int, Row] = {}
    expected = None
    for batch in log.batches(start):
        if expected is None:
            assert batch.base_offset <= start < batch.end_offset
        else:
            assert batch.base_offset == expected, "a gap between batches"
        expected = batch.end_offset
        for offset, *row in batch.tuples():
            found = (*row, batch.lane, batch.epoch)
            assert found == model.rows[offset], f"offset {offset} has another content"
            if offset >= start:
                present[offset] = found
    assert expected == end or (expected is None and start == end)
    return present


def check_reads(log: Log) -> None:
    """Raw reads of any size give the same batches, and only the range that is kept."""
    start, end = log.start_offset, log.end_offset
    bases = [batch.base_offset for batch in log.batches(start)]
    for bytes_max in (1, 400, 1 << 20):
        offset, found = start, []
        while offset < end:
            data = log.read(offset, bytes_max)
            position = 0
            while position < len(data):
                batch = decode(data, position)
                found.append(batch.base_offset)
                position += batch.length
                offset = batch.end_offset
            assert len(data) <= bytes_max or position == batch.length == len(data)
        assert found == bases
    assert log.read(end, 100) == b""
    for offset in (start - 1, end + 1):
        with pytest.raises(OffsetOutOfRange):
            log.read(offset, 100)
    for offset in {start, (start + end) // 2, end - 1}:
        if start <= offset < end:
            batch = log.batch_at(offset)
            assert batch.base_offset <= offset < batch.end_offset


def check_lanes(log: Log, present: dict[int, Row], compacted: bool) -> None:
    start, end = log.start_offset, log.end_offset
    for lane in range(LANE_COUNT):
        indexed: list[int] = []
        offset = start
        while (run := log.next_run(lane, offset)) is not None:
            assert offset <= run[0] < run[1] <= end
            indexed += range(*run)
            offset = run[1]
        mine = [offset for offset, row in present.items() if row[4] == lane]
        if not compacted:
            assert indexed == mine
        assert set(mine) <= set(indexed), f"lane {lane} lost records"
        others = {offset for offset, row in present.items() if row[4] != lane}
        assert others.isdisjoint(indexed), f"lane {lane} has records of another lane"
        for offset in (start, (start + end) // 2, end):
            fewest = sum(1 for at in mine if at >= offset)
            most = sum(1 for at in indexed if at >= offset)
            assert fewest <= log.count_from(lane, offset) <= most


def check_times(log: Log, present: dict[int, Row], compacted: bool) -> None:
    times = sorted({row[0] for row in present.values()})
    asked = [0, *times[:: max(1, len(times) // 8)], *(times[-1:]), *(t + 1 for t in times[-1:])]
    for time in asked:
        at = [offset for offset, row in present.items() if row[0] >= time]
        expected = min(at, default=log.end_offset)
        found = log.offset_for_time(time)
        if compacted:
            # The time of a record that compaction took may still lead to the gap it left.
            assert log.start_offset <= found <= expected
        else:
            assert found == expected, f"time {time - EPOCH_MS}"


class Workload:
    """Random calls on a log, each checked against the model as far as it answers."""

    CALLS = (
        ("append_one", 8),
        ("append_batch", 8),
        ("append_many", 5),
        ("sync", 4),
        ("begin_sync", 2),
        ("finish_sync", 3),
        ("roll", 2),
        ("truncate", 1),
        ("truncate_prefix", 1),
        ("retain", 1),
        ("compact", 1),
        ("reopen", 1),
    )

    def __init__(self, seed: int | str, disk: SimDisk, model: Model | None = None) -> None:
        self.rng = Random(f"workload {seed}")
        self.disk = disk
        self.model = model or Model()
        self.config = LogConfig(
            segment_bytes=self.rng.choice([4096, 5000, 9000]),
            index_interval_bytes=self.rng.choice([64, 300, 4096]),
            seal_sync=self.rng.random() < 0.5,
        )
        self.now_ms = EPOCH_MS + 1000 * len(self.model.ends)
        self.epoch = max((row[5] for row in self.model.rows.values()), default=0)
        self.names = [name for name, weight in self.CALLS for _ in range(weight)]
        self.story: list[str] = []
        self.ticket = None
        self.log: Log | None = None

    def open(self) -> Log:
        self.ticket = None
        self.log = Log.open(self.disk, DIRECTORY, self.config, self.now_ms)
        return self.log

    def run(self, steps: int) -> None:
        """Open the log if need be and make `steps` random calls."""
        if self.log is None:
            self.open()
        for _ in range(steps):
            self.now_ms += self.rng.choice([0, 1, 50])
            name = self.rng.choice(self.names)
            self.story.append(f"{self.disk.operations + 1} {name}")
            getattr(self, name)()
            self.note_flushed()

    def note_flushed(self) -> None:
        """Whatever the log ever reported as durable must survive, however the call ended."""
        if self.log is not None:
            self.model.flushed(self.log.flushed_offset)

    def batch(self) -> bytearray:
        rng = self.rng
        count = rng.choice([1, 1, 2, 3, 8])
        lane = rng.choice([0, 2, 2, 2, 4])
        values = [rng.randbytes(rng.choice([0, 5, 40, 300, 1200])) for _ in range(count)]
        if rng.random() < 0.1:
            # A record may hold a batch, as a dead letter does: nobody may take it for one of ours.
            values[-1] = encode_one(b"not a batch of this log", self.now_ms)
            stamp(values[-1], self.model.end + rng.randint(0, 4), self.epoch)
            values[-1] = bytes(values[-1])
        keys = [rng.choice([None, *KEYS]) for _ in range(count)] if rng.random() < 0.7 else None
        times: int | list[int] = self.now_ms
        if rng.random() < 0.6:
            times = [self.now_ms + rng.randint(-20, 20) for _ in range(count)]
        headers = [{"n": b"%d" % index} for index in range(count)] if rng.random() < 0.2 else None
        return encode(values, keys, headers, times, lane=lane, codec=rng.choice([0, 0, 1]))

    def append_one(self) -> None:
        lane = self.rng.choice([1, 2, 2, 2])
        self.append([encode_one(self.rng.randbytes(self.rng.randint(0, 60)), self.now_ms, lane)])

    def append_batch(self) -> None:
        self.append([self.batch()])

    def append_many(self) -> None:
        self.append([self.batch() for _ in range(self.rng.randint(1, 5))])

    def append(self, batches: list[bytearray]) -> None:
        """Enter the batches into the model first: a crash may keep any prefix of them."""
        self.epoch += self.rng.random() < 0.05
        model, before = self.model, self.model.end
        for batch in batches:
            model.append(decode(batch), self.epoch)
        try:
            if len(batches) == 1:
                bases = [self.log.append(batches[0], self.epoch)]
            else:
                bases = self.log.append_many(batches, self.epoch)
        except DiskFull:
            model.cut(before)
            assert self.log.end_offset == before
            raise
        assert [before, *model.ends[-len(batches) : -1]] == bases
        assert self.log.end_offset == model.end
        model.written = model.end

    def sync(self) -> None:
        self.log.sync()
        assert self.log.flushed_offset == self.log.end_offset

    def begin_sync(self) -> None:
        if self.ticket is None:
            self.ticket = self.log.begin_sync()

    def finish_sync(self) -> None:
        """What was appended, rolled or truncated since the sync began must not confuse it."""
        if self.ticket is not None:
            ticket, self.ticket = self.ticket, None
            ticket.run()

    def roll(self) -> None:
        self.log.roll()

    def truncate(self) -> None:
        model = self.model
        end = cut = self.rng.randint(max(model.start, model.end - 15), model.end)
        dropping = end < model.end
        if dropping:
            # Compaction merges batches, so only the log knows which one is cut in two.
            cut = self.log.batch_at(end).base_offset
            assert cut in model.ends
        model.truncating(cut)
        self.log.truncate(end)
        model.cut(cut)
        assert self.log.end_offset == model.end
        assert self.log.flushed_offset == model.end or not dropping

    def truncate_prefix(self) -> None:
        model = self.model
        start = self.rng.randint(model.start, min(model.end, model.start + 40))
        model.start_max = start
        self.log.truncate_prefix(start)
        model.start = model.start_durable = start
        assert self.log.start_offset == start

    def retain(self) -> None:
        """Sealed segments go from the front, and only for a reason."""
        model, rng = self.model, self.rng
        below = rng.choice([None, rng.randint(model.start, model.end)])
        age_ms = rng.choice([None, 0, 100])
        bytes_max = rng.choice([None, 0, 6000])
        limit = self.active_base() if below is None else min(self.active_base(), below)
        model.start_max = max(model.start, limit)
        self.log.retain(self.now_ms, age_ms=age_ms, bytes_max=bytes_max, below=below)
        assert model.start <= self.log.start_offset <= model.start_max
        if bytes_max is None:
            # Records that compaction took no longer keep their segment young.
            dropped = range(model.start, self.log.start_offset)
            gone = [model.rows[at] for at in dropped if at not in model.removed]
            assert age_ms is not None or not gone
            assert all(row[0] <= self.now_ms - age_ms for row in gone)
        elif bytes_max == 0:
            assert self.log.start_offset >= self.base_at(limit)
        model.start = model.start_max = self.log.start_offset

    def compact(self) -> None:
        model = self.model
        tombstone_ms = self.rng.choice([0, 100, 10_000])
        active, flushed = self.active_base(), self.log.flushed_offset
        taken = model.superseded(model.end, active, self.now_ms - tombstone_ms)
        certain = model.superseded(flushed, active, 0)
        model.removed |= taken
        compact_by_key(self.log, self.now_ms, tombstone_ms)
        present = check_batches(self.log, model)
        assert certain.isdisjoint(present), "compaction left records that were replaced"
        model.removed -= set(present)
        check(self.log, model, end_min=model.end)

    def reopen(self) -> None:
        self.log.close()
        self.check_same(self.open())

    def check_same(self, log: Log) -> None:
        """Nothing at all was lost."""
        assert (log.start_offset, log.end_offset) == (self.model.start, self.model.end)
        check(log, self.model, end_min=self.model.end)

    def bases(self) -> list[int]:
        names = self.disk.list(DIRECTORY)
        return [int(name[:20]) for name in names if name.endswith(".log")]

    def active_base(self) -> int:
        return self.bases()[-1]

    def base_at(self, offset: int) -> int:
        """Base of the segment that holds `offset`."""
        return max((base for base in self.bases() if base <= offset), default=0)
