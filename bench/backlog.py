"""Shell: whether a message costs more if many others wait.

Two queues are open in one process, one with a short backlog and one with a long one. They take
turns after every few milliseconds of work. After each turn the backlog is restored to its length,
untimed. Dequeued messages are read from the page cache on both sides: the front of a long backlog
is normally on the disk, and this figure is about the cost of the queue, not of the disk.
"""

import bisect
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from raftq.node.queue.embedded.queue import Queue
from raftq_bench.publish import data_files, fill
from raftq_bench.report import Bar, Result
from raftq_bench.runner import (
    GIB,
    MIB,
    VALUE_BYTES,
    Settings,
    endless,
    make_batches,
    make_values,
)

SHORT = 1000
LONG = 10_000_000
RATIO_MAX = 1.2
DEQUEUE_RECORDS = 500
STEP_RECORDS = 1000
FREE_GIB_MIN = 30
SMALL_VALUE_BYTES = 100
COMPACT_BYTES = 512 * MIB
WARM_RECORDS = 50_000


class Backlog:
    """A queue that always has the same number of messages between turns."""

    def __init__(self, directory: Path, count: int, values: list[bytes]) -> None:
        self._directory = directory
        self._values = values[:STEP_RECORDS]
        self._batches = make_batches(values)
        self._following = endless(self._batches)
        self._queue = Queue.open(directory)
        self._since_compact = 0
        self._warm_below = 0
        fill(self._queue, self._batches, count)
        self._front = 0

    def enqueue(self) -> None:
        enqueue = self._queue.enqueue
        for value in self._values:
            enqueue(value)

    def enqueue_batch(self) -> None:
        self._queue.enqueue_batch(self._following())

    def consume(self) -> None:
        for _ in range(0, STEP_RECORDS, DEQUEUE_RECORDS):
            messages = self._queue.dequeue_batch(DEQUEUE_RECORDS)
            self._queue.ack_batch(messages)
            assert len(messages) == DEQUEUE_RECORDS, "the backlog ran out"

    def restore(self, consumed: bool) -> None:
        """Restores the backlog to its length, and limits what is on the disk."""
        if consumed:
            self.enqueue_batch()
        else:
            self.consume()
        self._front += STEP_RECORDS
        self._since_compact += STEP_RECORDS * VALUE_BYTES
        if self._since_compact > COMPACT_BYTES:
            self._since_compact = 0
            self._queue.compact()
        self._warm()

    def _warm(self) -> None:
        """Reads the file that the next turn reads, once."""
        ahead = self._front + 2 * STEP_RECORDS
        if ahead < self._warm_below:
            return
        files = data_files(self._directory)
        bases = [int(file.stem) for file in files]
        number = max(bisect.bisect_right(bases, ahead) - 1, 0)
        files[number].read_bytes()
        following = bases[number + 1 :]
        # Later data than the last file is being written, so it is in the page cache.
        self._warm_below = following[0] if following else ahead + WARM_RECORDS

    def close(self) -> None:
        self._queue.close()


def measure(settings: Settings) -> list[Result]:
    settings.directory.mkdir(parents=True, exist_ok=True)
    roomy = shutil.disk_usage(settings.directory).free > FREE_GIB_MIN * GIB
    value_bytes = VALUE_BYTES if roomy else SMALL_VALUE_BYTES
    long = settings.size(LONG, 20_000)
    values = make_values(size=value_bytes)
    results = []
    with settings.scratch() as path:
        sides = {
            "short": Backlog(path / "short", SHORT, values),
            "long": Backlog(path / "long", long, values),
        }
        # Enqueueing one by one comes last: a long backlog would keep these small batches, which
        # cost more to consume, for later turns; a short one consumes them at once and untimed.
        for title, verb in (
            ("dequeue_batch(500) + ack_batch", Backlog.consume),
            ("Queue.enqueue_batch(1000)", Backlog.enqueue_batch),
            ("Queue.enqueue", Backlog.enqueue),
        ):
            costs = _take_turns(settings, sides, verb)
            results.append(_result(settings, title, costs, (long, value_bytes)))
        for side in sides.values():
            side.close()
    return results


class Costs:
    """The cost of the turns of one side."""

    def __init__(self) -> None:
        self.turns: list[float] = []
        self.seconds = 0.0
        self.cpu_s = 0.0

    def add(self, seconds: float, cpu_s: float) -> None:
        self.turns.append(seconds)
        self.seconds += seconds
        self.cpu_s += cpu_s

    def facts(self) -> dict[str, float]:
        """Microseconds per message; processor time is that of the calling thread."""
        scale = 1e6 / STEP_RECORDS
        return {
            "mean_us": self.seconds / len(self.turns) * scale,
            "median_us": statistics.median(self.turns) * scale,
            "cpu_us": self.cpu_s / len(self.turns) * scale,
            "turns": len(self.turns),
            "seconds": self.seconds,
        }


def _take_turns(
    settings: Settings, sides: dict[str, Backlog], verb: Callable[[Backlog], None]
) -> dict[str, dict[str, float]]:
    """The cost of a message on each side; the first turns are not counted."""
    consumed = verb is Backlog.consume
    order = list(sides)
    for enough in (settings.seconds / 20, settings.seconds):
        costs = {name: Costs() for name in sides}
        while min(each.seconds for each in costs.values()) < enough:
            for name in order:
                cpu = time.thread_time()
                start = time.perf_counter()
                verb(sides[name])
                seconds = time.perf_counter() - start
                costs[name].add(seconds, time.thread_time() - cpu)
                sides[name].restore(consumed)
            order.reverse()
    return {name: each.facts() for name, each in costs.items()}


def _result(
    settings: Settings, title: str, costs: dict[str, dict[str, float]], long: tuple[int, int]
) -> Result:
    count, value_bytes = long
    many, few = costs["long"], costs["short"]
    return Result(
        figure="backlog",
        title=f"{title} with {count:,} messages waiting",
        unit="us/message",
        value=many["mean_us"],
        measured_s=min(many["seconds"], few["seconds"]),
        fsync="interval (1 s)",
        baseline_name=f"the same with {SHORT:,} messages waiting",
        baseline=few["mean_us"],
        bar=Bar("ratio", RATIO_MAX, at_most=True),
        notes=[
            f"means of {many['turns']:,} turns of {STEP_RECORDS:,} messages of {value_bytes} bytes",
            f"medians {many['median_us']:.2f} and {few['median_us']:.2f} us, "
            f"ratio {many['median_us'] / few['median_us']:.2f}; "
            f"processor time {many['cpu_us']:.2f} and {few['cpu_us']:.2f} us, "
            f"ratio {many['cpu_us'] / few['cpu_us']:.2f}",
        ],
        detail=dict(costs),
    ).judge(settings)
