"""Shell: batch reads of a topic in Spark, beside the same queries on Parquet of the same rows."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raftq_bench.cluster_runs import ClusterSettings, Line
from raftq_bench.report import Bar, Result
from raftq_bench.spark_runs import (
    KEEPING_PAGES,
    PARTITIONS,
    TOPIC_CONFIG,
    Field,
    QuerySide,
    cpu_note,
    field_of,
    fill,
    measure_sides,
    memory_result,
    progress,
    row_count,
    same_answer,
    spark_result,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

READ_MB_MIN = 300
READ_RATIO_MIN = 0.6
GROUP_RATIO_MIN = 0.5
COUNT_ROWS_MIN = 1_000_000
GROUPS = 1000
BESIDE = "spark.read.parquet of the same rows (snappy), in turns with it; both from the page cache"

Query = Callable[["DataFrame"], Any]


def checksum(rows: "DataFrame") -> Any:
    """Reads every byte of every value, so that no metadata can answer."""
    return rows.selectExpr("sum(crc32(value))", "count(*)").collect()


def grouped(rows: "DataFrame") -> Any:
    keyed = rows.selectExpr(f"crc32(value) % {GROUPS} AS k", "length(value) AS size")
    return sorted(keyed.groupBy("k").sum("size").collect())


def counted(rows: "DataFrame") -> Any:
    return rows.count()


class _Reads:
    """A topic and a Parquet table of the same rows."""

    def __init__(self, found: Field, rows: int) -> None:
        self._field = found
        self.rows = rows
        self.topic = found.target.create("read", PARTITIONS, 3, **TOPIC_CONFIG)
        self._path = str(found.directory / "parquet")
        progress("writing the topic and the Parquet table", rows)
        fill(found.target, self.topic, rows)
        found.read(self.topic).write.parquet(self._path)

    def from_topic(self, query: Query, **options: str | int) -> QuerySide:
        return QuerySide(
            self._field, self.rows, lambda: query(self._field.read(self.topic, **options))
        )

    def from_parquet(self, query: Query) -> QuerySide:
        spark = self._field.spark
        return QuerySide(self._field, self.rows, lambda: query(spark.read.parquet(self._path)))


def measure(settings: ClusterSettings) -> list[Result]:
    with field_of(settings, KEEPING_PAGES) as found:
        reads = _Reads(found, row_count(settings))
        results = [
            *_values(settings, reads),
            _groups(settings, reads),
            _count(settings, reads),
        ]
        measured_s = sum(result.measured_s for result in results)
        return [*results, memory_result(settings.base, "read", found, measured_s)]


def _values(settings: ClusterSettings, reads: _Reads) -> list[Result]:
    sides = {
        "value": reads.from_topic(checksum, columns="value"),
        "all columns": reads.from_topic(checksum),
        "parquet": reads.from_parquet(checksum),
    }
    timings = measure_sides(settings.base, sides)
    for name in ("value", "all columns"):
        same_answer(sides[name], sides["parquet"])
    notes = [cpu_note(name, side.cpu_us()) for name, side in sides.items()]
    size = f"{reads.rows / 2**20:.2f} GiB, {PARTITIONS} partitions on 3 nodes"
    lines = [
        ("value", Bar("value", READ_MB_MIN), f"sum(crc32(value)) of {size}, columns=value"),
        ("value", Bar("ratio", READ_RATIO_MIN), "the same: share of Parquet"),
        ("all columns", None, "the same with all columns, most of which Parquet does not read"),
    ]
    results = []
    for side, bar, title in lines:
        line = Line(figure="read", title=title, bar=bar, notes=notes if bar else [])
        results.append(spark_result(settings.base, line, timings, "MB/s", BESIDE, side))
    return results


def _groups(settings: ClusterSettings, reads: _Reads) -> Result:
    sides = {
        "raftq": reads.from_topic(grouped, columns="value"),
        "parquet": reads.from_parquet(grouped),
    }
    timings = measure_sides(settings.base, sides)
    same_answer(sides["raftq"], sides["parquet"])
    line = Line(
        figure="read",
        title=f"group by crc32(value) % {GROUPS}, sum(length(value))",
        bar=Bar("ratio", GROUP_RATIO_MIN),
        notes=[cpu_note(name, side.cpu_us()) for name, side in sides.items()],
    )
    return spark_result(settings.base, line, timings, "MB/s", BESIDE)


def _count(settings: ClusterSettings, reads: _Reads) -> Result:
    sides = {
        "raftq": reads.from_topic(counted, columns="offset"),
        "parquet": reads.from_parquet(counted),
    }
    timings = measure_sides(settings.base, sides)
    same_answer(sides["raftq"], sides["parquet"])
    line = Line(
        figure="read",
        title="count() with columns=offset",
        bar=Bar("value", COUNT_ROWS_MIN),
        notes=[cpu_note("raftq", sides["raftq"].cpu_us())],
    )
    beside = "count() of the Parquet table, which its footers answer"
    return spark_result(settings.base, line, timings, "rows/s", beside)
