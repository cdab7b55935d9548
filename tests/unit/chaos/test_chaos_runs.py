"""Runs of scenarios side by side; what they need and the machine has not is told."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import pytest

from raftq.chaos.harness import runs as chaos_runs
from raftq.chaos.harness.runs import run_all
from raftq.chaos.harness.world import ProxiedCluster
from raftq.chaos.scenario import Scenario, Step
from raftq.chaos.world import World
from raftq.client.common.errors import RequestTimeout


@dataclass(slots=True)
class Eclipse:
    """No machine can do it, so nothing is started."""

    name: str = "eclipse"
    needs: ClassVar[frozenset[str]] = frozenset({"a moon"})

    def inject(self, world: World) -> str:
        raise AssertionError(world)

    def heal(self, world: World) -> None:
        raise AssertionError(world)


def no_workloads() -> list[object]:
    return []


def impossible(name: str) -> Scenario:
    return Scenario(
        name=name,
        rows=(1,),
        promise="It holds.",
        workloads=no_workloads,  # type: ignore[arg-type]
        plan=(Step(1, Eclipse()),),
    )


def test_a_cluster_that_does_not_start_fails_its_run_and_not_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stillborn(ProxiedCluster):
        def __enter__(self) -> Self:
            raise RequestTimeout("node 1 is not ready in time")

    monkeypatch.setattr(chaos_runs, "ProxiedCluster", Stillborn)
    possible = replace(impossible("first"), plan=())
    results = run_all([possible, impossible("second")], 7, tmp_path, print, "again")
    assert [one.verdict for one in results] == ["FAILED", "SKIPPED"]
    assert "not ready in time" in results[0].detail


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_scenario_has_a_result_and_a_line_in_the_summary(tmp_path: Path, jobs: int) -> None:
    names = ["first", "second", "third"]
    said: list[str] = []
    results = run_all([impossible(name) for name in names], 7, tmp_path, said.append, "again", jobs)
    assert sorted(one.scenario.name for one in results) == names
    assert {one.verdict for one in results} == {"SKIPPED"}
    assert all("a moon" in one.detail for one in results)
    assert sorted(text.split()[1] for text in said) == [f"{name}:" for name in names]
    summary = (tmp_path / "summary.md").read_text()
    assert all(f"| {name} | 7 | SKIPPED |" in summary for name in names)
