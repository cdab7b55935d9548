"""Shell: a table and a picture of dead letters: what died, why, where and when.

Dead letters are records of `{topic}.dlq` whose headers `x-dlq-*` say why they died. The report also
counts letters that were sent back or purged since, as long as retention keeps them.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from raftq.client.common.names import DLQ_HEADER, DLQ_SUFFIX
from raftq.client.spark.pipelines.letter_picture import LetterFigures, draw_letters
from raftq.client.spark.pipelines.outcome import Drawn
from raftq.client.spark.pipelines.picture_file import BUCKETS_MAX, save_picture, too_many
from raftq.client.spark.pipelines.selection import Selection, bucket_of, header_text, read_range

TABLE = "dead-letters"
PICTURE = "dead-letters.png"
ROWS_MAX = 50  # of the summary; reasons are free text
REASONS_MAX = 6  # that get a colour of their own
PLACES_MAX = 8
OTHERS = "(others)"
UNKNOWN = "(unknown)"


@dataclass(frozen=True, slots=True)
class LetterReport:
    """How many letters there are, and the most frequent kinds of them."""

    letters: int
    kinds: int
    """Different topics, groups and reasons; `rows` has the first of them."""
    rows: list[dict[str, Any]]
    table: str
    picture: Drawn


def dead_letter_report(
    spark: SparkSession, chosen: Selection, path: str, picture: str = ""
) -> LetterReport:
    """Writes `path`/dead-letters (Parquet: a row for each bucket of time, topic, group and
    reason) and a picture. The selection names the sources of the letters; none means all topics."""
    table = f"{path}/{TABLE}"
    letters = read_range(spark, _of_letters(chosen), "topic,timestamp,headers")
    _grouped(letters, chosen.bucket_ms).coalesce(1).write.mode("overwrite").parquet(table)
    stored = spark.read.parquet(table)
    kinds = _kinds(stored)
    total = stored.agg(sql.coalesce(sql.sum("letters"), sql.lit(0)).alias("letters")).first()
    rows = kinds.orderBy(sql.desc("letters"), "topic", "group", "reason").limit(ROWS_MAX)
    return LetterReport(
        letters=int(total["letters"]) if total is not None else 0,
        kinds=kinds.count(),
        rows=[row.asDict() for row in rows.collect()],
        table=table,
        picture=_draw(stored, chosen.bucket_ms, path, picture),
    )


def _of_letters(chosen: Selection) -> Selection:
    """The topics of the letters, as a pattern, so that a source without letters is no error."""
    if chosen.topics:
        names = [re.escape(topic.removesuffix(DLQ_SUFFIX)) for topic in chosen.topics]
        pattern = "|".join(names)
    else:
        pattern = chosen.pattern or ".*"
    return replace(chosen, topics=(), pattern=f"(?:{pattern}){re.escape(DLQ_SUFFIX)}")


def _fact(name: str) -> Column:
    return sql.coalesce(header_text(DLQ_HEADER + name), sql.lit(UNKNOWN)).alias(name)


def _grouped(letters: DataFrame, bucket_ms: int) -> DataFrame:
    named = sql.regexp_replace("topic", re.escape(DLQ_SUFFIX) + "$", "")
    facts = letters.select(
        bucket_of("timestamp", bucket_ms),
        "timestamp",
        sql.coalesce(header_text(DLQ_HEADER + "topic"), named).alias("topic"),
        _fact("group"),
        _fact("reason"),
        header_text(DLQ_HEADER + "error").alias("error"),
        header_text(DLQ_HEADER + "attempts").try_cast("int").alias("attempts"),
    )
    grouped = facts.groupBy("bucket", "topic", "group", "reason").agg(
        sql.count("*").alias("letters"),
        sql.max("attempts").alias("attempts_max"),
        sql.min("timestamp").alias("first"),
        sql.max("timestamp").alias("last"),
        sql.max_by("error", "timestamp").alias("last_error"),
    )
    return grouped.orderBy("bucket", "topic", "group", "reason")


def _kinds(stored: DataFrame) -> DataFrame:
    """The table without its buckets."""
    return stored.groupBy("topic", "group", "reason").agg(
        sql.sum("letters").alias("letters"),
        sql.max("attempts_max").alias("attempts_max"),
        sql.min("first").alias("first"),
        sql.max("last").alias("last"),
        sql.max_by("last_error", "last").alias("last_error"),
    )


def _draw(stored: DataFrame, bucket_ms: int, path: str, picture: str) -> Drawn:
    buckets = stored.select("bucket").distinct().count()
    if buckets > BUCKETS_MAX:
        return Drawn(why_not=too_many(buckets))
    reasons = [row["reason"] for row in _largest(stored, "reason", REASONS_MAX)]
    shown = sql.when(sql.col("reason").isin(reasons), sql.col("reason")).otherwise(OTHERS)
    by_time = (
        stored.groupBy(sql.unix_millis("bucket").alias("bucket_ms"), shown.alias("reason"))
        .agg(sql.sum("letters").alias("letters"))
        .collect()
    )
    place = sql.concat_ws(" \u2192 ", "topic", "group").alias("place")  # topic, then group
    places = _largest(stored.select(place, "letters"), "place", PLACES_MAX)
    series: dict[str, dict[int, int]] = {reason: {} for reason in [*reasons, OTHERS]}
    for row in by_time:
        series[row["reason"]][row["bucket_ms"]] = row["letters"]
    figures = LetterFigures(
        bucket_ms,
        {reason: points for reason, points in series.items() if points},
        {row["place"]: row["letters"] for row in places},
    )
    return save_picture(lambda: draw_letters(figures), path, PICTURE, picture)


def _largest(stored: DataFrame, column: str, most: int) -> list[Any]:
    grouped = stored.groupBy(column).agg(sql.sum("letters").alias("letters"))
    return grouped.orderBy(sql.desc("letters"), column).limit(most).collect()
