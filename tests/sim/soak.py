"""Runs many seeds of a simulation in several processes, and says which fail and how.

    .venv/bin/python tests/sim/soak.py --kind cluster --first 0 --count 300 --jobs 2

A kind is a module of tests. One line per failing seed, and a summary: what failed how often, and
the time a seed takes. With `--points 10` a seed crashes at about so many points instead of all, if
a kind has crash points. With `--profile` every seed of `cluster` runs in that profile of
simplan.py, whatever it would draw. With `--text` only failures whose first line has the text are
listed, the others are counted.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType

KINDS = {
    "cluster": "test_cluster_sim",
    "logs": "test_logs_sim",
    "queue": "test_queue_cluster_sim",
    "group": "test_group_cluster_sim",
    "groups": "test_groups_sim",
    "recovery": "test_recovery_sim",
    "consensus": "test_consensus_schedules",
    "log": "test_log_crashes",
    "damage": "test_log_damage",
    "replica": "test_log_replica_crashes",
    "threads": "test_log_threads",
    "queue-crashes": "test_queue_crashes",
}
LINE_CHARS = 230

Job = tuple[str, int, str | None]
Outcome = tuple[int, str, float]
"""The seed, how it failed ("": it did not), and the seconds of CPU it took."""


def calls(module: ModuleType, seed: int, profile: str | None) -> Iterator[Callable[[], object]]:
    """What runs for one seed: the module's `simulate`, or else each of its tests that has seeds."""
    if hasattr(module, "simulate"):
        yield partial(module.simulate, seed, *([] if profile is None else [profile]))
        return
    for name, test in vars(module).items():
        marks = getattr(test, "pytestmark", []) if name.startswith("test_") else []
        axes = {mark.args[0]: mark.args[1] for mark in marks if mark.name == "parametrize"}
        if axes.pop("seed", None) is not None:
            for values in product(*axes.values()):
                yield partial(test, seed=seed, **dict(zip(axes, values, strict=True)))


def run_one(job: Job) -> Outcome:
    kind, seed, profile = job
    module = importlib.import_module(KINDS[kind])
    began = time.process_time()
    try:
        for call in calls(module, seed, profile):
            call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A simulated crash and a failed `pytest.raises` are no Exception.
        found = error
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        lines = str(found).splitlines() or [""]
        notes = [
            one for one in getattr(found, "__notes__", []) if "point" in one and "=" not in one
        ]
        text = " ".join([type(found).__name__, lines[0], *notes])
        return seed, text[:LINE_CHARS], time.process_time() - began
    return seed, "", time.process_time() - began


def run_all(jobs: list[Job], processes: int) -> Iterator[Outcome]:
    if processes < 2:
        yield from map(run_one, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_prepare, maxtasksperchild=50) as pool:
        yield from pool.imap_unordered(run_one, jobs)


def _prepare() -> None:
    here = Path(__file__).parent
    for folder in (str(here.parent / "fakes"), str(here)):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def family(text: str) -> str:
    """The failure without its numbers and names: what it has in common with others."""
    text = re.sub(r"'[^']*'|b\"[^\"]*\"|\d+(\.\d+)?", "*", text)
    return text[:90]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run many seeds of a simulation.")
    parser.add_argument("--kind", choices=sorted(KINDS), default="cluster")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--profile", help="of simplan.py, for --kind cluster")
    parser.add_argument("--points", help="crash points of a seed, for kinds that have some")
    parser.add_argument("--text", default="", help="list only failures with this text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    _prepare()
    if given.points is not None:
        os.environ["RAFTQ_SIM_POINTS"] = given.points  # also for the processes started here
    jobs = [(given.kind, given.first + at, given.profile) for at in range(given.count)]
    began, done, cpu = time.monotonic(), 0, 0.0
    slowest = (0.0, 0)
    families: Counter[str] = Counter()
    for seed, failure, took in run_all(jobs, given.jobs):
        done += 1
        cpu += took
        slowest = max(slowest, (took, seed))
        if failure:
            families[family(failure)] += 1
            if given.text in failure:
                sys.stdout.write(f"seed {seed}: {failure}\n")
                sys.stdout.flush()
        if done % 100 == 0:
            sys.stderr.write(f"{given.kind}: {done} of {len(jobs)} seeds\n")
        if time.monotonic() - began > given.seconds:
            break
    failed = sum(families.values())
    for text, count in families.most_common():
        sys.stdout.write(f"{count:5d}  {text}\n")
    sys.stdout.write(
        f"{given.kind}: {done} seeds from {given.first}, {failed} failed; "
        f"{time.monotonic() - began:.0f} s, {cpu / max(1, done):.2f} s of CPU per seed, at most "
        f"{slowest[0]:.1f} s (seed {slowest[1]})\n"
    )
    if failed:
        profile = "" if given.profile is None else f" RAFTQ_SIM_PROFILE={given.profile}"
        sys.stdout.write(
            f"replay: RAFTQ_SIM_SEED=N{profile} .venv/bin/python -m pytest "
            f"tests/sim/{KINDS[given.kind]}.py\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
