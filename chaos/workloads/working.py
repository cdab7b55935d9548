"""Shell: the queue workers of one group on one topic: some are killed and replaced."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from raftq.chaos.readback import until
from raftq.chaos.recorder import Recorder
from raftq.chaos.scene import Scene
from raftq.chaos.workers import ONLY_ACK, Habits, QueueWorker
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import Tasks, sleep
from raftq.client.common.types import PartitionKey
from raftq.client.wire.queue_messages import DescribeQueue

ANSWER_S = 2.0
STOP_S = 15.0


class WorkerGroup:
    """Workers with the same habits. `run` replaces dead ones, `drain` works until nothing is left.

    Between the two the workers go on, so that no record has to wait because the run is over.
    """

    def __init__(
        self,
        scene: Scene,
        group: str,
        partition_keys: Sequence[PartitionKey],
        habits: Habits,
        count: int,
        deaths_per_minute: float = 0.0,
    ) -> None:
        self.group = group
        self._scene = scene
        self._partition_keys = list(partition_keys)
        self._habits = habits
        self._count = count
        self._deaths_per_minute = deaths_per_minute
        self._rng = Random(scene.rng.random())
        self._started = 0
        self._tasks = Tasks(group)
        self._running: dict[asyncio.Task[None], tuple[QueueWorker, Recorder]] = {}

    async def run(self) -> None:
        """Runs until the scene stops."""
        while not self._scene.stopping.is_set():
            self._start_missing(self._habits)
            await sleep(0.1)
            if self._rng.random() < self._deaths_per_minute / 600 and self._running:
                await self._kill(self._rng.choice(list(self._running)))

    async def drain(self, deadline: float) -> None:
        """Settles what is left on a healed cluster, until the group has nothing to do any more."""
        await self._stop_all()
        overseer = self._recorder(f"{self.group} overseer")

        async def is_empty() -> str:
            self.work_well()
            for key in self._partition_keys:
                reply = await overseer.ask(key, DescribeQueue(*key, self.group))
                for state in reply.message.groups:
                    if state.unsettled or state.in_flight or state.waiting:
                        return f"{key} has {state}"
                if not reply.message.groups:
                    return f"{key} does not know the group yet"
            return ""

        try:
            await until(is_empty, deadline, f"the queue of {self.group}")
        finally:
            await overseer.close()
            await self._stop_all()

    def work_well(self) -> None:
        """Starts missing workers. They only acknowledge, and run until `drain` ends them."""
        self._start_missing(replace(ONLY_ACK, lease_s=self._habits.lease_s))

    def _recorder(self, name: str) -> Recorder:
        scene = self._scene
        made = Recorder(
            scene.bootstrap, scene.history, self.group, scene.clock, name=name, connect_ms=1_000
        )
        made.answer_s = ANSWER_S
        return made

    def _start_missing(self, habits: Habits) -> None:
        """Starts workers until there are as many as there should be."""
        while len(self._running) < self._count:
            self._started += 1
            name = f"{self.group} w{self._started}"
            recorder = self._recorder(name)
            worker = QueueWorker(recorder, self._partition_keys, habits, Random(self._rng.random()))
            task = self._tasks.spawn(_until_it_fails(worker))
            self._running[task] = (worker, recorder)
            task.add_done_callback(self._gone)

    def _gone(self, task: "asyncio.Task[None]") -> None:
        known = self._running.pop(task, None)
        if known is not None:
            self._tasks.spawn(known[1].close())

    async def _kill(self, task: "asyncio.Task[None]") -> None:
        """Ends a worker as SIGKILL does: its records stay leased."""
        task.cancel()
        await asyncio.wait([task])

    async def _stop_all(self) -> None:
        tasks = list(self._running)
        for worker, _ in self._running.values():
            worker.stopping = True
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            for task in late:
                await self._kill(task)

    async def close(self) -> None:
        await self._tasks.close()


async def _until_it_fails(worker: QueueWorker) -> None:
    """Runs a worker. An unexpected error ends it, as it would end a process."""
    try:
        await worker.run()
    except RaftqError:
        await sleep(0.2)
