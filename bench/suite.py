"""Shell: a set of figures about clusters, as one word of `python -m raftq_bench WORD`.

Each figure starts its own node processes, or measures the cluster at --bootstrap, against a
baseline of the same run. Exits with 1 if a bar is missed.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from raftq.client.common.errors import RaftqError
from raftq_bench.cluster_runs import ClusterSettings, tell
from raftq_bench.report import Result, conditions, describe, print_table, write_json
from raftq_bench.runner import GIB, MIB, SECONDS_MIN, Settings

Measure = Callable[[ClusterSettings], list[Result]]
QUICK_S = 1.0
QUICK_BYTES = 12 * MIB


@dataclass(frozen=True, slots=True)
class Suite:
    """Figures by name, each with a line about it."""

    name: str
    about: str
    figures: Mapping[str, tuple[Measure, str]]
    own_processes: Sequence[str] = ()
    """Figures that stop nodes, and so are not measured on a given cluster."""
    rounds: int = 30
    """How often the figures that kill something do so."""
    size_gib: float | None = None
    """The size of the data of figures for which it can be chosen."""


def parse(suite: Suite, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"raftq bench {suite.name}", description=suite.about)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="default: all of them")
    parser.add_argument("--list", action="store_true", help="name the figures and stop")
    parser.add_argument("--bootstrap", help="measure this cluster (HOST:PORT,...) as it is")
    parser.add_argument("--seconds", type=float, help="per side of each figure, at least 10")
    parser.add_argument("--rounds", type=int, default=suite.rounds, help="of killing something")
    if suite.size_gib is not None:
        about = f"GiB of values to read (default {suite.size_gib:g}); less is a quick try"
        parser.add_argument("--size", type=float, default=suite.size_gib, help=about)
    parser.add_argument("--quick", action="store_true", help="a smoke run with small data")
    parser.add_argument("--dir", type=Path, default=Path(".bench"), help="where data is written")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--json", type=Path, help=f"default: {suite.name}.json in --dir")
    parser.add_argument("--no-fail", action="store_true", help="exit 0 even when a bar is missed")
    found = parser.parse_args(arguments)
    unknown = [name for name in found.figures if name not in suite.figures]
    if unknown:
        parser.error(f"no figure is called {unknown[0]!r}; there are: {', '.join(suite.figures)}")
    if found.rounds < 1:
        parser.error("--rounds must be at least 1")
    stopping = suite.own_processes if found.bootstrap else ()
    for name in found.figures:
        if name in stopping:
            parser.error(f"{name} stops nodes: it is not measured on a cluster of yours")
    found.figures = found.figures or [name for name in suite.figures if name not in stopping]
    if found.seconds is None:
        found.seconds = QUICK_S if found.quick else SECONDS_MIN
    try:
        base = Settings(found.dir.resolve(), found.seconds, found.quick)
    except ValueError as error:
        parser.error(str(error))
    size = getattr(found, "size", 0.0)
    if suite.size_gib is not None and size <= 0:
        parser.error("--size must be more than 0")
    data_bytes = base.size(int(size * GIB), QUICK_BYTES)
    found.settings = ClusterSettings(base, found.bootstrap, found.rounds, data_bytes)
    return found


def main(suite: Suite, arguments: Sequence[str]) -> int:
    found = parse(suite, arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if found.list:
        for name, (_, about) in suite.figures.items():
            console.print(f"{name:16} {about}", highlight=False)
        return 0
    settings: ClusterSettings = found.settings
    facts = conditions(settings.base)
    results: list[Result] = []
    for name in found.figures:
        if not settings.base.quick:
            os.sync()  # writes that the last figure left must not slow this one
        try:
            measured = suite.figures[name][0](settings)
        except RaftqError as error:
            tell(f"{name}: {type(error).__name__}: {error}")
            return 1
        for result in measured:
            if found.format == "table":
                console.print(describe(result, facts), highlight=False, markup=False)
            results.append(result)
        write_json(found.json or settings.base.directory / f"{suite.name}.json", results, facts)
    _print(console, results, facts, found.format)
    missed = [result.title for result in results if result.passed is False]
    return 1 if missed and not found.no_fail else 0


def _print(console: Console, results: Sequence[Result], facts: dict[str, Any], kind: str) -> None:
    if kind == "json":
        document = {"conditions": facts, "results": [result.as_json() for result in results]}
        print(json.dumps(document, indent=2))
    else:
        print_table(results, facts, console)
