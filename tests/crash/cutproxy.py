"""TCP proxies between nodes that can be cut: bytes are neither passed on nor refused.

Runs in a thread with a loop of its own. One proxy per direction of a pair of nodes and per port, so
that a cut may be one-way.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

CHUNK = 64 * 1024


class _Link:
    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.open = asyncio.Event()
        self.open.set()
        self.port = 0


class CutProxies:
    """All links of a cluster, by (from, to)."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._links: dict[tuple[int, int], list[_Link]] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def _run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(10)

    def add(self, source: int, target: int, host: str, port: int) -> int:
        """A port that leads from one node to an address of another."""

        async def start() -> int:
            link = _Link((host, port))
            server = await asyncio.start_server(
                lambda reader, writer: self._serve(link, reader, writer), "127.0.0.1", 0
            )
            self._servers.append(server)
            self._links.setdefault((source, target), []).append(link)
            link.port = server.sockets[0].getsockname()[1]
            return link.port

        return int(self._run(start))

    def cut(self, *pairs: tuple[int, int]) -> None:
        self._set(pairs, False)

    def heal(self) -> None:
        self._set(tuple(self._links), True)

    def _set(self, pairs: tuple[tuple[int, int], ...], passes: bool) -> None:
        async def change() -> None:
            for pair in pairs:
                for link in self._links.get(pair, []):
                    if passes:
                        link.open.set()
                    else:
                        link.open.clear()

        self._run(change)

    async def _serve(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await link.open.wait()
            there, back = await asyncio.open_connection(*link.target)
            try:
                pumps = (self._pump(link, reader, back), self._pump(link, there, writer))
                done, left = await asyncio.wait(
                    [asyncio.ensure_future(one) for one in pumps],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for one in left:
                    one.cancel()
                await asyncio.gather(*done, *left, return_exceptions=True)
            finally:
                back.close()
        except (OSError, asyncio.CancelledError):
            # An end that is down or goes is for the other end to notice: it sees its side closed.
            return
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(CHUNK):
            await link.open.wait()
            writer.write(data)
            await writer.drain()

    def close(self) -> None:
        async def stop() -> None:
            for server in self._servers:
                server.close()
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(list(self._tasks))

        self._run(stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
