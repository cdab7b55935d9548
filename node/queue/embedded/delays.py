"""Shell: the delays log of an embedded queue, and the schedule kept over it.

A delayed message is a record with a `deliver_at` in the delays log. When it is due it is appended
to the data log in a batch that names the delay offsets it came from, and then marked as fired in
the delays log. A crash between the two is seen at open, because the data log's tail is searched for
such batches: so a message fires exactly once. Cancel is a control record.
"""

import logging
from collections.abc import Iterable, Sequence

from msgspec.msgpack import Decoder

from raftq.client.common.errors import (
    CorruptBatch,
    CorruptFile,
    DiskFull,
    OffsetOutOfRange,
    UnknownFormat,
)
from raftq.client.common.names import LANE_NAMES
from raftq.client.wire.batch import FLAG_CONTROL, FLAG_DELAY_OFFSETS, Batch, encode
from raftq.client.wire.record import BatchRecord
from raftq.node.queue.core.codec import encode_stored, stored_decoder
from raftq.node.queue.core.delay_schedule import DelaySchedule
from raftq.node.queue.core.entries import LedgerStruct
from raftq.node.queue.embedded.files import QueueFiles
from raftq.node.queue.embedded.message import DelayedMessage, delayed_id, record_bytes
from raftq.node.storage.compaction import compact

logger = logging.getLogger("raftq.queue")

FIRE_RECORDS_MAX = 1000
# How much of the data log an open may have to search for what fired without a mark.
SEEN_RECORDS = 10_000
FIRE_BYTES_MAX = 4 * 1024 * 1024
SNAPSHOT_BYTES_MAX = 1 << 30
CONTROL_OFFSETS_MAX = 10_000
SNAPSHOT_LOG_BYTES = 1024 * 1024
COMPACT_BYTES_MIN = 4 * 1024 * 1024


class DelaysCancelled(LedgerStruct, tag=1, frozen=True):
    """These delayed messages are cancelled."""

    offsets: list[int]


class DelaysFired(LedgerStruct, tag=2, frozen=True):
    """Rows of delay offsets, and the end of the data batch that has their messages."""

    rows: list[tuple[list[int], int]]


class DelaysSeen(LedgerStruct, tag=3, frozen=True):
    """Everything that fired below `data_end` in the data log has its mark."""

    data_end: int


DelayControl = DelaysCancelled | DelaysFired | DelaysSeen
_decode = stored_decoder(Decoder[DelayControl](DelayControl), "control record of the delays log")


class EmbeddedDelays:
    """Schedules, fires and cancels. One caller at a time."""

    def __init__(self, files: QueueFiles, now_ms: int) -> None:
        self._files = files
        self._changes = 0
        self._snapshot_bytes = files.delays.size_bytes
        self._next_due_ms: int | None = None
        self._due_changed = True
        # Marks of what is in the data log but could not be written to a full disk yet.
        self._unmarked: list[tuple[list[int], int]] = []
        self.schedule = self._restore(now_ms)
        self._recover()

    def next_due_ms(self) -> int | None:
        """When `fire` has something to do. Asked before every delivery, so it is remembered."""
        if self._due_changed:
            self._next_due_ms = self.schedule.next_due_ms()
            self._due_changed = False
        return self._next_due_ms

    @property
    def has_changes(self) -> bool:
        """Whether anything was scheduled, fired or cancelled since the last snapshot."""
        return self._changes > 0

    def append(self, batches: Sequence[bytearray]) -> None:
        """Store delayed records: all of them or none."""
        self._files.delays.append_many(batches)
        for batch in batches:
            self.note_appended(Batch(bytes(batch)))

    def note_appended(self, batch: Batch) -> None:
        deliver_at = batch.deliver_at()
        if deliver_at is None:
            raise CorruptFile(f"the delays log holds a record without a time at {batch.describe()}")
        self.schedule.scheduled(batch.base_offset, deliver_at)
        self._changes += batch.count
        self._due_changed = True

    def fire(self, now_ms: int) -> int:
        """Move due records to the data log; returns how many. Call again while it returns some."""
        self._due_changed = True
        due = self.schedule.due(now_ms, FIRE_RECORDS_MAX)
        if not due:
            return 0
        by_lane: dict[int, list[BatchRecord]] = {}
        lost: list[int] = []
        size = fired = 0
        for offset, record in self._records([offset for _, offset in due]):
            if record is None:
                lost.append(offset)
                continue
            by_lane.setdefault(record.priority, []).append(record)
            fired += 1
            size += record_bytes(record.value, record.key, record.headers)
            if size > FIRE_BYTES_MAX:
                break
        self._append_fired(list(by_lane.items()), now_ms)
        for offset in lost:
            # A record that cannot be read cannot fire; the log reports its damage.
            self.schedule.apply_cancelled(offset)
        self._changes += fired
        return fired + len(lost)

    def _append_fired(self, by_lane: list[tuple[int, list[BatchRecord]]], now_ms: int) -> None:
        if not by_lane:
            return
        data = self._files.data
        bases = data.append_many([self._fired_batch(lane, rows, now_ms) for lane, rows in by_lane])
        # One mark per batch: a power cut can take the later batches and leave the earlier ones.
        for base, (_, rows) in zip(bases, by_lane, strict=True):
            offsets, data_end = [record.offset for record in rows], base + len(rows)
            self.schedule.apply_fired(offsets, data_end)
            self._unmarked.append((offsets, data_end))
        self._write_marks()

    def _mark_seen(self) -> None:
        """Note that everything that fired so far is marked, so that open need not search there."""
        end = self._files.data.end_offset
        if end - self.schedule.fired_end > SEEN_RECORDS and not self._unmarked:
            self._control(DelaysSeen(end))
            self.schedule.seen(end)

    def _write_marks(self) -> None:
        """Mark in the delays log what fired; a full disk leaves it for later."""
        if not self._unmarked:
            return
        try:
            self._control(DelaysFired(self._unmarked))
        except DiskFull as error:
            logger.warning("event=marks_wait reason=disk_full error=%s", error)
            return
        self._unmarked = []

    def cancel(self, offsets: Sequence[int]) -> int:
        """Cancel those that are pending; returns how many were."""
        self._due_changed = True
        pending = [offset for offset in offsets if self.schedule.cancel(offset)]
        for start in range(0, len(pending), CONTROL_OFFSETS_MAX):
            part = pending[start : start + CONTROL_OFFSETS_MAX]
            self._control(DelaysCancelled(part))
            for offset in part:
                self.schedule.apply_cancelled(offset)
        self._changes += len(pending)
        return len(pending)

    def cancel_all(self) -> None:
        self.cancel([offset for offset, _ in self.schedule.pending(self.schedule.pending_count)])

    def messages(self, limit: int) -> list[DelayedMessage]:
        """Messages that are not yet due, the next one first; damaged ones are left out."""
        due = dict(self.schedule.pending(limit))
        return [
            DelayedMessage(
                delayed_id(offset),
                due[offset] / 1000,
                record.value,
                record.key,
                record.headers,
                LANE_NAMES[record.priority],
            )
            for offset, record in self._records(list(due))
            if record is not None
        ]

    def upkeep(self, force: bool = False) -> None:
        """Save a snapshot and drop what is done, once enough has changed."""
        schedule, delays = self.schedule, self._files.delays
        self._write_marks()
        self._mark_seen()
        schedule.fired_flushed(self._files.data.flushed_offset)
        grown = delays.size_bytes - self._snapshot_bytes
        if self._changes < (1 if force else max(50_000, schedule.pending_count)) and (
            grown < SNAPSHOT_LOG_BYTES or schedule.pending_count
        ):
            return
        self._save_snapshot()
        if not schedule.pending_count:
            delays.roll()
        delays.truncate_prefix(min(schedule.done_below, schedule.end_offset))
        # A fired record may only go for good once the data log has it for good.
        if delays.size_bytes > COMPACT_BYTES_MIN and not schedule.unflushed_count:
            compact(delays, self._keep)
        self._snapshot_bytes = delays.size_bytes

    def _save_snapshot(self) -> None:
        self._changes = 0
        self._files.delays.sync()
        path = self._files.path("delays.snapshot")
        self._files.disk.write_file_atomic(path, self.schedule.snapshot())

    def _keep(self, batch: Batch) -> list[int] | None:
        if batch.flags & FLAG_CONTROL:
            return []
        pending = self.schedule.is_pending
        return [index for index, offset in enumerate(batch.offsets()) if pending(offset)]

    def _records(self, offsets: Sequence[int]) -> Iterable[tuple[int, BatchRecord | None]]:
        held: dict[int, BatchRecord] = {}
        batch_end = batch_start = -1
        for offset in offsets:
            if not batch_start <= offset < batch_end:
                try:
                    batch = self._files.delays.batch_at(offset)
                    held = {record.offset: record for record in batch.records()}
                    batch_start, batch_end = batch.base_offset, batch.end_offset
                except (CorruptBatch, OffsetOutOfRange) as error:
                    # Out of range: an old snapshot was put back, and names what is long done.
                    logger.error("event=delayed_record_damaged offset=%d error=%s", offset, error)
                    batch_start = batch_end = -1
                    yield offset, None
                    continue
            yield offset, held.get(offset)

    def _fired_batch(self, lane: int, records: list[BatchRecord], now_ms: int) -> bytearray:
        expiries = [record.expires_at for record in records]
        return encode(
            [record.value for record in records],
            keys=[r.key for r in records] if any(r.key is not None for r in records) else None,
            headers=[record.headers for record in records],
            timestamps=now_ms,
            expiries=expiries if any(expiries) else None,
            delay_offsets=[record.offset for record in records],
            lane=lane,
        )

    def _control(self, control: DelayControl) -> None:
        base = self._files.delays.append(encode([encode_stored(control)], control=True))
        self.schedule.control(base)

    def _restore(self, now_ms: int) -> DelaySchedule:
        path = self._files.path("delays.snapshot")
        delays = self._files.delays
        try:
            if self._files.disk.exists(path):
                packed = self._files.disk.read_file(path, SNAPSHOT_BYTES_MAX)
                schedule = DelaySchedule.restore(packed, now_ms)
                if delays.start_offset <= schedule.end_offset <= delays.end_offset:
                    return schedule
        except UnknownFormat as error:
            raise UnknownFormat(f"{path}: {error}") from error
        except CorruptFile as error:
            logger.warning("path=%s event=snapshot_damaged action=rebuild error=%s", path, error)
        return DelaySchedule(now_ms)

    def _recover(self) -> None:
        delays, data, schedule = self._files.delays, self._files.data, self.schedule
        start = max(schedule.end_offset, delays.start_offset)
        for batch in delays.batches(start, skip_damaged=True):
            if batch.flags & FLAG_CONTROL:
                for offset, value in zip(batch.offsets(), batch.values(), strict=True):
                    schedule.control(offset)
                    self._replay(value)
            elif batch.count:
                self._replay_scheduled(batch)
        changed = schedule.recovered(data.end_offset)
        # Where marks may be lost, the data log itself tells what fired: all of it is searched.
        known_end = 0 if any(one.end > start for one in delays.damaged) else schedule.fired_end
        start = min(max(known_end, data.start_offset), data.end_offset)
        for batch in data.batches(start, skip_damaged=True):
            if batch.flags & FLAG_DELAY_OFFSETS:
                schedule.apply_fired(batch.delay_offsets() or [], batch.end_offset)
                changed = True
        lost = schedule.end_offset - delays.end_offset
        if lost > 0:
            # The data log names records that a power cut took from this log. Their offsets are
            # spent: a filler keeps them from being given to others, who would then look fired.
            delays.append(encode([], offset_deltas=[], span=lost, control=True))
        if changed:
            # Before any new record: a later open must not judge the old marks by a longer log.
            self._save_snapshot()

    def _replay_scheduled(self, batch: Batch) -> None:
        deliver_at = batch.deliver_at() or []
        offsets = batch.offsets()
        if isinstance(offsets, range):
            self.schedule.scheduled(batch.base_offset, deliver_at)
            return
        for offset, due in zip(offsets, deliver_at, strict=True):
            self.schedule.scheduled(offset, [due])

    def _replay(self, value: bytes) -> None:
        control = _decode(value)
        if isinstance(control, DelaysCancelled):
            for offset in control.offsets:
                self.schedule.apply_cancelled(offset)
        elif isinstance(control, DelaysFired):
            for offsets, data_end in control.rows:
                self.schedule.apply_fired(offsets, data_end)
        else:
            self.schedule.seen(control.data_end)
