"""Consumers of a group: every record once, and positions that are never stored early."""

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from fake_cluster import lost, simulate
from fake_groups import FakeGroups, fake_groups, fill

from raftq.aio import Consumer, Producer, Record
from raftq.client.common.errors import (
    ConfigError,
    FencedGeneration,
    InvalidArgument,
    NotLeader,
    RaftqError,
)
from raftq.client.wire.group_messages import FindCoordinator, GroupHeartbeat, LeaveGroup
from raftq.client.wire.queue_messages import ReadOffsets, StoreOffsets

Key = tuple[str, int]
FAST: dict[str, Any] = {"heartbeat_ms": 200, "session_ms": 2_000, "auto_commit_ms": 300}


def write(cluster: FakeGroups, topic: str, count: int) -> list[tuple[str, int, int]]:
    """So many records in each partition; (topic, partition, offset) of all that are there then."""
    for log in cluster.topics[topic]:
        fill(log, [b"%d" % number for number in range(count)])
    return [
        (topic, number, offset)
        for number, log in enumerate(cluster.topics[topic])
        for offset in range(log.end)
    ]


def places(records: list[Record]) -> list[tuple[str, int, int]]:
    return [(one.topic, one.partition, one.offset) for one in records]


async def read(consumer: Consumer, seconds: float, found: list[Record] | None = None) -> list[Any]:
    """Whatever comes in this time."""
    found = [] if found is None else found
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        found += await consumer.poll(max_records=7, timeout=0.1)
    return found


async def until(condition: Any, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(0.01)


def test_a_lone_member_gets_everything_and_goes_on_where_it_stored() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster:
            cluster.add_topic("t", 4)
            every = write(cluster, "t", 20)
            told: list[Any] = []
            async with Consumer(
                cluster.bootstrap, group="g", topics=["t"], auto_commit=False,
                on_assigned=lambda keys: told.append(("assigned", sorted(keys))),
                on_revoked=lambda keys: told.append(("revoked", sorted(keys))), **FAST,
            ) as consumer:  # fmt: skip
                assert consumer.assignment() == []
                assert sorted(places(await read(consumer, 2))) == every
                assert sorted(consumer.assignment()) == [("t", n) for n in range(4)]
                assert set((await consumer.lag()).values()) == {0}
                await consumer.commit()
                assert cluster.queue("t", 3).stored["g"] == 20
                write(cluster, "t", 1)
                assert len(await read(consumer, 1)) == 4
            all_parts = [("t", n) for n in range(4)]
            assert told == [("assigned", all_parts), ("revoked", all_parts)]
            async with Consumer(
                cluster.bootstrap, group="g", topics=["t"], auto_commit=False, **FAST
            ) as consumer:
                again = await read(consumer, 2)
                assert sorted(places(again)) == [("t", n, 20) for n in range(4)]

    simulate(main())


def test_without_a_stored_position_reset_says_where_to_begin() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 1)
            write(cluster, "t", 5)
            async with Consumer(
                cluster.bootstrap, group="late", topics=["t"], reset="latest", **FAST
            ) as consumer:
                assert await read(consumer, 1) == []
                write(cluster, "t", 1)
                assert places(await read(consumer, 1)) == [("t", 0, 5)]
            async with Consumer(
                cluster.bootstrap, group="none", topics=["t"], reset="none", **FAST
            ) as consumer:
                with pytest.raises(RaftqError, match="has no position"):
                    await read(consumer, 1)
                await consumer.seek("t", 0, offset=4)
                assert places(await read(consumer, 1)) == [("t", 0, 4), ("t", 0, 5)]

    simulate(main())


def test_automatic_commits_never_store_what_the_application_still_works_on() -> None:
    """1. a poll gives records, and the application takes long; 2. nothing is stored meanwhile;
    3. its next poll lets them be stored."""

    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 1)
            write(cluster, "t", 10)
            async with Consumer(cluster.bootstrap, group="g", topics=["t"], **FAST) as consumer:
                found: list[Record] = []
                while not found:
                    found = await consumer.poll(max_records=4)
                await asyncio.sleep(3)
                assert "g" not in cluster.queue("t", 0).stored
                await consumer.poll(max_records=4)
                await asyncio.sleep(1)
                assert cluster.queue("t", 0).stored["g"] == 4
            assert cluster.queue("t", 0).stored["g"] == 8  # closed in good order

    simulate(main())


def test_each_store_of_a_member_has_a_later_turn_also_when_it_steps_back() -> None:
    async def main() -> None:
        stores: list[tuple[int, int]] = []

        async with fake_groups(2) as cluster:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x"] * 10)

            def asking(request: Any, node_id: int) -> None:
                if isinstance(request, StoreOffsets):
                    stores.extend((one.offset, one.turn) for one in request.offsets)

            cluster.asking = asking
            settings: Any = {"group": "g", "topics": ["t"], "auto_commit": False, **FAST}
            async with Consumer(cluster.bootstrap, **settings) as consumer:
                await read(consumer, 1)
                for offset in (8, 3, 5):
                    await consumer.seek("t", 0, offset=offset)
                    await consumer.commit()
        assert [offset for offset, _ in stores] == [8, 3, 5]
        turns = [turn for _, turn in stores]
        assert turns == sorted(set(turns))
        assert turns[0] > 0

    simulate(main())


def test_who_fails_gets_its_last_records_again() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 1)
            write(cluster, "t", 10)

            async def fail() -> None:
                async with Consumer(cluster.bootstrap, group="g", topics=["t"], **FAST) as consumer:
                    found: list[Record] = []
                    while len(found) < 6:
                        found += await consumer.poll(max_records=3)
                    raise RuntimeError("not done")

            with pytest.raises(RuntimeError):
                await fail()
            assert cluster.queue("t", 0).stored["g"] == 3

    simulate(main())


def test_joining_members_share_and_untouched_partitions_do_not_pause() -> None:
    """Two members come one after the other while records are written all the time: each record is
    read exactly once, and what stays with its owner has no gap."""

    async def main() -> None:
        async with fake_groups(3) as cluster:
            cluster.add_topic("t", 6)
            settings: Any = {"group": "g", "topics": ["t"], **FAST}
            stop = False
            seen: dict[str, list[tuple[Record, float]]] = {}
            loop = asyncio.get_running_loop()
            revoked: dict[str, list[Key]] = {}

            async def work(name: str, after: float) -> None:
                await asyncio.sleep(after)
                mine = seen.setdefault(name, [])

                def gone(keys: list[Key]) -> None:
                    if not stop:
                        revoked.setdefault(name, []).extend(keys)

                async with Consumer(cluster.bootstrap, on_revoked=gone, **settings) as consumer:
                    while not stop:
                        for record in await consumer.poll(timeout=0.1):
                            mine.append((record, loop.time()))

            tasks = [asyncio.ensure_future(work(str(n), 2.0 * n)) for n in range(3)]
            for _ in range(250):
                for log in cluster.topics["t"]:
                    fill(log, [b"x"])
                await asyncio.sleep(0.03)
            await asyncio.sleep(1)
            stop = True
            for task in tasks:
                await task
            counts = Counter(
                place for name in seen for place in places([one for one, _ in seen[name]])
            )
            assert len(counts) == 6 * 250
            assert set(counts.values()) == {1}
            # Of six, the first gives up three and then one, the second one.
            assert [len(revoked.get(str(n), [])) for n in range(3)] in (
                [4, 1, 0],
                [3, 1, 0],
                [4, 0, 0],
            )
            stayed = set.difference(
                {("t", n) for n in range(6)}, *[set(keys) for keys in revoked.values()]
            )
            assert stayed
            for key in stayed:
                times = [at for one, at in seen["0"] if (one.topic, one.partition) == key]
                gaps = [after - before for before, after in pairwise(times)]
                assert max(gaps) < 0.2

    simulate(main())


def test_a_partition_is_given_up_only_when_the_application_comes_back() -> None:
    """1. the first member gets records and does not poll; 2. a second one joins, and gets only
    what nobody has; 3. the first polls: it is told, its position is stored, and only then the
    second gets the partition and goes on exactly there."""

    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 2)
            write(cluster, "t", 50)
            revoked: list[Key] = []
            settings: Any = {"group": "g", "topics": ["t"], **FAST}
            async with Consumer(cluster.bootstrap, on_revoked=revoked.extend, **settings) as first:
                mine: list[Record] = []
                while len({one.partition for one in mine}) < 2:
                    mine += await first.poll(max_records=30, timeout=0.2)
                async with Consumer(cluster.bootstrap, **settings) as second:
                    theirs = await read(second, 3)
                    assert theirs == []
                    assert revoked == []
                    held = asyncio.ensure_future(read(second, 3))
                    mine += await read(first, 1)
                    assert len(revoked) == 1
                    theirs = await held
                    assert {one.partition for one in theirs} == {key[1] for key in revoked}
                    counts = Counter(places(mine + theirs))
                    assert len(counts) == 100
                    assert set(counts.values()) == {1}

    simulate(main())


def test_nobody_waits_for_ever_for_an_application_that_does_not_poll() -> None:
    """After max_poll_ms the partition goes without a poll; what the application may still work on
    is not stored, so the next owner reads it again; the application hears of it when it polls."""

    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 2)
            write(cluster, "t", 10)
            settings: Any = {"group": "g", "topics": ["t"], **FAST}
            revoked: list[Key] = []
            first = Consumer(
                cluster.bootstrap, max_poll_ms=4_000, on_revoked=revoked.extend, **settings
            )
            async with first:
                while len(first.assignment()) < 2:
                    await first.poll(max_records=3, timeout=0.1)
                got: list[Record] = []
                while {one.partition for one in got} != {0, 1}:
                    got = await first.poll(max_records=20, timeout=0.2)
                async with Consumer(cluster.bootstrap, **settings) as second:
                    theirs = await read(second, 3)
                    assert theirs == []
                    theirs = await read(second, 3)
                    assert revoked == []
                    (number,) = {one.partition for one in theirs}
                    begun = next(one.offset for one in got if one.partition == number)
                    assert [one.offset for one in theirs] == list(range(begun, 10))
                    with pytest.raises(FencedGeneration):
                        await first.commit({("t", number): 10})
                    await first.poll(timeout=0.1)
                    assert revoked == [("t", number)]
                    await first.commit()

    simulate(main())


def test_a_dead_member_is_replaced_after_its_session_and_cannot_store_any_more() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster:
            cluster.add_topic("t", 2)
            write(cluster, "t", 10)
            settings: Any = {"group": "g", "topics": ["t"], "auto_commit": False, **FAST}
            async with Consumer(cluster.bootstrap, **settings) as dead:
                await read(dead, 1)
                name = dead._group.member.member_id  # type: ignore[union-attr]
                cut = True

                def asking(request: Any, node: int) -> None:
                    if cut and isinstance(request, GroupHeartbeat) and request.member_id == name:
                        raise lost()

                cluster.asking = asking
                async with Consumer(cluster.bootstrap, **settings) as other:
                    theirs = await read(other, 4)
                    assert len(theirs) == 20
                    with pytest.raises(FencedGeneration):
                        await dead.commit()
                    with pytest.raises(FencedGeneration):
                        await dead.commit({("t", 0): 10})
                    # It has no session, so nothing is handed out, though it may still fetch.
                    write(cluster, "t", 5)
                    assert await read(dead, 1) == []
                    assert dead.assignment() == []
                    cut = False
                    await asyncio.gather(read(dead, 3), read(other, 3, theirs))
                    assert len(dead.assignment()) == 1
                    assert len(other.assignment()) == 1

    simulate(main())


def test_heartbeats_do_not_depend_on_polls() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 1)
            write(cluster, "t", 1)
            async with Consumer(cluster.bootstrap, group="g", topics=["t"], **FAST) as consumer:
                await read(consumer, 1)
                await asyncio.sleep(60)
                assert len(cluster.core.groups["g"].members) == 1
                before = cluster.heartbeats
                await asyncio.sleep(10)
                assert 40 <= cluster.heartbeats - before <= 60
                await consumer.commit()

    simulate(main())


def test_the_coordinator_moves_dies_and_loses_replies_and_nobody_loses_a_partition() -> None:
    async def main(seed: int) -> None:
        async with fake_groups(3, seed) as cluster:
            cluster.add_topic("t", 6)
            settings: Any = {"group": "g", "topics": ["t"], **FAST}
            settings |= {"session_ms": 5_000}
            revoked: list[Key] = []
            seen: list[Record] = []
            kinds = GroupHeartbeat | FindCoordinator | ReadOffsets | StoreOffsets

            def asking(request: Any, node: int) -> None:
                if isinstance(request, kinds) and cluster.rng.random() < 0.12:
                    raise NotLeader("not me, perhaps")

            def answering(request: Any, node: int) -> None:
                if isinstance(request, kinds) and cluster.rng.random() < 0.12:
                    raise lost()

            async with (
                Consumer(cluster.bootstrap, on_revoked=revoked.extend, **settings) as one,
                Consumer(cluster.bootstrap, on_revoked=revoked.extend, **settings) as two,
            ):
                await asyncio.gather(read(one, 3, seen), read(two, 3, seen))
                assert len(one.assignment()) == len(two.assignment()) == 3
                revoked.clear()
                cluster.asking, cluster.answering = asking, answering
                for step in range(10):
                    cluster.move_coordinator((None, 1, 2, 3)[step % 4])
                    write(cluster, "t", 10)
                    await asyncio.gather(read(one, 1, seen), read(two, 1, seen))
                cluster.asking = cluster.answering = None
                await asyncio.gather(read(one, 2, seen), read(two, 2, seen))
                assert revoked == []
                counts = Counter(places(seen))
                assert len(counts) == 600
                assert set(counts.values()) == {1}
            stored = [cluster.queue("t", number).stored["g"] for number in range(6)]
            assert stored == [100] * 6

    for seed in range(3):
        simulate(main(seed), seed)


def test_patterns_and_partitions_that_come_later_are_picked_up() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster:
            cluster.add_topic("orders-a", 1)
            cluster.add_topic("other", 1)
            async with Consumer(
                cluster.bootstrap, group="g", pattern="orders-.*", **FAST
            ) as consumer, Producer(cluster.bootstrap) as producer:  # fmt: skip
                await read(consumer, 1)
                assert consumer.assignment() == [("orders-a", 0)]
                cluster.add_topic("orders-b", 2)
                await read(consumer, 1)
                assert len(consumer.assignment()) == 3
                await (await producer.send("orders-b", b"x", partition=1))
                assert [one.topic for one in await read(consumer, 1)] == ["orders-b"]
                parts = cluster.topics["orders-b"]
                parts.append(type(parts[0])(2))
                cluster.topics_changed()
                await read(consumer, 1)
                assert ("orders-b", 2) in consumer.assignment()

    simulate(main())


def test_a_static_member_keeps_its_partitions_over_a_restart() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 4)
            settings: Any = {"group": "g", "topics": ["t"], **FAST}
            async with Consumer(cluster.bootstrap, instance_id="b", **settings) as other:
                async with Consumer(cluster.bootstrap, instance_id="a", **settings) as first:
                    await asyncio.gather(read(first, 2), read(other, 2))
                    before = sorted(first.assignment())
                    mine = sorted(other.assignment())
                    assert len(before) == 2
                await read(other, 1)
                assert sorted(other.assignment()) == mine
                async with Consumer(cluster.bootstrap, instance_id="a", **settings) as second:
                    await asyncio.gather(read(second, 1), read(other, 1))
                    assert sorted(second.assignment()) == before
                    assert sorted(other.assignment()) == mine
                    # A third process under the same name: the second one is fenced, and stays so.
                    async with Consumer(cluster.bootstrap, instance_id="a", **settings) as third:
                        with pytest.raises(FencedGeneration):
                            await read(second, 1)
                        await read(third, 1)
                        with pytest.raises(FencedGeneration):
                            await read(second, 1)
                        await read(third, 3)
                        assert sorted(third.assignment()) == before

    simulate(main())


def test_iteration_stores_only_what_it_has_given_out() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 1)
            write(cluster, "t", 20)
            async with Consumer(
                cluster.bootstrap, group="g", topics=["t"], auto_commit=False, **FAST
            ) as consumer:
                found = []
                async for record in consumer:
                    found.append(record.offset)
                    if len(found) == 5:
                        await consumer.commit()
                        assert cluster.queue("t", 0).stored["g"] == 5
                        assert await consumer.position("t", 0) == 5
                        assert (await consumer.lag())[("t", 0)] == 15
                        await consumer.seek("t", 0, offset=10)
                    if len(found) == 7:
                        break
                assert found == [0, 1, 2, 3, 4, 10, 11]
                assert [one.offset for one in await consumer.poll(max_records=3)] == [12, 13, 14]
            found = []
            async with Consumer(cluster.bootstrap, group="auto", topics=["t"], **FAST) as consumer:
                async for record in consumer:
                    found.append(record.offset)
                    await asyncio.sleep(0.2)
                    if len(found) == 15:
                        break
            assert cluster.queue("t", 0).stored["auto"] == 15

    simulate(main())


def test_a_revoked_partition_is_not_iterated_any_more() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 2)
            write(cluster, "t", 100)
            settings: Any = {"group": "g", "topics": ["t"], **FAST}
            seen: list[Record] = []

            async def iterate(consumer: Consumer) -> None:
                async for record in consumer:
                    seen.append(record)
                    await asyncio.sleep(0.05)

            first, second = [Consumer(cluster.bootstrap, **settings) for _ in range(2)]
            async with first, second:
                tasks = [asyncio.ensure_future(iterate(first))]
                await asyncio.sleep(2)
                tasks.append(asyncio.ensure_future(iterate(second)))
                await until(lambda: len(seen) >= 200, 60)
                await first.close()
                await second.close()
                for task in tasks:
                    await task
            counts = Counter(places(seen))
            assert len(counts) == 200
            assert set(counts.values()) == {1}

    simulate(main())


def test_paused_partitions_give_nothing_and_go_on_where_they_were() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 2)
            write(cluster, "t", 10)
            async with Consumer(cluster.bootstrap, group="g", topics=["t"], **FAST) as consumer:
                found: list[Record] = []
                while not found:
                    found = await consumer.poll(max_records=1, timeout=0.1)
                number = found[0].partition
                await consumer.pause([("t", number)])
                assert consumer.paused() == [("t", number)]
                rest = await read(consumer, 1)
                assert {one.partition for one in rest} == {1 - number}
                assert (await consumer.lag())[("t", number)] == 9
                await consumer.resume([("t", number)])
                rest = await read(consumer, 1)
                assert [one.offset for one in rest] == list(range(1, 10))
                with pytest.raises(InvalidArgument):
                    await consumer.pause([("t", 7)])

    simulate(main())


def test_callbacks_may_store_and_may_fail() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 2)
            write(cluster, "t", 10)
            settings: Any = {"group": "g", "topics": ["t"], "auto_commit": False, **FAST}
            told: list[Any] = []
            first: Consumer

            async def gone(keys: list[Key]) -> None:
                told.append(keys)
                await first.commit()
                raise RuntimeError("the application's own")

            first = Consumer(cluster.bootstrap, on_revoked=gone, **settings)
            await first.start()
            await read(first, 1)
            async with Consumer(cluster.bootstrap, **settings) as second:
                with pytest.raises(RuntimeError, match="own"):
                    await read(first, 2)
                assert len(told) == 1
                await asyncio.gather(read(first, 1), read(second, 1))
                assert len(first.assignment()) == 1
                number = told[0][0][1]
                assert cluster.queue("t", number).stored["g"] == 10
            with pytest.raises(RuntimeError, match="own"):
                await first.close()
            await first.close()
            assert not cluster.core.groups["g"].members

    simulate(main())


def test_a_group_that_cannot_be_joined_says_why() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 1)
            for wrong in (
                {"group": "g"}, {"topics": ["t"]}, {"group": "g", "topics": "t"},
                {"group": "g", "pattern": "("}, {"instance_id": "x"},
                {"group": "g", "topics": ["t"], "session_ms": 100},
            ):  # fmt: skip
                with pytest.raises(ConfigError):
                    Consumer(cluster.bootstrap, **wrong)  # type: ignore[arg-type]

            def asking(request: Any, node: int) -> None:
                if isinstance(request, GroupHeartbeat):
                    raise InvalidArgument("group 'g' is in queue mode")

            cluster.asking = asking
            async with Consumer(cluster.bootstrap, group="g", topics=["t"], **FAST) as consumer:
                with pytest.raises(InvalidArgument, match="queue mode"):
                    await read(consumer, 5)
                with pytest.raises(InvalidArgument, match="assigns"):
                    await consumer.assign([("t", 0)])
                cluster.asking = None
                await asyncio.sleep(0.5)
                await read(consumer, 1)
                assert consumer.assignment() == [("t", 0)]
            async with Consumer(cluster.bootstrap) as plain:
                with pytest.raises(InvalidArgument, match="group"):
                    await plain.commit()

    simulate(main())


def test_closing_does_not_wait_for_a_coordinator_that_is_gone() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 1)
            async with Consumer(cluster.bootstrap, group="g", topics=["t"], **FAST) as consumer:
                await read(consumer, 1)

                def asking(request: Any, node: int) -> Any:
                    if isinstance(request, LeaveGroup):
                        return asyncio.sleep(100)
                    return None

                cluster.asking = asking
                began = asyncio.get_running_loop().time()
            assert asyncio.get_running_loop().time() - began < 3

    simulate(main())


def test_an_automatic_commit_never_stores_over_a_newer_one_by_hand() -> None:
    """The automatic one is due when a poll begins, and is still to be sent when the application has
    its records and commits them itself."""

    async def main() -> None:
        async with fake_groups() as cluster:
            cluster.add_topic("t", 1)
            write(cluster, "t", 40)
            settings = {**FAST, "auto_commit_ms": 100}
            async with Consumer(cluster.bootstrap, group="g", topics=["t"], **settings) as consumer:
                for _ in range(30):
                    await asyncio.sleep(0.15)
                    if await consumer.poll(max_records=1, timeout=0.1):
                        await consumer.commit()
                await asyncio.sleep(1)
            stored = [one[-1] for one in cluster.history if one[0] == "store"]
            assert len(stored) >= 20
            assert stored == sorted(stored)

    simulate(main())
