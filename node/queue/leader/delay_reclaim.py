"""Keeps the delays log short: drops its beginning, and stores again what is in the way. (Shell.)

The beginning of the log goes, a segment at a time, when nothing in it is needed. A record is
needed while it is pending, and after it has fired until the data log has it for good. A few records
that are due in a year would keep everything behind them; so when the log is larger than
`GROWN_TIMES` what is pending, the pending records of its first segment are stored again at its end,
under their old ids. Going round the log like this writes what is pending once and frees the
rest, which is at least twice as much: the log stays below about four times what is pending, and
at most half as much again is written as was published.

The order in which things become safe: what is stored again and the newest SEEN mark are replicated,
then the prefix goes; followers do the same as their leader.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from raftq.client.common.errors import DiskFull, RaftqError
from raftq.client.common.tasks import yield_to_loop
from raftq.client.wire.batch import encode
from raftq.client.wire.record import BatchRecord
from raftq.node.queue.core.pending_delays import PendingDelays
from raftq.node.queue.leader.record_reader import RecordReader
from raftq.node.replication.leader_log import LeaderLog
from raftq.node.storage.log import Log

logger = logging.getLogger(__name__)

GROWN_TIMES = 3
GROWN_BYTES_MIN = 64 * 1024 * 1024
EMPTY_BYTES_MIN = 1024 * 1024
MOVE_RECORDS = 250
MOVE_BYTES = 1024 * 1024
UNREADABLE_PLANS = 60
"""So many plans are skipped when records could not be read."""


class Reclaim:
    """Frees the space of done records in a delays log, for one epoch."""

    def __init__(
        self, delays: LeaderLog, pending_delays: PendingDelays, records: RecordReader
    ) -> None:
        self._delays = delays
        self._pending = pending_delays
        self._records = records
        self._fired: deque[tuple[int, list[int]]] = deque()
        self._move_below = -1
        self._drop_below = -1
        self._dropping = False
        self._skip_plans = 0
        self._moved_any = False
        self.moved = 0

    @property
    def has_work(self) -> bool:
        """Whether something waits for the data log or for a plan."""
        return bool(self._fired) or self._delays.log.size_bytes > EMPTY_BYTES_MIN

    @property
    def is_moving(self) -> bool:
        return self._move_below >= 0

    @property
    def wants_plan(self) -> bool:
        """Whether enough was stored again that a prefix may go now."""
        return self._moved_any and self._move_below < 0 and not self._dropping

    def fired(self, ids: list[int], data_end: int) -> None:
        """These have their mark; they are in the data log below `data_end`."""
        self._fired.append((data_end, ids))

    def flushed(self, data_offset: int) -> None:
        """What fired below is there for good."""
        while self._fired and self._fired[0][0] <= data_offset:
            self._pending.released(self._fired.popleft()[1])

    def plan(self, unknown: int | None) -> bool:
        """Look what can be done; True when a prefix can go: call `drop_after` then.

        `unknown` is where the records begin that are in the log but not in the book yet.
        """
        log, pending_delays = self._delays.log, self._pending
        if self._dropping or self._move_below >= 0:
            return False
        self._moved_any = False
        needed = pending_delays.first_held(log.end_offset if unknown is None else unknown)
        bases = log.segments.bases
        if needed == log.end_offset > bases[-1] and log.size_bytes > EMPTY_BYTES_MIN:
            log.roll()
        free = [base for base in bases[1:] if base <= needed]
        if free:
            self._drop_below = free[-1]
            return True
        if self._skip_plans:
            self._skip_plans -= 1
        else:
            self._plan_moves(log, pending_delays.pending_bytes())
        return False

    def _plan_moves(self, log: Log, pending: int) -> None:
        """Choose the first segments, as many as have to go for the log to be small again."""
        size = log.size_bytes
        if size <= max(GROWN_BYTES_MIN, GROWN_TIMES * pending):
            return
        if log.segment_count == 1:
            log.roll()
        for segment, base in zip(log.segments.items, log.segments.bases[1:], strict=False):
            self._move_below = base
            size -= segment.facts.size
            if size <= max(GROWN_BYTES_MIN // 2, (GROWN_TIMES - 1) * pending):
                break

    def drop_after(self, end: int) -> None:
        """Drop the planned prefix once everything below `end` is replicated."""
        self._dropping = True
        self._delays.replicated(end).add_done_callback(self._drop)

    def _drop(self, replicated: "asyncio.Future[None]") -> None:
        self._dropping = False
        if replicated.cancelled() or replicated.exception() is not None:
            return
        try:
            self._delays.truncate_prefix(self._drop_below)
        except RaftqError as error:
            logger.warning("log=%s prefix kept: %s", self._delays.log.directory, error)
            return
        self._records.forget_below(self._drop_below)

    def step(self) -> bool:
        """Store some records of the first segment again; whether there are more."""
        if self._move_below < 0:
            return False
        ids = self._pending.held_below(self._move_below, MOVE_RECORDS)
        try:
            if ids and self.store_again(ids):
                self._moved_any = True
                return True
        except DiskFull as error:
            logger.warning("log=%s reclaiming waits: %s", self._delays.log.directory, error)
        if ids:
            self._skip_plans = UNREADABLE_PLANS
        self._move_below = -1
        return False

    async def store_all_again(self, ids: Sequence[int]) -> None:
        """Store again all of these records that can be read."""
        left = dict.fromkeys(ids)
        while left:
            some = list(left)[:MOVE_RECORDS]
            before = {one: self._pending.offset_of(one) for one in some}
            if not self.store_again(some):
                return
            for one in some:
                if self._pending.offset_of(one) != before[one]:
                    del left[one]
            await yield_to_loop()

    def store_again(self, ids: Sequence[int]) -> int:
        """Store the first of these pending records again, MOVE_BYTES of them; returns how many.

        Records that cannot be read are left out.
        """
        pending_delays = self._pending
        id_at = {pending_delays.offset_of(one): one for one in ids}
        found, _ = self._records.read(list(id_at), MOVE_BYTES)
        lanes: dict[int, list[BatchRecord]] = {}
        for offset, record in found.items():
            lanes.setdefault(record.priority, []).append(replace(record, offset=id_at[offset]))
        for lane, records in lanes.items():
            self._store(lane, records)
        self.moved += len(found)
        return len(found)

    def _store(self, lane: int, records: list[BatchRecord]) -> None:
        pending_delays = self._pending
        ids = [record.offset for record in records]
        deliver_at = [pending_delays.deliver_at(one) or 0 for one in ids]
        expiries = [record.expires_at for record in records]
        batch = encode(
            [record.value for record in records],
            keys=[r.key for r in records] if any(r.key is not None for r in records) else None,
            headers=[record.headers for record in records],
            timestamps=[record.timestamp for record in records],
            expiries=expiries if any(expiries) else None,
            deliver_at=deliver_at,
            delay_offsets=ids,
            lane=lane,
        )
        base = self._delays.append(batch)
        pending_delays.moved(ids, deliver_at, base, len(batch))
