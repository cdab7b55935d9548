"""Group commit: one thread that syncs logs for everybody who waits. (Shell.)

While one round of syncs is under way, others queue up behind it; the next round covers all of them
with one sync per log. Within a round logs are synced in the order of `add`, one after the other, so
an owner that adds its data log before its ledger never has a durable ledger entry about data that
is not.

With an interval the thread also syncs every log that has something to sync, that often. A failed
sync fails every waiter of that log with StorageFailed; the other logs go on.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from raftq.client.wire.errors import RaftqError, StorageFailed
from raftq.node.storage.log import Log

Targets = Sequence[tuple[Log, int]]
Callback = Callable[[RaftqError | None], None]


class Flusher:
    """The thread; it starts with the first log and ends with `close`."""

    def __init__(self, interval_s: float | None = None) -> None:
        self._interval_s = interval_s
        self._logs: list[Log] = []
        self._waiting: list[tuple[Targets, Callback]] = []
        self._changed = threading.Condition()
        self._busy: Log | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self.rounds = 0
        """How many rounds of syncs were run, for metrics."""

    def add(self, log: Log) -> None:
        """Take care of the log; its place in a round is after those added before."""
        with self._changed:
            self._logs.append(log)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="raftq-flusher", daemon=True)
                self._thread.start()

    def remove(self, log: Log) -> None:
        """Forget the log; on return no sync of it is under way here."""
        with self._changed:
            self._logs = [other for other in self._logs if other is not log]
            self._changed.wait_for(lambda: self._busy is not log)

    def submit(self, targets: Targets, callback: Callback) -> None:
        """Call back from the flusher's thread once every log is durable up to its target.

        The callback gets None or the error, and must be quick and not raise. It is called at once,
        in the caller's thread, when nothing is left to do.
        """
        if all(log.flushed_offset >= target for log, target in targets):
            callback(None)
            return
        with self._changed:
            if not self._closed and self._thread is not None:
                self._waiting.append((targets, callback))
                self._changed.notify_all()
                return
        callback(StorageFailed("the flusher is closed"))

    def wait(self, targets: Targets) -> None:
        """Return once every log is durable up to its target."""
        done = threading.Lock()
        done.acquire()
        errors: list[RaftqError | None] = []

        def finish(error: RaftqError | None) -> None:
            errors.append(error)
            done.release()

        self.submit(targets, finish)
        done.acquire()
        if errors[0] is not None:
            raise errors[0]

    def close(self) -> None:
        """Serve who is waiting, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed, self._interval_s)
                waiting, self._waiting = self._waiting, []
                if self._closed and not waiting:
                    return
                logs = list(self._logs)
            if self._interval_s is None:
                asked = {id(log) for targets, _ in waiting for log, _ in targets}
                logs = [log for log in logs if id(log) in asked]
            self._round(logs)
            self._answer(waiting)

    def _round(self, logs: list[Log]) -> None:
        self.rounds += 1
        for log in logs:
            with self._changed:
                if log not in self._logs:
                    continue
                self._busy = log
            # The log remembers its failure; `_answer` tells those who wait for it.
            with suppress(RaftqError):
                if log.failure is None and log.flushed_offset < log.end_offset:
                    log.begin_sync().run()
            with self._changed:
                self._busy = None
                self._changed.notify_all()

    def _answer(self, waiting: list[tuple[Targets, Callback]]) -> None:
        for targets, callback in waiting:
            error: RaftqError | None = None
            for log, target in targets:
                if log.flushed_offset < target and error is None:
                    why = log.failure or "it was truncated or removed"
                    error = StorageFailed(f"{log.directory} is not synced to {target}: {why}")
            callback(error)
