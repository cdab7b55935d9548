"""Shell: what the Spark figures share: a warm session beside a cluster, rows, and their cost.

Three shares of processor time are separated: the JVM, Spark's Python processes, and the nodes. On a
shared machine they say more than the time does.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raftq.client.common.errors import InternalError
from raftq.client.sync.producer import Producer
from raftq_bench.cluster_runs import ClusterSettings, Line, Target, target, tell
from raftq_bench.processes import Seen, all_processes, below, peak_mb
from raftq_bench.report import Bar, Result
from raftq_bench.runner import (
    BATCH_RECORDS,
    VALUE_BYTES,
    Settings,
    Side,
    Timing,
    endless,
    interleave,
    make_batches,
    make_values,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MASTER = "local[2]"
DRIVER_MEMORY = "2g"
NODES = 3
PARTITIONS = 6
TOPIC_CONFIG: dict[str, int | None] = {"retention_bytes": None}
KEEPING_PAGES = {"storage.page_cache_bytes": "none"}
"""For nodes that are read beside Parquet, which comes from the page cache: by default they give
back pages that are far behind."""
PARTS = ("JVM", "Python", "nodes")

Cpu = tuple[float, float, float]


@dataclass(slots=True)
class Field:
    """A session and a cluster, side by side."""

    spark: "SparkSession"
    target: Target
    directory: Path
    peak_mb: float = 0.0

    def read(self, topic: str, **options: str | int) -> "DataFrame":
        reader = self.spark.read.format("raftq").option("bootstrap", self.target.bootstrap)
        return reader.option("subscribe", topic).options(**options).load()

    def cpu_s(self) -> Cpu:
        """Processor time so far of the JVM, of Spark's Python processes and of the nodes."""
        jvm, workers = spark_processes(below(os.getpid(), all_processes()))
        # Python processes that have ended, as idle ones do, are children of the JVM or of others.
        python_s = sum(one.waited_s for one in jvm)
        python_s += sum(worker.cpu_s + worker.waited_s for worker in workers)
        return sum(one.cpu_s for one in jvm), python_s, self.target.cpu_s() or 0.0

    def worker_peak_mb(self) -> float:
        """The most memory that any of Spark's Python processes has had so far."""
        _, workers = spark_processes(below(os.getpid(), all_processes()))
        self.peak_mb = max(self.peak_mb, *(peak_mb(worker.pid) for worker in workers), 0.0)
        return self.peak_mb


def spark_processes(ours: Sequence[Seen]) -> tuple[list[Seen], list[Seen]]:
    """The JVM, and the Python processes below it."""
    jvm = [our for our in ours if our.name == "java"]
    return jvm, [one for parent in jvm for one in below(parent.pid, ours)]


@contextmanager
def field_of(
    settings: ClusterSettings, node_settings: Mapping[str, str] | None = None
) -> Iterator[Field]:
    """A cluster of three nodes and a session on this machine; both end with it."""
    from raftq.client.spark import local_session  # noqa: PLC0415 - loads PySpark

    with target(settings, NODES, node_settings) as found:
        spark = local_session(
            MASTER,
            "raftq bench",
            {
                "spark.driver.memory": DRIVER_MEMORY,
                "spark.log.level": "OFF",  # errors are raised; a stopped stream raises none
                "spark.sql.warehouse.dir": str(found.directory / "warehouse"),
            },
        )
        try:
            yield Field(spark, found, found.directory)
        finally:
            spark.stop()


def row_count(settings: ClusterSettings, share: int = 1) -> int:
    """The number of rows for the requested size, or a part of it: whole batches, the same number
    in each partition."""
    step = BATCH_RECORDS * PARTITIONS
    size = settings.data_bytes // share
    return max(size // VALUE_BYTES // step, 1) * step


def fill(found: Target, topic: str, count: int) -> None:
    """Records of 1 KiB, the same number in each partition."""
    following = endless(make_batches(make_values()))
    with Producer(found.bootstrap, acks="all") as producer:
        for number in range(count // BATCH_RECORDS):
            producer.send_many(topic, following(), partition=number % PARTITIONS)
        producer.flush()


@dataclass(slots=True)
class Slice:
    """What one slice of a query came to."""

    rows: int
    cpu_s: Cpu


class SparkSide(Side, ABC):
    """Something that Spark does; notes the processor time meanwhile."""

    def __init__(self, found: Field, rest: Callable[[], object] = lambda: None) -> None:
        super().__init__(lambda: 0, rest)
        self._field = found
        self.slices: list[Slice] = []

    def slice(self, seconds: float) -> tuple[int, float]:
        before = self._field.cpu_s()
        rows, count, taken_s = self.run(seconds)
        after = self._field.cpu_s()
        jvm, python, nodes = (now - then for now, then in zip(after, before, strict=True))
        self.slices.append(Slice(rows, (jvm, python, nodes)))
        return count, taken_s

    @abstractmethod
    def run(self, seconds: float) -> tuple[int, int, float]:
        """All rows that were handled, and the rows and the time that count."""

    def cpu_us(self) -> Cpu:
        """Without the first slice, which is not timed either."""
        return cpu_us(self.slices[1:])


class QuerySide(SparkSide):
    """A query that is run repeatedly, always to its end; every answer must be the same."""

    def __init__(
        self,
        found: Field,
        rows: int,
        query: Callable[[], Any],
        rest: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(found, rest)
        self._rows = rows
        self._query = query
        self.answer: Any = None

    def run(self, seconds: float) -> tuple[int, int, float]:
        start = last = time.perf_counter()
        count = 0
        while not count or last - start < seconds:
            self._ask()
            count += self._rows
            last = time.perf_counter()
        return count, count, last - start

    def _ask(self) -> None:
        answer = self._query()
        if self.answer is not None and answer != self.answer:
            raise InternalError(f"a query that answered {self.answer!r} now says {answer!r}")
        self.answer = answer


def cpu_us(slices: Sequence[Slice]) -> Cpu:
    """Microseconds per row of each part, over all slices."""
    rows = max(sum(one.rows for one in slices), 1)
    jvm, python, nodes = (sum(one.cpu_s[part] for one in slices) / rows * 1e6 for part in range(3))
    return jvm, python, nodes


def measure_sides(settings: Settings, sides: Mapping[str, SparkSide]) -> dict[str, Timing]:
    """Runs both sides in turns, after the JVM has compiled what they need."""
    began = time.perf_counter()
    while time.perf_counter() - began < settings.seconds:
        for side in sides.values():
            side.slice(settings.slice_s)
            side.rest()
    for side in sides.values():
        side.slices.clear()
    return interleave(settings, dict(sides))


def same_answer(one: QuerySide, other: QuerySide) -> None:
    """Checks that what was read is what was written; otherwise no figure counts."""
    if one.answer != other.answer:
        raise InternalError(f"RaftQ answers {one.answer!r}, Parquet {other.answer!r}")


def cpu_note(name: str, used: Cpu) -> str:
    parts = ", ".join(f"{part} {us:.2f}" for part, us in zip(PARTS, used, strict=True))
    return f"processor time per row, {name}: {parts}, in all {sum(used):.2f} us"


def spark_result(
    settings: Settings,
    line: Line,
    timings: Mapping[str, Timing],
    unit: str,
    baseline_name: str,
    ours: str = "raftq",
) -> Result:
    """The side `ours` against the side "parquet", in rows/s or MB/s of values."""
    worth = VALUE_BYTES / 1e6 if unit == "MB/s" else 1.0
    return Result(
        figure=line.figure,
        title=line.title,
        unit=unit,
        value=timings[ours].rate * worth,
        measured_s=timings[ours].seconds,
        fsync="interval",
        baseline_name=baseline_name,
        baseline=timings["parquet"].rate * worth,
        bar=line.bar,
        notes=line.notes,
        detail={name: timing.facts() for name, timing in timings.items()},
    ).judge(settings)


def memory_result(settings: Settings, figure: str, found: Field, measured_s: float) -> Result:
    return Result(
        figure=figure,
        title="the most memory that a Python process of Spark has had",
        unit="MB",
        value=found.worker_peak_mb(),
        measured_s=measured_s,
        fsync="interval",
        bar=Bar("value", 500, at_most=True),
        notes=["VmHWM over all queries of this figure; shared libraries count in each process"],
    ).judge(settings)


def progress(what: str, rows: int) -> None:
    tell(f"{what}: {rows:,} rows of {VALUE_BYTES} B, {rows * VALUE_BYTES / 2**30:.2f} GiB")
