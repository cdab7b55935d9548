"""Shell: growing queues: records become larger than the dead-letter topic was created for."""

import asyncio

from raftq.chaos.history import Publish
from raftq.chaos.scene import Scene
from raftq.chaos.workers import POISON
from raftq.chaos.workloads.queues import QueueWorkload
from raftq.chaos.workloads.reading import run_all
from raftq.client.admin.admin import Admin
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep

SMALL_BYTES_MAX, LARGE_BYTES_MAX = 1024, 64 * 1024
LARGE_BYTES = 8 * 1024
LARGE_EVERY = 10
LOOK_S = 0.2


class GrowingQueues(QueueWorkload):
    """A queue whose limit of value sizes is raised when it has dead letters.

    From then on some poison records are larger than the old limit. Small poison follows them."""

    def __init__(self, name: str = "queues") -> None:
        super().__init__(name, config={"value_bytes_max": SMALL_BYTES_MAX})
        self._raised = asyncio.Event()

    def _publish(self, scene: Scene, client: str, number: int) -> Publish:
        record = super()._publish(scene, client, number)
        # Every partition gets both kinds, in turn.
        if self._raised.is_set() and number % LARGE_EVERY in (0, 1):
            record.value = f"{POISON} large {client} {number} ".ljust(LARGE_BYTES, "x")
        elif number % LARGE_EVERY in (2, 3):
            record.value = f"{POISON} {client} {number}"
        return record

    async def run(self, scene: Scene) -> None:
        await run_all(self._raise_limit(scene), super().run(scene))

    async def _raise_limit(self, scene: Scene) -> None:
        """Raises the limit when there is a dead-letter topic, created for small values."""
        async with Admin(scene.bootstrap) as admin:
            while not scene.stopping.is_set() and not self._raised.is_set():
                await sleep(LOOK_S)
                try:
                    if f"{self.topic}.dlq" in await admin.list_topics():
                        await admin.alter_topic(self.topic, {"value_bytes_max": LARGE_BYTES_MAX})
                        self._raised.set()
                except RaftqError:
                    continue  # under faults: the next look tries again
