"""Real processes, killed with SIGKILL at random instants, over and over on the same queue.

1. A child writes and reads, reporting each operation before and after.
2. It is killed, sometimes while it opens the queue; what it said is added to the history.
3. After all rounds the queue is drained here, and the whole history is judged.
"""

import multiprocessing
import os
import random
import select
import signal
import time
from collections import Counter
from multiprocessing.reduction import DupFd
from pathlib import Path

import pytest
from killed_process import number_of, run_forked

from raftq.node.queue.embedded import Queue

ROUNDS = int(os.environ.get("RAFTQ_KILL_ROUNDS", "110"))
ROUND_S = 0.09


class History:
    """What all the killed processes said, in order, and what it implies."""

    def __init__(self) -> None:
        self.tried: dict[int, str] = {}
        self.sent: set[int] = set()
        self.settle_tried: set[int] = set()
        self.settled: set[int] = set()
        self.rejected: set[int] = set()
        self.reject_tried: set[int] = set()
        self.transactions: dict[int, list[int]] = {}
        self.delivered = 0
        self.last_first_delivery: dict[str, int] = {}
        self.first_seen: set[int] = set()
        self.delayed: set[int] = set()
        self.problems: list[str] = []

    def add(self, line: str) -> None:
        kind, *rest = line.split()
        if kind in "EeDd":
            n, lane = int(rest[0]), rest[1]
            self.tried[n] = lane
            if kind in "Dd":
                self.delayed.add(n)
            if kind in "ed":
                self.sent.add(n)
        elif kind == "g":
            self.deliver(int(rest[0]), int(rest[1]), rest[2])
        elif kind in "AaTtRr":
            self._settle(kind, [int(item) for item in rest])

    def _settle(self, kind: str, numbers: list[int]) -> None:
        if kind in "Tt":
            n, *numbers = numbers
            self.tried[n] = "normal"
            self.delayed.add(n)  # enqueued by another thread: no order is promised
            self.transactions[n] = numbers
            if kind == "t":
                self.sent.add(n)
        if kind in "Rr":
            (self.reject_tried if kind == "R" else self.rejected).update(numbers)
        (self.settle_tried if kind in "ATR" else self.settled).update(numbers)

    def deliver(self, n: int, attempt: int, lane: str) -> None:
        self.delivered += 1
        if n not in self.tried:
            self.problems.append(f"{n} was delivered and never sent")
        elif self.tried[n] != lane:
            self.problems.append(f"{n} was sent to {self.tried[n]} and came from {lane}")
        if n in self.settled:
            self.problems.append(f"{n} was delivered after its ack was confirmed")
        if attempt == 1 and n not in self.delayed and n not in self.first_seen:
            if n < self.last_first_delivery.get(lane, -1):
                self.problems.append(f"{n} came after {self.last_first_delivery[lane]} in {lane}")
            self.last_first_delivery[lane] = n
        self.first_seen.add(n)


def _one_round(
    context: multiprocessing.context.BaseContext, history: History, args: tuple[object, ...],
    rng: random.Random,
) -> None:  # fmt: skip
    directory, fsync, seed, first = args
    reading, writing = os.pipe()
    child = context.Process(target=run_forked, args=(directory, fsync, DupFd(writing), seed, first))
    child.start()
    os.close(writing)
    said = b""
    until = None
    hasty = rng.random() < 0.15
    while True:
        left = 60.0 if until is None else until - time.monotonic()
        if left <= 0:
            break
        if select.select([reading], [], [], left)[0]:
            data = os.read(reading, 1 << 16)
            assert data, f"the child died by itself; it said {said[-500:]!r}"
            said += data
            if until is None and (hasty or b"o \n" in said):
                until = time.monotonic() + rng.uniform(0.0, ROUND_S / (4 if hasty else 1))
        elif until is None:
            pytest.fail("the child did not open the queue within a minute")
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    while data := os.read(reading, 1 << 16):
        said += data
    os.close(reading)
    # A line cut by the kill was never confirmed.
    for line in said.decode().split("\n")[:-1]:
        history.add(line)


def _drain(directory: str, history: History) -> Counter[int]:
    found: Counter[int] = Counter()
    with Queue.open(directory, max_deliveries=1000) as queue:
        while True:
            messages = queue.dequeue_batch(1000, timeout=0.3)
            if not messages and not queue.delayed(1):
                break
            for message in messages:
                n = number_of(message.value)
                history.deliver(n, message.attempt, message.priority)
                found[n] += 1
            queue.ack_batch(messages)
        dead = Counter(number_of(letter.value) for letter in queue.dead_letters())
        assert queue.verify() == []
    for n in history.rejected | history.reject_tried:
        if dead[n] > 1 or (n in history.rejected and dead[n] != 1):
            history.problems.append(f"{n} was rejected and is {dead[n]} times a dead letter")
    for n, acked in history.transactions.items():
        if n in history.sent:
            continue
        happened = n in history.first_seen
        undone = [m for m in acked if found[m]]
        if happened and undone:
            history.problems.append(f"transaction {n} is half done: {undone} came back")
    return found


@pytest.mark.parametrize(
    ("fsync", "rounds"),
    [
        ("always", ROUNDS // 4),
        pytest.param("always", ROUNDS, marks=pytest.mark.full),
        pytest.param("interval", ROUNDS, marks=pytest.mark.full),
    ],
)
def test_killed_processes_lose_nothing_and_repeat_no_acknowledged_ack(
    tmp_path: Path, fsync: str, rounds: int
) -> None:
    """See the steps at the top of the file."""
    seed = int(os.environ.get("RAFTQ_KILL_SEED", str(random.randrange(1 << 30))))
    print(f"replay with RAFTQ_KILL_SEED={seed}")
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_process"])
    history = History()
    directory = str(tmp_path / "queue")
    for number in range(rounds):
        _one_round(context, history, (directory, fsync, seed + number, number * 1_000_000), rng)
    found = _drain(directory, history)

    unsettled = history.sent - history.settle_tried
    missing = [n for n in sorted(unsettled) if not found[n]]
    assert not missing, f"seed {seed}: acknowledged and gone: {missing[:20]} of {len(missing)}"
    twice = [n for n, times in found.items() if times > 1]
    assert not twice, f"seed {seed}: in the queue twice: {twice[:20]}"
    assert not history.problems, f"seed {seed}: {history.problems[:20]}"
    assert history.delivered > rounds, "the rounds were too short to deliver anything"
    assert history.settled
    assert history.rejected
    assert history.transactions
