"""One log: append, read, look up, truncate, retain. (Shell-less engine on a Disk.)

One thread at a time calls it, under the lock of its owner. Only the `run` of a SyncTicket may
happen in another thread meanwhile. All bounds are half-open: records live in [start_offset,
end_offset), and those below flushed_offset survive a power loss.

Invariants

- Offsets are given out once and never change: not by recovery, not by damage, not by compaction.
- A refused append (DiskFull) leaves no byte and no offset behind. The next append may succeed.
- After a failed write or sync (StorageFailed) every write is refused until the log is opened again.
- Only the active segment has bytes that are not durable, because sealing syncs it. With `seal_sync`
  off a few sealed segments may have such bytes too. Everything that relies on durable segments
  syncs them first.

Reading writes nothing; damage that a reader finds is remembered in memory. The log knows nothing of
leases, groups or topics, and it does not lock its directory.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from crc32c import crc32c

from raftq.client.common.disk import Disk, File
from raftq.client.common.errors import (
    CorruptBatch,
    DiskFull,
    OffsetOutOfRange,
    StorageError,
    StorageFailed,
)
from raftq.client.common.types import Buffer
from raftq.client.wire.batch import FLAG_OFFSET_DELTAS, Batch, decode
from raftq.client.wire.headers import CRC, CRCS_AT, FACTS, REST_AT, STAMP, STAMP_AT
from raftq.node.storage.config import LogConfig
from raftq.node.storage.damage import DamagedRange
from raftq.node.storage.durability import Durability, Head, SyncTicket
from raftq.node.storage.index import SegmentIndex
from raftq.node.storage.page_cache import PageCache
from raftq.node.storage.reader import SegmentReader
from raftq.node.storage.recovery import Recovered, RecoveryReport, recover
from raftq.node.storage.repair import repair_damage
from raftq.node.storage.scan import scan
from raftq.node.storage.scrub import ScrubState, ScrubStep, scrub_step
from raftq.node.storage.segment import Segment
from raftq.node.storage.stamped import Facts, Row, check_stamped

# The sealed segments that may wait for a sync: a crash can lose them, and they are read again after
# it.
_UNSYNCED_MAX = 8
_NO_EPOCH = -1
_TIME_READ_BYTES = 64 * 1024


class Log:
    """An open log. The next record gets the offset `end_offset`."""

    __slots__ = (
        "_config",
        "_durability",
        "_epoch",
        "_epoch_starts",
        "_file",
        "_generation",
        "_head",
        "_index",
        "_page_cache",
        "_reader",
        "_scrub",
        "_segment_bytes",
        "directory",
        "disk",
        "end_offset",
        "last_epoch",
        "recovered",
        "segments",
    )

    # Computed on request; None after every change of epochs, segments or start.
    _epoch_starts: list[tuple[int, int]] | None
    # Of the newest batch that the files still know, even when that batch is below the start.
    last_epoch: int

    def __init__(self, disk: Disk, directory: str, config: LogConfig, recovered: Recovered) -> None:
        self.disk = disk
        self._config = config
        self._segment_bytes = config.segment_bytes
        self.directory = directory
        self.segments = recovered.segments
        self.recovered: RecoveryReport = recovered.report
        self._reader = SegmentReader(self.segments, recovered.gaps)
        self._page_cache = PageCache(config, self.segments)
        self._scrub = ScrubState()
        self._generation = 0
        self._take_active()
        sync_names = None if config.seal_sync else partial(disk.sync_directory, directory)
        readable = min(recovered.readable_offset, self.end_offset)
        self._durability = Durability(
            *(recovered.checkpoint, self.end_offset, recovered.start_offset),
            *(sync_names, readable, recovered.named),
        )
        slot = recovered.slot
        # A new start may have been written and not synced when the process was killed.
        same_start = slot is not None and slot.start_offset == recovered.start_offset == 0
        known = same_start and slot is not None and slot.lazy != config.seal_sync
        # New records in place of a lost end are not readable because the lost ones were.
        known = known and readable == recovered.readable_offset
        if not known or recovered.report.clean:
            # Synced, unless it adds nothing new: the reported start and flushed offset must not go
            # back.
            self._durability.remember(Head(*self._head), sync=not known)

    @staticmethod
    def open(disk: Disk, directory: str, config: LogConfig, now_ms: int) -> "Log":
        """Recover the log in the directory. Creates both when they are missing."""
        recovered = recover(disk, directory, config)
        recovered.report.opened_ms = now_ms
        return Log(disk, directory, config, recovered)

    def _take_active(self) -> None:
        """Take over the active segment after it has changed."""
        segment = self.segments.active
        index = segment.facts
        assert isinstance(index, SegmentIndex)
        self._index = index
        self._file = self.segments.file_of(segment)
        # The first append to a segment notes its epoch even when the epoch is the same as before.
        self._epoch = index.epochs[-1][0] if index.epochs else _NO_EPOCH
        self.last_epoch = self.segments.last_epoch(_NO_EPOCH)
        self._epoch_starts = None
        self.end_offset = index.end_offset
        self._publish()
        self._page_cache.start_at(index.size)

    def _publish(self) -> None:
        """Publish the end of the log with one assignment, so that other threads see it as a
        whole."""
        index = self._index
        self._head = (
            *(index.end_offset, index.base_offset, index.size),
            *(self._file, self._generation),
        )

    # Facts

    @property
    def start_offset(self) -> int:
        return self._durability.start_offset

    @property
    def flushed_offset(self) -> int:
        return self._durability.flushed_offset

    @property
    def readable_offset(self) -> int:
        """What its owner once declared readable; it survives restarts."""
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
        """All damaged ranges known so far, in offset order."""
        start = self.start_offset
        ranges = [*self._reader.gaps, *self.segments.damaged()]
        return sorted(
            (damage for damage in ranges if damage.end >= start),
            key=lambda damage: (damage.start, damage.position),
        )

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """(epoch, start_offset) of each epoch that has records here, in order; not to be changed.

        An epoch whose first records are below the start of the log starts at the start of the log.
        """
        starts = self._epoch_starts
        if starts is None:
            starts = self._epoch_starts = self.segments.epoch_starts(self.start_offset)
        # Only the last epoch can be without a record, when the log is empty.
        return starts[:-1] if starts and starts[-1][1] >= self.end_offset else starts

    def epoch_pairs(self, limit: int) -> list[tuple[int, int]]:
        """Return the last `limit` of `epochs`."""
        return self.epochs[-limit:] if limit > 0 else []

    # Append

    def append(self, batch: bytearray | memoryview, epoch: int = 0) -> int:
        """Stamp the checked batch in place, write it at the end, and return its base offset."""
        if self._durability.failure is not None:
            self._durability.check()
        index = self._index
        length = len(batch)
        if index.size + length > self._segment_bytes and index.size:
            self.roll()
            index = self._index
        base = index.end_offset
        STAMP.pack_into(batch, STAMP_AT, base, epoch)
        CRC.pack_into(batch, CRCS_AT, crc32c(batch[:CRCS_AT]))
        flags, lane, _, span, timestamp = FACTS.unpack_from(batch, REST_AT)
        try:
            self._file.append((batch,))
        except StorageFailed as error:
            self._durability.fail(error)
            raise
        if epoch != self._epoch:
            self._note_epoch(epoch, base)
        if flags & FLAG_OFFSET_DELTAS:
            self._add_sparse(batch)
        else:
            index.add(length, base, span, lane, timestamp)
        self.end_offset = base + span
        self._head = (base + span, index.base_offset, index.size, self._file, self._generation)
        if index.size >= self._page_cache.due_at:
            self._page_cache.advance(index.size)
        return base

    def append_many(self, batches: Sequence[bytearray | memoryview], epoch: int = 0) -> list[int]:
        """Append several batches with one write, all of them or none. Returns their base
        offsets."""
        self._durability.check()
        index = self._index
        total = sum(map(len, batches))
        if index.size + total > self._segment_bytes and index.size:
            self.roll()
            index = self._index
        base = index.end_offset
        bases, facts = [], []
        for batch in batches:
            STAMP.pack_into(batch, STAMP_AT, base, epoch)
            CRC.pack_into(batch, CRCS_AT, crc32c(batch[:CRCS_AT]))
            fact = FACTS.unpack_from(batch, REST_AT)
            bases.append(base)
            facts.append(fact)
            base += fact[3]
        if not batches:
            return bases
        try:
            self._file.append(batches)
        except StorageFailed as error:
            self._durability.fail(error)
            raise
        if epoch != self._epoch:
            self._note_epoch(epoch, bases[0])
        for batch, at, (flags, lane, _, span, timestamp) in zip(batches, bases, facts, strict=True):
            if flags & FLAG_OFFSET_DELTAS:
                self._add_sparse(batch)
            else:
                index.add(len(batch), at, span, lane, timestamp)
        self.end_offset = base
        self._head = (base, index.base_offset, index.size, self._file, self._generation)
        if index.size >= self._page_cache.due_at:
            self._page_cache.advance(index.size)
        return bases

    def append_stamped(self, raw: Buffer) -> list[Facts]:
        """Append whole batches that a leader has stamped, back to back, unchanged.

        All are checked before anything is written: a bad batch raises CorruptBatch. Returns the
        facts of each batch for `Producers.note`. There are fewer facts than batches when the disk
        became full at the start of a segment: `end_offset` then shows how far the append got.
        """
        self._durability.check()
        view = memoryview(raw)
        rows, facts = check_stamped(view, self.end_offset, self.last_epoch)
        start = first = 0
        while first < len(rows):
            try:
                until, end = self._fit(rows, first, start)
                self._write_stamped(view[start:end], rows[first:until])
            except DiskFull:
                if not first:
                    raise
                return facts[:first]
            except StorageFailed as error:
                self._durability.fail(error)
                raise
            first, start = until, end
        return facts

    def _fit(self, rows: list[Row], first: int, start: int) -> tuple[int, int]:
        """Return (row, byte) up to which batches go into the active segment. May roll."""
        size, limit = self._index.size, self._segment_bytes
        if size and size + rows[first][0] > limit:
            self.roll()
            size = self._index.size
        until, end = first + 1, start + rows[first][0]
        size += rows[first][0]
        while until < len(rows) and (size := size + rows[until][0]) <= limit:
            end += rows[until][0]
            until += 1
        return until, end

    def _write_stamped(self, view: memoryview, rows: list[Row]) -> None:
        self._file.append((view,))
        index = self._index
        for length, base, span, lane, timestamp, epoch, offsets in rows:
            if epoch != self._epoch:
                self._note_epoch(epoch, base)
            if offsets is None:
                index.add(length, base, span, lane, timestamp)
            else:
                index.add_sparse(length, offsets, (base, base + span), lane, timestamp)
        self.end_offset = index.end_offset
        self._publish()
        if index.size >= self._page_cache.due_at:
            self._page_cache.advance(index.size)

    def _note_epoch(self, epoch: int, base: int) -> None:
        assert epoch >= self.last_epoch, f"epoch {epoch} after {self.last_epoch}"
        self._index.add_epoch(epoch, base)
        self._epoch = self.last_epoch = epoch
        self._epoch_starts = None

    def _add_sparse(self, batch: bytearray | memoryview) -> None:
        decoded = Batch(batch)
        bounds = (decoded.base_offset, decoded.end_offset)
        self._index.add_sparse(
            len(batch), decoded.offsets(), bounds, decoded.lane, decoded.max_timestamp
        )

    def roll(self) -> None:
        """Seal the active segment and start the next one. Does nothing while it is empty."""
        self._durability.check()
        index = self._index
        if index.end_offset == index.base_offset:
            return
        lazy, file = not self._config.seal_sync, self._file
        if len(self._durability.unsynced) >= _UNSYNCED_MAX:
            self._durability.settle(Head(*self._head))
        try:
            if not lazy:
                file.sync()
            self.segments.seal_active(sync=not lazy)
            self.segments.create(index.end_offset, sync=not lazy)
        except StorageFailed as error:
            self._durability.fail(error)
            raise
        self._page_cache.seal(index.size)
        self.segments.summarize_sealed()
        if lazy:
            # This must happen before a sync of the next segment can begin.
            self._durability.leave_unsynced(index.base_offset, file)
        self._take_active()
        if not lazy:
            self._durability.sealed(Head(*self._head))

    def _seal_by_age(self, now_ms: int) -> None:
        age_ms, first_ms = self._config.segment_age_ms, self._index.first_timestamp
        # Records without a time (0) have no age.
        if age_ms is not None and 0 < first_ms <= now_ms - age_ms:
            self.roll()

    # Read

    def read(self, offset: int, bytes_max: int) -> bytes:
        """Return raw batches from the one that holds `offset` on: whole, at least one, of one
        segment.

        The result is empty at the end of the log. The code that decodes the batches checks them.
        """
        if offset == self.end_offset:
            return b""
        self._check_range(offset)
        segment, _, position, data = self._reader.read(offset, bytes_max)
        self._page_cache.note_read(segment, position, len(data))
        return data

    def batch_at(self, offset: int) -> Batch:
        """Return the checked batch that holds the offset."""
        if offset >= self.end_offset:
            raise OffsetOutOfRange(self._range_text(offset))
        self._check_range(offset)
        return self._reader.batch_at(offset)

    def stored_at(self, offset: int) -> tuple[Segment, int]:
        """Return the segment and the byte position of the batch that holds the offset."""
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
        """Yield checked batches from the one that holds `start` up to `end`.

        Damage raises CorruptBatch, or is skipped with `skip_damaged`. Either way it is in `damaged`
        from then on.
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
        """Return the first offset at or above this one that is not known to be damaged."""
        while (damage := self._reader.damage_at(offset)) is not None:
            offset = damage.end
        return offset

    def offset_for_time(self, timestamp_ms: int) -> int:
        """Return the first offset whose timestamp is at or above the given one, or the end."""
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
        """Return the first run [start, end) of the lane with end > offset, or None.

        `start` is not below `offset`, nor below the start of the log.
        """
        return self.segments.next_run(lane, max(offset, self._durability.start_offset))

    def count_from(self, lane: int, offset: int) -> int:
        """Count the records of the lane at or above the offset."""
        return self.segments.count_from(lane, max(offset, self._durability.start_offset))

    # Truncation and retention

    def truncate(self, end_offset: int) -> None:
        """Drop every batch that reaches `end_offset` or beyond. The cut is durable on return.

        batches [0,5) [5,9) [9,12):  truncate(9) leaves [0,9),  truncate(7) leaves [0,5)
        """
        self._durability.check()
        if end_offset >= self.end_offset:
            self.sync()
            return
        self._check_range(end_offset)
        if self._durability.unsynced:
            self._durability.settle(Head(*self._head))
        number, position, end = self._reader.cut_point(end_offset)
        segments = self.segments
        segment = segments.items[number]
        try:
            file = segments.file_of(segment)
            # First write the promise, then cut: a crash in between must not look like a loss.
            self._cut(end, segment.base_offset, position, file)
            segments.drop_back(len(segments.items) - 1 - number)
            index = segments.reactivate_last()
            file.truncate(position)
            file.sync()
            index.rewind(position)
            tail = scan(file, segment.path, index, position)
            if tail is not None:
                index.add_damage(
                    DamagedRange(
                        *(index.end_offset, end, segment.path),
                        *(tail.position, position, tail.reason),
                    )
                )
            assert (index.size, index.end_offset) == (position, end)
            self._reader.gaps[:] = [gap for gap in self._reader.gaps if gap.end <= end]
            self._take_active()
            self._durability.cut_done(Head(*self._head))
        except StorageFailed as error:
            self._durability.fail(error)
            raise

    def _cut(self, end_offset: int, segment_base: int, position: int, file: File) -> None:
        """Claim nothing above `end_offset` any more.

        Syncs that begin from now on see the old end and know that it no longer counts, until a new
        end is published.
        """
        self._generation += 1
        try:
            self._durability.cut(Head(end_offset, segment_base, position, file, self._generation))
        except DiskFull:
            self._publish()  # nothing was cut: the end counts again
            raise

    def truncate_prefix(self, start_offset: int) -> int:
        """Drop what is below `start_offset`: remove whole segments. Returns the bytes freed."""
        self._durability.check()
        if start_offset <= self.start_offset:
            return 0
        self._check_range(start_offset)
        bases = self.segments.bases
        count = sum(base <= start_offset for base in bases[1:])
        return self._drop_front(count, start_offset)

    def retain(
        self,
        now_ms: int,
        age_ms: int | None = None,
        bytes_max: int | None = None,
        below: int | None = None,
    ) -> int:
        """Remove sealed segments from the front that are over the age or over the size.

        Nothing at or above the offset `below` is removed. Returns the bytes freed.
        """
        self._durability.check()
        self._seal_by_age(now_ms)
        count = self.segments.count_droppable(now_ms, age_ms, bytes_max, below)
        if not count:
            return 0
        return self._drop_front(count, max(self.segments.bases[count], self.start_offset))

    def _drop_front(self, count: int, start_offset: int) -> int:
        if start_offset > self.flushed_offset:
            self.sync()
        try:
            self._durability.move_start(start_offset, Head(*self._head))
            self._durability.release_below(self.segments.bases[count])
            freed = self.segments.drop_front(count)
        except StorageFailed as error:
            self._durability.fail(error)
            raise
        self._reader.gaps[:] = [gap for gap in self._reader.gaps if gap.end > start_offset]
        self._epoch_starts = None
        return freed

    def reset(self, start_offset: int) -> None:
        """Drop everything and go on, empty, at `start_offset`. Durable on return.

        A crash on the way leaves a first part of the old log, or nothing, at the old start or here.
        """
        self._durability.check()
        assert start_offset >= 0, start_offset
        segments = self.segments
        try:
            # As in a truncation, the records are first no longer claimed, then dropped, the newest
            # first. The new start counts only when no old segment is left that could be taken for
            # its history.
            self._cut(self.start_offset, self._index.base_offset, 0, self._file)
            segments.drop_back(len(segments.items))
            self._reader.gaps.clear()
            self.end_offset = start_offset
            self._durability.restart(start_offset)
            segments.create(start_offset)
        except StorageError as error:
            self._durability.fail(error)
            if not segments.items:
                # There is no file: nothing can be written, but the log can still answer questions.
                segments.add(
                    Segment(self.directory, start_offset, segments.new_index(start_offset))
                )
            raise
        self._take_active()

    def repair(self, offset: int, batches: Buffer) -> None:
        """Replace the damage at `offset` with good bytes. Durable on return.

        `batches` are the same batches from another replica: exactly the damaged offsets and bytes.
        A gap has no bytes; its first batches are enough. Raises InvalidArgument without such
        damage, and CorruptBatch when the batches do not fit.
        """
        self._durability.check()
        try:
            repair_damage(self.segments, self._reader, offset, batches)
        except StorageFailed as error:
            self._durability.fail(error)
            raise
        self._take_active()

    def replace_segment(self, segment: Segment, temporary: str) -> None:
        """Replace a sealed segment with a rewritten file of the same offsets."""
        self._durability.check()
        if self._durability.unsynced:
            self._durability.settle(Head(*self._head))
        try:
            self.segments.replace_file(segment, temporary)
        except StorageFailed as error:
            self._durability.fail(error)
            raise

    # Durability

    def begin_sync(self) -> SyncTicket:
        """Make a ticket for a sync of everything so far. Any thread may request and run it."""
        return self._durability.begin(Head(*self._head))

    def set_readable(self, offset: int) -> None:
        """Note that everything below is readable, so replicated. A restart knows of it a while
        later."""
        self._durability.readable_offset = offset

    def note_readable(self) -> None:
        """Write down what is readable, for a restart. Any thread may call it."""
        self._durability.note_readable(Head(*self._head))

    def sync(self) -> None:
        """Return when everything appended so far is durable."""
        self.begin_sync().run()

    def scrub(self, bytes_max: int) -> ScrubStep:
        """Verify about `bytes_max` bytes of sealed segments, from where the last call stopped."""
        return scrub_step(self.segments, self._scrub, bytes_max)

    def close(self, clean: bool = True) -> None:
        """Sync and close. Without `clean` the files stay as they are, as after a crash."""
        durability = self._durability
        try:
            if clean and durability.failure is None:
                self.sync()
                durability.remember(Head(*self._head), clean=True, sync=True)
        finally:
            durability.fail(StorageFailed(f"the log in {self.directory} is closed"))
            self.segments.close()
            durability.close()
