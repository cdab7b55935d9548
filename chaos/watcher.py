"""Shell: asks every node past the proxies and notes who leads.

Each node is asked for its metadata, one request at a time. The newest epoch that any node knows
counts. If two nodes name different leaders of one epoch, that is kept, for it is always wrong.
"""

import asyncio
from collections.abc import Mapping

from raftq.chaos.checkers import Anomaly
from raftq.chaos.recorder import Clock
from raftq.chaos.timeline import Timeline
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions
from raftq.client.wire.messages import Metadata, MetadataReply

LOOK_S = 0.25
OPTIONS = ConnectionOptions(name="chaos-watcher", connect_ms=1_000, request_ms=1_000)


class Watcher:
    """Watches all nodes while `run` runs."""

    def __init__(self, direct: Mapping[int, str], timeline: Timeline, clock: Clock) -> None:
        self._direct = dict(direct)
        self._timeline = timeline
        self._clock = clock
        self._leaders: dict[tuple[PartitionKey, int], int] = {}
        self._newest: dict[PartitionKey, int] = {}
        self._controller: int | None = None
        self.anomalies: list[Anomaly] = []
        self.changes = 0
        """The changes of leaders, without the first leader of a partition."""

    def leader(self, topic: str, partition: int) -> int | None:
        """The leader of the newest known epoch."""
        partition_key = (topic, partition)
        return self._leaders.get((partition_key, self._newest.get(partition_key, -1)))

    @property
    def controller(self) -> int | None:
        return self._controller

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for node_id, address in self._direct.items():
                group.create_task(self._watch(node_id, address))

    async def _watch(self, node_id: int, address: str) -> None:
        host, _, port = address.rpartition(":")
        while True:
            try:
                async with await Connection.open(host, int(port), OPTIONS) as connection:
                    while True:
                        reply = await connection.request(Metadata(None))
                        self._note(node_id, reply.message)
                        await sleep(LOOK_S)
            except RaftqError:
                await sleep(LOOK_S)  # the node is down or paused

    def _note(self, node_id: int, reply: MetadataReply) -> None:
        if reply.controller is not None and reply.controller != self._controller:
            if self._controller is not None:
                self._timeline.mark(self._clock(), "leader", f"controller {reply.controller}")
            self._controller = reply.controller
        for topic in reply.topics:
            for part in topic.partitions:
                if part.leader is not None:
                    partition_key = (topic.topic, part.partition)
                    self._note_leader(node_id, partition_key, part.epoch, part.leader)

    def _note_leader(
        self, node_id: int, partition_key: PartitionKey, epoch: int, leader: int
    ) -> None:
        known = self._leaders.setdefault((partition_key, epoch), leader)
        if known != leader:
            text = f"node {node_id} says {leader}, another said {known}, "
            text += f"in epoch {epoch} of {partition_key}"
            self.anomalies.append(Anomaly("two leaders", text))
        before = self._newest.get(partition_key)
        if before is not None and epoch <= before:
            return
        self._newest[partition_key] = epoch
        if before is not None:
            self.changes += 1
            text = f"{partition_key[0]}/{partition_key[1]}: node {leader}, epoch {epoch}"
            self._timeline.mark(self._clock(), "leader", text)
