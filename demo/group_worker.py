"""Shell: the processes of the demo that work through a topic as one group, and the parent's side.

A worker waits for "join" on its input, then handles records until its input ends. It prints

    began NUMBER ATTEMPT LANE PARTITION TIME     when its handler is called (wall clock)
    ended NUMBER TIME                            when its handler is about to return

A record that carries poison makes the handler raise, until the worker reads "mend".
"""

import asyncio
import logging
import sys
import time
from collections.abc import Iterable

from raftq.client.queue.leased import LeasedRecord
from raftq.client.queue.worker import Worker
from raftq_demo.child import DemoProcess
from raftq_demo.group_checks import Handling

GROUP, TOPIC = "packers", "parcels"
CONCURRENCY = 20
WORK_S = 0.01
LEASE_S = 2.0
"""How long the records of the killed worker wait."""
SESSION_MS, HEARTBEAT_MS = 2_000, 500


class _Handler:
    """What each worker does with a record."""

    def __init__(self) -> None:
        self.mended = False

    async def __call__(self, record: LeasedRecord) -> None:
        number = record.value.decode().partition(":")[0]
        place = f"{record.priority} {record.partition}"
        _say(f"began {number} {record.attempt} {place} {_now():.6f}")
        await asyncio.sleep(WORK_S)  # noqa: TID251 - what a real handler would wait for
        if "poison" in record.headers and not self.mended:
            raise ValueError(f"parcel {number} cannot be packed")
        _say(f"ended {number} {_now():.6f}")


async def work(bootstrap: str) -> None:
    # A handler that fails is logged with its stack, and one does so on purpose.
    logging.getLogger("raftq").setLevel(logging.CRITICAL)
    handler = _Handler()
    loop = asyncio.get_running_loop()
    worker = Worker(
        bootstrap,
        group=GROUP,
        topics=[TOPIC],
        handler=handler,
        concurrency=CONCURRENCY,
        prefetch=CONCURRENCY,  # not more: shares are judged by the order in which records begin
        visibility_timeout=LEASE_S,
        session_ms=SESSION_MS,
        heartbeat_ms=HEARTBEAT_MS,
    )
    running: asyncio.Task[None] | None = None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line == "join\n":
            running = loop.create_task(worker.run())
        elif line == "mend\n":
            handler.mended = True
    if running is not None:
        worker.stop()
        await running


def _say(line: str) -> None:
    # One small write to a pipe arrives whole or not at all, even if the worker dies.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _now() -> float:
    return time.time()  # noqa: TID251 - compared with the due time of a real record


class GroupWorker(DemoProcess):
    """A worker process. It notes what the process has handled."""

    def __init__(self, bootstrap: str, number: int) -> None:
        self.number = number
        self.handled: list[Handling] = []
        self.ended = 0
        super().__init__("--group-worker", bootstrap)

    def _read(self, lines: Iterable[str]) -> None:
        newest: dict[int, Handling] = {}
        for line in lines:
            word, *facts = line.split()
            number = int(facts[0])
            if word == "began":
                attempt, lane, partition = map(int, facts[1:4])
                handling = Handling(number, attempt, lane, partition, self.number, float(facts[4]))
                newest[number] = handling
                self.handled.append(handling)
            else:
                newest[number].ended = float(facts[1])
                self.ended += 1

    @property
    def is_at_work(self) -> bool:
        return len(self.handled) > self.ended

    def tell(self, word: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(word + "\n")
        self._child.stdin.flush()

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._child.kill()
        self._child.wait()
