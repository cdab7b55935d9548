"""Shell: the threads of the demo that consume."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from raftq.client.common.names import LANE_NAMES
from raftq.node.queue.embedded.message import Message
from raftq.node.queue.embedded.queue import Queue
from raftq_demo.checks import Deliveries
from raftq_demo.plan import REJECTED, Job, is_rejected, number_of

# One thread takes messages one by one, the others many at a time.
BATCHES = (1, 50, 100, 100)
SECONDS_MAX = 45.0
# A lane counts as busy until this share of its messages was received.
BUSY_PART = 0.95
# The rate is measured over this share of all messages; the last ones wait for their delays.
RATE_PART = 0.9


class Tally:
    """What all consumer threads saw, together."""

    def __init__(self, jobs: Sequence[Job], opened_at: float) -> None:
        self.seen = Deliveries()
        self.settled = 0
        self.expected = jobs[-1].end
        self.rated = 0
        self.rated_s = 0.0
        self._lock = threading.Lock()
        self._opened_at = opened_at
        self._began = time.perf_counter()
        self._ready = [0] * len(LANE_NAMES)
        for job in jobs:
            if job.kind != "delayed":
                self._ready[job.lane] += job.end - job.start
        self._busy = True

    @property
    def is_over(self) -> bool:
        late = time.perf_counter() - self._began > SECONDS_MAX
        return late or self.settled >= self.expected

    def received(self, messages: Sequence[Message], now: float) -> None:
        with self._lock:
            for message in messages:
                due = message.headers.get("due")
                if due is not None:
                    self._note_delayed(message, float(due), now)
            if self._busy:
                lanes = self.seen.lanes
                for message in messages:
                    lanes[message.held.lane] += 1
                used = zip(lanes, self._ready, strict=True)
                self._busy = all(count < BUSY_PART * ready for count, ready in used)

    def settle(self, numbers: Sequence[int]) -> None:
        with self._lock:
            self.seen.settled.update(numbers)
            self.settled += len(numbers)
            if not self.rated and self.settled >= RATE_PART * self.expected:
                self.rated, self.rated_s = self.settled, time.perf_counter() - self._began

    def _note_delayed(self, message: Message, due: float, now: float) -> None:
        self.seen.lateness.append(now - due)
        if due >= self._opened_at:
            self.seen.firing.append(message.timestamp - due)


def consume_all(queue: Queue, jobs: Sequence[Job]) -> Tally:
    """Consumes until every message is settled or the time is up."""
    tally = Tally(jobs, _now())
    with ThreadPoolExecutor(len(BATCHES)) as pool:
        for future in [pool.submit(_consume, queue, tally, batch) for batch in BATCHES]:
            future.result()
    return tally


def _consume(queue: Queue, tally: Tally, batch: int) -> None:
    """One thread: acks good messages, refuses poisoned ones."""
    while not tally.is_over:
        messages = queue.dequeue_batch(batch, timeout=0.1)
        tally.received(messages, _now())
        good = []
        for message in messages:
            if "poison" in message.headers:
                _refuse(queue, tally, message)
            else:
                good.append(message)
        if good:
            queue.ack_batch(good)
            tally.settle([number_of(message.value) for message in good])


def _refuse(queue: Queue, tally: Tally, message: Message) -> None:
    number = number_of(message.value)
    if is_rejected(number):
        queue.reject(message, REJECTED, error=f"order {number} cannot be read")
        tally.settle([number])
        return
    queue.nack(message)
    if message.attempt >= queue.options.max_deliveries:
        tally.settle([number])


def _now() -> float:
    return time.time()  # noqa: TID251 - compared with the due times of real messages
