"""Shell: delays: delayed records in all lanes. Some expire and some are cancelled."""

from collections.abc import Mapping
from dataclasses import replace

from raftq.chaos.history import Publish
from raftq.chaos.readback import until
from raftq.chaos.recorder import Recorder
from raftq.chaos.scene import Scene
from raftq.chaos.workers import ONLY_ACK
from raftq.chaos.workloads.base import TopicWorkload
from raftq.chaos.workloads.queues import QueueWorkload
from raftq.chaos.workloads.sending import LoadSender
from raftq.chaos.workloads.working import ANSWER_S
from raftq.client.common.errors import Detail
from raftq.client.common.tasks import Tasks, sleep
from raftq.client.wire.queue_messages import DelayStats

HABITS = replace(ONLY_ACK, lease_s=3.0)
DELAYED_SHARE = 0.8
"""Of all records; the others are due at once."""
EXPIRING_SHARE = 0.1
CANCELLED_SHARE = 0.15
"""Of the delayed records."""


class DelayWorkload(QueueWorkload):
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
        super().__init__(
            name, partitions=partitions, producers=producers, workers=workers,
            per_second=per_second, habits=HABITS, deaths_per_minute=0.0, config=config,
        )  # fmt: skip
        self._delay_s_max = delay_s_max
        self._last_due = 0.0
        self._tasks = Tasks(name)
        self._canceller: Recorder

    async def prepare(self, scene: Scene) -> None:
        await super().prepare(scene)
        self._canceller = Recorder(
            scene.bootstrap, scene.history, "", scene.clock, name=f"{self.topic} canceller"
        )
        self._canceller.answer_s = ANSWER_S

    def _add_sender(
        self, scene: Scene, client: str, kind: type[LoadSender] = LoadSender
    ) -> LoadSender:
        sender = super()._add_sender(scene, client, kind)
        sender.on_end = lambda sent: self._maybe_cancel(scene, sent)
        return sender

    def _publish(self, scene: Scene, client: str, number: int) -> Publish:
        rng = scene.rng
        record = TopicWorkload._publish(self, scene, client, number)
        now = record.at
        due = now + rng.uniform(0.05, self._delay_s_max) if rng.random() < DELAYED_SHARE else 0.0
        ends = max(now, due) + rng.uniform(0.5, 3.0) if rng.random() < EXPIRING_SHARE else 0.0
        self._last_due = max(self._last_due, due, ends)
        return replace(record, deliver_at=due, expires_at=ends, priority=rng.randrange(5))

    def _maybe_cancel(self, scene: Scene, sent: Publish) -> None:
        """Cancels a share of the delayed records that the cluster has acknowledged."""
        if sent.status == "ok" and sent.deliver_at and scene.rng.random() < CANCELLED_SHARE:
            self._tasks.spawn(self._cancel(sent, scene.rng.uniform(0.0, 1.0)))

    async def _cancel(self, sent: Publish, after_s: float) -> None:
        await sleep(after_s)
        if sent.offset is not None:
            await self._canceller.cancel(sent.partition_key, sent.offset, sent.value)

    async def _come_due(self, scene: Scene, deadline: float) -> None:
        async def all_are_due() -> str:
            self._workers.work_well()  # records that come due now must not wait for workers
            left_s = self._last_due - scene.clock()
            return f"the last record is due in {left_s:.1f} s" if left_s > 0 else ""

        await until(all_are_due, deadline, self.topic)
        await until(self._all_fired, deadline, self.topic)

    async def _all_fired(self) -> str:
        self._workers.work_well()
        for key in self._partition_keys:
            pending = (await self._canceller.ask(key, DelayStats(*key))).message.pending
            if pending:
                return f"{pending} records of {key} are still waiting though all are due"
        return ""

    async def _close(self) -> None:
        await self._tasks.close()
        await self._canceller.close()
        await super()._close()
