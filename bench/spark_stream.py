"""Shell: streams of a topic in Spark: a long backlog, and a trickle.

Micro-batches are timed, from the start of the second to the end of the last full one: the start of
a query is not part of a sustained rate.
"""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from raftq.client.common.errors import InternalError
from raftq.client.sync.producer import Producer
from raftq_bench.cluster_runs import ClusterSettings, Line, quantile
from raftq_bench.report import Bar, Result
from raftq_bench.runner import make_values
from raftq_bench.spark_runs import (
    KEEPING_PAGES,
    PARTITIONS,
    TOPIC_CONFIG,
    Field,
    SparkSide,
    cpu_note,
    field_of,
    fill,
    measure_sides,
    progress,
    row_count,
    spark_result,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

ROWS_S_MIN = 200_000
TRIGGER_ROWS = 500_000
BATCHES_MIN = 4
"""A stream of fewer micro-batches has no middle to be timed."""
TRICKLE_S = 0.01
"""The pause between two records of a trickle."""
TRICKLE_ROWS_S = 100
WARM_BATCHES = 10
"""The first micro-batches of a trickle are not counted: the JVM compiles."""
POLL_S = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch, as in the query's progress."""

    started: float
    seconds: float
    rows: int

    @property
    def ended(self) -> float:
        return self.started + self.seconds


def batch_of(report: Mapping[str, Any]) -> Batch:
    """From the JSON of a StreamingQueryProgress."""
    started = datetime.fromisoformat(report["timestamp"].replace("Z", "+00:00")).timestamp()
    return Batch(started, report["durationMs"]["triggerExecution"] / 1000, report["numInputRows"])


def sustained(batches: Sequence[Batch]) -> tuple[int, float]:
    """Rows and seconds without the first micro-batch, which starts the query, and the last,
    which is incomplete."""
    with_rows = [batch for batch in batches if batch.rows]
    counted = with_rows[1:-1]
    if not counted:
        raise InternalError(f"{len(with_rows)} micro-batches are too few to measure: more data")
    return sum(one.rows for one in counted), counted[-1].ended - counted[0].started


class StreamSide(SparkSide):
    """A stream from the beginning to the present end of a topic, repeatedly."""

    def __init__(self, found: Field, rows: int, load: "Callable[[], DataFrame]") -> None:
        super().__init__(found)
        self._rows = rows
        self._load = load
        self.batches: list[Batch] = []

    def run(self, seconds: float) -> tuple[int, int, float]:
        checkpoint = self._field.directory / "checkpoint"
        query = (
            self._load()
            .selectExpr("crc32(value) AS checksum")
            .writeStream.format("noop")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        shutil.rmtree(checkpoint)
        self.batches = [batch_of(one) for one in query.recentProgress]
        seen = sum(batch.rows for batch in self.batches)
        if seen != self._rows:
            raise InternalError(f"{seen:,} of {self._rows:,} rows came through the stream")
        return self._rows, *sustained(self.batches)


def measure_backlog(settings: ClusterSettings) -> list[Result]:
    rows = row_count(settings)
    trigger = min(TRIGGER_ROWS, rows // BATCHES_MIN)
    with field_of(settings, KEEPING_PAGES) as found:
        topic = found.target.create("stream", PARTITIONS, 3, **TOPIC_CONFIG)
        path = str(found.directory / "parquet")
        progress("writing the topic and the Parquet table", rows)
        fill(found.target, topic, rows)
        # Files of about as many rows as a micro-batch of the topic has.
        in_file = min(trigger, rows // PARTITIONS)
        found.read(topic).write.option("maxRecordsPerFile", in_file).parquet(path)
        schema = found.spark.read.parquet(path).schema

        def from_topic() -> "DataFrame":
            return stream_of(found, topic, maxOffsetsPerTrigger=trigger)

        def from_parquet() -> "DataFrame":
            reader = found.spark.readStream.schema(schema)
            return reader.option("maxFilesPerTrigger", max(trigger // in_file, 1)).parquet(path)

        ours, beside = (StreamSide(found, rows, one) for one in (from_topic, from_parquet))
        timings = measure_sides(settings.base, {"raftq": ours, "parquet": beside})
        line = Line(
            figure="stream",
            title=f"a backlog of {rows / 2**20:.2f} GiB as a stream, {trigger:,} records per "
            "micro-batch, crc32(value)",
            bar=Bar("value", ROWS_S_MIN),
            notes=[
                cpu_note("raftq, start-up included", ours.cpu_us()),
                cpu_note("parquet, start-up included", beside.cpu_us()),
                f"micro-batches of the last run: {len(ours.batches)} and {len(beside.batches)}",
                f"the most memory of a Python process of Spark: {found.worker_peak_mb():.0f} MB",
            ],
        )
        name = "the same rows as a stream of Parquet files, in turns with it"
        return [spark_result(settings.base, line, timings, "records/s", name)]


def stream_of(found: Field, topic: str, **options: str | int) -> "DataFrame":
    reader = found.spark.readStream.format("raftq").option("bootstrap", found.target.bootstrap)
    return reader.option("subscribe", topic).options(startingOffsets="earliest", **options).load()


# A trickle.


def measure_trickle(settings: ClusterSettings) -> list[Result]:
    with field_of(settings) as found:
        topic = found.target.create("trickle", PARTITIONS, 3)
        rate = found.spark.readStream.format("rate").option("rowsPerSecond", TRICKLE_ROWS_S)
        with _trickle(found, topic):
            ours = _watch(found, settings.base.seconds, stream_of(found, topic))
        beside = _watch(found, settings.base.seconds, rate.load())
        times = sorted(our.seconds for our in ours)
        others = sorted(one.seconds for one in beside)
        return [
            Result(
                figure="trickle",
                title=f"a micro-batch at {TRICKLE_ROWS_S} records/s over {PARTITIONS} partitions, "
                "p50",
                unit="ms",
                value=quantile(times, 0.5) * 1000,
                measured_s=sum(times),
                fsync="interval",
                baseline_name="one of Spark's own source of numbers (rate), as many rows/s",
                baseline=quantile(others, 0.5) * 1000,
                notes=[
                    f"p99 {quantile(times, 0.99) * 1000:.0f} ms, of {len(times)} micro-batches; "
                    f"beside it {quantile(others, 0.99) * 1000:.0f} ms, of {len(others)}",
                    "no bar: how long Spark takes for nothing is mostly its own",
                ],
            ).judge(settings.base)
        ]


@contextmanager
def _trickle(found: Field, topic: str) -> "Iterator[None]":
    """Sends one record after the other, with a pause, until the block ends."""
    done = threading.Event()

    def send() -> None:
        (value,) = make_values(1)
        with Producer(found.target.bootstrap) as producer:
            number = 0
            while not done.wait(TRICKLE_S):
                producer.send(topic, value, partition=number % PARTITIONS)
                number += 1

    thread = threading.Thread(target=send, name="trickle")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(found: Field, seconds: float, rows: "DataFrame") -> list[Batch]:
    """The micro-batches of a running query, one after the other, for this long."""
    checkpoint = found.directory / "checkpoint"
    started = rows.selectExpr("hash(value) AS hashed").writeStream.format("noop")
    query = started.option("checkpointLocation", str(checkpoint)).start()
    seen: dict[int, Batch] = {}
    try:
        while not _enough(counted(seen), seconds):
            if query.awaitTermination(POLL_S):  # a query that ended by itself has failed: raises
                raise InternalError("a stream ended that has no end")
            note(query, seen)
    finally:
        query.stop()
        shutil.rmtree(checkpoint, ignore_errors=True)
    return counted(seen)


def note(query: "StreamingQuery", seen: dict[int, Batch]) -> None:
    for report in query.recentProgress:
        if report["numInputRows"]:
            seen[report["batchId"]] = batch_of(report)


def counted(seen: Mapping[int, Batch]) -> list[Batch]:
    return [batch for _, batch in sorted(seen.items())][WARM_BATCHES:]


def _enough(batches: Sequence[Batch], seconds: float) -> bool:
    return sum(batch.seconds for batch in batches) >= seconds
