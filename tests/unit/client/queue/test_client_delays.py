"""Records that are due later or end: in streams of their own, exactly once whatever fails."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from fake_cluster import fake_cluster, lost, simulate

from raftq.aio import Appended, Producer
from raftq.client.common.errors import InvalidArgument, NotLeader, UnknownTopic
from raftq.client.common.times import due_ms, record_times
from raftq.client.producer.outbox import Times
from raftq.client.wire.batch import FLAG_DELIVER_AT, decode

NOW = 1_700_000_000_000


def wall_ms() -> int:
    return NOW


@pytest.mark.parametrize(
    ("said", "times"),
    [
        ((None, None, None), (0, 0)),
        ((0, None, None), (0, 0)),
        ((-3.5, None, None), (0, 0)),
        ((0.0001, None, None), (NOW + 2, 0)),
        ((5, None, None), (NOW + 5_001, 0)),
        ((None, NOW / 1000, None), (0, 0)),
        ((None, NOW / 1000 - 0.001, None), (0, 0)),
        ((None, 0, None), (0, 0)),
        ((None, NOW // 1000 + 1, None), (NOW + 1_000, 0)),
        ((None, NOW / 1000 + 0.0005, None), (NOW + 1, 0)),
        ((None, datetime.fromtimestamp(NOW / 1000 + 2, UTC), None), (NOW + 2_000, 0)),
        ((None, None, 1.5), (0, NOW + 1_500)),
        ((None, (NOW + 10) / 1000, 1), (NOW + 10, NOW + 1_010)),
    ],
)
def test_times_are_rounded_up_and_the_past_is_now(said: Any, times: Times) -> None:
    assert record_times(*said, NOW) == times


def test_whole_milliseconds_survive_the_way_through_seconds() -> None:
    for more in range(1, 2_000):
        assert due_ms(None, (NOW + more) / 1000, NOW) == NOW + more


def test_a_time_in_milliseconds_is_refused_and_the_error_names_the_unit() -> None:
    with pytest.raises(InvalidArgument, match=r"deliver_at .* is in seconds"):
        due_ms(None, NOW + 60_000, NOW)


@pytest.mark.parametrize(
    "said",
    [
        (1, NOW / 1000, None), ("1", None, None), (True, None, None), (float("nan"), None, None),
        (float("inf"), None, None), (1e12, None, None), (None, NOW / 1000 + 10**12, None),
        (None, "tomorrow", None), (None, None, 0), (None, None, -1), (None, None, "x"),
    ],
)  # fmt: skip
def test_times_that_make_no_sense_are_refused(said: Any) -> None:
    with pytest.raises(InvalidArgument):
        record_times(*said, NOW)


def test_delayed_records_go_in_batches_of_their_own_with_their_own_numbers() -> None:
    async def main() -> None:
        async with (
            fake_cluster() as cluster,
            Producer(cluster.bootstrap, wall_ms=wall_ms) as producer,
        ):
            (log,) = cluster.add_topic("t", 1)
            sent = [
                await producer.send("t", b"now"),
                await producer.send("t", b"later", delay=2, priority="high"),
                await producer.send("t", b"past", delay=-1),
                await producer.send("t", b"at", key=b"k", deliver_at=(NOW + 9) / 1000, ttl=1),
                await producer.send("t", b"at 2", deliver_at=(NOW + 8) / 1000, headers={"a": b"1"}),
            ]
            results = [await one for one in sent]
            assert results[0] == Appended("t", 0, 0, NOW)
            assert results[1][4:] == (True, NOW + 2_001)
            assert results[2] == Appended("t", 0, 1, NOW)
            assert [one.deliver_at for one in results[3:]] == [NOW + 9, NOW + 8]
            assert [one.offset for one in results[3:]] in ([0, 1], [1, 2])
            assert log.values() == [b"now", b"past"]
            stored = sorted(map(decode, log.delays.batches), key=lambda one: one.count)
            assert all(one.flags & FLAG_DELIVER_AT for one in stored)
            assert stored[0].values() == [b"later"]
            assert stored[0].lane == 1
            assert stored[0].deliver_at() == [NOW + 2_001]
            assert stored[1].deliver_at() == [NOW + 9, NOW + 8]
            assert stored[1].expiries() == [NOW + 1_009, 0]
            assert stored[1].keys() == [b"k", None]
            # Each log counts its own sequence from 0 on.
            assert sorted(decode(raw).base_sequence for raw in log.batches) == [0]
            assert sorted(decode(raw).base_sequence for raw in log.delays.batches) in (
                [0, 1], [0, 2],
            )  # fmt: skip

    simulate(main())


def test_a_time_to_live_shares_batches_with_records_that_have_none() -> None:
    async def main() -> None:
        async with (
            fake_cluster() as cluster,
            Producer(cluster.bootstrap, wall_ms=wall_ms) as producer,
        ):
            (log,) = cluster.add_topic("t", 1)
            await producer.send("t", b"a")
            await producer.send("t", b"b", ttl=1)
            await producer.send("t", b"c")
            await producer.send_many("t", [b"d", b"e"])
            await producer.flush()
            assert log.values() == [b"a", b"b", b"c", b"d", b"e"]
            expiries = [end for raw in log.batches for end in decode(raw).expiries() or [0]]
            assert expiries == [0, NOW + 1_000, 0, 0, 0]

    simulate(main())


def test_delayed_records_are_written_once_whatever_fails() -> None:
    """Replies are lost and leaders change; both streams keep every record once and in order."""

    async def main() -> None:
        async with (
            fake_cluster(2) as cluster,
            Producer(cluster.bootstrap, linger_ms=0, wall_ms=wall_ms) as producer,
        ):
            (log,) = cluster.add_topic("t", 1)
            cluster.lead("t", 0, 1)

            def after(request: Any, node: int) -> None:
                if cluster.rng.random() < 0.3:
                    raise lost()

            def before(request: Any, node: int) -> None:
                if cluster.rng.random() < 0.1:
                    cluster.lead("t", 0, 3 - node)
                    raise NotLeader("it moved")

            cluster.after, cluster.before = after, before
            sent = []
            for number in range(100):
                sent.append(await producer.send("t", b"%d" % number))
                sent.append(await producer.send("t", b"%d" % number, delay=1))
                await asyncio.sleep(0.002)
            for one in sent:
                await one
            expected = [b"%d" % number for number in range(100)]
            assert log.values() == expected
            assert log.delays.values() == expected

    for seed in range(5):
        simulate(main(), seed=seed)


def test_delayed_records_of_a_topic_that_is_gone_fail_like_the_others() -> None:
    async def main() -> None:
        async with (
            fake_cluster() as cluster,
            Producer(cluster.bootstrap, topic_grace_ms=100) as producer,
        ):
            cluster.add_topic("t", 1)
            await (await producer.send("t", b"a", delay=1))

            def before(request: Any, node: int) -> None:
                cluster.topics.pop("t", None)

            cluster.before = before
            delivery = await producer.send("t", b"b", delay=1)
            with pytest.raises(UnknownTopic):
                await delivery

    simulate(main())


def test_delayed_records_that_wait_go_to_a_topic_of_the_same_name() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Producer(cluster.bootstrap) as producer:
            cluster.add_topic("t", 1)
            await (await producer.send("t", b"a", delay=1))

            def before(request: Any, node: int) -> None:
                raise NotLeader("nobody leads")

            cluster.before = before
            delivery = await producer.send("t", b"b", delay=1)
            await asyncio.sleep(0.2)
            (log,) = cluster.add_topic("t", 1)
            cluster.before = None
            assert (await delivery).delayed
            assert log.delays.values() == [b"b"]
            assert not log.values()

    simulate(main())
