"""Shell: how long records were on their way: a table and a picture.

A record's own timestamp says when it was written. Its latency is that minus its origin, which is
one of

    header:NAME   a header with the time of the origin
    json:FIELD    a field of its value, such as created_at or $.order.created_at
    topic:NAME    the time of the record upstream with the same key or the same header: the last
                  one that was written before it

A time in a header or field is a whole number of ms since 1970, or a text like 2026-01-31T12:00:00Z.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as sql

from raftq.client.common.errors import InvalidArgument
from raftq.client.spark.pipelines.latency_picture import LatencyFigures, Point, draw_latency
from raftq.client.spark.pipelines.outcome import Drawn
from raftq.client.spark.pipelines.picture_file import BUCKETS_MAX, save_picture, too_many
from raftq.client.spark.pipelines.selection import Selection, bucket_of, header_text, read_range

TABLE = "latency"
PICTURE = "latency.png"
ACCURACY = 10_000  # of percentiles: the rank is right to one in ten thousand
TOPICS_SHOWN = 4
ROWS_MAX = 50
PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}
KINDS: tuple[Literal["header", "json", "topic"], ...] = ("header", "json", "topic")
KEY = "key"
HEADER = "header:"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the time is from which latency counts."""

    kind: Literal["header", "json", "topic"]
    name: str
    match: str = KEY
    """With `topic`: what two related records have in common, "key" or "header:NAME"."""


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """Percentiles by topic over the whole range; by bucket they are in the table."""

    topics: int
    """`rows` has the largest of them."""
    rows: list[dict[str, Any]]
    table: str
    picture: Drawn


def parse_origin(text: str, match: str = KEY) -> Origin:
    """The origin of "header:NAME", "json:FIELD" or "topic:NAME"."""
    if match != KEY and (not match.startswith(HEADER) or match == HEADER):
        raise InvalidArgument(f"records match by key or by header:NAME, not by {match!r}")
    kind, _, name = text.partition(":")
    for known in KINDS:
        if kind == known and name:
            return Origin(known, name, match)
    raise InvalidArgument(f"an origin is header:NAME, json:FIELD or topic:NAME, not {text!r}")


def latency_report(
    spark: SparkSession, chosen: Selection, origin: Origin, path: str, picture: str = ""
) -> LatencyReport:
    """Writes `path`/latency (Parquet: a row for each bucket of time and topic) and a picture."""
    table = f"{path}/{TABLE}"
    latencies = _latencies(spark, chosen, origin)
    totals = _percentiles(latencies, chosen.bucket_ms).persist()
    try:
        by_bucket = totals.where("bucket is not null").orderBy("topic", "bucket")
        by_bucket.coalesce(1).write.mode("overwrite").parquet(table)
        by_topic = totals.where("bucket is null and topic is not null").drop("bucket")
        rows = by_topic.orderBy(sql.desc("records"), "topic").limit(ROWS_MAX).collect()
        topics = by_topic.count()
        figures = _figures(spark.read.parquet(table), rows, topics, chosen.bucket_ms)
        return LatencyReport(
            topics=topics,
            rows=[row.asDict() for row in rows],
            table=table,
            picture=figures
            if isinstance(figures, Drawn)
            else save_picture(lambda: draw_latency(figures), path, PICTURE, picture),
        )
    finally:
        totals.unpersist()


def _latencies(spark: SparkSession, chosen: Selection, origin: Origin) -> DataFrame:
    """One row for each record: topic, timestamp, origin_ms (null if unknown)."""
    if origin.kind == "topic":
        return _since_upstream(spark, chosen, origin)
    if origin.kind == "header":
        rows = read_range(spark, chosen, "topic,timestamp,headers")
        text = header_text(origin.name)
    else:
        rows = read_range(spark, chosen, "topic,timestamp,value")
        field = origin.name if origin.name.startswith("$") else f"$.{origin.name}"
        text = sql.get_json_object(sql.col("value").cast("string"), field)
    return rows.select("topic", "timestamp", _time_ms(text).alias("origin_ms"))


def _time_ms(text: Column) -> Column:
    return sql.coalesce(text.try_cast("bigint"), sql.unix_millis(text.try_cast("timestamp")))


def _since_upstream(spark: SparkSession, chosen: Selection, origin: Origin) -> DataFrame:
    """Each record with the time of the last one upstream that has the same identity.

    Upstream is read from its beginning, because a record of this range may have its origin before
    it."""
    columns = f"topic,timestamp,{'key' if origin.match == KEY else 'headers'}"
    name = origin.match.removeprefix(HEADER)
    identity = sql.col("key") if origin.match == KEY else header_text(name)
    upstream = replace(chosen, topics=(origin.name,), pattern="", since_ms=None)
    begun = read_range(spark, upstream, columns).select(
        sql.lit(None).cast("string").alias("topic"), "timestamp", identity.alias("identity")
    )
    arrived = read_range(spark, chosen, columns).select(
        "topic", "timestamp", identity.alias("identity")
    )
    known = begun.unionByName(arrived).where("identity is not null")
    # At the same instant, upstream comes first: null sorts before a name.
    before = Window.partitionBy("identity").orderBy("timestamp", sql.asc_nulls_first("topic"))
    before = before.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    begun_ms = sql.when(sql.col("topic").isNull(), sql.unix_millis("timestamp"))
    matched = known.withColumn("origin_ms", sql.last(begun_ms, ignorenulls=True).over(before))
    strange = arrived.where("identity is null").withColumn("origin_ms", sql.lit(None))
    both = matched.where("topic is not null").unionByName(strange)
    return both.select("topic", "timestamp", "origin_ms")


def _percentiles(latencies: DataFrame, bucket_ms: int) -> DataFrame:
    """By topic and bucket; a bucket of null stands for all of a topic."""
    taken = sql.unix_millis("timestamp") - sql.col("origin_ms")
    rows = latencies.select("topic", bucket_of("timestamp", bucket_ms), taken.alias("taken"))
    points = sql.array(*map(sql.lit, PERCENTILES.values()))
    grouped = rows.rollup("topic", "bucket").agg(
        sql.count("*").alias("records"),
        sql.count_if(sql.col("taken").isNull()).alias("without_origin"),
        sql.count_if(sql.col("taken") < 0).alias("early"),
        sql.percentile_approx("taken", points, ACCURACY).alias("points"),
        sql.max("taken").alias("max_ms"),
    )
    named = [sql.get("points", sql.lit(at)).alias(name) for at, name in enumerate(PERCENTILES)]
    return grouped.select("topic", "bucket", "records", "without_origin", "early", *named, "max_ms")


def _figures(
    stored: DataFrame, rows: list[Any], topics: int, bucket_ms: int
) -> LatencyFigures | Drawn:
    """What the picture shows, or why there is none."""
    shown = [row["topic"] for row in rows if row["max_ms"] is not None][:TOPICS_SHOWN]
    kept = stored.where(sql.col("topic").isin(shown) & sql.col("max_ms").isNotNull())
    buckets = kept.select("bucket").distinct().count()
    if buckets > BUCKETS_MAX:
        return Drawn(why_not=too_many(buckets))
    series: dict[str, list[Point]] = {topic: [] for topic in shown}
    at = sql.unix_millis("bucket").alias("bucket_ms")
    for row in kept.select("topic", at, *PERCENTILES, "max_ms").orderBy("bucket_ms").collect():
        values = {name: row[name] for name in (*PERCENTILES, "max_ms")}
        series[row["topic"]].append(Point(row["bucket_ms"], values))
    return LatencyFigures(bucket_ms, series, topics - len(shown))
