"""Shell: the embedded queue for asyncio, with the verbs of `Queue`.

Verbs that touch only memory and the page cache (some microseconds) run in the loop. Verbs that wait
for a disk (all under fsync `always`; open, close, sync, compact, verify) run in threads. A consumer
that waits is a future, not a thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack

from raftq.client.common.errors import QueueClosed
from raftq.node.queue.embedded.check import check_seconds
from raftq.node.queue.embedded.engine import DEFAULT_GROUP
from raftq.node.queue.embedded.message import Message
from raftq.node.queue.embedded.options import EmbeddedOptions, OpenSettings
from raftq.node.queue.embedded.queue import Queue
from raftq.node.queue.embedded.transaction import Transaction

# Callers that wait for the same fsync; more of them queue up for a thread.
THREADS_MAX = 32
WAIT_S_MAX = 3600.0

P = ParamSpec("P")
T = TypeVar("T")
Waits = Literal["never", "for fsync", "long"]
"""When a verb waits for a disk: never, only under fsync `always`, or each time."""


def _verb(
    verb: Callable[Concatenate[Queue, P], T], waits: Waits = "for fsync"
) -> "Callable[Concatenate[AsyncQueue, P], Coroutine[Any, Any, T]]":
    """The verb of a Queue as a verb of an AsyncQueue."""

    @wraps(verb)
    async def call(self: "AsyncQueue", /, *args: P.args, **keywords: P.kwargs) -> T:
        return await self._run(partial(verb, self.queue, *args, **keywords), waits)

    return call


class AsyncQueue:
    """A `Queue` for asyncio: `async with AsyncQueue.open("./orders") as q: ...`."""

    def __init__(self, path: str | Path, options: EmbeddedOptions) -> None:
        self._path = path
        self._options = options
        self._queue: Queue | None = None
        self._closed = False
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="raftq-async")

    @classmethod
    def open(cls, path: str | Path, **settings: Unpack[OpenSettings]) -> "AsyncQueue":
        """Check the settings. `async with` or `await q.start()` opens the directory."""
        return cls(path, EmbeddedOptions(**settings))

    async def start(self) -> "AsyncQueue":
        if self._queue is None:
            self._check_not_closed()
            opening = self._threads.submit(Queue, self._path, self._options)
            try:
                self._queue = await asyncio.wrap_future(opening)
            except asyncio.CancelledError:
                # The thread still opens the queue, and nothing else would close it.
                opening.add_done_callback(_close_unwanted)
                raise
        return self

    async def close(self) -> None:
        self._closed = True
        # Not in the shared threads: those may all wait for the fsync that close brings.
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        self._threads.shutdown()

    async def __aenter__(self) -> "AsyncQueue":
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def queue(self) -> Queue:
        """The queue underneath, for threads that share it."""
        if self._queue is None:
            raise QueueClosed("open the queue first: async with AsyncQueue.open(...)")
        return self._queue

    enqueue = _verb(Queue.enqueue)
    enqueue_batch = _verb(Queue.enqueue_batch)
    ack = _verb(Queue.ack)
    ack_batch = _verb(Queue.ack_batch)
    nack = _verb(Queue.nack)
    postpone = _verb(Queue.postpone)
    reject = _verb(Queue.reject)
    extend = _verb(Queue.extend)
    peek = _verb(Queue.peek, "never")
    delayed = _verb(Queue.delayed, "never")
    cancel = _verb(Queue.cancel)
    dead_letters = _verb(Queue.dead_letters, "long")
    redrive = _verb(Queue.redrive, "long")
    purge_dead_letters = _verb(Queue.purge_dead_letters, "long")
    checkpoint = _verb(Queue.checkpoint)
    checkpoints = _verb(Queue.checkpoints, "never")
    replay_from = _verb(Queue.replay_from)
    purge = _verb(Queue.purge)
    pause = _verb(Queue.pause)
    resume = _verb(Queue.resume)
    groups = _verb(Queue.groups, "never")
    delete_group = _verb(Queue.delete_group)
    compact = _verb(Queue.compact, "long")
    sync = _verb(Queue.sync, "long")
    stats = _verb(Queue.stats, "never")
    verify = _verb(Queue.verify, "long")

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        context = self.queue.transaction()
        tx = context.__enter__()
        try:
            yield tx
        except BaseException as error:
            if not context.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            await self._run(lambda: context.__exit__(None, None, None))

    async def dequeue(
        self,
        timeout: float | None = 0.0,  # noqa: ASYNC109 - a verb of the queue, not a cancellation
        *,
        group: str = DEFAULT_GROUP,
        visibility_timeout: float | None = None,
    ) -> Message | None:
        found = await self.dequeue_batch(
            1, timeout, group=group, visibility_timeout=visibility_timeout
        )
        return found[0] if found else None

    async def dequeue_batch(
        self,
        max_messages: int,
        timeout: float | None = 0.0,  # noqa: ASYNC109 - a verb of the queue, not a cancellation
        *,
        group: str = DEFAULT_GROUP,
        visibility_timeout: float | None = None,
    ) -> list[Message]:
        queue = self.queue
        loop = asyncio.get_running_loop()
        until = None if timeout is None else loop.time() + check_seconds(timeout, "timeout")
        with queue.listen(loop) as news:
            while True:
                news.clear()
                found = queue.dequeue_batch(
                    max_messages, 0.0, group=group, visibility_timeout=visibility_timeout
                )
                left = WAIT_S_MAX if until is None else until - loop.time()
                if found or left <= 0:
                    return found
                try:
                    async with asyncio.timeout(max(0.0, min(left, queue.due_in(), WAIT_S_MAX))):
                        await news.wait()
                except TimeoutError:
                    # Nothing was announced; look once more, something may be due by now.
                    continue

    async def subscribe(
        self,
        group: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - a verb of the queue
        auto_ack: bool = True,
        visibility_timeout: float | None = None,
    ) -> AsyncIterator[Message]:
        while True:
            message = await self.dequeue(
                timeout, group=group, visibility_timeout=visibility_timeout
            )
            if message is None:
                return
            done = False
            try:
                yield message
                done = True
            finally:
                if auto_ack and not done:
                    self.queue.give_back(message)
            if auto_ack:
                await self._run(partial(self.queue.finish, message))

    async def _run(self, call: Callable[[], T], waits: Waits = "for fsync") -> T:
        """In the loop if the call cannot wait for the disk, else in a thread."""
        if waits == "never" or (waits == "for fsync" and self._options.fsync != "always"):
            return call()
        self._check_not_closed()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _check_not_closed(self) -> None:
        if self._closed:
            raise QueueClosed(f"queue {str(self._path)!r} is closed")


def _close_unwanted(opening: "Future[Queue]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
