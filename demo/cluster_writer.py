"""Shell: the process of the demo that produces to the cluster, and the parent's side of it.

Each record contains its sender and its number. For every acknowledged record the writer prints one
line

    number partition offset sent acknowledged      times of the clock that all processes share

so that the parent knows which records it must find, and how long a failover delayed them.
"""

import asyncio
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from raftq import aio
from raftq.client.common.errors import RaftqError
from raftq.client.results import Delivery
from raftq_demo.child import DemoProcess

TOPIC = "orders"
BURST, PAUSE_S = 40, 0.01
PADDING = b"." * 180


def value_of(writer: int, number: int) -> bytes:
    return b"%d:%d:%s" % (writer, number, PADDING)


def clock() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


async def write(bootstrap: str, writer: int) -> None:
    """Sends bursts until the parent closes standard input, then waits for records in flight."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, lambda: (sys.stdin.read(), loop.call_soon_threadsafe(stop.set)))
    number = 0
    waiting: set[asyncio.Task[None]] = set()
    async with aio.Producer(bootstrap, acks="all", linger_ms=2) as producer:
        while not stop.is_set():
            sent = clock()
            for _ in range(BURST):
                key = b"%d" % (number % 97)
                delivery = await producer.send(TOPIC, value_of(writer, number), key=key)
                task = loop.create_task(_report(delivery, number, sent))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                number += 1
            await _pause(stop)
        await producer.flush()
        if waiting:
            await asyncio.wait(waiting)
    sys.stdout.write(f"sent {number}\n")
    sys.stdout.flush()


async def _report(delivery: Delivery, number: int, sent: float) -> None:
    try:
        appended = await delivery
    except RaftqError as error:
        sys.stdout.write(f"failed {number} {error.outcome} {error}\n")
    else:
        place = f"{appended.partition} {appended.offset}"
        sys.stdout.write(f"{number} {place} {sent:.6f} {clock():.6f}\n")


async def _pause(stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(PAUSE_S):
            await stop.wait()
    except TimeoutError:
        return


@dataclass(frozen=True, slots=True)
class Acknowledged:
    number: int
    partition: int
    offset: int
    sent: float
    at: float


@dataclass(slots=True)
class WriterReport:
    """What one writer has printed."""

    writer: int
    acknowledged: list[Acknowledged] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    sent: int = 0


class ClusterWriter(DemoProcess):
    """A writer process. It reports what the process has sent."""

    def __init__(self, bootstrap: str, writer: int) -> None:
        self.report = WriterReport(writer)
        super().__init__("--cluster-writer", bootstrap, "--writer-number", str(writer))

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            first, *rest = line.split(maxsplit=1)
            if first == "failed":
                self.report.failed.append(rest[0].strip())
            elif first == "sent":
                self.report.sent = int(rest[0])
            else:
                partition, offset, sent, at = rest[0].split()
                self.report.acknowledged.append(
                    Acknowledged(int(first), int(partition), int(offset), float(sent), float(at))
                )
