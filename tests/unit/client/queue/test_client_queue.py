"""The queue client: leases from all leaders, receipts, and settlements whatever fails."""

import asyncio
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from fake_cluster import lost, simulate
from fake_groups import FakeGroups, fake_groups, fill

from raftq.aio import LeasedRecord, QueueClient
from raftq.client.common.errors import (
    AlreadySettled,
    ConfigError,
    InvalidArgument,
    LeaseExpired,
    LeaseForeign,
    LeaseLost,
    LeaseReplaced,
    NotLeader,
    RequestTimeout,
    UnknownTopic,
)
from raftq.client.queue.leased import Receipt, merge, receipt_of, rows_by_partition
from raftq.client.wire.group_messages import FindCoordinator, GroupHeartbeat
from raftq.client.wire.queue_messages import Lease, Settle
from raftq.node.queue.core.config import DeliveryConfig


def client(cluster: FakeGroups, **settings: Any) -> QueueClient:
    return QueueClient(cluster.bootstrap, **{"group": "g", "topics": ["t"], **settings})


async def drain(queue: QueueClient, count: int, seconds: float = 60.0) -> list[LeasedRecord]:
    """Lease and ack so many records."""
    found: list[LeasedRecord] = []
    async with asyncio.timeout(seconds):
        while len(found) < count:
            some = await queue.lease(max_records=7, timeout=1.0)
            await queue.ack_many(some)
            found += some
    return found


def test_rows_of_neighbours_are_merged() -> None:
    assert merge([(1, 5, 6), (1, 3, 5), (2, 6, 7), (1, 6, 8), (1, 9, 10)]) == [
        (1, 3, 8), (1, 9, 10), (2, 6, 7),
    ]  # fmt: skip
    receipts = [Receipt("a", 0, offset, 7) for offset in (1, 2, 3, 9)]
    receipts += [Receipt("b", 1, 4, 7), Receipt("a", 0, 4, 8), Receipt("a", 0, 4, 7)]
    assert rows_by_partition(receipts) == {
        ("a", 0): [(7, 1, 5), (7, 9, 10), (8, 4, 5)],
        ("b", 1): [(7, 4, 5)],
    }
    assert rows_by_partition([]) == {}


def test_merged_rows_cover_the_same_offsets() -> None:
    rng = random.Random(1)
    for _ in range(200):
        points = {(rng.randrange(3), rng.randrange(20)) for _ in range(rng.randrange(25))}
        rows = merge([(nonce, at, at + 1) for nonce, at in points])
        covered = [(nonce, at) for nonce, start, end in rows for at in range(start, end)]
        assert sorted(covered) == sorted(points)
        assert all(a[0] != b[0] or a[2] < b[1] for a, b in pairwise(rows))


@pytest.mark.parametrize("text", ["", "t", "t:0:1:1", "t:x:1:1:1", ":0:1:1:1", "t:0:1:1:-1",
                                  "t:0:1:1:99999999999999999999", "t:0:1:1:²"])  # fmt: skip
def test_what_is_no_receipt_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        receipt_of(text)


def test_records_come_with_everything_and_go_by_ack() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, client(cluster) as queue:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"v", b"w"], keys=[b"k", None], headers=[{"a": b"1"}, None], timestamps=9)
            fill(log, [b"high"], lane=1)
            found = await queue.lease(timeout=5)
            assert [(one.offset, one.value) for one in found] == [
                (2, b"high"), (0, b"v"), (1, b"w"),
            ]  # fmt: skip
            record = found[1]
            assert (record.topic, record.partition, record.key) == ("t", 0, b"k")
            assert (record.headers, record.timestamp) == ({"a": b"1"}, 9)
            assert (record.priority, found[0].priority, record.attempt) == (2, 1, 1)
            assert record.receipt == f"t:0:0:1:{record.grant.nonce}"
            assert record.deadline == int((cluster._now() + 30) * 1000) or record.deadline
            await queue.ack(record)
            await queue.ack(found[2].receipt)
            assert cluster.queue("t", 0).groups["g"].settled.prefix == 2
            with pytest.raises(AlreadySettled):
                await queue.ack(record)
            await queue.ack_many([found[0]])
            assert await queue.lease(timeout=0.2) == []

    simulate(main())


def test_a_lease_waits_for_records_at_all_nodes_at_once() -> None:
    async def main() -> None:
        async with fake_groups(3) as cluster, client(cluster) as queue:
            logs = cluster.add_topic("t", 6)
            assert await queue.lease(timeout=0.3) == []
            for number in (4, 0, 5, 2):
                waiting = asyncio.ensure_future(queue.lease(timeout=30))
                await asyncio.sleep(2)
                began = cluster._now()
                fill(logs[number], [b"x"])
                (record,) = await waiting
                assert record.partition == number
                assert cluster._now() - began < 0.3
                await queue.ack(record)
            # Nothing waits at a node for a client that does not lease.
            await asyncio.sleep(1)
            assert not cluster.parked

    simulate(main())


def test_what_nobody_asked_for_is_kept_for_the_next_lease_or_given_back_unspent() -> None:
    """Records come to two nodes in the same moment, while a lease of one record waits at both."""

    async def main() -> None:
        async with fake_groups(2) as cluster, client(cluster) as queue:
            logs = cluster.add_topic("t", 2)
            await queue.lease(timeout=0.1)
            for is_kept in (True, False):
                waiting = asyncio.ensure_future(queue.lease(max_records=1, timeout=30))
                await asyncio.sleep(1)
                for log in logs:
                    fill(log, [b"x"])
                (record,) = await waiting
                await queue.ack(record)
                if not is_kept:
                    await asyncio.sleep(5)
                (record,) = await queue.lease(max_records=1, timeout=1)
                assert record.attempt == 1
                await queue.ack(record)
            leases = [one for one in cluster.history if one[0] == "lease"]
            assert {one[-1] for one in leases} == {1}

    simulate(main())


def test_no_lease_is_left_behind_by_a_caller_that_gives_up() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, client(cluster) as queue:
            (log,) = cluster.add_topic("t", 1)
            await queue.lease(timeout=0.1)

            def answering(request: Any, node: int) -> Any:
                return asyncio.sleep(0.5) if isinstance(request, Lease) else None

            cluster.answering = answering
            waiting = asyncio.ensure_future(queue.lease(timeout=30))
            await asyncio.sleep(1)
            fill(log, [b"x"])
            await asyncio.sleep(0.2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.sleep(3)
            assert cluster.queue("t", 0).groups["g"].in_flight == 0
            cluster.answering = None
            (record,) = await queue.lease(timeout=1)
            assert record.attempt == 1

    simulate(main())


def test_each_verb_does_what_it_says() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, client(cluster) as queue:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"0", b"1", b"2", b"3", b"4", b"5"])
            found = await queue.lease(visibility_timeout=10, timeout=2)
            await queue.nack(found[0])
            await queue.nack(found[1].receipt, delay=0.1)
            await queue.postpone(found[2], 0.1)
            await queue.reject(found[3], "why", "because")
            await queue.release(found[4])
            await queue.extend(found[5], 100)
            assert cluster.queue("t", 0).dead == [(3, "why", "because")]
            again = []
            while len(again) < 4:
                again += await queue.lease(timeout=5, visibility_timeout=10)
            assert {one.offset: one.attempt for one in again} == {0: 2, 1: 2, 2: 1, 4: 1}
            assert [one.offset for one in again][-1] == 0  # after a second of backoff
            await asyncio.sleep(20)
            with pytest.raises(LeaseExpired):
                await queue.ack(again[0])
            await queue.ack(found[5])  # it was extended
            more = await queue.lease(timeout=1)
            assert {one.offset for one in more} == {0, 1, 2, 4}
            with pytest.raises(LeaseReplaced):
                await queue.nack(again[0])
            async with client(cluster, group="other") as other:
                with pytest.raises(LeaseForeign):
                    await other.ack(more[0])
            for wrong in (-1, float("nan"), "1"):
                with pytest.raises(InvalidArgument):
                    await queue.postpone(more[0], wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument):
                await queue.ack(7)  # type: ignore[arg-type]

    simulate(main())


def test_many_are_settled_in_few_requests_and_errors_name_only_those_that_failed() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, client(cluster) as queue:
            logs = cluster.add_topic("t", 2)
            for log in logs:
                fill(log, [b"x"] * 100)
            found: list[LeasedRecord] = []
            while len(found) < 200:
                found += await queue.lease(max_records=100, timeout=1)
            asked: list[Settle] = []

            def asking(request: Any, node: int) -> None:
                if isinstance(request, Settle):
                    asked.append(request)

            cluster.asking = asking
            await queue.ack(found[50])
            with pytest.raises(AlreadySettled, match="1 of 2"):
                await queue.ack_many([found[50], found[199]])
            asked.clear()
            await queue.ack_many([*found[:50], *found[51:100]])
            assert len(asked) == 1
            assert len(asked[0].rows) == 2
            asked.clear()
            await asyncio.gather(*[queue.ack(one) for one in found[100:150]])
            assert len(asked) <= 3
            # One of a range is settled already: the others do not suffer for it.
            rest = found[150:199]
            results = await asyncio.gather(
                *[queue.ack(one) for one in [*rest, rest[7]]], return_exceptions=True
            )
            assert not [one for one in results if isinstance(one, LeaseLost)]
            assert [cluster.queue("t", n).groups["g"].settled.prefix for n in (0, 1)] == [100, 100]

    simulate(main())


def test_every_record_is_settled_once_while_leaders_change_and_replies_are_lost() -> None:
    async def main(seed: int) -> None:
        async with fake_groups(3, seed) as cluster:
            cluster.delivery = DeliveryConfig(max_deliveries=1_000)
            logs = cluster.add_topic("t", 5)
            for number in range(50):
                fill(logs[number % 5], [b"%d" % number] * 4)

            def asking(request: Any, node: int) -> None:
                if cluster.rng.random() < 0.1:
                    raise NotLeader("not me, perhaps")
                if cluster.rng.random() < 0.05:
                    cluster.lead("t", cluster.rng.randrange(5), cluster.rng.randrange(1, 4))

            def answering(request: Any, node: int) -> None:
                if isinstance(request, Settle) and cluster.rng.random() < 0.2:
                    raise lost()

            cluster.asking, cluster.answering = asking, answering
            async with client(cluster, visibility_timeout=60) as one, client(cluster) as two:
                found = await asyncio.gather(drain(one, 80, 600), drain(two, 80, 600))
                cluster.asking = cluster.answering = None
                rest = await drain(one, 200 - sum(map(len, found)), 600)
            acked = [item for part in (*found, rest) for item in part]
            counts = Counter((item.partition, item.offset) for item in acked)
            assert len(counts) == 200
            assert set(counts.values()) == {1}
            acks = Counter(one[1:] for one in cluster.history if one[0] == "ack")
            assert len(acks) == 200

    for seed in range(4):
        simulate(main(seed), seed)


def test_a_lost_reply_to_a_nack_is_not_an_error() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, client(cluster) as queue:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x"] * 4)
            found = await queue.lease(timeout=2)
            losses = 4

            def answering(request: Any, node: int) -> None:
                nonlocal losses
                if isinstance(request, Settle) and losses:
                    losses -= 1
                    raise lost()

            cluster.answering = answering
            await queue.nack(found[0])
            await queue.postpone(found[1], 5)
            await queue.release(found[2])
            await queue.reject(found[3])
            assert not losses

    simulate(main())


def test_what_cannot_be_settled_in_time_has_an_unknown_outcome() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, client(cluster, settle_ms=2_000) as queue:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x"])
            (record,) = await queue.lease(timeout=2)

            def answering(request: Any, node: int) -> None:
                if isinstance(request, Settle):
                    raise lost()

            cluster.answering = answering
            with pytest.raises(RequestTimeout) as caught:
                await queue.ack(record)
            assert caught.value.outcome == "unknown"

    simulate(main())


def test_new_partitions_are_leased_from() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster, client(cluster, refresh_ms=500) as queue:
            logs = cluster.add_topic("t", 1)
            assert await queue.lease(timeout=0.2) == []
            waiting = asyncio.ensure_future(queue.lease(timeout=30))
            await asyncio.sleep(0.5)
            logs.append(type(logs[0])(2))
            fill(logs[1], [b"new"])
            (record,) = await waiting
            assert record.partition == 1

    simulate(main())


def test_a_pattern_finds_its_topics_through_the_coordinator() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("other", 1)
            (log,) = cluster.add_topic("a-1", 1)
            fill(log, [b"x"])
            async with client(cluster, topics=[], pattern="a-.*", heartbeat_ms=200) as queue:
                (record,) = await drain(queue, 1)
                assert record.topic == "a-1"
                (log,) = cluster.add_topic("a-2", 1)
                fill(log, [b"y"])
                (record,) = await drain(queue, 1)
                assert record.topic == "a-2"

    simulate(main())


def test_the_group_lists_its_clients_but_leasing_does_not_depend_on_that() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x"] * 3)
            async with client(cluster, name="mailer") as queue:
                await queue.lease(max_records=1, timeout=1)
                await asyncio.sleep(1)
                (member,) = cluster.core.groups["g"].members.values()
                assert cluster.core.groups["g"].mode == "queue"
                assert member.client_id == queue.holder
                assert queue.holder.startswith("mailer-")
                leases = [one for one in cluster.history if one[0] == "lease"]
                assert leases[0][4] == queue.holder
            assert not cluster.core.groups["g"].members

            def asking(request: Any, node: int) -> None:
                if isinstance(request, GroupHeartbeat | FindCoordinator):
                    raise InvalidArgument("group 'g' is in stream mode")

            cluster.asking = asking
            async with client(cluster) as queue:
                assert len(await queue.lease(timeout=1)) == 2

    simulate(main())


def test_topics_that_are_not_there_and_settings_that_make_no_sense_are_refused() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            for wrong in (
                {"group": ""}, {"topics": []}, {"topics": "t"}, {"start": "middle"},
                {"visibility_timeout": 0}, {"settle_ms": 0},
            ):  # fmt: skip
                with pytest.raises(ConfigError):
                    client(cluster, **wrong)
            async with client(cluster, topic_grace_ms=300) as queue:
                with pytest.raises(UnknownTopic):
                    await queue.lease(timeout=5)
                for count in (0, True, 10**9):
                    with pytest.raises(InvalidArgument):
                        await queue.lease(max_records=count)

    simulate(main())


def test_a_lease_of_no_time_asks_every_node_once() -> None:
    async def main() -> None:
        async with fake_groups(3) as cluster, client(cluster) as queue:
            logs = cluster.add_topic("t", 3)
            assert await queue.lease(timeout=0) == []
            for log in logs:
                fill(log, [b"x"])
                (record,) = await queue.lease(timeout=0)
                await queue.ack(record)
            assert await queue.lease(timeout=0) == []

    simulate(main())


def test_leases_of_several_tasks_wait_for_each_other() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster, client(cluster) as queue:
            logs = cluster.add_topic("t", 2)
            await queue.lease(timeout=0.1)
            tasks = [
                asyncio.ensure_future(queue.lease(max_records=1, timeout=20)) for _ in range(3)
            ]
            assert await queue.lease(timeout=0.5) == []
            for log in [*logs, logs[0]]:
                fill(log, [b"x"])
                await asyncio.sleep(0.5)
            assert [len(await task) for task in tasks] == [1, 1, 1]

    simulate(main())
