"""Shell: what the memory and crash figures do in their own processes.

`python -m raftq_bench.child ACTION DIRECTORY [NUMBER...]` prints one line of JSON.

    fill    DIRECTORY BYTES                  put messages in, close
    crash   DIRECTORY BYTES BATCH            put messages in, ack 99 of 100, die by SIGKILL
    open    DIRECTORY                        open the queue, print how long it took
    stream  DIRECTORY SAMPLE_BYTES SECONDS   take and ack everything, sample memory meanwhile
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from raftq.node.queue.embedded.queue import Queue
from raftq_bench.publish import fill
from raftq_bench.runner import VALUE_BYTES, endless, make_batches, make_values

DEQUEUE_RECORDS = 500
LEFT_EVERY = 100
"""One of this many messages is taken but never acked."""
LEASE_S = 3600.0


def memory_mb(name: str) -> float:
    """A line of /proc/self/status, such as VmRSS or VmHWM, in MB."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"the kernel tells no {name}")


def run_fill(directory: str, size: int) -> dict[str, Any]:
    with Queue.open(directory) as queue:
        fill(queue, make_batches(make_values()), size // VALUE_BYTES)
        return {"messages": queue.stats().total}


def run_crash(directory: str, size: int, batch: int) -> dict[str, Any]:
    """Never returns: the parent sees the signal."""
    queue = Queue.open(directory, visibility_timeout=LEASE_S)
    count = size // VALUE_BYTES
    values = make_values()
    if batch > 1:
        fill(queue, make_batches(values), count)
    else:
        following = endless([values])
        for _ in range(0, count, len(values)):
            for value in following():
                queue.enqueue(value)
    while messages := queue.dequeue_batch(DEQUEUE_RECORDS):
        queue.ack_batch([message for message in messages if message.offset % LEFT_EVERY])
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive after SIGKILL")


def run_open(directory: str) -> dict[str, Any]:
    before = memory_mb("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    queue = Queue.open(directory)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    found = {
        "seconds": seconds,
        "cpu_s": cpu,
        "rss_mb": memory_mb("VmRSS"),
        "rss_peak_mb": memory_mb("VmHWM"),
        "rss_before_mb": before,
        "first_message_s": 0.0,
        "unsettled": 0,
    }
    stats = queue.stats()
    found["unsettled"] = stats.pending + stats.in_flight
    first = queue.dequeue()
    found["first_message_s"] = time.perf_counter() - start
    assert first is not None or not stats.total, "nothing to deliver after the crash"
    queue.close()
    return found


def run_stream(directory: str, sample_bytes: int, seconds_min: float) -> dict[str, Any]:
    """Streams the whole queue repeatedly until the time is up."""
    samples = []
    with Queue.open(directory) as queue:
        seen, due = 0, sample_bytes
        start = time.perf_counter()
        while True:
            messages = queue.dequeue_batch(DEQUEUE_RECORDS)
            if not messages:
                if time.perf_counter() - start >= seconds_min:
                    break
                queue.replay_from(offset=queue.stats().start_offset)
                continue
            seen += sum(len(message.value) for message in messages)
            queue.ack_batch(messages)
            if seen >= due:
                samples.append(round(memory_mb("VmRSS"), 2))
                due += sample_bytes
        seconds = time.perf_counter() - start
    return {"bytes": seen, "seconds": seconds, "rss_mb": samples}


ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "fill": run_fill,
    "crash": run_crash,
    "open": run_open,
    "stream": run_stream,
}


def run_child(action: str, directory: str, *numbers: float) -> dict[str, Any]:
    """Runs an action in a new process. One that dies by SIGKILL returns an empty answer."""
    command = [sys.executable, "-m", "raftq_bench.child", action, directory]
    done = subprocess.run([*command, *map(str, numbers)], stdout=subprocess.PIPE, check=False)
    expected = -signal.SIGKILL if action == "crash" else 0
    assert done.returncode == expected, f"{action} ended with {done.returncode}"
    if action == "crash":
        return {}
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def main(arguments: list[str]) -> None:
    action, directory, *numbers = arguments
    given = [float(number) if "." in number else int(number) for number in numbers]
    print(json.dumps(ACTIONS[action](directory, *given)))


if __name__ == "__main__":
    main(sys.argv[1:])
