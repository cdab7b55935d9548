"""Shell: what workloads have in common: a topic of their own and the producers that fill it."""

from collections.abc import Mapping
from functools import partial

from raftq.chaos.history import Publish
from raftq.chaos.readback import create_topic, unique
from raftq.chaos.scene import Scene
from raftq.chaos.workloads.reading import run_all
from raftq.chaos.workloads.sending import LoadSender
from raftq.client.common.errors import Detail
from raftq.client.common.types import PartitionKey

COPIES = 3


class TopicWorkload:
    """One topic, and producers that each write to all its partitions in turn."""

    def __init__(
        self,
        name: str,
        *,
        partitions: int,
        producers: int,
        per_second: float,
        copies: int = COPIES,
        config: Mapping[str, Detail] | None = None,
    ) -> None:
        """`per_second` applies to each producer, `config` to the topic."""
        self.name = name
        self.topic = ""
        self._partitions = partitions
        self._producers = producers
        self._per_second = per_second
        self._copies = copies
        self._config = dict(config or {})
        self._partition_keys: list[PartitionKey] = []
        self._senders: list[LoadSender] = []

    async def prepare(self, scene: Scene) -> None:
        self.topic = unique(scene, self.name)
        self._copies = min(self._copies, len(scene.direct))
        await create_topic(
            scene,
            self.topic,
            partitions=self._partitions,
            replication=self._copies,
            config=self._config,
        )
        self._partition_keys = [(self.topic, number) for number in range(self._partitions)]
        for number in range(self._producers):
            self._add_sender(scene, f"{self.topic} p{number}")

    def _add_sender(
        self, scene: Scene, client: str, kind: type[LoadSender] = LoadSender
    ) -> LoadSender:
        make = partial(self._publish, scene, client)
        sender = kind(scene, client, make, self._per_second)
        self._senders.append(sender)
        return sender

    def _publish(self, scene: Scene, client: str, number: int) -> Publish:
        """The record with this number of a producer, not yet sent."""
        return Publish(
            client=client,
            topic=self.topic,
            partition=number % self._partitions,
            at=scene.clock(),
            value=f"{client} {number}",
        )

    async def _run_senders(self) -> None:
        await run_all(*(sender.run() for sender in self._senders))

    async def _close_senders(self) -> None:
        await run_all(*(sender.close() for sender in self._senders))
