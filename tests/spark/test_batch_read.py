"""Batch reads of real topics by a real Spark: what, from where to where, and through failures."""

import json
import os
import threading
import time

import pytest

from raftq.client.sync.producer import Producer

START_MS = int(time.time()) * 1000 - 3_600_000  # an hour ago: retention keeps it


def fill(bootstrap, topic, partitions, count, start_ms=None):
    """`count` records per partition: value "partition:number", key, times a second apart."""
    with Producer(bootstrap) as producer:
        for number in range(count):
            for partition in range(partitions):
                at = None if start_ms is None else start_ms + number * 1000
                producer.send(
                    topic, b"%d:%d" % (partition, number), key=b"k%d" % (number % 7),
                    partition=partition, timestamp=at, headers={"n": b"%d" % number},
                )  # fmt: skip
        producer.flush()


def reader(session, cluster, **options):
    read = session.read.format("raftq").option("bootstrap", cluster.bootstrap)
    for name, value in options.items():
        read = read.option(name, value)
    return read


def values(frame):
    return sorted(bytes(row.value).decode() for row in frame.select("value").collect())


def expected(partitions, numbers):
    return sorted(f"{one}:{number}" for one in partitions for number in numbers)


def test_a_topic_is_read_whole_with_every_column(session, cluster, admin, topic):
    admin.create_topic(topic, partitions=3, replication=3)
    fill(cluster.bootstrap, topic, 3, 500, start_ms=START_MS)
    frame = reader(session, cluster, subscribe=topic, includeHeaders="true").load()
    assert frame.columns == [
        "key", "value", "topic", "partition", "offset", "timestamp", "priority", "headers"
    ]  # fmt: skip
    assert frame.count() == 1500
    assert values(frame) == expected(range(3), range(500))
    row = frame.where("partition = 1 and offset = 42").collect()[0]
    assert (bytes(row.key), bytes(row.value), row.topic) == (b"k0", b"1:42", topic)
    assert (row.priority, row.timestamp.timestamp()) == (2, START_MS / 1000 + 42)
    assert [(one.key, bytes(one.value)) for one in row.headers] == [("n", b"42")]


def test_offsets_partitions_and_columns_are_chosen_by_options(session, cluster, admin, topic):
    admin.create_topic(topic, partitions=3, replication=3)
    fill(cluster.bootstrap, topic, 3, 300)
    starts = json.dumps({topic: {"0": 10, "1": -2, "2": 290}})
    ends = json.dumps({topic: {"0": 20, "1": 5, "2": -1}})
    frame = reader(
        session, cluster, subscribe=topic, startingOffsets=starts, endingOffsets=ends,
        columns="offset,value",
    ).load()  # fmt: skip
    assert frame.columns == ["offset", "value"]
    wanted = expected([0], range(10, 20)) + expected([1], range(5)) + expected([2], range(290, 300))
    assert values(frame) == sorted(wanted)

    one = reader(session, cluster, assign=json.dumps({topic: [2]}), columns="partition").load()
    assert [row.asDict() for row in one.distinct().collect()] == [{"partition": 2}]
    assert one.count() == 300
    some = reader(session, cluster, subscribe=topic, partitions="0,2").load()
    assert some.count() == 600


@pytest.mark.full
def test_more_tasks_than_partitions_read_each_record_once(session, cluster, admin, topic):
    admin.create_topic(topic, partitions=2, replication=3)
    fill(cluster.bootstrap, topic, 2, 1000)
    frame = reader(session, cluster, subscribe=topic, minPartitions="7").load()
    assert frame.rdd.getNumPartitions() >= 7
    assert values(frame) == expected(range(2), range(1000))
    frame = reader(session, cluster, subscribe=topic, maxRecordsPerPartition="300").load()
    assert frame.rdd.getNumPartitions() == 8
    assert values(frame) == expected(range(2), range(1000))


@pytest.mark.full
def test_a_range_of_time_is_read(session, cluster, admin, topic):
    admin.create_topic(topic, partitions=2, replication=3)
    start = START_MS
    with Producer(cluster.bootstrap) as producer:  # one batch per record: times are looked up by it
        for number in range(60):
            for partition in range(2):
                value = b"%d:%d" % (partition, number)
                producer.send(topic, value, partition=partition, timestamp=start + number * 1000)
            producer.flush()
    ranges = {"startingTimestamp": str(start + 20_000), "endingTimestamp": str(start + 30_000)}
    frame = reader(session, cluster, subscribe=topic, **ranges).load()
    assert values(frame) == expected(range(2), range(20, 30))
    exact = json.dumps({topic: {"0": start + 50_000, "1": start + 59_000}})
    frame = reader(session, cluster, subscribe=topic, startingOffsetsByTimestamp=exact).load()
    assert values(frame) == sorted(expected([0], range(50, 60)) + expected([1], [59]))

    late = reader(session, cluster, subscribe=topic, startingTimestamp=str(start + 600_000))
    with pytest.raises(Exception, match="has no record at or after"):
        late.load().count()
    assert late.option("startingOffsetsByTimestampStrategy", "latest").load().count() == 0


@pytest.mark.full
def test_a_pattern_and_new_partitions_are_found_by_the_next_read(session, cluster, admin, topic):
    for name in (f"{topic}-a", f"{topic}-b"):
        admin.create_topic(name, partitions=1, replication=3)
        fill(cluster.bootstrap, name, 1, 100)
    pattern = f"{topic}-[ab]"
    read = reader(session, cluster, subscribePattern=pattern)
    assert read.load().count() == 200
    admin.add_partitions(f"{topic}-b", 3)
    fill(cluster.bootstrap, f"{topic}-b", 3, 50)
    found = {
        (row.topic[-1], row.partition): row["count"]
        for row in read.load().groupBy("topic", "partition").count().collect()
    }
    assert found == {("a", 0): 100, ("b", 0): 150, ("b", 1): 50, ("b", 2): 50}


@pytest.mark.full
def test_filters_on_one_frame_do_not_change_what_it_holds(session, cluster, admin, topic):
    """A source that narrows its plan by the first filter would answer the second with its rows."""
    admin.create_topic(topic, partitions=2, replication=3)
    fill(cluster.bootstrap, topic, 2, 100)
    frame = reader(session, cluster, subscribe=topic).load()
    assert frame.where("partition = 1").count() == 100
    assert frame.count() == 200
    both = frame.where("partition = 0").union(frame.where("partition = 1 and offset < 10"))
    assert both.count() == 110


@pytest.mark.full
def test_a_topic_without_records_is_an_empty_frame(session, cluster, admin, topic):
    admin.create_topic(topic, partitions=2, replication=3)
    assert reader(session, cluster, subscribe=topic).load().collect() == []


def test_wrong_options_are_refused_all_at_once(session, cluster):
    wrong = reader(session, cluster, startingOffset="earliest", minPartitions="many")
    with pytest.raises(Exception) as caught:
        wrong.load().count()
    text = str(caught.value)
    assert "did you mean startingOffsets?" in text
    assert "minPartitions is a whole number" in text
    assert "one of subscribe, subscribePattern and assign is needed" in text


def test_a_topic_that_is_not_there_is_named(session, cluster):
    with pytest.raises(Exception, match="no topic is named 'nothing-here'"):
        reader(session, cluster, subscribe="nothing-here").load().count()


@pytest.mark.full
def test_the_leader_may_be_killed_while_a_job_reads(session, cluster, admin, topic):
    """
    1. A job reads three partitions in small fetches and stops after its first rows.
    2. The leader of partition 0 is killed; the job goes on.
    3. It ends well, with every record once.
    """
    admin.create_topic(topic, partitions=3, replication=3)
    pad = b" " * 2000
    with Producer(cluster.bootstrap) as producer:
        for number in range(4000):
            value = b"%d" % number + pad
            producer.send(topic, value, partition=number % 3)
        producer.flush()
    leader = admin.describe_topic(topic).partitions[0].leader
    marks = cluster.files.directory + f"/{topic}"

    def step(rows):
        for number, row in enumerate(rows):
            if number == 50:
                open(f"{marks}-ready", "w").close()
                deadline = time.monotonic() + 30
                while not os.path.exists(f"{marks}-killed") and time.monotonic() < deadline:
                    time.sleep(0.05)
            yield int(row.value)

    def kill():
        deadline = time.monotonic() + 30
        while not os.path.exists(f"{marks}-ready") and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.kill(leader)
        open(f"{marks}-killed", "w").close()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        read = reader(session, cluster, subscribe=topic, fetchBytes="65536", batchBytes="65536")
        found = read.load().rdd.mapPartitions(step).collect()
    finally:
        killer.join()
        cluster.restart(leader)
    assert sorted(found) == list(range(4000))
