"""Shell: how fast one thread puts messages into an embedded queue."""

from pathlib import Path

from raftq.client.wire.batch import encode, encode_one
from raftq.node.queue.embedded.queue import Queue
from raftq_bench.append import NOW_MS, bare_side
from raftq_bench.bare import BareFiles
from raftq_bench.report import Bar, Result
from raftq_bench.runner import (
    BATCH_RECORDS,
    GIB,
    Settings,
    Side,
    Timing,
    endless,
    interleave,
    make_batches,
    make_values,
)

BATCH_RATE_MIN = 400_000
SINGLE_RATE_MIN = 60_000
SINGLES_PER_STEP = 500


def rest(queue: Queue) -> None:
    """Writes everything to the disk before the next side starts; drops everything if it is much."""
    queue.sync()
    if queue.stats().disk_bytes > GIB:
        queue.purge()
        queue.compact()


def measure_batches(settings: Settings) -> list[Result]:
    batches = make_batches(make_values())
    following = endless(batches)
    with settings.scratch() as path, Queue.open(path / "queue", fsync="interval") as queue:

        def step() -> int:
            return len(queue.enqueue_batch(following()))

        bare = BareFiles(path / "bare")
        encoded = [encode(values, timestamps=NOW_MS) for values in batches]
        timings = interleave(
            settings,
            {"writev": bare_side(bare, encoded), "queue": Side(step, lambda: rest(queue))},
        )
        bare.close()
    record_bytes = sum(map(len, encoded)) / (len(encoded) * BATCH_RECORDS)
    return [
        _result(
            settings,
            timings,
            record_bytes,
            figure="enqueue-batch",
            title="Queue.enqueue_batch(1000), one thread",
            limit=BATCH_RATE_MIN,
        )
    ]


def measure_singles(settings: Settings) -> list[Result]:
    values = make_values()
    parts = [values[at : at + SINGLES_PER_STEP] for at in range(0, len(values), SINGLES_PER_STEP)]
    following = endless(parts)
    with settings.scratch() as path, Queue.open(path / "queue", fsync="interval") as queue:

        def step() -> int:
            enqueue = queue.enqueue
            for value in following():
                enqueue(value)
            return SINGLES_PER_STEP

        bare = BareFiles(path / "bare")
        encoded = [encode_one(value, NOW_MS) for value in values[:SINGLES_PER_STEP]]
        timings = interleave(
            settings,
            {"writev": bare_side(bare, encoded), "queue": Side(step, lambda: rest(queue))},
        )
        bare.close()
    return [
        _result(
            settings,
            timings,
            len(encoded[0]),
            figure="enqueue",
            title="Queue.enqueue one by one, one thread",
            limit=SINGLE_RATE_MIN,
        )
    ]


def _result(
    settings: Settings,
    timings: dict[str, Timing],
    record_bytes: float,
    *,
    figure: str,
    title: str,
    limit: float,
) -> Result:
    return Result(
        figure=figure,
        title=title,
        unit="messages/s",
        value=timings["queue"].rate,
        measured_s=timings["queue"].seconds,
        fsync="interval (1 s)",
        baseline_name="os.writev of the same bytes in the same pieces, no sync",
        baseline=timings["writev"].rate / record_bytes,
        bar=Bar("value", limit),
        notes=[f"{timings['queue'].cpu_us:.2f} us of processor time per message"],
        detail={name: timing.facts() for name, timing in timings.items()},
    ).judge(settings)


def fill(queue: Queue, batches: list[list[bytes]], count: int) -> None:
    """Puts `count` messages, a multiple of the batch, into the queue."""
    following = endless(batches)
    for _ in range(0, count, BATCH_RECORDS):
        queue.enqueue_batch(following())


def data_files(directory: Path) -> list[Path]:
    """The files that hold the messages of a queue, oldest first."""
    return sorted((directory / "data").glob("*.log"))
