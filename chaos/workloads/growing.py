"""Growing queues: records become larger than the dead letters were made for. (Shell.)"""

import asyncio

from raftq.chaos.history import Publish
from raftq.chaos.scene import Scene
from raftq.chaos.workers import POISON
from raftq.chaos.workloads.queues import QueueWorkload
from raftq.chaos.workloads.reading import run_all
from raftq.chaos.workloads.sending import Make
from raftq.client.admin.admin import Admin
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep

SMALL_BYTES_MAX, LARGE_BYTES_MAX = 1024, 64 * 1024
LARGE_BYTES = 8 * 1024
LARGE_EVERY = 10
LOOK_S = 0.2


class GrowingQueues(QueueWorkload):
    """A queue whose limit of values is raised when it has dead letters: from then on some records
    are larger than the old one, and nobody can handle them. Small poison follows."""

    def __init__(self, name: str = "queues") -> None:
        super().__init__(name, config={"value_bytes_max": SMALL_BYTES_MAX})
        self._raised = asyncio.Event()

    def _maker(self, scene: Scene, client: str) -> Make:
        make_small = super()._maker(scene, client)

        def make(number: int) -> Publish:
            one = make_small(number)
            # Every partition gets both kinds, in turn.
            if self._raised.is_set() and number % LARGE_EVERY in (0, 1):
                one.value = f"{POISON} large {client} {number} ".ljust(LARGE_BYTES, "x")
            elif number % LARGE_EVERY in (2, 3):
                one.value = f"{POISON} {client} {number}"
            return one

        return make

    async def run(self, scene: Scene) -> None:
        await run_all(self._raise_limit(scene), super().run(scene))

    async def _raise_limit(self, scene: Scene) -> None:
        """Not before there are dead letters: they were made for small values."""
        async with Admin(scene.bootstrap) as admin:
            while not scene.stopping.is_set() and not self._raised.is_set():
                await sleep(LOOK_S)
                try:
                    if f"{self.topic}.dlq" in await admin.list_topics():
                        await admin.alter_topic(self.topic, {"value_bytes_max": LARGE_BYTES_MAX})
                        self._raised.set()
                except RaftqError:
                    continue  # under faults it is asked again
