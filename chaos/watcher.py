"""Looks at every node past the proxies and notes who leads. (Shell.)

Each node is asked for what it knows of the metadata, one question at a time. What counts is the
newest epoch that anybody tells of; that two nodes told of different leaders in one epoch is kept,
for it is never right.
"""

import asyncio
from collections.abc import Mapping

from raftq.chaos.checkers import Anomaly
from raftq.chaos.history import Partition
from raftq.chaos.recorder import Clock
from raftq.chaos.timeline import Timeline
from raftq.client.connection import Connection, ConnectionOptions
from raftq.client.tasks import pause
from raftq.client.wire.errors import RaftqError
from raftq.client.wire.messages import Metadata, MetadataReply

LOOK_S = 0.25
OPTIONS = ConnectionOptions(name="chaos-watcher", connect_ms=1_000, request_ms=1_000)


class Watcher:
    """One pair of eyes per node, for as long as `run` runs."""

    def __init__(self, direct: Mapping[int, str], timeline: Timeline, clock: Clock) -> None:
        self._direct = dict(direct)
        self._timeline = timeline
        self._clock = clock
        self._leaders: dict[tuple[Partition, int], int] = {}
        self._newest: dict[Partition, int] = {}
        self._controller: int | None = None
        self.anomalies: list[Anomaly] = []
        self.changes = 0
        """Of leaders, beside the first one of a partition."""

    def leader(self, topic: str, partition: int) -> int | None:
        """Of the newest epoch that was told."""
        place = (topic, partition)
        return self._leaders.get((place, self._newest.get(place, -1)))

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
                        await pause(LOOK_S)
            except RaftqError:
                await pause(LOOK_S)  # it is down or stands still

    def _note(self, node_id: int, told: MetadataReply) -> None:
        if told.controller is not None and told.controller != self._controller:
            if self._controller is not None:
                self._timeline.mark(self._clock(), "leader", f"controller {told.controller}")
            self._controller = told.controller
        for topic in told.topics:
            for part in topic.partitions:
                if part.leader is not None:
                    place = (topic.topic, part.partition)
                    self._note_leader(node_id, place, part.epoch, part.leader)

    def _note_leader(self, node_id: int, place: Partition, epoch: int, leader: int) -> None:
        known = self._leaders.setdefault((place, epoch), leader)
        if known != leader:
            text = (
                f"node {node_id} says {leader}, another said {known}, in epoch {epoch} of {place}"
            )
            self.anomalies.append(Anomaly("two leaders", text))
        before = self._newest.get(place)
        if before is not None and epoch <= before:
            return
        self._newest[place] = epoch
        if before is not None:
            self.changes += 1
            text = f"{place[0]}/{place[1]}: node {leader}, epoch {epoch}"
            self._timeline.mark(self._clock(), "leader", text)
