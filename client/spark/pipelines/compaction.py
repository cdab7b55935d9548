"""Shell: the last record of each key of a topic, as a table."""

from time import perf_counter

from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from raftq.client.spark.pipelines.outcome import Done


def compact(spark: SparkSession, bootstrap: str, topic: str, path: str) -> Done:
    """Writes the last record of each key, as a Parquet table at `path`, which is replaced.

    As in a compacted topic, records without a key are left out, and an empty value deletes its key.
    """
    began = perf_counter()
    read = spark.read.format("raftq").option("bootstrap", bootstrap).option("subscribe", topic)
    rows = read.option("columns", "key,value,partition,offset,timestamp").load()
    last = sql.struct("value", "partition", "offset", "timestamp")
    # Offsets order the records of one partition. A key is in two of them after partitions were
    # added to the topic; then the time decides.
    by_partition = (
        rows.where("key is not null")
        .groupBy("key", "partition")
        .agg(sql.max_by(last, "offset").alias("last"))
    )
    newest = sql.max_by("last", sql.struct("last.timestamp", "last.partition"))
    table = by_partition.groupBy("key").agg(newest.alias("last")).select("key", "last.*")
    table.where(sql.length("value") > 0).write.mode("overwrite").parquet(path)
    return Done(spark.read.parquet(path).count(), 1, perf_counter() - began)
