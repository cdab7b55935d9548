"""A fake cluster on a loop in its own thread, for tests of blocking clients."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, TypeVar

from fake_cluster import FakeCluster
from fake_groups import fill

from raftq.client.net.transport import run

C = TypeVar("C", bound=FakeCluster)


class ServedCluster(Generic[C]):
    """Serves from the constructor until `stop`."""

    def __init__(self, made: AbstractAsyncContextManager[C]) -> None:
        self.cluster: C
        self.loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._ready = threading.Event()
        self._thread = threading.Thread(target=run, args=(self._serve(made),))
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self, made: AbstractAsyncContextManager[C]) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with made as self.cluster:
            self._ready.set()
            await self._stop.wait()

    def call(self, function: Any, *args: Any) -> Any:
        """Calls a function on the loop."""

        async def work() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(10)

    def topic(self, name: str, partitions: int, values: list[bytes]) -> None:
        """Adds a topic with these values in each partition."""

        def make() -> None:
            for log in self.cluster.add_topic(name, partitions):
                if values:
                    fill(log, values)

        self.call(make)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@contextmanager
def served_cluster(made: AbstractAsyncContextManager[C]) -> Iterator[ServedCluster[C]]:
    """The test must leave no threads behind."""
    before = threading.active_count()
    served = ServedCluster(made)
    yield served
    served.stop()
    # Handler threads end by themselves, a moment after their worker was closed.
    end = time.monotonic() + 10.0
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.001)
    assert threading.active_count() == before, "threads are left behind"
