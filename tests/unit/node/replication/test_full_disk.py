"""A node with a full disk hands on what it leads, and takes it back when there is room."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from metadatafake import FakeLog, FakeMetadata
from simdisk import SimDisk

from raftq.client.common.errors import NoLeader
from raftq.cluster.metadata.commands import CreateTopic, RegisterNode, SetDraining
from raftq.node.config import NodeConfig, StorageConfig
from raftq.node.replication import full_disk as module
from raftq.node.replication.full_disk import FullDisk

RESERVE = 1000


class World:
    """Node 1 of three leads the only partition."""

    def __init__(self) -> None:
        self.log = FakeLog()
        self.metadata = FakeMetadata(self.log, 1)
        self.disk = SimDisk()
        self.disk.make_directory("/data")
        self.tasks: list[asyncio.Task[None]] = []
        config = NodeConfig(
            node_id=1,
            secret=b"0123456789abcdef",
            data_dir="/data",
            storage=StorageConfig(reserve_bytes=RESERVE),
        )
        self.full = FullDisk(config, self.metadata, self.disk, self._spawn)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def leader(self) -> int | None:
        return self.metadata.state.topics["t"].partitions[0].leader

    async def begin(self) -> None:
        await self.metadata.start()
        for node in (1, 2, 3):
            await self.metadata.propose(RegisterNode(node, "h", node, 0, "", "", node))
        await self.metadata.propose(CreateTopic("t", 1, 3))
        first = self.metadata.state.topics["t"].partitions[0].replicas[0]
        if first != 1:  # whoever is placed first leads
            await self.metadata.propose(SetDraining(first, True))
            await self.metadata.propose(SetDraining(first, False))
        for other in (2, 3):
            if self.leader() == other:
                await self.metadata.propose(SetDraining(other, True))
        assert self.leader() == 1
        for other in (2, 3):
            await self.metadata.propose(SetDraining(other, False))
        assert self.leader() == 1

    @property
    def is_draining(self) -> bool:
        return self.metadata.state.nodes[1].draining

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not holds():  # noqa: ASYNC110 - of whatever state
                await asyncio.sleep(0.002)


def run(body: Callable[[World], Awaitable[None]], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "LOOK_S", 0.01)

    async def main() -> None:
        world = World()
        await world.begin()
        await body(world)
        assert not [task for task in world.tasks if task.done() and task.exception()]
        for task in world.tasks:
            task.cancel()

    asyncio.run(main())


def test_leaders_move_away_and_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        world.disk.capacity = 0
        for _ in range(5):
            world.full.found()
        await world.until(lambda: world.leader() != 1)
        assert len(world.tasks) == 1
        assert world.is_draining
        world.disk.capacity = 2 * RESERVE
        await asyncio.sleep(0.05)
        assert world.is_draining, "that is too little to go on with"
        world.disk.capacity = 10 * RESERVE
        await world.until(lambda: not world.is_draining)
        assert not world.full.is_full
        world.disk.capacity = 0
        world.full.found()
        await world.until(lambda: world.is_draining)

    run(body, monkeypatch)


def test_what_an_operator_drained_stays_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        await world.metadata.propose(SetDraining(1, True))
        world.disk.capacity = 0
        world.full.found()
        await asyncio.sleep(0.03)
        world.disk.capacity = None
        await world.until(lambda: world.tasks[0].done())
        assert world.is_draining

    run(body, monkeypatch)


def test_it_is_tried_until_there_is_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        world.metadata.refuse = lambda command: NoLeader("not now")
        world.disk.capacity = 0
        world.full.found()
        await asyncio.sleep(0.03)
        assert not world.is_draining
        world.metadata.refuse = lambda command: None
        await world.until(lambda: world.is_draining)
        world.disk.capacity = None
        await world.until(lambda: not world.is_draining)

    run(body, monkeypatch)


def test_a_disk_with_room_by_the_time_it_is_looked_at_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(world: World) -> None:
        before = world.metadata.proposals
        world.full.found()
        await world.until(lambda: world.tasks[0].done())
        assert world.metadata.proposals == before

    run(body, monkeypatch)
