"""Shell: topics to Parquet, by topic and date, exactly once.

An archive is a stream that ends when it has read what was there at its start. Its position is in
its checkpoint, and the log that Spark keeps beside the files says which of them count. So an
archive that was killed repeats its unfinished micro-batch, and the files of that batch do not
count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import DateType

from raftq.client.common.errors import InvalidArgument
from raftq.client.spark.options import COLUMNS, HEADERS
from raftq.client.spark.pipelines.outcome import Done
from raftq.client.spark.schema import read_schema

PER_TRIGGER = 2_000_000
LOOK_S = 1  # between two looks at how far the stream is
DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True)
class ArchiveProgress:
    """A micro-batch is safe."""

    batch: int
    """Its number in the life of the archive, from 0 on."""
    rows: int
    rows_total: int
    """Since this run began, like `seconds`."""
    seconds: float

    @property
    def rate(self) -> float:
        """Records a second, over this run."""
        return self.rows_total / self.seconds if self.seconds > 0 else 0.0


Tell = Callable[[ArchiveProgress], None]


def archive(  # noqa: PLR0913 - a public API
    spark: SparkSession,
    bootstrap: str,
    path: str,
    topics: str = "",
    pattern: str = "",
    per_trigger: int = PER_TRIGGER,
    tell: Tell | None = None,
    skip_lost: bool = False,
) -> Done:
    """Appends what is new in the topics to `path`/data, by topic and date, exactly once.

    Its position is in `path`/checkpoint, and an interrupted archive continues there. `tell` is
    called after each micro-batch of at most `per_trigger` records. Records that retention removed
    before they were archived are an error, or with `skip_lost` a gap in the offsets."""
    if bool(topics) == bool(pattern):
        raise InvalidArgument("an archive needs topics or a pattern, and not both")
    read = spark.readStream.format("raftq").option("bootstrap", bootstrap)
    read = read.option("subscribe", topics) if topics else read.option("subscribePattern", pattern)
    read = read.option("startingOffsets", "earliest").option("includeHeaders", "true")
    read = read.option("failOnDataLoss", str(not skip_lost))
    frame = read.option("maxOffsetsPerTrigger", str(per_trigger)).load()
    watch = _Watch(tell)
    query = (
        frame.withColumn("date", utc_date("timestamp"))
        .writeStream.format("parquet")
        .partitionBy("topic", "date")
        .option("checkpointLocation", f"{path}/checkpoint")
        .trigger(availableNow=True)
        .start(f"{path}/data")
    )
    try:
        while not query.awaitTermination(LOOK_S):
            watch.look(query)
    finally:
        query.stop()
    return watch.finish(query)


def archived(spark: SparkSession, path: str) -> DataFrame:
    """The content of an archive, with the columns of a topic and `date`.

    The schema is given, because Spark would read a topic that is named 007 as the number 7."""
    schema = read_schema([*COLUMNS, HEADERS]).add("date", DateType())
    return spark.read.schema(schema).parquet(f"{path}/data")


def utc_date(column: str) -> Column:
    """The day of a timestamp in UTC, whatever the time zone of the session: folders must not
    depend on who runs the archive."""
    days = sql.floor(sql.unix_micros(column) / sql.lit(DAY_US)).cast("int")
    return sql.date_from_unix_date(days)


class _Watch:
    """Sums up the micro-batches of a run as they end."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self._began = perf_counter()
        self._seen = -1
        self._rows = 0
        self._batches = 0

    def look(self, query: Any) -> None:
        for progress in query.recentProgress:  # Spark keeps the last hundred
            if progress["batchId"] <= self._seen or not progress["numInputRows"]:
                continue
            self._seen = progress["batchId"]
            self._rows += progress["numInputRows"]
            self._batches += 1
            if self._tell is not None:
                seconds = perf_counter() - self._began
                self._tell(
                    ArchiveProgress(self._seen, progress["numInputRows"], self._rows, seconds)
                )

    def finish(self, query: Any) -> Done:
        self.look(query)
        return Done(self._rows, self._batches, perf_counter() - self._began)
