"""Queues: workers that lease, settle well and badly, forget, die and give up; poison. (Shell.)"""

from collections.abc import Mapping

from raftq.chaos.history import Final, Partition, Publish
from raftq.chaos.readback import create_topic, deadline_of, read_back, read_letters, unique
from raftq.chaos.scene import Scene
from raftq.chaos.workers import POISON, Habits
from raftq.chaos.workloads.appends import COPIES
from raftq.chaos.workloads.reading import run_all
from raftq.chaos.workloads.sending import LoadSender, Make
from raftq.chaos.workloads.working import Crew
from raftq.client.common.errors import Detail

HABITS = Habits(lease_s=3.0, late=2)
POISON_EVERY = 40
TOPIC: Mapping[str, Detail] = {"backoff_ms": 100, "max_deliveries": 3}


class QueueWorkload:
    """Producers fill a topic in all lanes, and a group of workers empties it."""

    def __init__(  # noqa: PLR0913 - what may be varied
        self,
        name: str = "queues",
        *,
        partitions: int = 2,
        producers: int = 2,
        workers: int = 4,
        per_second: float = 20.0,
        habits: Habits = HABITS,
        deaths_per_minute: float = 10.0,
        config: Mapping[str, Detail] | None = None,
    ) -> None:
        """`per_second` is of each producer; `deaths_per_minute` of all workers together."""
        self.name = name
        self.topic = ""
        self._partitions = partitions
        self._producers = producers
        self._workers = workers
        self._per_second = per_second
        self._habits = habits
        self._deaths_per_minute = deaths_per_minute
        self._config = {**TOPIC, **(config or {})}
        self._senders: list[LoadSender] = []
        self._crew: Crew

    async def prepare(self, scene: Scene) -> None:
        self.topic = unique(scene, self.name)
        await create_topic(
            scene,
            self.topic,
            partitions=self._partitions,
            replication=min(COPIES, len(scene.direct)),
            config=self._config,
        )
        partition_keys: list[Partition] = [
            (self.topic, number) for number in range(self._partitions)
        ]
        for number in range(self._producers):
            client = f"{self.topic} p{number}"
            self._senders.append(
                LoadSender(scene, client, self._maker(scene, client), self._per_second)
            )
        self._crew = Crew(
            scene, f"{self.topic}-workers", partition_keys, self._habits, self._workers,
            self._deaths_per_minute,
        )  # fmt: skip

    def _maker(self, scene: Scene, client: str) -> Make:
        def make(number: int) -> Publish:
            kind = POISON if number % POISON_EVERY == POISON_EVERY // 2 else "v"
            return Publish(
                client=client,
                topic=self.topic,
                partition=number % self._partitions,
                at=scene.clock(),
                value=f"{kind} {client} {number}",
                priority=scene.rng.choice((0, 2, 2, 2, 4)),
            )

        return make

    async def run(self, scene: Scene) -> None:
        await run_all(self._crew.run(), *(one.run() for one in self._senders))

    async def finish(self, scene: Scene, final: Final) -> None:
        deadline = deadline_of(scene)
        try:
            await run_all(*(one.close() for one in self._senders))
            await self._crew.drain(deadline)
            final.drained[self._crew.group] = [self.topic]
            await read_back(scene, self.topic, final, deadline)
            await read_letters(scene, self.topic, final, deadline)
        finally:
            await run_all(self._crew.close(), *(one.close() for one in self._senders))
