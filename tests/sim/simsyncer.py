"""A syncer whose syncs begin at one time and end at another, on one thread. (Test fake of Syncer.)

What a round covers is fixed when it begins; appends, truncations and closes happen before it ends,
as they do beside the thread of a `Flusher`. One round at a time: who asks meanwhile waits for the
next one.
"""

import asyncio
from contextlib import suppress
from random import Random

from raftq.client.common.errors import RaftqError
from raftq.node.storage.durability import SyncTicket
from raftq.node.storage.flusher import Callback, Targets, missed, run_sync
from raftq.node.storage.log import Log
from raftq.node.storage.syncer import LoopSyncer

_Waiting = list[tuple[Targets, Callback]]


class OverlappingSyncer(LoopSyncer):
    """Syncs files on the virtual loop instead of in threads. Each round takes up to `sync_s`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rng: Random, sync_s: float, interval_s: float
    ) -> None:
        super().__init__(loop, 0.0, interval_s)
        self._rng = rng
        self._sync_s = sync_s
        self._under_way: asyncio.TimerHandle | None = None

    def _on_tick(self) -> None:
        assert self._interval_s is not None
        if self._under_way is None:
            self._begin(self._logs, [])
        self._tick = self._loop.call_later(self._interval_s, self._on_tick)

    def _run(self) -> None:
        self._round = None
        if self._closed:
            super()._run()
        elif self._under_way is None and self._waiting:
            waiting, self._waiting = self._waiting, []
            asked = {id(log) for targets, _ in waiting for log, _ in targets}
            self._begin([log for log in self._logs if id(log) in asked], waiting)

    def _begin(self, logs: list[Log], waiting: _Waiting) -> None:
        self.rounds += 1
        tickets: list[tuple[Log, SyncTicket]] = []
        for log in logs:
            with suppress(RaftqError):
                if log.failure is None and log.flushed_offset < log.end_offset:
                    tickets.append((log, log.begin_sync()))
        if tickets or waiting:
            delay_s = self._rng.uniform(0, self._sync_s)
            self._under_way = self._loop.call_later(delay_s, self._end, tickets, waiting)

    def _end(self, tickets: list[tuple[Log, SyncTicket]], waiting: _Waiting) -> None:
        self._under_way = None
        for log, ticket in tickets:
            if any(log is one for one in self._logs):
                run_sync(ticket.run, log, self.on_failure)
        for targets, callback in waiting:
            callback(missed(targets))
        self._run()
