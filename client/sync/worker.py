"""Shell: the blocking worker: the asyncio one runs on the loop's thread."""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunning
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, Unpack

from raftq.client.common.errors import InvalidArgument, RaftqError
from raftq.client.options import Bootstrap
from raftq.client.queue.options import WorkerSettings
from raftq.client.queue.worker import Worker as AsyncWorker
from raftq.client.sync import loop_thread


class Worker:
    """Calls a handler with each record of its topics:
    `Worker("127.0.0.1:7070", group="emails", topics=["orders"], handler=handle).run()`.

    Settings are the fields of WorkerOptions. Handlers that are plain functions run in threads;
    coroutine functions on the client's own loop, which they must not block. A worker runs once.
    """

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[WorkerSettings]) -> None:
        self._client = AsyncWorker(bootstrap, **settings)
        self._guard = threading.Lock()
        self._thread: loop_thread.LoopThread | None = None
        self._ended: Future[None] = Future()
        self._refusal: str | None = None

    @property
    def counts(self) -> "Counter[str]":
        """How many records were acked, nacked, rejected, lost, released so far."""
        return self._client.counts

    def start(self) -> Self:
        """Work in the background, until `stop`."""
        with self._guard:
            if self._thread is not None:
                raise InvalidArgument("a worker runs once")
            self._thread = loop_thread.join(self)
        self._thread.spawn(self._client.run(), self._done)
        return self

    def run(self) -> None:
        """Work until `stop`; in the main thread SIGINT and SIGTERM mean that."""
        with self._signals():
            self.start()
            self.wait()

    def stop(self) -> None:
        """End soon: handlers that run may finish, the rest is given back. Does not wait."""
        thread = self._thread
        if thread is not None and not self._ended.done() and self._refusal is None:
            thread.post(self._client.stop)
        else:
            self._client._stopping = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the worker has ended; whether it did in time. Raises what ended it."""
        try:
            self._ended.result(timeout)
        except StillRunning:
            if self._ended.done():
                raise
            return False
        finally:
            if self._thread is not None and self._ended.done():
                self._thread.await_end()
        return True

    def forbid(self, reason: str) -> None:
        self._refusal = reason
        if not self._ended.done():
            self._ended.set_result(None)

    def _done(self, error: BaseException | None) -> None:
        """On the loop's thread, which ends itself with its last client."""
        assert self._thread is not None
        loop_thread.leave(self, self._thread)
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        here = threading.current_thread() is threading.main_thread()
        if not here or not self._client.options.handle_signals:
            yield
            return
        before: dict[signal.Signals, Any] = {}
        handle: Callable[[int, Any], None] = lambda number, frame: self.stop()  # noqa: E731
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        try:
            self.wait()
        except RaftqError:
            if kind is None:
                raise
