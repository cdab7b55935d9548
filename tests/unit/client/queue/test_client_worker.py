"""The worker: handlers, renewals, lost leases, and an end that gives everything back."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_cluster import simulate
from fake_groups import FakeGroups, fake_groups, fill

from raftq.aio import LeasedRecord, QueueClient, Reject, Worker
from raftq.client.common.errors import ConfigError, InvalidArgument, NotLeader, UnknownTopic
from raftq.client.net.transport import run
from raftq.client.wire.queue_messages import Lease, Settle
from raftq.node.queue.core.config import DeliveryConfig

Handler = Callable[[LeasedRecord], Awaitable[None]]


@asynccontextmanager
async def working(cluster: FakeGroups, handler: Any, **settings: Any) -> Any:
    """A worker that runs until the end of the block."""
    settings = {"group": "g", "topics": ["t"], "handle_signals": False, **settings}
    worker = Worker(cluster.bootstrap, handler=handler, **settings)
    task = asyncio.ensure_future(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await task


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - time is virtual
            await asyncio.sleep(0.01)


def verbs(cluster: FakeGroups) -> Counter[str]:
    return Counter(one[0] for one in cluster.history)


def test_returning_acks_raising_nacks_and_reject_dead_letters() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster:
            logs = cluster.add_topic("t", 4)
            for log in logs:
                fill(log, [b"good"] * 10 + [b"bad", b"poison"])
            seen: Counter[bytes] = Counter()

            async def handle(record: LeasedRecord) -> None:
                seen[record.value] += 1
                if record.value == b"bad":
                    raise ValueError("no")
                if record.value == b"poison":
                    raise Reject("never", "really")

            async with working(cluster, handle, concurrency=4) as worker:
                await until(lambda: worker.counts["nacked"] == 12)
                await asyncio.sleep(1)
            assert seen == {b"good": 40, b"poison": 4, b"bad": 12}
            assert worker.counts == {"acked": 40, "nacked": 12, "rejected": 4}
            for number in range(4):
                queue = cluster.queue("t", number)
                assert sorted(queue.dead) == [
                    (10, "max_deliveries", "ValueError: no"), (11, "never", "really"),
                ]  # fmt: skip
                assert queue.groups["g"].settled.prefix == 12
            assert not cluster.core.groups["g"].members

    simulate(main())


def test_no_more_handlers_run_than_allowed_and_prefetch_is_bounded() -> None:
    async def main() -> None:
        async with fake_groups(3) as cluster:
            for log in cluster.add_topic("t", 6):
                fill(log, [b"x"] * 100)
            running = most = held_most = 0

            async def handle(record: LeasedRecord) -> None:
                nonlocal running, most, held_most
                running += 1
                most = max(most, running)
                held = sum(cluster.queue("t", n).groups["g"].in_flight for n in range(6)
                           if "g" in cluster.queue("t", n).groups)  # fmt: skip
                held_most = max(held_most, held)
                await asyncio.sleep(0.01)
                running -= 1

            async with working(cluster, handle, concurrency=5, prefetch=10) as worker:
                await until(lambda: worker.counts["acked"] == 600)
            assert most == 5
            assert held_most <= 15 + 15 // 4 + 3 + 15
            assert verbs(cluster)["ack"] == 600

    simulate(main())


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.0, 500, 1_100), (0.5, 5, 25)])
def test_fast_handlers_lease_ahead_and_slow_ones_leave_records_to_others(
    seconds: float, least: int, most: int
) -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            (log,) = cluster.add_topic("t", 1)
            count = 4_000 if not seconds else 60
            fill(log, [b"x"] * count)
            asked: list[int] = []

            def listen(request: Any, node_id: int) -> None:
                if isinstance(request, Lease):
                    asked.append(request.records_max)

            async def handle(record: LeasedRecord) -> None:
                await asyncio.sleep(seconds)

            cluster.asking = listen
            async with working(cluster, handle, concurrency=8) as worker:
                await until(lambda: worker.counts["acked"] == count)
            assert least <= max(asked) <= most

    simulate(main())


def test_records_that_only_wait_for_the_word_of_a_node_take_no_room() -> None:
    """The node answers settlements after a second: others are leased and worked on meanwhile."""

    async def main() -> None:
        async with fake_groups() as cluster:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x"] * 100)
            begun = 0

            def slow(request: Any, node_id: int) -> Any:
                return asyncio.sleep(1) if isinstance(request, Settle) else None

            async def handle(record: LeasedRecord) -> None:
                nonlocal begun
                begun += 1

            cluster.asking = slow
            async with working(cluster, handle, concurrency=1, prefetch=1) as worker:
                await asyncio.sleep(0.9)
                assert begun > 20, "a worker with room for two"
                assert worker.counts["acked"] == 0
                await until(lambda: worker.counts["acked"] == 100)

    simulate(main())


def test_a_worker_with_little_room_still_serves_every_node() -> None:
    async def main() -> None:
        async with fake_groups(5) as cluster:
            logs = cluster.add_topic("t", 5)

            async def handle(record: LeasedRecord) -> None:
                return

            async with working(cluster, handle, prefetch=0) as worker:
                for round_ in range(1, 4):
                    await asyncio.sleep(1)
                    before = worker.counts["acked"]
                    for number, log in enumerate(logs):
                        fill(log, [b"x"])
                        began = cluster._now()
                        done = before + number + 1
                        await until(lambda done=done: worker.counts["acked"] == done)
                        assert cluster._now() - began < 0.3
                    for log in logs:  # so that each of them has records when it is asked
                        fill(log, [b"x"] * round_)
                    await until(lambda done=done, n=round_: worker.counts["acked"] == done + 5 * n)

    simulate(main())


def test_leases_of_slow_handlers_and_of_those_that_wait_are_renewed() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x"] * 4)

            async def handle(record: LeasedRecord) -> None:
                await asyncio.sleep(60)

            async with working(cluster, handle, visibility_timeout=6, prefetch=3) as worker:
                await until(lambda: worker.counts["acked"] == 4, 600)
            leases = [one for one in cluster.history if one[0] == "lease"]
            assert len(leases) == 4
            assert {one[-1] for one in leases} == {1}
            # At a third of the lease, so about every two seconds, not more often.
            assert 250 < verbs(cluster)["extend"] < 450

    simulate(main())


def test_a_lost_lease_cancels_the_handler_and_nothing_is_said_about_it() -> None:
    """1. a record is worked on; 2. its lease is taken away behind the worker's back; 3. the renewal
    finds that out."""

    async def main() -> None:
        async with fake_groups() as cluster:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x"])
            ended: list[Any] = []

            async def handle(record: LeasedRecord) -> None:
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    ended.append(record.lost)
                    raise

            async with working(cluster, handle, visibility_timeout=6) as worker:
                await until(lambda: cluster.history)
                cluster.queue("t", 0).groups.pop("g")
                cluster.queue("t", 0).log.start = 1
                await until(lambda: ended)
                assert ended == [True]
                assert worker.counts["lost"] == 1
                await asyncio.sleep(1)
            assert not {"ack", "nack", "release", "reject"} & set(verbs(cluster))

    simulate(main())


def test_a_lease_that_cannot_be_renewed_is_lost_when_it_ends() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x"])
            times: list[float] = []

            async def handle(record: LeasedRecord) -> None:
                times.append(cluster._now())
                try:
                    await asyncio.sleep(100)
                finally:
                    times.append(cluster._now())

            def asking(request: Any, node: int) -> None:
                if isinstance(request, Settle):
                    raise NotLeader("nobody leads")

            cluster.asking = asking
            async with working(cluster, handle, visibility_timeout=6):
                await until(lambda: len(times) >= 2)
                assert 5 <= times[1] - times[0] <= 7
                cluster.asking = None

    simulate(main())


def test_stopping_lets_handlers_finish_and_gives_back_the_rest() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster:
            for log in cluster.add_topic("t", 2):
                fill(log, [b"x"] * 10)
            started: list[int] = []

            async def handle(record: LeasedRecord) -> None:
                started.append(record.offset)
                await asyncio.sleep(3)

            async with working(cluster, handle, concurrency=2, prefetch=6) as worker:
                await until(lambda: len(started) == 2)
                await asyncio.sleep(0.5)
                began = cluster._now()
            assert 1 < cluster._now() - began < 4
            assert worker.counts["acked"] == 2
            assert worker.counts["released"] >= 5
            assert len(started) == 2
            assert sum(cluster.queue("t", n).groups["g"].in_flight for n in (0, 1)) == 0
            assert not cluster.parked
            # Nobody's attempt was spent.
            async with QueueClient(cluster.bootstrap, group="g", topics=["t"]) as queue:
                found = []
                while len(found) < 18:
                    found += await queue.lease(timeout=1)
                assert {one.attempt for one in found} == {1}

    simulate(main())


def test_handlers_that_do_not_finish_in_time_are_cancelled_and_their_records_released() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x"])
            started = asyncio.Event()

            async def handle(record: LeasedRecord) -> None:
                started.set()
                await asyncio.sleep(1000)

            async with working(cluster, handle, grace=2) as worker:
                await started.wait()
                began = cluster._now()
            assert 2 <= cluster._now() - began < 4
            assert worker.counts == {"released": 1}
            assert cluster.queue("t", 0).groups["g"].in_flight == 0

    simulate(main())


def test_work_goes_on_while_leaders_change_and_nodes_refuse() -> None:
    async def main(seed: int) -> None:
        async with fake_groups(3, seed) as cluster:
            cluster.delivery = DeliveryConfig(max_deliveries=1_000, backoff_s=0.1)
            logs = cluster.add_topic("t", 5)
            for number in range(100):
                fill(logs[number % 5], [b"%d" % number] * 4)
            done: Counter[tuple[int, int]] = Counter()

            def asking(request: Any, node: int) -> None:
                if isinstance(request, Lease | Settle) and cluster.rng.random() < 0.1:
                    raise NotLeader("not me, perhaps")
                if cluster.rng.random() < 0.02:
                    cluster.lead("t", cluster.rng.randrange(5), cluster.rng.randrange(1, 4))

            async def handle(record: LeasedRecord) -> None:
                await asyncio.sleep(cluster.rng.random() * 0.05)
                if cluster.rng.random() < 0.1:
                    raise ValueError("chance")
                done[record.partition, record.offset] += 1

            cluster.asking = asking
            async with (
                working(cluster, handle, concurrency=4) as one,
                working(cluster, handle, concurrency=4) as two,
            ):
                await until(lambda: one.counts["acked"] + two.counts["acked"] >= 400, 500)
            assert len(done) == 400
            assert set(done.values()) == {1}

    for seed in range(3):
        simulate(main(seed), seed)


def test_functions_in_threads_fail_reject_and_give_back_as_coroutines_do() -> None:
    """Stopped in the midst of it: what runs is finished, what waits is given back unbegun."""

    async def main() -> None:
        async with fake_groups() as cluster:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"bad", b"poison", b"later"] + [b"x"] * 5 + [b"wait"] * 9)
            begun: Counter[bytes] = Counter()
            go = threading.Event()

            def handle(record: LeasedRecord) -> Any:
                begun[record.value] += 1
                if record.value == b"bad":
                    raise ValueError("no")
                if record.value == b"poison":
                    raise Reject("never")
                if record.value == b"wait":
                    assert go.wait(20)
                return asyncio.sleep(0.01) if record.value == b"later" else None

            async with working(cluster, handle, concurrency=2, prefetch=20) as worker:
                await until(lambda: begun[b"wait"] == 2 and worker.counts["acked"] == 6, 20)
                worker.stop()
                await until(lambda: worker.counts["released"] == 7, 20)
                go.set()
            assert begun[b"wait"] == 2
            assert worker.counts["acked"] == 8
            assert worker.counts["rejected"] == 1
            assert worker.counts["nacked"] >= 1
            assert cluster.queue("t", 0).groups["g"].in_flight == 0

    run(main())


def test_functions_run_in_threads_and_see_that_their_lease_is_lost() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x", b"wait"])
            threads: set[str] = set()
            noticed = threading.Event()

            def handle(record: LeasedRecord) -> None:
                threads.add(threading.current_thread().name)
                if record.value == b"wait":
                    for _ in range(1000):
                        if record.lost:
                            noticed.set()
                            return
                        threading.Event().wait(0.01)

            async with working(cluster, handle, concurrency=2, visibility_timeout=0.6) as worker:
                await until(lambda: worker.counts["acked"] == 1)
                cluster.queue("t", 0).groups.pop("g")
                cluster.queue("t", 0).log.start = 2
                await until(noticed.is_set, 10)
            assert all(name.startswith("raftq-worker") for name in threads)
            assert verbs(cluster)["ack"] == 1

    run(main())


def test_topics_that_are_not_there_and_wrong_settings_are_refused() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:

            async def handle(record: LeasedRecord) -> None:
                return

            for wrong in (
                {"concurrency": 0}, {"prefetch": -1}, {"grace": -1}, {"visibility_timeout": None},
                {"handler": "x"},
            ):  # fmt: skip
                with pytest.raises(ConfigError):
                    Worker(
                        cluster.bootstrap, **{"group": "g", "topics": ["t"], "handler": handle,
                                              **wrong},
                    )  # fmt: skip
            with pytest.raises(InvalidArgument, match="handler"):
                Worker(cluster.bootstrap, group="g", topics=["t"])
            worker = Worker(
                cluster.bootstrap, group="g", topics=["t"], handler=handle, topic_grace_ms=200,
                handle_signals=False,
            )  # fmt: skip
            with pytest.raises(UnknownTopic):
                await worker.run()

    simulate(main())


def test_a_cancelled_worker_gives_everything_back_at_once() -> None:
    async def main() -> None:
        async with fake_groups() as cluster:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"x"] * 3)
            started = asyncio.Event()

            async def handle(record: LeasedRecord) -> None:
                started.set()
                await asyncio.sleep(1000)

            worker = Worker(
                cluster.bootstrap, group="g", topics=["t"], handler=handle, prefetch=2,
                handle_signals=False,
            )  # fmt: skip
            task = asyncio.ensure_future(worker.run())
            await started.wait()
            await asyncio.sleep(0.5)
            began = cluster._now()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert cluster._now() - began < 2
            assert cluster.queue("t", 0).groups["g"].in_flight == 0

    simulate(main())
