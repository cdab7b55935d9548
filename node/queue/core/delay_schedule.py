"""Core: which records of a delays log are still to be delivered, and when. No I/O.

The shell stores delayed records in the delays log, appends the due ones to the data log in batches
that name their delay offsets, and then appends a FIRED mark to the delays log. This core is told of
each of these facts, live and again at open, and decides what is due. The states of a record:

    scheduled ──> pending ──apply_fired──> fired ──fired_flushed──> done
                   │  ^                      │
                   │  └──────recovered───────┘   the data log lost the batch
                   └──apply_cancelled──> done

Never early: due() compares with the caller's clock. Never lost: a record stays pending until
apply_fired, and a fired one is remembered with its deliver_at until the data log is flushed past
it. Never twice: every fact may be told again (a mark, then the batch that the mark is about).

What the shell must keep to:
- due, append to data, apply_fired: no cancel in between. FIRED marks in the order of the data log.
- Flush the delays log up to a delay offset before the data batch that names it is flushed. If that
  failed, apply_fired meets an offset the log does not have and `end_offset` moves past it: the
  delays log goes on from there, since an offset used twice would make a new record look fired.
- At open: restore or start empty, replay the delays log from `end_offset`, then go through the
  batches of the data log from `fired_end` on: they have no mark, so tell apply_fired and append the
  mark now (the next mark moves fired_end past them). Then call recovered. If it says True, make
  that durable before data is appended to, by a snapshot or by a control record that calls recovered
  again during replay: otherwise later data covers the void marks, and at the next open their
  records are lost and batches below fired_end are missed.
- Write a snapshot only when the delays log is flushed up to `end_offset`. Drop the delays log only
  below both `done_below` and the end_offset of the newest durable snapshot (if any was written).

Snapshot, little-endian, 64-bit signed numbers after the first eight bytes:

    'RQDS' | version u32 | end_offset | fired_end | pending count | mark count | fired count
    pending offsets | pending deliver_at | mark data_end | mark record count
    fired offsets | fired deliver_at | crc32c u32 of all before it
"""

import struct
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush, nsmallest
from itertools import chain

from crc32c import crc32c

from raftq.client.common.errors import CorruptFile, UnknownFormat
from raftq.node.queue.core.timer_wheel import TimerWheel

_MAGIC = b"RQDS"
_VERSION = 1
_HEADER = struct.Struct("<4sI5q")
_CRC = struct.Struct("<I")
# A deliver_at is never negative, so this stands for "was not pending when it was told as fired".
_GONE = -1
# The wheel starts this far in the past, so that what became due while the node was down leaves it
# in portions. Older records come out of it at once.
_BACKLOG_MS = 7 * 86_400_000
# The wheel is rebuilt when it holds more timers than this on top of twice the pending records.
_WHEEL_SLACK = 4096

# One apply_fired: data_end, delay offsets, and deliver_at of each (or _GONE).
_Mark = tuple[int, "array[int]", "array[int]"]


class DelaySchedule:
    """The pending records of one delays log; a delay offset is an offset in that log."""

    __slots__ = (
        "_end_offset",
        "_fired_end",
        "_first",
        "_marks",
        "_now_ms",
        "_offered",
        "_pending",
        "_ready",
        "_wheel",
    )

    def __init__(self, now_ms: int) -> None:
        self._pending: dict[int, int] = {}
        self._wheel = TimerWheel(max(now_ms - _BACKLOG_MS, 0))
        # Out of the wheel and not fired, all due at _now_ms: a heap, and what due() last returned.
        self._ready: list[tuple[int, int]] = []
        self._offered: list[tuple[int, int]] = []
        self._marks: deque[_Mark] = deque()
        self._end_offset = 0
        self._fired_end = 0
        self._first = 0
        self._now_ms = 0

    @property
    def end_offset(self) -> int:
        """Next delays-log offset that was not told yet."""
        return self._end_offset

    @property
    def fired_end(self) -> int:
        """Data offset up to which every fired batch is known; at open the shell scans from here."""
        return self._fired_end

    @property
    def done_below(self) -> int:
        """First delays-log offset whose record may still be needed: pending, or fired unflushed."""
        pending = self._pending
        if self._first not in pending:
            self._first = min(pending, default=self._end_offset)
        return min(
            self._first, min((min(offsets) for _, offsets, _ in self._marks), default=self._first)
        )

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    @property
    def unflushed_count(self) -> int:
        """Fired records that are remembered until fired_flushed."""
        return sum(len(offsets) for _, offsets, _ in self._marks)

    def is_pending(self, delay_offset: int) -> bool:
        return delay_offset in self._pending

    def deliver_at(self, delay_offset: int) -> int | None:
        """When a pending record is due; None when it is not pending."""
        return self._pending.get(delay_offset)

    def scheduled(self, base_offset: int, deliver_at_ms: Sequence[int]) -> None:
        """Records were appended to the delays log at base_offset; below zero counts as zero."""
        assert base_offset >= self._end_offset, f"{base_offset} is below {self._end_offset}"
        # The array refuses what does not fit 64 bits before anything changed.
        deliver_at = array("q", deliver_at_ms)
        if deliver_at and min(deliver_at) < 0:
            deliver_at = array("q", [max(at, 0) for at in deliver_at])
        offsets = range(base_offset, base_offset + len(deliver_at))
        self._pending.update(zip(offsets, deliver_at, strict=True))
        self._wheel.add_many(offsets, deliver_at)
        self._end_offset = offsets.stop

    def control(self, offset: int) -> None:
        """A control record occupies this delays-log offset; it is never pending."""
        assert offset >= self._end_offset, f"{offset} is below {self._end_offset}"
        self._end_offset = offset + 1

    def cancel(self, delay_offset: int) -> bool:
        """Decide only: whether it can still be cancelled. The shell logs it, then applies it."""
        return delay_offset in self._pending

    def apply_cancelled(self, delay_offset: int) -> None:
        """It is done and never comes out, whatever the state it is in."""
        if self._pending.pop(delay_offset, None) is None:
            # A void FIRED mark of a record that was put back and then cancelled: recovered() must
            # not find it again.
            for _, offsets, deliver_at in self._marks:
                for position, offset in enumerate(offsets):
                    if offset == delay_offset:
                        deliver_at[position] = _GONE
        self._shrink_wheel()

    def due(self, now_ms: int, records_max: int) -> list[tuple[int, int]]:
        """The earliest due records as (deliver_at_ms, delay_offset), in that order.

        They stay pending: the same records come again until apply_fired or apply_cancelled.
        """
        assert records_max > 0, f"records_max is {records_max}"
        self._take_back(now_ms)
        pending, ready = self._pending, self._ready
        offered: list[tuple[int, int]] = []
        while len(offered) < records_max:
            # What is ready is earlier than what the wheel has, except for records of the past
            # scheduled since; the wheel hands those out whatever the limit is.
            room = records_max - len(offered)
            limit = max(room - len(ready), 0)
            fresh = self._wheel.advance(now_ms, limit)
            if not ready and len(fresh) <= room:
                offered += [record for record in fresh if record[1] in pending]
            else:
                for record in fresh:
                    heappush(ready, record)
                self._pop_ready(records_max, offered)
            if limit and not fresh:
                break
        self._offered = offered
        return offered.copy()

    def apply_fired(self, delay_offsets: Sequence[int], data_end: int) -> None:
        """The records are in the data log, in a batch that ends at data_end. May be told again."""
        if not delay_offsets:
            return
        pop = self._pending.pop
        offsets = array("q", delay_offsets)
        assert min(offsets) >= 0, f"negative delay offset {min(offsets)}"
        self._marks.append((data_end, offsets, array("q", [pop(at, _GONE) for at in offsets])))
        self._fired_end = max(self._fired_end, data_end)
        self._end_offset = max(self._end_offset, max(offsets) + 1)
        self._shrink_wheel()

    def seen(self, data_end: int) -> None:
        """Whatever fired into the data log below data_end was told by apply_fired."""
        self._fired_end = max(self._fired_end, data_end)

    def fired_flushed(self, data_flushed_offset: int) -> None:
        """The data log is durable up to here: what was fired below can be forgotten."""
        marks = self._marks
        while marks and marks[0][0] <= data_flushed_offset:
            marks.popleft()

    def recovered(self, data_end: int) -> bool:
        """At open: the data log really ends at data_end. True when that changed anything.

        A mark beyond the end is void, and its records are pending again unless another batch below
        the end has them too. When True, see the module's rules for the shell.
        """
        if data_end >= self._fired_end:
            self._marks = deque(sorted(self._marks, key=lambda mark: mark[0]))
            return False
        kept = [mark for mark in self._marks if mark[0] <= data_end]
        void = [mark for mark in self._marks if mark[0] > data_end]
        survived = dict.fromkeys(chain.from_iterable(offsets for _, offsets, _ in kept))
        back = {
            offset: deliver_at
            for _, offsets, times in void
            for offset, deliver_at in zip(offsets, times, strict=True)
            if deliver_at != _GONE and offset not in survived
        }
        self._marks = deque(sorted(kept, key=lambda mark: mark[0]))
        self._fired_end = data_end
        if back:
            self._put_back(back)
        return True

    def next_due_ms(self) -> int | None:
        """Next time to call due(); it may find nothing then, but never something earlier."""
        pending = self._pending
        times = [self._ready[0][0]] if self._ready else []
        times.extend([record[0] for record in self._offered if record[1] in pending][:1])
        wheel_ms = self._wheel.next_due_ms()
        if wheel_ms is not None:
            times.append(wheel_ms)
        return min(times, default=None)

    def pending(self, limit: int, after: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        """Pending records as (delay_offset, deliver_at_ms), by deliver_at, then offset.

        `after` is the last pair of the page before. Looks at every pending record.
        """
        if after is None:
            found = ((at, offset) for offset, at in self._pending.items())
        else:
            low = (after[1], after[0])
            found = ((at, offset) for offset, at in self._pending.items() if (at, offset) > low)
        return [(offset, at) for at, offset in nsmallest(limit, found)]

    def snapshot(self) -> bytes:
        """Everything, as one file's content."""
        marks = self._marks
        columns = (
            array("q", self._pending.keys()),
            array("q", self._pending.values()),
            array("q", [data_end for data_end, _, _ in marks]),
            array("q", [len(offsets) for _, offsets, _ in marks]),
            array("q", chain.from_iterable(offsets for _, offsets, _ in marks)),
            array("q", chain.from_iterable(deliver_at for _, _, deliver_at in marks)),
        )
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self._end_offset,
            self._fired_end,
            len(columns[0]),
            len(columns[2]),
            len(columns[4]),
        )
        body = b"".join((header, *(_little_endian(column).tobytes() for column in columns)))
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def restore(cls, data: bytes, now_ms: int) -> "DelaySchedule":
        """The schedule a snapshot was made of. Raises CorruptFile, UnknownFormat."""
        end_offset, fired_end, columns = _decode(data)
        offsets, deliver_at, mark_ends, mark_counts, fired, fired_at = columns
        pending = dict(zip(offsets, deliver_at, strict=True))
        if len(pending) != len(offsets):
            raise CorruptFile("delay snapshot: an offset is pending twice")
        schedule = cls(now_ms)
        # No further back than the earliest record: each revolution less is one move less for all.
        earliest_ms = min(deliver_at, default=now_ms)
        schedule._wheel = TimerWheel(min(now_ms, max(earliest_ms, now_ms - _BACKLOG_MS, 0)))
        schedule._pending = pending
        schedule._wheel.add_many(offsets, deliver_at)
        schedule._end_offset = end_offset
        schedule._fired_end = fired_end
        position = 0
        for data_end, count in zip(mark_ends, mark_counts, strict=True):
            part = slice(position, position + count)
            schedule._marks.append((data_end, fired[part], fired_at[part]))
            position += count
        return schedule

    def describe(self) -> str:
        return (
            f"pending={len(self._pending)} ready={len(self._ready)} "
            f"unflushed={self.unflushed_count} end_offset={self._end_offset} "
            f"fired_end={self._fired_end} wheel[{self._wheel.describe()}]"
        )

    def _take_back(self, now_ms: int) -> None:
        """Before due() looks again: records that it returned and that did not fire are ready."""
        pending, ready = self._pending, self._ready
        for record in self._offered:
            if record[1] in pending:
                heappush(ready, record)
        self._offered = []
        if now_ms < self._now_ms:
            # The clock went back: the wheel knows how to keep what is no longer due.
            self._wheel.add_many([record[1] for record in ready], [record[0] for record in ready])
            ready.clear()
        self._now_ms = now_ms

    def _pop_ready(self, records_max: int, offered: list[tuple[int, int]]) -> None:
        """Move the earliest ready records to offered, without the cancelled ones."""
        pending, ready = self._pending, self._ready
        while ready and len(offered) < records_max:
            record = heappop(ready)
            if record[1] in pending:
                offered.append(record)

    def _put_back(self, records: dict[int, int]) -> None:
        # A timer left over from before would bring the record out twice.
        pending = self._pending
        self._wheel.rebuild(pending.__contains__)
        self._ready = sorted(record for record in self._ready if record[1] in pending)
        self._offered = [record for record in self._offered if record[1] in pending]
        pending.update(records)
        self._wheel.add_many(list(records), list(records.values()))
        self._first = min(self._first, min(records))

    def _shrink_wheel(self) -> None:
        if len(self._wheel) > 2 * len(self._pending) + _WHEEL_SLACK:
            self._wheel.rebuild(self._pending.__contains__)


def _little_endian(column: "array[int]") -> "array[int]":
    """The column in the file's byte order, or back; changes it in place."""
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _decode(data: bytes) -> tuple[int, int, list["array[int]"]]:
    """Check a snapshot: first that it is whole, then that its numbers can be believed."""
    if len(data) < _HEADER.size + _CRC.size or data[:4] != _MAGIC:
        raise CorruptFile("delay snapshot: not a snapshot, or cut short")
    view = memoryview(data)
    if _CRC.unpack(view[-_CRC.size :])[0] != crc32c(view[: -_CRC.size]):
        raise CorruptFile("delay snapshot: wrong checksum")
    _, version, end_offset, fired_end, pending, marks, fired = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise UnknownFormat(f"delay snapshot: version {version}, this program reads {_VERSION}")
    size = _HEADER.size + 16 * (pending + marks + fired) + _CRC.size
    if min(end_offset, fired_end, pending, marks, fired) < 0 or size != len(data):
        raise CorruptFile("delay snapshot: counts do not match its size")
    columns = []
    position = _HEADER.size
    for count in (pending, pending, marks, marks, fired, fired):
        column = array("q")
        column.frombytes(view[position : position + 8 * count])
        columns.append(_little_endian(column))
        position += 8 * count
    offsets, deliver_at, mark_ends, mark_counts, fired_offsets, fired_at = columns
    believable = (
        all(min(part) >= 0 and max(part) < end_offset for part in (offsets, fired_offsets) if part)
        and min(deliver_at, default=0) >= 0
        and min(fired_at, default=0) >= _GONE
        and min(mark_ends, default=0) >= 0
        and max(mark_ends, default=0) <= fired_end
        and min(mark_counts, default=1) > 0
        and sum(mark_counts) == fired
    )
    if not believable:
        raise CorruptFile("delay snapshot: offsets or times out of range")
    return end_offset, fired_end, columns
