"""Transactions of the embedded queue: everything or nothing."""

# ruff: noqa: PT012 - it is the whole block that fails

import time

import pytest

from raftq import Queue
from raftq.client.common.errors import (
    InvalidArgument,
    LeaseExpired,
    LeaseForeign,
    QueueClosed,
    QueueFull,
    TooLarge,
)


def values(messages) -> list[bytes]:
    return [message.value for message in messages]


def test_enqueues_and_acks_happen_together(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b"])
    a, b = queue.dequeue_batch(2)
    with queue.transaction() as tx:
        tx.ack_batch([a, b])
        tx.enqueue(b"1", key=b"k", headers={"h": b"x"}, priority="high")
        tx.enqueue_batch([b"2", b"3"])
        assert queue.stats().total == 2
        assert tx.ids == []
    assert tx.ids == ["2", "3", "4"]
    found = queue.dequeue_batch(5)
    assert [(m.id, m.value, m.key, m.headers, m.priority) for m in found] == [
        ("2", b"1", b"k", {"h": b"x"}, "high"),
        ("3", b"2", None, {}, "normal"),
        ("4", b"3", None, {}, "normal"),
    ]
    assert queue.stats().settled_offset == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_everything_as_it_was(queue: Queue, error) -> None:
    queue.enqueue(b"a")
    message = queue.dequeue()
    with pytest.raises(error), queue.transaction() as tx:
        tx.ack(message)
        tx.enqueue(b"x")
        tx.enqueue(b"y", delay=5)
        raise error
    stats = queue.stats()
    assert (stats.total, stats.delayed, stats.in_flight, tx.ids) == (1, 0, 1, [])
    queue.ack(message)


def test_a_lease_lost_before_the_commit_aborts_it(queue: Queue, clock) -> None:
    queue.enqueue_batch([b"a", b"b"])
    a = queue.dequeue(visibility_timeout=5)
    b = queue.dequeue()
    with pytest.raises(LeaseExpired), queue.transaction() as tx:
        tx.ack(b)
        tx.ack(a)
        tx.enqueue(b"x")
        clock.advance(6)
    assert (queue.stats().total, queue.stats().counters["acked"]) == (2, 0)
    queue.ack(b)


def test_a_message_of_another_queue_aborts_it(open_queue) -> None:
    here, there = open_queue("here"), open_queue("there")
    there.enqueue(b"a")
    message = there.dequeue()
    with pytest.raises(LeaseForeign), here.transaction() as tx:
        tx.enqueue(b"x")
        tx.ack(message)
    assert here.stats().total == 0


def test_delayed_messages_in_a_transaction(open_queue, clock) -> None:
    queue = open_queue()
    with queue.transaction() as tx:
        tx.enqueue(b"now")
        tx.enqueue(b"later", delay=10, ttl=5)
        tx.enqueue(b"also later", delay=10, ttl=5, key=b"k")
        tx.enqueue(b"now too")
        tx.enqueue(b"at", deliver_at=clock.now + 20)
    assert tx.ids == ["0", "d0", "d1", "1", "d2"]
    assert [each.id for each in queue.delayed()] == ["d0", "d1", "d2"]
    queue.close()
    queue = open_queue()
    assert values(queue.dequeue_batch(9)) == [b"now", b"now too"]
    clock.advance(11, queue)
    assert [(m.id, m.key) for m in queue.dequeue_batch(9)] == [("d0", None), ("d1", b"k")]
    clock.advance(10, queue)
    assert [m.id for m in queue.dequeue_batch(9)] == ["d2"]


def test_a_delay_that_ended_during_the_transaction_is_delivered_at_once(
    queue: Queue, clock
) -> None:
    with queue.transaction() as tx:
        tx.enqueue(b"a", delay=5)
        clock.advance(6)
    assert tx.ids == ["0"]
    assert queue.dequeue().value == b"a"


def test_an_empty_transaction_writes_nothing(queue: Queue) -> None:
    before = queue.stats().disk_bytes
    with queue.transaction() as tx:
        tx.enqueue_batch([])
        tx.ack_batch([])
    assert (tx.ids, queue.stats().disk_bytes) == ([], before)


def test_only_acks_and_only_enqueues(queue: Queue) -> None:
    with queue.transaction() as tx:
        tx.enqueue(b"a")
    with queue.transaction() as tx:
        tx.ack(queue.dequeue())
    assert queue.stats().settled_offset == 1


def test_acks_of_several_groups_in_one_transaction(queue: Queue) -> None:
    queue.enqueue(b"a")
    with queue.transaction() as tx:
        tx.ack(queue.dequeue())
        tx.ack(queue.dequeue(group="g"))
    assert queue.stats().groups["g"]["settled_offset"] == queue.stats().settled_offset == 1


def test_committed_transactions_survive_reopen(open_queue) -> None:
    queue = open_queue()
    queue.enqueue(b"in")
    for n in range(20):
        with queue.transaction() as tx:
            tx.ack(queue.dequeue())
            tx.enqueue(b"%d" % n, priority=n % 5)
        queue.close()
        queue = open_queue()
    assert values(queue.dequeue_batch(5)) == [b"19"]
    assert queue.stats().total == 21


def test_a_transaction_that_is_over_takes_nothing_more(queue: Queue) -> None:
    with queue.transaction() as tx:
        tx.enqueue(b"a")
    with pytest.raises(InvalidArgument, match="over"):
        tx.enqueue(b"lost")
    with pytest.raises(InvalidArgument, match="over"):
        tx.ack(queue.dequeue())


def test_headers_are_taken_as_they_are_at_enqueue(queue: Queue) -> None:
    headers = {}
    with queue.transaction() as tx:
        for n in range(3):
            headers["n"] = b"%d" % n
            tx.enqueue(b"x", headers=headers)
    assert [m.headers["n"] for m in queue.dequeue_batch(3)] == [b"0", b"1", b"2"]


def test_a_transaction_over_its_limit_is_refused_whole(queue: Queue) -> None:
    with pytest.raises(TooLarge, match="transaction"), queue.transaction() as tx:
        for _ in range(40):
            tx.enqueue(bytes(1024 * 1024))
    with pytest.raises(TooLarge, match="transaction"), queue.transaction() as tx:
        for _ in range(1000):
            tx.enqueue(b"x", key=bytes(50_000))
    assert queue.stats().total == 0
    with queue.transaction() as tx:
        for _ in range(31):
            tx.enqueue(bytes(1024 * 1024))
    assert len(tx.ids) == queue.stats().total == 31


def test_a_transaction_of_many_messages_costs_no_more_than_each_of_them(queue: Queue) -> None:
    started = time.process_time()
    with queue.transaction() as tx:
        tx.enqueue_batch([b"x"] * 20_000)
    # Comparing each with all others would take half a minute.
    assert time.process_time() - started < 5
    assert len(queue.dequeue_batch(20_000)) == 20_000


def test_transactions_keep_to_the_limits_of_the_queue(open_queue) -> None:
    queue = open_queue(max_messages=3)
    queue.enqueue_batch([b"a", b"b", b"c"])
    message = queue.dequeue()
    with pytest.raises(QueueFull), queue.transaction() as tx:
        tx.enqueue(b"d")
    with pytest.raises(QueueFull), queue.transaction() as tx:
        tx.ack(message)
        tx.enqueue_batch([b"d", b"e"])
    assert queue.stats().total == 3
    with queue.transaction() as tx:
        tx.ack(message)
        tx.enqueue(b"d")
    assert queue.stats().total == 4


def test_a_transaction_on_a_closed_queue_is_refused(open_queue) -> None:
    queue = open_queue()
    with pytest.raises(QueueClosed), queue.transaction() as tx:
        tx.enqueue(b"a")
        queue.close()
    with pytest.raises(QueueClosed), queue.transaction():
        pass
    assert open_queue().stats().total == 0
