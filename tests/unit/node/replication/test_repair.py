"""Whom a node asks for a copy of what is damaged, and what it is given."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from simdisk import SimDisk

from raftq.client.common.errors import ConnectFailed, FencedEpoch, StorageFailed, UnknownPartition
from raftq.client.wire.batch import encode, stamp
from raftq.client.wire.node_messages import ReadReplica
from raftq.cluster.metadata.topic_config import topic_config
from raftq.node.config import StorageConfig
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import PartitionLog, known_producers
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.replication.replica import Decided, Replica
from raftq.node.replication.upkeep import Upkeep
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log
from raftq.node.storage.syncer import LoopSyncer

CONFIG = LogConfig(segment_bytes=4096, index_interval_bytes=256)
ALL = (1, 2, 3)


class Member:
    """One node with its copy of one partition; it is its own `Home`, `Net` and `Partitions`."""

    fetch_bytes_max, wait_ms, incarnation = 1 << 20, 100, 1

    def __init__(self, node_id: int, others: dict[int, "Member"]) -> None:
        self.loop = asyncio.get_running_loop()
        self.syncer = LoopSyncer(self.loop)
        self.node_id = node_id
        self.others = others
        self.asked: list[int] = []
        self.resigned: list[str] = []
        self.on_damage: Callable[[PartitionLog, BaseException], None] | None = None
        self.disk = SimDisk(node_id)
        self.disk.make_directory("/p")
        self.partition: Partition
        self.open()
        self.tasks: list[asyncio.Task[None]] = []
        self.upkeep = Upkeep(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            lambda: 1000,
            self.spawn,
            StorageConfig(scrub_bytes_s=1 << 20),
        )

    def open(self) -> None:
        log = Log.open(self.disk, "/p/data", CONFIG, 0)
        replica = Replica(self.node_id, 3.0, lambda node: True)
        ref = PartitionRef("t", 7, 0, "/p")
        self.partition = Partition(ref, log, known_producers(log, "/p"), replica, self)
        self.partition.configure(topic_config({"min_insync": 1}, 3))

    @property
    def partition_log(self) -> PartitionLog:
        return self.partition.data

    @property
    def log(self) -> Log:
        return self.partition.log

    def take(self, epoch: int, *texts: bytes, readable: int | None = None) -> None:
        """Batches of this epoch, and how much of the log is readable."""
        for text in texts:
            batch = encode([text], timestamps=1000)
            stamp(batch, self.log.end_offset, epoch)
            self.log.append_stamped(batch)
        self.log.sync()
        if readable is not None:
            self.partition_log.progress.high_watermark = readable

    def values(self) -> list[bytes]:
        return [value for batch in self.log.batches(0) for value in batch.values()]

    def rot(self, offset: int) -> None:
        segment, position = self.log.stored_at(offset)
        self.disk.flip_bit(segment.path, 8 * (position + 70))
        assert offset not in [one.base_offset for one in self.log.batches(0, skip_damaged=True)]

    async def repair(self) -> None:
        assert await self.upkeep._try_repair(self.partition_log) == (not self.log.damaged)

    # Home, Net and Partitions

    def mark_active(self, partition: Partition) -> None: ...
    def damaged(self, partition_log: PartitionLog, error: BaseException) -> None: ...
    def disk_full(self) -> None: ...
    def failed(self, partition: Partition, error: BaseException) -> None:
        raise error

    def resign(self, partition: Partition, reason: str) -> None:
        self.resigned.append(reason)

    def spawn(self, work: Awaitable[None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))  # type: ignore[arg-type]

    def find(self, key: tuple[int, int]) -> Partition | None:
        return self.partition if key == (7, 0) else None

    async def connect(self, node: int) -> "Asking":
        self.asked.append(node)
        if node not in self.others:
            raise ConnectFailed(f"node {node} is away")
        return Asking(self.others[node])


class Asking:
    """A connection to another member."""

    def __init__(self, member: Member) -> None:
        self.member = member

    async def request(self, message: ReadReplica) -> SimpleNamespace:
        _, parts = self.member.upkeep.read_replica(message, memoryview(b""), None)
        return SimpleNamespace(raw=memoryview(b"".join(parts)))

    async def close(self) -> None: ...


def run(scenario: Callable[[dict[int, Member]], Awaitable[None]]) -> None:
    async def main() -> None:
        members: dict[int, Member] = {}
        members |= {node: Member(node, members) for node in ALL}
        await scenario(members)

    asyncio.run(main())


def decide(
    members: dict[int, Member], epoch: int, leader: int | None, isr: tuple[int, ...]
) -> None:
    for member in members.values():
        member.partition.decide(
            Decided(epoch, epoch, leader, ALL, isr, (1,) * len(ALL), 1), member.node_id
        )


OLD = [b"old %d" % number for number in range(5)]


async def diverge(members: dict[int, Member]) -> None:
    """2 led epoch 2, wrote offset 5 and was cut off; 1 leads epoch 3, 3 follows it."""
    for member in members.values():
        member.take(1, *OLD, readable=5)
    members[2].take(2, b"never acknowledged")
    for node in (1, 3):
        members[node].take(3, b"committed in 3 ...", b"more", readable=7)
    decide(members, 3, 1, (1, 3))


def test_a_leader_takes_nothing_from_a_replica_that_has_not_been_cut_yet() -> None:
    async def scenario(members: dict[int, Member]) -> None:
        await diverge(members)
        leader = members[1]
        expected = leader.values()
        leader.rot(5)
        del members[3]
        await leader.repair()
        assert leader.asked == [3]
        assert leader.log.damaged
        members[3] = Member(3, members)
        members[3].take(1, *OLD)
        members[3].take(3, b"committed in 3 ...", b"more", readable=7)
        decide({3: members[3]}, 3, 1, (1, 3))
        await leader.repair()
        assert not leader.log.damaged
        assert leader.values() == expected

    run(scenario)


def test_a_leader_whose_damage_nobody_can_help_with_hands_on_what_is_not_acknowledged() -> None:
    """1. What is readable is asked for until somebody has it: the leader stays.
    2. What was not replicated before it was damaged is nowhere else, and followers wait behind it.
    """

    async def scenario(members: dict[int, Member]) -> None:
        await diverge(members)
        leader = members[1]
        del members[3]
        leader.rot(5)
        await leader.repair()
        assert leader.resigned == []
        leader.take(3, b"of nobody else")
        leader.rot(7)
        await leader.repair()
        assert leader.resigned == ["followers wait for records that are damaged here"]
        decide({1: leader}, 4, 3, (1, 3))
        await leader.repair()
        assert len(leader.resigned) == 1, "a follower has nothing to hand on"

    run(scenario)


def test_a_disk_that_fails_while_it_is_repaired_ends_the_node_and_not_only_the_log() -> None:
    """Else a log that nobody writes to refuses the next record, whenever that comes."""

    async def scenario(members: dict[int, Member]) -> None:
        await diverge(members)
        leader = members[1]
        leader.rot(5)
        leader.disk.fail_sync = True
        with pytest.raises(StorageFailed):
            await leader.upkeep._try_repair(leader.partition_log)

    run(scenario)


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_a_missing_segment_is_filled_by_who_has_the_same_history(role: str) -> None:
    """Where no file holds anything, the log itself can tell least of what belongs there."""

    async def scenario(members: dict[int, Member]) -> None:
        texts = [b"%d" % number * 900 for number in range(8)]
        for node in ALL:
            members[node].take(1, *texts[:4], readable=4)
        members[2].take(2, *[b"never acknowledged" * 40] * 3)
        for node in (1, 3):
            members[node].take(3, *texts[4:], b"end", readable=9)
        victim = members[1 if role == "leader" else 3]
        expected = victim.values()
        victim.log.close()
        names = [name for name in victim.disk.list("/p/data") if name.endswith(".log")]
        victim.disk.remove(f"/p/data/{names[1]}")
        victim.open()
        victim.partition_log.progress.high_watermark = 9
        decide(members, 3, 1, (1, 3))
        [gap] = victim.log.damaged
        await victim.repair()
        assert victim.asked == [3 if role == "leader" else 1]
        assert not victim.log.damaged, gap
        assert victim.values() == expected

    run(scenario)


def test_a_follower_asks_its_leader_and_nobody_while_there_is_none() -> None:
    async def scenario(members: dict[int, Member]) -> None:
        await diverge(members)
        follower = members[3]
        expected = follower.values()
        follower.rot(5)
        decide(members, 4, None, (1, 3))
        await follower.repair()
        assert follower.asked == []
        decide(members, 5, 1, (1, 3))
        await follower.repair()
        assert follower.asked == [1]
        assert follower.values() == expected

    run(scenario)


def test_only_what_is_readable_is_given_and_only_by_a_member_of_the_set_in_that_epoch() -> None:
    async def scenario(members: dict[int, Member]) -> None:
        await diverge(members)

        def ask(node: int, offset: int, epoch: int | None) -> list[int]:
            upkeep = members[node].upkeep
            request = ReadReplica(7, 0, offset, 1 << 20, 0, epoch)
            _, parts = upkeep.read_replica(request, memoryview(b""), None)
            return [len(part) for part in parts]

        members[3].partition_log.progress.high_watermark = 6
        assert ask(3, 0, 3) == [
            len(members[3].log.read(0, 1 << 20)) - len(members[3].log.read(6, 1))
        ]
        assert ask(3, 6, 3) == ask(3, 100, 3) == []
        assert ask(3, 6, None) != []
        assert ask(2, 5, None) != []
        for node, epoch in ((2, 3), (3, 2), (3, 4)):
            with pytest.raises(FencedEpoch):
                ask(node, 0, epoch)
        with pytest.raises(UnknownPartition):
            members[1].upkeep.read_replica(ReadReplica(8, 0, 0), memoryview(b""), None)

    run(scenario)


def test_repair_is_tried_again_until_somebody_knows_what_is_readable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(members: dict[int, Member]) -> None:
        await diverge(members)
        leader, waits = members[1], []
        expected = leader.values()
        leader.rot(5)
        members[3].partition_log.progress.high_watermark = 0

        async def pause(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 7:
                members[3].partition_log.progress.high_watermark = 7

        monkeypatch.setattr("raftq.node.replication.upkeep.sleep", pause)
        for _ in range(3):
            leader.upkeep._damaged(leader.partition_log, None)
        await asyncio.gather(*leader.tasks)
        assert leader.values() == expected
        assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
        assert len(leader.tasks) == 1

    run(scenario)


def test_what_comes_after_the_epoch_has_changed_is_not_taken() -> None:
    async def scenario(members: dict[int, Member]) -> None:
        await diverge(members)
        leader = members[1]
        leader.rot(5)
        real = Asking.request

        async def slow(self: Asking, message: ReadReplica) -> SimpleNamespace:
            reply = await real(self, message)
            decide(members, 4, 2, (2,))
            return reply

        Asking.request = slow  # type: ignore[method-assign]
        try:
            await leader.repair()
        finally:
            Asking.request = real  # type: ignore[method-assign]
        assert leader.log.damaged

    run(scenario)


def test_a_disk_that_cannot_be_read_does_not_end_the_scrub_for_good() -> None:
    async def scenario(members: dict[int, Member]) -> None:
        member = members[1]
        member.take(1, *[b"x" * 900] * 8)
        assert member.log.segment_count > 1
        member.disk.fail_read = True
        member.upkeep._scrub(member.partition)
        assert member.log._scrub.rounds == 0
        member.disk.fail_read = False
        member.upkeep._scrub(member.partition)
        assert member.log._scrub.rounds == 1

    run(scenario)
