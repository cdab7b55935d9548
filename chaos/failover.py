"""How long a partition is without a leader when its node is killed, many times over. (Shell.)

Records are sent to one partition every few milliseconds, whether earlier ones are answered or not.
A failover takes from before the signal to the first acknowledgement of a record that was sent after
the process had gone. Before each kill all copies are in sync again, and the partition is led by the
node that is meant: the controller, or one that is not.
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
from raftq.client.admin import Admin
from raftq.client.producer import Producer
from raftq.client.results import Delivery, PartitionDescription
from raftq.client.tasks import pause
from raftq.client.wire.errors import RaftqError

TOPIC = "failover"
SEND_S = 0.005
SETTLE_S = 60.0
ANSWER_S = 30.0

Victim = Literal["leader", "controller"]


@dataclass(slots=True)
class Failovers:
    """Seconds of each, in the order of the kills."""

    victim: Victim
    seconds: list[float] = field(default_factory=list)

    def describe(self) -> str:
        values = self.seconds
        shown = (percentile(values, share) * 1000 for share in (0.5, 0.99, 1.0))
        p50, p99, worst = shown
        return (
            f"{self.victim} killed {len(values)} times: to the first acknowledged record "
            f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, worst {worst:.0f} ms"
        )


class Failover:
    """Kills nodes of a world that is whole and has at least three."""

    def __init__(self, world: World, clock: Clock, say: Callable[[str], None]) -> None:
        self._world = world
        self._clock = clock
        self._say = say
        self._hand = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raftq-failover")
        self._acknowledged: list[tuple[float, float]] = []
        self._stopping = False

    async def measure(self, victim: Victim, kills: int) -> Failovers:
        found = Failovers(victim)
        async with Admin(self._world.bootstrap) as admin:
            if TOPIC not in await admin.list_topics():
                config = {"min_insync": 2}
                await admin.create_topic(TOPIC, partitions=1, replication=3, config=config)
            async with Producer(self._world.bootstrap, linger_ms=0) as producer:
                self._stopping = False
                sending = asyncio.ensure_future(self._send(producer))
                try:
                    for number in range(kills):
                        node_id = await self._bring_about(admin, victim)
                        took = await self._kill(node_id)
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
            sent = self._clock()
            try:
                delivery = await producer.send(TOPIC, b"record", partition=0)
            except RaftqError as error:
                self._say(f"  not sent: {error!r}")
                await pause(0.1)
                continue
            delivery.add_done_callback(partial(self._note, sent))
            await pause(SEND_S)

    def _note(self, sent: float, done: Delivery) -> None:
        if done.exception() is None:
            self._acknowledged.append((sent, self._clock()))

    async def _kill(self, node_id: int) -> float:
        self._acknowledged.clear()
        began = self._clock()
        await self._do(partial(self._world.kill, node_id))
        gone = self._clock()
        while self._clock() - gone < ANSWER_S:
            answers = [acked for sent, acked in self._acknowledged if sent >= gone]
            if answers:
                return min(answers) - began
            await pause(SEND_S)
        return ANSWER_S

    async def _bring_about(self, admin: Admin, victim: Victim) -> int:
        """Wait until all are in sync and the right node leads; who that is."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                await pause(0.2)
                try:
                    controller = (await admin.cluster_status()).controller
                    part = (await admin.describe_topic(TOPIC)).partitions[0]
                except RaftqError:
                    continue
                if controller is None or part.leader is None or len(part.isr) < 3:
                    continue
                if (part.leader == controller) == (victim == "controller"):
                    await pause(0.5)
                    return part.leader
                await self._lead(admin, part, controller, victim)

    async def _lead(
        self, admin: Admin, part: PartitionDescription, controller: int, victim: Victim
    ) -> None:
        """Have another replica lead: moving the partition to where it is changes the order."""
        others = [one for one in part.replicas if one != controller]
        leads = controller if victim == "controller" else others[0]
        wanted = (leads, *(one for one in part.replicas if one != leads))
        if wanted == tuple(part.replicas):
            return  # it becomes the leader at the next round of the controller
        try:
            await admin.move_replica(TOPIC, 0, wanted)
        except RaftqError as error:
            self._say(f"  not moved: {error!r}")

    async def _do(self, action: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._hand, action)
