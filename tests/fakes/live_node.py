"""A real node in a thread of its own, for callers that block."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from real_node import address, running

from raftq.node.config import Address

START_S = 30.0


class Live(NamedTuple):
    """Where it listens."""

    http: str
    native: str


@contextmanager
def live_node(directory: Path) -> Iterator[Live]:
    started = threading.Event()
    found: list[tuple[Live, asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        async with running(directory, http=Address("127.0.0.1", 0)) as node:
            stop = asyncio.Event()
            live = Live(f"http://127.0.0.1:{node.http_port}", address(node))
            found.append((live, asyncio.get_running_loop(), stop))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(START_S), "the node does not start"
        yield found[0][0]
    finally:
        for _, loop, stop in found:
            loop.call_soon_threadsafe(stop.set)
        thread.join()
