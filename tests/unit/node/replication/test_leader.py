"""The leader's side of a conversation with one follower, over a partition with a real log."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from simdisk import SimDisk

from raftq.client.common.errors import FencedEpoch, RemoteProtocolError
from raftq.client.wire.batch import encode
from raftq.client.wire.messages import Produce
from raftq.client.wire.node_messages import Progress, Replicate, Subscription
from raftq.cluster.metadata.topic_config import topic_config
from raftq.node.replication.leader import FollowerSession, FollowerSessions, Throttle
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import PartitionLog, known_producers
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.replication.replica import Decided, Replica
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log
from raftq.node.storage.syncer import LoopSyncer

BIG, SMALL = b"x" * 100_000, b"x"
ALIVE = {1: 11, 2: 22}


class World:
    """A leader (node 1) of one partition with one follower (node 2), and their conversation."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.syncer = LoopSyncer(self.loop)
        self.disk = disk = SimDisk()
        disk.make_directory("/p")
        log = Log.open(disk, "/p/data", LogConfig(), 0)
        replica = Replica(1, 3.0, lambda node: True)
        ref = PartitionRef("t", 7, 0, "/p")
        self.partition = Partition(ref, log, known_producers(log, "/p"), replica, self)
        self.partition.configure(topic_config({"min_insync": 2}, 2))
        self.partition.decide(Decided(1, 1, 1, (1, 2), (1, 2), (1, 1), 2), 1)
        self.follower_session = FollowerSession(
            self.loop, (2, 22), {(7, 0): self.partition}.get, Throttle(1 << 30)
        )
        self.number = 0
        self.damages: list[int] = []

    def mark_active(self, partition: Partition) -> None: ...
    def damaged(self, partition_log: PartitionLog, error: BaseException) -> None:
        self.damages.append(partition_log.log.damaged[0].start)

    def failed(self, partition: Partition, error: BaseException) -> None:
        raise error

    def ask(self, **fields: object) -> "asyncio.Future[object]":
        request = Replicate(2, 22, self.number, wait_ms=10_000, **fields)  # type: ignore[arg-type]
        self.number += 1
        return self.follower_session.handle(request)

    def subscribe(self, end: int = 0) -> "asyncio.Future[object]":
        return self.ask(subscribe=(Subscription(7, 0, 1, 1, 0, end),))

    def produce(self, value: bytes) -> object:
        return self.partition.produce(Produce("t", 0), memoryview(encode([value])))


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(World())

    asyncio.run(main())


def length(future: "asyncio.Future[object]") -> int:
    reply, buffers = future.result()  # type: ignore[misc]
    assert sum(map(len, buffers)) == sum(one.length for one in reply.partitions)
    return len(buffers)


def test_replies_leave_in_the_order_of_their_requests() -> None:
    """A parked request is answered by an append, and the next one, which finds more, at once: a
    handler that answered that one directly would overtake the first, whose answer waits for the
    loop."""

    async def scenario(world: World) -> None:
        left: list[int] = []
        first = world.subscribe()
        first.add_done_callback(lambda done: left.append(1))
        world.produce(BIG)
        world.produce(SMALL)
        second = world.ask()
        assert isinstance(second, asyncio.Future)
        second.add_done_callback(lambda done: left.append(2))
        await asyncio.wait((first, second))
        assert left == [1, 2]
        assert (length(first), length(second)) == (1, 1)

    run(scenario)


def test_a_follower_that_waits_is_handed_a_batch_at_once_and_a_busy_one_all_of_them() -> None:
    async def scenario(world: World) -> None:
        first = world.subscribe()
        world.produce(SMALL)
        assert first.done()
        world.produce(BIG)
        world.produce(SMALL)
        second = world.ask()
        assert (length(first), length(second)) == (1, 2)

    run(scenario)


def test_what_a_follower_has_makes_records_readable_and_answers_the_producer() -> None:
    async def scenario(world: World) -> None:
        world.subscribe()
        answer = world.produce(BIG)
        assert isinstance(answer, asyncio.Future)
        assert not answer.done()
        world.ask(progress=(Progress(7, 0, 1, 1, 1),))
        assert (await answer).base_offsets == (0,)
        assert world.partition.replica.high_watermark == 1

    run(scenario)


def test_a_follower_that_claims_what_it_was_not_handed_has_to_subscribe_anew() -> None:
    async def scenario(world: World) -> None:
        world.subscribe()
        (refusal,) = (await world.ask(progress=(Progress(7, 0, 1, 1, 1),)))[0].partitions
        assert (refusal.verb, refusal.error) == ("refuse", RemoteProtocolError.code)
        assert not world.partition.data.listeners
        assert world.partition.replica.data.followers[2].end_offset == 0

    run(scenario)


def test_what_a_follower_refuses_is_looked_at_and_damage_in_the_active_segment_found() -> None:
    """
    1. A bit flips in the active segment; the batch is handed over as it is.
    2. The follower says that it cannot use it: the leader finds the damage, hands over what comes
       before it, and refuses the rest as it does with damage it knows.
    3. A follower that refuses sound batches changes nothing.
    """

    async def scenario(world: World) -> None:
        for _ in range(3):
            world.produce(SMALL)
        log = world.partition.log
        whole = world.ask(subscribe=(Subscription(7, 0, 1, 1, 0, 0, refused=True),))
        assert length(whole) == 1
        assert world.damages == []
        segment, position = log.stored_at(2)
        world.disk.flip_bit(segment.path, 8 * (position + 70))
        assert length(world.subscribe()) == 1
        assert world.damages == []
        told = world.ask(subscribe=(Subscription(7, 0, 1, 1, 0, 0, refused=True),))
        assert world.damages == [2]
        reply, buffers = told.result()  # type: ignore[misc]
        assert b"".join(buffers) == log.read(0, 1 << 20)
        reply, _ = world.ask().result()  # type: ignore[misc]
        assert [(one.verb, one.error) for one in reply.partitions] == [("refuse", "corrupt_batch")]

    run(scenario)


def test_a_request_out_of_its_turn_is_refused() -> None:
    async def scenario(world: World) -> None:
        world.subscribe()
        world.number = 5
        with pytest.raises(RemoteProtocolError, match="request 5 after 0"):
            world.ask()

    run(scenario)


def test_only_the_incarnation_that_the_metadata_knows_may_begin() -> None:
    async def scenario(world: World) -> None:
        heard: list[int] = []
        everyone = FollowerSessions(
            world.loop,
            lambda key: world.partition,
            ALIVE.get,
            lambda node, now: heard.append(node),
            1 << 30,
        )
        with pytest.raises(FencedEpoch):
            everyone.handle(Replicate(2, 23, 0), memoryview(b""), "session")
        everyone.handle(Replicate(2, 22, 0), memoryview(b""), "session")
        everyone.session_ended("session")
        with pytest.raises(FencedEpoch):
            everyone.handle(Replicate(2, 22, 1), memoryview(b""), "session")
        assert heard == [2], "what is refused is not heard"

    run(scenario)


def test_a_follower_of_an_older_epoch_is_refused_and_one_with_another_history_is_cut() -> None:
    async def scenario(world: World) -> None:
        world.produce(SMALL)
        old = await world.ask(subscribe=(Subscription(7, 0, 0, 1, 0, 0),))
        other = await world.ask(subscribe=(Subscription(7, 0, 1, 1, 0, 5, (0, 0)),))
        unknown = await world.ask(subscribe=(Subscription(9, 0, 1, 1, 0, 0),))
        said = [reply.partitions[0] for reply, _ in (old, other, unknown)]  # type: ignore[misc]
        assert [(one.verb, one.error, one.offset) for one in said] == [
            ("refuse", "fenced_epoch", 0),
            ("truncate", "", 0),
            ("refuse", "unknown_partition", 0),
        ]

    run(scenario)
