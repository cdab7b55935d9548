"""The blocking clients: the same verbs in threads, on a real loop and real sockets."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_cluster import FakeCluster, fake_cluster
from served_cluster import ServedCluster, served_cluster

import raftq
from raftq import Admin, Appended, Consumer, Producer
from raftq.client.common.errors import (
    InvalidArgument,
    QueueClosed,
    RaftqError,
    RequestTimeout,
    Throttled,
    UnknownTopic,
)

Served = ServedCluster[FakeCluster]


@pytest.fixture
def served() -> Iterator[Served]:
    with served_cluster(fake_cluster(2)) as served:
        yield served


def test_the_names_of_the_readme_work_together(served: Served) -> None:
    bootstrap = served.cluster.bootstrap
    with Admin(bootstrap) as admin:
        admin.create_topic("orders", partitions=3)
        assert admin.describe_topic("orders").partitions[0].leader == 1
        assert admin.list_topics() == ["orders"]
        assert len(admin.nodes()) == 2
    with Producer(bootstrap, acks="all", linger_ms=5, compression=None) as producer:
        delivery = producer.send("orders", b"v", key=b"k", headers={"a": b"1"}, priority="high")
        place = delivery.result(timeout=10)
        assert isinstance(place, Appended)
        assert place.topic == "orders"
        assert place.offset == 0
        producer.send_many("orders", [b"x"] * 100, partition=place.partition)
        producer.flush()
    with Consumer(bootstrap) as consumer:
        consumer.assign([("orders", place.partition)])
        consumer.seek("orders", place.partition, offset=0)
        found = consumer.poll(max_records=500, timeout=5.0)
        assert (found[0].key, found[0].value, found[0].headers) == (b"k", b"v", {"a": b"1"})
        while len(found) < 101:
            found += consumer.poll()
        assert consumer.poll(timeout=0.05) == []
        assert consumer.position("orders", place.partition) == 101
        consumer.seek("orders", place.partition, to="earliest")
        assert consumer.poll_arrow().num_rows > 0
    assert set(raftq.__all__) >= {"Admin", "Appended", "Consumer", "Producer"}


def test_many_threads_share_one_producer(served: Served) -> None:
    (log,) = served.call(served.cluster.add_topic, "t", 1)
    with Producer(served.cluster.bootstrap, buffer_bytes=200_000) as producer:

        def work(name: bytes) -> None:
            for number in range(1000):
                producer.send("t", b"%s-%05d" % (name, number) + bytes(100))
            producer.send_many("t", [b"%s-%05d" % (name, n) + bytes(9) for n in range(1000, 1500)])

        threads = [threading.Thread(target=work, args=(b"%d" % n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.flush(timeout=30)
    values = [value.rstrip(b"\0") for value in log.values()]
    assert len(values) == 6000
    for name in (b"0", b"1", b"2", b"3"):
        mine = [value for value in values if value.startswith(name + b"-")]
        assert mine == [b"%s-%05d" % (name, number) for number in range(1500)]


def test_results_and_callbacks_arrive_in_other_threads(served: Served) -> None:
    served.call(served.cluster.add_topic, "t", 1)
    with Producer(served.cluster.bootstrap) as producer:
        called = threading.Event()
        delivery = producer.send("t", b"x")
        delivery.add_done_callback(lambda one: called.set())
        assert delivery.result(10).offset == 0
        assert called.wait(10)
        assert delivery.exception() is None
        many = producer.send_many("t", [b"y"] * 10)
        assert [one.offset for one in many.result(10)] == list(range(1, 11))
        problems: list[BaseException] = []

        def misuse(one: Any) -> None:
            try:
                producer.flush()
            except RaftqError as error:
                problems.append(error)

        last = producer.send("t", b"z")
        last.add_done_callback(misuse)
        last.result(10)
        producer.flush()
        assert [type(one) for one in problems] == [InvalidArgument]


def test_a_full_buffer_blocks_and_then_raises(served: Served) -> None:
    served.call(served.cluster.add_topic, "t", 1)
    gate = served.call(asyncio.Event)
    with Producer(
        served.cluster.bootstrap, buffer_bytes=2_000, max_block_ms=100, linger_ms=300
    ) as producer:
        producer.send("t", b"warm up")
        producer.flush()
        served.cluster.before = lambda request, node_id: gate.wait()
        first = producer.send("t", bytes(1_500))
        with pytest.raises(Throttled):
            producer.send("t", bytes(1_500))
        with pytest.raises(Throttled):
            producer.send_many("t", [bytes(1_500)])
        with pytest.raises(RequestTimeout):
            first.result(timeout=0.01)
        served.call(gate.set)
        first.result(10)
        producer.send("t", bytes(1_500)).result(10)


def test_a_closed_client_refuses_and_closing_twice_is_fine(served: Served) -> None:
    served.call(served.cluster.add_topic, "t", 1)
    bootstrap = served.cluster.bootstrap
    producer, consumer, admin = Producer(bootstrap), Consumer(bootstrap), Admin(bootstrap)
    consumer.assign([("t", 0)])
    for client in (producer, consumer, admin):
        client.close()  # type: ignore[attr-defined]
        client.close()  # type: ignore[attr-defined]
    for call in (
        lambda: producer.send("t", b"x"), lambda: producer.send_many("t", [b"x"]),
        producer.flush, consumer.poll, admin.list_topics,
    ):  # fmt: skip
        with pytest.raises(QueueClosed):
            call()  # type: ignore[operator]


def test_errors_of_the_cluster_reach_the_caller(served: Served) -> None:
    with Producer(served.cluster.bootstrap, topic_grace_ms=50) as producer:
        with pytest.raises(UnknownTopic, match="nowhere"):
            producer.send("nowhere", b"x")
        with pytest.raises(InvalidArgument):
            producer.send("nowhere", "text")  # type: ignore[arg-type]


def test_leaving_a_block_with_an_error_does_not_hide_it(served: Served) -> None:
    served.call(served.cluster.add_topic, "t", 1)

    def refuse(request: Any, node_id: int) -> None:
        raise InvalidArgument("no")

    served.cluster.before = refuse

    def fail() -> None:
        with Producer(served.cluster.bootstrap) as producer:
            producer.send("t", b"x")
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail()


def test_two_threads_cannot_poll_at_once(served: Served) -> None:
    served.call(served.cluster.add_topic, "t", 1)
    with Consumer(served.cluster.bootstrap) as consumer:
        consumer.assign([("t", 0)])
        consumer._polling.acquire()
        with pytest.raises(InvalidArgument, match="another thread"):
            consumer.poll()
        consumer._polling.release()


CHILD = """
import os, sys
import raftq
producer = raftq.Producer(sys.argv[1])
producer.send("t", b"parent").result(10)
child = os.fork()
if child == 0:
    try:
        producer.send("t", b"child")
    except raftq.RaftqError as error:
        right = "fork" in str(error)
    else:
        right = False
    with raftq.Producer(sys.argv[1]) as own:
        own.send("t", b"own").result(10)
    os._exit(0 if right else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
producer.send("t", b"unsent: the process ends without close")
print("done", flush=True)
"""


def test_forks_are_refused_and_an_unclosed_client_does_not_keep_a_process(served: Served) -> None:
    (log,) = served.call(served.cluster.add_topic, "t", 1)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, served.cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ},
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
    assert log.values()[:2] == [b"parent", b"own"]
