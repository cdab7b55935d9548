"""Shell: fsync `always`: how many threads share one fsync."""

import os
import threading
import time
from pathlib import Path

from raftq.client.wire.batch import encode_one
from raftq.node.queue.embedded.queue import Queue
from raftq_bench.append import NOW_MS
from raftq_bench.publish import rest
from raftq_bench.report import Bar, Result
from raftq_bench.runner import Settings, Side, interleave, make_values

THREADS = 8
RATIO_MIN = 3.0


class BareSync:
    """One write and one fdatasync per message, by one thread."""

    def __init__(self, path: Path, message: bytes) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        self._message = message

    def step(self) -> int:
        os.write(self._fd, self._message)
        os.fdatasync(self._fd)
        return 1

    def close(self) -> None:
        os.close(self._fd)


class Crowd(Side):
    """Threads that all enqueue into one queue for the length of a slice."""

    def __init__(self, queue: Queue, value: bytes, threads: int) -> None:
        super().__init__(lambda: 0, lambda: rest(queue))
        self._queue = queue
        self._value = value
        self._threads = threads

    def slice(self, seconds: float) -> tuple[int, float]:
        counts = [0] * self._threads
        start = time.perf_counter()
        until = start + seconds

        def work(number: int) -> None:
            enqueue, value = self._queue.enqueue, self._value
            # At least one: a busy machine may begin a short slice with its end.
            while not counts[number] or time.perf_counter() < until:
                enqueue(value)
                counts[number] += 1

        threads = [threading.Thread(target=work, args=(n,)) for n in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts), time.perf_counter() - start


def measure(settings: Settings) -> list[Result]:
    value = make_values(1)[0]
    with settings.scratch() as path, Queue.open(path / "queue", fsync="always") as queue:
        bare = BareSync(path / "bare", bytes(encode_one(value, NOW_MS)))
        timings = interleave(
            settings,
            {
                "write_fdatasync": Side(bare.step),
                "queue_1": Crowd(queue, value, 1),
                "queue_8": Crowd(queue, value, THREADS),
            },
        )
        bare.close()
    crowd = timings["queue_8"]
    detail = {name: timing.facts() for name, timing in timings.items()}
    title = f"Queue.enqueue, fsync always, {THREADS} threads"
    shared = Result(
        figure="group-commit",
        title=title,
        unit="messages/s",
        value=crowd.rate,
        measured_s=crowd.seconds,
        fsync="always",
        baseline_name="the same queue with one thread: one fsync per message",
        baseline=timings["queue_1"].rate,
        bar=Bar("ratio", RATIO_MIN),
        notes=[f"{crowd.cpu_us:.0f} us of processor time per message"],
        detail=detail,
    )
    against_bare = Result(
        figure="group-commit",
        title=title + ", against a bare loop",
        unit="messages/s",
        value=crowd.rate,
        measured_s=crowd.seconds,
        fsync="always",
        baseline_name="write + fdatasync of the same bytes per message, one thread, no queue",
        baseline=timings["write_fdatasync"].rate,
        notes=[
            "the quicker the disk's fsync, the lower this ratio: what is left is Python's threads"
        ],
        detail=detail,
    )
    return [shared.judge(settings), against_bare.judge(settings)]
