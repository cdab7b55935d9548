"""The embedded queue with real threads, its keeper and the real clock. Bounded waits, no sleeps."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raftq import Queue

WAIT_S = 20.0
PROMPT_S = 2.0


class Waiter:
    """A thread that runs one call; `result` waits for it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self.done_at = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._result = self._call()
        self.done_at = time.monotonic()

    def result(self) -> Any:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "still waiting"
        return self._result


def wait_for_waiters(queue: Queue, count: int) -> None:
    until = time.monotonic() + WAIT_S
    while queue._waiters < count:
        assert time.monotonic() < until, "nobody waits"
        threading.Event().wait(0.001)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Queue]:
    with Queue.open(tmp_path / "q", fsync="none", reserve_bytes=0) as queue:
        yield queue


@pytest.mark.parametrize("fsync", ["none", "always"])
def test_four_producers_and_four_consumers_deliver_everything_exactly_once(
    tmp_path: Path, fsync: str
) -> None:
    each = 1500 if fsync == "none" else 60
    total = 4 * each
    with Queue.open(tmp_path / "q", fsync=fsync, reserve_bytes=0) as queue:
        seen: list[list[bytes]] = [[] for _ in range(4)]

        def produce(number: int) -> None:
            for n in range(0, each, 3):
                queue.enqueue(b"%d-%d" % (number, n), priority=n % 5)
                queue.enqueue_batch([b"%d-%d" % (number, n + 1), b"%d-%d" % (number, n + 2)])

        def consume(number: int) -> None:
            while sum(map(len, seen)) < total:
                messages = queue.dequeue_batch(1 + number * 3, timeout=0.1)
                seen[number] += [message.value for message in messages]
                queue.ack_batch(messages)

        consumers = [Waiter(lambda n=n: consume(n)) for n in range(4)]
        producers = [Waiter(lambda n=n: produce(n)) for n in range(4)]
        for worker in producers + consumers:
            worker.result()
        count = Counter(value for mine in seen for value in mine)
        assert len(count) == total
        assert set(count.values()) == {1}
        stats = queue.stats()
        assert (stats.pending, stats.in_flight, stats.settled) == (0, 0, total)
        assert stats.counters["lease_expired"] == 0


def test_a_waiting_consumer_is_woken_by_an_enqueue(live: Queue) -> None:
    for publish in (
        lambda: live.enqueue(b"x"),
        lambda: live.enqueue(b"x", key=b"k"),
        lambda: live.enqueue_batch([b"x"]),
        lambda: live.enqueue(b"x", dedup_id=str(live.stats().total)),
    ):
        waiter = Waiter(lambda: live.dequeue(timeout=None))
        wait_for_waiters(live, 1)
        start = time.monotonic()
        publish()
        live.ack(waiter.result())
        assert waiter.done_at - start < PROMPT_S


def test_a_waiting_consumer_is_woken_by_a_transaction_and_a_redrive(live: Queue) -> None:
    waiter = Waiter(lambda: live.dequeue(timeout=None))
    wait_for_waiters(live, 1)
    with live.transaction() as tx:
        tx.enqueue(b"a")
    live.reject(waiter.result(), "bad")
    waiter = Waiter(lambda: live.dequeue(timeout=None))
    wait_for_waiters(live, 1)
    assert live.redrive() == 1
    assert waiter.result().value == b"a"


def test_a_waiting_consumer_is_woken_by_a_delay_that_ends(live: Queue) -> None:
    waiter = Waiter(lambda: live.dequeue(timeout=None))
    wait_for_waiters(live, 1)
    start = time.time()
    live.enqueue(b"late", delay=0.15)
    assert waiter.result().value == b"late"
    assert 0.15 <= time.time() - start < PROMPT_S
    with live.transaction() as tx:
        tx.enqueue(b"later", delay=0.1)
    assert live.dequeue(timeout=WAIT_S).value == b"later"


def test_a_waiting_consumer_is_woken_by_a_lease_that_ends(live: Queue) -> None:
    """The other consumer takes its lease while this one waits already."""
    live.pause()
    live.enqueue(b"a")
    waiter = Waiter(lambda: live.dequeue(timeout=None, group="default"))
    wait_for_waiters(live, 1)
    with live._changed:
        live._engine.write([live._engine.group("default").pause(False)])
        assert live._consumer.lease("default", 1, live._clock(), 0.2)
        live._keeper.plan(live._clock() + 0.2)
    start = time.monotonic()
    assert waiter.result().attempt == 2
    assert 0.1 < waiter.done_at - start < 1.0


def test_a_waiting_consumer_is_woken_by_a_nack_a_postpone_and_a_resume(live: Queue) -> None:
    live.enqueue(b"a")
    message = live.dequeue()
    for again in (
        lambda m: live.nack(m, 0.05),
        lambda m: live.postpone(m, 0),
        lambda m: live.postpone(m, 0.05),
        lambda m: live.extend(m, 0.05),
    ):
        waiter = Waiter(lambda: live.dequeue(timeout=None))
        wait_for_waiters(live, 1)
        start = time.monotonic()
        again(message)
        message = waiter.result()
        assert waiter.done_at - start < PROMPT_S
    live.postpone(message, 0)
    live.pause()
    waiter = Waiter(lambda: live.dequeue(timeout=None))
    wait_for_waiters(live, 1)
    live.resume()
    message = waiter.result()
    live.ack(message)
    waiter = Waiter(lambda: live.dequeue(timeout=None))
    wait_for_waiters(live, 1)
    live.replay_from(offset=0)
    assert waiter.result().value == b"a"


def test_a_consumer_held_back_by_in_flight_max_is_woken_by_an_ack(tmp_path: Path) -> None:
    with Queue.open(tmp_path / "q", fsync="none", in_flight_max=1) as queue:
        queue.enqueue_batch([b"a", b"b"])
        first = queue.dequeue()
        waiter = Waiter(lambda: queue.dequeue(timeout=None))
        wait_for_waiters(queue, 1)
        start = time.monotonic()
        queue.ack(first)
        assert waiter.result().value == b"b"
        assert waiter.done_at - start < PROMPT_S


def test_a_timeout_ends_a_wait_with_nothing(live: Queue) -> None:
    start = time.monotonic()
    assert live.dequeue(timeout=0.05) is None
    assert live.dequeue_batch(5, timeout=0.05) == []
    assert 0.1 <= time.monotonic() - start < PROMPT_S
    assert list(live.subscribe("g", timeout=0.01)) == []
    assert live.browse(0, timeout=0.01) == ([], 0)


def test_a_waiting_reader_of_browse_is_woken_by_an_enqueue(live: Queue) -> None:
    waiter = Waiter(lambda: live.browse(0, timeout=WAIT_S))
    wait_for_waiters(live, 1)
    live.enqueue(b"a")
    messages, after = waiter.result()
    assert ([m.value for m in messages], after) == ([b"a"], 1)


def test_the_keeper_fires_and_expires_by_itself(live: Queue) -> None:
    live.enqueue(b"a")
    live.enqueue(b"b", delay=0.05)
    assert live.dequeue(visibility_timeout=0.05) is not None
    until = time.monotonic() + WAIT_S
    while (stats := live.stats()).delayed or stats.in_flight:
        assert time.monotonic() < until
        threading.Event().wait(0.005)
    assert stats.pending == 2


def test_two_groups_in_threads_each_see_everything(live: Queue) -> None:
    def work(group: str) -> list[bytes]:
        seen = []
        for message in live.subscribe(group, timeout=WAIT_S):
            seen.append(message.value)
            if len(seen) == 300:
                break
        return seen

    workers = [Waiter(lambda g=g: work(g)) for g in ("one", "two")]
    sent = [b"%d" % n for n in range(300)]
    for value in sent:
        live.enqueue(value)
    assert [worker.result() for worker in workers] == [sent, sent]


def test_verbs_from_many_threads_at_once_keep_the_books_straight(live: Queue) -> None:
    """Eight threads do everything at random; in the end the counts still add up."""

    def work(number: int) -> None:
        for n in range(60):
            live.enqueue(b"%d" % number, priority=n % 5, dedup_id=f"{number}-{n}")
            rid = live.enqueue(b"late", delay=0.001 if n % 2 else 60)
            messages = live.dequeue_batch(3)
            for message, settle in zip(
                messages, (live.ack, lambda m: live.nack(m, 0), live.ack), strict=False
            ):
                settle(message)
            if n % 2 == 0:
                assert live.cancel(rid)
            if n % 20 == 0:
                live.compact()
                live.stats()
                live.peek(3)
                live.checkpoint(f"c{number}")

    workers = [Waiter(lambda n=n: work(n)) for n in range(8)]
    for worker in workers:
        worker.result()
    until = time.monotonic() + WAIT_S
    while live.stats().delayed:
        assert time.monotonic() < until
        threading.Event().wait(0.005)
    while messages := live.dequeue_batch(100):
        live.ack_batch(messages)
    stats = live.stats()
    assert stats.counters["acked"] + stats.counters["dead"] == 8 * 90
    assert stats.settled_offset == stats.end_offset == 8 * 90
    live._engine.group("default").check_invariants()
