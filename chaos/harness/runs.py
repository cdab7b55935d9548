"""Shell: runs scenarios against clusters of real processes and keeps their results.

Every run has its own directory:

    report.md, timeline.svg    always
    history.jsonl              what clients did and saw; kept if the run failed
    cluster/                   logs and data of the nodes; kept if the run failed

Each run starts a new cluster, and leaves no process behind.
"""

import asyncio
import logging
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raftq.chaos.failover import Failover, Failovers, Victim
from raftq.chaos.harness.world import ProxiedCluster
from raftq.chaos.journal import HistoryJournal
from raftq.chaos.report import figures, to_markdown, to_svg
from raftq.chaos.runner import Runner, RunOutcome, Tools
from raftq.chaos.scenario import Scenario
from raftq.client.common.errors import RaftqError

Say = Callable[[str], None]
Verdict = Literal["passed", "FAILED", "SKIPPED"]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of a summary."""

    scenario: Scenario
    seed: int
    verdict: Verdict
    seconds: float
    detail: str
    """The first anomaly, or the reason for skipping."""
    facts: dict[str, str]


def possible() -> frozenset[str]:
    """The abilities of the worlds on this machine."""
    return ProxiedCluster(Path(".chaos")).abilities


def run_all(
    scenarios: Sequence[Scenario],
    seed: int,
    directory: Path,
    say: Say,
    command: str,
    jobs: int = 1,
) -> list[Result]:
    """Runs scenarios, `jobs` at a time, each in its own process if there are several.

    It writes the summary again after each run, so that it is never lost."""
    results: list[Result] = []
    for result in _each(scenarios, seed, directory, say, command, jobs):
        results.append(result)
        (directory / "summary.md").write_text(summary(results), encoding="utf-8")
    return results


def _each(
    scenarios: Sequence[Scenario], seed: int, directory: Path, say: Say, command: str, jobs: int
) -> Iterator[Result]:
    if jobs == 1:
        for scenario in scenarios:
            yield run_one(scenario, seed, directory, say, command)
        return
    # Not forked: this process may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, log_to, (directory,)) as pool:
        runs = [
            pool.submit(_run_apart, scenario, seed, directory, command) for scenario in scenarios
        ]
        for run in as_completed(runs):
            result, output = run.result()
            for text in output:
                say(text)
            yield result


def _run_apart(
    scenario: Scenario, seed: int, directory: Path, command: str
) -> tuple[Result, list[str]]:
    """Runs in its own process and returns all output at the end, in one piece."""
    output: list[str] = []
    return run_one(scenario, seed, directory, output.append, command), output


def log_to(directory: Path) -> None:
    """Sends the log of the clients to a file: under faults it is long and says little."""
    logging.basicConfig(
        filename=directory / "chaos.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )


def run_one(scenario: Scenario, seed: int, directory: Path, say: Say, command: str) -> Result:
    """Runs one scenario. `command` is for the report; {name} and {seed} in it are replaced."""
    where = directory / f"{scenario.name}-{seed}"
    shutil.rmtree(where, ignore_errors=True)
    began = _now()
    cluster = ProxiedCluster(
        where / "cluster",
        scenario.nodes,
        seed=seed,
        settings=scenario.settings,
        proxied=scenario.through_proxies,
    )
    lacking = scenario.needs - cluster.abilities
    if lacking:
        detail = f"needs {', '.join(sorted(lacking))}, which this machine does not have"
        say(f"SKIPPED {scenario.name}: {detail}")
        return Result(scenario, seed, "SKIPPED", _now() - began, detail, {})
    say(f"{scenario.name} (seed {seed}): {scenario.promise}")
    where.mkdir(parents=True)
    try:
        return _run(cluster, scenario, seed, where, say, command)
    except RaftqError as error:
        say(f"FAILED {scenario.name}: {error}; all is kept in {where}")
        return Result(scenario, seed, "FAILED", _now() - began, str(error), {})


def _run(
    cluster: ProxiedCluster, scenario: Scenario, seed: int, where: Path, say: Say, command: str
) -> Result:
    began = _now()
    with cluster as world:
        secret = (where / "cluster" / "secret").read_bytes().strip()
        tools = Tools(clock=_now, secret=secret, say=say)
        with HistoryJournal(where / "history.jsonl") as history:
            outcome = asyncio.run(Runner(world, scenario, seed, tools, history).run())
            history.conclude(outcome.final)
    repeat = command.format(name=scenario.name, seed=seed)
    (where / "report.md").write_text(to_markdown(outcome, repeat), encoding="utf-8")
    (where / "timeline.svg").write_text(to_svg(outcome), encoding="utf-8")
    return _concluded(outcome, where, _now() - began, say)


def _concluded(outcome: RunOutcome, where: Path, seconds: float, say: Say) -> Result:
    facts = figures(outcome)
    name, seed = outcome.scenario.name, outcome.seed
    if outcome.passed:
        shutil.rmtree(where / "cluster", ignore_errors=True)
        (where / "history.jsonl").unlink(missing_ok=True)
        say(
            f"passed {name} in {seconds:.0f} s: {facts['records acknowledged']} records, "
            f"longest gap {outcome.gap_s:.1f} s, "
            f"outage {facts['longest outage of a partition by a single fault']}, "
            f"{outcome.leader_changes} leader changes"
        )
        return Result(outcome.scenario, seed, "passed", seconds, "", facts)
    for anomaly in outcome.anomalies[:5]:
        say(f"  {str(anomaly)[:400]}")
    say(f"FAILED {name} with {len(outcome.anomalies)} anomalies; all is kept in {where}")
    return Result(outcome.scenario, seed, "FAILED", seconds, str(outcome.anomalies[0]), facts)


def summary(results: list[Result]) -> str:
    """All runs so far, as a table."""
    lines = [
        "| scenario | seed | verdict | seconds | acknowledged | longest gap | leader changes | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        link = f"[{result.scenario.name}]({result.scenario.name}-{result.seed}/report.md)"
        cells = (
            link if result.facts else result.scenario.name,
            str(result.seed),
            result.verdict,
            f"{result.seconds:.0f}",
            result.facts.get("records acknowledged", ""),
            result.facts.get("longest time without an acknowledged record", ""),
            result.facts.get("leader changes", ""),
            result.detail[:200].replace("|", "\\|"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def measure_failovers(kills: int, directory: Path, seed: int, say: Say) -> list[Failovers]:
    """Kills leaders, then controllers, of a cluster of three."""
    victims: tuple[Victim, ...] = ("leader", "controller")
    found = []
    shutil.rmtree(directory, ignore_errors=True)
    with ProxiedCluster(directory, 3, seed=seed, proxied=False) as world:
        for victim in victims:
            found.append(asyncio.run(Failover(world, _now, say).measure(victim, kills)))
            say(found[-1].describe())
    shutil.rmtree(directory, ignore_errors=True)
    return found


def _now() -> float:
    return time.time()  # noqa: TID251 - compared with what real nodes tell
