"""Shell: sends a task's batches to the leaders, those of each partition in order.

One request per partition is in flight at a time, with all its waiting batches: these batches have
no common sequence (see outgoing.py), so the next one may follow only after an answer. A request
that fails is repeated unchanged until `timeout_ms` is over; the node recognises what it has already
written. The waiting data is bounded: `put` blocks.
"""

import asyncio
from collections import deque

from raftq.client.common.errors import RaftqError
from raftq.client.common.types import PartitionKey
from raftq.client.net.attempts import Attempts
from raftq.client.net.client import Client
from raftq.client.net.leaders import Leaders
from raftq.client.options import ClientOptions
from raftq.client.spark.options import WriteOptions
from raftq.client.sync.blocking import Blocking
from raftq.client.wire.messages import Produce

REQUEST_BYTES = 4 * 1024 * 1024
WAITING_BYTES_MAX = 32 * 1024 * 1024


class _Line:
    """The batches that wait for one partition's log."""

    __slots__ = ("delayed", "running", "waiting", "where")

    def __init__(self, where: PartitionKey, delayed: bool) -> None:
        self.where = where
        self.delayed = delayed
        self.waiting: deque[bytearray] = deque()
        self.running = False

    def take(self) -> list[bytearray]:
        taken = [self.waiting.popleft()]
        size = len(taken[0])
        while self.waiting and size + len(self.waiting[0]) <= REQUEST_BYTES:
            taken.append(self.waiting.popleft())
            size += len(taken[-1])
        return taken


class _Appender(Client):
    """The asyncio side."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = ClientOptions(name="spark", bootstrap_ms=options.delivery_timeout_ms)
        super().__init__(options.bootstrap, self._options, "spark sink")
        self._acks = options.acks
        self._timeout_s = options.delivery_timeout_ms / 1000
        self._lines: dict[tuple[PartitionKey, bool], _Line] = {}
        self._held = 0
        self._error: RaftqError | None = None
        self._changed: asyncio.Event
        self._leaders: Leaders

    def _on_start(self) -> None:
        self._leaders = Leaders(self._routes, self._pool, self._options)
        self._changed = asyncio.Event()

    async def partitions(self, topic: str) -> int:
        self._ensure_started()
        return len((await self._routes.topic(topic)).partitions)

    async def put(self, where: PartitionKey, batch: bytearray, delayed: bool) -> None:
        """Accepts a batch for sending; waits while too much is waiting. Raises the error of an
        earlier one."""
        self._ensure_started()
        while self._held and self._held + len(batch) > WAITING_BYTES_MAX and not self._error:
            await self._change()
        if self._error is not None:
            raise self._error
        line = self._lines.setdefault((where, delayed), _Line(where, delayed))
        line.waiting.append(batch)
        self._held += len(batch)
        if not line.running:
            line.running = True
            self._tasks.spawn(self._run(line))

    async def flush(self) -> None:
        """Waits until everything is acknowledged."""
        while self._held and self._error is None:
            await self._change()
        if self._error is not None:
            raise self._error

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _run(self, line: _Line) -> None:
        try:
            while line.waiting and self._error is None:
                batches = line.take()
                await self._send(line, batches)
                self._held -= sum(map(len, batches))
                self._changed.set()
        except RaftqError as error:
            self._error = self._error or error
        finally:
            line.running = False
            self._changed.set()

    async def _send(self, line: _Line, batches: list[bytearray]) -> None:
        topic, partition = line.where
        attempts = Attempts(f"appending to {topic}/{partition}", self._options, self._timeout_s)
        while True:
            try:
                connection = await self._pool.get(await self._leaders.find(line.where, attempts))
                one_s = min(attempts.left_s(), self._options.request_ms / 1000)
                message = Produce(
                    topic, partition, acks=self._acks, timeout_ms=int(one_s * 1000),
                    delayed=line.delayed,
                )  # fmt: skip
                await connection.request(message, batches, one_s)
                return
            except RaftqError as error:
                self._leaders.learn(line.where, error)
                await attempts.failed(error)


class Appender(Blocking):
    """Appends batches from a task's thread."""

    def __init__(self, options: WriteOptions) -> None:
        self._client = _Appender(options)
        super().__init__(self._client)
        self._counts: dict[str, int] = {}

    def partitions(self, topic: str) -> int:
        """The number of partitions when this task first asked: keys must not move within a task."""
        if topic not in self._counts:
            self._counts[topic] = self._call(self._client.partitions(topic))
        return self._counts[topic]

    def put(self, where: PartitionKey, batch: bytearray, delayed: bool) -> None:
        self._call(self._client.put(where, batch, delayed))

    def flush(self) -> None:
        self._call(self._client.flush())
