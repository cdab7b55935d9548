"""Shell: put, get and ack of the same messages, RaftQ and persist-queue side by side."""

import time
from collections.abc import Callable
from pathlib import Path

from raftq.node.queue.embedded.queue import Queue
from raftq_bench.report import Bar, Result
from raftq_bench.runner import BATCH_RECORDS, Settings, make_batches, make_values

try:
    import persistqueue
except ImportError:  # a development dependency
    persistqueue = None  # type: ignore[assignment]

MESSAGES = 100_000
DEQUEUE_RECORDS = 500
RIVAL_S_MAX = 90.0
"""A rival that would take longer for all messages is measured with fewer."""
PROBE_MESSAGES = 1000
PROBE_GROWTH = 3
SQLITE_RATIO_MIN = 30.0
FILE_RATIO_MIN = 10.0

Round = Callable[[Path, list[bytes]], float]


def raftq_batches(path: Path, values: list[bytes], fsync: str = "interval") -> float:
    """Seconds for everything, by the batch calls."""
    batches = make_batches(values)
    with Queue.open(path, fsync=fsync) as queue:
        start = time.perf_counter()
        for batch in batches:
            queue.enqueue_batch(batch)
        done = 0
        while messages := queue.dequeue_batch(DEQUEUE_RECORDS):
            queue.ack_batch(messages)
            done += len(messages)
        seconds = time.perf_counter() - start
    assert done == len(values), f"{done} of {len(values)} messages came back"
    return seconds


def raftq_batches_synced(path: Path, values: list[bytes]) -> float:
    return raftq_batches(path, values, fsync="always")


def raftq_singles(path: Path, values: list[bytes]) -> float:
    """Seconds for everything, one call per message and verb."""
    with Queue.open(path) as queue:
        start = time.perf_counter()
        for value in values:
            queue.enqueue(value)
        done = 0
        while (message := queue.dequeue()) is not None:
            queue.ack(message)
            done += 1
        seconds = time.perf_counter() - start
    assert done == len(values), f"{done} of {len(values)} messages came back"
    return seconds


def sqlite_ack_queue(path: Path, values: list[bytes]) -> float:
    queue = persistqueue.SQLiteAckQueue(str(path))
    start = time.perf_counter()
    for value in values:
        queue.put(value)
    for _ in values:
        queue.ack(queue.get(block=False))
    seconds = time.perf_counter() - start
    queue.close()
    return seconds


def file_queue(path: Path, values: list[bytes]) -> float:
    queue = persistqueue.Queue(str(path))
    start = time.perf_counter()
    for value in values:
        queue.put(value)
    for _ in values:
        queue.get(block=False)
        queue.task_done()
    seconds = time.perf_counter() - start
    queue.headf.close()
    queue.tailf.close()
    return seconds


class Tally:
    """Messages and seconds of one contestant over all its rounds."""

    def __init__(self, settings: Settings, go: Round) -> None:
        self._settings = settings
        self._go = go
        self.count = 0
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    def run(self, values: list[bytes], seconds: float) -> None:
        """Runs whole rounds, each in a new directory, for at least this long."""
        until = self.seconds + seconds
        while self.seconds < until:
            with self._settings.scratch() as path:
                self.seconds += self._go(path / "queue", values)
            self.count += len(values)


RIVALS: dict[str, tuple[Round, float, str]] = {
    "persistqueue.SQLiteAckQueue": (
        sqlite_ack_queue,
        SQLITE_RATIO_MIN,
        "its defaults: auto_commit=True, one SQLite transaction per put, get and ack, "
        "journal_mode=WAL, synchronous=FULL (an fsync per transaction)",
    ),
    "persistqueue.Queue": (
        file_queue,
        FILE_RATIO_MIN,
        "its defaults: autosave=False, a flush and a rewritten info file per put and task_done, "
        "an fsync per chunk of 100 messages",
    ),
}


def measure(settings: Settings) -> list[Result]:
    if persistqueue is None:
        raise ValueError("the figure `rivals` needs persist-queue: pip install 'raftq[dev]'")
    count = settings.size(MESSAGES, 2 * BATCH_RECORDS)
    values = make_values(count)
    own = {
        "batch": Tally(settings, raftq_batches),
        "single": Tally(settings, raftq_singles),
        "batch_synced": Tally(settings, raftq_batches_synced),
    }
    rivals = {name: Tally(settings, go) for name, (go, _, _) in RIVALS.items()}
    # RaftQ runs before, between and after its rivals, a share of its time each.
    share = settings.seconds / (len(rivals) + 1)
    probes = {}
    for name, rival in rivals.items():
        for tally in own.values():
            tally.run(values, share)
        probes[name] = _probe(settings, RIVALS[name][0], values)
        rival.run(values[: max(probes[name])], settings.seconds)
    for tally in own.values():
        tally.run(values, share)
    return [_result(settings, name, own, rivals[name], (probes[name], count)) for name in rivals]


def _probe(settings: Settings, go: Round, values: list[bytes]) -> dict[int, float]:
    """Rates for more and more messages, up to as many as the rival can do in reasonable time.

    A rival may slow down with every message. So the next size is tried only if it would end in time
    even if the cost grew with the square of the size."""
    rates: dict[int, float] = {}
    size = min(PROBE_MESSAGES, len(values))
    while True:
        probe = Tally(settings, go)
        probe.run(values[:size], settings.seconds / 1000)
        rates[size] = round(probe.rate, 1)
        larger = min(size * PROBE_GROWTH, len(values))
        if size == len(values) or (larger / size) ** 2 * size / probe.rate > RIVAL_S_MAX:
            return rates
        size = larger


def _result(
    settings: Settings,
    name: str,
    own: dict[str, Tally],
    rival: Tally,
    sizes: tuple[dict[int, float], int],
) -> Result:
    single = own["single"].rate
    synced = own["batch_synced"].rate
    probes, count = sizes
    used = max(probes)
    notes = [
        "the bar is on the batch calls: enqueue_batch(1000), dequeue_batch(500), ack_batch",
        f"RaftQ one by one: {single:,.0f} messages/s, {single / rival.rate:,.1f} x the rival",
        f"RaftQ batch calls with fsync always: {synced:,.0f} messages/s, "
        f"{synced / rival.rate:,.1f} x the rival",
        f"rival: {RIVALS[name][2]}",
        "RaftQ's default is fsync interval: the death of the process loses nothing, a power cut "
        "up to the last second",
    ]
    by_size = ", ".join(f"{rate:,.0f}/s for {size:,}" for size, rate in probes.items())
    notes.append(f"the rival by number of messages: {by_size}")
    if used < count:
        notes.append(
            f"the rival did {used:,} messages at a time, not {count:,}, which could take over "
            f"{RIVAL_S_MAX:.0f} s; the ratio compares rates"
        )
    return Result(
        figure="rivals",
        title=f"put + get + ack of {count:,} messages, against {name}",
        unit="messages/s",
        value=own["batch"].rate,
        measured_s=min(own["batch"].seconds, rival.seconds),
        fsync="interval (1 s); the rival as noted",
        baseline_name=f"{name}, put all, then get and ack each",
        baseline=rival.rate,
        bar=Bar("ratio", RIVALS[name][1]),
        notes=notes,
        detail={
            "rival_messages": used,
            "rival_rates": {str(size): rate for size, rate in probes.items()},
            "rival_seconds": round(rival.seconds, 3),
            "single_rate": round(single, 1),
            "single_ratio": round(single / rival.rate, 2),
            "batch_synced_rate": round(synced, 1),
            "batch_synced_ratio": round(synced / rival.rate, 2),
        },
    ).judge(settings)
