"""Queue workers of one group on one topic: some are killed, others come. (Shell.)"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from raftq.chaos.history import Partition
from raftq.chaos.readback import until
from raftq.chaos.recorder import Recorder
from raftq.chaos.scene import Scene
from raftq.chaos.workers import ONLY_ACK, Habits, QueueWorker
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import Tasks, sleep
from raftq.client.wire.queue_messages import DescribeQueue

ANSWER_S = 2.0
STOP_S = 15.0


class Crew:
    """Workers with one habit. `run` keeps their number up, `drain` works until nothing is left.

    Between the two they go on: nobody is to wait for a record because the run is over.
    """

    def __init__(
        self,
        scene: Scene,
        group: str,
        partition_keys: Sequence[Partition],
        habits: Habits,
        count: int,
        deaths_per_minute: float = 0.0,
    ) -> None:
        self.group = group
        self._scene = scene
        self._places = list(partition_keys)
        self._habits = habits
        self._count = count
        self._deaths_per_minute = deaths_per_minute
        self._rng = Random(scene.rng.random())
        self._hired = 0
        self._tasks = Tasks(group)
        self._at_work: dict[asyncio.Task[None], tuple[QueueWorker, Recorder]] = {}

    async def run(self) -> None:
        """Until the scene stops."""
        while not self._scene.stopping.is_set():
            self._hire(self._habits)
            await sleep(0.1)
            if self._rng.random() < self._deaths_per_minute / 600 and self._at_work:
                await self._kill(self._rng.choice(list(self._at_work)))

    async def drain(self, deadline: float) -> None:
        """Everything heals: settle what is left, until the group has nothing to do any more."""
        await self._dismiss()
        overseer = self._recorder(f"{self.group} overseer")

        async def is_empty() -> str:
            self.work_well()
            for partition_key in self._places:
                reply = await overseer.ask(partition_key, DescribeQueue(*partition_key, self.group))
                for one in reply.message.groups:
                    if one.unsettled or one.in_flight or one.waiting:
                        return f"{partition_key} has {one}"
                if not reply.message.groups:
                    return f"{partition_key} does not know the group yet"
            return ""

        try:
            await until(is_empty, deadline, f"the queue of {self.group}")
        finally:
            await overseer.close()
            await self._dismiss()

    def work_well(self) -> None:
        """Have enough workers that only acknowledge, until they are dismissed by `drain`."""
        self._hire(replace(ONLY_ACK, lease_s=self._habits.lease_s))

    def _recorder(self, name: str) -> Recorder:
        scene = self._scene
        made = Recorder(
            scene.bootstrap, scene.history, self.group, scene.clock, name=name, connect_ms=1_000
        )
        made.answer_s = ANSWER_S
        return made

    def _hire(self, habits: Habits) -> None:
        """As many as there should be; a worker that failed is replaced."""
        while len(self._at_work) < self._count:
            self._hired += 1
            name = f"{self.group} w{self._hired}"
            recorder = self._recorder(name)
            worker = QueueWorker(recorder, self._places, habits, Random(self._rng.random()))
            task = self._tasks.spawn(_until_it_fails(worker))
            self._at_work[task] = (worker, recorder)
            task.add_done_callback(self._gone)

    def _gone(self, task: "asyncio.Task[None]") -> None:
        known = self._at_work.pop(task, None)
        if known is not None:
            self._tasks.spawn(known[1].close())

    async def _kill(self, task: "asyncio.Task[None]") -> None:
        """As kill -9: what it holds stays leased, and nobody is told."""
        task.cancel()
        await asyncio.wait([task])

    async def _dismiss(self) -> None:
        tasks = list(self._at_work)
        for worker, _ in self._at_work.values():
            worker.stopping = True
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            for task in late:
                await self._kill(task)

    async def close(self) -> None:
        await self._tasks.close()


async def _until_it_fails(worker: QueueWorker) -> None:
    """An error that it does not expect of a cluster under faults ends a worker, as in life."""
    try:
        await worker.run()
    except RaftqError:
        await sleep(0.2)
