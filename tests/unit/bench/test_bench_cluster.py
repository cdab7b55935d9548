"""The cluster figures: their arguments, their baseline, their verdict, and one of them for real."""

import json
from pathlib import Path

import pytest

from raftq_bench.__main__ import main
from raftq_bench.bare_socket import (
    BareClient,
    BareLatency,
    BareReader,
    bare_nodes,
)
from raftq_bench.cluster import FIGURES, parse
from raftq_bench.cluster_failover import verdict
from raftq_bench.cluster_runs import quantile


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nonsense"], "no figure is called 'nonsense'"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--seconds", "2"], "too short"),
        (["--bootstrap", "h:1", "failover"], "not measured on a cluster of yours"),
        (["--format", "xml"], "invalid choice"),
    ],
)
def test_bad_arguments_are_refused_with_a_reason(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert reason in capsys.readouterr().err


def test_a_given_cluster_is_never_stopped() -> None:
    found = parse(["--bootstrap", "h:1"])
    assert set(found.figures) == set(FIGURES) - {"partitions", "failover"}
    assert found.settings.bootstrap == "h:1"
    assert found.settings.base.seconds == 10


def test_the_figures_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in FIGURES)


@pytest.mark.parametrize(
    ("read", "bad"),
    [
        ([0, 1, 2, 3], (0, 0, 0)),
        ([0, 1, 2], (0, 0, 0)),  # 3 was never acknowledged
        ([0, 2], (1, 0, 0)),
        ([], (3, 0, 0)),
        ([0, 1, 1, 2], (0, 1, 0)),
        ([0, 2, 1], (0, 0, 1)),
        ([0, 1, 0, 1, 2], (0, 2, 1)),
    ],
)
def test_what_is_lost_doubled_or_out_of_order_is_counted(
    read: list[int], bad: tuple[int, int, int]
) -> None:
    found = verdict({(0, 5): {0, 1, 2}}, {(0, 5): read})
    assert tuple(found.values()) == bad


def test_quantiles_are_taken_from_the_samples() -> None:
    samples = [float(number) for number in range(100, 0, -1)]
    assert quantile(samples, 0.5) == 51
    assert quantile(samples, 0.99) == 100
    assert quantile([7.0], 0.99) == 7


def test_the_baseline_writes_every_frame_to_every_file(tmp_path: Path) -> None:
    frame = bytes(range(256)) * 16
    with bare_nodes(tmp_path, 3) as port:
        client = BareClient(port, frame, worth=4)
        count, seconds = client.slice(0.1)
        client.close()
        latency = BareLatency(port, frame)
        singles, _ = latency.slice(0.05)
        assert len(latency.samples) == singles
        latency.rest()
        latency.close()
    assert seconds >= 0.1
    frames = count // 4 + singles
    for number in range(3):
        files = sorted((tmp_path / f"bare-{number}" / "frames").iterdir())
        written = b"".join(file.read_bytes() for file in files)
        assert written == frame * frames


def test_the_baseline_reads_as_many_frames_as_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bare_nodes(tmp_path) as port:
        reader = BareReader(port, bytes(100_000), worth=10)
        count, _ = reader.slice(0.1)
        reader.close()
    assert count >= 10
    assert count % 10 == 0


@pytest.mark.full
def test_a_figure_is_measured_on_a_cluster_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["cluster", "--quick", "--seconds", "0.3", "--no-fail", "--format", "json"]
    assert main([*arguments, "--dir", str(tmp_path), "send"]) == 0
    document = json.loads(capsys.readouterr().out)
    (result,) = document["results"]
    assert result["figure"] == "send"
    assert result["value"] > 0
    assert result["ratio"] == pytest.approx(result["value"] / result["baseline"])
    assert document["conditions"]["quick"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]
