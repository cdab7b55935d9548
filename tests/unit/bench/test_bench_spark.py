"""The Spark figures: their arguments, what is timed of a stream, and whose processor time it is."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raftq.client.common.errors import ConfigError, InternalError
from raftq.client.spark import find_java
from raftq_bench.__main__ import SUITES, main
from raftq_bench.processes import Seen, all_processes, below, parse_stat, peak_mb
from raftq_bench.runner import GIB
from raftq_bench.spark_read import measure as measure_read
from raftq_bench.spark_runs import Slice, cpu_us, row_count, spark_processes
from raftq_bench.spark_stream import Batch, batch_of, sustained
from raftq_bench.spark_write import write_source
from raftq_bench.suite import parse

SPARK = SUITES["spark"]


def test_the_figures_are_listed_without_spark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spark", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(figure in out for figure in SPARK.figures)
    assert SPARK.figures["read"][0] is measure_read


def test_a_size_can_be_chosen_where_a_suite_takes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(SPARK, []).settings.data_bytes == 4 * GIB
    assert parse(SPARK, ["--size", "0.5"]).settings.data_bytes == GIB // 2
    assert parse(SPARK, ["--quick"]).settings.data_bytes < GIB // 32
    for wrong in ("0", "-1", "much"):
        with pytest.raises(SystemExit):
            parse(SPARK, ["--size", wrong])
    with pytest.raises(SystemExit):
        parse(SUITES["queue"], ["--size", "1"])
    assert "--size" in capsys.readouterr().err


def test_every_partition_gets_as_many_rows() -> None:
    rows = row_count(parse(SPARK, []).settings)
    assert rows % 6_000 == 0
    assert 4 * GIB - 6_000 * 1024 <= rows * 1024 <= 4 * GIB
    assert row_count(parse(SPARK, ["--size", "0.001"]).settings, 4) == 6_000


def told(second: int, ms: int, rows: int) -> dict[str, Any]:
    return {
        "timestamp": f"2026-01-01T00:00:{second:02}.500Z",
        "durationMs": {"triggerExecution": ms},
        "numInputRows": rows,
    }


def test_a_sustained_rate_leaves_out_the_start_and_the_rest() -> None:
    batches = [
        batch_of(one)
        for one in (
            told(0, 9_000, 100),  # starts the query up
            told(10, 1_000, 100),
            told(12, 1_500, 100),  # it was idle for a second, which counts
            told(14, 10, 0),
            told(15, 100, 7),  # what was left
        )
    ]
    rows, seconds = sustained(batches)
    assert rows == 200
    assert seconds == pytest.approx(3.5)


def test_a_stream_that_is_too_short_gives_no_figure() -> None:
    with pytest.raises(InternalError, match="too few"):
        sustained([Batch(0, 1, 5), Batch(1, 1, 5), Batch(2, 1, 0)])


def test_a_process_is_told_by_the_kernel() -> None:
    fields = ["S", "41", *["0"] * 9, "150", "50", "200", "100", *["0"] * 30]
    seen = parse_stat(f"42 (a (java) b) {' '.join(fields)}")
    assert (seen.pid, seen.parent, seen.name) == (42, 41, "a (java) b")
    assert (seen.cpu_s, seen.waited_s) == pytest.approx((2.0, 3.0))


def test_this_process_is_found_and_has_memory() -> None:
    (own,) = [one for one in all_processes() if one.pid == int(Path("/proc/self").readlink().name)]
    assert own.cpu_s > 0
    assert peak_mb(own.pid) > 10
    assert peak_mb(1 << 30) == 0


def test_the_python_processes_of_spark_are_those_below_its_jvm() -> None:
    every = [
        Seen(2, 1, "java", 1.0),
        Seen(3, 2, "python", 2.0),
        Seen(4, 3, "python", 3.0),
        Seen(5, 1, "python", 9.0),  # a node
        Seen(6, 99, "java", 9.0),  # somebody else's
    ]
    jvm, workers = spark_processes(below(1, every))
    assert [one.pid for one in jvm] == [2]
    assert sorted(one.pid for one in workers) == [3, 4]


def test_processor_time_is_per_row_over_all_slices() -> None:
    used = cpu_us([Slice(1_000_000, (1.0, 2.0, 0.0)), Slice(3_000_000, (3.0, 2.0, 4.0))])
    assert used == pytest.approx((1.0, 1.0, 1.0))
    assert cpu_us([]) == (0.0, 0.0, 0.0)


def test_the_table_that_is_copied_has_as_many_rows_as_it_was_asked_for(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_source(tmp_path / "table", 6_001)
    files = sorted((tmp_path / "table").iterdir())
    counts = [parquet.ParquetFile(one).metadata.num_rows for one in files]
    assert counts == [1501, 1500, 1500, 1500]


@pytest.mark.full
@pytest.mark.spark
def test_a_write_is_measured_beside_a_cluster_of_its_own(tmp_path: Path) -> None:
    """In a process of its own: a figure ends its session, and tests here may share one."""
    try:
        importlib.import_module("pyspark")
        find_java()
    except (ConfigError, ImportError) as error:
        pytest.skip(f"NO SPARK HERE: {error}")
    command = [sys.executable, "-m", "raftq_bench", "spark", "write", "--quick"]
    options = ["--seconds", "0.1", "--no-fail", "--format", "json", "--dir", str(tmp_path)]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True, timeout=400)
    (result,) = json.loads(done.stdout)["results"]
    assert result["value"] > 0
    assert result["ratio"] == pytest.approx(result["value"] / result["baseline"])
    assert [path.name for path in tmp_path.iterdir()] == ["spark.json"]
