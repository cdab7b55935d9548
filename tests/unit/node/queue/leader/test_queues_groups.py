"""Groups on a partition: stored offsets and their owners, resets, pauses, purges, failover."""

import asyncio
from random import Random
from typing import Any

import pytest
from fake_queue import Cluster, pause, run, values

from raftq.client.common.errors import (
    DiskFull,
    InvalidArgument,
    NotLeader,
    OffsetOutOfRange,
    RaftqError,
    UnknownGroup,
)
from raftq.client.wire import queue_messages as wire
from raftq.node.replication.partition_log import DATA, LEDGER


async def store(
    cluster: Cluster, offset: int, owner_epoch: int = -1, group: str = "g", turn: int = 0
) -> Any:
    row = wire.StoreOffset("orders", 0, offset, owner_epoch, turn)
    message = wire.StoreOffsets(group, "m", (row,))
    return (await cluster.ask(cluster.handlers.store_offsets, message)).offsets[0]


async def read(cluster: Cluster, owner_epoch: int = -1, group: str = "g") -> Any:
    message = wire.ReadOffsets(group, "m", (wire.ReadOffset("orders", 0, owner_epoch),))
    return (await cluster.ask(cluster.handlers.read_offsets, message)).offsets[0]


def test_a_new_owner_fences_the_one_before() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(*[b"x"] * 10)
        assert (await read(cluster)).offset == -1
        assert (await store(cluster, 3)).error == ""
        assert (await read(cluster, 5)).offset == 3
        assert (await store(cluster, 4)).error == "fenced_generation"
        assert (await store(cluster, 4, 5)).error == ""
        assert (await read(cluster, 6)).offset == 4
        assert (await store(cluster, 5, 5)).error == "fenced_generation"
        assert (await read(cluster, 5)).error == "fenced_generation"
        assert (await store(cluster, 6, 6)).error == ""
        assert (await store(cluster, 99, 6)).error == "offset_out_of_range"
        cluster.fail_over()
        assert (await store(cluster, 7, 5)).error == "fenced_generation"
        found = await read(cluster)
        assert (found.offset, found.owner_epoch, found.high_watermark) == (6, 6, 10)
        # An operator's reset ends ownership, but not the fence.
        assert (await cluster.steer("reset", to="offset", at=2)).offset == 2
        assert (await store(cluster, 3)).error == ""
        assert (await store(cluster, 4, 5)).error == "fenced_generation"
        assert (await store(cluster, 4, 6)).error == ""

    run(main())


def test_a_late_store_of_the_same_owner_changes_nothing() -> None:
    """
    1. A store hangs on its way, the next one of the same owner arrives, then the first one.
    2. An owner that steps back on purpose does so with a later turn.
    3. Neither undoes what an operator has set since, and all of that outlives its leader.
    """

    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(*[b"x"] * 10)
        await read(cluster, 5)
        assert (await store(cluster, 8, 5, turn=2)).offset == 8
        late = await store(cluster, 3, 5, turn=1)
        assert (late.error, late.offset) == ("", 8)
        cluster.fail_over()
        assert (await store(cluster, 3, 5, turn=1)).offset == 8
        assert (await store(cluster, 4, 5, turn=3)).offset == 4
        await cluster.steer("reset", to="offset", at=1)
        assert (await store(cluster, 4, 5, turn=3)).offset == 1
        cluster.queue().engine.ledger.begin_snapshot()
        await pause(0.1)
        cluster.fail_over()
        assert (await store(cluster, 4, 5, turn=3)).offset == 1
        assert (await store(cluster, 6, 5, turn=4)).offset == 6
        # The next owner counts for itself.
        await read(cluster, 6)
        assert (await store(cluster, 7, 6, turn=1)).offset == 7
        assert (await store(cluster, 5, 6)).offset == 5

    run(main())


def test_a_store_is_answered_when_it_is_replicated_and_a_read_tells_nothing_less() -> None:
    async def main() -> None:
        cluster = Cluster(lag_s=None)
        cluster.serve()
        cluster.publish(b"x")
        cluster.partitions[0].replicate()
        stored = asyncio.ensure_future(store(cluster, 1))
        asked = asyncio.ensure_future(read(cluster))
        await pause(1)
        assert not stored.done()
        assert not asked.done()
        cluster.partitions[0].replicate()
        assert (await stored).error == ""
        assert (await asked).offset == 1

    run(main())


def test_workers_begin_where_readers_of_the_group_stopped() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(*[b"%d" % n for n in range(5)])
        await store(cluster, 3)
        assert values(await cluster.lease()) == [b"3", b"4"]
        assert values(await cluster.lease(group="new", start="earliest"))[0] == b"0"
        assert await cluster.lease(group="late", start="latest") == []
        cluster.publish(b"5")
        assert values(await cluster.lease(group="late", wait_ms=1000)) == [b"5"]

    run(main())


@pytest.mark.parametrize("wait_ms", [0, 500])
def test_a_group_that_was_told_there_is_nothing_has_begun(wait_ms: int) -> None:
    async def main() -> None:
        cluster = Cluster(lag_s=None)
        cluster.serve()
        cluster.publish(b"old")
        cluster.partitions[0].replicate()
        asked = asyncio.ensure_future(cluster.lease(start="latest", wait_ms=wait_ms))
        await pause(1)
        assert not asked.done()
        cluster.partitions[0].replicate()
        assert await asked == []
        cluster.publish(b"new")
        cluster.partitions[0].lag_s = 0.001
        cluster.partitions[0].replicate()
        cluster.fail_over()
        assert values(await cluster.lease(start="latest")) == [b"new"]

    run(main())


def test_a_reset_delivers_again_and_a_purge_never() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        for n in range(5):
            cluster.publish(b"%d" % n, timestamps=1000 * n)
        held = await cluster.lease(wait_ms=1000)
        await cluster.settle("ack", held[:4])
        waiting = asyncio.ensure_future(cluster.lease(wait_ms=9000))
        await pause(0.1)
        reply = await cluster.steer("reset", to="time", at=2500)
        assert (reply.offset, reply.count) == (3, 1)
        assert values(await waiting) == [b"3", b"4"]
        assert (await cluster.settle("ack", held[4])).errors == ("lease_replaced",)
        with pytest.raises(OffsetOutOfRange):
            await cluster.steer("reset", to="offset", at=77)
        reply = await cluster.steer("reset", to="earliest")
        assert (reply.offset, reply.count) == (0, 2)
        reply = await cluster.steer("purge")
        assert (reply.offset, reply.count) == (5, 5)
        assert await cluster.lease() == []
        cluster.fail_over()
        assert await cluster.lease() == []
        assert (await cluster.describe()).unsettled == 0

    run(main())


def test_a_paused_group_gets_nothing_until_it_is_resumed() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a", b"b")
        held = await cluster.lease(records=1, wait_ms=1000)
        await cluster.steer("pause")
        assert await cluster.lease(wait_ms=1000) == []
        assert (await cluster.settle("ack", held)).errors == ("",)
        cluster.fail_over()
        waiting = asyncio.ensure_future(cluster.lease(wait_ms=60_000))
        await pause(10)
        assert not waiting.done()
        assert (await cluster.describe()).paused
        await cluster.steer("resume")
        assert values(await waiting) == [b"b"]

    run(main())


def test_a_deleted_group_is_forgotten_for_ever() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a")
        held = await cluster.lease(wait_ms=1000)
        await store(cluster, 1)
        await cluster.steer("delete")
        assert (await cluster.settle("ack", held)).errors == ("lease_expired",)
        with pytest.raises(UnknownGroup):
            await cluster.steer("delete")
        cluster.fail_over()
        assert (await read(cluster)).offset == -1
        (again,) = await cluster.lease()
        assert again.attempt == 1

    run(main())


def test_names_of_the_cluster_are_not_for_clients() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        with pytest.raises(InvalidArgument):
            await cluster.lease(group="__dlq")
        with pytest.raises(InvalidArgument):
            await cluster.lease(records=0)
        with pytest.raises(InvalidArgument):
            await cluster.lease(lease_ms=1 << 62)
        with pytest.raises(InvalidArgument):
            await cluster.steer("reset", group="__dlq")
        with pytest.raises(InvalidArgument):
            await cluster.lease_from([0, 0])

    run(main())


def test_a_full_disk_refuses_and_goes_on_when_there_is_room() -> None:
    """1. an ack cannot be written, 2. it is refused, 3. memory is as the log says, 4. room."""

    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a", b"b")
        held = await cluster.lease(wait_ms=1000)
        disk = cluster.partitions[0].disk
        disk.capacity = disk.used_bytes()
        with pytest.raises(DiskFull) as caught:
            await cluster.settle("ack", held[0])
        assert caught.value.outcome == "failed"
        disk.capacity = None
        described = await cluster.describe()
        assert (described.in_flight, described.settled_offset) == (2, 0)
        assert (await cluster.settle("ack", held)).errors == ("", "")
        cluster.fail_over()
        assert (await cluster.describe()).settled_offset == 2

    run(main())


def test_a_store_whose_leader_is_replaced_meanwhile_may_have_happened() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a", b"b")
        await pause(0.1)
        assert (await store(cluster, 1)).error == ""
        cluster.partitions[0].lag_s = None  # nothing is replicated any more
        waiting = asyncio.ensure_future(store(cluster, 2))
        await pause(0.1)
        assert not waiting.done()
        cluster.fail_over()
        answer = await waiting
        assert RaftqError.registry[answer.error].outcome == "unknown"
        assert issubclass(RaftqError.registry[answer.error], NotLeader)

    run(main())


def test_nobody_waits_for_records_at_a_leader_that_is_cut_off() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        parked = asyncio.ensure_future(cluster.lease(wait_ms=60_000))
        await pause(0.1)
        assert not parked.done()
        cluster.cut_off = True
        cluster.handlers.end_waiting()
        with pytest.raises(NotLeader):
            await parked
        with pytest.raises(NotLeader):
            await cluster.lease(wait_ms=60_000)
        assert await cluster.lease() == [], "whoever does not wait is answered"
        cluster.publish(b"a")
        await pause(0.1)
        assert values(await cluster.lease(wait_ms=60_000)) == [b"a"], "what is there is given out"
        cluster.cut_off = False
        parked = asyncio.ensure_future(cluster.lease(wait_ms=60_000))
        await pause(0.1)
        cluster.publish(b"b")
        assert values(await parked) == [b"b"]

    run(main())


def test_a_lease_that_cannot_be_written_is_no_lease() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a")
        held = await cluster.lease(wait_ms=1000)
        parked = asyncio.ensure_future(cluster.lease(wait_ms=60_000, holder="other"))
        idle = asyncio.ensure_future(cluster.lease(wait_ms=60_000, group="idle", start="latest"))
        await pause(0.1)
        disk = cluster.partitions[0].disk
        disk.capacity = disk.used_bytes()
        with pytest.raises(DiskFull):
            await cluster.settle("release", held)
        with pytest.raises(DiskFull):
            await parked  # it was given the record in the same turn, which came to nothing
        disk.capacity = None
        await pause(2)
        assert await cluster.lease(holder="other") == []
        assert (await cluster.settle("release", held)).errors == ("",)
        (again,) = await cluster.lease(holder="other")
        assert again.attempt == 1
        assert not idle.done()
        cluster.publish(b"b")
        assert values(await idle) == [b"b"]

    run(main())


def test_unreadable_records_wait_and_block_nobody() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        for n in range(3):
            cluster.publish(b"%d" % n * 3000)
        await pause(0.1)
        partition = cluster.partitions[0]
        log = partition.logs["data"].log
        path = next(iter(log.segments.items)).path
        position = len(log.read(0, 1)) + 2
        partition.disk.flip_bit(path, position * 8)
        held = await cluster.lease()
        assert [one.offset for one in held] == [0, 2]
        assert cluster.damage
        assert cluster.damage[0][0] == DATA
        partition.disk.flip_bit(path, position * 8)
        log._reader.segments.items[0].facts.damaged.clear()
        (again,) = await cluster.lease(wait_ms=60_000)
        assert (again.offset, again.attempt) == (1, 1)

    run(main())


def test_a_damaged_ledger_waits_for_repair_and_then_believes_what_is_left() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(*[b"%d" % n for n in range(10)])
        held = await cluster.lease(wait_ms=1000)
        await cluster.settle("ack", held[:4])
        await cluster.settle("ack", held[6:8])
        partition = cluster.partitions[0]
        log = partition.logs["ledger"].log
        path = next(iter(log.segments.items)).path
        partition.disk.flip_bit(path, 8 * (len(log.read(0, 1)) + 120))  # the grant
        partition.end_epoch()
        cluster.queue().stop()
        cluster.serve()
        await pause(30)
        assert len(cluster.damage) == 10
        assert cluster.damage[0][0] == LEDGER
        again = await cluster.lease(wait_ms=1000)
        assert [one.offset for one in again] == [4, 5, 8, 9]
        await cluster.settle("ack", again)
        assert (await cluster.describe()).settled_offset == 10

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_a_new_leader_knows_leases_waits_and_attempts(seed: int) -> None:
    async def main() -> None:
        cluster = Cluster(seed=seed, config={"max_deliveries": 10})
        cluster.serve()
        rng = Random(seed)
        cluster.publish(*[b"%d" % n for n in range(30)])
        held = await cluster.lease(wait_ms=1000)
        rng.shuffle(held)
        await cluster.settle("ack", held[:10])
        await cluster.settle("nack", held[10:15], delay_ms=5_000)
        before = await cluster.describe()
        cluster.fail_over()
        after = await cluster.describe()
        assert (before.counters, before.in_flight) == (after.counters, after.in_flight)
        assert (await cluster.settle("ack", held[15:25])).errors == ("",) * 10
        assert (await cluster.settle("ack", held[:10])).errors == ("already_settled",) * 10
        again = await cluster.lease(wait_ms=10_000)
        assert sorted(one.offset for one in again) == sorted(one.offset for one in held[10:15])
        assert {one.attempt for one in again} == {2}
        cluster.queue().engine.deliveries.groups["g"].core.check_invariants()

    run(main())
