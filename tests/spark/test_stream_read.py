"""Streams of micro-batches over real topics: nothing lost, nothing twice, whatever happens."""

import json
import threading
import time

import pytest

from raftq.client.sync.producer import Producer

WHOLE_S = 90


def send(bootstrap, topic, partitions, numbers):
    with Producer(bootstrap) as producer:
        for number in numbers:
            for partition in range(partitions):
                producer.send(topic, b"%d:%d" % (partition, number), partition=partition)
        producer.flush()


def stream(session, cluster, **options):
    read = session.readStream.format("raftq").option("bootstrap", cluster.bootstrap)
    for name, value in {"startingOffsets": "earliest", **options}.items():
        read = read.option(name, value)
    return read.load()


def start(frame, place, **trigger):
    """Write to Parquet, whose own log makes a repeated batch count once."""
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(place / "check"))
    return writer.trigger(**(trigger or {"processingTime": "100 milliseconds"})).start(
        str(place / "out")
    )


def found(session, place):
    rows = session.read.parquet(str(place / "out")).select("value").collect()
    return sorted(bytes(row.value).decode() for row in rows)


def expected(partitions, numbers):
    return sorted(f"{one}:{number}" for one in partitions for number in numbers)


def wait_until(query, done, seconds=WHOLE_S):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if query.exception() is not None:
            raise AssertionError(str(query.exception()))
        if done():
            return
        time.sleep(0.1)
    raise AssertionError(f"not in {seconds} s: {query.lastProgress}")


def sum_read(query):
    return sum(row["numInputRows"] for row in query.recentProgress)


def ends_at(query, topic, offsets):
    """Whether the query has read up to these offsets of the topic."""

    def look():
        progress = query.lastProgress
        if not progress:
            return False
        end = progress["sources"][0]["endOffset"]
        told = json.loads(end) if isinstance(end, str) else end
        return told.get(topic) == {str(one): at for one, at in enumerate(offsets)}

    return look


def test_a_restart_from_the_checkpoint_loses_and_repeats_nothing(
    session, cluster, admin, topic, tmp_path
):
    """
    1. A stream with a rate limit is stopped in the middle, records arrive meanwhile.
    2. It goes on from its checkpoint, gets more records and a new partition.
    3. Every record is there once.
    """
    admin.create_topic(topic, partitions=2, replication=3)
    send(cluster.bootstrap, topic, 2, range(400))
    frame = stream(session, cluster, subscribe=topic, maxOffsetsPerTrigger="100")
    query = start(frame, tmp_path)
    wait_until(query, lambda: query.lastProgress and query.lastProgress["batchId"] >= 2)
    query.stop()
    first = found(session, tmp_path)
    assert 0 < len(first) < 800
    assert max(row["numInputRows"] for row in query.recentProgress) <= 100

    send(cluster.bootstrap, topic, 2, range(400, 500))
    query = start(stream(session, cluster, subscribe=topic), tmp_path)
    wait_until(query, ends_at(query, topic, [500, 500]))
    admin.add_partitions(topic, 3)
    send(cluster.bootstrap, topic, 3, range(500, 600))
    wait_until(query, ends_at(query, topic, [600, 600, 100]))
    query.stop()
    assert found(session, tmp_path) == sorted(
        expected(range(2), range(600)) + expected([2], range(500, 600))
    )


@pytest.mark.full
def test_available_now_reads_what_is_there_in_limited_batches_and_ends(
    session, cluster, admin, topic, tmp_path
):
    admin.create_topic(topic, partitions=2, replication=3)
    send(cluster.bootstrap, topic, 2, range(250))
    options = {"subscribe": topic, "maxOffsetsPerTrigger": "200", "commitGroup": "spark-lag"}
    query = start(stream(session, cluster, **options), tmp_path, availableNow=True)
    query.awaitTermination(WHOLE_S)
    assert [row["numInputRows"] for row in query.recentProgress][:3] == [200, 200, 100]
    assert found(session, tmp_path) == expected(range(2), range(250))

    send(cluster.bootstrap, topic, 2, range(250, 300))
    query = start(stream(session, cluster, **options), tmp_path, availableNow=True)
    query.awaitTermination(WHOLE_S)
    assert found(session, tmp_path) == expected(range(2), range(300))
    # Spark tells the source one batch late: so the group is behind by the last one at most.
    told = {one.partition: one.position for one in admin.describe_group("spark-lag").partitions}
    assert told == {0: 250, 1: 250}


@pytest.mark.full
def test_a_stream_goes_on_when_the_leader_is_killed(session, cluster, admin, topic, tmp_path):
    """
    1. A producer writes all the time, a stream reads.
    2. The leader of partition 0 is killed, and comes back later.
    3. Every acknowledged record is there once.
    """
    admin.create_topic(topic, partitions=2, replication=3)
    query = start(stream(session, cluster, subscribe=topic), tmp_path)
    sent = []
    stop = threading.Event()

    def produce():
        with Producer(cluster.bootstrap) as producer:
            while not stop.is_set():
                for partition in range(2):
                    producer.send(topic, b"%d:%d" % (partition, len(sent)), partition=partition)
                producer.flush()
                sent.append(len(sent))
                stop.wait(0.005)

    writer = threading.Thread(target=produce)
    writer.start()
    try:
        wait_until(query, lambda: len(sent) > 50 and sum_read(query) > 0)
        leader = admin.describe_topic(topic).partitions[0].leader
        cluster.kill(leader)
        before = len(sent)
        wait_until(query, lambda: len(sent) > before + 100)
    finally:
        stop.set()
        writer.join()
        for node in cluster.ids:
            if not cluster.is_running(node):
                cluster.restart(node)
    wait_until(query, ends_at(query, topic, [len(sent)] * 2))
    query.stop()
    assert found(session, tmp_path) == expected(range(2), range(len(sent)))


@pytest.mark.full
@pytest.mark.parametrize("fails", [True, False])
def test_records_lost_to_retention_are_told(session, cluster, admin, topic, tmp_path, fails):
    """
    1. A stream has read 50 records and is stopped.
    2. Retention takes the next ones before it comes back.
    3. It ends with an error that names the range, or goes on with what is left, as it is told.
    """
    config = {"segment_bytes": 4096, "retention_bytes": 8192}
    admin.create_topic(topic, partitions=1, replication=1, config=config)
    send(cluster.bootstrap, topic, 1, range(50))
    options = {"subscribe": topic, "failOnDataLoss": str(fails)}
    query = start(stream(session, cluster, **options), tmp_path, availableNow=True)
    query.awaitTermination(WHOLE_S)
    assert found(session, tmp_path) == expected([0], range(50))

    first = 0
    deadline = time.monotonic() + WHOLE_S
    sent = 50
    while first <= 60:
        with Producer(cluster.bootstrap) as producer:
            for number in range(sent, sent + 100):
                producer.send(topic, b"0:%d" % number + b" " * 200)
            producer.flush()
        sent += 100
        first = admin.describe_topic(topic).partitions[0].start_offset
        assert time.monotonic() < deadline, "retention takes nothing"
        time.sleep(0.2)

    query = start(stream(session, cluster, **options), tmp_path, availableNow=True)
    if fails:
        with pytest.raises(Exception, match=rf"offsets \[50, \d+\) of {topic}/0 are lost"):
            query.awaitTermination(WHOLE_S)
        return
    query.awaitTermination(WHOLE_S)
    numbers = sorted(int(one.split(":")[1]) for one in found(session, tmp_path))
    assert numbers[:50] == list(range(50))
    rest = numbers[50:]
    assert rest == list(range(rest[0], sent))
    assert rest[0] >= first
