"""Topics that go, come back as others, or grow, under clients that are open all the time."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import mmh3
import pytest
from fake_cluster import FakeCluster, fake_cluster, lost, simulate

from raftq.aio import Appended, Consumer, Producer
from raftq.client.common.errors import (
    InvalidArgument,
    NotEnoughReplicas,
    OffsetOutOfRange,
    RaftqError,
    RequestTimeout,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.results import Delivery
from raftq.client.wire.batch import decode, encode
from raftq.client.wire.messages import Produce


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await work


async def failure(delivery: Delivery) -> RaftqError:
    with pytest.raises(RaftqError) as caught:
        await within(10, delivery)
    return caught.value


def refuse(request: Produce, node_id: int) -> None:
    raise NotEnoughReplicas("not now")


@pytest.mark.parametrize("acks", ["leader", "all"])
@pytest.mark.parametrize("counts", [(6, 2, 4), (2, 6, 2), (1, 1, 1), (3, 3, 1)])
@pytest.mark.parametrize("linger_ms", [0, 5])
def test_a_topic_made_again_gets_every_record_at_once(
    counts: tuple[int, ...], acks: Any, linger_ms: int
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with (
            fake_cluster() as cluster,
            Producer(cluster.bootstrap, linger_ms=linger_ms, acks=acks) as producer,
        ):
            for count in counts:
                logs = cluster.add_topic("t", count)
                began = loop.time()
                values = [b"%d" % number for number in range(20)]
                for value in values:
                    place = await within(5, await producer.send("t", value))
                    assert logs[place.partition].values()[place.offset] == value
                assert sorted(values) == sorted(value for log in logs for value in log.values())
                assert loop.time() - began < 2
                del cluster.topics["t"]

    simulate(main())


def test_keys_choose_among_the_new_partitions() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 7)
            keys = [b"key-%d" % number for number in range(30)]
            await (await producer.send_many("t", [b"v"] * 30, keys))
            cluster.add_topic("t", 3)
            await within(5, await producer.send("t", b"first"))
            await producer._routes.refresh()  # the first may be lucky in its partition
            sent = [await producer.send("t", b"v", key=key) for key in keys]
            places = [(await within(5, one)).partition for one in sent]
            assert places == [mmh3.hash(key, signed=False) % 3 for key in keys]

    simulate(main())


async def held_back(cluster: FakeCluster, producer: Producer, **record: Any) -> Delivery:
    """A record that waits in the producer, sent and refused, when its topic is made again."""
    await (await producer.send("t", b"before", **record))
    cluster.before = refuse
    delivery = await producer.send("t", b"waits", **record)
    await asyncio.sleep(0.2)
    assert not delivery.done()
    return delivery


def test_what_waits_for_a_partition_that_is_gone_has_failed_soon() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 6)
            delivery = await held_back(cluster, producer, partition=5)
            cluster.before = None
            logs = cluster.add_topic("t", 2)
            began = loop.time()
            error = await failure(delivery)
            assert (type(error), error.outcome) == (UnknownPartition, "failed")
            assert "created again with 2 partitions" in str(error)
            assert loop.time() - began < 3
            assert not logs[0].values() + logs[1].values()

    simulate(main())


def test_what_waits_for_a_partition_that_is_there_again_goes_to_the_new_one() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 6)
            delivery = await held_back(cluster, producer, partition=1)
            later = [await producer.send("t", b"%d" % n, partition=1) for n in range(3)]
            cluster.before = None
            logs = cluster.add_topic("t", 2)
            assert await within(5, delivery) == Appended("t", 1, 0, delivery.result().timestamp)
            assert [(await within(5, one)).offset for one in later] == [1, 2, 3]
            assert logs[1].values() == [b"waits", b"0", b"1", b"2"]
            assert decode(logs[1].batches[0]).base_sequence == 0

    simulate(main())


def test_a_key_never_goes_to_a_partition_that_it_would_not_choose() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 6)
            key = next(key for key in (b"%d" % n for n in range(99)) if not hash_of(key) % 6)
            delivery = await held_back(cluster, producer, key=key)
            cluster.before = None
            logs = cluster.add_topic("t", 4)
            error = await failure(delivery)
            assert (type(error), error.outcome) == (UnknownPartition, "failed")
            assert not any(log.values() for log in logs)

    simulate(main())


def hash_of(key: bytes) -> int:
    return int(mmh3.hash(key, signed=False))


def test_what_may_be_in_the_old_topic_is_unknown_and_not_sent_to_the_new_one() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            (old,) = cluster.add_topic("t", 1)
            await (await producer.send("t", b"before"))

            def after(request: Produce, node_id: int) -> None:
                raise lost()

            cluster.after = after
            delivery = await producer.send("t", b"twice?")
            await asyncio.sleep(0.1)
            cluster.after = None
            (new,) = cluster.add_topic("t", 1)
            error = await failure(delivery)
            assert error.outcome == "unknown"
            assert old.values() == [b"before", b"twice?"]
            assert new.values() == []
            assert (await within(5, await producer.send("t", b"next"))).offset == 0

    simulate(main())


def test_an_answer_that_comes_after_the_topic_was_made_again_counts() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 1)
            await (await producer.send("t", b"before"))
            gate = asyncio.Event()

            def after(request: Produce, node_id: int) -> Any:
                return gate.wait()

            cluster.after = after
            delivery = await producer.send("t", b"in flight")
            await asyncio.sleep(0.1)
            cluster.add_topic("t", 1)
            await producer._routes.refresh()
            assert not delivery.done()
            gate.set()
            assert (await within(1, delivery)).offset == 1

    simulate(main())


def test_a_deleted_topic_fails_what_waits_and_what_is_in_flight_is_unknown() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 2)
            await (await producer.send("t", b"x", partition=1))
            silent = asyncio.Event()

            def before(request: Produce, node_id: int) -> Any:
                return silent.wait() if request.partition else None

            cluster.before = before
            in_flight = await producer.send("t", b"y", partition=1)
            await asyncio.sleep(0.1)
            del cluster.topics["t"]
            began = loop.time()
            waits = await producer.send("t", b"z", partition=0)
            error = await failure(waits)
            assert (type(error), error.outcome) == (UnknownTopic, "failed")
            assert loop.time() - began < 6
            with pytest.raises(UnknownTopic):
                await producer.send("t", b"z")
            with pytest.raises(RaftqError) as caught:
                await within(15, in_flight)
            assert caught.value.outcome == "unknown"

    simulate(main())


def test_a_topic_made_again_after_it_was_given_up_is_used() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 2)
            await (await producer.send("t", b"x"))
            del cluster.topics["t"]
            assert isinstance(await failure(await producer.send("t", b"y")), UnknownTopic)
            cluster.add_topic("t", 1)
            assert (await within(5, await producer.send("t", b"z"))).offset == 0

    simulate(main())


def test_a_new_partition_can_be_named_as_soon_as_it_is_there() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 1)
            await (await producer.send("t", b"x"))
            with pytest.raises(InvalidArgument, match="1 partitions, so no partition 3"):
                await producer.send("t", b"x", partition=3)
            more = cluster.add_topic("t", 4)
            cluster.ids["t"] = 1
            await within(1, await producer.send("t", b"x", partition=3))
            assert more[3].values() == [b"x"]
            cluster.ids["t"] = cluster.next_topic = 1
            more = cluster.add_topic("t", 6)
            cluster.ids["t"] = 1
            await within(1, await producer.send_many("t", [b"y"], partition=5))
            assert more[5].values() == [b"y"]

    simulate(main())


@pytest.mark.parametrize("linger_ms", [0, 5])
@pytest.mark.parametrize("problem", ["no leader", "silence", "refusals"])
def test_what_was_sent_and_then_stuck_ends_in_time(problem: str, linger_ms: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with (
            fake_cluster() as cluster,
            Producer(cluster.bootstrap, linger_ms=linger_ms, delivery_timeout_ms=5_000) as producer,
        ):
            cluster.add_topic("t", 1)
            await (await producer.send("t", b"a"))
            if problem == "no leader":
                cluster.lead("t", 0, None)
            elif problem == "silence":
                cluster.before = lambda request, node_id: asyncio.Event().wait()
            else:
                cluster.before = refuse
            began = loop.time()
            sent = [await producer.send("t", b"b%d" % n) for n in range(3)]
            errors = [await failure(delivery) for delivery in sent]
            assert {type(error) for error in errors} == {RequestTimeout}
            # The last attempt may still be on its way.
            unknown = [error for error in errors if error.outcome == "unknown"]
            assert 4.9 < loop.time() - began < 5.7
            cluster.before = None
            cluster.lead("t", 0, 1)
            assert (await within(3, await producer.send("t", b"c"))).offset <= 1 + len(unknown)

    simulate(main())


def fill(cluster: FakeCluster, count: int) -> list[bytes]:
    (log,) = cluster.topics["t"]
    values = [b"%d/%d" % (cluster.ids["t"], number) for number in range(count)]
    log.append(memoryview(encode(values)))
    return values


async def read(consumer: Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += [record.value for record in await consumer.poll(timeout=1.0)]
    return found


@pytest.mark.parametrize("second", [5, 10, 40])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_consumer_begins_again_in_a_topic_that_was_made_again(second: int, at_once: bool) -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            cluster.add_topic("t", 1)
            values = fill(cluster, 10)
            await consumer.assign([("t", 0)])
            assert await read(consumer, 10) == values
            await asyncio.sleep(0.1)  # the next fetch waits at the node
            old = cluster.topics.pop("t")
            if not at_once:
                old[0].grown.set()
                await asyncio.sleep(1)
            cluster.add_topic("t", 1)
            values = fill(cluster, second)
            old[0].grown.set()
            assert await read(consumer, second) == values
            assert await consumer.position("t", 0) == second

    simulate(main())


def test_a_consumer_that_did_not_fetch_meanwhile_begins_again_as_well() -> None:
    async def main() -> None:
        async with (
            fake_cluster() as cluster,
            Consumer(cluster.bootstrap, prefetch_bytes_partition=1, fetch_bytes=1) as consumer,
        ):
            cluster.add_topic("t", 1)
            first = fill(cluster, 10)
            fill(cluster, 10)
            await consumer.assign([("t", 0)])
            assert await read(consumer, 10) == first
            await asyncio.sleep(0.7)  # the second batch is there and fills the buffer
            cluster.add_topic("t", 1)
            values = [*fill(cluster, 10), *fill(cluster, 10), *fill(cluster, 10)]
            found = await read(consumer, 40)
            assert found[10:] == values

    simulate(main())


def test_without_a_reset_policy_a_topic_made_again_is_an_error_until_a_seek() -> None:
    async def main() -> None:
        async with (
            fake_cluster() as cluster,
            Consumer(cluster.bootstrap, reset="none") as consumer,
        ):
            cluster.add_topic("t", 1)
            fill(cluster, 10)
            await consumer.assign([("t", 0)])
            await consumer.seek("t", 0, offset=0)
            await read(consumer, 10)
            await asyncio.sleep(0.1)
            cluster.add_topic("t", 1)
            values = fill(cluster, 40)
            for _ in range(2):
                with pytest.raises(OffsetOutOfRange, match="created again"):
                    await read(consumer, 1)
            await consumer.seek("t", 0, to="earliest")
            assert await read(consumer, 40) == values

    simulate(main())


@pytest.mark.parametrize("offset", [11, 1_000])
def test_a_position_past_the_end_is_reset_after_the_grace_time(offset: int) -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            cluster.add_topic("t", 1)
            values = fill(cluster, 10)
            await consumer.assign([("t", 0)])
            await consumer.seek("t", 0, offset=offset)
            assert await read(consumer, 10) == values

    simulate(main())


def test_a_consumer_of_a_deleted_topic_learns_of_it() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            cluster.add_topic("t", 1)
            fill(cluster, 10)
            await consumer.assign([("t", 0)])
            await read(consumer, 10)
            del cluster.topics["t"]
            with pytest.raises(UnknownTopic):
                await read(consumer, 1)

    simulate(main())


def test_a_consumer_of_a_partition_that_is_not_made_again_learns_of_it() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            cluster.add_topic("t", 2)
            await consumer.assign([("t", 1)])
            assert await consumer.poll(timeout=0.1) == []
            cluster.add_topic("t", 1)
            with pytest.raises(UnknownPartition):
                await read(consumer, 1)

    simulate(main())


def test_whoever_knows_of_new_partitions_can_say_so() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 1)
            await producer.expect("t", 1)
            more = cluster.add_topic("t", 4)
            cluster.ids["t"] = 1
            await producer.expect("t", 4)
            key = next(key for key in (b"%d" % n for n in range(99)) if hash_of(key) % 4 == 3)
            await (await producer.send("t", b"x", key=key))
            assert more[3].values() == [b"x"]

    simulate(main())
