"""The admin client on groups, dead letters and delayed records."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from fake_cluster import lost, simulate
from fake_groups import FakeGroups, fake_groups, fill

from raftq.aio import Admin, Consumer, Producer, QueueClient
from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.common.errors import (
    GroupNotEmpty,
    InvalidArgument,
    NotLeader,
    RaftqError,
    UnknownGroup,
    UnknownTopic,
)
from raftq.client.wire.group_messages import DescribeGroup, ListGroups
from raftq.client.wire.queue_messages import CancelDelayed, DeadLetters, SteerGroup

FAST: dict[str, Any] = {"heartbeat_ms": 200, "session_ms": 2_000}


def letters(cluster: FakeGroups) -> None:
    """Dead letters of `t`, six in each of two partitions."""
    cluster.add_topic("t", 2)
    for number, log in enumerate(cluster.add_topic("t.dlq", 2)):
        for at in range(6):
            facts = {
                "reason": b"rejected" if at % 2 else b"max_deliveries", "topic": b"t",
                "partition": b"%d" % number, "offset": b"%d" % (10 * at), "group": b"g",
                "attempts": b"3", "error": b"ValueError: no",
                "first-delivery": b"2026-01-01T00:00:00Z", "last-delivery": b"x",
            }  # fmt: skip
            headers = {f"x-dlq-{name}": fact for name, fact in facts.items()}
            fill(log, [b"v%d" % at], keys=[b"k%d" % at], headers=[{**headers, "mine": b"1"}])


def test_groups_are_listed_and_described_with_their_lag() -> None:
    async def main() -> None:
        async with fake_groups(3) as cluster, Admin(cluster.bootstrap) as admin:
            cluster.add_topic("other", 1)
            for log in cluster.add_topic("t", 2):
                fill(log, [b"x"] * 10)
            assert await admin.list_groups() == []
            with pytest.raises(UnknownGroup):
                await admin.describe_group("g")
            async with Consumer(cluster.bootstrap, group="g", topics=["t"], **FAST) as consumer:
                while len(consumer.assignment()) < 2:
                    await consumer.poll(max_records=4, timeout=0.1)
                await consumer.seek("t", 0, offset=4)
                await consumer.seek("t", 1, offset=10)
                await consumer.commit()
                (one,) = await admin.list_groups()
                assert (one.group, one.mode, one.members) == ("g", "stream", 1)
                found = await admin.describe_group("g")
                assert (found.state, found.coordinator, found.lag) == ("stable", 1, 6)
                (member,) = found.members
                assert [(p.partition, p.position, p.lag, p.member) for p in found.partitions] == [
                    (0, 4, 6, member.member_id), (1, 10, 0, member.member_id),
                ]  # fmt: skip
                assert {p.topic for p in found.partitions} == {"t"}
            async with QueueClient(cluster.bootstrap, group="q", topics=["t"], **FAST) as queue:
                records = await queue.lease(timeout=1)
                await queue.ack_many(records[:3])
                found = await admin.describe_group("q")
                assert found.mode == "queue"
                assert found.lag == 17
                assert sum(p.in_flight for p in found.partitions) == len(records) - 3
            assert [one.group for one in await admin.list_groups()] == ["g", "q"]
            cluster.move_coordinator(3)
            assert (await admin.describe_group("g")).coordinator == 3

    simulate(main())


def test_groups_are_reset_paused_purged_and_deleted() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster, Admin(cluster.bootstrap) as admin:
            for log in cluster.add_topic("t", 2):
                fill(log, [b"x"] * 10)
            async with Consumer(cluster.bootstrap, group="g", topics=["t"], **FAST) as consumer:
                while len(consumer.assignment()) < 2:
                    await consumer.poll(timeout=0.1)
                with pytest.raises(GroupNotEmpty):
                    await admin.reset_group("g", "t")
                with pytest.raises(GroupNotEmpty):
                    await admin.delete_group("g")
            assert await admin.reset_group("g", "t", "latest") == {0: 10, 1: 10}
            assert await admin.reset_group("g", "t", 3, partition=1) == {1: 3}
            assert (await admin.describe_group("g")).lag == 7
            for wrong in ("middle", -1, True, 1.5):
                with pytest.raises(InvalidArgument):
                    await admin.reset_group("g", "t", wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument):
                await admin.reset_group("g", "t", partition=7)
            with pytest.raises(UnknownTopic):
                await admin.reset_group("g", "nope")
            await admin.delete_group("g")
            for again in (admin.delete_group, admin.describe_group, admin.pause_group):
                with pytest.raises(UnknownGroup):
                    await again("g")
            async with QueueClient(cluster.bootstrap, group="q", topics=["t"], **FAST) as queue:
                (first,) = await queue.lease(max_records=1, timeout=1)
                await queue.ack(first)
                await admin.pause_group("q")
                assert all(p.paused for p in (await admin.describe_group("q")).partitions)
                assert await queue.lease(timeout=0.5) == []
                await admin.resume_group("q", "t")
                assert await queue.lease(timeout=2)
                await asyncio.sleep(0.5)  # until what a second node sent meanwhile is given back
                await admin.purge_group("q")
                assert (await admin.describe_group("q")).lag == 0
                assert await queue.lease(timeout=0.5) == []

    simulate(main())


def test_verbs_find_their_way_while_nodes_refuse() -> None:
    async def main() -> None:
        async with fake_groups(3) as cluster, Admin(cluster.bootstrap) as admin:
            for log in cluster.add_topic("t", 3):
                fill(log, [b"x"] * 10)

            def asking(request: Any, node: int) -> None:
                kinds = ListGroups | DescribeGroup | SteerGroup
                if isinstance(request, kinds) and cluster.rng.random() < 0.4:
                    cluster.lead("t", cluster.rng.randrange(3), cluster.rng.randrange(1, 4))
                    raise NotLeader("not me, perhaps")

            cluster.asking = asking
            for _ in range(5):
                assert await admin.reset_group("g", "t", 5) == {0: 5, 1: 5, 2: 5}
                assert (await admin.describe_group("g")).lag == 15
                assert await admin.list_groups() == []

    simulate(main())


def test_dead_letters_are_browsed_with_their_facts_and_by_filters() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster, Admin(cluster.bootstrap) as admin:
            letters(cluster)
            found = await admin.dead_letters("t")
            assert len(found) == 12
            one = found[1]
            assert (one.topic, one.partition, one.offset) == ("t", 0, 10)
            assert (one.dead_topic, one.dead_partition, one.dead_offset) == ("t.dlq", 0, 1)
            assert (one.reason, one.error, one.group) == ("rejected", "ValueError: no", "g")
            assert (one.key, one.value, one.headers) == (b"k1", b"v1", {"mine": b"1"})
            assert one.attempts == 3
            assert await admin.dead_letters("t.dlq") == found
            assert len(await admin.dead_letters("t", 8)) == 8
            assert len(await admin.dead_letters("t", which=LetterFilter(reason="rejected"))) == 6
            assert (
                len(await admin.dead_letters("t", which=LetterFilter(key=b"k2", partition=1))) == 1
            )
            assert await admin.dead_letters("t", which=LetterFilter(group="other")) == []
            cluster.add_topic("quiet", 1)
            assert await admin.dead_letters("quiet") == []
            assert await admin.redrive("quiet") == 0
            with pytest.raises(UnknownTopic):
                await admin.dead_letters("nope")
            with pytest.raises(InvalidArgument):
                await admin.dead_letters("t", limit=0)
            with pytest.raises(InvalidArgument):
                await admin.dead_letters("t", which=LetterFilter(partition=9))
            with pytest.raises(InvalidArgument, match="since"):
                LetterFilter(since="x")  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument):
                await admin.redrive("t", rate=0)

    simulate(main())


def test_letters_are_redriven_once_at_a_rate_and_purged() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster, Admin(cluster.bootstrap) as admin:
            letters(cluster)
            losses = 2

            def answering(request: Any, node: int) -> None:
                nonlocal losses
                if isinstance(request, DeadLetters) and losses:
                    losses -= 1
                    raise lost()

            cluster.answering = answering
            began = cluster._now()
            which = LetterFilter(reason="rejected", since=0, until=datetime.now(UTC))
            await admin.redrive("t", 3, rate=2, which=which)
            assert cluster._now() - began >= 0.5
            assert not losses
            cluster.answering = None
            await admin.redrive("t", which=LetterFilter(reason="rejected"))
            redriven = [one[1:] for one in cluster.history if one[0] == "redrive"]
            assert len(redriven) == len(set(redriven)) == 6
            assert await admin.purge("t", 2) == 2
            assert await admin.purge("t") == 4
            assert await admin.dead_letters("t") == []

    simulate(main())


def test_delayed_records_are_listed_cancelled_and_counted() -> None:
    async def main() -> None:
        async with (
            fake_groups(2) as cluster,
            Admin(cluster.bootstrap) as admin,
            Producer(cluster.bootstrap) as producer,
        ):
            cluster.add_topic("t", 2)
            places = []
            for number in range(20):
                delivery = await producer.send(
                    "t", b"%d" % number, key=b"k", partition=number % 2, delay=100 - number,
                    headers={"a": b"1"},
                )  # fmt: skip
                places.append(await delivery)
            found = await admin.delayed("t", 5)
            assert [(one.partition, one.offset) for one in found] == [
                (one.partition, one.offset) for one in reversed(places[15:])
            ]
            assert found[0].value is None
            (first,) = await admin.delayed("t", 1, values=True)
            assert (first.value, first.key, first.headers) == (b"19", b"k", {"a": b"1"})
            assert first.deliver_at == places[19].deliver_at
            assert len(await admin.delayed("t", 100, partition=1)) == 10
            assert await admin.cancel_delayed("t", 1, first.offset) == [first.offset]
            assert await admin.cancel_delayed("t", 1, [first.offset, 777]) == []
            assert (await admin.delay_totals("t")).pending == 19

            def answering(request: Any, node: int) -> None:
                if isinstance(request, CancelDelayed):
                    cluster.answering = None
                    raise lost()

            # The answer is lost, and the second attempt cannot know what the first one did.
            cluster.answering = answering
            with pytest.raises(RaftqError) as caught:
                await admin.cancel_delayed("t", 0, 3)
            assert caught.value.outcome == "unknown"
            assert (await admin.delay_totals("t")).pending == 18

    simulate(main())


def test_many_verbs_at_once_do_not_disturb_each_other() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster, Admin(cluster.bootstrap) as admin:
            cluster.add_topic("t", 200)
            results = await asyncio.gather(
                *[admin.reset_group(f"g{number}", "t") for number in range(3)]
            )
            assert [len(one) for one in results] == [200, 200, 200]

    simulate(main())
