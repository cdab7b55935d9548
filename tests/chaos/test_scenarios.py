"""A few scenarios from end to end; `make chaos` runs all of them."""

from pathlib import Path

import pytest

from raftq.chaos.harness.runs import possible, run_one
from raftq.chaos.scenarios import SCENARIOS

CHOSEN = (
    "isolate-leader",
    "kill-leader",
    pytest.param("pause-leader-of-queue", marks=pytest.mark.full),
    pytest.param("power-cut-all", marks=pytest.mark.full),
)
SEED = 5


@pytest.mark.parametrize("name", CHOSEN)
def test_a_scenario_keeps_its_promise(name: str, tmp_path: Path) -> None:
    scenario = next(one for one in SCENARIOS if one.name == name)
    if lacking := scenario.needs - possible():
        pytest.skip(f"NOTHING IS KNOWN about {name}: this machine lacks {', '.join(lacking)}")
    told: list[str] = []
    result = run_one(scenario, SEED, tmp_path, told.append, "raftq chaos run {name} --seed {seed}")
    assert result.verdict == "passed", "\n".join(told)
    assert (tmp_path / f"{name}-{SEED}" / "report.md").read_text().startswith(f"# {name}: passed")
    assert not (tmp_path / f"{name}-{SEED}" / "cluster").exists(), "what passed leaves no data"
