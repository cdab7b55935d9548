"""A node tells where its copies end, for as long as and only while the metadata asks for it."""

import asyncio
from collections.abc import Awaitable, Callable

from metadatafake import FakeLog, FakeMetadata
from metadatamodel import register
from simdisk import SimDisk

from raftq.client.common.errors import NoLeader
from raftq.client.wire.batch import encode
from raftq.cluster.metadata.commands import ChangeIsr, Command, CreateTopic, FenceNode, TellEnds
from raftq.cluster.metadata.state import PartitionState
from raftq.cluster.metadata.topic_config import topic_config
from raftq.node.replication.end_reports import EndReporter
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import PartitionLog, known_producers
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.replication.replica import Decided, Replica
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log
from raftq.node.storage.syncer import LoopSyncer


class World:
    """Node 2 holds a copy of t/0 that ends at 2, in epoch 1; only node 1 was in sync."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.syncer = LoopSyncer(self.loop)
        self.log = FakeLog()
        self.metadata = FakeMetadata(self.log, 2)
        disk = SimDisk()
        disk.make_directory("/p")
        log = Log.open(disk, "/p/data", LogConfig(), 0)
        log.append(bytearray(encode([b"a", b"b"])), 1)
        self.replica = Replica(2, 3.0, lambda node: True)
        self.partition = Partition(
            PartitionRef("t", 1, 0, "/p"), log, known_producers(log, "/p"), self.replica, self
        )
        self.partition.configure(topic_config({}, 3))
        self.tasks: list[asyncio.Task[None]] = []
        self.telling = EndReporter(2, self.metadata, {(1, 0): self.partition}.get, self.spawn)
        self.telling.incarnation = 2

    def spawn(self, work) -> None:  # type: ignore[no-untyped-def]
        self.tasks.append(self.loop.create_task(work))

    def mark_active(self, partition: Partition) -> None: ...
    def damaged(self, partition_log: PartitionLog, error: BaseException) -> None: ...
    def disk_full(self) -> None: ...
    def failed(self, partition: Partition, error: BaseException) -> None:
        raise error

    @property
    def state(self) -> PartitionState:
        return self.metadata.state.topics["t"].partitions[0]

    async def lose(self) -> None:
        """Node 1 comes back with nothing."""
        propose = self.metadata.propose
        for node in (1, 2, 3):
            await propose(register(node))
        await propose(CreateTopic("t", 1, 3, {"min_insync": 1}))
        for node in (2, 3):
            await propose(FenceNode(node, 1))
        one = self.state
        await propose(ChangeIsr(1, 0, 1, one.epoch, one.version, ((1, 1),)))
        for node in (2, 3):
            await propose(register(node, 2))
        await propose(FenceNode(1, 1))
        await propose(register(1, 2, lost="everything"))

    def look(self) -> None:
        """As partitions do: the role first."""
        one = self.state
        decided = Decided(
            one.epoch, one.version, one.leader, one.replicas, one.isr, one.assignments, 1
        )
        self.partition.decide(decided, 2)
        self.telling.check(self.partition, one)

    async def ended(self) -> None:
        await asyncio.gather(*self.tasks)

    def told(self) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        recovery = self.state.recovery
        assert recovery is not None
        return [(one.node_id, one.ends) for one in recovery.told]


def run(body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        async with asyncio.timeout(10):
            await world.metadata.start()
            await world.lose()
            await body(world)

    asyncio.run(main())


def test_a_node_that_is_asked_tells_once() -> None:
    async def body(world: World) -> None:
        world.look()
        world.look()
        await world.ended()
        assert world.told() == [(2, ((1, 2),))]
        told = world.metadata.proposals
        world.look()
        await world.ended()
        assert world.metadata.proposals == told
        assert len(world.tasks) == 1

    run(body)


def test_what_it_had_lacked_is_synced_before_it_is_told() -> None:
    """It may be in sync next, and alone."""

    async def body(world: World) -> None:
        disk = SimDisk()
        disk.make_directory("/p")
        leader = Log.open(disk, "/p/data", LogConfig(), 0)
        for values in ([b"a", b"b"], [b"c"]):
            leader.append(bytearray(encode(values)), 1)
        partition_log = world.partition.data
        partition_log.take(leader.read(2, 1), 3, 0)
        assert partition_log.log.flushed_offset == 0
        world.look()
        await world.ended()
        assert world.told() == [(2, ((1, 3),))]
        assert partition_log.log.flushed_offset == 3

    run(body)


def test_it_is_told_until_it_is_decided() -> None:
    async def body(world: World) -> None:
        errors = [NoLeader("none"), NoLeader("none")]

        def refuse(command: Command) -> NoLeader | None:
            return errors.pop() if errors and isinstance(command, TellEnds) else None

        world.metadata.refuse = refuse
        world.look()
        await world.ended()
        assert not errors
        assert world.told() == [(2, ((1, 2),))]

    run(body)


def test_a_copy_that_has_not_heard_of_the_question_tells_nothing() -> None:
    """It may still follow somebody, and grow."""

    async def body(world: World) -> None:
        world.telling.check(world.partition, world.state)
        await world.ended()
        assert world.told() == []
        world.look()
        await world.ended()
        assert world.told() == [(2, ((1, 2),))]

    run(body)


def test_after_a_fence_it_is_told_again() -> None:
    async def body(world: World) -> None:
        world.look()
        await world.ended()
        await world.metadata.propose(FenceNode(2, 2))
        assert world.told() == []
        world.look()
        await asyncio.sleep(0)
        await world.metadata.propose(register(2, 2))
        await world.ended()
        assert world.told() == [(2, ((1, 2),))]

    run(body)


def test_nobody_tells_after_the_end() -> None:
    async def body(world: World) -> None:
        world.log.leader = None
        world.metadata.refuse = lambda command: NoLeader("none")
        world.look()
        await asyncio.sleep(0)
        world.telling.stop()
        await world.ended()
        assert world.told() == []

    run(body)
