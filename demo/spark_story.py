"""Shell: the last part of the demo: Spark reads every topic while a leader is killed.

Spark's counts and sums of each partition are compared with what an ordinary consumer reads. Without
PySpark or Java this part is skipped, and the output says so.
"""

import os
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.client.common.errors import ConfigError, RaftqError, RequestTimeout
from raftq.client.common.names import is_internal
from raftq.client.sync.admin import Admin
from raftq.client.sync.consumer import Consumer
from raftq_demo.checks import Check

WAIT_S = 60.0
JOB_S_MAX = 120.0
LOOK_S = 0.01
MASTER = "local[2]"

Sums = dict[tuple[str, int], tuple[int, int, int]]  # records, bytes, sum of their checksums


@dataclass(slots=True)
class SparkStory:
    """What Spark found, and what is there."""

    expected: Sums = field(default_factory=dict)
    found: Sums = field(default_factory=dict)
    killed: int = 0
    led: int = 0
    read_after_kill: bool = False
    """Whether the job was still reading when the leader was dead."""
    seconds: float = 0.0

    @property
    def records(self) -> int:
        return sum(count for count, _, _ in self.found.values())


def run_spark_story(cluster: LocalCluster, say: Callable[[str], None]) -> SparkStory | None:
    """Returns None if there is no Spark here."""
    try:
        spark = _session()
    except ConfigError as error:
        say(f"11. SKIPPED, Spark reads everything: {error}")
        return None
    try:
        return _read_through_a_kill(spark, cluster, say)
    finally:
        spark.stop()


def _session() -> Any:
    from raftq.client.spark import local_session  # noqa: PLC0415 - an extra, and slow to load

    with _words_of_java():
        return local_session(MASTER, "raftq-demo")


@contextmanager
def _words_of_java() -> Iterator[None]:
    """A process that starts meanwhile writes its output to a file instead of the terminal.

    If it does not start, that output is shown."""
    with tempfile.TemporaryFile() as words:
        before = os.dup(2)
        os.dup2(words.fileno(), 2)
        try:
            yield
        except BaseException:
            words.seek(0)
            os.write(before, words.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def _read_through_a_kill(
    spark: Any, cluster: LocalCluster, say: Callable[[str], None]
) -> SparkStory:
    story = SparkStory(expected=_sums_of_consumer(cluster.bootstrap))
    say(f"11. Spark reads all {len(story.expected)} partitions of all topics")
    story.killed, story.led = _busiest(cluster.bootstrap, story.expected)
    outcome: list[Any] = []
    began = time.perf_counter()
    job = threading.Thread(target=_collect, args=(spark, cluster.bootstrap, outcome), daemon=True)
    job.start()
    tracker = spark.sparkContext.statusTracker()
    while job.is_alive() and not tracker.getActiveStageIds():
        time.sleep(LOOK_S)
    cluster.kill(story.killed)
    story.read_after_kill = job.is_alive()
    say(f"    kill -9 of node {story.killed}, leader of {story.led} of them, while it reads")
    job.join(JOB_S_MAX)
    story.seconds = time.perf_counter() - began
    cluster.restart(story.killed)
    if job.is_alive():
        raise RequestTimeout(f"Spark did not read everything in {JOB_S_MAX:g} s")
    (rows,) = outcome
    if isinstance(rows, BaseException):
        raise RaftqError(f"the Spark job failed: {rows}") from rows
    for row in rows:
        story.found[row["topic"], row["partition"]] = (row["records"], row["bytes"], row["sums"])
    return story


def _collect(spark: Any, bootstrap: str, outcome: list[Any]) -> None:
    """Runs in a thread."""
    try:
        everything = (
            spark.read.format("raftq")
            .option("bootstrap", bootstrap)
            .option("subscribePattern", ".+")
            .option("columns", "topic,partition,value")
            .load()
        )
        rows = everything.selectExpr(
            "topic", "partition", "1 AS one", "length(value) AS size", "crc32(value) AS checksum"
        )
        sums = rows.groupBy("topic", "partition").sum("one", "size", "checksum")
        outcome.append(sums.toDF("topic", "partition", "records", "bytes", "sums").collect())
    except Exception as error:
        outcome.append(error)


def _sums_of_consumer(bootstrap: str) -> Sums:
    """The sums of every topic, as a consumer reads it."""
    with Admin(bootstrap) as admin, Consumer(bootstrap) as consumer:
        ends = {
            (topic, partition.partition): partition.high_watermark or 0
            for topic in admin.list_topics()
            if not is_internal(topic)
            for partition in admin.describe_topic(topic).partitions
        }
        places = [place for place, end in ends.items() if end]
        consumer.assign(places)
        for topic, partition in places:
            consumer.seek(topic, partition, to="earliest")
        sums: Sums = {}
        ends_at = time.perf_counter() + WAIT_S
        while any(consumer.position(*place) < ends[place] for place in places):
            for record in consumer.poll(5000, 1.0):
                at = record.topic, record.partition
                count, size, checksum = sums.get(at, (0, 0, 0))
                checksum += zlib.crc32(record.value)
                sums[at] = count + 1, size + len(record.value), checksum
            if time.perf_counter() > ends_at:
                raise RequestTimeout("not everything can be read back")
    return sums


def _busiest(bootstrap: str, places: Sums) -> tuple[int, int]:
    """The node that leads most of these partitions, and how many."""
    with Admin(bootstrap) as admin:
        topics = {topic for topic, _ in places}
        led = Counter(
            partition.leader
            for topic in topics
            for partition in admin.describe_topic(topic).partitions
            if partition.leader is not None and (topic, partition.partition) in places
        )
    return led.most_common(1)[0]


def judge_spark(story: SparkStory) -> list[Check]:
    wrong = sum(
        story.expected.get(place) != story.found.get(place)
        for place in story.expected.keys() | story.found.keys()
    )
    expected = sum(count for count, _, _ in story.expected.values())
    return [
        Check("Spark: records read across all partitions", str(expected), str(story.records),
              story.records == expected > 0),
        Check("Spark: partitions that differ in count or checksum", "0", str(wrong), not wrong),
        Check("Spark: the leader was killed while the job ran", "yes",
              "yes" if story.read_after_kill else "no", story.read_after_kill),
    ]  # fmt: skip
