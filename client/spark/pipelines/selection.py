"""Pure: which records a report is about, and columns that reports have in common."""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from raftq.client.common.errors import InvalidArgument

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Topics, a range of time, and the buckets it is cut into."""

    bootstrap: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    """A regular expression for whole names, instead of topics."""
    since_ms: int | None = None
    until_ms: int | None = None
    bucket_ms: int = HOUR_MS

    def __post_init__(self) -> None:
        if self.topics and self.pattern:
            raise InvalidArgument("a report takes topics or a pattern, and not both")
        if self.bucket_ms < 1:
            raise InvalidArgument(f"a bucket of time is at least 1 ms, not {self.bucket_ms}")


def read_range(spark: SparkSession, chosen: Selection, columns: str) -> DataFrame:
    """The records of a selection with these columns.

    The log is entered at the first record of the range. Its end is a filter: times are those of
    producers, so a late record may stand behind the first one that is out of the range."""
    read = spark.read.format("raftq").option("bootstrap", chosen.bootstrap)
    if chosen.pattern:
        read = read.option("subscribePattern", chosen.pattern)
    else:
        read = read.option("subscribe", ",".join(chosen.topics))
    if chosen.since_ms is not None:
        read = read.option("startingTimestamp", str(chosen.since_ms))
        read = read.option("startingOffsetsByTimestampStrategy", "latest")
    return within(read.option("columns", columns).load(), chosen.since_ms, chosen.until_ms)


def within(rows: DataFrame, since_ms: int | None, until_ms: int | None) -> DataFrame:
    """Rows whose timestamp is in [since, until)."""
    if since_ms is not None:
        rows = rows.where(sql.col("timestamp") >= sql.timestamp_millis(sql.lit(since_ms)))
    if until_ms is not None:
        rows = rows.where(sql.col("timestamp") < sql.timestamp_millis(sql.lit(until_ms)))
    return rows


def bucket_of(column: str, bucket_ms: int) -> Column:
    """The beginning of the bucket, counted from 1970: the same in every time zone."""
    number = sql.floor(sql.unix_millis(column) / sql.lit(bucket_ms))
    return sql.timestamp_millis(number * sql.lit(bucket_ms)).alias("bucket")


def header_text(name: str) -> Column:
    """A header as text; null without it. Bytes that are not text are replaced."""
    found = sql.get(sql.filter("headers", lambda one: one["key"] == name), sql.lit(0))
    return sql.make_valid_utf8(found["value"].cast("string"))
