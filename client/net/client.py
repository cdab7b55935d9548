"""Shell: what producers, consumers and admin clients have in common: tasks, connections, routes.

    new ──start──> started ──close──> closed

`start` does no I/O, so the first call may do it. `close` may be called twice. A `close` that is
cancelled still ends everything, but does not wait for it.
"""

import asyncio
from typing import Self

from raftq.client.common.errors import QueueClosed
from raftq.client.common.tasks import Tasks
from raftq.client.net.pool import Pool
from raftq.client.net.routes import Routes
from raftq.client.options import Address, Bootstrap, ClientOptions, addresses


class Client:
    """Base of the asyncio clients. All calls belong to the loop on which it was started."""

    def __init__(self, bootstrap: Bootstrap, options: ClientOptions, kind: str) -> None:
        self._bootstrap: list[Address] = addresses(bootstrap)
        self._base_options = options
        self._kind = kind
        self._tasks = Tasks(kind)
        self._started = False
        self._ended = False
        self._pool: Pool
        self._routes: Routes
        self._loop: asyncio.AbstractEventLoop
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        self._ensure_started()
        return self

    def _ensure_started(self) -> None:
        if self._ended:
            raise QueueClosed(f"the {self._kind} is closed")
        if self._started:
            return
        self._started = True
        self._loop = asyncio.get_running_loop()
        self._pool = Pool(self._base_options, self._tasks)
        self._routes = Routes(self._bootstrap, self._pool, self._base_options, self._tasks)
        self._routes.start()
        self._on_start()

    def _on_start(self) -> None:
        """What a kind of client adds to starting."""

    async def _end(self) -> None:
        self._ended = True
        if not self._started or self._loop.is_closed():
            return  # everything ended with the loop
        if self._ending is None:
            # At once, as the loop may not run again.
            self._routes.stop()
            self._tasks.cancel()
            self._pool.refuse()
            self._ending = self._loop.create_task(self._end_all())
        await asyncio.shield(self._ending)

    async def _end_all(self) -> None:
        try:
            await self._tasks.close()
        finally:
            await self._pool.close()

    async def close(self) -> None:
        await self._end()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.close()
