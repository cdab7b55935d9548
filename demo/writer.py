"""Shell: the process of the demo that enqueues, and the parent's side that kills it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from raftq.node.queue.embedded.options import EmbeddedOptions
from raftq.node.queue.embedded.queue import Queue
from raftq_demo.checks import WriterRun
from raftq_demo.plan import Job, payload

OPTIONS = EmbeddedOptions(backoff=0.1, max_deliveries=3)


def write(directory: str, jobs: Iterable[Job]) -> None:
    """The writer process: does the jobs, and prints each one when it is acknowledged."""
    with Queue(directory, OPTIONS) as queue:
        for job in jobs:
            ids = _send(queue, job)
            # One small write to a pipe arrives whole or not at all, even if the writer dies.
            os.write(1, f"{job.index} {ids[0]} {ids[-1]}\n".encode())


def run_writer(
    directory: str,
    arguments: Sequence[str],
    skipped: Iterable[int],
    kill: tuple[int, float] | None = None,
) -> WriterRun:
    """Starts a writer that skips some jobs, and collects what it acknowledges.

    `kill` is (jobs, seconds): the writer gets SIGKILL that many seconds after that many jobs."""
    run = WriterRun()
    command = [sys.executable, "-m", "raftq_demo", *arguments, "--writer", directory]
    # A small pipe keeps the writer from running far ahead of the reader.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pipesize=4096)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(" ".join(map(str, skipped)).encode())
        child.stdin.close()
        began = 0.0
        for line in child.stdout:
            began = began or time.perf_counter()
            index, first, last = line.decode().split()
            run.acked[int(index)] = (first, last)
            if kill is not None and len(run.acked) == kill[0]:
                time.sleep(kill[1])
                child.send_signal(signal.SIGKILL)
        run.seconds = time.perf_counter() - began
        run.exit_code = child.wait()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    return run


def _send(queue: Queue, job: Job) -> list[str]:
    values = [payload(number) for number in range(job.start, job.end)]
    lane = job.lane
    if job.kind == "single":
        return [queue.enqueue(values[0], priority=lane)]
    if job.kind == "poison":
        return [queue.enqueue(values[0], priority=lane, headers={"poison": b"1"})]
    if job.kind == "batch":
        return queue.enqueue_batch(values, priority=lane)
    due = time.time() + job.delay  # noqa: TID251 - a real due time
    headers = [{"due": repr(due).encode()}] * len(values)
    return queue.enqueue_batch(values, priority=lane, deliver_at=due, headers=headers)
