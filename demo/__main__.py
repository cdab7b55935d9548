"""Shell: `python -m raftq_demo`: kill a writer, open its queue again, count what is there.

A writer process enqueues messages in five lanes, some delayed, some poisoned, and prints after each
call what was acknowledged. It dies by SIGKILL at a random moment. The queue is opened again, and
its content is compared with what was acknowledged. A second writer sends the rest; four threads
consume everything. Then three nodes start as real processes, two producers write to them, and the
busiest leader is killed twice (cluster.py). Then workers share a topic of these nodes as one group
(group.py), and Spark reads everything while a leader is killed (spark_story.py). The last line and
the exit code follow from all checks.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from raftq.node.queue.embedded.message import DeadMessage
from raftq.node.queue.embedded.queue import Queue
from raftq_demo import cluster_writer, group_worker, report
from raftq_demo.checks import (
    Check,
    Found,
    judge_delivery,
    judge_end,
    judge_survival,
    judge_writers,
    verdict,
)
from raftq_demo.cluster import judge_cluster, run_cluster_story, started_cluster
from raftq_demo.consumers import BATCHES, RATE_PART, Tally, consume_all
from raftq_demo.group import run_group_story
from raftq_demo.group_checks import judge_group
from raftq_demo.plan import plan
from raftq_demo.spark_story import judge_spark, run_spark_story
from raftq_demo.writer import OPTIONS, run_writer, write

MESSAGES = 100_000
MESSAGES_MIN = 2000
BROWSE = 5000
PIPE_COLUMNS = 120


class Demo:
    """One run: its settings and its findings."""

    def __init__(self, messages: int, seed: int, console: Console) -> None:
        self._messages = messages
        self._seed = seed
        self._console = console
        self._jobs = plan(messages, seed)
        self._arguments = ("--messages", str(messages), "--seed", str(seed))
        self._checks: list[Check] = []
        self._timings: list[tuple[str, int | None, float]] = []

    def run(self, directory: str) -> bool:
        """Runs the whole demo. Returns True if every check held."""
        self._say(f"RaftQ demo: {self._messages} messages, seed {self._seed}, in {directory}")
        found = self._kill_and_compare(directory)
        self._finish_writing(directory, found)
        tally, letters = self._consume(directory)
        with started_cluster(f"{directory}-cluster", self._say) as cluster:
            story = run_cluster_story(cluster, self._say)
            self._checks += judge_cluster(story)
            shared = run_group_story(cluster.bootstrap, self._say)
            self._checks += judge_group(shared)
            spark = run_spark_story(cluster, self._say)
            self._checks += judge_spark(spark) if spark is not None else []
        for table in (
            report.checks_table(self._checks),
            report.shares_table(tally.seen.lanes),
            report.delays_table(tally.seen),
            report.letters_table(letters),
            report.timings_table(self._timings),
            report.failovers_table(story.kills, story.failovers()),
            report.workers_table(shared),
            report.shares_table(shared.lanes(), "Shares in the group while all lanes are busy"),
        ):
            self._console.print(table)
        if spark is not None:
            rate = spark.records / spark.seconds
            self._say(
                f"Spark read {spark.records} records in {spark.seconds:.1f} s ({rate:,.0f}/s)"
            )
        passed, sentence = verdict(self._checks)
        self._console.print(Text(sentence, style="bold green" if passed else "bold red"))
        return passed

    def _kill_and_compare(self, directory: str) -> Found:
        rng = random.Random(self._seed + 1)
        calls, lag = int(len(self._jobs) * rng.uniform(0.3, 0.7)), rng.uniform(0, 0.003)
        self._say(f"1. a writer enqueues; SIGKILL {1000 * lag:.2f} ms after its call {calls}")
        run = run_writer(directory, self._arguments, (), (calls, lag))
        acked = sum(len(self._jobs[index].numbers) for index in run.acked)
        self._timings.append(("enqueue, until the kill", acked, run.seconds))
        began = time.perf_counter()
        with Queue(directory, OPTIONS) as queue:
            self._timings.append(("open after the kill", None, time.perf_counter() - began))
            found = _look(queue)
        self._say(f"2. acknowledged before the kill: {acked}; found after it: {len(found.ids)}")
        self._checks += judge_survival(self._jobs, run, found)
        return found

    def _finish_writing(self, directory: str, found: Found) -> None:
        stored = [job.index for job in self._jobs if job.start in found.ids]
        self._say(f"3. a second writer makes the other {len(self._jobs) - len(stored)} calls")
        run = run_writer(directory, self._arguments, stored)
        sent = sum(len(self._jobs[index].numbers) for index in run.acked)
        self._timings.append(("enqueue, second writer", sent, run.seconds))
        self._checks += judge_writers(self._jobs, found, run)

    def _consume(self, directory: str) -> tuple[Tally, list[DeadMessage]]:
        self._say(f"4. {len(BATCHES)} threads consume; poison is refused, delays are waited for")
        with Queue(directory, OPTIONS) as queue:
            began = time.perf_counter()
            tally = consume_all(queue, self._jobs)
            elapsed = time.perf_counter() - began
            letters = queue.dead_letters()
            self._checks += judge_delivery(self._jobs, tally.seen, letters, OPTIONS.max_deliveries)
            self._checks += judge_end(queue.stats(), queue.verify())
        part = f"dequeue, compare and ack, first {RATE_PART:.0%}"
        self._timings.append((part, tally.rated, tally.rated_s))
        self._timings.append(("all of it, with waits for delays and retries", None, elapsed))
        return tally, letters

    def _say(self, text: str) -> None:
        self._console.print(Text(text))


def _look(queue: Queue) -> Found:
    """Every message of the queue, also those that are not due yet."""
    found = Found()
    # Delayed ones first: a message that becomes due in between is then seen twice, never missed.
    for delayed in queue.delayed(limit=queue.stats().delayed or 1):
        found.add(delayed.value, delayed.id)
    messages, offset = queue.browse(0, BROWSE)
    while messages:
        for message in messages:
            found.add(message.value, message.id)
        messages, offset = queue.browse(offset, BROWSE)
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("raftq_demo", description="Kill a queue, lose nothing.")
    parser.add_argument("--messages", type=int, default=MESSAGES, help=f"default {MESSAGES}")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, printed")
    parser.add_argument("--writer", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--cluster-writer", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    parser.add_argument("--group-worker", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    parser.add_argument("--writer-number", type=int, default=0, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.messages < MESSAGES_MIN:
        parser.error(f"--messages must be at least {MESSAGES_MIN}")
    if parsed.seed is None:
        parsed.seed = random.SystemRandom().randrange(1_000_000)
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parse(arguments)
    if parsed.cluster_writer:
        asyncio.run(cluster_writer.write(parsed.cluster_writer, parsed.writer_number))
        return 0
    if parsed.group_worker:
        asyncio.run(group_worker.work(parsed.group_worker))
        return 0
    if parsed.writer:
        skipped = frozenset(map(int, sys.stdin.read().split()))
        jobs = plan(parsed.messages, parsed.seed)
        write(parsed.writer, [job for job in jobs if job.index not in skipped])
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    with tempfile.TemporaryDirectory(prefix="raftq-demo-") as directory:
        passed = Demo(parsed.messages, parsed.seed, console).run(f"{directory}/queue")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
