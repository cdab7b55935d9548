"""Shell: how fast one thread takes messages out of an embedded queue and acks them."""

import os
from pathlib import Path

from raftq.node.queue.embedded.queue import Queue
from raftq_bench.publish import data_files, fill, rest
from raftq_bench.report import Bar, Result
from raftq_bench.runner import Settings, Side, interleave, make_batches, make_values

RATE_MIN = 250_000
DEQUEUE_RECORDS = 500
FILL_RECORDS = 200_000
READ_BYTES = 256 * 1024


class BareReader:
    """Reads the bytes of stored messages over and over, from the page cache."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1
        self._position = 0
        self.renew()

    def renew(self) -> None:
        self.close()
        newest = max(data_files(self._directory), key=lambda path: path.stat().st_size)
        self._fd = os.open(newest, os.O_RDONLY)
        self._position = 0

    def step(self) -> int:
        data = os.pread(self._fd, READ_BYTES, self._position)
        if not data:
            self._position = 0
            return self.step()
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def measure(settings: Settings) -> list[Result]:
    batches = make_batches(make_values())
    count = settings.size(FILL_RECORDS, 20_000)
    with settings.scratch() as path, Queue.open(path / "queue", fsync="interval") as queue:

        def step() -> int:
            messages = queue.dequeue_batch(DEQUEUE_RECORDS)
            queue.ack_batch(messages)
            return len(messages)

        def refill() -> None:
            rest(queue)
            missing = count - queue.stats().pending
            fill(queue, batches, missing - missing % len(batches[0]))

        refill()
        reader = BareReader(path / "queue")
        timings = interleave(
            settings, {"read": Side(reader.step, reader.renew), "queue": Side(step, refill)}
        )
        stored = queue.stats()
        record_bytes = stored.disk_bytes / max(stored.total, 1)
        reader.close()
    return [
        Result(
            figure="dequeue",
            title="dequeue_batch(500) + ack_batch, one thread",
            unit="messages/s",
            value=timings["queue"].rate,
            measured_s=timings["queue"].seconds,
            fsync="interval (1 s)",
            baseline_name="os.pread of the stored bytes, 256 KiB at a time",
            baseline=timings["read"].rate / record_bytes,
            bar=Bar("value", RATE_MIN),
            notes=[
                f"{timings['queue'].cpu_us:.2f} us of processor time per message",
                f"filled by enqueue_batch(1000) with {count:,} messages at a time (not timed), "
                "so they are read from the page cache; the figure `stream` reads from the disk",
            ],
            detail={name: timing.facts() for name, timing in timings.items()},
        ).judge(settings)
    ]
