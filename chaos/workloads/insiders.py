"""Shell: clients of single nodes, which they reach past all proxies.

So there are clients on every side of a split. Each one writes to the partitions that its node
claims to lead. It sends each record once, so an answer is that of one leader.
"""

import asyncio

from raftq.chaos.history import Publish
from raftq.chaos.scene import Scene
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import Tasks, sleep
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions, addresses
from raftq.client.wire.encoder import encode
from raftq.client.wire.messages import Acks, Metadata, Produce

ANSWER_MS = 6_000
IN_FLIGHT_MAX = 100


class Insider:
    """A client of one node that writes to the partitions that the node claims to lead."""

    def __init__(
        self, scene: Scene, node: int, topic: str, per_second: float, acks: Acks = "all"
    ) -> None:
        self.name = f"{topic} beside {node} {acks}"
        self._scene = scene
        self._node = node
        self._topic = topic
        self._gap_s = 1 / per_second
        self._acks: Acks = acks
        self._number = 0
        self._tasks = Tasks(self.name)
        self._in_flight = 0

    async def run(self) -> None:
        """Runs until the scene stops and all requests have ended."""
        ((host, port),) = addresses(self._scene.direct[self._node])
        options = ConnectionOptions(name="insider", connect_ms=1_000)
        try:
            while not self._scene.stopping.is_set():
                try:
                    async with await Connection.open(host, port, options) as connection:
                        await self._write(connection)
                except RaftqError:
                    await sleep(self._gap_s)
        finally:
            await self._tasks.close()

    async def _write(self, connection: Connection) -> None:
        """Writes until the scene stops; raises when the connection is lost."""
        led: list[int] = []
        while not self._scene.stopping.is_set():
            if self._number % 10 == 0 or not led:
                led = await self._led(connection)
            if led and self._in_flight < IN_FLIGHT_MAX:
                partition = led[self._number % len(led)]
                self._tasks.spawn(self._send(connection, partition, f"{self.name} {self._number}"))
                self._number += 1
            await sleep(self._gap_s)
        while self._in_flight:
            await sleep(self._gap_s)

    async def _led(self, connection: Connection) -> list[int]:
        """The partitions that the node claims to lead."""
        reply = await connection.request(Metadata((self._topic,)))
        return [
            partition.partition
            for topic in reply.message.topics
            for partition in topic.partitions
            if partition.leader == self._node
        ]

    async def _send(self, connection: Connection, partition: int, value: str) -> None:
        scene = self._scene
        noted = scene.history.add(
            Publish(
                client=self.name,
                topic=self._topic,
                partition=partition,
                at=scene.clock(),
                value=value,
            )
        )
        self._in_flight += 1
        message = Produce(self._topic, partition, acks=self._acks, timeout_ms=ANSWER_MS)
        try:
            reply = await connection.request(
                message, (encode([value.encode()]),), 1.5 * ANSWER_MS / 1000
            )
        except RaftqError as error:
            noted.end(error.outcome, scene.clock(), repr(error))
        except asyncio.CancelledError:
            noted.end("unknown", scene.clock(), "the run is over")
            raise
        else:
            noted.offset = reply.message.base_offsets[0]
            promised = self._acks == "all"
            noted.end("ok" if promised else "unknown", scene.clock())
        finally:
            self._in_flight -= 1
            scene.history.note(noted)
