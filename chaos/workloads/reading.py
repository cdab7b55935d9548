"""Shell: readers of whole topics, without a group, and a lookout at every node."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from raftq.chaos.history import Receive, Sighting
from raftq.chaos.readback import until
from raftq.chaos.scene import Scene
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.consumer import Consumer
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions, addresses
from raftq.client.wire.batch import Batch
from raftq.client.wire.messages import Fetch, FetchedPartition, FetchPartition

ERROR_PAUSE_S = 0.1
LOOK_EVERY_S = 0.25
ANSWER_S = 2.0


class LogReader:
    """Reads some partitions from the start, in order, each record once."""

    def __init__(self, scene: Scene, name: str, partition_keys: Sequence[PartitionKey]) -> None:
        self.name = name
        self._scene = scene
        self._partition_keys = list(partition_keys)
        self._consumer = Consumer(scene.bootstrap, name=name, fetch_wait_ms=300)

    async def run(self) -> None:
        await self._consumer.assign(self._partition_keys)
        while not self._scene.stopping.is_set():
            await self._step()

    async def _step(self) -> None:
        try:
            records = await self._consumer.poll(max_records=1000, timeout=0.5)
        except RaftqError:
            await sleep(ERROR_PAUSE_S)
            return
        at = self._scene.clock()
        for record in records:
            self._scene.history.add(
                Receive(
                    client=self.name,
                    topic=record.topic,
                    partition=record.partition,
                    at=at,
                    group=self.name,
                    offset=record.offset,
                    value=record.value.decode(),
                )
            )

    async def finish(self, ends: dict[PartitionKey, int], deadline: float) -> None:
        """Reads on up to these offsets."""

        async def is_read() -> str:
            await self._step()
            for key in self._partition_keys:
                position = await self._consumer.position(*key)
                if position < ends[key]:
                    return f"{key} is read up to {position} of {ends[key]}"
            return ""

        await until(is_read, deadline, self.name)

    async def close(self) -> None:
        await self._consumer.close()


class Lookout:
    """Asks one node, past all proxies, for the newest records of some partitions, repeatedly.

    An answer proves that the node claims to lead, in which epoch, and up to which offset it lets
    clients read.
    """

    def __init__(self, scene: Scene, node: int, partition_keys: Sequence[PartitionKey]) -> None:
        self._scene = scene
        self._node = node
        self._partition_keys = list(partition_keys)
        self._seen: dict[PartitionKey, int] = {}

    async def run(self) -> None:
        ((host, port),) = addresses(self._scene.direct[self._node])
        options = ConnectionOptions(name="lookout", connect_ms=1_000)
        while not self._scene.stopping.is_set():
            try:
                async with await Connection.open(host, port, options) as connection:
                    while not self._scene.stopping.is_set():
                        await self._look(connection)
                        await sleep(LOOK_EVERY_S)
            except RaftqError:
                await sleep(LOOK_EVERY_S)

    async def _look(self, connection: Connection) -> None:
        at = self._scene.clock()
        asked = Fetch(
            tuple(
                FetchPartition(*key, max(0, self._seen.get(key, 0) - 1))
                for key in self._partition_keys
            )
        )
        reply = await connection.request(asked, timeout_s=ANSWER_S)
        for fetched in reply.message.partitions:
            self._note(fetched, reply.raw, at)

    def _note(self, fetched: FetchedPartition, raw: memoryview, at: float) -> None:
        key = (fetched.topic, fetched.partition)
        if fetched.error:
            self._seen.pop(key, None)  # it does not lead, or has fewer records than another had
            return
        self._seen[key] = fetched.high_watermark
        noted = Sighting(
            client=f"lookout at {self._node}",
            topic=fetched.topic,
            partition=fetched.partition,
            at=at,
            node=self._node,
            epoch=fetched.epoch,
            high_watermark=fetched.high_watermark,
            end_offset=_end_of(raw[fetched.start : fetched.start + fetched.length]),
        )
        noted.end("ok", self._scene.clock())
        self._scene.history.add(noted)


def _end_of(raw: memoryview) -> int:
    """The end offset of the last whole batch."""
    end, at = 0, 0
    while at + 88 <= len(raw):
        batch = Batch(raw, at)
        at += batch.length
        if at <= len(raw):
            end = batch.end_offset
    return end


async def run_all(*work: Coroutine[Any, Any, None]) -> None:
    """Runs all at once. When one fails, all others are cancelled and the error is raised."""
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)
