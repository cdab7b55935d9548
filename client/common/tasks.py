"""Shell: the background tasks of one client object, and waiting on the loop's clock.

A client may be started by one task and closed by another, which a TaskGroup does not allow, and one
failed connection must not end the others. So each client owns its tasks by name: `spawn` starts
one, `close` cancels them all and waits for them; those that come later are cancelled at once. An
error that a task was not written to handle is logged, never lost.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from types import coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Tasks:
    """The tasks of one owner."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        if self._closed:
            task.cancel()
        return task

    def cancel(self) -> None:
        """Cancel what runs, and whatever will."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        self._closed = True
        current = asyncio.current_task()
        while left := [task for task in self._tasks if task is not current]:
            for task in left:
                task.cancel()
            await asyncio.wait(left)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of %s failed", self._owner, exc_info=error)


@coroutine
def yield_to_loop() -> Iterator[None]:
    """Give the loop one turn."""
    yield


async def sleep(seconds: float) -> None:
    """Wait on the loop's clock, real or virtual."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(seconds, resolve, done)
    try:
        await done
    finally:
        timer.cancel()


def resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
