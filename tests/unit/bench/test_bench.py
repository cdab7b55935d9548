"""The benchmarks run, tell everything about themselves, and never measure for a blink."""

import json
from pathlib import Path
from typing import Any

import pytest

from raftq_bench.__main__ import FIGURES, main, parse
from raftq_bench.report import Bar, Result
from raftq_bench.runner import SECONDS_MIN, Settings, Side, interleave

CHEAP = ["append", "enqueue-batch", "enqueue", "dequeue", "group-commit"]
SECONDS = 0.08
CONDITIONS = {
    "cores", "directory", "filesystem", "kernel", "load_at_start", "machine", "memory_gib",
    "python", "quick", "seconds", "value_bytes",
}  # fmt: skip
FIELDS = {
    "bar", "baseline", "baseline_name", "detail", "figure", "fsync", "measured_s", "notes",
    "passed", "ratio", "title", "unit", "value", "value_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The cheap figures once, very short, on small data."""
    directory = tmp_path_factory.mktemp("bench")
    arguments = ["--quick", "--seconds", str(SECONDS), "--no-fail", "--dir", str(directory)]
    assert main([*arguments, *CHEAP]) == 0
    return directory, json.loads((directory / "results.json").read_text())


def test_smoke_run_reports_every_cheap_figure_with_every_field(
    smoke_run: tuple[Path, dict[str, Any]],
) -> None:
    _, document = smoke_run
    assert set(document["conditions"]) == CONDITIONS
    assert document["conditions"]["quick"] is True
    results = document["results"]
    assert list(dict.fromkeys(result["figure"] for result in results)) == CHEAP
    for result in results:
        assert set(result) == FIELDS
        assert result["value"] > 0
        assert result["fsync"]
        assert result["baseline"] > 0
        assert result["ratio"] == pytest.approx(result["value"] / result["baseline"])
        assert result["detail"]
        if result["bar"] is not None:
            assert set(result["bar"]) == {"of", "limit", "at_most"}
            assert isinstance(result["passed"], bool)


def test_smoke_run_leaves_nothing_but_its_results(
    smoke_run: tuple[Path, dict[str, Any]],
) -> None:
    directory, _ = smoke_run
    assert [path.name for path in directory.iterdir()] == ["results.json"]


def test_every_side_of_a_figure_is_measured_for_as_long_as_was_asked(
    smoke_run: tuple[Path, dict[str, Any]],
) -> None:
    _, document = smoke_run
    for result in document["results"]:
        assert result["measured_s"] >= SECONDS
        assert all(side["seconds"] >= SECONDS for side in result["detail"].values())


def test_mistake_18_no_figure_is_measured_for_less_than_ten_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    1. The default is ten seconds per side.
    2. Less is refused, on the command line and in code, unless it is a smoke run.
    3. A figure that was measured for less than asked has not passed, whatever it came to.
    """
    assert parse([]).settings.seconds >= 10.0
    assert SECONDS_MIN >= 10.0
    with pytest.raises(SystemExit) as refused:
        parse(["--seconds", "9.9"])
    assert refused.value.code == 2
    assert "too short" in capsys.readouterr().err
    with pytest.raises(ValueError, match="too short"):
        Settings(tmp_path, seconds=0.05)

    def judged(measured_s: float) -> Result:
        result = Result(
            figure="f", title="t", unit="u", value=5.0, measured_s=measured_s, fsync="none",
            bar=Bar("value", 1.0),
        )  # fmt: skip
        return result.judge(Settings(tmp_path))

    assert judged(10.0).passed is True
    assert judged(9.0).passed is False


def test_sides_take_turns_and_the_first_slice_of_each_is_not_counted(tmp_path: Path) -> None:
    class OneStep(Side):
        """Its slices last as long as they should, however busy the machine is."""

        def slice(self, seconds: float) -> tuple[int, float]:
            return self._step(), seconds

    turns: list[str] = []
    counts = {"a": 0, "b": 0}

    def side(name: str) -> Side:
        def step() -> int:
            counts[name] += 1
            return 1

        return OneStep(step, lambda: turns.append(name))

    timings = interleave(Settings(tmp_path, 0.02, quick=True), {"a": side("a"), "b": side("b")})
    assert turns[:6] == ["a", "b", "a", "b", "b", "a"]
    assert 0 < timings["a"].count < counts["a"]
    assert timings["b"].seconds >= 0.02


def test_a_bar_is_met_from_its_own_side(tmp_path: Path) -> None:
    assert Bar("value", 2.0, at_most=True).met(1.9, None)
    assert not Bar("value", 2.0, at_most=True).met(2.1, None)
    assert Bar("ratio", 0.6).met(1.0, 0.61)
    assert not Bar("ratio", 0.6).met(1.0, 0.59)


def test_a_missed_bar_is_exit_code_one_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def miss(settings: Settings) -> list[Result]:
        result = Result(
            figure="f", title="t", unit="u", value=1.0, measured_s=99.0, fsync="none",
            bar=Bar("value", 2.0),
        )  # fmt: skip
        return [result.judge(settings)]

    monkeypatch.setitem(FIGURES, "enqueue", (miss, "always misses"))
    assert main(["enqueue", "--dir", str(tmp_path)]) == 1
    assert main(["enqueue", "--dir", str(tmp_path), "--no-fail"]) == 0


def test_figures_are_listed_and_unknown_names_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in FIGURES)
    with pytest.raises(SystemExit):
        parse(["no-such-figure"])
