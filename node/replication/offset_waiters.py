"""Requests that wait until records have come far enough. (Shell.)

One queue per log and condition, in the order of their ends, which is nearly always the order in
which they came.
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
    """See the module's docstring."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: deque[_Waiting] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, end: int, deadline: float, reply: T) -> "asyncio.Future[T]":
        """The answer, once everything below `end` has come far enough."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting, queue = _Waiting(end, deadline, future, reply), self._queue
        if queue and queue[-1].end > end:
            # A repeated request, whose records have been here for a while.
            at = len(queue) - 1
            while at and queue[at - 1].end > end:
                at -= 1
            queue.insert(at, waiting)
        else:
            queue.append(waiting)
        return future

    def release(self, end: int) -> None:
        """Answer those whose records are all below this offset."""
        queue = self._queue
        while queue and queue[0].end <= end:
            waiting = queue.popleft()
            if not waiting.future.done():
                waiting.future.set_result(waiting.reply)

    def fail(self, error: RaftqError) -> None:
        """Nobody here can be answered any more."""
        for waiting in self._queue:
            if not waiting.future.done():
                waiting.future.set_exception(error)
                waiting.future.exception()  # whoever asked may be gone
        self._queue.clear()

    def expire(self, now: float, error: RaftqError) -> None:
        """End those whose time is over, and forget those whose callers are gone."""
        queue = self._queue
        if any(waiting.deadline <= now or waiting.future.done() for waiting in queue):
            for waiting in queue:
                if waiting.deadline <= now and not waiting.future.done():
                    waiting.future.set_exception(error)
            self._queue = deque(waiting for waiting in queue if not waiting.future.done())
