"""Runs many seeds of a simulation in several processes, and says which fail and how.

    .venv/bin/python tests/sim/soak.py --kind cluster --first 0 --count 300 --jobs 2

One line per failing seed, and a summary: what failed how often, and the time a seed takes. With
`--profile` every seed of `cluster` runs in that profile of simplan.py, whatever it would draw. With
`--text` only failures whose first line has the text are listed, the others are counted.
"""

import argparse
import importlib
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

KINDS = {
    "cluster": "test_cluster_sim",
    "strands": "test_strands_sim",
    "queue": "test_queue_cluster_sim",
    "group": "test_group_cluster_sim",
}
TESTS = {
    "cluster": "test_a_cluster_survives_its_faults",
    "strands": "test_strands_survive_the_faults_of_their_cluster",
    "queue": "test_queues_survive_the_faults_of_their_cluster",
    "group": "test_groups_survive_the_faults_of_their_cluster",
}
LINE_CHARS = 230

Job = tuple[str, int, str | None]
Outcome = tuple[int, str, float]
"""The seed, how it failed ("": it did not), and the seconds of CPU it took."""


def run_one(job: Job) -> Outcome:
    kind, seed, profile = job
    module = importlib.import_module(KINDS[kind])
    began = time.process_time()
    try:
        if profile is None:
            module.simulate(seed)
        else:
            module.simulate(seed, profile)
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        lines = str(error).splitlines() or [""]
        return seed, f"{type(error).__name__} {lines[0]}"[:LINE_CHARS], time.process_time() - began
    return seed, "", time.process_time() - began


def run_all(jobs: list[Job], processes: int) -> Iterator[Outcome]:
    if processes < 2:
        yield from map(run_one, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, initializer=_prepare, maxtasksperchild=50) as pool:
        yield from pool.imap_unordered(run_one, jobs)


def _prepare() -> None:
    here = str(Path(__file__).parent)
    if here not in sys.path:
        sys.path.insert(0, here)


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
    parser.add_argument("--text", default="", help="list only failures with this text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    _prepare()
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
            f"replay: RAFTQ_SIM_SEED=N{profile} .venv/bin/python -m pytest tests/sim -k "
            f"{TESTS[given.kind]}\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
