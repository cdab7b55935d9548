"""The mistakes of other systems, looked for on real nodes that are killed.

Those that are not about queues and groups over a cluster have their tests elsewhere:

    09  a follower that diverged: test_cluster_processes.py; here: what is leased is replicated
    10  HTTP publishes: here priority and delay; schemas and quotas come with their parts
    11  transactions: come with their part; the embedded ones are in unit/test_queue_transactions.py
    12  compaction: unit/test_storage_compaction.py
    18  benchmarks that are too short: unit/test_bench.py
"""

import asyncio
import http.client
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from clusterwork import until
from queuework import Stage, clock, on_stage

from raftq import aio
from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.history import Cancel, LeasedDelivery, Publish
from raftq.chaos.recorder import Recorder
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.net.connection import Connection
from raftq.client.wire.batch import encode
from raftq.client.wire.messages import Produce
from raftq.client.wire.queue_messages import DescribeQueue, ListDelayed

WEIGHTS = (50, 25, 15, 7, 3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("mistakes") / "cluster", nodes=3) as made:
        yield made


async def lease(
    recorder: Recorder, stage: Stage, count: int, within_s: float = 8.0, lease_s: float = 30.0
) -> list[LeasedDelivery]:
    """That many records, from whoever leads."""
    found: list[LeasedDelivery] = []
    ends_at = clock() + within_s
    while len(found) < count:
        assert clock() < ends_at, f"only {len(found)} of {count} came: {found}"
        found += await recorder.lease(stage.places, count - len(found), lease_s, wait_s=0.3)
    return found


async def say(recorder: Recorder, given: list[LeasedDelivery], verb: str, **more: object) -> None:
    """Until it is answered; a leader may be killed meanwhile."""

    async def done() -> bool:
        said = await recorder.settle(given, verb, **more)  # type: ignore[arg-type]
        return all(one.status == "ok" or one.error == "already_settled" for one in said)

    await until(done, 8)


def numbers(given: list[LeasedDelivery]) -> list[int]:
    return sorted(int(one.value.split()[-1]) for one in given)


def test_mistake_01_no_record_of_a_lower_lane_is_skipped(cluster: LocalCluster) -> None:
    async def scene(stage: Stage) -> None:
        for number in range(100):
            stage.spawn(stage.send(f"v {number}", priority=(number * 7) % 5))
        worker = await stage.recorder("w")
        given = await lease(worker, stage, 37)
        await say(worker, given, "ack")
        await stage.kill_leader()
        given += await lease(worker, stage, 63)
        assert numbers(given) == list(range(100))
        assert not await worker.lease(stage.places, 10)

    on_stage(cluster, scene, topic="m01", partitions=1)


def test_mistake_02_busy_lanes_get_their_shares_within_two_points(cluster: LocalCluster) -> None:
    async def scene(stage: Stage) -> None:
        for lane in range(5):
            values = [b"%d %d" % (lane, number) for number in range(1100)]
            await (await stage.producer.send_many(stage.topic, values, priority=lane, partition=0))
        worker = await stage.recorder("w")
        given = []
        for _ in range(20):
            some = await lease(worker, stage, 100)
            await say(worker, some, "ack")
            given += some
        counts = [0] * 5
        for one in given:
            counts[int(one.value.split()[0])] += 1
        shares = [100 * count / len(given) for count in counts]
        for share, weight in zip(shares, WEIGHTS, strict=True):
            assert abs(share - weight) < 2, shares

    on_stage(cluster, scene, topic="m02", partitions=1)


def test_mistake_03_a_nacked_record_comes_back_and_blocks_nobody(cluster: LocalCluster) -> None:
    async def scene(stage: Stage) -> None:
        worker = await stage.recorder("w")
        await stage.send("v 0")
        (bad,) = await lease(worker, stage, 1)
        await say(worker, [bad], "nack", delay_s=4.0)
        nacked_at = clock()
        await stage.send_many([f"v {number}" for number in range(1, 6)])
        others = await lease(worker, stage, 5, within_s=2.0)
        assert numbers(others) == [1, 2, 3, 4, 5]
        await stage.kill_leader()
        (again,) = await lease(worker, stage, 1)
        assert (again.value, again.attempt) == ("v 0", 2)
        assert again.granted >= nacked_at + 3.9

    on_stage(cluster, scene, topic="m03", partitions=1)


def test_mistake_04_acks_move_the_progress_of_the_group(cluster: LocalCluster) -> None:
    async def scene(stage: Stage) -> None:
        worker = await stage.recorder("w")
        await stage.send_many([f"v {number}" for number in range(20)])
        given = await lease(worker, stage, 20)
        given.sort(key=lambda one: one.offset)
        await say(worker, given[5:10], "ack")
        assert (await stage.describe(stage.places[0])).settled_offset == 0
        await say(worker, given[:5], "ack")
        assert (await stage.describe(stage.places[0])).settled_offset == 10
        await stage.kill_leader()
        described = await stage.describe(stage.places[0])
        assert (described.settled_offset, described.in_flight) == (10, 10)
        await say(worker, given[10:], "ack")
        assert (await stage.describe(stage.places[0])).settled_offset == 20

    on_stage(cluster, scene, topic="m04", partitions=1)


def test_mistake_05_what_one_group_has_in_flight_is_nothing_to_another(
    cluster: LocalCluster,
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.send_many([f"v {number}" for number in range(10)])
        one = await stage.recorder("w1", "one")
        other = await stage.recorder("w2", "other")
        first = await lease(one, stage, 10)
        second = await lease(other, stage, 10)
        assert numbers(first) == numbers(second) == list(range(10))
        said = await other.settle(first, "ack")
        assert {row.error for row in said} == {"lease_foreign"}
        await say(one, first, "ack")
        described = await stage.describe(stage.places[0], "other")
        assert (described.settled_offset, described.in_flight) == (0, 10)

    on_stage(cluster, scene, topic="m05", partitions=1)


def test_mistake_06_a_dead_letter_does_not_block_the_prefix(cluster: LocalCluster) -> None:
    async def scene(stage: Stage) -> None:
        worker = await stage.recorder("w")
        await stage.send_many([f"v {number}" for number in range(10)])
        given = sorted(await lease(worker, stage, 10), key=lambda one: one.offset)
        await say(worker, given[1:], "ack")
        await say(worker, given[:1], "reject", reason="broken")
        await stage.drained(within_s=8)
        assert (await stage.describe(stage.places[0])).settled_offset == 10
        final = await stage.final("g")
        assert [letter.value for letter in final.letters] == [given[0].value]
        stage.judge(final)

    on_stage(cluster, scene, topic="m06", partitions=1)


def test_mistake_07_a_delayed_record_is_found_when_the_others_went_past_it(
    cluster: LocalCluster,
) -> None:
    """The readers and workers are at the end of the log, and a leader dies before it is due."""

    async def scene(stage: Stage) -> None:
        worker = await stage.recorder("w")
        late = await stage.send("v 0", deliver_at=clock() + 4.0)
        await stage.send_many([f"v {number}" for number in range(1, 11)])
        given = await lease(worker, stage, 10)
        await say(worker, given, "ack")
        assert (await stage.describe(stage.places[0])).unsettled == 0
        await stage.kill_leader()
        (last,) = await lease(worker, stage, 1)
        assert last.value == "v 0"
        assert last.granted >= late.deliver_at
        await say(worker, [last], "ack")
        stage.judge(await stage.final("g"))

    on_stage(cluster, scene, topic="m07", partitions=1)


def test_mistake_08_a_cancelled_record_is_never_seen(cluster: LocalCluster) -> None:
    async def scene(stage: Stage) -> None:
        worker = await stage.recorder("w")
        due = clock() + 4.0
        sent = [await stage.send(f"v {number}", deliver_at=due) for number in range(10)]
        for one in sent[::2]:
            assert one.offset is not None
            cancelled = await worker.cancel(one.partition_key, one.offset, one.value)
            assert cancelled.status == "ok"
        await stage.kill_leader()
        given = await lease(worker, stage, 5)
        assert numbers(given) == [1, 3, 5, 7, 9]
        await say(worker, given, "ack")
        assert not await worker.lease(stage.places, wait_s=0.5)
        stage.judge(await stage.final("g"))

    on_stage(cluster, scene, topic="m08", partitions=1)


@pytest.mark.full
def test_mistake_09_nothing_is_leased_that_the_next_leader_may_not_have(
    cluster: LocalCluster,
) -> None:
    """Followers stand still: what only the leader has is not given to workers."""

    async def scene(stage: Stage) -> None:
        worker = await stage.recorder("w")
        await stage.send("v 0")
        await lease(worker, stage, 1)
        leader = await stage.leader(stage.places[0])
        others = [node for node in cluster.ids if node != leader]
        for node in others:
            cluster.pause(node)
        try:
            host, port = cluster.addresses(leader).native.split(":")
            async with await Connection.open(host, int(port)) as connection:
                with suppress(RaftqError):  # it may give up its lead meanwhile
                    request = Produce(stage.topic, 0, acks="leader", timeout_ms=500)
                    await connection.request(request, [encode([b"v 1"])], timeout_s=1.0)
                assert not await worker.lease(stage.places, wait_s=0.5)
        finally:
            for node in others:
                cluster.resume(node)
        await until(stage.is_whole, 20)

    on_stage(cluster, scene, topic="m09", partitions=1)


def test_mistake_10_a_publish_by_http_at_any_node_keeps_priority_and_delay(
    cluster: LocalCluster,
) -> None:
    def post(node: int, message: dict[str, object]) -> dict[str, object]:
        host, port = cluster.addresses(node).http.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        try:
            body = json.dumps({"messages": [message]})
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/topics/m10/messages", body, headers)
            reply = connection.getresponse()
            text = reply.read()
            assert reply.status < 300, text
            return json.loads(text)["results"][0]
        finally:
            connection.close()

    async def scene(stage: Stage) -> None:
        worker = await stage.recorder("w")
        for node in cluster.ids:
            post(node, {"value": f"low {node}", "priority": "background"})
        for node in cluster.ids:
            post(node, {"value": f"high {node}", "priority": "critical"})
        for node in cluster.ids:
            result = post(node, {"value": f"later {node}", "delay": "2s"})
            assert result["delayed"], result
        first = [one.value for one in await lease(worker, stage, 6)]
        assert not [value for value in first if value.startswith("later")]
        lanes = (await stage.describe(stage.places[0])).lanes
        assert lanes == (3, 0, 0, 0, 3)
        last = [one.value for one in await lease(worker, stage, 3)]
        assert sorted(last) == ["later 1", "later 2", "later 3"]

    on_stage(cluster, scene, topic="m10", partitions=1)


@pytest.mark.full
def test_mistake_13_a_rebalance_ends_though_a_member_is_busy_or_dead(
    cluster: LocalCluster,
) -> None:
    """One member dies without a word, one works for long on what it got, and a third joins: it gets
    its share, and the busy one keeps the rest."""

    async def scene(stage: Stage) -> None:
        def member(name: str) -> aio.Consumer:
            return aio.Consumer(
                cluster.bootstrap, name=name, group="m13", topics=[stage.topic], session_ms=1500,
                heartbeat_ms=300, max_poll_ms=1000, fetch_wait_ms=200,
            )  # fmt: skip

        await stage.send_many([f"v {number}" for number in range(40)])
        async with member("busy") as busy:
            dead = await member("dead").start()
            owned: dict[str, int] = {}

            async def shared() -> bool:
                for name, one in (("busy", busy), ("dead", dead)):
                    await one.poll(timeout=0.05)
                    owned[name] = len(one.assignment())
                return list(owned.values()) == [2, 2]

            await until(shared, 10)
            await dead._end()  # as kill -9 does
            async with member("late") as late:

                async def taken() -> bool:
                    await late.poll(timeout=0.1)
                    return len(late.assignment()) == 2

                await until(taken, 8)
                await busy.poll(timeout=0.5)
                assert len(busy.assignment()) == 2

    on_stage(cluster, scene, topic="m13", partitions=4)


@pytest.mark.full
def test_mistake_14_all_of_many_producers_and_short_delays_are_found(
    cluster: LocalCluster,
) -> None:
    """500 records of eight producers at once in all lanes; delays under a tick; cancels that race
    with the firing. Each record that was acknowledged and not cancelled is delivered, once."""

    async def scene(stage: Stage) -> None:
        worker = await stage.recorder("w")
        rng = Random("m14")

        async def produce(name: str) -> None:
            async with aio.Producer(cluster.bootstrap, linger_ms=rng.choice((0, 3))) as producer:
                for number in range(63):
                    value = f"{name} {number}".encode()
                    await producer.send(stage.topic, value, partition=0, priority=rng.randrange(5))
                await producer.flush()

        async def short(number: int) -> None:
            due = clock() + rng.choice((0.001, 0.004, 0.009, 0.05))
            sent = await stage.send(f"short {number}", deliver_at=due)
            if number % 3 == 0 and sent.offset is not None and sent.deliver_at:
                await worker.cancel(sent.partition_key, sent.offset, sent.value)

        async with asyncio.TaskGroup() as group:
            for at in range(8):
                group.create_task(produce(f"p{at}"))
            for number in range(60):
                group.create_task(short(number))
        await sleep(0.3)
        await stage.kill_leader()
        cancelled = sum(one.status == "ok" for one in stage.history.of(Cancel))
        given = await lease(worker, stage, 8 * 63 + 60 - cancelled)
        assert not await worker.lease(stage.places, wait_s=0.5)
        values = [one.value for one in given]
        assert len(set(values)) == len(values)
        plain = [value for value in values if not value.startswith("short")]
        assert len(plain) == 8 * 63
        for one in given:
            if not one.value.startswith("short"):
                noted = Publish(client="p", topic=one.topic, partition=0, at=0.0, value=one.value)
                noted.end("ok", 0.1)
                noted.offset = one.offset
                stage.history.add(noted)
        stage.judge(await stage.final())
        pending = (await worker.ask(stage.places[0], ListDelayed(*stage.places[0]))).message
        assert not pending.records

    on_stage(cluster, scene, topic="m14", partitions=1)


@pytest.mark.full
def test_mistake_15_a_torn_ledger_does_not_keep_a_node_from_starting(
    cluster: LocalCluster,
) -> None:
    """A node dies in the middle of writing what its workers said: the last entry is half there."""

    async def scene(stage: Stage) -> None:
        worker = await stage.recorder("w")
        await stage.send_many([f"v {number}" for number in range(30)])
        given = await lease(worker, stage, 30)
        await say(worker, given[:20], "ack")
        torn = await stage.leader(stage.places[0])
        await asyncio.to_thread(cluster.kill, torn)
        await asyncio.to_thread(tear, cluster, torn, stage.topic)
        await asyncio.to_thread(cluster.restart, torn)
        await until(stage.is_whole, 20)
        await say(worker, given[20:], "ack")
        await stage.drained(within_s=8)
        stage.judge(await stage.final("g"))

    on_stage(cluster, scene, topic="m15", partitions=1)


def tear(cluster: LocalCluster, node: int, topic: str) -> None:
    """Cut the last bytes off the ledger and the data, as an interrupted write leaves them."""
    torn = 0
    for partition_log in ("ledger", "data"):
        pattern = f"node-{node}/logs/{topic}-*/0/{partition_log}/*.log"
        for path in Path(cluster.files.directory).glob(pattern):
            with path.open("r+b") as file:
                size = file.seek(0, 2)
                if size > 7:
                    file.truncate(size - 7)
                    torn += 1
    assert torn == 2, torn


def test_mistake_16_a_record_whose_worker_died_comes_back(cluster: LocalCluster) -> None:
    async def scene(stage: Stage) -> None:
        await stage.send("v 0")
        dying = await stage.recorder("w1")
        (first,) = await lease(dying, stage, 1, lease_s=3.0)
        await dying.close()
        await stage.kill_leader(down_s=0.2)
        worker = await stage.recorder("w2")
        (again,) = await lease(worker, stage, 1)
        assert (again.value, again.attempt) == ("v 0", 2)
        assert again.granted >= first.deadline

    on_stage(cluster, scene, topic="m16", partitions=1)


def test_mistake_17_leases_are_reclaimed_without_anybody_asking(cluster: LocalCluster) -> None:
    """A worker that waits already gets the record when the lease of another runs out, and a receipt
    that ran out is refused."""

    async def scene(stage: Stage) -> None:
        await stage.send("v 0")
        holder = await stage.recorder("w1")
        waiting = await stage.recorder("w2")
        (first,) = await lease(holder, stage, 1, lease_s=1.0)
        (again,) = await waiting.lease(stage.places, wait_s=5.0)
        assert 0.0 <= again.granted - first.deadline < 0.5
        (late,) = await holder.settle([first], "ack")
        assert late.error == "lease_replaced"
        await say(waiting, [again], "nack", delay_s=0.0)
        reply = await waiting.ask(stage.places[0], DescribeQueue(*stage.places[0], "g"))
        assert reply.message.groups[0].in_flight == 0

    on_stage(cluster, scene, topic="m17", partitions=1)
