"""A writer and reader of one queue, made to be killed. It reports what it does before and after.

Lines on the pipe (a capital letter: about to be done, a small one: confirmed by the queue):

    O / o           open
    E / e  n lane   enqueue message number n
    D / d  n lane   enqueue it with a delay
    T / t  n,m..    a transaction that enqueues n and acks m..
    g  n attempt    message n was delivered
    A / a  n..      ack
    R / r  n        reject
"""

import os
import random
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

from raftq.node.queue.embedded import Message, Queue

LANES = ("critical", "high", "normal", "low", "background")


class Reporter:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, kind: str, *numbers: object) -> None:
        # One write of less than PIPE_BUF bytes: whole or not at all, from any thread.
        os.write(self._fd, (kind + " " + " ".join(map(str, numbers)) + "\n").encode())


def run(directory: str, fsync: str, fd: int, seed: int, first_number: int) -> None:
    """Write and read until killed."""
    report = Reporter(fd)
    report.say("O")
    queue = Queue.open(directory, fsync=fsync, segment_bytes=64 * 1024, max_deliveries=1000)
    report.say("o")
    numbers = count(first_number)
    reader = threading.Thread(target=_read, args=(queue, report, random.Random(seed + 1)))
    reader.start()
    _write(queue, report, random.Random(seed), numbers)


def run_forked(directory: str, fsync: str, duplicate: Any, seed: int, first_number: int) -> None:
    """`run` in a process of the fork server, which gets its pipe as a duplicate."""
    run(directory, fsync, duplicate.detach(), seed, first_number)


def _write(queue: Queue, report: Reporter, rng: random.Random, numbers: Iterator[int]) -> None:
    while True:
        lane = rng.choice(LANES)
        kind = rng.random()
        if kind < 0.6:
            n = next(numbers)
            report.say("E", n, lane)
            queue.enqueue(_value(n, rng), priority=lane)
            report.say("e", n, lane)
        elif kind < 0.85:
            batch = [next(numbers) for _ in range(rng.randint(2, 20))]
            for n in batch:
                report.say("E", n, lane)
            queue.enqueue_batch([_value(n, rng) for n in batch], priority=lane)
            for n in batch:
                report.say("e", n, lane)
        elif kind < 0.95:
            n = next(numbers)
            report.say("D", n, lane)
            queue.enqueue(_value(n, rng), priority=lane, delay=rng.uniform(0.0, 0.05))
            report.say("d", n, lane)
        else:
            n = next(numbers)
            report.say("E", n, lane)
            queue.enqueue(_value(n, rng), priority=lane, dedup_id=f"n{n}")
            report.say("e", n, lane)


def _read(queue: Queue, report: Reporter, rng: random.Random) -> None:
    own = count(1_000_000_000 + rng.randrange(10**8) * 1000)
    while True:
        messages = queue.dequeue_batch(rng.randint(1, 30), timeout=1.0)
        for message in messages:
            report.say("g", number_of(message.value), message.attempt, message.priority)
        _settle(queue, report, rng, messages, own)


def _settle(
    queue: Queue,
    report: Reporter,
    rng: random.Random,
    messages: list[Message],
    own: Iterator[int],
) -> None:
    if not messages:
        return
    kind = rng.random()
    held = [number_of(message.value) for message in messages]
    if kind < 0.7:
        report.say("A", *held)
        queue.ack_batch(messages)
        report.say("a", *held)
    elif kind < 0.8:
        n = next(own)
        report.say("T", n, *held)
        with queue.transaction() as tx:
            tx.enqueue(_value(n, rng), priority="normal")
            tx.ack_batch(messages)
        report.say("t", n, *held)
    elif kind < 0.85:
        report.say("R", held[0])
        queue.reject(messages[0], "unwanted")
        report.say("r", held[0])
        for message in messages[1:]:
            queue.nack(message, delay=0.0)
    elif kind < 0.95:
        for message in messages:
            queue.nack(message, delay=rng.uniform(0.0, 0.02))
    # The rest is left leased: the kill, or its timeout, gives it back.


def _value(n: int, rng: random.Random) -> bytes:
    return b"%d:" % n + bytes(rng.randint(0, 200))


def number_of(value: bytes) -> int:
    return int(value.split(b":", 1)[0])
