"""The producer: batches, results, limits and back-pressure, on a cluster where nothing fails."""

import asyncio
from typing import Any

import mmh3
import pytest
from fake_cluster import FakeCluster, fake_cluster, simulate

from raftq.aio import Appended, Producer
from raftq.client.common.errors import (
    ConfigError,
    ConnectFailed,
    InvalidArgument,
    QueueClosed,
    RaftqError,
    RequestTimeout,
    Throttled,
    TooLarge,
    UnknownTopic,
)
from raftq.client.wire.batch import decode
from raftq.client.wire.messages import Produce


def test_a_sent_record_is_appended_with_everything_it_brought() -> None:
    async def main() -> None:
        async with fake_cluster(2) as cluster, Producer(cluster.bootstrap) as producer:
            log = cluster.add_topic("t", 3)[1]
            delivery = await producer.send(
                "t", b"v", key=b"k", headers={"a": b"1"}, priority="high", partition=1, timestamp=7
            )
            assert not delivery.done()
            assert await delivery == Appended("t", 1, 0, 7)
            assert delivery.done()
            assert delivery.exception() is None
            batch = decode(log.batches[0])
            (record,) = batch.records()
            assert (record.key, record.value, record.headers) == (b"k", b"v", {"a": b"1"})
            assert (record.priority, record.timestamp, batch.producer_id) == (1, 7, 1)

    simulate(main())


def test_records_without_a_timestamp_get_the_wall_clocks() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t")
            async with Producer(cluster.bootstrap, wall_ms=lambda: 1234) as producer:
                first = await producer.send("t", b"a")
                second = await producer.send("t", b"b", timestamp=5)
                assert (await first).timestamp == 1234
                assert (await second).timestamp == 5

    simulate(main())


def test_keys_choose_partitions_by_murmur3() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 7)
            keys = [b"key-%d" % number for number in range(50)]
            one_by_one = [await producer.send("t", b"v", key=key) for key in keys]
            together = await producer.send_many("t", [b"v"] * 50, keys)
            expected = [mmh3.hash(key, signed=False) % 7 for key in keys]
            assert [(await one).partition for one in one_by_one] == expected
            assert [one.partition for one in await together] == expected

    simulate(main())


def test_records_without_a_key_go_round_by_batch() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            logs = cluster.add_topic("t", 3)
            async with Producer(cluster.bootstrap, batch_records=10) as producer:
                for number in range(60):
                    await producer.send("t", b"%d" % number)
            assert [len(log.values()) for log in logs] == [20, 20, 20]
            assert [len(log.batches) for log in logs] == [2, 2, 2]

    simulate(main())


def test_send_many_keeps_order_results_and_batch_limits() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, batch_bytes=2000) as producer:
                values = [b"%05d" % number for number in range(1000)]
                first = await producer.send("t", b"first")
                many = await producer.send_many("t", values)
                last = await producer.send("t", b"last")
                appended = await many
                assert len(many) == len(appended) == 1000
                assert [one.offset for one in appended] == list(range(1, 1001))
                assert (await first).offset == 0
                assert (await last).offset == 1001
                assert many.done()
            assert log.values() == [b"first", *values, b"last"]
            assert len(log.batches) > 5
            assert max(map(len, log.batches)) < 2500

    simulate(main())


@pytest.mark.parametrize("limits", [{"batch_bytes": 2000}, {"batch_records": 70}])
def test_a_few_values_go_into_the_same_batches_on_the_short_way(limits: dict[str, int]) -> None:
    """Only lists take the short way."""

    async def batches(kind: type[list[bytes]] | type[tuple[bytes, ...]]) -> list[list[bytes]]:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            settings: Any = {"linger_ms": 1000, **limits}
            async with Producer(cluster.bootstrap, **settings) as producer:
                sent = []
                for count in [1, 10, 3, 100, 7, 0, 5, 101, 10, 24, 1] * 3:
                    values = kind(b"%05d" % number for number in range(count))
                    sent.append((await producer.send_many("t", values), count))
                    await producer.send("t", b"between")
                await producer.flush()
                for many, count in sent:
                    assert len(await many) == count
            return [[bytes(one.value) for one in decode(raw).records()] for raw in log.batches]

    async def main() -> None:
        assert await batches(list) == await batches(tuple)

    simulate(main())


def test_a_few_values_are_checked_on_the_short_way() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 1)
            await producer.send("t", b"opens the batch", priority=1)
            for wrong in (True, [], 9, "urgent"):
                with pytest.raises(InvalidArgument):
                    await producer.send_many("t", [b"v"], priority=wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument):
                await producer.send_many("t", [b"v", "v"], priority=1)  # type: ignore[list-item]

    simulate(main())


def test_send_many_with_keys_and_none_keys_gives_results_in_order() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            logs = cluster.add_topic("t", 3)
            keys = [None if number % 5 == 0 else b"%d" % number for number in range(100)]
            values = [b"v%d" % number for number in range(100)]
            appended = await (await producer.send_many("t", values, keys))
            for value, place in zip(values, appended, strict=True):
                assert logs[place.partition].values()[place.offset] == value
            assert await (await producer.send_many("t", [])) == []

    simulate(main())


def test_send_many_takes_every_column() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            logs = cluster.add_topic("t", 2)
            async with Producer(cluster.bootstrap, wall_ms=lambda: 1_000) as producer:
                many = await producer.send_many(
                    "t", [b"a", b"b", b"c", b"d", b"e"],
                    [b"k", None, b"", None, None],
                    headers=[None, {"h": b"1"}, {}, None, None],
                    priorities=["critical", 2, 2, 2, 4],
                    partitions=[1, 0, 0, 0, 0],
                    timestamps=[None, 0, None, None, 7],
                    times=[(0, 0), (0, 5_000), (0, 0), (9_000, 0), (0, 0)],
                )  # fmt: skip
                appended = await many
            assert [(one.partition, one.offset) for one in appended] == [
                (1, 0), (0, appended[1].offset), (0, appended[2].offset), (0, 0),
                (0, appended[4].offset),
            ]  # fmt: skip
            assert (appended[3].delayed, appended[3].deliver_at) == (True, 9_000)
            (first,) = [one for raw in logs[1].batches for one in decode(raw).records()]
            assert (first.key, first.value, first.priority) == (b"k", b"a", 0)
            rest = {one.value: one for raw in logs[0].batches for one in decode(raw).records()}
            assert rest[b"b"].headers == {"h": b"1"}
            assert (rest[b"b"].timestamp, rest[b"e"].timestamp) == (0, 7)
            assert rest[b"c"].key == b""
            assert (rest[b"c"].timestamp, rest[b"e"].priority) == (1_000, 4)
            assert [decode(raw).expiries() for raw in logs[0].batches if b"b" in raw] == [
                [5_000, 0]
            ]

    simulate(main())


def test_send_many_keeps_the_order_of_rows_that_meet_in_a_partition() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            logs = cluster.add_topic("t", 3)
            number = mmh3.hash(b"k", signed=False) % 3
            values = [b"%d" % at for at in range(50)]
            keys = [b"k" if at % 3 else None for at in range(50)]
            partitions = [None if at % 3 else number for at in range(50)]
            await (await producer.send_many("t", values, keys, partitions=partitions))
            assert logs[number].values() == values

    simulate(main())


def test_columns_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            (log,) = cluster.add_topic("t", 1)
            for wrong in (
                {"headers": [None]},
                {"priorities": ["normal"]},
                {"partitions": [0, 0, 0]},
                {"timestamps": []},
                {"times": [(0, 0)]},
                {"priorities": ["normal", "urgent"]},
                {"partitions": [0, -1]},
                {"timestamps": [0, "now"]},
                {"headers": [None, ["h"]]},
            ):
                with pytest.raises(InvalidArgument):
                    await producer.send_many("t", [b"a", b"b"], **wrong)  # type: ignore[arg-type]
            await producer.flush()
            assert log.values() == []

    simulate(main())


def test_each_record_has_an_outcome_of_its_own() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 2)
            options: Any = {"buffer_bytes": 3_000, "max_block_ms": 100, "linger_ms": 0}
            async with Producer(
                cluster.bootstrap, delivery_timeout_ms=2_000, **options
            ) as producer:
                cluster.lead("t", 1, None)
                partitions = [0, 1, 0]
                many = await producer.send_many("t", [b"a", b"b", b"c"], partitions=partitions)
                first, second, third = await many.outcomes()
                assert not isinstance(first, RaftqError)
                assert not isinstance(third, RaftqError)
                assert isinstance(second, RequestTimeout)
                big = [bytes(1_000)] * 5
                with pytest.raises(Throttled):
                    await producer.send_many("t", big, partition=1)
                with pytest.raises(RequestTimeout, match="2 records"):
                    await producer.flush()
                many = await producer.send_many("t", big, partition=1, partial=True)
                outcomes = await many.outcomes()
                assert all(isinstance(one, RaftqError) for one in outcomes)
                assert any(isinstance(one, Throttled) for one in outcomes)
                with pytest.raises(RaftqError):
                    await many

    simulate(main())


def test_linger_gathers_and_linger_zero_sends_at_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, linger_ms=1000) as producer:
                began = loop.time()
                deliveries = [await producer.send("t", b"x") for _ in range(10)]
                await deliveries[0]
                assert loop.time() - began >= 1.0
                assert len(log.batches) == 1
            async with Producer(cluster.bootstrap, linger_ms=0) as producer:
                await (await producer.send("t", b"warm up"))
                began = loop.time()
                await (await producer.send("t", b"x"))
                assert loop.time() - began < 0.1

    simulate(main())


def test_linger_zero_lets_records_ride_the_next_batch_while_one_is_in_flight() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, linger_ms=0) as producer:
                await (await producer.send("t", b"warm up"))

                async def one() -> None:
                    for _ in range(5):
                        await (await producer.send("t", b"x"))

                async with asyncio.TaskGroup() as group:
                    for _ in range(100):
                        group.create_task(one())
            assert len(log.values()) == 501
            assert len(log.batches) <= 15

    simulate(main())


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_are_smaller_and_readable(compression: Any) -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, compression=compression) as producer:
                await producer.send_many("t", [b"the same thing over and over"] * 500)
            assert len(log.values()) == 500
            assert sum(map(len, log.batches)) < 5000

    simulate(main())


@pytest.mark.parametrize("acks", ["none", "leader", "all"])
def test_every_kind_of_acknowledgement_delivers(acks: Any) -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, acks=acks) as producer:
                await (await producer.send("t", b"x"))
            assert log.values() == [b"x"]
            assert (decode(log.batches[0]).producer_id >= 0) == (acks != "none")

    simulate(main())


def test_one_batch_holds_one_lane() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap) as producer:
                for priority in ("critical", "high", "normal", "low", "background", 0, 4):
                    await producer.send("t", str(priority).encode(), priority=priority)
            lanes = {decode(raw).lane: decode(raw).values() for raw in log.batches}
            assert lanes[0] == [b"critical", b"0"]
            assert lanes[4] == [b"background", b"4"]
            assert sorted(lanes) == [0, 1, 2, 3, 4]

    simulate(main())


async def refused(producer: Producer, error: type[Exception], *args: Any, **named: Any) -> None:
    with pytest.raises(error):
        await producer.send(*args, **named)


def test_bad_records_are_refused_before_anything_is_sent() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            (log,) = cluster.add_topic("t", 1)
            await (await producer.send("t", b"good"))
            big = bytes(1024 * 1024 + 1)
            await refused(producer, TooLarge, "t", big)
            await refused(producer, TooLarge, "t", b"", key=bytes(65 * 1024))
            await refused(producer, TooLarge, "t", b"", headers={"a": bytes(65 * 1024)})
            await refused(producer, InvalidArgument, "t", "text")
            await refused(producer, InvalidArgument, "t", b"", key="text")
            await refused(producer, InvalidArgument, "t", b"", headers={"a": "text"})
            await refused(producer, InvalidArgument, "t", b"", headers=[1])
            await refused(producer, InvalidArgument, "t", b"", priority="urgent")
            await refused(producer, InvalidArgument, "t", b"", priority=5)
            await refused(producer, InvalidArgument, "t", b"", partition=1)
            await refused(producer, InvalidArgument, "t", b"", partition=-1)
            await refused(producer, InvalidArgument, "t", b"", partition="0")
            await refused(producer, InvalidArgument, "t", b"", timestamp=1 << 63)
            await refused(producer, InvalidArgument, "", b"")
            for values, keys in (([b"a", "b"], None), ([b"a"], [b"k", b"l"]), ([b"a"], ["k"])):
                with pytest.raises(InvalidArgument):
                    await producer.send_many("t", values, keys)  # type: ignore[arg-type]
            with pytest.raises(TooLarge):
                await producer.send_many("t", [b"small", big])
            await producer.flush()
            assert log.values() == [b"good"]

    simulate(main())


def test_bad_settings_are_reported_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Producer("h:1", acks="some", linger_ms=-1, compression="gzip")  # type: ignore[arg-type]
    for name in ("acks", "linger_ms", "compression"):
        assert name in str(caught.value)
    for bootstrap in ("", "host:notaport", "host:0", ":7070", []):
        with pytest.raises(ConfigError):
            Producer(bootstrap)


def test_a_topic_that_nobody_knows_is_an_error_after_the_grace_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            began = loop.time()
            with pytest.raises(UnknownTopic, match="nowhere"):
                await producer.send("nowhere", b"x")
            assert 2.9 < loop.time() - began < 5
            cluster.add_topic("nowhere")
            await (await producer.send("nowhere", b"x"))

    simulate(main())


def test_a_topic_that_turns_up_within_the_grace_time_is_used() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            asyncio.get_running_loop().call_later(1.0, cluster.add_topic, "late", 1)
            await (await producer.send("late", b"x"))

    simulate(main())


def test_a_cluster_that_does_not_answer_is_an_error_that_names_the_addresses() -> None:
    async def main() -> None:
        async with Producer("127.0.0.1:1,127.0.0.1:2") as producer:
            with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1:1.*127\.0\.0\.1:2"):
                await producer.send("t", b"x")

    simulate(main())


class Gate:
    """Holds Produce requests back until it is opened."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.opened = asyncio.Event()
        cluster.before = self

    def __call__(self, request: Produce, node_id: int) -> Any:
        return self.opened.wait()


def test_a_full_buffer_makes_send_wait_for_room() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            gate = Gate(cluster)
            async with Producer(
                cluster.bootstrap, buffer_bytes=10_000, batch_bytes=1_000, linger_ms=10_000
            ) as producer:

                async def fill() -> None:
                    for number in range(100):
                        await producer.send("t", b"%04d" % number + bytes(500))

                filling = asyncio.ensure_future(fill())
                await asyncio.wait([filling], timeout=5)
                assert not filling.done()
                assert producer._accumulator.used <= 10_000
                gate.opened.set()
                await filling
                await producer.flush()
                assert producer._accumulator.used == 0
            assert [value[:4] for value in log.values()] == [b"%04d" % n for n in range(100)]

    simulate(main())


def test_a_buffer_that_stays_full_is_an_error_and_nothing_is_taken() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            gate = Gate(cluster)
            async with Producer(
                cluster.bootstrap, buffer_bytes=1_000, max_block_ms=200, linger_ms=0
            ) as producer:
                await producer.send("t", bytes(900))
                with pytest.raises(Throttled, match="1000 bytes") as caught:
                    await producer.send("t", bytes(900))
                assert caught.value.outcome == "failed"
                gate.opened.set()
                await producer.flush()
                await (await producer.send("t", bytes(5000)))  # alone it may be bigger
            assert list(map(len, log.values())) == [900, 5000]

    simulate(main())


def test_send_many_bigger_than_the_buffer_passes_through_it() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, buffer_bytes=20_000) as producer:
                values = [b"%05d" % number + bytes(95) for number in range(2000)]
                await (await producer.send_many("t", values))
            assert log.values() == values

    simulate(main())


def test_flush_waits_for_everything_and_says_when_it_could_not() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 1)
            gate = Gate(cluster)
            async with Producer(cluster.bootstrap, linger_ms=60_000) as producer:
                delivery = await producer.send("t", b"x")
                with pytest.raises(RequestTimeout, match="1 records"):
                    await producer.flush(timeout=0.5)
                gate.opened.set()
                await producer.flush()
                assert delivery.done()

    simulate(main())


def test_close_flushes_and_afterwards_nothing_is_taken() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            (log,) = cluster.add_topic("t", 1)
            producer = Producer(cluster.bootstrap, linger_ms=60_000)
            deliveries = [await producer.send("t", b"x") for _ in range(3)]
            await asyncio.gather(producer.close(), producer.close())
            assert all(delivery.done() for delivery in deliveries)
            assert len(log.values()) == 3
            with pytest.raises(QueueClosed):
                await producer.send("t", b"x")
            await producer.close()

    simulate(main())


def test_close_gives_up_in_time_and_says_what_became_of_the_rest() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 1)
            Gate(cluster)
            producer = Producer(cluster.bootstrap, in_flight_max=1, batch_records=1)
            sent, unsent = await producer.send("t", b"a"), await producer.send("t", b"b")
            with pytest.raises(RequestTimeout):
                await producer.close(timeout=0.5)
            outcomes = []
            for delivery in (sent, unsent):
                with pytest.raises(QueueClosed) as caught:
                    await delivery
                outcomes.append(caught.value.outcome)
            assert outcomes == ["unknown", "failed"]

    simulate(main())


def test_callbacks_are_called_once_each_with_their_delivery() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 1)
            called: list[Any] = []
            deliveries = [await producer.send("t", b"x") for _ in range(3)]
            for delivery in deliveries:
                delivery.add_done_callback(called.append)
            await producer.flush()
            assert called == deliveries
            deliveries[0].add_done_callback(called.append)
            assert called == [*deliveries, deliveries[0]]

    simulate(main())


def test_a_cancelled_waiter_does_not_disturb_the_others() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 1)
            gate = Gate(cluster)

            async def wait_for(delivery: Any) -> Any:
                return await delivery

            delivery = await producer.send("t", b"x")
            waiting = [asyncio.ensure_future(wait_for(delivery)) for _ in range(3)]
            await asyncio.wait(waiting, timeout=0.1)
            waiting[1].cancel()
            gate.opened.set()
            assert (await waiting[0]).offset == 0
            assert (await waiting[2]).offset == 0

    simulate(main())


def test_new_partitions_are_used_after_the_routes_are_asked_again() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster:
            cluster.add_topic("t", 1)
            async with Producer(cluster.bootstrap, refresh_ms=1_000) as producer:
                await (await producer.send("t", b"x"))
                more = cluster.add_topic("t", 4)
                cluster.ids["t"] = 1
                await asyncio.wait([asyncio.ensure_future(asyncio.sleep(2))])
                await (await producer.send("t", b"x", partition=3))
                assert more[3].values() == [b"x"]

    simulate(main())


def test_waiting_by_thread_on_the_loop_is_refused() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 1)
            delivery = await producer.send("t", b"x")
            with pytest.raises(InvalidArgument, match="await"):
                delivery.result()
            await delivery
            assert delivery.result().offset == 0

    simulate(main())
