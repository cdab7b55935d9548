"""The queue of a led partition: leases, settlements and retries, as clients see them."""

import asyncio
from typing import Any

import pytest
from fake_queue import Cluster, pause, run, values

from raftq.client.common.errors import InvalidArgument, NotEnoughReplicas, NotLeader
from raftq.client.wire import queue_messages as wire
from raftq.node.queue.leader import ledger as ledger_module


def test_records_are_leased_acked_and_gone() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a", b"b", b"c")
        held = await cluster.lease(wait_ms=1000)
        assert values(held) == [b"a", b"b", b"c"]
        assert [one.attempt for one in held] == [1, 1, 1]
        assert await cluster.lease() == []
        reply = await cluster.settle("ack", held)
        assert reply.errors == ("", "", "")
        assert reply.settled_offset == 3
        assert reply.in_flight == 0
        described = await cluster.describe()
        assert described.counters["acked"] == 3
        assert described.unsettled == 0

    run(main())


def test_the_first_lease_makes_the_topic_a_queue() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.partitions[0].lead()
        cluster.publish(b"a")
        asked = cluster.lease(wait_ms=1000)
        cluster.enable_queues = lambda topic: _enable(cluster)  # type: ignore[method-assign]
        assert values(await asked) == [b"a"]
        assert cluster.enabled == ["orders"]

    async def _enable(cluster: Cluster) -> None:
        cluster.enabled.append("orders")
        cluster.serve()

    run(main())


def test_nothing_is_answered_before_it_is_replicated() -> None:
    """1. a lease is taken, 2. it is answered only when the ledger is replicated, 3. so is an ack"""

    async def main() -> None:
        cluster = Cluster(lag_s=None)
        cluster.serve()
        cluster.publish(b"a")
        asked = asyncio.ensure_future(cluster.lease(wait_ms=5000))
        await pause(1)
        assert not asked.done()
        cluster.partitions[0].replicate()  # the record: now it is leased
        await pause(1)
        assert not asked.done()
        cluster.partitions[0].replicate()  # the ledger
        held = await asked
        assert values(held) == [b"a"]
        acked = asyncio.ensure_future(cluster.settle("ack", held))
        again = asyncio.ensure_future(cluster.settle("ack", held))
        await pause(1)
        assert not acked.done()
        assert not again.done()  # that it is settled is not sure yet, so nobody is told
        cluster.partitions[0].lag_s = 0.001
        cluster.partitions[0].replicate()
        assert (await acked).errors == ("",)
        assert (await again).errors == ("already_settled",)

    run(main())


def test_operations_of_one_turn_share_one_ledger_batch() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(*[b"%d" % n for n in range(100)])
        held = await cluster.lease(wait_ms=1000)
        log = cluster.partitions[0].logs["ledger"].log
        before = len(list(log.batches(log.start_offset)))
        replies = await asyncio.gather(*(cluster.settle("ack", one) for one in held))
        assert {reply.errors for reply in replies} == {("",)}
        assert len(list(log.batches(log.start_offset))) == before + 1

    run(main())


def test_records_that_are_not_replicated_are_not_leased() -> None:
    async def main() -> None:
        cluster = Cluster(lag_s=None)
        cluster.serve()
        cluster.publish(b"a")
        cluster.partitions[0].replicate()
        cluster.publish(b"b")
        asked = asyncio.ensure_future(cluster.lease())
        await pause(0.1)
        cluster.partitions[0].logs["ledger"].replicate()
        assert values(await asked) == [b"a"]

    run(main())


def test_a_parked_lease_is_woken_by_a_record_and_costs_nothing_meanwhile() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        asked = asyncio.ensure_future(cluster.lease(wait_ms=30_000))
        await pause(0.1)
        turns = cluster.loop.turns
        await pause(20)
        assert cluster.loop.turns - turns < 5
        cluster.publish(b"a")
        await pause(0.01)
        assert values(asked.result()) == [b"a"]
        began = cluster.loop.time()
        assert await cluster.lease(wait_ms=3_000) == []
        assert cluster.loop.time() - began == pytest.approx(3)

    run(main())


def test_parked_leases_are_served_in_the_order_they_came() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        asked = []
        for number in range(5):
            fields: Any = {"holder": f"w{number}", "wait_ms": 30_000}
            asked.append(asyncio.ensure_future(cluster.lease(records=1, **fields)))
            await pause(0.01)
        for number in range(5):
            cluster.publish(b"%d" % number)
            await pause(0.01)
            done = [one.done() for one in asked]
            assert done == [True] * (number + 1) + [False] * (4 - number)
        assert [values(one.result()) for one in asked] == [[b"%d" % n] for n in range(5)]

    run(main())


def test_a_newer_lease_of_the_same_holder_ends_the_parked_one() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        first = asyncio.ensure_future(cluster.lease(wait_ms=30_000, session="s"))
        other = asyncio.ensure_future(cluster.lease(wait_ms=30_000, session="t"))
        await pause(0.01)
        second = asyncio.ensure_future(cluster.lease(wait_ms=30_000, session="s"))
        await pause(0.01)
        assert first.result() == []
        assert not other.done()
        assert not second.done()
        cluster.publish(b"a")
        await pause(0.01)
        assert values(other.result()) == [b"a"]
        second.cancel()
        await pause(0.01)
        assert not cluster.queue()._waiters
        assert not cluster.handlers._parked

    run(main())


def test_a_caller_that_goes_away_gives_its_records_back_unspent() -> None:
    async def main() -> None:
        cluster = Cluster(lag_s=None)
        cluster.serve()
        cluster.publish(b"a")
        cluster.partitions[0].replicate()
        asked = asyncio.ensure_future(cluster.lease())
        await pause(0.01)
        asked.cancel()
        cluster.partitions[0].replicate()
        await pause(0.01)
        again = asyncio.ensure_future(cluster.lease(holder="other"))
        await pause(0.01)
        cluster.partitions[0].replicate()
        (held,) = await again
        assert held.attempt == 1

    run(main())


def test_an_expired_lease_is_redelivered_and_told_apart() -> None:
    async def main() -> None:
        cluster = Cluster(config={"visibility_timeout_ms": 5_000})
        cluster.serve()
        cluster.publish(b"a")
        (first,) = await cluster.lease(wait_ms=1000)
        waiting = asyncio.ensure_future(cluster.lease(wait_ms=30_000, holder="other"))
        await pause(5.1)
        (second,) = waiting.result()
        assert second.attempt == 2
        assert (await cluster.settle("ack", first)).errors == ("lease_replaced",)
        assert (await cluster.settle("ack", second)).errors == ("",)
        assert (await cluster.settle("ack", second)).errors == ("already_settled",)
        foreign = await cluster.settle("ack", second, group="others")
        assert foreign.errors == ("lease_foreign",)
        cluster.publish(b"b")
        (third,) = await cluster.lease(wait_ms=1000, group="others")
        await pause(5.1)
        assert (await cluster.settle("ack", third, group="others")).errors == ("lease_expired",)
        assert (await cluster.settle("ack", third)).errors == ("lease_foreign",)

    run(main())


def test_nack_waits_for_the_backoff_and_blocks_nobody() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a", b"b")
        first, second = await cluster.lease(wait_ms=1000)
        reply = await cluster.settle("nack", first)
        assert reply.errors == ("",)
        assert reply.next_visible > 0
        await cluster.settle("ack", second)
        cluster.publish(b"c")
        assert values(await cluster.lease(wait_ms=500)) == [b"c"]
        began = cluster.loop.time()
        (again,) = await cluster.lease(wait_ms=5000)
        assert (again.value, again.attempt) == (b"a", 2)
        assert 0.9 < cluster.loop.time() - began < 1.1

    run(main())


def test_postpone_and_release_spend_no_attempt_and_extend_keeps_a_lease() -> None:
    async def main() -> None:
        cluster = Cluster(config={"visibility_timeout_ms": 2_000})
        cluster.serve()
        cluster.publish(b"a")
        (held,) = await cluster.lease(wait_ms=1000)
        await cluster.settle("postpone", held, delay_ms=3_000)
        assert await cluster.lease(wait_ms=2_900) == []
        (held,) = await cluster.lease(wait_ms=1000)
        assert held.attempt == 1
        await cluster.settle("release", held)
        (held,) = await cluster.lease()
        assert held.attempt == 1
        await pause(1.9)
        await cluster.settle("extend", held, delay_ms=10_000)
        assert await cluster.lease(wait_ms=9_000, holder="other") == []
        assert (await cluster.settle("ack", held)).errors == ("",)
        with pytest.raises(InvalidArgument, match="delay_ms"):
            await cluster.settle("postpone", held)

    run(main())


def test_attempts_used_up_and_rejected_records_become_dead_letters_once() -> None:
    async def main() -> None:
        cluster = Cluster(config={"max_deliveries": 2, "backoff_ms": 10})
        cluster.serve()
        cluster.publish(b"a", b"b")
        first, second = await cluster.lease(wait_ms=1000)
        assert (await cluster.settle("reject", second, reason="bad")).dead == 1
        assert (await cluster.settle("ack", second)).errors == ("lease_expired",)
        await cluster.settle("nack", first)
        (first,) = await cluster.lease(wait_ms=1000)
        assert (await cluster.settle("nack", first)).dead == 1
        await pause(0.1)
        assert [copy[2] for copy in cluster.copies.values()] == ["bad", "max_deliveries"]
        described = await cluster.describe()
        assert described.counters["dead"] == 2
        assert described.settled_offset == 2
        assert described.in_flight == 0

    run(main())


def test_a_dead_letter_does_not_die_again() -> None:
    async def main() -> None:
        cluster = Cluster(topic="orders.dlq", config={"max_deliveries": 1, "backoff_max_ms": 5_000})
        cluster.serve()
        cluster.publish(b"a")
        (held,) = await cluster.lease(wait_ms=1000)
        for attempt in range(2, 5):
            await cluster.settle("reject" if attempt % 2 else "nack", held)
            (held,) = await cluster.lease(wait_ms=30_000)
            assert held.attempt == attempt
        assert not cluster.copies

    run(main())


def test_expired_records_are_settled_and_never_delivered() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        soon = int(cluster.loop.time() * 1000) + 1000
        cluster.publish(b"a", b"b", b"c", b"d", expiries=[soon, 0, soon, soon + 60_000])
        await pause(2)
        held = await cluster.lease()
        assert values(held) == [b"b", b"d"]
        assert (await cluster.describe()).counters["ttl_expired"] == 2
        await cluster.settle("ack", held)
        assert (await cluster.describe()).settled_offset == 4
        # A whole batch that has expired is not the end of what there is.
        cluster.publish(b"e", expiries=[1])
        cluster.publish(b"f")
        await pause(0.1)
        assert values(await cluster.lease()) == [b"f"]

    run(main())


def test_expired_records_become_dead_letters_when_the_topic_says_so() -> None:
    async def main() -> None:
        cluster = Cluster(config={"dead_letter_expired": "true"})
        cluster.serve()
        cluster.publish(b"a", b"b", expiries=[1, 0])
        held = await cluster.lease(wait_ms=1000)
        assert values(held) == [b"b"]
        await pause(0.1)
        assert [(rows[0][1:], reason) for _, rows, reason in cluster.copies.values()] == [
            ([0, 1], "expired")
        ]
        assert (await cluster.describe()).settled_offset == 1

    run(main())


def test_control_batches_are_passed_over() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"x", control=True)
        cluster.publish(b"a")
        held = await cluster.lease(wait_ms=1000)
        assert values(held) == [b"a"]
        await cluster.settle("ack", held)
        assert (await cluster.describe()).settled_offset == 2

    run(main())


def test_a_few_records_of_a_big_batch_come_without_the_others() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(*[b"%05d" % n * 200 for n in range(1000)], timestamps=list(range(1000)))
        await pause(0.1)
        message = wire.Lease("g", "w", (wire.LeasePartition("orders", 0),), records_max=10)
        seen = []
        for _ in range(100):
            reply, buffers = await cluster.ask(cluster.handlers.lease, message)
            assert sum(map(len, buffers)) < 12_000
            seen += [reply.partitions[0].ranges[0].start]
        assert seen == list(range(0, 1000, 10))
        assert not cluster.queue().engine.batch_reader._kept

    run(main())


def test_an_answer_is_not_larger_than_asked_for() -> None:
    async def main() -> None:
        cluster = Cluster(config={"in_flight_max": 10_000})
        cluster.serve()
        for lane in (0, 1, 2, 3, 4) * 20:
            cluster.publish(*[bytes(1000)] * 10, lane=lane)
        await pause(0.1)
        seen = []
        while held := await cluster.lease(records=1000, bytes_max=50_000):
            assert sum(len(one.value) for one in held) <= 50_000
            seen += [one.offset for one in held]
        assert sorted(seen) == list(range(1000))
        described = await cluster.describe()
        assert described.in_flight == 1000
        assert described.lanes == (200,) * 5
        cluster.queue().engine.deliveries.groups["g"].core.check_invariants()

    run(main())


def test_a_holder_has_at_most_so_many_in_flight() -> None:
    async def main() -> None:
        cluster = Cluster(config={"in_flight_max": 5})
        cluster.serve()
        cluster.publish(*[b"%d" % n for n in range(20)])
        held = await cluster.lease(wait_ms=1000)
        assert len(held) == 5
        full = asyncio.ensure_future(cluster.lease(wait_ms=10_000, session=1))
        other = asyncio.ensure_future(cluster.lease(wait_ms=10_000, holder="other", session=2))
        await pause(0.1)
        assert len(other.result()) == 5
        assert not full.done()
        await cluster.settle("ack", held[:2])
        await pause(0.1)
        assert len(full.result()) == 2

    run(main())


def test_one_lease_takes_from_several_partitions_fairly() -> None:
    async def main() -> None:
        cluster = Cluster(partitions=3)
        for number in range(3):
            cluster.serve(number)
            cluster.publish(*[b"%d" % number] * 100, number=number)
        await pause(0.1)
        found = await cluster.lease_from(range(3), records=250)
        assert sum(map(len, found)) == 250
        assert {len(one) for one in found} == {50, 100}
        cluster.partitions[1].end_epoch()
        cluster.queue(1).stop()
        with pytest.raises(NotLeader):
            await cluster.lease_from(range(3), wait_ms=10_000, group="new")

    run(main())


def test_a_parked_lease_ends_when_the_partition_gets_another_leader() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        asked = asyncio.ensure_future(cluster.lease(wait_ms=30_000))
        await pause(0.1)
        cluster.partitions[0].end_epoch()
        cluster.queue().stop()
        with pytest.raises(NotLeader):
            await asked

    run(main())


def test_too_few_replicas_refuse_leases_and_settlements() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a", b"b")
        held = await cluster.lease(records=1, wait_ms=1000)
        cluster.partitions[0].leadership.enough = False
        with pytest.raises(NotEnoughReplicas):
            await cluster.lease(wait_ms=1000)
        with pytest.raises(NotEnoughReplicas):
            await cluster.settle("ack", held)
        cluster.partitions[0].leadership.enough = True
        assert (await cluster.settle("ack", held)).errors == ("",)

    run(main())


def test_requests_wait_for_a_new_leader_but_not_for_ever() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.partitions[0].lead(settle=False)
        cluster.publish(b"a")
        cluster.serve()
        asked = asyncio.ensure_future(cluster.lease())
        await pause(3)
        assert not asked.done()
        cluster.partitions[0].leadership.settle()
        assert values(await asked) == [b"a"]
        cluster.fail_over(settle_s=1000)
        with pytest.raises(NotEnoughReplicas):
            await cluster.lease()

    run(main())


def test_retention_moves_a_group_on() -> None:
    async def main() -> None:
        cluster = Cluster(segment_bytes=4096)
        cluster.serve()
        for _ in range(10):
            cluster.publish(bytes(2000))
        held = await cluster.lease(records=3, wait_ms=1000)
        log = cluster.partitions[0].logs["data"].log
        log.truncate_prefix(6)
        rest = await cluster.lease()
        assert [one.offset for one in rest] == [6, 7, 8, 9]
        assert (await cluster.settle("ack", held[0])).errors == ("already_settled",)
        await cluster.settle("ack", rest)
        assert (await cluster.describe()).settled_offset == 10

    run(main())


def test_an_ack_of_a_range_settles_what_is_still_held_of_it() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(*[b"%d" % n for n in range(10)])
        held = await cluster.lease(wait_ms=1000)
        nonce = held[0].nonce
        await cluster.settle("ack", held[:3])

        async def ack(start: int, end: int) -> tuple[str, ...]:
            rows = (wire.ReceiptRow(nonce, start, end),)
            message = wire.Settle("g", "orders", 0, "ack", rows)
            return (await cluster.ask(cluster.handlers.settle, message)).errors

        assert await ack(0, 5) == ("already_settled",)
        assert (await cluster.describe()).settled_offset == 5
        await cluster.settle("nack", held[6])
        assert await ack(5, 8) == ("lease_expired",)
        described = await cluster.describe()
        assert (described.in_flight, described.waiting) == (2, 1)
        assert described.counters["acked"] == 7

    run(main())


def test_the_ledger_is_snapshotted_and_its_prefix_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "SNAPSHOT_RECORDS", 50)

    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        for number in range(300):
            cluster.publish(b"%d" % number)
            held = await cluster.lease(wait_ms=1000)
            await cluster.settle("ack" if number % 7 else "postpone", held, delay_ms=3_600_000)
        log = cluster.partitions[0].logs["ledger"].log
        assert log.start_offset > 300
        assert log.end_offset - log.start_offset < 120
        before = await cluster.describe()
        cluster.fail_over()
        after = await cluster.describe()
        assert after.waiting == 43
        assert (before.settled_offset, before.waiting) == (after.settled_offset, after.waiting)
        assert before.counters == after.counters

    run(main())
