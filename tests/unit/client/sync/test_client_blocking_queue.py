"""The blocking forms of groups, queues and workers, on a real loop and real sockets."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_groups import FakeGroups, fake_groups
from served_cluster import ServedCluster, served_cluster

import raftq
import raftq.aio
from raftq import Admin, Consumer, Producer, QueueClient, Reject, Worker
from raftq.client.common.errors import (
    AlreadySettled,
    FencedGeneration,
    InvalidArgument,
    QueueClosed,
    UnknownTopic,
)

FAST: dict[str, Any] = {"heartbeat_ms": 100, "session_ms": 2_000}


Served = ServedCluster[FakeGroups]


@pytest.fixture
def served() -> Iterator[Served]:
    with served_cluster(fake_groups(2)) as served:
        yield served


def until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def test_the_names_of_groups_work_together(served: Served) -> None:
    served.topic("orders", 2, [b"x"] * 10)
    told: list[Any] = []
    consumer: Consumer

    def revoked(keys: list[tuple[str, int]]) -> None:
        told.append((threading.current_thread(), sorted(keys)))
        consumer.commit()  # callbacks may use the consumer

    with Consumer(
        served.cluster.bootstrap, group="billing", topics=["orders"], auto_commit=False,
        on_assigned=lambda keys: told.append(keys), on_revoked=revoked, **FAST,
    ) as consumer:  # fmt: skip
        found = []
        while len(found) < 20:
            found += consumer.poll(max_records=500, timeout=1.0)
        assert sorted(consumer.assignment()) == [("orders", 0), ("orders", 1)]
        assert consumer.lag() == {("orders", 0): 0, ("orders", 1): 0}
        consumer.commit({("orders", 0): 7})
        assert served.cluster.queue("orders", 0).stored["billing"] == 7
        consumer.pause([("orders", 0)])
        assert consumer.paused() == [("orders", 0)]
        consumer.resume([("orders", 0)])
        with pytest.raises(FencedGeneration):
            consumer.commit({("orders", 5): 7})
    assert told[-1] == (threading.current_thread(), [("orders", 0), ("orders", 1)])
    assert served.cluster.queue("orders", 0).stored["billing"] == 10
    with Admin(served.cluster.bootstrap) as admin:
        assert admin.describe_group("billing").lag == 0
        assert admin.reset_group("billing", "orders") == {0: 0, 1: 0}
        assert [one.group for one in admin.list_groups()] == ["billing"]
        admin.delete_group("billing")
    with pytest.raises(QueueClosed):
        consumer.poll()


def test_a_poll_that_waits_learns_of_a_rebalance_at_once(served: Served) -> None:
    served.topic("t", 2, [])
    gone = threading.Event()
    settings: Any = {"group": "g", "topics": ["t"], **FAST}
    with Consumer(
        served.cluster.bootstrap, on_revoked=lambda keys: gone.set(), **settings
    ) as first:
        while len(first.assignment()) < 2:
            first.poll(timeout=0.05)
        polling = threading.Thread(target=first.poll, args=(10, 3.0))
        polling.start()
        began = time.monotonic()
        with Consumer(served.cluster.bootstrap, **settings) as second:
            assert gone.wait(3)
            while not second.assignment():
                second.poll(timeout=0.05)
            assert time.monotonic() - began < 3
        polling.join()


def test_who_fails_gets_its_records_again(served: Served) -> None:
    served.topic("t", 1, [b"x"] * 10)

    def fail() -> None:
        with Consumer(served.cluster.bootstrap, group="g", topics=["t"], **FAST) as consumer:
            while not consumer.poll(max_records=4, timeout=0.1):
                continue
            consumer.poll(max_records=4)
            raise ValueError("not done")

    with pytest.raises(ValueError, match="not done"):
        fail()
    assert served.cluster.queue("t", 0).stored["g"] == 4


def test_the_names_of_queues_work_together(served: Served) -> None:
    served.topic("orders", 2, [b"x"] * 5)
    with QueueClient(
        served.cluster.bootstrap, group="emails", topics=["orders"], visibility_timeout=30.0
    ) as queue:
        found = []
        while len(found) < 10:
            found += queue.lease(max_records=100, timeout=1.0)
        queue.ack(found[0])
        queue.nack(found[1], delay=None)
        queue.postpone(found[2], 5.0)
        queue.reject(found[3], "why")
        assert queue.extend(found[4], 30.0) > 0
        queue.release(found[5])
        queue.ack_many(found[6:])
        with pytest.raises(AlreadySettled):
            queue.ack(found[0].receipt)
        assert queue.settle_many([found[4]], "ack") == []
        named = f"orders:{found[4].partition}:{found[4].offset}"
        ((failed, error),) = queue.settle_many([found[4]], "nack", delay=1.0)
        assert (failed, type(error)) == (named, AlreadySettled)
    with Admin(served.cluster.bootstrap) as admin:
        assert admin.describe_group("emails").mode == "queue"
    with Producer(served.cluster.bootstrap) as producer:
        place = producer.send("orders", b"later", delay=60.0, ttl=5.0).result(10)
    assert place.delayed
    with Admin(served.cluster.bootstrap) as admin:
        (waiting,) = admin.delayed("orders", values=True)
        assert (waiting.value, waiting.deliver_at) == (b"later", place.deliver_at)
        assert admin.cancel_delayed("orders", place.partition, place.offset) == [place.offset]
        assert admin.delay_totals("orders").pending == 0
        assert admin.dead_letters("orders") == []
        assert admin.redrive("orders") == admin.purge("orders") == 0
        admin.pause_group("emails")
        admin.resume_group("emails")
        admin.purge_group("emails")


def test_a_worker_runs_functions_until_it_is_stopped(served: Served) -> None:
    served.topic("t", 2, [b"good", b"bad", b"poison"])
    seen: list[bytes] = []

    def handle(record: Any) -> None:
        seen.append(record.value)
        if record.value == b"bad":
            raise ValueError("no")
        if record.value == b"poison":
            raise Reject("why")

    worker = Worker(
        served.cluster.bootstrap, group="g", topics=["t"], handler=handle, concurrency=4, **FAST
    )
    running = threading.Thread(target=worker.run)
    running.start()
    until(lambda: worker.counts["acked"] == 2 and worker.counts["rejected"] == 2)
    worker.stop()
    running.join(10)
    assert not running.is_alive()
    assert worker.counts["nacked"] >= 2
    with pytest.raises(InvalidArgument, match="once"):
        worker.run()


def test_a_worker_in_the_background_with_a_coroutine(served: Served) -> None:
    served.topic("t", 1, [b"x"] * 20)

    async def handle(record: Any) -> None:
        await asyncio.sleep(0.001)

    with Worker(
        served.cluster.bootstrap, group="g", topics=["t"], handler=handle, concurrency=8
    ) as worker:
        until(lambda: worker.counts["acked"] == 20)
        assert not worker.wait(0.01)
    assert worker.wait()
    with pytest.raises(UnknownTopic):
        Worker(
            served.cluster.bootstrap, group="g", topics=["nope"], handler=handle, topic_grace_ms=10
        ).run()


PROGRAM = """
import sys
from raftq import Worker

def handle(record):
    print("handled", record.value.decode(), flush=True)

worker = Worker(sys.argv[1], group="g", topics=["t"], handler=handle, concurrency=2)
worker.run()
print("ended", worker.counts["acked"], flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_worker_in_good_order(served: Served, number: signal.Signals) -> None:
    served.topic("t", 1, [b"one"])
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, served.cluster.bootstrap],
        stdout=subprocess.PIPE, env={**os.environ}, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "handled one\n"
        time.sleep(0.1)
        process.send_signal(number)
        assert process.stdout.readline() == "ended 1\n"
        assert process.wait(10) == 0


def test_queue_names_are_public() -> None:
    assert {"QueueClient", "Worker", "Reject"} <= set(raftq.__all__)
    assert set(raftq.aio.__all__) >= {"Admin", "Consumer", "Producer", "QueueClient", "Worker"}
