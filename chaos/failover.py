"""Shell: measures how long partitions have no leader after their node is killed.

Clients send a record to every partition every few milliseconds, without waiting for earlier
answers. A failover lasts from just before the signal to the first acknowledgement of a record that
was sent after the process had ended, in the slowest partition that the node led. Before each kill
all copies are in sync. The killed node leads partitions, and may be the controller as well.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from raftq.chaos.recorder import Clock
from raftq.chaos.timeline import percentile
from raftq.chaos.world import World
from raftq.client.admin.admin import Admin
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.producer.producer import Producer
from raftq.client.results import Delivery, PartitionDescription

TOPIC = "failover"
PARTITIONS = 6
SEND_S = 0.005
SETTLE_S = 60.0
ANSWER_S = 30.0

Victim = Literal["leader", "controller"]


@dataclass(slots=True)
class Failovers:
    """The duration of each failover in seconds, in the order of the kills."""

    victim: Victim
    seconds: list[float] = field(default_factory=list)

    def describe(self) -> str:
        values = self.seconds
        p50, p99, worst = (percentile(values, share) * 1000 for share in (0.5, 0.99, 1.0))
        return (
            f"{self.victim} killed {len(values)} times: to the first acknowledged record "
            f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, worst {worst:.0f} ms"
        )


class Failover:
    """Kills nodes of a healthy world of at least three nodes."""

    def __init__(self, world: World, clock: Clock, say: Callable[[str], None]) -> None:
        self._world = world
        self._clock = clock
        self._say = say
        self._hand = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raftq-failover")
        self._acknowledged: dict[int, list[tuple[float, float]]] = {}
        self._stopping = False

    async def measure(self, victim: Victim, kills: int) -> Failovers:
        found = Failovers(victim)
        async with Admin(self._world.bootstrap) as admin:
            if TOPIC not in await admin.list_topics():
                config = {"min_insync": 2}
                await admin.create_topic(TOPIC, partitions=PARTITIONS, replication=3, config=config)
            async with Producer(self._world.bootstrap, linger_ms=0) as producer:
                self._stopping = False
                sending = asyncio.ensure_future(self._send(producer))
                try:
                    for number in range(kills):
                        node_id, led = await self._choose(admin, victim)
                        took = await self._kill(node_id, led)
                        found.seconds.append(took)
                        self._say(f"  {number + 1}/{kills} node {node_id}: {took * 1000:.0f} ms")
                        await self._do(partial(self._world.restart, node_id))
                finally:
                    self._stopping = True
                    await sending
        self._hand.shutdown()
        return found

    async def _send(self, producer: Producer) -> None:
        while not self._stopping:
            for number in range(PARTITIONS):
                sent = self._clock()
                try:
                    delivery = await producer.send(TOPIC, b"record", partition=number)
                except RaftqError as error:
                    self._say(f"  not sent: {error!r}")
                    continue
                delivery.add_done_callback(partial(self._note, number, sent))
            await sleep(SEND_S)

    def _note(self, number: int, sent: float, done: Delivery) -> None:
        if done.exception() is None:
            self._acknowledged.setdefault(number, []).append((sent, self._clock()))

    async def _kill(self, node_id: int, led: list[int]) -> float:
        self._acknowledged.clear()
        began = self._clock()
        await self._do(partial(self._world.kill, node_id))
        gone = self._clock()
        while self._clock() - gone < ANSWER_S:
            firsts = [self._first(number, gone) for number in led]
            if all(first is not None for first in firsts):
                return max(first for first in firsts if first is not None) - began
            await sleep(SEND_S)
        return ANSWER_S

    def _first(self, number: int, gone: float) -> float | None:
        answers = self._acknowledged.get(number, [])
        return min((acked for sent, acked in answers if sent >= gone), default=None)

    async def _choose(self, admin: Admin, victim: Victim) -> tuple[int, list[int]]:
        """Waits until all copies are in sync. Returns a node of the wanted kind and what it
        leads."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                await sleep(0.2)
                try:
                    controller = (await admin.cluster_status()).controller
                    parts = (await admin.describe_topic(TOPIC)).partitions
                except RaftqError:
                    continue
                if controller is None or not _whole(parts):
                    continue
                for part in parts:
                    leader = part.leader
                    if leader and (leader == controller) == (victim == "controller"):
                        await sleep(0.3)
                        return leader, [part.partition for part in parts if part.leader == leader]

    async def _do(self, action: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._hand, action)


def _whole(parts: tuple[PartitionDescription, ...]) -> bool:
    return all(part.leader is not None and len(part.isr) == len(part.replicas) for part in parts)
