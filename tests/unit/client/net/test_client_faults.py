"""The producer when nodes fail: nothing acknowledged is lost, nothing is written twice, order is
kept, and what cannot be delivered says whether it may have been written."""

import asyncio
import random
from typing import Any

import pytest
from fake_cluster import FakeCluster, fake_cluster, lost, simulate

from raftq.aio import Producer
from raftq.client.common.errors import (
    FencedProducer,
    InternalError,
    NotEnoughReplicas,
    NotLeader,
    OutOfOrderSequence,
    RaftqError,
    RequestTimeout,
    Throttled,
    UnknownTopic,
)
from raftq.client.results import Delivery
from raftq.client.wire.batch import decode
from raftq.client.wire.messages import Metadata, Produce


async def send_numbers(
    producer: Producer, count: int, partitions: int, every_s: float = 0.0
) -> list[tuple[bytes, Delivery]]:
    """Numbered records, one batch each or so, to partitions in turn."""
    sent = []
    for number in range(count):
        value = b"%06d" % number
        sent.append((value, await producer.send("t", value, partition=number % partitions)))
        if every_s:
            await asyncio.sleep(every_s)
    return sent


def check_log(cluster: FakeCluster, sent: list[tuple[bytes, Delivery]]) -> None:
    """Every record is where its acknowledgement says, once, and in the order of sending."""
    logs = [log.values() for log in cluster.topics["t"]]
    for value, delivery in sent:
        place = delivery.result()
        assert logs[place.partition][place.offset] == value
    for log in logs:
        assert log == sorted(set(log)), "duplicated or out of order"
    assert sum(map(len, logs)) == len(sent)


@pytest.mark.parametrize("seed", range(12))
def test_order_and_exactly_once_survive_random_failures_with_five_in_flight(seed: int) -> None:
    """Requests are refused, replies are lost, leaders change and nodes restart, all at random."""

    async def main() -> None:
        rng = random.Random(seed)
        async with fake_cluster(3) as cluster:
            cluster.add_topic("t", 2)

            def before(request: Produce, node_id: int) -> Any:
                if rng.random() < 0.15:
                    raise rng.choice(
                        [NotEnoughReplicas("few"), Throttled("much"), NotLeader("not me"), lost()]
                    )
                return asyncio.sleep(rng.random() * 0.01) if rng.random() < 0.2 else None

            def after(request: Produce, node_id: int) -> Any:
                if rng.random() < 0.15:
                    raise lost()
                return asyncio.sleep(rng.random() * 0.05) if rng.random() < 0.3 else None

            cluster.before, cluster.after = before, after

            async def disturb() -> None:
                for _ in range(6):
                    await asyncio.sleep(rng.random() * 0.3)
                    cluster.lead("t", rng.randrange(2), rng.choice([None, 1, 2, 3]))
                    await asyncio.sleep(rng.random() * 0.2)
                    node = rng.choice(sorted(cluster.servers))
                    await cluster.stop_node(node)
                    await asyncio.sleep(rng.random() * 0.2)
                    await cluster.start_node(node)
                for partition in range(2):
                    cluster.lead("t", partition, 1 + partition)
                cluster.before = cluster.after = None

            disturbing = asyncio.ensure_future(disturb())
            async with Producer(
                cluster.bootstrap, batch_records=3, linger_ms=1, rng=random.Random(seed)
            ) as producer:
                sent = await send_numbers(producer, 400, 2, 0.004)
                await producer.flush(timeout=120)
                check_log(cluster, sent)
            await disturbing

    simulate(main(), seed)


@pytest.mark.parametrize("seed", range(8))
def test_what_each_delivery_says_is_true_when_time_runs_out_all_the_time(seed: int) -> None:
    """Appended records are there once, where they were said to be, and in order; failed ones are
    not there; unknown ones are there at most once."""

    async def main() -> None:
        rng = random.Random(seed)
        async with fake_cluster(2) as cluster:
            cluster.add_topic("t", 2)

            def before(request: Produce, node_id: int) -> Any:
                if rng.random() < 0.3:
                    raise rng.choice([NotEnoughReplicas("few"), NotLeader("not me"), lost()])
                return asyncio.sleep(rng.random() * 0.3) if rng.random() < 0.1 else None

            def after(request: Produce, node_id: int) -> Any:
                if rng.random() < 0.2:
                    raise rng.choice([lost(), InternalError("broken")])
                return asyncio.sleep(rng.random() * 0.3) if rng.random() < 0.1 else None

            cluster.before, cluster.after = before, after
            async with Producer(
                cluster.bootstrap,
                batch_records=3,
                linger_ms=1,
                delivery_timeout_ms=200,
                rng=random.Random(seed),
            ) as producer:
                sent = []
                for number in range(300):
                    if number % 50 == 0:
                        cluster.lead("t", rng.randrange(2), rng.choice([None, 1, 2]))
                    if number % 100 == 99:
                        cluster.lead("t", 0, 1)
                        cluster.lead("t", 1, 2)
                    value = b"%06d" % number
                    delivery = await producer.send("t", value, partition=number % 2)
                    delivery.add_done_callback(lambda one: None)
                    sent.append((value, delivery))
                    await asyncio.sleep(0.005)
                await producer.flush(timeout=60)
            await asyncio.sleep(1)
            logs = [log.values() for log in cluster.topics["t"]]
            everything = logs[0] + logs[1]
            last = [-1, -1]
            outcomes = {"appended": 0, "failed": 0, "unknown": 0}
            for value, delivery in sent:
                error = delivery.exception()
                count = everything.count(value)
                outcomes["appended" if error is None else error.outcome] += 1
                if error is None:
                    place = delivery.result()
                    assert logs[place.partition][place.offset] == value
                    assert count == 1
                    assert place.offset > last[place.partition]
                    last[place.partition] = place.offset
                else:
                    assert count == 0 if error.outcome == "failed" else count <= 1
            assert outcomes["appended"] > 0
            assert outcomes["failed"] + outcomes["unknown"] > 0

    simulate(main(), seed)


def test_five_requests_of_a_partition_are_in_flight_and_not_more() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 1)
            gate = asyncio.Event()
            seen: list[int] = []

            def before(request: Produce, node_id: int) -> Any:
                seen.append(1)
                return gate.wait()

            cluster.before = before
            async with Producer(cluster.bootstrap, batch_records=1) as producer:
                sent = await send_numbers(producer, 20, 1)
                await asyncio.sleep(0.5)
                assert len(seen) == 5
                gate.set()
                await producer.flush()
                check_log(cluster, sent)

    simulate(main())


def test_a_lost_reply_is_answered_from_memory_and_not_appended_again() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            failures = [lost(), lost()]

            def after(request: Produce, node_id: int) -> None:
                if failures:
                    raise failures.pop()

            cluster.after = after
            async with Producer(cluster.bootstrap) as producer:
                assert (await (await producer.send("t", b"once"))).offset == 0
            assert log.values() == [b"once"]

    simulate(main())


def test_the_leader_changes_mid_stream_and_the_stream_goes_on() -> None:
    async def main() -> None:
        async with fake_cluster(2) as cluster:
            (log,) = cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, batch_records=2) as producer:
                sending = asyncio.ensure_future(send_numbers(producer, 300, 1, 0.002))
                for node in (2, 1, 2):
                    await asyncio.sleep(0.15)
                    cluster.lead("t", 0, node)
                sent = await sending
                await producer.flush()
                check_log(cluster, sent)
            assert {decode(raw).epoch for raw in log.batches} == {1, 2, 3, 4}

    simulate(main())


def test_a_dead_leader_is_replaced_within_moments() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster(3) as cluster:
            cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, linger_ms=0) as producer:
                await (await producer.send("t", b"1"))
                await cluster.stop_node(1)
                delivery = await producer.send("t", b"2")
                await asyncio.sleep(1.0)
                cluster.lead("t", 0, 2)
                began = loop.time()
                assert (await delivery).offset == 1
                assert loop.time() - began < 0.7

    simulate(main())


def test_a_leader_that_answers_no_more_is_left_as_soon_as_another_leads() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster(2) as cluster:
            (log,) = cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, linger_ms=0) as producer:
                await (await producer.send("t", b"1"))

                def before(request: Produce, node_id: int) -> Any:
                    return asyncio.Event().wait() if node_id == 1 else None

                cluster.before = before
                delivery = await producer.send("t", b"2")
                await asyncio.sleep(0.1)
                began = loop.time()
                cluster.lead("t", 0, 2)
                assert (await delivery).offset == 1
                assert loop.time() - began < 3.0  # far below the request's own timeout
            assert log.values() == [b"1", b"2"]

    simulate(main())


def test_records_without_a_key_avoid_a_partition_without_a_leader() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            logs = cluster.add_topic("t", 2)
            async with Producer(cluster.bootstrap, batch_records=1, linger_ms=0) as producer:
                cluster.lead("t", 0, None)
                stuck = await producer.send("t", b"stuck", partition=0)
                await asyncio.sleep(0.2)
                for _ in range(10):
                    assert (await (await producer.send("t", b"x"))).partition == 1
                assert not stuck.done()
                cluster.lead("t", 0, 1)
                await stuck
            assert logs[0].values() == [b"stuck"]

    simulate(main())


async def failure(delivery: Delivery) -> RaftqError:
    with pytest.raises(RaftqError) as caught:
        await delivery
    return caught.value


def test_time_runs_out_before_anything_was_written() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, delivery_timeout_ms=2_000) as producer:
                cluster.lead("t", 0, None)
                began = loop.time()
                error = await failure(await producer.send("t", b"x"))
                assert isinstance(error, RequestTimeout)
                assert error.outcome == "failed"
                assert "no leader is known for t/0" in str(error)
                assert 1.9 < loop.time() - began < 2.6

    simulate(main())


def test_time_runs_out_when_it_may_have_been_written() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 1)

            def after(request: Produce, node_id: int) -> None:
                raise lost()

            cluster.after = after
            async with Producer(cluster.bootstrap, delivery_timeout_ms=1_000) as producer:
                error = await failure(await producer.send("t", b"x"))
                assert (type(error), error.outcome) == (RequestTimeout, "unknown")
                cluster.after = None
                assert (await (await producer.send("t", b"y"))).offset == 1

    simulate(main())


def test_after_a_batch_is_given_up_the_partition_goes_on_under_a_new_id() -> None:
    """The first batch never gets through; those after it were refused because of it, and are sent
    again with new numbers: each once, in order."""

    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)

            def before(request: Produce, node_id: int) -> None:
                raise NotEnoughReplicas("only one")

            cluster.before = before
            async with Producer(
                cluster.bootstrap, batch_records=1, delivery_timeout_ms=1_000
            ) as producer:
                doomed = await producer.send("t", b"doomed")
                await asyncio.sleep(0.9)
                later = [await producer.send("t", b"%d" % number) for number in range(8)]
                error = await failure(doomed)
                assert (type(error), error.outcome) == (RequestTimeout, "failed")
                cluster.before = None
                assert [(await one).offset for one in later] == list(range(8))
            assert log.values() == [b"%d" % number for number in range(8)]
            batches = map(decode, log.batches)
            origins = {(batch.producer_id, batch.producer_epoch) for batch in batches}
            assert origins == {(1, 1)}, "the old epoch has a gap"
            assert decode(log.batches[0]).base_sequence == 0

    simulate(main())


def test_what_may_have_been_written_is_never_sent_under_another_id() -> None:
    """Two batches in flight: the first fails for good, the second may have been written. It is
    reported as unknown, not sent again as something new."""

    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            answers: list[RaftqError] = [InternalError("broken").with_outcome("failed"), lost()]

            def before(request: Produce, node_id: int) -> None:
                if answers:
                    raise answers.pop(0)

            cluster.before = before
            async with Producer(cluster.bootstrap, batch_records=1) as producer:
                first, second = await producer.send("t", b"1"), await producer.send("t", b"2")
                third = await producer.send("t", b"3")
                error = await failure(first)
                assert (type(error), error.outcome) == (InternalError, "failed")
                error = await failure(second)
                assert (type(error), error.outcome) == (OutOfOrderSequence, "unknown")
                assert (await third).offset == 0
            assert log.values() == [b"3"]

    simulate(main())


def test_a_fenced_producer_gets_a_clear_final_error() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 1)

            def before(request: Produce, node_id: int) -> None:
                raise FencedProducer("a newer one has taken over")

            cluster.before = before
            async with Producer(cluster.bootstrap) as producer:
                error = await failure(await producer.send("t", b"x"))
                assert type(error) is FencedProducer

    simulate(main())


def test_without_idempotence_an_unknown_outcome_is_not_repeated() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            problems = [NotEnoughReplicas("not now"), None, lost()]

            def before(request: Produce, node_id: int) -> None:
                problem = problems.pop(0) if problems else None
                if problem is not None:
                    raise problem

            cluster.before = before
            async with Producer(cluster.bootstrap, idempotent=False) as producer:
                assert (await (await producer.send("t", b"repeated"))).offset == 0
                error = await failure(await producer.send("t", b"lost"))
                assert error.outcome == "unknown"
            assert log.values() == [b"repeated"]

    simulate(main())


def test_errors_that_nobody_asks_about_are_raised_by_flush_once() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 1)

            def before(request: Produce, node_id: int) -> None:
                raise InternalError("broken")

            cluster.before = before
            async with Producer(cluster.bootstrap) as producer:
                await producer.send_many("t", [b"x"] * 10)
                with pytest.raises(InternalError, match="10 records were not delivered"):
                    await producer.flush()
                await producer.flush()
                asked = await producer.send("t", b"x")
                asked.add_done_callback(lambda delivery: None)
                await producer.flush()

    simulate(main())


def test_a_deleted_topic_ends_what_waits_for_it() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap) as producer:
                await (await producer.send("t", b"x"))
                del cluster.topics["t"]
                error = await failure(await producer.send("t", b"y"))
                assert isinstance(error, UnknownTopic)
                with pytest.raises(UnknownTopic):
                    await producer.send("t", b"z")

    simulate(main())


def test_one_living_bootstrap_node_of_three_is_enough() -> None:
    async def main() -> None:
        async with fake_cluster(3) as cluster:
            cluster.add_topic("t", 3)
            for partition in range(3):
                cluster.lead("t", partition, 3)
            bootstrap = cluster.bootstrap
            await cluster.stop_node(1)
            await cluster.stop_node(2)
            async with Producer(bootstrap) as producer:
                await (await producer.send("t", b"x"))

    simulate(main())


def test_routes_are_asked_for_once_by_many_who_need_them() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 50)
            async with Producer(cluster.bootstrap, linger_ms=0) as producer:
                await (await producer.send("t", b"x"))
                asked = cluster.asked
                for partition in range(50):
                    cluster.lead("t", partition, None)
                sent = [await producer.send("t", b"x", partition=n) for n in range(50)]
                await asyncio.sleep(0.1)
                assert cluster.asked - asked <= 6
                for partition in range(50):
                    cluster.lead("t", partition, 1)
                for delivery in sent:
                    await delivery

    simulate(main())


def test_a_node_that_is_cut_off_and_knows_only_the_past_does_not_mislead_for_ever() -> None:
    """Node 1 says for ever that it leads, and refuses what it is asked; node 2 knows better."""

    async def main() -> None:
        async with fake_cluster(2) as cluster:
            cluster.add_topic("t", 1)
            tell = cluster._metadata
            await cluster.stop_node(1)
            old = tell(Metadata(("t",)), memoryview(b""), 1)
            cluster._metadata = lambda *args: old  # type: ignore[method-assign]
            await cluster.start_node(1)
            cluster.lead("t", 0, 2)
            async with Producer(f"127.0.0.1:{cluster.ports[1]}") as producer:
                assert (await asyncio.wait_for(await producer.send("t", b"x"), 5)).offset == 0

    simulate(main())


def test_settled_batches_are_forgotten() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 2)
            async with Producer(cluster.bootstrap, batch_records=1) as producer:
                cluster.lead("t", 1, None)
                stuck = await producer.send("t", b"stuck", partition=1)
                for _ in range(30):
                    await (await producer.send_many("t", [b"x"] * 100, partition=0))
                assert not stuck.done()
                assert len(producer._sender._ages) < 1_500
                cluster.lead("t", 1, 1)
                await stuck

    simulate(main())


def test_the_sequence_wraps_around() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, batch_records=10) as producer:
                await (await producer.send("t", b"first"))
                outbox = producer._accumulator.topics["t"].outboxes[0]
                outbox.sequence = (1 << 32) - 15
                log.producers.note(1, 0, (1 << 32) - 16, 1, 0)
                await (await producer.send_many("t", [b"x"] * 40))
            assert len(log.values()) == 41

    simulate(main())
