"""What owners of logs need to make them durable, and an implementation on the loop. (Shell.)

`Syncer` is a protocol because it has two implementations: the `Flusher` with its thread, and the
`LoopSyncer`, which syncs on the event loop itself, for simulations and tests.
"""

import asyncio
from contextlib import suppress
from typing import Protocol

from raftq.client.common.errors import RaftqError, StorageFailed
from raftq.node.storage.flusher import Callback, OnFailure, Targets, missed, run_sync
from raftq.node.storage.log import Log


class Syncer(Protocol):
    """Syncs logs for many callers at once. See `Flusher` for what the calls promise."""

    on_failure: OnFailure | None

    def add(self, log: Log) -> None: ...

    def remove(self, log: Log) -> None: ...

    def submit(self, targets: Targets, callback: Callback) -> None: ...

    def close(self) -> None: ...


class LoopSyncer:
    """Syncs from a timer of the loop, `delay_s` after the first request of a round.

    With an interval it also syncs every log that has something to sync, that often.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, delay_s: float = 0.0, interval_s: float | None = None
    ) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._interval_s = interval_s
        self._logs: list[Log] = []
        self._waiting: list[tuple[Targets, Callback]] = []
        self._round: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._closed = False
        self.rounds = 0
        """How many rounds of syncs were run."""
        self.on_failure: OnFailure | None = None

    def add(self, log: Log) -> None:
        self._logs.append(log)
        if self._tick is None and self._interval_s is not None and not self._closed:
            self._tick = self._loop.call_later(self._interval_s, self._on_tick)

    def remove(self, log: Log) -> None:
        self._logs = [other for other in self._logs if other is not log]

    def submit(self, targets: Targets, callback: Callback) -> None:
        """Call back from a timer of the loop; at once when nothing is left to do."""
        if all(log.flushed_offset >= target for log, target in targets):
            callback(None)
        elif self._closed:
            callback(StorageFailed("the syncer is closed"))
        else:
            self._waiting.append((targets, callback))
            if self._round is None:
                self._round = self._loop.call_later(self._delay_s, self._run)

    def close(self) -> None:
        """Serve all who wait, then do nothing more."""
        self._closed = True
        for timer in (self._round, self._tick):
            if timer is not None:
                timer.cancel()
        self._tick = None
        self._run()

    def _on_tick(self) -> None:
        assert self._interval_s is not None
        self._sync(self._logs)
        self._tick = self._loop.call_later(self._interval_s, self._on_tick)

    def _run(self) -> None:
        self._round = None
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        asked = {id(log) for targets, _ in waiting for log, _ in targets}
        self._sync([log for log in self._logs if id(log) in asked])
        for targets, callback in waiting:
            callback(missed(targets))

    def _sync(self, logs: list[Log]) -> None:
        self.rounds += 1
        for log in list(logs):
            if log.failure is None and log.flushed_offset < log.end_offset:
                run_sync(log.sync, log, self.on_failure)
            elif log.has_unnoted:
                with suppress(RaftqError):
                    log.note_readable()
