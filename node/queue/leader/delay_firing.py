"""Moving due records of the delays log to the data log, and marking what was moved. (Shell.)

delay_line.py explains the marks. A few hundred records are moved at once, and no more while
OUT_BYTES_MAX of moved records are not replicated.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from raftq.client.common.errors import DiskFull, NotLeader, RaftqError
from raftq.client.wire.batch import encode
from raftq.client.wire.record import BatchRecord
from raftq.node.queue.leader.delay_marks import Rebuilt, fired, seen
from raftq.node.queue.leader.delay_reclaim import Reclaim
from raftq.node.queue.leader.record_reader import RecordReader
from raftq.node.replication.leader_log import LeaderLog, Leadership

logger = logging.getLogger(__name__)

FIRE_RECORDS = 128
"""At once, or twice as many: a few ms of work."""
FIRE_BYTES = 1024 * 1024
READ_BYTES = 4 * 1024 * 1024
OUT_BYTES_MAX = 16 * 1024 * 1024
"""Fired and not replicated yet; more has to wait."""
MARK_S = 0.05
UPKEEP_S = 1.0
SEEN_RECORDS = 10_000
"""How much of the data log the next leader may have to search."""
DAMAGED_S = 5.0
FULL_S = 1.0
POOR_S = 0.1
IDLE_S = 3_600.0


@dataclass(slots=True)
class Out:
    """Records that were appended to the data log: up to `end`, `size` bytes."""

    ids: list[int]
    base: int
    end: int
    size: int


@dataclass(slots=True)
class DelayCounts:
    """What happened since this leader took over."""

    scheduled: int = 0
    fired: int = 0
    cancelled: int = 0
    delay_ms_sum: int = 0
    late_ms_max: int = 0
    late_ms_sum: int = 0


class Firing:
    """Fires due records, for one epoch. It calls `wake` when it can go on."""

    def __init__(  # noqa: PLR0913 - what the delay line hands on
        self,
        leadership: Leadership,
        delays: LeaderLog,
        rebuilt: Rebuilt,
        records: RecordReader,
        counts: DelayCounts,
        wall_ms: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self.leadership = leadership
        self.pending_delays = rebuilt.pending_delays
        self.counts = counts
        self.reclaim = Reclaim(delays, self.pending_delays, records)
        self._delays = delays
        self._records = records
        self._wall_ms = wall_ms
        self._wake = wake
        self._out = deque(Out(ids, base, end, 0) for ids, base, end in rebuilt.unmarked)
        self._out_bytes = 0
        self._seen_end = rebuilt.seen_end
        self._marks_at = 0.0
        self._upkeep_at = 0.0
        self._hold_until = 0.0

    def turn(self, unknown: int | None) -> float:
        """Do what is due for a moment; the seconds until there is something to do again.

        `unknown` is where the records begin that are in the log but not in the book yet.
        """
        now = self.leadership.loop.time()
        self.pending_delays.work()
        more = self._fire(now)
        if self._out and now >= self._marks_at:
            self._mark(now)
        if now >= self._upkeep_at:
            self._upkeep(now, unknown)
        if self.reclaim.is_moving and not more:
            more = self.reclaim.step()
            if self.reclaim.wants_plan:
                self._upkeep_at = now
        return 0.0 if more else self._idle_s(now)

    def _idle_s(self, now: float) -> float:
        waits = [IDLE_S]
        due = self.pending_delays.next_due_ms()
        if due is not None and self._out_bytes < OUT_BYTES_MAX:
            held = max(self._hold_until - now, 0.0)
            waits.append(max((due - self._wall_ms()) / 1000, held, 0.001))
        if self._out and self._out[0].end <= self.leadership.data.high_watermark:
            waits.append(max(self._marks_at - now, 0.001))
        if len(self.pending_delays) or self._out or self.reclaim.has_work:
            waits.append(max(self._upkeep_at - now, 0.001))
        return min(waits)

    def read(
        self, ids: Iterable[int], bytes_max: int = READ_BYTES
    ) -> tuple[dict[int, BatchRecord], list[int]]:
        """Records of pending ids, with the ids as their offsets, and the ids that were too much."""
        pending = self.pending_delays
        id_at = {pending.offset_of(one): one for one in ids if one in pending}
        found, rest = self._records.read(list(id_at), bytes_max)
        records = {}
        for offset, record in found.items():
            delay_id = id_at[offset]
            if delay_id != offset:
                record = replace(record, offset=delay_id)
            records[delay_id] = record
        return records, [id_at[offset] for offset in rest]

    # Firing

    def _fire(self, now: float) -> bool:
        """Move some due records to the data log; whether to go on at once."""
        if now < self._hold_until or self._out_bytes >= OUT_BYTES_MAX:
            return False
        wall = self._wall_ms()
        ids, more = self.pending_delays.due(wall, FIRE_RECORDS)
        if not ids:
            return more
        if not self.leadership.has_enough_replicas():
            self._hold(ids, now + POOR_S)
            return False
        lanes, rest = self._gather(ids, wall)
        while lanes:
            lane, records = lanes.popitem()
            try:
                self._append(lane, records, wall)
            except DiskFull as error:
                logger.warning("partition=%s firing waits: %s", self.leadership.ref, error)
                for others in (records, *lanes.values()):
                    rest += [record.offset for record in others]
                self._hold(rest, now + FULL_S)
                return False
        self.pending_delays.again(rest, 0)
        return more or bool(rest)

    def _hold(self, ids: Sequence[int], until: float) -> None:
        self._hold_until = until
        self.pending_delays.again(ids, 0)

    def _gather(self, ids: list[int], wall: int) -> tuple[dict[int, list[BatchRecord]], list[int]]:
        """The records by lane, their offsets being their ids, and those that have to wait."""
        found, rest = self.read(ids, FIRE_BYTES)
        lanes: dict[int, list[BatchRecord]] = {}
        for one in ids:
            record = found.get(one)
            if record is not None:
                lanes.setdefault(record.priority, []).append(record)
        if len(found) + len(rest) < len(ids):
            # Not given up: the log's damage is repaired from another replica.
            left = dict.fromkeys(rest)
            damaged = [one for one in ids if one not in found and one not in left]
            self.pending_delays.again(damaged, wall + int(DAMAGED_S * 1000))
        return lanes, rest

    def _append(self, lane: int, records: list[BatchRecord], wall: int) -> None:
        expiries = [record.expires_at for record in records]
        ids = [record.offset for record in records]
        batch = encode(
            [record.value for record in records],
            keys=[r.key for r in records] if any(r.key is not None for r in records) else None,
            headers=[record.headers for record in records],
            timestamps=wall,
            expiries=expiries if any(expiries) else None,
            delay_offsets=ids,
            lane=lane,
        )
        data = self.leadership.data
        base = data.append(batch)
        out = Out(ids, base, base + len(ids), len(batch))
        counts, pending_delays = self.counts, self.pending_delays
        counts.fired += len(ids)
        late = [wall - (pending_delays.deliver_at(one) or wall) for one in ids]
        counts.late_ms_max = max(counts.late_ms_max, max(late))
        counts.late_ms_sum += sum(late)
        pending_delays.fired(ids)
        self._out.append(out)
        self._out_bytes += out.size
        data.replicated(out.end).add_done_callback(lambda done: self._replicated(done, out.size))

    def _replicated(self, done: "asyncio.Future[None]", size: int) -> None:
        before, self._out_bytes = self._out_bytes, self._out_bytes - size
        failed = done.cancelled() or done.exception() is not None
        # Marks can wait for a while, others that are due cannot.
        if before >= OUT_BYTES_MAX > self._out_bytes and not failed:
            self._wake()

    # Marks and upkeep

    def _mark(self, now: float) -> None:
        """Mark what is replicated in the data log."""
        self._marks_at = now + MARK_S
        readable = self.leadership.data.high_watermark
        done: list[Out] = []
        for out in self._out:
            if out.end > readable:
                break
            done.append(out)
        if not done:
            return
        try:
            self._delays.append(fired([(out.ids, out.end) for out in done]))
        except DiskFull as error:
            logger.warning("partition=%s marks wait: %s", self.leadership.ref, error)
            self._marks_at = now + FULL_S
            return
        self._seen_end = max(self._seen_end, done[-1].end)
        for out in done:
            self._out.popleft()
            self.reclaim.fired(out.ids, out.end)

    def _upkeep(self, now: float, unknown: int | None) -> None:
        self._upkeep_at = now + UPKEEP_S
        data = self.leadership.data
        self.reclaim.flushed(
            data.high_watermark
            if self.leadership.config.fsync == "none"
            else data.log.flushed_offset
        )
        known = self._out[0].base if self._out else data.high_watermark
        try:
            if len(self.pending_delays) and known - self._seen_end > SEEN_RECORDS:
                self._delays.append(seen(known))
                self._seen_end = known
            if self.reclaim.plan(unknown):
                self._delays.append(seen(max(known, self._seen_end)))
                self._seen_end = max(known, self._seen_end)
                self.reclaim.drop_after(self._delays.log.end_offset)
        except DiskFull as error:
            logger.warning("partition=%s upkeep of delays waits: %s", self.leadership.ref, error)
        except RaftqError as error:
            if isinstance(error, NotLeader):
                raise
            logger.error("partition=%s upkeep of delays failed: %s", self.leadership.ref, error)
