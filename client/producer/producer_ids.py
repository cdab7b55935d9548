"""Shell: producer ids, by which nodes recognise batches that they already have.

A producer has one id for all its partitions. A partition whose sequence is broken goes on with the
next epoch of that id, from sequence 0; the others keep theirs. A node refuses an older epoch than
it knows. So a batch that was given up, and is still on its way, is not appended behind newer ones.
"""

import asyncio
from collections.abc import Callable

from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import Tasks, sleep
from raftq.client.net.pool import Pool
from raftq.client.net.routes import Routes
from raftq.client.options import ProducerOptions
from raftq.client.producer.outbox import Outbox
from raftq.client.wire.messages import InitProducer


class Identities:
    """Gives outboxes their producer id and epoch."""

    def __init__(self, options: ProducerOptions, routes: Routes, pool: Pool, tasks: Tasks) -> None:
        self._options = options
        self._routes = routes
        self._pool = pool
        self._tasks = tasks
        self._common: tuple[int, int] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._waiting: list[tuple[Outbox, Callable[[Outbox], None]]] = []

    def start_over(self) -> None:
        """Outboxes that come later get a new common id.

        Under the old one, batches may still be on their way to partitions of the same name."""
        self._common = None

    def give(self, outbox: Outbox, ready: Callable[[Outbox], None]) -> None:
        """Sets the outbox's identity, now or later, then calls `ready`."""
        if self._common is not None:
            self._assign(outbox, self._common, ready)
            return
        self._waiting.append((outbox, ready))
        if self._asking is None:
            self._asking = self._tasks.spawn(self._ask_for_all())

    def _assign(
        self, outbox: Outbox, identity: tuple[int, int], ready: Callable[[Outbox], None]
    ) -> None:
        outbox.identity = identity
        outbox.sequence = 0
        outbox.identifying = False
        ready(outbox)

    async def _ask_for_all(self) -> None:
        common = self._common = await self._ask([outbox for outbox, _ in self._waiting])
        self._asking = None
        waiting, self._waiting = self._waiting, []
        for outbox, ready in waiting:
            self._assign(outbox, common, ready)

    async def _ask(self, outboxes: list[Outbox]) -> tuple[int, int]:
        """Asks one node after the other until one answers. Waiting batches have their own
        deadline."""
        options = self._options
        backoff = options.backoff()
        while True:
            for address in self._routes.addresses():
                try:
                    connection = await self._pool.get(address)
                    reply = (await connection.request(InitProducer())).message
                    return reply.producer_id, reply.producer_epoch
                except RaftqError as error:
                    for outbox in outboxes:
                        outbox.last_error = error
            await sleep(backoff.next_s())
