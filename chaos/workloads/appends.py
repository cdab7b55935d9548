"""Appends: idempotent producers with values of their own, and readers that follow. (Shell.)"""

from collections.abc import Mapping

from raftq.chaos.history import Final, Partition, Publish
from raftq.chaos.readback import create_topic, deadline_of, ends_of, read_back, unique
from raftq.chaos.scene import Scene
from raftq.chaos.workloads.insiders import Insider
from raftq.chaos.workloads.reading import LogReader, Lookout, run_all
from raftq.chaos.workloads.sending import HastySender, LoadSender, Make
from raftq.client.common.errors import Detail
from raftq.client.wire.messages import Acks

COPIES = 3
INSIDER_PER_SECOND = 15.0


class Appends:
    """Every producer writes to all partitions in turn; every reader reads all of them."""

    def __init__(  # noqa: PLR0913 - what may be varied
        self,
        name: str = "appends",
        *,
        partitions: int = 3,
        copies: int = COPIES,
        producers: int = 3,
        hasty: int = 0,
        insiders: bool = False,
        readers: int = 2,
        per_second: float = 40.0,
        config: Mapping[str, Detail] | None = None,
    ) -> None:
        """`per_second` is of each producer; `config` of the topic. So many `hasty` ones more wait
        for leaders only, and `insiders` write to every node past the proxies, in both ways."""
        self.name = name
        self.topic = ""
        self._partitions = partitions
        self._copies = copies
        self._producers = producers
        self._hasty = hasty
        self._insiders = insiders
        self._readers = readers
        self._per_second = per_second
        self._config = dict(config or {})
        self._places: list[Partition] = []
        self._senders: list[LoadSender] = []
        self._reading: list[LogReader] = []

    async def prepare(self, scene: Scene) -> None:
        self.topic = unique(scene, self.name)
        await create_topic(
            scene,
            self.topic,
            partitions=self._partitions,
            replication=min(self._copies, len(scene.direct)),
            config=self._config,
        )
        self._places = [(self.topic, number) for number in range(self._partitions)]
        for number in range(self._producers + self._hasty):
            client = f"{self.topic} p{number}"
            kind = LoadSender if number < self._producers else HastySender
            self._senders.append(kind(scene, client, self._maker(scene, client), self._per_second))
        for number in range(self._readers):
            self._reading.append(LogReader(scene, f"{self.topic} r{number}", self._places))

    def _maker(self, scene: Scene, client: str) -> Make:
        def make(number: int) -> Publish:
            partition = number % self._partitions
            return Publish(
                client=client,
                topic=self.topic,
                partition=partition,
                at=scene.clock(),
                value=f"{client} {number}",
            )

        return make

    async def run(self, scene: Scene) -> None:
        lookouts = [Lookout(scene, node, self._places) for node in scene.direct]
        acks: tuple[Acks, ...] = ("all", "leader") if self._insiders else ()
        insiders = [
            Insider(scene, node, self.topic, INSIDER_PER_SECOND, one)
            for node in scene.direct
            for one in acks
        ]
        await run_all(
            *(one.run() for one in self._senders),
            *(one.run() for one in self._reading),
            *(one.run() for one in lookouts),
            *(one.run() for one in insiders),
        )

    async def finish(self, scene: Scene, final: Final) -> None:
        deadline = deadline_of(scene)
        try:
            await run_all(*(one.close() for one in self._senders))
            await read_back(scene, self.topic, final, deadline)
            ends = ends_of(final, self._places)
            for reader in self._reading:
                await reader.finish(ends, deadline)
                final.read[reader.name] = [self.topic]
        finally:
            await run_all(
                *(one.close() for one in self._senders), *(one.close() for one in self._reading)
            )
