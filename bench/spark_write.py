"""Shell: rows written to a topic from Spark, beside the same rows written to Parquet."""

import os
import shutil
from pathlib import Path

from raftq.client.common.errors import InternalError
from raftq.client.sync.consumer import Consumer
from raftq_bench.cluster_runs import ClusterSettings, Line
from raftq_bench.report import Bar, Result
from raftq_bench.runner import endless, make_batches, make_values
from raftq_bench.spark_runs import (
    PARTITIONS,
    Field,
    QuerySide,
    cpu_note,
    field_of,
    measure_sides,
    progress,
    row_count,
    spark_result,
)

ROWS_S_MIN = 100_000
SHARE = 4
FILES = 4
"""Files of the table that is copied: two for each task."""
BESIDE = "the same rows written to Parquet (snappy, one copy), in turns with it"


def write_source(directory: Path, rows: int) -> None:
    """A Parquet table of 1 KiB values; no dictionary, as values hardly repeat in real topics."""
    import pyarrow as pa  # noqa: PLC0415 - comes with raftq[spark]
    import pyarrow.parquet as parquet  # noqa: PLC0415

    directory.mkdir(parents=True)
    schema = pa.schema([pa.field("value", pa.binary())])
    following = endless(make_batches(make_values()))
    for number in range(FILES):
        share = rows // FILES + (number < rows % FILES)
        with parquet.ParquetWriter(
            str(directory / f"{number}.parquet"), schema, use_dictionary=False
        ) as writer:
            while share > 0:
                values = following()[:share]
                writer.write_batch(pa.record_batch([pa.array(values, pa.binary())], schema=schema))
                share -= len(values)


class _Writes:
    def __init__(self, found: Field, rows: int) -> None:
        self._field = found
        self.rows = rows
        self.topic = found.target.create("write", PARTITIONS, 3)
        self._source = found.directory / "source"
        self._copy = found.directory / "copy"
        self._written = 0
        progress("writing the table that is copied", rows)
        write_source(self._source, rows)

    def to_topic(self) -> None:
        self._written += self.rows
        (
            self._field.spark.read.parquet(str(self._source))
            .write.format("raftq")
            .mode("append")
            .option("bootstrap", self._field.target.bootstrap)
            .option("topic", self.topic)
            .save()
        )

    def to_parquet(self) -> None:
        self._field.spark.read.parquet(str(self._source)).write.parquet(str(self._copy))

    def check(self) -> None:
        """Every row is in the topic, once."""
        with Consumer(self._field.target.bootstrap) as consumer:
            keys = [(self.topic, number) for number in range(PARTITIONS)]
            consumer.assign(keys)
            ends = []
            for key in keys:
                consumer.seek(*key, to="latest")
                ends.append(consumer.position(*key))
        if sum(ends) != self._written:
            raise InternalError(f"{self._written:,} rows were written, {sum(ends):,} are there")

    def rest(self) -> None:
        shutil.rmtree(self._copy, ignore_errors=True)
        os.sync()


class _OneCopy(QuerySide):
    """A slice is one write, and its target must be empty."""

    def run(self, seconds: float) -> tuple[int, int, float]:
        return super().run(0.0)


def measure(settings: ClusterSettings) -> list[Result]:
    with field_of(settings) as found:
        writes = _Writes(found, row_count(settings, SHARE))
        sides = {
            "raftq": _OneCopy(found, writes.rows, writes.to_topic, writes.rest),
            "parquet": _OneCopy(found, writes.rows, writes.to_parquet, writes.rest),
        }
        timings = measure_sides(settings.base, sides)
        writes.check()
        line = Line(
            figure="write",
            title=f"a Parquet table of {writes.rows / 2**20:.2f} GiB copied to a topic, "
            f"{PARTITIONS} partitions on 3 nodes, acks=all",
            bar=Bar("value", ROWS_S_MIN),
            notes=[
                *(cpu_note(name, side.cpu_us()) for name, side in sides.items()),
                f"the most memory of a Python process of Spark: {found.worker_peak_mb():.0f} MB",
            ],
        )
        return [spark_result(settings.base, line, timings, "rows/s", BESIDE)]
