"""The embedded queue on the simulated disk: crashed at every write and fsync, then judged.

1. A seeded schedule of operations runs against a queue, with a fake clock and no threads.
2. The disk stops at operation n: by power loss (unsynced data may go) or because the process was
   killed (everything written stays).
3. The queue is opened again from what survived, crashed up to twice more while it opens or just
   after, and drained. What it gives is compared with what was confirmed before the crash.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from unittest.mock import patch

import pytest
from replay import replayable, seeds
from simdisk import SimCrash, SimDisk

from raftq.client.common.errors import DiskFull
from raftq.node.queue.embedded import delays
from raftq.node.queue.embedded.message import Message
from raftq.node.queue.embedded.options import EmbeddedOptions
from raftq.node.queue.embedded.queue import Queue
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.log import Log

# Seeds that once failed: a settled message or a redriven dead letter came back at another offset
# after a power cut.
FOUND_SEEDS = (31, 32, 85)
START = 1_700_000_000.0
LANES = ("critical", "high", "normal", "low", "background")


class InlineFlusher(Flusher):
    """Syncs in the caller's thread, so that a schedule is the same every time."""

    def __init__(self) -> None:
        super().__init__(None)

    def add(self, log: Log) -> None:
        self._logs.append(log)

    def wait(self, targets: Sequence[tuple[Log, int]]) -> None:
        wanted = [log for log, target in targets if log.flushed_offset < target]
        for log in [each for each in self._logs if each in wanted]:
            log.sync()

    def close(self) -> None:
        self._logs.clear()


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def open_queue(disk: SimDisk, clock: Clock, fsync: str) -> Queue:
    options = EmbeddedOptions(
        fsync=fsync, segment_bytes=4096, max_deliveries=1000, reserve_bytes=0, retention=None
    )
    flusher = InlineFlusher()
    return Queue(
        "/sim/q", options, disk=disk, clock=clock, keeper=False, flusher=flusher, rng=Random(7)
    )


class Model:
    """What is known of each message: confirmed facts, and the one operation that was cut short."""

    def __init__(self) -> None:
        self.sent: dict[int, float] = {}
        """number -> time before which it must not be delivered"""
        self.settled: set[int] = set()
        self.rejected: set[int] = set()
        self.cancelled: set[int] = set()
        self.attempts: Counter[int] = Counter()
        self.doubt: tuple[str, list[int], list[int]] = ("", [], [])
        """(what, numbers being sent, numbers being settled) of the operation under way"""
        self.maybe_sent: dict[int, float] = {}
        """like `sent`, cut short by a later crash"""
        self.synced_sent: set[int] = set()
        self.synced_settled: set[int] = set()


class Driver:
    """Runs random operations; `model.doubt` is set while one is under way."""

    def __init__(
        self, queue: Queue, clock: Clock, model: Model, rng: Random, durable: bool
    ) -> None:
        self.queue = queue
        self.clock = clock
        self.model = model
        self.rng = rng
        self.durable = durable
        self.held: list[Message] = []
        self.delayed: dict[str, int] = {}
        self.first_life = not model.sent
        self.number = self.first = max([*model.sent, *model.doubt[1], *model.maybe_sent, 0]) + 1000

    def run(self, steps: int) -> None:
        verbs: list[Callable[[], None]] = [
            self.enqueue, self.enqueue, self.batch, self.delay, self.once, self.dequeue,
            self.dequeue, self.ack, self.ack, self.nack, self.reject, self.transact, self.cancel,
            self.wait, self.wait, self.compact, self.snapshot, self.sync, self.redrive,
        ]  # fmt: skip
        for _ in range(steps):
            self.rng.choice(verbs)()

    def run_without_consuming(self, steps: int) -> None:
        """What can go on while an operation that the crash cut short is still in doubt."""
        verbs = [self.enqueue, self.batch, self.delay, self.wait, self.snapshot, self.sync]
        for _ in range(steps):
            self.rng.choice(verbs)()

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _value(self, n: int) -> bytes:
        return b"%d:" % n + bytes(self.rng.choice((0, 10, 300)))

    def _do(
        self, what: str, sending: list[int], settling: list[int], call: Callable[[], None]
    ) -> None:
        self.model.doubt = (what, sending, settling)
        call()
        self.model.doubt = ("", [], [])
        self.model.sent.update({n: self.model.sent.get(n, 0.0) for n in sending})
        if self.durable:
            self.model.synced_sent.update(sending)
            self.model.synced_settled.update(settling)

    def enqueue(self) -> None:
        n = self._next()
        lane = self.rng.choice(LANES)
        self._do(
            "send", [n], [], lambda: self.queue.enqueue(self._value(n), priority=lane) and None
        )

    def once(self) -> None:
        n = self._next()
        self._do(
            "send", [n], [], lambda: self.queue.enqueue(self._value(n), dedup_id=f"{n}") and None
        )
        assert self.queue.enqueue(b"0:", dedup_id=f"{n}") is not None

    def batch(self) -> None:
        numbers = [self._next() for _ in range(self.rng.randint(1, 8))]
        self._do(
            "send", numbers, [],
            lambda: self.queue.enqueue_batch([self._value(n) for n in numbers]) and None,
        )  # fmt: skip

    def delay(self) -> None:
        n = self._next()
        delay = self.rng.choice((0.004, 0.5, 30.0, 90_000.0, 800_000.0))
        self.model.sent[n] = self.clock.now + delay

        def call() -> None:
            self.delayed[self.queue.enqueue(self._value(n), delay=delay)] = n

        self._do("send", [n], [], call)

    def cancel(self) -> None:
        if not self.delayed:
            return
        message_id = self.rng.choice(list(self.delayed))
        n = self.delayed.pop(message_id)

        def call() -> None:
            if self.queue.cancel(message_id):
                self.model.cancelled.add(n)

        self._do("cancel", [], [n], call)
        if n not in self.model.cancelled:
            self.model.synced_settled.discard(n)

    def dequeue(self) -> None:
        found = self.queue.dequeue_batch(self.rng.randint(1, 10))
        for message in found:
            n = number_of(message)
            assert n not in self.model.settled, f"{n} came again after its ack"
            assert n not in self.model.cancelled, f"{n} came although it was cancelled"
            assert self.clock.now >= self.model.sent[n], f"{n} came early"
            self.model.attempts[n] += 1
            assert message.attempt == self.model.attempts[n], f"{n} forgot an attempt"
        self.held += found

    def _take(self, count: int) -> list[Message]:
        self.held = [m for m in self.held if self._still_held(m)]
        self.rng.shuffle(self.held)
        taken, self.held = self.held[:count], self.held[count:]
        return taken

    def _still_held(self, message: Message) -> bool:
        group = self.queue._engine.state.groups[message.group]
        lease = group.leases.get(message.held.nonce)
        offset = message.offset
        return lease is not None and bool(lease.held_runs(offset, offset + 1, self.clock.now))

    def ack(self) -> None:
        taken = self._take(self.rng.randint(1, 10))
        numbers = [number_of(message) for message in taken]
        self._do("ack", [], numbers, lambda: self.queue.ack_batch(taken))
        self.model.settled.update(numbers)

    def nack(self) -> None:
        for message in self._take(3):
            self._do("nack", [], [], lambda held=message: self.queue.nack(held))

    def reject(self) -> None:
        for message in self._take(1):
            n = number_of(message)
            self._do("reject", [], [n], lambda held=message: self.queue.reject(held, "no"))
            self.model.settled.add(n)
            self.model.rejected.add(n)

    def redrive(self) -> None:
        if self.rng.random() < 0.7:
            return
        back = sorted(self.model.rejected)

        def call() -> None:
            assert self.queue.redrive() == len(back)

        self._do("redrive", back, [], call)
        self.model.rejected.clear()
        self.model.settled.difference_update(back)
        self.model.synced_settled.difference_update(back)
        for n in back:
            self.model.attempts[n] = 0

    def transact(self) -> None:
        taken = self._take(self.rng.randint(0, 4))
        settling = [number_of(message) for message in taken]
        sending = [self._next() for _ in range(self.rng.randint(1, 3))]

        def call() -> None:
            with self.queue.transaction() as tx:
                for n in sending:
                    tx.enqueue(self._value(n), priority=self.rng.choice(LANES))
                tx.ack_batch(taken)

        self._do("transaction", sending, settling, call)
        self.model.settled.update(settling)

    def wait(self) -> None:
        self.clock.now += self.rng.choice((0.001, 0.6, 31.0, 100_000.0))
        self.queue._keeper.tick(self.clock.now)

    def compact(self) -> None:
        self.queue.compact()

    def snapshot(self) -> None:
        self.queue._keeper.snapshot()
        self.queue._engine.delays.upkeep(force=True)

    def sync(self) -> None:
        self.queue.sync()
        # Only what this process did: an earlier crash may have taken what came before.
        self.model.synced_sent.update(n for n in self.model.sent if n >= self.first)
        if self.first_life:
            self.model.synced_settled.update(self.model.settled | self.model.cancelled)


def number_of(message: object) -> int:
    return int(message.value.split(b":", 1)[0])  # type: ignore[attr-defined]


def drain(queue: Queue, clock: Clock, model: Model) -> tuple[Counter[int], Counter[int]]:
    """Everything that is left: (numbers in the queue, numbers among the dead letters)."""
    found: Counter[int] = Counter()
    for _ in range(200):
        messages = queue.dequeue_batch(100)
        for message in messages:
            n = number_of(message)
            found[n] += 1
            known = n in model.sent or n in model.maybe_sent or n in model.doubt[1]
            assert known, f"{n} was never sent"
            due = model.sent.get(n, model.maybe_sent.get(n, 0.0))
            assert clock.now >= due, f"{n} came early"
        queue.ack_batch(messages)
        due = queue._keeper.next_deadline()
        if not messages:
            if due == float("inf"):
                break
            clock.now = max(clock.now, due)
            queue._keeper.tick(clock.now)
    return found, Counter(number_of(letter) for letter in queue.dead_letters())


def judge(model: Model, found: Counter[int], dead: Counter[int], lossless: bool) -> None:
    what, sending, settling = model.doubt
    for n, times in found.items():
        assert times == 1, f"{n} is in the queue {times} times"
    certain_sent = set(model.sent) if lossless else model.synced_sent
    certain_settled = model.settled | model.cancelled if lossless else model.synced_settled
    for n in certain_settled - set(sending) - set(settling):
        assert not found[n], f"{n} was settled and came again"
    for n in certain_sent - model.settled - model.cancelled - set(settling) - set(sending):
        assert found[n] + dead[n] == 1, (
            f"{n} was confirmed and is {found[n]} + {dead[n]} times there"
        )
    if lossless:
        for n in model.rejected - set(sending):
            assert (dead[n], found[n]) == (1, 0), (
                f"{n} was rejected: {dead[n]} dead, {found[n]} live"
            )
        for n in model.cancelled:
            assert not found[n], f"{n} was cancelled and came"
    for n in dead:
        assert (dead[n], found[n]) == (1, 0), f"{n}: {dead[n]} times dead, {found[n]} live"
    if what == "transaction":
        there = [n for n in sending if found[n]]
        again = [n for n in settling if found[n]]
        assert there in ([], sending), f"half of a transaction was sent: {there} of {sending}"
        if lossless:
            assert again == ([] if there else settling), (
                f"transaction sent {there} and left {again}"
            )
        else:
            assert not (there and again), f"transaction sent {there} and {again} came again"
    if what == "redrive" and lossless:
        for n in sending:
            assert found[n] + dead[n] == 1, f"redrive left {n} {found[n]} + {dead[n]} times"


def scenario(seed: int, fsync: str, crash_at: int | None, power: bool) -> int:
    """One run; returns how many disk operations the schedule took."""
    disk = SimDisk(seed)
    clock = Clock()
    model = Model()
    disk.crash_at = crash_at
    rng = Random(seed)
    try:
        queue = open_queue(disk, clock, fsync)
        Driver(queue, clock, model, rng, durable=fsync == "always").run(25 + seed % 40)
    except SimCrash:
        pass
    operations = disk.operations
    crash_rng = Random(seed * 1_000_003 + (crash_at or 0))
    survivor = disk.crash(crash_rng) if power else disk.kill()
    in_doubt = model.doubt
    for crashes_left in (2, 1, 0):
        survivor.crash_at = crash_rng.randint(1, 60) if crashes_left else None
        try:
            queue = open_queue(survivor, clock, fsync)
            if crashes_left:
                driver = Driver(queue, clock, model, crash_rng, durable=fsync == "always")
                driver.run_without_consuming(6)
            break
        except SimCrash:
            lost = model.doubt[1] if model.doubt is not in_doubt else []
            model.maybe_sent.update({n: model.sent.pop(n, 0.0) for n in lost})
            survivor = survivor.crash(crash_rng) if power else survivor.kill()
    model.doubt = in_doubt
    survivor.crash_at = None
    found, dead = drain(queue, clock, model)
    judge(model, found, dead, lossless=not power or fsync == "always")
    queue.close()
    reopened = open_queue(survivor, clock, fsync)
    assert drain(reopened, clock, model)[0] == Counter(), "a clean close and open brought some back"
    reopened.close()
    return operations


@pytest.mark.parametrize("power", [True, False], ids=["power_cut", "process_kill"])
@pytest.mark.parametrize("fsync", ["always", "none"])
@pytest.mark.parametrize("seed", seeds(25, FOUND_SEEDS))
def test_queue_survives_a_crash_at_every_operation(seed: int, fsync: str, power: bool) -> None:
    """See the steps at the top of the file."""
    with (
        replayable("test_queue_survives_a_crash_at_every_operation", seed),
        patch.object(delays, "COMPACT_BYTES_MIN", 0),
    ):
        operations = scenario(seed, fsync, None, power)
        stride = max(1, operations // int(os.environ.get("RAFTQ_SIM_POINTS", "60")))
        for crash_at in range(1 + seed % stride, operations + 1, stride):
            try:
                scenario(seed, fsync, crash_at, power)
            except Exception as error:
                error.add_note(f"crash point {crash_at} fsync {fsync} power {power}")
                raise


def test_a_full_disk_refuses_publishes_and_loses_nothing() -> None:
    for seed in range(10):
        rng = Random(seed)
        disk = SimDisk(seed)
        clock = Clock()
        model = Model()
        queue = open_queue(disk, clock, "none")
        driver = Driver(queue, clock, model, rng, durable=False)
        driver.run(20)
        disk.capacity = disk.used_bytes() + rng.randint(0, 3000)
        refused = 0
        for _ in range(60):
            try:
                driver.run(1)
            except DiskFull:
                refused += 1
                what, sending, _ = model.doubt
                if what != "send":
                    break
                for n in sending:
                    model.sent.pop(n, None)
                model.doubt = ("", [], [])
        assert refused
        disk.capacity = None
        queue._engine.finish_intent()
        found, dead = drain(queue, clock, model)
        judge(model, found, dead, lossless=True)
        queue.close()
