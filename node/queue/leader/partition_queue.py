"""The queue of a led partition: the service of one epoch. (Shell.)

    opening   the ledger is replayed, then everything of older epochs is waited for
    ready     requests are served; before that they wait (bounded)
    stopped   the epoch is over: requests that wait get NotLeader

The engine changes groups; this module is about time: when the engine begins, when leases end, when
waiting requests are served. The waiters of a group are served in the order they came. Events that
can make a difference wake them (new records, an ended lease, a record that is due, room for a
holder); they have no timers of their own.

When the ledger cannot be written, the queue opens again, in the same epoch, with a new engine. When
part of the ledger cannot be read, it waits for a repair from another replica. If none comes it goes
on with the rest: then records may be delivered again, but none is lost.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

from raftq.client.common.errors import (
    CorruptBatch,
    CorruptFile,
    DiskFull,
    LeaderLost,
    NotEnoughReplicas,
    RaftqError,
)
from raftq.node.queue.leader.deliveries import GroupState
from raftq.node.queue.leader.engine import LedgerEngine, QueueTools
from raftq.node.replication.leader_log import Leadership
from raftq.node.replication.partition_log import LEDGER

logger = logging.getLogger(__name__)

REPLAY_S = 0.005
"""After this time a replay lets other tasks have the event loop."""
REOPEN_S = 0.5
REPAIR_S = 1.0
REPAIR_TRIES = 10
READY_S = 10.0
AGAIN_S = 0.2
TIMER_S_MIN = 0.001
TIMER_S_MAX = 10.0
"""The wall clock may be set: no timer trusts it for longer than this."""


class Waiter(Protocol):
    """A lease request that waits for records."""

    def offer(self, queue: "PartitionQueue") -> bool:
        """There may be records: take them and leave. Returns False if nothing was taken."""

    def ended(self, queue: "PartitionQueue", error: RaftqError) -> None:
        """The queue has stopped."""


class PartitionQueue:
    """The queue of one partition, for one epoch."""

    def __init__(
        self,
        leadership: Leadership,
        tools: QueueTools,
        on_stop: Callable[["PartitionQueue"], None] = lambda queue: None,
    ) -> None:
        self.leadership = leadership
        self._tools = tools
        self._on_stop = on_stop
        self._loop = leadership.loop
        self._stopped: RaftqError | None = None
        self._waiters: dict[str, dict[Waiter, None]] = {}
        self._wake_soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._tries = 0
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.engine: LedgerEngine
        self.delay_line = tools.make_delay_line(leadership)
        self.delay_line.start()
        leadership.watch_readable(self._readable)
        self._open()

    # Life

    @property
    def is_ready(self) -> bool:
        return self.ready.done() and self._stopped is None

    async def wait_ready(self) -> None:
        """Return when requests can be served; raise when that takes too long or never comes."""
        while not self.is_ready:
            if self._stopped is not None:
                raise self._stopped
            done, _ = await asyncio.wait([self.ready], timeout=READY_S)
            if not done:
                raise NotEnoughReplicas(f"{self.leadership.ref} has a new leader; ask again")

    def _open(self) -> None:
        if self._stopped is None:
            self.engine = LedgerEngine(self.leadership, self._tools, self._lost, self._changed)
            replay = self.engine.replay(self._tries >= REPAIR_TRIES)
            self._loop.call_soon(self._replay, self.engine, replay)

    def _replay(self, engine: LedgerEngine, replay: Iterator[None]) -> None:
        """Replay for a moment, then let others have the loop."""
        if self._stopped is not None:
            return
        until = self._loop.time() + REPLAY_S
        try:
            for _ in replay:
                if self._loop.time() >= until:
                    self._loop.call_soon(self._replay, engine, replay)
                    return
        except (CorruptBatch, CorruptFile) as error:
            self._damaged(error)
            return
        self.leadership.old_epochs_replicated.add_done_callback(
            lambda settled: self._settled(engine, settled)
        )

    def _damaged(self, error: CorruptBatch | CorruptFile) -> None:
        self._tries += 1
        logger.error("partition=%s event=ledger_damaged error=%s", self.leadership.ref, error)
        if isinstance(error, CorruptBatch):
            self._tools.report_damage(self.leadership.ref, LEDGER, error)
        else:
            self._tries = REPAIR_TRIES  # the bytes are as they were written
        self._loop.call_later(REPAIR_S, self._open)

    def _settled(self, engine: LedgerEngine, settled: "asyncio.Future[None]") -> None:
        if self._stopped is not None or settled.cancelled() or settled.exception() is not None:
            return
        engine.begin()
        logger.debug(
            "partition=%s queue ready epoch=%d", self.leadership.ref, self.leadership.epoch
        )
        if not self.ready.done():
            self.ready.set_result(None)
        for group in engine.deliveries.groups.values():
            self._changed(group)
        self._wake()

    def _lost(self, error: RaftqError) -> None:
        """The ledger could not be written, and memory is ahead of it."""
        if self._stopped is not None:
            return
        logger.warning("partition=%s event=ledger_refused error=%s", self.leadership.ref, error)
        self.engine.stop(error)
        self.ready = self._loop.create_future()
        self._loop.call_later(REOPEN_S if isinstance(error, DiskFull) else 0, self._open)

    def stop(self) -> None:
        if self._stopped is not None:
            return
        self._stopped = LeaderLost(f"{self.leadership.ref} has another leader")
        self._on_stop(self)
        if self._timer is not None:
            self._timer.cancel()
        self.delay_line.stop()
        self.engine.stop(self._stopped)
        if not self.ready.done():
            self.ready.set_result(None)
        for waiters in list(self._waiters.values()):
            for waiter in list(waiters):
                waiter.ended(self, self._stopped)
        self._waiters.clear()

    def scheduled(self, base: int, batch: memoryview) -> None:
        if self._stopped is None:
            self.delay_line.scheduled(base, batch)

    # Requests that wait for records

    def park(self, group: str, waiter: Waiter) -> None:
        """Offer records of the group to this waiter when there may be some."""
        self._waiters.setdefault(group, {})[waiter] = None

    def leave(self, group: str, waiter: Waiter) -> None:
        waiters = self._waiters.get(group)
        if waiters is not None:
            waiters.pop(waiter, None)
            if not waiters:
                del self._waiters[group]

    def _readable(self) -> None:
        if self._waiters:
            self._wake_later()

    def _wake_later(self) -> None:
        if not self._wake_soon:
            self._wake_soon = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        """Offer records to the waiters, the longest waiting first."""
        self._wake_soon = False
        if not self._waiters or not self.is_ready:
            return
        engine = self.engine
        if not self.leadership.has_enough_replicas():
            self._loop.call_later(AGAIN_S, self._wake_later)
            return
        end = self.leadership.data.high_watermark
        for name, waiters in list(self._waiters.items()):
            for waiter in list(waiters):
                group = engine.deliveries.groups.get(name)
                if group is not None and group.idle_at == end:
                    break
                waiter.offer(self)

    # Time

    def _changed(self, group: GroupState) -> None:
        """A group has a new deadline, or more room, or more to give."""
        deadline = group.core.next_deadline()
        if deadline is not None:
            self._arm(min(deadline, self.engine.deliveries.clock_due(deadline)))
        if group.core.group in self._waiters:
            self._wake_later()

    def _arm(self, deadline: float) -> None:
        """Check the time at the deadline, or earlier."""
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        delay = deadline - self.engine.now()
        self._timer = self._loop.call_later(
            min(max(delay, TIMER_S_MIN), TIMER_S_MAX), self._look_at_time
        )

    def _look_at_time(self) -> None:
        self._timer = None
        if not self.is_ready:
            return
        engine = self.engine
        now = engine.now()
        deadlines = []
        for group in list(engine.deliveries.groups.values()):
            deadline = group.core.next_deadline()
            if deadline is not None and deadline <= now:
                engine.expire(group, now)
                deadline = group.core.next_deadline()
            if deadline is not None:
                deadlines.append(deadline)
        if deadlines:
            soonest = min(deadlines)
            self._arm(min(soonest, engine.deliveries.keep_time(now, soonest)))
