"""Writing DataFrames to topics: every column, wrong ones refused, and nothing twice."""

import os
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from raftq.client.producer.accumulator import partition_of
from raftq.client.sync.admin import Admin
from raftq.client.sync.consumer import Consumer

WHOLE_S = 90


def writer(frame, cluster, **options):
    write = frame.write.format("raftq").mode("append").option("bootstrap", cluster.bootstrap)
    for name, value in options.items():
        write = write.option(name, value)
    return write


def everything(cluster, admin, topic):
    """Every record of a topic, partition by partition in order."""
    parts = admin.describe_topic(topic).partitions
    ends = {one.partition: one.high_watermark for one in parts}
    found = {one: [] for one in ends}
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([(topic, one) for one in ends])
        while any(len(found[one]) < end for one, end in ends.items()):
            for record in consumer.poll(5000, timeout=5):
                found[record.partition].append(record)
    return found


def values(records):
    return [record.value for some in records.values() for record in some]


def total(admin, topic):
    return sum(one.high_watermark for one in admin.describe_topic(topic).partitions)


def test_rows_with_every_column_arrive_as_records(session, cluster, admin, topic):
    admin.create_topic(topic, partitions=3, replication=3)
    at = datetime.now(UTC).replace(microsecond=123000) - timedelta(minutes=5)
    rows = [
        ("v1", b"k1", 2, [("h", b"1"), ("i", b"2")], 0, at),
        ("v2", None, 1, None, 4, at + timedelta(seconds=1)),
        ("v3", b"k3", 2, [], None, None),
    ]
    frame = session.createDataFrame(
        rows,
        "value string, key binary, partition int, headers array<struct<key:string,value:binary>>, "
        "priority int, timestamp timestamp",
    ).coalesce(1)
    writer(frame, cluster, topic=topic).save()
    found = everything(cluster, admin, topic)
    assert {one: len(records) for one, records in found.items()} == {0: 0, 1: 1, 2: 2}
    by_value = {record.value: record for some in found.values() for record in some}
    first, second, third = by_value[b"v1"], by_value[b"v2"], by_value[b"v3"]
    assert (first.key, dict(first.headers), first.priority) == (b"k1", {"h": b"1", "i": b"2"}, 0)
    assert first.timestamp == int(at.timestamp() * 1000)
    assert (second.key, dict(second.headers), second.priority) == (None, {}, 4)
    assert (third.key, dict(third.headers), third.priority) == (b"k3", {}, 2)
    assert abs(third.timestamp - time.time() * 1000) < 60_000


@pytest.mark.full
def test_topics_come_from_a_column_and_keys_choose_partitions_as_for_producers(
    session, cluster, admin, topic
):
    for name in ("a", "b"):
        admin.create_topic(f"{topic}-{name}", partitions=3, replication=3)
    rows = [(f"{topic}-{'ab'[n % 2]}", f"k{n % 10}", f"{n}") for n in range(1000)]
    writer(session.createDataFrame(rows, "topic string, key string, value string"), cluster).save()
    for odd, name in enumerate("ab"):
        found = everything(cluster, admin, f"{topic}-{name}")
        wanted = {b"%d" % n for n in range(1000) if n % 2 == odd}
        assert set(values(found)) == wanted
        assert len(values(found)) == 500
        for partition, records in found.items():
            assert all(partition_of(record.key, 3) == partition for record in records)


@pytest.mark.full
def test_records_may_be_due_later(session, cluster, admin, topic):
    admin.create_topic(topic, partitions=1, replication=3)
    later = int(time.time() * 1000) + 3_600_000
    frame = session.createDataFrame(
        [("now", None), ("later", later)], "value string, deliver_at long"
    )
    writer(frame, cluster, topic=topic).save()
    assert values(everything(cluster, admin, topic)) == [b"now"]
    (delayed,) = admin.delayed(topic, values=True)
    assert (delayed.deliver_at, delayed.value) == (later, b"later")


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("other string", "there is no column 'value'"),
        ("value int", "value is int, not binary or string"),
        ("value string, colour string", "there is no column 'colour' in a record"),
        ("value string, headers array<string>", "headers is array<string>"),
    ],
)
def test_a_wrong_schema_is_refused_before_anything_is_written(
    session, cluster, admin, topic, schema, why
):
    admin.create_topic(topic, partitions=1, replication=1)
    frame = session.createDataFrame([], schema)
    with pytest.raises(Exception, match=why):
        writer(frame, cluster, topic=topic).save()
    with pytest.raises(Exception, match="neither an option nor a column 'topic'"):
        writer(session.createDataFrame([], "value string"), cluster).save()
    assert total(admin, topic) == 0


def failing_once(place, bootstrap, topic, rows_before):
    """A step that gives these rows, waits until some are in the topic, and fails the first time."""

    def step(rows):
        from pyspark import TaskContext  # noqa: PLC0415 - where there is none this is skipped

        task = TaskContext.get()
        for seen, row in enumerate(rows):
            yield row
            if task.attemptNumber() == 0 and seen >= rows_before:
                with Admin(bootstrap) as admin:
                    deadline = time.monotonic() + 30
                    while not total(admin, topic) and time.monotonic() < deadline:
                        time.sleep(0.05)
                    failed = place / f"failed-{task.partitionId()}"
                    failed.write_text(str(total(admin, topic)))
                raise RuntimeError("this task fails once")

    return step


@pytest.mark.full
@pytest.mark.parametrize("keyed", [False, True])
def test_a_task_that_fails_once_writes_nothing_twice(
    session, cluster, admin, topic, tmp_path, keyed
):
    admin.create_topic(topic, partitions=3, replication=3)
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    try:
        frame = session.range(0, 6000, 1, 2)
        key = "cast(id % 50 as string)" if keyed else "cast(null as string)"
        frame = frame.selectExpr("rpad(cast(id as string), 300, ' ') as value", f"{key} as key")
        step = failing_once(tmp_path, cluster.bootstrap, topic, 2000)
        frame = session.createDataFrame(frame.rdd.mapPartitions(step), frame.schema)
        writer(frame, cluster, topic=topic, batchRecords="100").save()
    finally:
        session.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    written = [int(one.read_text()) for one in tmp_path.glob("failed-*")]
    assert len(written) == 2
    assert min(written) > 0, "the failing attempts wrote nothing: this proves nothing"
    found = everything(cluster, admin, topic)
    assert sorted(map(int, values(found))) == list(range(6000))
    if keyed:
        for records in found.values():
            for key in {record.key for record in records}:
                own = [int(record.value) for record in records if record.key == key]
                low, high = [n for n in own if n < 3000], [n for n in own if n >= 3000]
                assert low == sorted(low)
                assert high == sorted(high)


@pytest.mark.full
def test_a_batch_write_with_an_id_may_be_run_again(session, cluster, admin, topic):
    admin.create_topic(topic, partitions=2, replication=3)
    frame = session.range(0, 2000, 1, 3).selectExpr("cast(id as string) as value")
    for _ in range(2):
        writer(frame, cluster, topic=topic, writeId="load-7", batchRecords="100").save()
    assert sorted(map(int, values(everything(cluster, admin, topic)))) == list(range(2000))
    writer(frame, cluster, topic=topic).save()
    assert total(admin, topic) == 4000


@pytest.mark.full
def test_a_stream_from_topic_to_topic_is_exactly_once_over_a_repeated_micro_batch(
    session, cluster, admin, topic, tmp_path
):
    """
    1. A stream copies a topic in limited micro-batches and ends.
    2. The last commits are taken out of its checkpoint, as if Spark had died before them.
    3. It runs again: Spark repeats the last micro-batch; the topic gets nothing twice, but what is
       new.
    """
    source, target = f"{topic}-in", f"{topic}-out"
    for name in (source, target):
        admin.create_topic(name, partitions=2, replication=3)
    rows = session.range(0, 3000, 1, 2).selectExpr(
        "cast(id as string) as value", "id % 2 as partition"
    )
    writer(rows, cluster, topic=source).save()

    def copy():
        frame = (
            session.readStream.format("raftq").option("bootstrap", cluster.bootstrap)
            .option("subscribe", source).option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", "1000").load()
        )  # fmt: skip
        query = (
            frame.selectExpr("value", "partition").writeStream.format("raftq")
            .option("bootstrap", cluster.bootstrap).option("topic", target)
            .option("batchRecords", "100").option("checkpointLocation", str(tmp_path / "check"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(WHOLE_S)
        return query

    query = copy()
    assert len(query.recentProgress) >= 3
    commits = sorted(int(one.name) for one in (tmp_path / "check/commits").glob("[0-9]*"))
    for one in (tmp_path / "check/commits").glob(f"*{commits[-1]}*"):
        one.unlink()
    more = session.range(3000, 3100).selectExpr("cast(id as string) as value", "0 as partition")
    writer(more, cluster, topic=source).save()
    query = copy()
    repeated = [row["batchId"] for row in query.recentProgress]
    assert repeated[0] == commits[-1]
    found = everything(cluster, admin, target)
    assert sorted(map(int, values(found))) == list(range(3100))
    copied = [record.value for record in found[0]]
    assert copied == [record.value for record in everything(cluster, admin, source)[0]]


@pytest.mark.full
def test_the_leader_may_be_killed_while_a_job_writes(session, cluster, admin, topic, tmp_path):
    admin.create_topic(topic, partitions=3, replication=3)
    pause = str(tmp_path / "go")

    def step(rows):
        for number, row in enumerate(rows):
            if number == 10_000:
                open(f"{pause}-ready", "w").close()
                deadline = time.monotonic() + 30
                while not os.path.exists(pause) and time.monotonic() < deadline:
                    time.sleep(0.05)
            yield row

    frame = session.range(0, 40_000, 1, 2)
    frame = frame.selectExpr("rpad(cast(id as string), 300, ' ') as value")
    frame = session.createDataFrame(frame.rdd.mapPartitions(step), frame.schema)

    def kill():
        deadline = time.monotonic() + 30
        while not (tmp_path / "go-ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.kill(leader)
        (tmp_path / "go").touch()

    killer = threading.Thread(target=kill)
    leader = admin.describe_topic(topic).partitions[0].leader
    killer.start()
    try:
        writer(frame, cluster, topic=topic, batchRecords="500").save()
    finally:
        killer.join()
        cluster.restart(leader)
    assert sorted(map(int, values(everything(cluster, admin, topic)))) == list(range(40_000))
