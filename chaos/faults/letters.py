"""Shell: faults of what queues and groups depend on: coordinators and dead-letter topics."""

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

from raftq.chaos.faults.base import NOTHING
from raftq.chaos.world import World
from raftq.client.admin.admin import Admin
from raftq.client.common.errors import RaftqError
from raftq.client.common.names import DLQ_SUFFIX
from raftq.client.net.connection import Connection
from raftq.client.wire.group_messages import FindCoordinator

ANSWER_MS = 8_000


@dataclass(slots=True)
class KillCoordinator:
    """Kills the coordinator of a group whose name is that of a topic and `suffix`."""

    topic: str = "streams"
    suffix: str = "-readers"
    needs: ClassVar[frozenset[str]] = NOTHING
    _node: int | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return "kill coordinator"

    def inject(self, world: World) -> str:
        names = sorted({name for name, _ in world.leaders() if name.startswith(self.topic)})
        for name in names:
            found = asyncio.run(_coordinator(world, name + self.suffix))
            if found is not None:
                self._node = found
                world.kill(found)
                return f"node {found}, the coordinator of {name}{self.suffix}, killed"
        self._node = world.rng.choice(world.ids)
        world.kill(self._node)
        return f"no coordinator found; node {self._node} killed"

    def heal(self, world: World) -> None:
        if self._node is not None:
            world.restart(self._node)
            self._node = None


async def _coordinator(world: World, group: str) -> int | None:
    for node_id in world.ids:
        host, _, port = world.direct(node_id).rpartition(":")
        try:
            async with await Connection.open(host, int(port)) as connection:
                reply = await connection.request(FindCoordinator(group), timeout_s=2.0)
                return reply.message.node_id
        except RaftqError:
            continue  # the node is down; every other one knows as much
    return None


@dataclass(slots=True)
class LettersRefused:
    """Dead-letter topics cannot be written to, but the queues themselves can.

    One node is killed, and only dead-letter topics require all nodes in sync."""

    needs: ClassVar[frozenset[str]] = NOTHING
    _node: int | None = field(default=None, init=False)
    _topics: list[str] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return "dead letters refused"

    def inject(self, world: World) -> str:
        self._topics = sorted({name for name, _ in world.leaders() if name.endswith(DLQ_SUFFIX)})
        asyncio.run(_require(world, self._topics, len(world.ids)))
        self._node = world.rng.choice(world.ids)
        world.kill(self._node)
        return f"{self._topics} require {len(world.ids)} copies, node {self._node} killed"

    def heal(self, world: World) -> None:
        if self._node is not None:
            world.restart(self._node)
            asyncio.run(_require(world, self._topics, None))
            self._node = None


async def _require(world: World, topics: list[str], copies: int | None) -> None:
    bootstrap = ",".join(world.direct(node_id) for node_id in world.ids)
    async with Admin(bootstrap, timeout_ms=ANSWER_MS) as admin:
        for name in topics:
            await admin.alter_topic(name, {"min_insync": copies})
