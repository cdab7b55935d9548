"""Shell: appends: idempotent producers with unique values, and readers that follow."""

from collections.abc import Mapping

from raftq.chaos.history import Final
from raftq.chaos.readback import deadline_of, ends_of, read_back
from raftq.chaos.scene import Scene
from raftq.chaos.workloads.base import COPIES, TopicWorkload
from raftq.chaos.workloads.insiders import Insider
from raftq.chaos.workloads.reading import LogReader, Lookout, run_all
from raftq.chaos.workloads.sending import HastySender
from raftq.client.common.errors import Detail
from raftq.client.wire.messages import Acks

INSIDER_PER_SECOND = 15.0


class Appends(TopicWorkload):
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
        """`hasty` is a number of additional producers that wait for the leader only. With
        `insiders`, clients also write to every node past the proxies, with both kinds of acks."""
        super().__init__(
            name, partitions=partitions, producers=producers, per_second=per_second,
            copies=copies, config=config,
        )  # fmt: skip
        self._hasty = hasty
        self._insiders = insiders
        self._readers = readers
        self._reading: list[LogReader] = []

    async def prepare(self, scene: Scene) -> None:
        await super().prepare(scene)
        for number in range(self._producers, self._producers + self._hasty):
            self._add_sender(scene, f"{self.topic} p{number}", HastySender)
        for number in range(self._readers):
            self._reading.append(LogReader(scene, f"{self.topic} r{number}", self._partition_keys))

    async def run(self, scene: Scene) -> None:
        lookouts = [Lookout(scene, node, self._partition_keys) for node in scene.direct]
        both: tuple[Acks, ...] = ("all", "leader") if self._insiders else ()
        insiders = [
            Insider(scene, node, self.topic, INSIDER_PER_SECOND, acks)
            for node in scene.direct
            for acks in both
        ]
        await run_all(
            self._run_senders(),
            *(reader.run() for reader in self._reading),
            *(lookout.run() for lookout in lookouts),
            *(insider.run() for insider in insiders),
        )

    async def finish(self, scene: Scene, final: Final) -> None:
        deadline = deadline_of(scene)
        try:
            await self._close_senders()
            await read_back(scene, self.topic, final, deadline)
            ends = ends_of(final, self._partition_keys)
            for reader in self._reading:
                await reader.finish(ends, deadline)
                final.read[reader.name] = [self.topic]
        finally:
            await run_all(self._close_senders(), *(reader.close() for reader in self._reading))
