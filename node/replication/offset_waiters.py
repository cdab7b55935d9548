"""Requests that wait until the log has reached an offset. (Shell.)

There is one queue per log and condition, in the order of the offsets. That is nearly always the
order of arrival.
"""

import asyncio
from collections import deque
from typing import Any, TypeVar

from raftq.client.common.errors import RaftqError

T = TypeVar("T")


class _Waiting:
    __slots__ = ("deadline", "end", "future", "reply")

    def __init__(
        self, end: int, deadline: float, future: "asyncio.Future[Any]", reply: Any
    ) -> None:
        self.end = end
        self.deadline = deadline
        self.future = future
        self.reply = reply


class OffsetWaiters:
    """A queue of requests that wait for offsets of one log."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: deque[_Waiting] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, end: int, deadline: float, reply: T) -> "asyncio.Future[T]":
        """Return a future that gets `reply` once everything below `end` meets the condition."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting, queue = _Waiting(end, deadline, future, reply), self._queue
        if queue and queue[-1].end > end:
            # This is a repeated request: its records have been here for a while.
            at = len(queue) - 1
            while at and queue[at - 1].end > end:
                at -= 1
            queue.insert(at, waiting)
        else:
            queue.append(waiting)
        return future

    def release(self, end: int) -> None:
        """Answer the requests whose records are all below this offset."""
        queue = self._queue
        while queue and queue[0].end <= end:
            waiting = queue.popleft()
            if not waiting.future.done():
                waiting.future.set_result(waiting.reply)

    def fail(self, error: RaftqError) -> None:
        """End all requests with this error."""
        for waiting in self._queue:
            if not waiting.future.done():
                waiting.future.set_exception(error)
                waiting.future.exception()  # the caller may be gone
        self._queue.clear()

    def expire(self, now: float, error: RaftqError) -> None:
        """End requests whose time is over, and forget those whose callers are gone."""
        queue = self._queue
        if any(waiting.deadline <= now or waiting.future.done() for waiting in queue):
            for waiting in queue:
                if waiting.deadline <= now and not waiting.future.done():
                    waiting.future.set_exception(error)
            self._queue = deque(waiting for waiting in queue if not waiting.future.done())
