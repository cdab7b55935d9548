"""Runs a test's coroutine on a kind of event loop, and finds what it leaves behind."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from raftq.client.net.transport import new_event_loop

Go = Callable[[Coroutine[Any, Any, None]], None]


def sockets() -> int:
    """The number of open sockets of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            continue
    return count


def run_checked(kind: str, main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` on "uvloop" or "asyncio". It must leave no sockets and no tasks behind."""

    async def checked() -> None:
        before = sockets()
        async with asyncio.timeout(20):
            await main
        for _ in range(2_000):
            left = (sockets() - before, len(asyncio.all_tasks()) - 1)
            if left == (0, 0):
                break
            await asyncio.sleep(0.001)
        assert left == (0, 0), "sockets and tasks left behind"

    factory = new_event_loop if kind == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(checked())
