"""Shell: changes: topics are created, deleted, grown and altered, and copies moved, under load."""

from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from typing import Any

from raftq.chaos.history import Change, Final, Publish
from raftq.chaos.readback import deadline_of, ends_of, read_back, until, whole
from raftq.chaos.scene import Scene
from raftq.chaos.workloads.base import TopicWorkload
from raftq.chaos.workloads.reading import LogReader, run_all
from raftq.chaos.workloads.sending import LoadSender
from raftq.client.admin.admin import Admin
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep

PARTITIONS_MAX = 6
TOPICS_MAX = 8
RECORDS_EACH = 3
ANSWER_MS = 8_000
VERBS = ("create", "create", "delete", "grow", "move", "move", "move", "alter")


class Changes(TopicWorkload):
    """An operator makes random changes. Producers write by key to a topic that changes."""

    def __init__(
        self,
        name: str = "changes",
        *,
        producers: int = 2,
        per_second: float = 25.0,
        every_s: float = 0.7,
    ) -> None:
        """The operator pauses about `every_s` seconds between two changes."""
        super().__init__(name, partitions=2, producers=producers, per_second=per_second)
        self._every_s = every_s
        self._made = 0
        self._topics: list[str] = []
        """Topics whose creation was acknowledged and whose deletion was not requested."""
        self._keeper: LoadSender
        self._reader: LogReader
        self._admin: Admin

    async def prepare(self, scene: Scene) -> None:
        await super().prepare(scene)
        self._admin = Admin(scene.bootstrap, timeout_ms=ANSWER_MS)
        make = partial(self._publish, scene, "")
        self._keeper = LoadSender(scene, f"{self.topic} keeper", make, 1.0)
        self._reader = LogReader(scene, f"{self.topic} r", self._partition_keys)

    def _publish(self, scene: Scene, client: str, number: int) -> Publish:
        record = super()._publish(scene, client, number)
        return replace(record, partition=-1, priority=number % 5)

    async def run(self, scene: Scene) -> None:
        await run_all(self._operate(scene), self._reader.run(), self._run_senders())

    # The operator.

    async def _operate(self, scene: Scene) -> None:
        while not scene.stopping.is_set():
            await sleep(self._every_s * scene.rng.uniform(0.5, 1.5))
            try:
                await self._change(scene, scene.rng.choice(VERBS))
            except RaftqError:  # of a description that was needed for the change
                await sleep(self._every_s)

    async def _change(self, scene: Scene, verb: str) -> None:
        if verb == "create" and len(self._topics) < TOPICS_MAX:
            await self._create(scene)
        elif verb == "delete" and self._topics:
            topic = self._topics.pop(scene.rng.randrange(len(self._topics)))
            noted = scene.history.add(Change(**self._where(scene, topic), verb="delete"))
            await self._end(scene, noted, self._admin.delete_topic(topic))
        elif verb == "grow":
            await self._grow(scene)
        elif verb == "move":
            await self._move(scene)
        elif verb == "alter":
            noted = scene.history.add(Change(**self._where(scene, self.topic), verb="alter"))
            size = scene.rng.choice((1 << 16, 1 << 20))
            await self._end(
                scene, noted, self._admin.alter_topic(self.topic, {"segment_bytes": size})
            )

    async def _create(self, scene: Scene) -> None:
        self._made += 1
        topic, total = f"{self.topic}-{self._made}", scene.rng.randrange(1, 4)
        noted = scene.history.add(
            Change(**self._where(scene, topic), verb="create", total=total, copies=self._copies),
        )
        await self._end(scene, noted, self._admin.create_topic(topic, total, self._copies))
        if noted.status != "ok":
            return
        self._topics.append(topic)
        for number in range(RECORDS_EACH):
            await self._keeper.send(
                Publish(
                    client=self._keeper.name,
                    topic=topic,
                    partition=number % total,
                    at=scene.clock(),
                    value=f"{topic} {number}",
                )
            )

    async def _grow(self, scene: Scene) -> None:
        topic = scene.rng.choice([self.topic, *self._topics])
        total = len((await self._admin.describe_topic(topic)).partitions) + 1
        if total <= PARTITIONS_MAX:
            noted = scene.history.add(Change(**self._where(scene, topic), verb="grow", total=total))
            await self._end(scene, noted, self._admin.add_partitions(topic, total))

    async def _move(self, scene: Scene) -> None:
        topic = scene.rng.choice([self.topic, self.topic, *self._topics])
        count = len((await self._admin.describe_topic(topic)).partitions)
        number = scene.rng.randrange(count)
        nodes = scene.rng.sample(sorted(scene.direct), self._copies)
        where = self._where(scene, topic) | {"partition": number}
        noted = scene.history.add(Change(**where, verb="move"))
        await self._end(scene, noted, self._admin.move_replica(topic, number, nodes))

    def _where(self, scene: Scene, topic: str) -> dict[str, Any]:
        client = f"{self.topic} operator"
        return {"client": client, "topic": topic, "partition": -1, "at": scene.clock()}

    async def _end(self, scene: Scene, noted: Change, change: Awaitable[object]) -> None:
        try:
            await change
        except RaftqError as error:
            noted.end(error.outcome, scene.clock(), repr(error))
        else:
            noted.end("ok", scene.clock())
        scene.history.note(noted)

    # The end.

    async def finish(self, scene: Scene, final: Final) -> None:
        deadline = deadline_of(scene)
        try:
            await run_all(self._close_senders(), self._keeper.close())
            for topic in (self.topic, *self._topics):
                await read_back(scene, topic, final, deadline)
            ends = ends_of(final, self._partition_keys)
            await self._reader.finish(ends, deadline)
            await self._list(final, deadline)
        finally:
            await run_all(
                self._reader.close(), self._admin.close(), self._keeper.close(),
                self._close_senders(),
            )  # fmt: skip

    async def _list(self, final: Final, deadline: float) -> None:
        """Notes every topic of this workload that exists, with its in-sync copies."""

        async def is_listed() -> str:
            for topic in await self._admin.describe_topics():
                if topic.name.startswith(self.topic):
                    final.topics[topic.name] = [sorted(view.isr) for view in topic.partitions]
            return "" if final.topics else "there are no topics"

        await until(is_listed, deadline, "the list of topics")
        for topic in final.topics:
            described = await whole(self._admin, topic, deadline)
            final.topics[topic] = [sorted(view.isr) for view in described.partitions]
