"""Delays: records for later, with ends and in all lanes; some are cancelled. (Shell.)"""

from collections.abc import Mapping
from dataclasses import replace

from raftq.chaos.history import Final, Partition, Publish
from raftq.chaos.readback import (
    create_topic,
    deadline_of,
    read_back,
    read_letters,
    unique,
    until,
)
from raftq.chaos.recorder import Recorder
from raftq.chaos.scene import Scene
from raftq.chaos.workers import ONLY_ACK
from raftq.chaos.workloads.appends import COPIES
from raftq.chaos.workloads.queues import TOPIC
from raftq.chaos.workloads.reading import run_all
from raftq.chaos.workloads.sending import LoadSender, Make
from raftq.chaos.workloads.working import ANSWER_S, Crew
from raftq.client.common.errors import Detail
from raftq.client.common.tasks import Tasks, sleep
from raftq.client.wire.queue_messages import DelayStats

HABITS = replace(ONLY_ACK, lease_s=3.0)
LATER = 0.8
"""Of all records; the others are due at once."""
ENDING = 0.1
REGRETTED = 0.15


class DelayWorkload:
    """Producers send records for the next `delay_s_max` seconds; workers take what is due."""

    def __init__(  # noqa: PLR0913 - what may be varied
        self,
        name: str = "delays",
        *,
        partitions: int = 2,
        producers: int = 2,
        workers: int = 2,
        per_second: float = 20.0,
        delay_s_max: float = 8.0,
        config: Mapping[str, Detail] | None = None,
    ) -> None:
        self.name = name
        self.topic = ""
        self._partitions = partitions
        self._producers = producers
        self._workers = workers
        self._per_second = per_second
        self._delay_s_max = delay_s_max
        self._config = {**TOPIC, **(config or {})}
        self._last_due = 0.0
        self._senders: list[LoadSender] = []
        self._tasks = Tasks(name)
        self._crew: Crew
        self._canceller: Recorder

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
        self._canceller = Recorder(
            scene.bootstrap, scene.history, "", scene.clock, name=f"{self.topic} canceller"
        )
        self._canceller.answer_s = ANSWER_S
        for number in range(self._producers):
            client = f"{self.topic} p{number}"
            make = self._maker(scene, client)
            self._senders.append(
                LoadSender(
                    scene, client, make, self._per_second, ended=lambda one: self._ended(scene, one)
                )
            )
        group = f"{self.topic}-workers"
        self._crew = Crew(scene, group, partition_keys, HABITS, self._workers)

    def _maker(self, scene: Scene, client: str) -> Make:
        rng = scene.rng

        def make(number: int) -> Publish:
            now = scene.clock()
            due = now + rng.uniform(0.05, self._delay_s_max) if rng.random() < LATER else 0.0
            ends = max(now, due) + rng.uniform(0.5, 3.0) if rng.random() < ENDING else 0.0
            self._last_due = max(self._last_due, due, ends)
            return Publish(
                client=client,
                topic=self.topic,
                partition=number % self._partitions,
                at=now,
                value=f"{client} {number}",
                deliver_at=due,
                expires_at=ends,
                priority=rng.randrange(5),
            )

        return make

    def _ended(self, scene: Scene, sent: Publish) -> None:
        """Some that were taken for later are not wanted any more."""
        if sent.status == "ok" and sent.deliver_at and scene.rng.random() < REGRETTED:
            self._tasks.spawn(self._cancel(sent, scene.rng.uniform(0.0, 1.0)))

    async def _cancel(self, sent: Publish, after_s: float) -> None:
        await sleep(after_s)
        if sent.offset is not None:
            await self._canceller.cancel(sent.partition_key, sent.offset, sent.value)

    async def run(self, scene: Scene) -> None:
        await run_all(self._crew.run(), *(one.run() for one in self._senders))

    async def finish(self, scene: Scene, final: Final) -> None:
        deadline = deadline_of(scene)

        async def all_are_due() -> str:
            self._crew.work_well()  # what comes due meanwhile is not to be late for want of workers
            left_s = self._last_due - scene.clock()
            return f"the last record is due in {left_s:.1f} s" if left_s > 0 else ""

        try:
            await run_all(*(one.close() for one in self._senders))
            await until(all_are_due, deadline, self.topic)
            await until(self._all_fired, deadline, self.topic)
            await self._crew.drain(deadline)
            final.drained[self._crew.group] = [self.topic]
            await read_back(scene, self.topic, final, deadline)
            await read_letters(scene, self.topic, final, deadline)
        finally:
            await self._tasks.close()
            await run_all(
                self._crew.close(), self._canceller.close(), *(one.close() for one in self._senders)
            )

    async def _all_fired(self) -> str:
        self._crew.work_well()
        for number in range(self._partitions):
            partition_key = (self.topic, number)
            pending = (
                await self._canceller.ask(partition_key, DelayStats(*partition_key))
            ).message.pending
            if pending:
                return f"{pending} records of {partition_key} are still waiting though all are due"
        return ""
