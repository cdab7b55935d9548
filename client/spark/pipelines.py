"""Shell: ready-made jobs: archive topics to Parquet, replay an archive, compact a topic by key.

Each is a function of a session, so it runs from the command line (`raftq spark ...`), from a job of
spark-submit, or from a notebook.
"""

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from raftq.client.wire.errors import InvalidArgument, UnknownTopic

PER_TRIGGER = 2_000_000
PROGRESS_KEPT = 100_000  # reports of micro-batches that are summed up


@dataclass(frozen=True, slots=True)
class Done:
    """What a job has done."""

    rows: int
    batches: int = 1


def archive(
    spark: SparkSession,
    bootstrap: str,
    path: str,
    topics: str = "",
    pattern: str = "",
    per_trigger: int = PER_TRIGGER,
) -> Done:
    """Append what is new in the topics to `path`/data, by topic and date, exactly once: where it
    was is in `path`/checkpoint, and one that was interrupted goes on there."""
    if bool(topics) == bool(pattern):
        raise InvalidArgument("an archive needs topics or a pattern, and not both")
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", str(PROGRESS_KEPT))
    read = spark.readStream.format("raftq").option("bootstrap", bootstrap)
    read = read.option("subscribe", topics) if topics else read.option("subscribePattern", pattern)
    read = read.option("startingOffsets", "earliest").option("includeHeaders", "true")
    frame = read.option("maxOffsetsPerTrigger", str(per_trigger)).load()
    query = (
        frame.withColumn("date", sql.to_date("timestamp"))
        .writeStream.format("parquet")
        .partitionBy("topic", "date")
        .option("checkpointLocation", f"{path}/checkpoint")
        .trigger(availableNow=True)
        .start(f"{path}/data")
    )
    query.awaitTermination()
    reports: list[Any] = [one for one in query.recentProgress if one["numInputRows"]]
    return Done(sum(one["numInputRows"] for one in reports), len(reports))


def archived(spark: SparkSession, path: str) -> DataFrame:
    """What an archive holds, with the columns of a topic and `date`."""
    return spark.read.parquet(f"{path}/data")


def replay(  # noqa: PLR0913
    spark: SparkSession,
    bootstrap: str,
    path: str,
    topic: str,
    to: str = "",
    since: str = "",
    until: str = "",
    rate: int = 0,
    write_id: str = "",
) -> Done:
    """Write archived records of `topic`, in [since, until) of time if given, to a topic (its own if
    none is named): same partitions, same order in each. `rate` is records a second; the same
    `write_id` again writes only what is missing."""
    rows = archived(spark, path).where(sql.col("topic") == topic)
    if since:
        rows = rows.where(sql.col("timestamp") >= sql.lit(since).cast("timestamp"))
    if until:
        rows = rows.where(sql.col("timestamp") < sql.lit(until).cast("timestamp"))
    parts = rows.select("partition").distinct().count()
    count = rows.count()
    if not count:
        raise UnknownTopic(f"{path} holds no records of topic {topic!r} in this range")
    # By hash, not by range: ranges come from a sample, and a repetition must have the same tasks.
    rows = rows.repartition(parts, "partition").sortWithinPartitions("partition", "offset")
    write = (
        rows.select("value", "key", "partition", "headers", "priority", "timestamp")
        .write.format("raftq").mode("append")
        .option("bootstrap", bootstrap).option("topic", to or topic)
    )  # fmt: skip
    if rate:
        write = write.option("recordsPerSecond", str(max(rate // parts, 1)))
    if write_id:
        write = write.option("writeId", write_id)
    write.save()
    return Done(count)


def compact(spark: SparkSession, bootstrap: str, topic: str, path: str) -> Done:
    """The last record of each key, as a Parquet table at `path`, which is replaced."""
    read = spark.read.format("raftq").option("bootstrap", bootstrap).option("subscribe", topic)
    rows = read.option("columns", "key,value,partition,offset,timestamp").load()
    last = sql.max_by(sql.struct("value", "partition", "offset", "timestamp"), "offset")
    table = rows.where("key is not null").groupBy("key").agg(last.alias("last"))
    table.select("key", "last.*").write.mode("overwrite").parquet(path)
    return Done(spark.read.parquet(path).count())
