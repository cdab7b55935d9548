"""Shell: queues: workers that lease records, settle them in all ways, forget them or die."""

from collections.abc import Mapping
from dataclasses import replace

from raftq.chaos.history import Final, Publish
from raftq.chaos.readback import deadline_of, read_back, read_letters
from raftq.chaos.scene import Scene
from raftq.chaos.workers import POISON, Habits
from raftq.chaos.workloads.base import TopicWorkload
from raftq.chaos.workloads.reading import run_all
from raftq.chaos.workloads.working import WorkerGroup
from raftq.client.common.errors import Detail

HABITS = Habits(lease_s=3.0, late=2)
POISON_EVERY = 40
TOPIC: Mapping[str, Detail] = {"backoff_ms": 100, "max_deliveries": 3}


class QueueWorkload(TopicWorkload):
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
        """`deaths_per_minute` counts the deaths of all workers together."""
        super().__init__(
            name, partitions=partitions, producers=producers, per_second=per_second,
            config={**TOPIC, **(config or {})},
        )  # fmt: skip
        self._worker_count = workers
        self._habits = habits
        self._deaths_per_minute = deaths_per_minute
        self._workers: WorkerGroup

    async def prepare(self, scene: Scene) -> None:
        await super().prepare(scene)
        self._workers = WorkerGroup(
            scene, f"{self.topic}-workers", self._partition_keys, self._habits,
            self._worker_count, self._deaths_per_minute,
        )  # fmt: skip

    def _publish(self, scene: Scene, client: str, number: int) -> Publish:
        kind = POISON if number % POISON_EVERY == POISON_EVERY // 2 else "v"
        return replace(
            super()._publish(scene, client, number),
            value=f"{kind} {client} {number}",
            priority=scene.rng.choice((0, 2, 2, 2, 4)),
        )

    async def run(self, scene: Scene) -> None:
        await run_all(self._workers.run(), self._run_senders())

    async def finish(self, scene: Scene, final: Final) -> None:
        deadline = deadline_of(scene)
        try:
            await self._close_senders()
            await self._come_due(scene, deadline)
            await self._workers.drain(deadline)
            final.drained[self._workers.group] = [self.topic]
            await read_back(scene, self.topic, final, deadline)
            await read_letters(scene, self.topic, final, deadline)
        finally:
            await self._close()

    async def _come_due(self, scene: Scene, deadline: float) -> None:
        """Waits until every record can be delivered; here they can at once."""

    async def _close(self) -> None:
        await run_all(self._workers.close(), self._close_senders())
