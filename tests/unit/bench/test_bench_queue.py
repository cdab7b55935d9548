"""The figures of queues and groups: their arguments, what is made of what was seen, and a short run
of each kind for real."""

import json
from pathlib import Path

import pytest

from raftq_bench.__main__ import SUITES, main
from raftq_bench.group_changes import gaps, is_settled, pauses, together
from raftq_bench.suite import parse


@pytest.mark.parametrize("name", ["groups", "queue"])
def test_the_figures_are_listed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--list"]) == 0
    out = capsys.readouterr().out
    assert all(figure in out for figure in SUITES[name].figures)


@pytest.mark.parametrize("name", ["groups", "queue"])
def test_every_figure_is_measured_for_ten_seconds_unless_it_is_a_smoke_run(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(SUITES[name], []).settings.base.seconds == 10
    assert parse(SUITES[name], []).figures == list(SUITES[name].figures)
    with pytest.raises(SystemExit):
        parse(SUITES[name], ["--seconds", "9"])
    assert "too short" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("owned", "settled"),
    [
        ({0: [0, 1], 1: [2]}, True),
        ({0: [0, 1, 2], 1: []}, False),  # not fair
        ({0: [0, 1], 1: [1]}, False),  # one twice, one nobody's
        ({0: [0], 1: [1]}, False),
    ],
)
def test_a_group_has_settled_when_all_is_owned_once_and_shared_fairly(
    owned: dict[int, list[int]], settled: bool
) -> None:
    assert is_settled(owned, 3) is settled


def test_gaps_are_between_records_of_one_partition_whoever_got_them() -> None:
    seen = together([{0: [(1.0, 7), (4.0, 7)], 1: [(9.0, 7)]}, {0: [(2.0, 8)]}])
    assert seen == {0: [(1.0, 7), (2.0, 8), (4.0, 7)], 1: [(9.0, 7)]}
    assert gaps(seen, [0, 1, 2]) == [1.0, 2.0]


def test_a_partition_pauses_from_its_last_record_here_to_its_first_there() -> None:
    seen = {
        0: [(1.0, 1), (2.0, 1), (2.5, 2), (9.0, 2)],
        1: [(1.0, 1), (5.0, 1)],
    }
    assert pauses(seen) == {0: 0.5}


@pytest.mark.full
@pytest.mark.parametrize(
    "figure", ["queue lease-ack", "queue latency", "queue delays", "groups join"]
)
def test_a_figure_is_measured_on_a_cluster_of_its_own(
    figure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, name = figure.split()
    arguments = [suite, "--quick", "--seconds", "0.5", "--no-fail", "--format", "json"]
    assert main([*arguments, "--dir", str(tmp_path), name]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {result["figure"] for result in document["results"]} == {name}
    assert document["results"][0]["value"] > 0
    assert document["conditions"]["quick"] is True
    assert [path.name for path in tmp_path.iterdir()] == [f"{suite}.json"]
