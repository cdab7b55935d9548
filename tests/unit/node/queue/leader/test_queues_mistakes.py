"""Mistakes of other systems (SPEC section 11) that a replicated queue must not make.

Each is looked for with a change of leaders in between: what a new leader does not know is where
such mistakes come back.
"""

import asyncio

import pytest
from fake_queue import Cluster, Held, pause, run, values

from raftq.node.queue.core.lanes import LANES, WEIGHTS


@pytest.mark.parametrize("size", [1, 7, 100])
def test_mistake_01_no_record_of_a_lower_lane_is_ever_skipped(size: int) -> None:
    async def main() -> None:
        cluster = Cluster(config={"in_flight_max": 10_000})
        cluster.serve()
        for number in range(100):
            cluster.publish(b"%d" % number, lane=number % LANES)
        await pause(0.1)
        seen: list[Held] = []
        while held := await cluster.lease(records=size):
            seen += held
            if len(seen) < 200 and len(seen) % 3 == 0:
                cluster.fail_over()
        assert sorted(one.offset for one in seen) == list(range(100))
        await cluster.settle("ack", seen)
        assert (await cluster.describe()).settled_offset == 100

    run(main())


def test_mistake_02_busy_lanes_get_their_shares_within_two_points() -> None:
    async def main() -> None:
        cluster = Cluster(config={"in_flight_max": 100_000})
        cluster.serve()
        for _ in range(20):
            for lane in range(LANES):
                cluster.publish(*[b"x"] * 100, lane=lane)
        await pause(0.1)
        counts = [0] * LANES
        for _ in range(20):
            held = await cluster.lease(records=100)
            for one in held:
                counts[one.record.priority] += 1
        shares = [100 * count / sum(counts) for count in counts]
        for share, weight in zip(shares, WEIGHTS, strict=True):
            assert abs(share - weight) < 2, shares
        assert (await cluster.describe()).lanes == tuple(counts)

    run(main())


def test_mistake_03_a_nacked_record_comes_back_under_the_next_leader_and_blocks_nobody() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"bad", b"good")
        bad, good = await cluster.lease(wait_ms=1000)
        await cluster.settle("nack", bad, delay_ms=60_000)
        cluster.fail_over()
        await cluster.settle("ack", good)
        cluster.publish(b"next")
        (following,) = await cluster.lease(wait_ms=1000)
        assert following.value == b"next"
        await cluster.settle("ack", following)
        began = cluster.loop.time()
        (again,) = await cluster.lease(wait_ms=100_000)
        assert (again.value, again.attempt) == (b"bad", 2)
        assert 59 < cluster.loop.time() - began < 61

    run(main())


def test_mistake_04_acks_move_the_progress_of_the_group() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(*[b"x"] * 10)
        held = await cluster.lease(wait_ms=1000)
        reply = await cluster.settle("ack", held[1:])
        assert reply.settled_offset == 0
        cluster.fail_over()
        reply = await cluster.settle("ack", held[0])
        assert reply.settled_offset == 10
        assert (await cluster.describe()).unsettled == 0

    run(main())


def test_mistake_05_what_one_group_has_in_flight_is_nothing_to_another() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a", b"b")
        ours = await cluster.lease("ours", wait_ms=1000)
        cluster.fail_over()
        theirs = await cluster.lease("theirs")
        assert values(theirs) == values(ours) == [b"a", b"b"]
        assert (await cluster.settle("ack", ours, group="theirs")).errors == ("lease_foreign",) * 2
        await cluster.settle("ack", theirs, group="theirs")
        assert (await cluster.describe("ours")).in_flight == 2

    run(main())


def test_mistake_06_a_dead_letter_does_not_block_the_prefix() -> None:
    async def main() -> None:
        cluster = Cluster(lag_s=None)
        cluster.serve()
        cluster.publish(b"bad", b"good")
        cluster.partitions[0].replicate()
        asked = asyncio.ensure_future(cluster.lease())
        await pause(0.01)
        cluster.partitions[0].replicate()
        bad, good = await asked
        rejected = asyncio.ensure_future(cluster.settle("reject", bad, reason="bad"))
        await pause(0.001)
        cluster.partitions[0].replicate()  # the intent, before the copy is made
        await rejected
        cluster.partitions[0].lag_s = 0.001
        cluster.fail_over()
        await cluster.settle("ack", good)
        await pause(1)
        assert len(cluster.copies) == 1
        assert (await cluster.describe()).settled_offset == 2

    run(main())


def test_mistake_07_a_record_that_was_passed_by_is_found_again() -> None:
    async def main() -> None:
        cluster = Cluster(config={"visibility_timeout_ms": 2_000})
        cluster.serve()
        cluster.publish(*[b"%d" % n for n in range(10)])
        held = await cluster.lease(wait_ms=1000)
        await cluster.settle("ack", held[5:])
        cluster.fail_over()
        cluster.publish(b"later")
        later = await cluster.lease(wait_ms=1000, holder="other", lease_ms=60_000)
        assert values(later) == [b"later"]
        again = await cluster.lease(wait_ms=5_000, holder="other")
        assert values(again) == [b"0", b"1", b"2", b"3", b"4"]

    run(main())


def test_mistake_09_nothing_is_leased_that_the_next_leader_may_not_have() -> None:
    async def main() -> None:
        cluster = Cluster(lag_s=None)
        cluster.serve()
        cluster.publish(b"a")
        cluster.partitions[0].replicate()
        cluster.publish(b"unsure")
        asked = asyncio.ensure_future(cluster.lease())
        await pause(0.01)
        cluster.partitions[0].logs["ledger"].replicate()
        assert values(await asked) == [b"a"]

    run(main())


def test_mistake_16_a_record_whose_worker_died_comes_back_under_the_next_leader() -> None:
    async def main() -> None:
        cluster = Cluster(config={"visibility_timeout_ms": 5_000})
        cluster.serve()
        cluster.publish(b"a")
        await cluster.lease(wait_ms=1000)
        cluster.fail_over()
        assert await cluster.lease(holder="other") == []
        (again,) = await cluster.lease(wait_ms=10_000, holder="other")
        assert again.attempt == 2

    run(main())


def test_mistake_17_leases_are_reclaimed_without_anybody_asking() -> None:
    async def main() -> None:
        cluster = Cluster(config={"visibility_timeout_ms": 1_000, "max_deliveries": 1})
        cluster.serve()
        cluster.publish(b"a", b"b")
        await cluster.lease(records=1, wait_ms=1000)
        cluster.fail_over()
        await pause(5)
        assert (await cluster.describe()).in_flight == 0
        assert [copy[2] for copy in cluster.copies.values()] == ["max_deliveries"]

    run(main())
