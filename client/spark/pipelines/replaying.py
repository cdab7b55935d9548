"""Shell: writes an archive back to a topic, record by record as it was.

Every record goes to its former partition, in the order of its offset, with its key, headers, lane
and time. How rows are spread over tasks and cut into batches depends only on the archive, the range
and the rate, never on the machine: so a repetition under the same id is recognised.
"""

from dataclasses import dataclass
from time import perf_counter

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from raftq.client.common.errors import UnknownTopic
from raftq.client.spark.pipelines.archiving import archived
from raftq.client.spark.pipelines.outcome import Done
from raftq.client.spark.pipelines.selection import within

BATCHES_A_SECOND = 10  # with a rate: smaller batches, so that it is even
BATCH_RECORDS_MAX = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What is replayed, and how."""

    topic: str
    to: str = ""
    """Another topic to write to; "" means its own."""
    since_ms: int | None = None
    until_ms: int | None = None
    rate: int = 0
    """Records a second at most; 0 means without a limit."""
    write_id: str = ""
    """The same replay again under the same id writes only what is missing."""

    @property
    def target(self) -> str:
        return self.to or self.topic


def replay(spark: SparkSession, bootstrap: str, path: str, wanted: Replay) -> Done:
    """Writes archived records to a topic: same partitions, same order in each."""
    began = perf_counter()
    rows = archived(spark, path).where(sql.col("topic") == wanted.topic)
    rows = within(rows, wanted.since_ms, wanted.until_ms)
    seen = rows.agg(
        sql.count("*").alias("rows"),
        sql.max("partition").alias("last"),
        sql.count_distinct("partition").alias("partitions"),
    ).first()
    if seen is None or not seen["rows"]:
        raise UnknownTopic(f"{path} holds no records of topic {wanted.topic!r} in this range")
    # A task per partition. Not by ranges: those come from a sample, and a repetition must have the
    # same tasks. Offset first, so that a task would go through several partitions side by side.
    rows = rows.repartitionById(seen["last"] + 1, sql.col("partition"))
    _write(spark, rows.sortWithinPartitions("offset"), bootstrap, wanted, seen["partitions"])
    return Done(seen["rows"], 1, perf_counter() - began)


def _write(
    spark: SparkSession, rows: DataFrame, bootstrap: str, wanted: Replay, partitions: int
) -> None:
    write = (
        rows.select("value", "key", "partition", "headers", "priority", "timestamp")
        .write.format("raftq").mode("append")
        .option("bootstrap", bootstrap).option("topic", wanted.target)
    )  # fmt: skip
    if wanted.rate:
        share = max(wanted.rate // _at_a_time(spark, partitions), 1)
        batch = min(max(wanted.rate // BATCHES_A_SECOND, 1), BATCH_RECORDS_MAX)
        write = write.option("recordsPerSecond", str(share)).option("batchRecords", str(batch))
    if wanted.write_id:
        write = write.option("writeId", wanted.write_id)
    write.save()


def _at_a_time(spark: SparkSession, partitions: int) -> int:
    """How many tasks may run at a time and share the rate.

    A cluster may get more executors while the job runs: there it is all of them, so that the rate
    is never exceeded."""
    context = spark.sparkContext
    local = (context.master or "").startswith("local")
    return min(partitions, context.defaultParallelism) if local else partitions
