"""Shell: the figures of a cluster: `python -m raftq.node.bench cluster [FIGURE...]`.

Each figure starts real node processes of its own, or measures the cluster at --bootstrap, and is
compared with a bare socket and file loop of the same bytes in the same run. Exits with 1 when a bar
is missed.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from raftq.client.wire.errors import RaftqError
from raftq.node.bench import cluster_failover, cluster_flow, cluster_latency, cluster_many
from raftq.node.bench.cluster_runs import ClusterSettings, tell
from raftq.node.bench.report import Result, conditions, describe, print_table, write_json
from raftq.node.bench.runner import SECONDS_MIN, Settings

Measure = Callable[[ClusterSettings], list[Result]]

FIGURES: dict[str, tuple[Measure, str]] = {
    "produce-1": (cluster_flow.measure_produce_1, "1 node, acks=leader, send_many"),
    "consume-records": (cluster_flow.measure_consume_records, "1 node, to Record objects"),
    "consume-arrow": (cluster_flow.measure_consume_arrow, "1 node, to Arrow tables"),
    "produce-3": (cluster_flow.measure_produce_3, "3 nodes, replication 3, acks=all, send_many"),
    "latency": (cluster_latency.measure_latency, "3 nodes, acks=all, one record at a time"),
    "send": (cluster_flow.measure_send, "1 node, producer.send() in a loop"),
    "concurrent": (cluster_flow.measure_concurrent, "1 node, 1,000 awaiting publishers"),
    "rest": (cluster_latency.measure_rest, "3 nodes, one record per REST request"),
    "partitions": (cluster_many.measure, "3 nodes with 1,000 partitions: idle, start, change"),
    "failover": (cluster_failover.measure, "3 nodes, leaders killed -9 under load"),
}
OWN_PROCESSES = ("partitions", "failover")
QUICK_S = 1.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="raftq bench cluster", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="default: all of them")
    parser.add_argument("--list", action="store_true", help="name the figures and stop")
    parser.add_argument("--bootstrap", help="measure this cluster (HOST:PORT,...) as it is")
    parser.add_argument("--seconds", type=float, help="per side of each figure, at least 10")
    parser.add_argument("--rounds", type=int, default=30, help="of the failover figure")
    parser.add_argument("--quick", action="store_true", help="a smoke run with small data")
    parser.add_argument("--dir", type=Path, default=Path(".bench"), help="where data is written")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--json", type=Path, help="default: cluster.json in --dir")
    parser.add_argument("--no-fail", action="store_true", help="exit 0 even when a bar is missed")
    found = parser.parse_args(arguments)
    unknown = [name for name in found.figures if name not in FIGURES]
    if unknown:
        parser.error(f"no figure is called {unknown[0]!r}; there are: {', '.join(FIGURES)}")
    if found.rounds < 1:
        parser.error("--rounds must be at least 1")
    found.figures = found.figures or [
        name for name in FIGURES if not (found.bootstrap and name in OWN_PROCESSES)
    ]
    stopping = [name for name in found.figures if found.bootstrap and name in OWN_PROCESSES]
    if stopping:
        parser.error(f"{stopping[0]} stops nodes: it is not measured on a cluster of yours")
    if found.seconds is None:
        found.seconds = QUICK_S if found.quick else SECONDS_MIN
    try:
        base = Settings(found.dir.resolve(), found.seconds, found.quick)
    except ValueError as error:
        parser.error(str(error))
    found.settings = ClusterSettings(base, found.bootstrap, found.rounds)
    return found


def main(arguments: Sequence[str]) -> int:
    found = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if found.list:
        for name, (_, about) in FIGURES.items():
            console.print(f"{name:16} {about}", highlight=False)
        return 0
    settings: ClusterSettings = found.settings
    facts = conditions(settings.base)
    results: list[Result] = []
    for name in found.figures:
        if not settings.base.quick:
            os.sync()  # what the last figure left to write must not slow this one
        try:
            measured = FIGURES[name][0](settings)
        except RaftqError as error:
            tell(f"{name}: {type(error).__name__}: {error}")
            return 1
        for result in measured:
            if found.format == "table":
                console.print(describe(result, facts), highlight=False, markup=False)
            results.append(result)
        write_json(found.json or settings.base.directory / "cluster.json", results, facts)
    _print(console, results, facts, found.format)
    missed = [result.title for result in results if result.passed is False]
    return 1 if missed and not found.no_fail else 0


def _print(console: Console, results: Sequence[Result], facts: dict[str, Any], kind: str) -> None:
    if kind == "json":
        document = {"conditions": facts, "results": [result.as_json() for result in results]}
        print(json.dumps(document, indent=2))
    else:
        print_table(results, facts, console)
