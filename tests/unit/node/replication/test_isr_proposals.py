"""What a node proposes about partitions, and when it removes one: nothing but answers count."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from metadatafake import FakeLog, FakeMetadata
from simdisk import SimDisk

from raftq.client.common.errors import FencedEpoch, NoLeader, OutcomeUnknown, RaftqError, Throttled
from raftq.cluster.metadata.commands import (
    ChangeIsr,
    Command,
    CreateTopic,
    MoveReplicas,
    RegisterNode,
)
from raftq.node.metrics.counters import NodeMetrics
from raftq.node.replication import isr_proposals as proposals
from raftq.node.replication import removals
from raftq.node.replication.isr_proposals import IsrProposals
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.replication.removals import Removals
from raftq.node.replication.replica import Decided, IsrChange, Replica

ALIVE = {1: 11, 2: 22, 3: 33}


class Metadata(FakeMetadata):
    """Ends the tries of a proposal as the test says, after having decided it or not."""

    def __init__(self) -> None:
        super().__init__(FakeLog(), 1)
        self.ids: list[bytes] = []
        self.counted: list[bool] = []
        self.is_counted: Callable[[], bool] = lambda: False
        self.endings: list[tuple[bool, RaftqError | None]] = []
        """Of each try: whether it is decided first, and what the proposer is told then."""

    async def propose(
        self, command: Command, timeout_s: float = 5.0, command_id: bytes | None = None
    ) -> Any:
        if not isinstance(command, ChangeIsr) or not self.endings:
            return await super().propose(command, timeout_s, command_id)
        assert command_id is not None
        self.ids.append(command_id)
        self.counted.append(self.is_counted())
        decided, error = self.endings.pop(0)
        if decided:
            result = await super().propose(command, timeout_s, command_id)
        if error is not None:
            raise error
        return result


class World:
    """Node 1 leads a partition, node 3 is ready to be let in."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.replica = Replica(1, 3.0, lambda node: True)
        self.ref = PartitionRef("t", 1, 0, "/data/t/0")
        self.partition: Any = SimpleNamespace(ref=self.ref, replica=self.replica)
        self.active: list[Any] = []
        home: Any = SimpleNamespace(
            metrics=NodeMetrics(), is_started=True, mark_active=self.active.append
        )
        self.proposals = IsrProposals(1, metadata, home)

    async def start(self) -> IsrChange:
        for node, incarnation in ALIVE.items():
            await self.metadata.propose(RegisterNode(node, f"h{node}", 1, 0, "", "", incarnation))
        await self.metadata.propose(CreateTopic("t", 1, 3, {"min_insync": 2}))
        await self.metadata.propose(ChangeIsr(1, 0, 1, 1, 1, ((1, 11), (2, 22))))
        self.replica.lead(self.decided(), [(0, 0)], 0.0)
        for node in (2, 3):
            self.replica.data.on_progress(node, ALIVE[node], 0, 0.0)
        change = self.replica.next_change(ALIVE, 1.0)
        assert change is not None
        assert change.joins == 1
        return change

    def decided(self) -> Decided:
        state = self.metadata.state.topics["t"].partitions[0]
        return Decided(
            state.epoch, state.version, state.leader, state.replicas, state.isr,
            state.assignments, 2,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals, "RETRY_S", 0.0)
    monkeypatch.setattr(removals, "RETRY_S", 0.0)


def test_a_try_that_failed_says_nothing_of_the_one_before_it() -> None:
    """
    1. The first try is taken, and nothing is heard of it; the next ones certainly fail.
    2. All the while node 3 counts, because it may be in the set.
    3. The last try is the same command: it is answered with what became of the first.
    """

    async def main() -> None:
        world = World(Metadata())
        change = await world.start()
        world.metadata.endings = [
            (True, OutcomeUnknown("no answer")),
            (False, NoLeader("no leader")),
            (False, Throttled("too much")),
            (True, None),
        ]
        world.metadata.is_counted = lambda: world.replica.awaits(change)
        await world.proposals.change(world.partition, change)
        assert len(set(world.metadata.ids)) == 1
        assert len(world.metadata.ids) == 4
        assert world.metadata.counted == [True] * 4
        # Decided, and here the role has not heard of it yet: node 3 counts until it has.
        assert world.replica.awaits(change)
        world.replica.update(world.decided(), 2.0)
        assert not world.replica.awaits(change)
        assert world.replica.decided.isr == (1, 2, 3)

    asyncio.run(main())


def test_a_refusal_ends_a_proposal_when_nothing_newer_is_known() -> None:
    async def main() -> None:
        world = World(Metadata())
        change = await world.start()
        world.metadata.endings = [(False, FencedEpoch("node 3 is not alive"))]
        await world.proposals.change(world.partition, change)
        assert not world.replica.awaits(change)
        assert world.active == [world.partition]

    asyncio.run(main())


def test_a_proposal_of_a_closed_replica_is_not_repeated() -> None:
    async def main() -> None:
        world = World(Metadata())
        change = await world.start()
        world.metadata.endings = [(False, NoLeader("no leader"))] * 3
        world.replica.close()
        await world.proposals.change(world.partition, change)
        assert world.metadata.ids == []

    asyncio.run(main())


class Removing:
    """A node that was moved away from a partition, and its files."""

    def __init__(self) -> None:
        self.log = FakeLog()
        self.metadata = FakeMetadata(self.log, 4)
        self.disk = SimDisk(1)
        self.ref = PartitionRef("t", 1, 0, "/t/0")
        self.disk.make_directory(f"{self.ref.directory}/data")
        self.failures: list[BaseException] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.removals = Removals(4, self.metadata, self.disk, self._spawn)
        self.removals.start(self.failures.append)

    def _spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    async def start(self) -> None:
        for node in (1, 2, 3, 4):
            await self.metadata.propose(RegisterNode(node, f"h{node}", 1, 0, "", "", node))
        await self.metadata.propose(CreateTopic("t", 1, 3))

    @property
    def is_there(self) -> bool:
        return self.disk.exists(f"{self.ref.directory}/data")


def test_files_of_a_replica_that_was_moved_away_are_removed_when_that_is_confirmed() -> None:
    async def main() -> None:
        world = Removing()
        await world.start()
        index = world.metadata.index
        world.removals.add(world.ref)
        assert world.is_there
        await asyncio.gather(*world.tasks)
        assert world.metadata.index == index + 1
        assert not world.is_there
        assert not world.failures

    asyncio.run(main())


def test_files_of_a_replica_that_was_moved_back_meanwhile_stay() -> None:
    """The node has not heard of it yet when it is to remove them: it asks first."""

    async def main() -> None:
        world = Removing()
        await world.start()
        world.metadata.cut(False)
        replicas = world.log.state.topics["t"].partitions[0].replicas
        spare = next(one for one in replicas if one != 4)
        if 4 not in replicas:
            target = (4, *(one for one in replicas if one != spare))
            world.log.decide(MoveReplicas("t", 0, target), b"move")
        world.removals.add(world.ref)
        await asyncio.sleep(0)
        assert world.is_there, "there is no word yet"
        world.metadata.cut(True)
        await asyncio.gather(*world.tasks)
        assert world.is_there
        assert not world.failures

    asyncio.run(main())


def test_a_node_that_stops_removes_nothing_more() -> None:
    async def main() -> None:
        world = Removing()
        await world.start()
        world.metadata.cut(False)
        world.removals.add(world.ref)
        await asyncio.sleep(0)
        world.removals.stop()
        world.metadata.cut(True)
        await asyncio.gather(*world.tasks)
        assert world.is_there

    asyncio.run(main())
