"""The command line of chaos: what can be run is listed, and what cannot is refused in one line."""

import json

import pytest
from typer.testing import CliRunner

from raftq.chaos.scenario import SCENARIO_S_MAX
from raftq.chaos.scenarios import SCENARIOS
from raftq.chaos.soak import soak_scenario
from raftq.node.cli import app

RUNNER = CliRunner()
ROWS = {*range(1, 37), 39, 40}


def run(*arguments: str):
    return RUNNER.invoke(app, ["chaos", *arguments])


def test_every_scenario_is_listed_with_its_rows_and_its_needs() -> None:
    done = run("list", "--format", "json")
    assert done.exit_code == 0
    listed = json.loads(done.stdout)
    assert [one["name"] for one in listed] == [one.name for one in SCENARIOS]
    assert all(one["promise"].endswith(".") for one in listed)
    assert run("list").exit_code == 0


def test_there_are_at_least_36_scenarios_for_every_row_that_can_be_run() -> None:
    assert len(SCENARIOS) >= 36
    assert {row for one in SCENARIOS for row in one.rows} >= ROWS
    names = [one.name for one in SCENARIOS]
    assert len(set(names)) == len(names)


def test_every_plan_leaves_time_to_read_back_within_two_minutes() -> None:
    for one in SCENARIOS:
        assert one.lasts_s + 30 <= SCENARIO_S_MAX, one.name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "no-such-thing"), "no-such-thing"),
        (("run",), "--all"),
        (("run", "kill-leader", "--all"), "--all"),
    ],
)
def test_a_wrong_choice_is_refused_before_anything_is_started(
    arguments: tuple[str, ...], words: str
) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert words in done.stderr


def test_a_soak_is_the_same_for_the_same_seed_and_fills_its_time() -> None:
    abilities = frozenset({"toxiproxy", "faketime"})
    one, same = (soak_scenario(3.0, 3, 7, abilities) for _ in range(2))
    other = soak_scenario(3.0, 3, 8, abilities)
    told = [(step.at, step.fault.name, step.lasts) for step in one.plan]
    assert told == [(step.at, step.fault.name, step.lasts) for step in same.plan]
    assert told != [(step.at, step.fault.name, step.lasts) for step in other.plan]
    assert 150 <= one.lasts_s <= 200


def test_a_soak_asks_for_nothing_that_the_machine_cannot_do() -> None:
    assert soak_scenario(3.0, 5, 7, frozenset()).needs == frozenset()


def test_operators_change_topics_and_move_copies_in_soaks() -> None:
    faults = {step.fault.name for step in soak_scenario(240.0, 5, 7, frozenset()).plan}
    wanted = {"move 4 away", "moves to and fro", "alter topics", "grow topics", "other topics"}
    assert faults >= wanted
