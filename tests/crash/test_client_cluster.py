"""The public clients of groups and queues on real nodes, some of which are killed."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusterwork import all_in_sync, until

from raftq import aio
from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.common.errors import FencedGeneration, LeaseLost, RequestTimeout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder: Path = tmp_path_factory.mktemp("clients")
    with LocalCluster(folder / "cluster", nodes=3) as made:
        yield made


async def kill_leader(cluster: LocalCluster, admin: aio.Admin, topic: str, partition: int) -> None:
    """kill -9, and back a moment later."""
    leader = (await admin.describe_topic(topic)).partitions[partition].leader
    assert leader is not None
    cluster.kill(leader)
    await asyncio.sleep(0.5)
    cluster.restart(leader, timeout=None)


@pytest.mark.full
def test_workers_finish_everything_while_leaders_are_killed(cluster: LocalCluster) -> None:
    """1. Two workers on records of three kinds, some of them delayed. 2. A leader and the
    coordinator are killed. 3. Every record is handled, the bad ones three times and the poison
    once, both become one dead letter each; no delayed one came early. 4. The letters are sent back
    and handled then."""

    async def main() -> None:
        bootstrap = cluster.bootstrap
        handled: Counter[bytes] = Counter()
        early: list[float] = []
        is_mended = False

        async def handle(record: aio.LeasedRecord) -> None:
            await asyncio.sleep(0.005)
            handled[record.value] += 1
            kind, _, due = record.value.partition(b"@")
            if due and time.time() * 1000 < int(due):
                early.append(int(due) - time.time() * 1000)
            if kind.startswith(b"bad") and not is_mended:
                raise ValueError("bad")
            if kind.startswith(b"poison") and not is_mended:
                raise aio.Reject("poison")

        async with aio.Admin(bootstrap) as admin, aio.Producer(bootstrap) as producer:
            await admin.create_topic("jobs", 4, 3, {"backoff_ms": 200})
            workers = [
                aio.Worker(
                    bootstrap, group="crew", topics=["jobs"], handler=handle, concurrency=8,
                    visibility_timeout=5.0, handle_signals=False,
                )
                for _ in range(2)
            ]  # fmt: skip
            running = [asyncio.ensure_future(worker.run()) for worker in workers]
            sent = []
            for number in range(600):
                value = b"%d" % number
                if number % 100 == 7:
                    value = b"bad %d" % number
                elif number % 100 == 8:
                    value = b"poison %d" % number
                if number % 5 == 0:
                    due = int(time.time() * 1000) + 1_500
                    value += b"@%d" % due
                    delivery = await producer.send("jobs", value, deliver_at=due / 1000)
                else:
                    delivery = await producer.send("jobs", value)
                sent.append((value, delivery))
                await asyncio.sleep(0.01)
                if number == 150:
                    await kill_leader(cluster, admin, "jobs", 0)
                if number == 400:
                    await kill_leader(cluster, admin, "__groups", 0)
            for _, delivery in sent:
                await delivery

            async def is_done() -> bool:
                return (
                    (await admin.describe_group("crew")).lag == 0
                    and not (await admin.delayed("jobs"))
                    and len(await admin.dead_letters("jobs")) == 12
                )

            await until(is_done, 60)
            assert early == []
            for value, _ in sent:
                assert handled[value] >= (3 if value.startswith(b"bad") else 1), value
            letters = await admin.dead_letters("jobs")
            assert Counter(one.reason for one in letters) == {"max_deliveries": 6, "poison": 6}
            assert len({one.value for one in letters}) == 12
            described = await admin.describe_group("crew")
            assert described.mode == "queue"
            assert len(described.members) == 2
            is_mended = True
            handled.clear()
            assert await admin.redrive("jobs", which=LetterFilter(reason="poison")) == 6
            assert await admin.redrive("jobs") == 6

            async def is_redriven() -> bool:
                return len(handled) == 12 and (await admin.describe_group("crew")).lag == 0

            await until(is_redriven, 30)
            assert await admin.dead_letters("jobs") == []
            for worker in workers:
                worker.stop()
            await asyncio.gather(*running)
            await until(lambda: all_in_sync(admin, "jobs"), 30)

    asyncio.run(main())


def test_receipts_and_positions_are_kept_and_fenced_over_a_kill(cluster: LocalCluster) -> None:
    """1. Records are leased and half of them acked; the leader is killed; 2. the other half can be
    acked at the next leader, and none comes again. 3. A member stores positions there, and one that
    was replaced cannot."""

    async def main() -> None:
        bootstrap = cluster.bootstrap
        async with (
            aio.Admin(bootstrap) as admin,
            aio.Producer(bootstrap) as producer,
            aio.QueueClient(bootstrap, group="q", topics=["kept"]) as queue,
        ):
            await admin.create_topic("kept", 1, 3)
            for number in range(100):
                await producer.send("kept", b"%d" % number)
            await producer.flush()
            found: list[aio.LeasedRecord] = []
            while len(found) < 100:
                found += await queue.lease(max_records=50, timeout=5)
            await queue.ack_many(found[:50])
            killing = asyncio.ensure_future(kill_leader(cluster, admin, "kept", 0))
            for record in found[50:75]:
                await queue.ack(record)
            await killing
            await queue.ack_many(found[75:])
            with pytest.raises(LeaseLost):
                await queue.ack(found[0])
            assert await queue.lease(timeout=1) == []
            assert (await admin.describe_group("q")).lag == 0

            settings = {"group": "s", "topics": ["kept"], "heartbeat_ms": 300, "session_ms": 2000}
            async with aio.Consumer(bootstrap, **settings, auto_commit=False) as first:  # type: ignore[arg-type]
                read = []
                while len(read) < 100:
                    read += await first.poll(timeout=1)
                await first.commit({("kept", 0): 60})
                await kill_leader(cluster, admin, "kept", 0)
                await first.commit({("kept", 0): 70})
                assert first._group is not None
                first._group.member.stop()  # as if its process hung
                async with aio.Consumer(bootstrap, **settings, auto_commit=False) as second:  # type: ignore[arg-type]
                    again = []
                    while len(again) < 30:
                        again += await second.poll(timeout=1)
                    assert [one.offset for one in again] == list(range(70, 100))
                    with pytest.raises(FencedGeneration):
                        await first.commit({("kept", 0): 100})
                    await second.commit()
                    assert (await admin.describe_group("s")).lag == 0

    asyncio.run(main())


@pytest.mark.full
def test_a_producer_comes_back_to_partitions_that_could_not_be_written(
    cluster: LocalCluster,
) -> None:
    """1. One node is killed: the partition that only it has has no leader, and that of two copies
    with min_insync 2 refuses records. 2. Records for both are given up; those without a key go
    elsewhere and are not late. 3. The node comes back: all partitions get their share."""

    async def main() -> None:
        bootstrap = cluster.bootstrap
        async with aio.Admin(bootstrap) as admin:
            alone = await admin.create_topic("alone", 3, 1)
            victim = alone.partitions[0].leader
            assert victim is not None
            await admin.create_topic("pairs", 3, 2, {"min_insync": 2})
            await until(lambda: all_in_sync(admin, "pairs"), 20)
            pairs = (await admin.describe_topic("pairs")).partitions
            dead = {
                "alone": {one.partition for one in alone.partitions if one.leader == victim},
                "pairs": {one.partition for one in pairs if victim in one.replicas},
            }
            settings = {"delivery_timeout_ms": 1_500, "linger_ms": 0}
            async with aio.Producer(bootstrap, **settings) as producer:

                async def used(topic: str, count: int) -> set[int]:
                    """Where records went that were sent one by one."""
                    sent = [await (await producer.send(topic, b"x")) for _ in range(count)]
                    return {one.partition for one in sent}

                assert await used("alone", 9) == await used("pairs", 9) == {0, 1, 2}
                await asyncio.to_thread(cluster.kill, victim)

                async def is_fenced() -> bool:
                    return not any(
                        one.alive for one in await admin.nodes() if one.node_id == victim
                    )

                # Until then leaders believe that it follows them, and take what it will not get.
                await until(is_fenced, 20)
                for topic, partitions in dead.items():
                    lost = [await producer.send(topic, b"", partition=one) for one in partitions]
                    for one in lost:
                        with pytest.raises(RequestTimeout):
                            await one
                for _ in range(10):
                    began = time.monotonic()
                    for topic, partitions in dead.items():
                        assert await used(topic, 10) == {0, 1, 2} - partitions
                    assert time.monotonic() - began < 1.0
                    await asyncio.sleep(0.5)
                await asyncio.to_thread(cluster.restart, victim)

                async def shared() -> bool:
                    return await used("alone", 9) == await used("pairs", 9) == {0, 1, 2}

                await until(shared, 20)

    asyncio.run(main())
