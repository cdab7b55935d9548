"""A producer that sends at a steady pace and notes what became of every record. (Shell.)

It numbers what it sends, so that the order can be judged, and holds back while too much is under
way, so that an outage costs neither memory nor a flood afterwards.
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
"""The record with this number, not yet sent. Partition -1: wherever its key (its client's name and
its lane) leads."""


class LoadSender:
    """One producer; `run` until the scene stops, then `close`."""

    acks: ClassVar[Acks] = "all"

    def __init__(
        self,
        scene: Scene,
        name: str,
        make: Make,
        per_second: float,
        under_way_max: int = 200,
        ended: Callable[[Publish], None] | None = None,
    ) -> None:
        self.name = name
        self._scene = scene
        self._make = make
        self._gap_s = 1 / per_second
        self._under_way_max = under_way_max
        self._ended = ended
        self._under_way = 0
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
            if now < next_at or self._under_way >= self._under_way_max:
                await sleep(min(max(next_at - now, 0.001), LOOK_EVERY_S))
                continue
            next_at = max(next_at + self._gap_s, now - BEHIND_S_MAX)
            await self.send(self._make(self._number))

    async def send(self, noted: Publish) -> None:
        """Send one record; returns when it was taken, not when it was acknowledged."""
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
                deliver_at=noted.deliver_at * 1000 or None,
                ttl=ttl,
            )
        except RaftqError as error:
            self._note(noted, error)
            await sleep(LOOK_EVERY_S)
            return
        self._under_way += 1
        delivery.add_done_callback(lambda done: self._done(noted, done))

    def _done(self, noted: Publish, delivery: Delivery) -> None:
        self._under_way -= 1
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
        else:  # it promises nothing that outlives the leader
            noted.partition = result.partition
            noted.end("unknown", at, "only the leader has acknowledged it")
        self._scene.history.note(noted)
        if self._ended is not None:
            self._ended(noted)

    async def close(self) -> None:
        """Until all that is under way has an end, which takes DELIVERY_MS at the most."""
        with suppress(RaftqError):  # it is in the history
            await self._producer.close(timeout=DELIVERY_MS / 1000 + 1)


class HastySender(LoadSender):
    """One that waits for the leader alone."""

    acks = "leader"
