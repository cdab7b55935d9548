"""Group commit: one sync for all who wait. (Shell.)

While one round of syncs is under way, other requests queue up behind it. The next round covers all
of them with one sync per log. Within a round the logs of one folder are synced in the order of
`add`, one after the other. So an owner that adds its data log before its ledger never has a durable
ledger entry about data that is not durable. The logs of several folders are synced `hands` at a
time: a slow disk takes several requests at once, and no caller waits for the sum of all.

With an interval a thread also syncs every log that has something to sync, that often, and writes
down what is readable of the others. A failed sync fails every waiter of that log with
StorageFailed; the other logs go on. Perhaps no caller waits, so `on_failure` is called as well.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from raftq.client.common.errors import RaftqError, StorageFailed
from raftq.node.storage.log import Log
from raftq.node.storage.turns import Turns

Targets = Sequence[tuple[Log, int]]
Callback = Callable[[RaftqError | None], None]
OnFailure = Callable[[Log, Exception], None]


class Flusher:
    """A thread that syncs logs. It starts with the first log and ends with `close`."""

    def __init__(self, interval_s: float | None = None, hands: int = 1) -> None:
        self._interval_s = interval_s
        self._hands = ThreadPoolExecutor(hands, "raftq-sync") if hands > 1 else None
        self._logs: list[Log] = []
        self._waiting: list[tuple[Targets, Callback]] = []
        self._changed = threading.Condition()
        self._busy: dict[Log, None] = {}
        self._removers = 0
        self._turns = Turns(self._serve)
        # Only one round runs at a time, in whichever thread.
        self._rounds = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.rounds = 0
        """How many rounds of syncs were run, for metrics."""
        self.on_failure: OnFailure | None = None
        """Called, in the thread of the sync, with a log that refuses writes from now on."""

    def add(self, log: Log) -> None:
        """Add the log. In a round its turn is after those added before."""
        with self._changed:
            self._logs.append(log)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="raftq-flusher", daemon=True)
                self._thread.start()

    def remove(self, log: Log) -> None:
        """Remove the log. On return no sync of it is under way here."""
        with self._changed:
            self._logs = [other for other in self._logs if other is not log]
            self._removers += 1
            self._changed.wait_for(lambda: log not in self._busy)
            self._removers -= 1

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
        """Return once every log is durable up to its target. The caller may run the round
        itself."""
        if any(log.flushed_offset < target for log, target in targets):
            self._turns.take(targets)
            error = missed(targets)
            if error is not None:
                raise error

    def _serve(self, waiting: list[Targets]) -> None:
        with self._changed:
            asked = {id(log) for targets in waiting for log, _ in targets}
            logs = [log for log in self._logs if id(log) in asked and not self._closed]
        self._round(logs)

    def close(self) -> None:
        """Serve all who wait, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        if self._hands is not None:
            self._hands.shutdown()

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
            for targets, callback in waiting:
                callback(missed(targets))

    def _round(self, logs: list[Log]) -> None:
        with self._rounds:
            self.rounds += 1
            folders: dict[str, list[Log]] = {}
            for log in logs:
                if log.failure is None and log.flushed_offset < log.end_offset:
                    folders.setdefault(os.path.dirname(log.directory), []).append(log)
                elif log.has_unnoted:
                    with suppress(RaftqError):
                        log.note_readable()
            if self._hands is not None and len(folders) > 1:
                # An error of a sync belongs to its log. Anything else is raised here.
                list(self._hands.map(self._sync_all, folders.values()))
            else:
                for folder in folders.values():
                    self._sync_all(folder)

    def _sync_all(self, logs: list[Log]) -> None:
        for log in logs:
            with self._changed:
                if log not in self._logs:
                    continue
                self._busy[log] = None
            run_sync(log.sync, log, self.on_failure)
            with self._changed:
                del self._busy[log]
                # Wake only them: a needless wake-up costs more than the rest of a round.
                if self._removers:
                    self._changed.notify_all()


def run_sync(sync: Callable[[], None], log: Log, on_failure: OnFailure | None) -> None:
    """Sync a log without raising storage errors: the log remembers its failure, and its waiters
    get it."""
    try:
        sync()
    except RaftqError:
        if log.failure is not None and on_failure is not None:
            on_failure(log, log.failure)


def missed(targets: Targets) -> RaftqError | None:
    """Return why these targets were not reached, or None when they were."""
    for log, target in targets:
        if log.flushed_offset < target:
            why = log.failure or "it was truncated or removed, or the flusher is closed"
            return StorageFailed(f"{log.directory} is not synced to {target}: {why}")
    return None
