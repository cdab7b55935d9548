"""Shell: `raftq chaos`, faults under load on a new cluster, and the verdict.

It never touches an existing cluster: every run starts its own nodes and ends them. If the machine
lacks something that a run needs, the command says so and skips the run.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raftq.client.common.errors import InvalidArgument
from raftq.node.cli.output import (
    Format,
    Output,
    add_row,
    make_table,
    open_console,
    print_json,
    printable,
)

if TYPE_CHECKING:
    from raftq.chaos.harness.runs import Result
    from raftq.chaos.scenario import Scenario

SEEDS = 1_000_000

chaos_app = typer.Typer(no_args_is_help=True, help="Break new clusters on purpose, and judge them.")

Out = Annotated[
    Path, typer.Option(metavar="DIR", help="The directory for reports and the data of failed runs.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="The seed of all random choices; a new one is printed.")
]
OUT = Path(".chaos")


@chaos_app.command("list")
def list_(output: Output = Format.table) -> None:
    """Show the scenarios."""
    from raftq.chaos.scenarios import SCENARIOS  # noqa: PLC0415 - help stays fast

    if output is Format.json:
        print_json([_row(scenario) for scenario in SCENARIOS])
        return
    table = make_table("Scenarios", "name", "rows", "needs", "promise")
    for scenario in SCENARIOS:
        rows = ",".join(map(str, scenario.rows))
        add_row(table, scenario.name, rows, ",".join(sorted(scenario.needs)), scenario.promise)
    open_console().print(table)


@chaos_app.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Names of scenarios, see `list`.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All scenarios.")] = False,
    seed: Seed = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="How many scenarios run at a time.")] = 1,
    out: Out = OUT,
    output: Output = Format.table,
) -> None:
    """Run scenarios. The exit code is 1 if one failed."""
    from raftq.chaos.harness.runs import run_all  # noqa: PLC0415 - help stays fast

    chosen = _chosen(names or [], everything)
    seed = secrets.randbelow(SEEDS) if seed is None else seed
    _prepare(out)
    again = "raftq chaos run {name} --seed {seed}"
    _tell(run_all(chosen, seed, out, _say(output), again, jobs), out, output)


@chaos_app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.2, max=10_000, help="How many minutes.")] = 30.0,
    nodes: Annotated[int, typer.Option(min=3, max=9, help="The number of nodes.")] = 3,
    seed: Seed = None,
    out: Out = OUT,
    output: Output = Format.table,
) -> None:
    """Do one long run with random faults. The exit code is 1 if anything was wrong."""
    from raftq.chaos.harness.runs import possible, run_all  # noqa: PLC0415 - help stays fast
    from raftq.chaos.soak import soak_scenario  # noqa: PLC0415 - help stays fast

    seed = secrets.randbelow(SEEDS) if seed is None else seed
    _prepare(out)
    abilities = possible()
    say = _say(output)
    scenario = soak_scenario(minutes, nodes, seed, abilities)
    again = f"raftq chaos soak --minutes {minutes:g} --nodes {nodes} --seed {{seed}}"
    _tell(run_all([scenario], seed, out, say, again), out, output)


@chaos_app.command()
def failover(
    kills: Annotated[
        int, typer.Option(min=1, max=10_000, help="How many kills of each kind.")
    ] = 100,
    seed: Seed = None,
    out: Out = OUT,
    output: Output = Format.table,
) -> None:
    """Kill leaders, then controllers, and measure the time to the next acknowledged record."""
    from raftq.chaos.harness.runs import measure_failovers  # noqa: PLC0415 - help stays fast
    from raftq.chaos.timeline import percentile  # noqa: PLC0415 - help stays fast

    _prepare(out)
    found = measure_failovers(kills, out / "failover", seed or 0, _say(output))
    rows = [
        {
            "killed": failover.victim,
            "times": len(failover.seconds),
            "p50_ms": round(percentile(failover.seconds, 0.5) * 1000),
            "p99_ms": round(percentile(failover.seconds, 0.99) * 1000),
            "worst_ms": round(max(failover.seconds) * 1000),
        }
        for failover in found
    ]
    if output is Format.json:
        print_json(rows)
        return
    table = make_table("To the first acknowledged record", *rows[0])
    for row in rows:
        add_row(table, *map(str, row.values()))
    open_console().print(table)


def _chosen(names: list[str], everything: bool) -> "list[Scenario]":
    from raftq.chaos.scenarios import SCENARIOS  # noqa: PLC0415 - help stays fast

    if everything == bool(names):
        raise InvalidArgument("either names of scenarios or --all; `raftq chaos list` shows them")
    if everything:
        return list(SCENARIOS)
    known = {scenario.name: scenario for scenario in SCENARIOS}
    for name in names:
        if name not in known:
            raise InvalidArgument(f"there is no scenario {name!r}; `raftq chaos list` shows them")
    return [known[name] for name in names]


def _tell(results: "list[Result]", out: Path, output: Format) -> None:
    counts = {
        verdict: sum(result.verdict == verdict for result in results)
        for verdict in ("passed", "FAILED", "SKIPPED")
    }
    if output is Format.json:
        print_json(
            [
                {
                    "name": result.scenario.name,
                    "seed": result.seed,
                    "verdict": result.verdict.lower(),
                    "seconds": round(result.seconds, 1),
                    "detail": result.detail,
                    "figures": result.facts,
                }
                for result in results
            ]
        )
    else:
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        typer.echo(f"{told}; see {out / 'summary.md'}")
        if skipped := [result.scenario.name for result in results if result.verdict == "SKIPPED"]:
            typer.echo(f"NOT RUN, so nothing is known about: {', '.join(skipped)}")
    if counts["FAILED"]:
        raise typer.Exit(1)


def _row(one: "Scenario") -> dict[str, object]:
    return {
        "name": one.name,
        "rows": list(one.rows),
        "needs": sorted(one.needs),
        "nodes": one.nodes,
        "promise": one.promise,
    }


def _say(output: Format) -> Callable[[str], None]:
    """Shows progress on stderr; stdout keeps the one document of --format json."""
    return lambda text: typer.echo(printable(text), err=output is Format.json)


def _prepare(out: Path) -> None:
    from raftq.chaos.harness.runs import log_to  # noqa: PLC0415 - help stays fast

    out.mkdir(parents=True, exist_ok=True)
    log_to(out)
