"""Shell: the embedded queue for asyncio, with the verbs of `Queue`.

Calls that only touch memory and the page cache (some microseconds) run in the loop; what waits for
a disk (fsync `always`, open, close, sync, compact, verify) runs in threads of its own. A consumer
that waits is a future, not a thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TypedDict, TypeVar, Unpack

from raftq.client.common.errors import QueueClosed
from raftq.client.wire.record import Headers
from raftq.node.queue.embedded.check import check_seconds
from raftq.node.queue.embedded.engine import DEFAULT_GROUP
from raftq.node.queue.embedded.message import DeadMessage, DelayedMessage, Message, QueueStats
from raftq.node.queue.embedded.options import EmbeddedOptions
from raftq.node.queue.embedded.queue import Queue
from raftq.node.queue.embedded.transaction import Transaction

# Callers that wait for the same fsync; more of them queue up for a thread.
THREADS_MAX = 32
WAIT_S_MAX = 3600.0

T = TypeVar("T")


class OpenKeywords(TypedDict, total=False):
    """The settings of `Queue.open`, explained in QueueOptions."""

    fsync: str
    fsync_interval: float
    visibility_timeout: float
    max_deliveries: int
    backoff: float
    backoff_max: float
    backoff_jitter: float
    in_flight_max: int
    max_messages: int | None
    max_bytes: int | None
    value_bytes_max: int
    retention: float | None
    retention_bytes: int | None
    dead_letter_retention: float | None
    dead_letter_expired: bool
    dedup_window: float
    compression: str
    segment_bytes: int
    reserve_bytes: int
    page_cache_bytes: int | None


class EnqueueKeywords(TypedDict, total=False):
    """What can be said about a message, as in `Queue.enqueue`."""

    key: bytes | None
    priority: str | int
    delay: float | None
    deliver_at: float | None
    ttl: float | None
    headers: Headers | None
    dedup_id: str | None


class BatchKeywords(TypedDict, total=False):
    """What can be said about a batch, as in `Queue.enqueue_batch`."""

    keys: Sequence[bytes | None] | None
    priority: str | int
    delay: float | None
    deliver_at: float | None
    ttl: float | None
    headers: Sequence[Headers | None] | None


class AsyncQueue:
    """A `Queue` for asyncio: `async with AsyncQueue.open("./orders") as q: ...`."""

    def __init__(self, path: str | Path, options: EmbeddedOptions) -> None:
        self._path = path
        self._options = options
        self._queue: Queue | None = None
        self._closed = False
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="raftq-async")

    @classmethod
    def open(cls, path: str | Path, **settings: Unpack[OpenKeywords]) -> "AsyncQueue":
        """Checks the settings; the directory is opened by `async with` (or `await q.start()`)."""
        return cls(path, EmbeddedOptions(**settings))

    async def start(self) -> "AsyncQueue":
        if self._queue is None:
            self._check_not_closed()
            opening = self._threads.submit(Queue, self._path, self._options)
            try:
                self._queue = await asyncio.wrap_future(opening)
            except asyncio.CancelledError:
                # Nobody will ever close what the thread is still opening.
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def queue(self) -> Queue:
        """The queue underneath, for threads that share it."""
        if self._queue is None:
            raise QueueClosed("open the queue first: async with AsyncQueue.open(...)")
        return self._queue

    async def enqueue(self, value: bytes, **about: Unpack[EnqueueKeywords]) -> str:
        return await self._durably(lambda: self.queue.enqueue(value, **about))

    async def enqueue_batch(
        self, values: Sequence[bytes], **about: Unpack[BatchKeywords]
    ) -> list[str]:
        return await self._durably(lambda: self.queue.enqueue_batch(values, **about))

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
            await self._durably(lambda: context.__exit__(None, None, None))

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
                held = message
                await self._durably(lambda held=held: self.queue.finish(held))  # type: ignore[misc]

    async def ack(self, message: Message) -> None:
        await self._durably(lambda: self.queue.ack(message))

    async def ack_batch(self, messages: Iterable[Message]) -> None:
        await self._durably(lambda: self.queue.ack_batch(messages))

    async def nack(self, message: Message, delay: float | None = None) -> None:
        await self._durably(lambda: self.queue.nack(message, delay))

    async def postpone(self, message: Message, delay: float) -> None:
        await self._durably(lambda: self.queue.postpone(message, delay))

    async def reject(self, message: Message, reason: str, error: str = "") -> None:
        await self._durably(lambda: self.queue.reject(message, reason, error))

    async def extend(self, message: Message, extension: float) -> None:
        await self._durably(lambda: self.queue.extend(message, extension))

    async def peek(self, max_messages: int = 10, *, group: str = DEFAULT_GROUP) -> list[Message]:
        return self.queue.peek(max_messages, group=group)

    async def delayed(self, limit: int = 1000) -> list[DelayedMessage]:
        return self.queue.delayed(limit)

    async def cancel(self, message_id: str) -> bool:
        return await self._durably(lambda: self.queue.cancel(message_id))

    async def dead_letters(
        self, *, reason: str | None = None, limit: int | None = None
    ) -> list[DeadMessage]:
        return await self._in_thread(lambda: self.queue.dead_letters(reason=reason, limit=limit))

    async def redrive(self, reason: str | None = None, limit: int | None = None) -> int:
        return await self._in_thread(lambda: self.queue.redrive(reason, limit))

    async def purge_dead_letters(self) -> int:
        return await self._in_thread(self.queue.purge_dead_letters)

    async def checkpoint(self, name: str, *, group: str = DEFAULT_GROUP) -> int:
        return await self._durably(lambda: self.queue.checkpoint(name, group=group))

    async def checkpoints(self) -> dict[str, int]:
        return self.queue.checkpoints()

    async def replay_from(
        self,
        *,
        offset: int | None = None,
        timestamp: float | None = None,
        checkpoint: str | None = None,
        group: str = DEFAULT_GROUP,
    ) -> int:
        return await self._durably(
            lambda: self.queue.replay_from(
                offset=offset, timestamp=timestamp, checkpoint=checkpoint, group=group
            )
        )

    async def purge(self) -> int:
        return await self._durably(self.queue.purge)

    async def pause(self, *, group: str = DEFAULT_GROUP) -> None:
        await self._durably(lambda: self.queue.pause(group=group))

    async def resume(self, *, group: str = DEFAULT_GROUP) -> None:
        await self._durably(lambda: self.queue.resume(group=group))

    async def groups(self) -> list[str]:
        return self.queue.groups()

    async def delete_group(self, group: str) -> bool:
        return await self._durably(lambda: self.queue.delete_group(group))

    async def compact(self) -> int:
        return await self._in_thread(self.queue.compact)

    async def sync(self) -> None:
        await self._in_thread(self.queue.sync)

    async def stats(self) -> QueueStats:
        return self.queue.stats()

    async def verify(self) -> list[str]:
        return await self._in_thread(self.queue.verify)

    async def _durably(self, call: Callable[[], T]) -> T:
        """In the loop when it cannot wait for the disk, else in a thread."""
        if self._options.fsync != "always":
            return call()
        return await self._in_thread(call)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        self._check_not_closed()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _check_not_closed(self) -> None:
        if self._closed:
            raise QueueClosed(f"queue {str(self._path)!r} is closed")


def _close_unwanted(opening: "Future[Queue]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
