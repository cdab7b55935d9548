"""A producer and partitions that nothing gets through to: records without a key avoid them, and
come back once they can be written again. Nobody's record has to find that out."""

import asyncio
from collections import Counter
from random import Random
from typing import Any

import pytest
from fake_cluster import FakeCluster, fake_cluster, simulate

from raftq.aio import Producer
from raftq.client.common.errors import (
    DiskFull,
    FencedProducer,
    NotEnoughReplicas,
    RaftqError,
    RequestTimeout,
)
from raftq.client.results import Delivery
from raftq.client.wire.batch import decode
from raftq.client.wire.messages import Produce
from raftq.node.storage.producers import Producers


def producer_of(cluster: FakeCluster, **more: Any) -> Producer:
    settings = {"linger_ms": 0, "delivery_timeout_ms": 1_500, "rng": Random(1)}
    return Producer(cluster.bootstrap, **(settings | more))


async def burst(producer: Producer, count: int, **more: Any) -> Counter[int | str]:
    """Where so many records without a key went, one after the other, or why they did not."""
    found: Counter[int | str] = Counter()
    for _ in range(count):
        try:
            found[(await (await producer.send("t", b"x", **more))).partition] += 1
        except RaftqError as error:
            found[type(error).__name__] += 1
    return found


async def given_up(delivery: Delivery) -> None:
    with pytest.raises(RequestTimeout):
        await delivery


def test_records_without_a_key_come_back_to_a_partition_whose_node_was_down() -> None:
    """1. The node that leads partition 0 ends, and nobody leads in its place.
    2. A record for it is given up; from then on none goes there, and none is late.
    3. The node comes back: partition 0 gets its share again within seconds."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster(3) as cluster:
            cluster.add_topic("t", 3)
            async with producer_of(cluster) as producer:
                assert await burst(producer, 6) == {0: 2, 1: 2, 2: 2}
                await cluster.stop_node(1)
                await given_up(await producer.send("t", b"lost", partition=0))
                for _ in range(10):
                    began = loop.time()
                    assert await burst(producer, 4) == {1: 2, 2: 2}
                    assert loop.time() - began < 0.5
                    await asyncio.sleep(3.0)
                await cluster.start_node(1)
                await asyncio.sleep(3.0)
                assert await burst(producer, 6) == {0: 2, 1: 2, 2: 2}

    simulate(main())


def test_an_idle_producer_comes_back_when_another_node_leads() -> None:
    async def main() -> None:
        async with fake_cluster(2) as cluster:
            cluster.add_topic("t", 2)
            async with producer_of(cluster) as producer:
                await burst(producer, 2)
                cluster.lead("t", 0, None)
                await given_up(await producer.send("t", b"lost", partition=0))
                assert await burst(producer, 4) == {1: 4}
                cluster.lead("t", 0, 2)
                await asyncio.sleep(3.0)
                assert await burst(producer, 4) == {0: 2, 1: 2}

    simulate(main())


@pytest.mark.parametrize("problem", [NotEnoughReplicas, DiskFull])
def test_a_leader_that_refuses_records_is_asked_without_a_record(
    problem: type[RaftqError],
) -> None:
    """It answers every question, but takes no batch: to try it with a record would cost that record
    its delivery time, again and again."""

    async def main() -> None:
        async with fake_cluster(2) as cluster:
            (log, _) = cluster.add_topic("t", 2)
            tried = 0

            def before(request: Produce, node_id: int) -> None:
                nonlocal tried
                if request.partition == 0:
                    tried += 1
                    raise problem("not now")

            cluster.before = before
            async with producer_of(cluster) as producer:
                await given_up(await producer.send("t", b"lost", partition=0))
                tried = 0
                for _ in range(20):
                    assert await burst(producer, 2) == {1: 2}
                    await asyncio.sleep(1.0)
                assert 5 <= tried <= 40  # it goes on asking, and not too often
                cluster.before = None
                await asyncio.sleep(3.0)
                assert await burst(producer, 4) == {0: 2, 1: 2}
            assert log.values() == [b"x", b"x"]

    simulate(main())


def test_delayed_records_avoid_a_partition_and_come_back_too() -> None:
    async def main() -> None:
        async with fake_cluster(2) as cluster:
            cluster.add_topic("t", 2)
            async with producer_of(cluster) as producer:
                await cluster.stop_node(1)
                await given_up(await producer.send("t", b"lost", partition=0, delay=60))
                assert await burst(producer, 4, delay=60) == {1: 4}
                await cluster.start_node(1)
                await asyncio.sleep(3.0)
                assert await burst(producer, 4, delay=60) == {0: 2, 1: 2}

    simulate(main())


def test_nobody_asks_any_more_when_the_partition_takes_records_again() -> None:
    async def main() -> None:
        async with fake_cluster(2) as cluster:
            cluster.add_topic("t", 2)
            async with producer_of(cluster) as producer:
                await cluster.stop_node(1)
                await given_up(await producer.send("t", b"lost", partition=0))
                await cluster.start_node(1)
                assert (await (await producer.send("t", b"key", partition=0))).offset == 0
                await asyncio.sleep(3.0)
                before = cluster.produced
                await asyncio.sleep(60.0)
                assert cluster.produced == before

    simulate(main())


def test_closing_and_a_deleted_topic_end_the_questions() -> None:
    async def main() -> None:
        async with fake_cluster(2) as cluster:
            for deleted in (False, True):
                cluster.add_topic("t", 2)
                async with producer_of(cluster) as producer:
                    cluster.lead("t", 0, None)
                    await given_up(await producer.send("t", b"lost", partition=0))
                    if deleted:
                        del cluster.topics["t"]
                        await asyncio.sleep(30.0)
                        asked = cluster.asked
                        await asyncio.sleep(60.0)
                        assert cluster.asked - asked <= 5  # the routine questions only

    simulate(main())


@pytest.mark.parametrize("spent_ms", range(1_000, 1_500, 50))
def test_it_does_not_matter_when_the_delivery_time_of_the_last_record_is_spent(
    spent_ms: int,
) -> None:
    """While it waits for its next attempt, during one, or just as the next one should begin."""

    async def main() -> None:
        async with fake_cluster(2) as cluster:
            cluster.add_topic("t", 2)

            def before(request: Produce, node_id: int) -> None:
                if request.partition == 0:
                    raise NotEnoughReplicas("not now")

            cluster.before = before
            async with producer_of(cluster, delivery_timeout_ms=spent_ms) as producer:
                await given_up(await producer.send("t", b"lost", partition=0))
                assert await burst(producer, 4) == {1: 4}
                cluster.before = None
                await asyncio.sleep(3.0)
                assert await burst(producer, 4) == {0: 2, 1: 2}

    simulate(main())


def test_what_was_lost_and_is_still_on_its_way_is_not_appended_behind_later_records() -> None:
    """1. A leader acknowledges two batches alone, and loses the second with its place.
    2. The next batch does not fit behind the first: the producer goes on in its next epoch.
    3. The first attempt of the lost batch arrives at last. It is refused."""

    async def main() -> None:
        async with fake_cluster(1) as cluster:
            (log,) = cluster.add_topic("t")
            async with producer_of(cluster, acks="leader") as producer:
                await (await producer.send("t", b"kept"))
                await (await producer.send("t", b"lost"))
                lost = log.batches.pop()
                log.ends.pop()
                log.end = 1
                log.producers = Producers()
                log.producers.note(1, 0, 0, 1, 0)
                await (await producer.send("t", b"later"))
            newest = decode(log.batches[-1])
            assert (newest.producer_id, newest.producer_epoch, newest.base_sequence) == (1, 1, 0)
            with pytest.raises(FencedProducer):
                log.append(memoryview(lost))
            assert log.values() == [b"kept", b"later"]

    simulate(main())
