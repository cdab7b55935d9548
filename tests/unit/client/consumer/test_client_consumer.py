"""The consumer: every record once and in order, wherever it starts and whatever fails."""

import asyncio
import random
from typing import Any

import pytest
from fake_cluster import FakePartition, fake_cluster, simulate

from raftq.aio import Consumer, Record
from raftq.client.common.errors import (
    ConfigError,
    CorruptBatch,
    InvalidArgument,
    NotEnoughReplicas,
    OffsetOutOfRange,
    QueueClosed,
    RequestTimeout,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.consumer.positions import Positions
from raftq.client.net.connection import Connection
from raftq.client.wire.batch import encode
from raftq.client.wire.encoder import encode_control
from raftq.client.wire.messages import Fetch


def fill(log: FakePartition, count: int, size: int = 10) -> list[bytes]:
    """Append so many numbered records in batches of `size`."""
    first = len(log.values())
    values = [b"%06d" % number for number in range(first, first + count)]
    for at in range(0, count, size):
        part = values[at : at + size]
        stamps = [1000 * (first + at + number) for number in range(len(part))]
        log.append(memoryview(encode(part, timestamps=stamps)))
    return values


async def read(consumer: Consumer, count: int, timeout_s: float = 60.0) -> list[Record]:
    found: list[Record] = []
    async with asyncio.timeout(timeout_s):
        while len(found) < count:
            found += await consumer.poll(max_records=7, timeout=1.0)
    return found


def test_records_come_with_everything_they_were_sent_with() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            log.append(memoryview(encode([b"v", b"w"], [b"k", None], [{"a": b"1"}, None], [5, 6])))
            await consumer.assign([("t", 0)])
            assert await consumer.poll() == [
                Record("t", 0, 0, b"k", b"v", 5, {"a": b"1"}, 2),
                Record("t", 0, 1, None, b"w", 6, {}, 2),
            ]
            assert await consumer.poll(timeout=0.2) == []
            assert consumer.high_watermark("t", 0) == 2

    simulate(main())


def test_max_records_cuts_batches_and_nothing_is_lost_between_polls() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            values = fill(log, 95, 20)
            await consumer.assign([("t", 0)])
            found = await read(consumer, 95)
            assert [one.value for one in found] == values
            assert [one.offset for one in found] == list(range(95))
            assert await consumer.position("t", 0) == 95

    simulate(main())


def test_seek_by_offset_starts_inside_a_batch() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            fill(log, 50)
            await consumer.assign([("t", 0)])
            await consumer.seek("t", 0, offset=33)
            assert [one.offset for one in await read(consumer, 17)] == list(range(33, 50))
            await consumer.seek("t", 0, offset=47)
            assert await consumer.position("t", 0) == 47
            table = await consumer.poll_arrow()
            assert table.column("offset").to_pylist() == [47, 48, 49]
            assert table.column("topic").to_pylist() == ["t"] * 3
            assert table.column("value").to_pylist() == [b"000047", b"000048", b"000049"]

    simulate(main())


def test_seek_by_time_and_to_both_ends() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            fill(log, 50)
            await consumer.assign([("t", 0)])
            await consumer.seek("t", 0, time=20_500)
            assert (await consumer.poll())[0].offset == 21
            await consumer.seek("t", 0, to="earliest")
            assert (await consumer.poll())[0].offset == 0
            await consumer.seek("t", 0, to="latest")
            assert await consumer.poll(timeout=0.1) == []
            fill(log, 1)
            assert [one.offset for one in await consumer.poll()] == [50]
            for wrong in ({}, {"offset": 1, "time": 2}, {"offset": -1}, {"to": "middle"}):
                with pytest.raises(InvalidArgument):
                    await consumer.seek("t", 0, **wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="not assigned"):
                await consumer.seek("t", 1, offset=0)

    simulate(main())


def test_control_batches_and_fillers_are_passed_over() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            log.append(memoryview(encode([b"a"])))
            log.append(memoryview(encode_control(b"not for you")))
            log.append(memoryview(encode([], offset_deltas=[], span=3)))
            log.append(memoryview(encode([b"b", b"c"], offset_deltas=[1, 3], span=5)))
            log.append(memoryview(encode_control(b"not for you")))
            await consumer.assign([("t", 0)])
            found = await read(consumer, 3)
            assert [(one.offset, one.value) for one in found] == [(0, b"a"), (6, b"b"), (8, b"c")]
            assert await consumer.poll(timeout=0.1) == []
            assert await consumer.position("t", 0) == 11
            await consumer.seek("t", 0, offset=7)
            assert [one.offset for one in await consumer.poll()] == [8]

    simulate(main())


def test_many_partitions_on_many_nodes_are_all_read() -> None:
    async def main() -> None:
        async with fake_cluster(3) as cluster, Consumer(cluster.bootstrap) as consumer:
            logs = cluster.add_topic("t", 20)
            for log in logs:
                fill(log, 30)
            requests: list[int] = []
            cluster.fetching = lambda request, node_id: requests.append(len(request.partitions))
            await consumer.assign([("t", number) for number in range(20)])
            found = await read(consumer, 600)
            for number in range(20):
                offsets = [one.offset for one in found if one.partition == number]
                assert offsets == list(range(30))
            assert max(requests) >= 6, "one request carries all partitions of a leader"

    simulate(main())


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_skipped_or_repeated_across_leader_changes(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with (
            fake_cluster(3) as cluster,
            Consumer(cluster.bootstrap, fetch_bytes=400, rng=rng) as consumer,
        ):
            logs = cluster.add_topic("t", 3)

            def fetching(request: Fetch, node_id: int) -> Any:
                if rng.random() < 0.1:
                    raise NotEnoughReplicas("not now")
                return asyncio.sleep(rng.random() * 0.02) if rng.random() < 0.2 else None

            cluster.fetching = fetching

            async def disturb() -> None:
                for _ in range(25):
                    fill(logs[rng.randrange(3)], 20)
                    cluster.lead("t", rng.randrange(3), rng.choice([None, 1, 2, 3]))
                    await asyncio.sleep(rng.random() * 0.1)
                    if rng.random() < 0.3:
                        node = rng.choice(sorted(cluster.servers))
                        await cluster.stop_node(node)
                        await asyncio.sleep(rng.random() * 0.1)
                        await cluster.start_node(node)
                for number in range(3):
                    cluster.lead("t", number, number + 1)

            await consumer.assign([("t", number) for number in range(3)])
            disturbing = asyncio.ensure_future(disturb())
            found = await read(consumer, 500)
            await disturbing
            assert await consumer.poll(timeout=0.5) == []
            for number, log in enumerate(logs):
                mine = [one for one in found if one.partition == number]
                assert [one.value for one in mine] == log.values()
                assert [one.offset for one in mine] == list(range(log.end))

    simulate(main(), seed)


def test_a_long_poll_brings_new_records_at_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            await consumer.assign([("t", 0)])
            assert await consumer.poll(timeout=2.2) == []
            polling = asyncio.ensure_future(consumer.poll(timeout=5.0))
            await asyncio.sleep(0.3)
            fill(log, 1)
            began = loop.time()
            assert len(await polling) == 1
            assert loop.time() - began < 0.1

    simulate(main())


def test_prefetch_stops_when_nobody_polls() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            logs = cluster.add_topic("t", 4)
            for log in logs:
                fill(log, 2000, 50)
            async with Consumer(
                cluster.bootstrap,
                fetch_bytes=2_000,
                prefetch_bytes_partition=5_000,
                prefetch_bytes=12_000,
            ) as consumer:
                await consumer.assign([("t", number) for number in range(4)])
                await asyncio.sleep(5)
                positions = consumer._positions
                assert 0 < positions.buffered_bytes <= 12_000
                assert all(part.buffered_bytes <= 7_000 for part in positions.partitions.values())
                found = await read(consumer, 8000)
                assert positions.buffered_bytes == 0
                for number in range(4):
                    offsets = [one.offset for one in found if one.partition == number]
                    assert offsets == list(range(2000))

    simulate(main())


@pytest.mark.parametrize(("reset", "expected"), [("earliest", 20), ("latest", 30)])
def test_an_offset_that_is_gone_is_reset_by_the_policy(reset: Any, expected: int) -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap, reset=reset) as consumer:
            (log,) = cluster.add_topic("t", 1)
            fill(log, 30)
            log.start = 20
            await consumer.assign([("t", 0)])
            await consumer.seek("t", 0, offset=5)
            polling = asyncio.ensure_future(consumer.poll(timeout=5))
            await asyncio.sleep(1)
            fill(log, 5)
            assert (await polling)[0].offset == expected

    simulate(main())


def test_without_a_reset_policy_a_lost_position_is_an_error() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap, reset="none") as consumer:
            (log,) = cluster.add_topic("t", 1)
            fill(log, 30)
            log.start = 20
            await consumer.assign([("t", 0)])
            with pytest.raises(OffsetOutOfRange, match="seek"):
                await consumer.poll()
            await consumer.seek("t", 0, offset=5)
            with pytest.raises(OffsetOutOfRange, match=r"offset 5 of t/0 is not kept"):
                await consumer.poll()
            await consumer.seek("t", 0, offset=25)
            assert (await consumer.poll())[0].offset == 25

    simulate(main())


def test_a_new_leader_that_still_catches_up_does_not_move_the_position() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            fill(log, 30)
            await consumer.assign([("t", 0)])
            assert len(await read(consumer, 30)) == 30
            end, log.end = log.end, 10
            assert await consumer.poll(timeout=4.0) == []
            log.end = end
            fill(log, 5)
            assert [one.offset for one in await read(consumer, 5)] == list(range(30, 35))

    simulate(main())


def test_unknown_topics_and_partitions_are_errors_after_the_grace_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            cluster.add_topic("t", 2)
            await consumer.assign([("nowhere", 0)])
            began = loop.time()
            with pytest.raises(UnknownTopic, match="nowhere"):
                await consumer.poll(timeout=30)
            assert 2.9 < loop.time() - began < 6
            await consumer.assign([("t", 5)])
            with pytest.raises(UnknownPartition, match="2 partitions"):
                await consumer.poll(timeout=30)

    simulate(main())


def test_a_damaged_batch_is_an_error_and_the_position_stays() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            fill(log, 30)
            log.batches[1][-1] ^= 1
            await consumer.assign([("t", 0)])
            assert [one.offset for one in await read(consumer, 10)] == list(range(10))
            with pytest.raises(CorruptBatch):
                await consumer.poll()
            with pytest.raises(CorruptBatch):
                await consumer.poll()
            log.batches[1][-1] ^= 1
            found = []
            while len(found) < 20:
                try:
                    found += await consumer.poll()
                except CorruptBatch:
                    continue
            assert [one.offset for one in found] == list(range(10, 30))

    simulate(main())


def test_a_batch_bigger_than_a_fetch_still_comes() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap, fetch_bytes=100) as one:
            (log,) = cluster.add_topic("t", 1)
            fill(log, 100, 100)
            await one.assign([("t", 0)])
            assert len(await read(one, 100)) == 100

    simulate(main())


def test_assigning_again_keeps_positions_of_those_that_stay() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            for log in cluster.add_topic("t", 2):
                fill(log, 10)
            await consumer.assign([("t", 0)])
            assert len(await read(consumer, 10)) == 10
            await consumer.assign([("t", 0), ("t", 1), ("t", 1)])
            assert consumer.assignment() == [("t", 0), ("t", 1)]
            found = await read(consumer, 10)
            assert {one.partition for one in found} == {1}
            await consumer.assign([])
            assert await consumer.poll(timeout=0.1) == []
            for wrong in (["t"], [("t",)], [("t", "0")], [("t", -1)]):
                with pytest.raises(InvalidArgument):
                    await consumer.assign(wrong)  # type: ignore[arg-type]

    simulate(main())


def test_a_position_without_a_leader_is_an_error_in_time() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            cluster.add_topic("t", 1)
            cluster.lead("t", 0, None)
            await consumer.assign([("t", 0)])
            with pytest.raises(RequestTimeout, match="leader: nobody"):
                await consumer.seek("t", 0, to="latest", timeout=1.0)

    simulate(main())


def test_closing_ends_a_poll_that_waits() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 1)
            consumer = await Consumer(cluster.bootstrap).start()
            await consumer.assign([("t", 0)])
            polling = asyncio.ensure_future(consumer.poll(timeout=60))
            await asyncio.sleep(0.5)
            await consumer.close()
            with pytest.raises(QueueClosed):
                await polling
            with pytest.raises(QueueClosed):
                await consumer.poll()

    simulate(main())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="reset"):
        Consumer("h:1", reset="never")  # type: ignore[arg-type]


def test_a_paused_leader_is_left_when_another_one_leads() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster(2) as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            fill(log, 10)

            def fetching(request: Fetch, node_id: int) -> Any:
                return asyncio.Event().wait() if node_id == 1 else None

            await consumer.assign([("t", 0)])
            assert len(await read(consumer, 10)) == 10
            cluster.fetching = fetching
            await asyncio.sleep(1)
            cluster.lead("t", 0, 2)
            fill(log, 10)
            began = loop.time()
            assert len(await read(consumer, 10)) == 10
            assert loop.time() - began < 5

    simulate(main())


def test_a_seek_does_not_wait_for_a_fetch_that_is_parked_at_the_end() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with (
            fake_cluster() as cluster,
            Consumer(cluster.bootstrap, fetch_wait_ms=20_000) as consumer,
        ):
            (log,) = cluster.add_topic("t", 1)
            values = fill(log, 20)
            await consumer.assign([("t", 0)])
            await read(consumer, 20)
            assert await consumer.poll(timeout=1.0) == [], "the next fetch is parked"
            began = loop.time()
            await consumer.seek("t", 0, offset=5)
            assert [one.value for one in await read(consumer, 15)] == values[5:]
            assert loop.time() - began < 1.0

    simulate(main())


def test_the_next_fetch_is_sent_before_a_poller_hears_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A poller keeps the interpreter while it decodes: the node would have nothing to do."""
    told: list[str] = []
    submit, notify = Connection.submit, Positions.notify

    def submit_and_tell(self: Connection, message: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(message, Fetch):
            told.append(f"fetch {message.partitions[0].offset}")
        return submit(self, message, *rest, **more)

    def notify_and_tell(self: Positions) -> None:
        if any(assigned.batches for assigned in self.partitions.values()):
            told.append("news")
        notify(self)

    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            fill(log, 20)
            await consumer.assign([("t", 0)])
            await consumer.seek("t", 0, offset=0)
            assert len(await read(consumer, 20)) == 20
            assert told[:3] == ["fetch 0", "fetch 20", "news"]

    monkeypatch.setattr(Connection, "submit", submit_and_tell)
    monkeypatch.setattr(Positions, "notify", notify_and_tell)
    simulate(main())
