"""Shell: a producer that sends at a steady pace and notes the result of every record.

It numbers its records, so that their order can be checked. It stops sending while too many records
are in flight, so that an outage neither fills the memory nor ends in a flood.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from raftq.chaos.history import Publish
from raftq.chaos.scene import Scene
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.producer.producer import Producer
from raftq.client.results import Appended, Delivery
from raftq.client.wire.messages import Acks

DELIVERY_MS = 15_000
BLOCK_MS = 2_000
LOOK_EVERY_S = 0.02
BEHIND_S_MAX = 0.5

Make = Callable[[int], Publish]
"""Makes the record with this number. Partition -1 means the partition of its key, which consists of
the client's name and the lane."""


class LoadSender:
    """One producer. `run` sends until the scene stops; call `close` afterwards."""

    acks: ClassVar[Acks] = "all"

    def __init__(
        self,
        scene: Scene,
        name: str,
        make: Make,
        per_second: float,
        in_flight_max: int = 200,
    ) -> None:
        self.name = name
        self._scene = scene
        self._make = make
        self._gap_s = 1 / per_second
        self.on_end: Callable[[Publish], None] | None = None
        """Called with every record when its result is known."""
        self._in_flight_max = in_flight_max
        self._in_flight = 0
        self._number = 0
        self._producer = Producer(
            scene.bootstrap,
            name=name,
            acks=self.acks,
            linger_ms=5,
            delivery_timeout_ms=DELIVERY_MS,
            max_block_ms=BLOCK_MS,
        )

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while not self._scene.stopping.is_set():
            now = loop.time()
            if now < next_at or self._in_flight >= self._in_flight_max:
                await sleep(min(max(next_at - now, 0.001), LOOK_EVERY_S))
                continue
            next_at = max(next_at + self._gap_s, now - BEHIND_S_MAX)
            await self.send(self._make(self._number))

    async def send(self, noted: Publish) -> None:
        """Sends one record. Returns when the producer has it, not when it is acknowledged."""
        noted.number, self._number = self._number, self._number + 1
        scene = self._scene
        scene.history.add(noted)
        ttl = None
        if noted.expires_at:
            ttl = max(0.001, noted.expires_at - max(noted.deliver_at, scene.clock()))
        keyed = noted.partition < 0
        try:
            delivery = await self._producer.send(
                noted.topic,
                noted.value.encode(),
                key=f"{noted.client}/{noted.priority}".encode() if keyed else None,
                partition=None if keyed else noted.partition,
                priority=noted.priority,
                deliver_at=noted.deliver_at or None,
                ttl=ttl,
            )
        except RaftqError as error:
            self._note(noted, error)
            await sleep(LOOK_EVERY_S)
            return
        self._in_flight += 1
        delivery.add_done_callback(lambda done: self._done(noted, done))

    def _done(self, noted: Publish, delivery: Delivery) -> None:
        self._in_flight -= 1
        try:
            appended: Appended | RaftqError = delivery.result()
        except RaftqError as error:
            appended = error
        self._note(noted, appended)

    def _note(self, noted: Publish, result: Appended | RaftqError) -> None:
        at = self._scene.clock()
        if isinstance(result, RaftqError):
            noted.end(result.outcome, at, repr(result))
        elif self.acks == "all":
            noted.partition, noted.offset = result.partition, result.offset
            noted.end("ok", at)
        else:  # the record may be lost with the leader
            noted.partition = result.partition
            noted.end("unknown", at, "only the leader has acknowledged it")
        self._scene.history.note(noted)
        if self.on_end is not None:
            self.on_end(noted)

    async def close(self) -> None:
        """Waits for the results of all records in flight, which takes at most DELIVERY_MS."""
        with suppress(RaftqError):  # the history has it
            await self._producer.close(timeout=DELIVERY_MS / 1000 + 1)


class HastySender(LoadSender):
    """A producer that waits for the leader only."""

    acks = "leader"
