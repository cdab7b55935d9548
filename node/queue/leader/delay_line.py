"""The delays log of a led partition: schedule, fire, cancel, list. (Shell.)

What stands in the log, and what each says of records, which are known by their ids
(pending_delays.py):

    batch with deliver_at                     new records: their ids are their offsets
    batch with deliver_at and delay_offsets   pending records stored again; delay_offsets are ids
    CANCELLED ids                             they never fire
    FIRED [(ids, data_end)]                   they are in the data log, below data_end
    SEEN data_end                             whatever fired below data_end has its mark
    REWOUND data_end                          the same, and what was said of data beyond it is void

A record that is due is appended to the data log, in a batch whose delay_offsets name the ids; that
append is what decides. The FIRED mark follows once the batch is replicated, and only saves the next
leader from searching the data log: it reads its delays log, and then its data log from where
everything has a mark. Since a record is fired only when the log has it replicated, and whoever
becomes leader has everything replicated of both, a record is never lost. And since whatever the new
leader has in its data log is the truth, it never fires twice: a batch that it does not have was
never readable.

Cancel and fire are decided one after the other by the same leader, in memory, and each is appended
in the same turn: so one of them wins, and a cancel is answered when it is replicated.

The log's beginning goes as soon as nothing below is pending. When most of the log is done but
some of its beginning is not, the pending records of the first segment are stored again at the end,
so that the log is at most a small multiple of what is pending (delay_reclaim.py).
"""

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from raftq.client.common.errors import (
    CorruptBatch,
    DiskFull,
    NotEnoughReplicas,
    NotLeader,
)
from raftq.client.common.tasks import Tasks, sleep, yield_to_loop
from raftq.client.wire.batch import Batch, encode
from raftq.client.wire.record import BatchRecord
from raftq.node.queue.core.pending_delays import PendingDelays
from raftq.node.queue.leader.delay_firing import DelayCounts, Firing
from raftq.node.queue.leader.delay_marks import (
    CANCELLED_KEPT,
    Rebuilt,
    cancelled,
    rebuild,
    rewound,
)
from raftq.node.queue.leader.record_reader import RecordReader
from raftq.node.replication.leader_log import LeaderLog, Leadership

logger = logging.getLogger(__name__)

READY_S = 10.0
RETRY_S = 1.0
CONTROL_IDS_MAX = 100_000


class DelayLine:
    """The delayed records of one partition, for one epoch."""

    def __init__(
        self,
        leadership: Leadership,
        wall_ms: Callable[[], int],
        on_damage: Callable[[CorruptBatch], None] = lambda error: None,
        on_broken: Callable[[BaseException], None] | None = None,
    ) -> None:
        assert leadership.delays is not None, leadership.ref
        self.leadership = leadership
        self.counts = DelayCounts()
        self.pending_delays = PendingDelays()
        self._delays: LeaderLog = leadership.delays
        self._wall_ms = wall_ms
        self._on_broken = on_broken
        self._records = RecordReader(self._delays.log, on_damage)
        # What comes after these ends is this leader's own doing.
        self._began = (self._delays.log.end_offset, leadership.data.log.end_offset)
        self._staged: deque[tuple[int, int, array[int], int]] = deque()
        self._firing: Firing
        self._cancelled: dict[int, None] = {}
        self._ready: asyncio.Future[None] = leadership.loop.create_future()
        self._awake: asyncio.Future[None] = leadership.loop.create_future()
        self._awaiting = -1
        self._tasks = Tasks(f"the delays of {leadership.ref}")
        self._stopped = False

    def start(self) -> None:
        """Begin to rebuild what the log says, and then to fire."""
        self._tasks.spawn(self._run())

    def stop(self) -> None:
        """The epoch is over."""
        if not self._stopped:
            self._stopped = True
            self._tasks.cancel()
            if not self._ready.done():
                self._ready.set_exception(self._not_leader())
                self._ready.exception()

    def _not_leader(self) -> NotLeader:
        return NotLeader(f"the delays of {self.leadership.ref} have another leader")

    # What others ask

    def scheduled(self, base: int, raw: memoryview) -> None:
        """The partition has appended a batch of delayed records."""
        if self._stopped:
            return
        batch = Batch(bytes(raw))
        deliver_at = array("q", batch.deliver_at() or ())
        self._staged.append((batch.end_offset, base, deliver_at, batch.length))
        self._records.learn(batch)
        counts = self.counts
        counts.scheduled += len(deliver_at)
        now = self._wall_ms()
        counts.delay_ms_sum += max(sum(deliver_at) - now * len(deliver_at), 0)
        self._await_staged()

    async def cancel(self, ids: Sequence[int]) -> list[int]:
        """Those of them that never fire because of this, or of an earlier cancel.

        Returns when that is replicated.
        """
        await self._until_ready()
        self._take_staged()
        wanted = list(dict.fromkeys(ids))
        pending = [one for one in wanted if one in self.pending_delays]
        for start in range(0, len(pending), CONTROL_IDS_MAX):
            part = pending[start : start + CONTROL_IDS_MAX]
            self._delays.append(cancelled(part))
            self.pending_delays.cancelled(part)
            self.counts.cancelled += len(part)
            self._remember_cancelled(part)
        known = [one for one in wanted if one in self._cancelled]
        if known:
            await self._delays.replicated(self._delays.log.end_offset)
        return known

    async def listed(self, skip: int, limit: int) -> list[tuple[int, int]]:
        """(id, deliver_at) of pending records in the order they are due."""
        await self._until_ready()
        self._take_staged()
        for found in self.pending_delays.page(skip, limit):
            if found is not None:
                return found
            await yield_to_loop()
        return []

    async def find(self, delay_id: int) -> list[tuple[int, int]]:
        """The same for one record, if it is pending."""
        await self._until_ready()
        self._take_staged()
        due = self.pending_delays.deliver_at(delay_id)
        return [] if due is None else [(delay_id, due)]

    def read(self, ids: Iterable[int]) -> dict[int, BatchRecord]:
        """The stored records of pending ids, as far as they can be read; offset is the id."""
        return self._firing.read(ids)[0]

    async def _until_ready(self) -> None:
        if not self._ready.done():
            await asyncio.wait((self._ready,), timeout=READY_S)
        if not self._ready.done():
            raise NotEnoughReplicas(f"{self.leadership.ref} has a new leader; ask again")
        self._ready.result()
        if self._stopped or not self.leadership.active:
            raise self._not_leader()

    @property
    def pending_count(self) -> int:
        """Records that are not due yet, also those that are not replicated yet."""
        return len(self.pending_delays) + sum(
            len(deliver_at) for _, _, deliver_at, _ in self._staged
        )

    def _remember_cancelled(self, ids: Iterable[int]) -> None:
        """So that a cancel that is sent again gets the same answer."""
        known = self._cancelled
        known.update(dict.fromkeys(ids))
        while len(known) > CANCELLED_KEPT:
            del known[next(iter(known))]

    # Life

    async def _run(self) -> None:
        try:
            while not await self._took_over():
                await sleep(RETRY_S)
            while self.leadership.active:
                self._take_staged()
                delay = self._firing.turn(self._staged[0][1] if self._staged else None)
                if delay > 0:
                    await self._sleep(delay)
                else:
                    await yield_to_loop()
        except NotLeader:
            self.stop()
        except Exception as error:
            if self._on_broken is None:
                raise
            self._on_broken(error)

    async def _took_over(self) -> bool:
        try:
            await self._take_over()
        except DiskFull as error:
            logger.warning("partition=%s delays wait: %s", self.leadership.ref, error)
            return False
        return True

    async def _take_over(self) -> None:
        leadership, delays = self.leadership, self._delays
        delays_end, data_end = self._began
        learn = self._records.learn
        rebuilt = await rebuild(delays.log, leadership.data.log, delays_end, data_end, learn)
        self.pending_delays = rebuilt.pending_delays
        self._firing = Firing(
            leadership, delays, rebuilt, self._records, self.counts, self._wall_ms, self._wake_up
        )
        await asyncio.shield(leadership.old_epochs_replicated)
        await delays.replicated(delays_end)
        for _ in self.pending_delays.load(self._wall_ms()):
            await yield_to_loop()
        self._remember_cancelled(rebuilt.cancelled)
        await self._make_whole(rebuilt)
        if not self._ready.done():
            self._ready.set_result(None)
        logger.info(
            "partition=%s delays taken over: %s", leadership.ref, self.pending_delays.describe()
        )

    async def _make_whole(self, rebuilt: Rebuilt) -> None:
        """Make up for what a loss of power took from one log and left in the other."""
        delays = self._delays
        lost = rebuilt.ids_end - delays.log.end_offset
        if lost > 0:
            # The data log names records that this log does not have any more. Their offsets are
            # spent: others at them would look fired.
            delays.append(encode([], offset_deltas=[], span=lost, control=True))
        if rebuilt.void:
            logger.error(
                "partition=%s data lost records that had fired: %d fire again",
                self.leadership.ref, len(rebuilt.void),
            )  # fmt: skip
            await self._firing.reclaim.store_all_again(rebuilt.void)
        if rebuilt.rewinds:
            delays.append(rewound(rebuilt.seen_end))
            await delays.replicated(delays.log.end_offset)

    async def _sleep(self, seconds: float) -> None:
        loop = self.leadership.loop
        awake = self._awake = loop.create_future()
        timer = loop.call_later(seconds, _wake, awake)
        try:
            await awake
        finally:
            timer.cancel()

    def _wake_up(self) -> None:
        _wake(self._awake)

    # Scheduling

    def _await_staged(self) -> None:
        """Wait for the last staged batch to be replicated; one question at a time."""
        if not self._staged or self._awaiting >= 0:
            return
        end = self._staged[-1][0]
        if end <= self._delays.high_watermark:
            self._wake_up()
            return
        self._awaiting = end
        self._delays.replicated(end).add_done_callback(self._staged_replicated)

    def _staged_replicated(self, done: "asyncio.Future[None]") -> None:
        self._awaiting = -1
        if not done.cancelled() and done.exception() is None and not self._stopped:
            self._wake_up()
            if self._staged and self._staged[-1][0] > self._delays.high_watermark:
                self._await_staged()

    def _take_staged(self) -> None:
        """Into the book with what is replicated: only that may fire."""
        staged, readable = self._staged, self._delays.high_watermark
        while staged and staged[0][0] <= readable:
            _, base, deliver_at, size = staged.popleft()
            self.pending_delays.scheduled(base, deliver_at, size)


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
