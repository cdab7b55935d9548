"""Shell: measures and prints; exits with 1 if a bar is missed.

`python -m raftq_bench [FIGURE...]`. Every figure is measured for at least 10 seconds per side,
against a baseline in the same run. With `cluster`, `groups`, `queue` or `spark` as the first word
it measures a cluster, consumer groups or queues on one, or Spark beside one; see the modules of
these names.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from raftq_bench import (
    append,
    backlog,
    cluster,
    consume,
    group_commit,
    groups,
    publish,
    queue,
    reopen,
    rivals,
    spark,
    stream,
    suite,
)
from raftq_bench.report import Result, conditions, describe, print_table, write_json
from raftq_bench.runner import SECONDS_MIN, Settings

Measure = Callable[[Settings], list[Result]]

FIGURES: dict[str, tuple[Measure, str]] = {
    "append": (append.measure, "Log.append of 1,000-record batches against bare os.writev"),
    "enqueue-batch": (publish.measure_batches, "Queue.enqueue_batch(1000)"),
    "enqueue": (publish.measure_singles, "Queue.enqueue one by one"),
    "dequeue": (consume.measure, "dequeue_batch(500) + ack_batch"),
    "group-commit": (group_commit.measure, "fsync always: 8 threads against one fsync each"),
    "rivals": (rivals.measure, "put + get + ack against persist-queue"),
    "reopen": (reopen.measure, "open after kill -9: time and memory (writes 4 GiB)"),
    "stream": (stream.measure, "memory of a consumer that streams 4 GiB"),
    "backlog": (backlog.measure, "cost per message with 10,000,000 waiting (writes 11 GiB)"),
}
SUITES = {one.name: one for one in (cluster.SUITE, groups.SUITE, queue.SUITE, spark.SUITE)}
QUICK_S = 1.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m raftq_bench", description=__doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="default: all of them")
    parser.add_argument("--list", action="store_true", help="name the figures and stop")
    parser.add_argument("--seconds", type=float, help="per side of each figure, at least 10")
    parser.add_argument("--quick", action="store_true", help="a smoke run with small data")
    parser.add_argument("--dir", type=Path, default=Path(".bench"), help="where data is written")
    parser.add_argument("--json", type=Path, help="default: results.json in --dir")
    parser.add_argument("--no-fail", action="store_true", help="exit 0 even when a bar is missed")
    found = parser.parse_args(arguments)
    unknown = [name for name in found.figures if name not in FIGURES]
    if unknown:
        parser.error(f"no figure is called {unknown[0]!r}; there are: {', '.join(FIGURES)}")
    if found.seconds is None:
        found.seconds = QUICK_S if found.quick else SECONDS_MIN
    try:
        found.settings = Settings(found.dir.resolve(), found.seconds, found.quick)
    except ValueError as error:
        parser.error(str(error))
    return found


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in SUITES:
        return suite.main(SUITES[arguments[0]], arguments[1:])
    found = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if found.list:
        for name, (_, about) in FIGURES.items():
            console.print(f"{name:14} {about}", highlight=False)
        return 0
    settings: Settings = found.settings
    facts = conditions(settings)
    results: list[Result] = []
    for name in found.figures or FIGURES:
        if not settings.quick:
            os.sync()  # writes that the last figure left must not slow this one
        for result in FIGURES[name][0](settings):
            console.print(describe(result, facts), highlight=False, markup=False)
            results.append(result)
        write_json(found.json or settings.directory / "results.json", results, facts)
    print_table(results, facts, console)
    missed = [result.title for result in results if result.passed is False]
    return 1 if missed and not found.no_fail else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
