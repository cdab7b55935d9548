"""The ready-made jobs, end to end."""

import pytest

from raftq.client.blocking import Consumer, Producer


def records(cluster, admin, topic):
    parts = admin.describe_topic(topic).partitions
    ends = {one.partition: one.high_watermark for one in parts}
    found = {one: [] for one in ends}
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([(topic, one) for one in ends])
        while any(len(found[one]) < end for one, end in ends.items()):
            for record in consumer.poll(5000, timeout=5):
                row = (record.value, record.key, dict(record.headers), record.timestamp)
                found[record.partition].append((*row, record.priority))
    return found


def send(bootstrap, topic, numbers):
    with Producer(bootstrap) as producer:
        for number in numbers:
            producer.send(
                topic, b"v%d" % number, key=b"k%d" % (number % 10), headers={"n": b"%d" % number},
                partition=number % 2,
            )  # fmt: skip
        producer.flush()


def test_an_archive_is_incremental_and_its_replay_gives_the_same_records_once(
    session, cluster, admin, topic, tmp_path
):
    """
    1. A topic is archived, gets more records, and is archived again: only those are added.
    2. The archive is replayed to another topic, twice under one id.
    3. That topic holds the same records, partition by partition in the same order.
    """
    from raftq.client.spark import pipelines  # noqa: PLC0415 - where there is none this is skipped

    for name in (topic, f"{topic}-copy"):
        admin.create_topic(name, partitions=2, replication=3)
    place = str(tmp_path)
    send(cluster.bootstrap, topic, range(500))
    assert pipelines.archive(session, cluster.bootstrap, place, topic).rows == 500
    send(cluster.bootstrap, topic, range(500, 700))
    assert pipelines.archive(session, cluster.bootstrap, place, topic).rows == 200
    assert pipelines.archived(session, place).count() == 700
    for _ in range(2):
        done = pipelines.replay(
            session, cluster.bootstrap, place, topic, f"{topic}-copy", write_id=topic
        )
        assert done.rows == 700
    assert records(cluster, admin, f"{topic}-copy") == records(cluster, admin, topic)
    with pytest.raises(Exception, match="holds no records"):
        pipelines.replay(session, cluster.bootstrap, place, topic, until="2001-01-01 00:00:00")


def test_compaction_keeps_the_last_record_of_each_key(session, cluster, admin, topic, tmp_path):
    from raftq.client.spark import pipelines  # noqa: PLC0415

    admin.create_topic(topic, partitions=2, replication=3)
    send(cluster.bootstrap, topic, range(100))
    assert pipelines.compact(session, cluster.bootstrap, topic, str(tmp_path / "t")).rows == 10
    rows = session.read.parquet(str(tmp_path / "t")).collect()
    found = {bytes(row.key): bytes(row.value) for row in rows}
    assert found == {b"k%d" % n: b"v%d" % (90 + n) for n in range(10)}
