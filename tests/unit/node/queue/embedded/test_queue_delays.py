"""Delayed messages of the embedded queue: never early, lost or twice, and cancelled for good."""

from datetime import UTC, datetime

import pytest

from raftq import Queue
from raftq.client.common.errors import InvalidArgument

DAY = 86400.0


def values(messages) -> list[bytes]:
    return [message.value for message in messages]


def drain(queue: Queue) -> list[bytes]:
    found = []
    while messages := queue.dequeue_batch(100):
        queue.ack_batch(messages)
        found += values(messages)
    return found


@pytest.mark.parametrize(
    "delay", [0.001, 0.0104, 0.5, 2.56, 163.84, 3600, 10485.76, 7.76 * DAY, 8 * DAY, 400 * DAY]
)
def test_a_delayed_message_is_never_early_and_at_most_a_tick_late(
    queue: Queue, clock, delay: float
) -> None:
    clock.now += 0.0037
    queue.enqueue(b"a", delay=delay)
    assert queue.dequeue() is None
    clock.advance(delay - 0.0006, queue)
    assert queue.dequeue() is None
    clock.advance(0.0206, queue)
    assert queue.dequeue().value == b"a"
    assert queue.dequeue() is None


def test_dequeue_finds_what_is_due_without_the_keeper(queue: Queue, clock) -> None:
    queue.enqueue(b"a", delay=10)
    clock.advance(10.02)
    assert queue.dequeue().value == b"a"


@pytest.mark.parametrize(
    "when", [{"delay": 0}, {"delay": -5}, {"deliver_at": 0}, {"deliver_at": 1e9}]
)
def test_a_delay_of_nothing_or_the_past_means_now(queue: Queue, when) -> None:
    assert queue.enqueue(b"a", **when) == "0"
    assert queue.dequeue().value == b"a"
    assert queue.stats().delayed == 0


def test_deliver_at_is_an_absolute_time(queue: Queue, clock) -> None:
    queue.enqueue(b"a", deliver_at=clock.now + 60)
    assert [d.deliver_at for d in queue.delayed()] == [clock.now + 60]
    clock.advance(59.99, queue)
    assert queue.dequeue() is None
    clock.advance(0.03, queue)
    assert queue.dequeue() is not None


def test_the_id_of_a_delayed_message_stays_the_same_when_it_is_due(queue: Queue, clock) -> None:
    queue.enqueue(b"now")
    rid = queue.enqueue(b"a", delay=5)
    batch = queue.enqueue_batch([b"b", b"c"], delay=6)
    assert [each.id for each in queue.delayed()] == [rid, *batch]
    clock.advance(10, queue)
    assert [message.id for message in queue.dequeue_batch(9)] == ["0", rid, *batch]


def test_delayed_messages_come_in_the_order_they_are_due(queue: Queue, clock) -> None:
    for delay in (30, 10, 20, 10, 0.5):
        queue.enqueue(b"%g" % delay, delay=delay)
    assert values(queue.delayed()) == [b"0.5", b"10", b"10", b"20", b"30"]
    assert values(queue.delayed(2)) == [b"0.5", b"10"]
    assert queue.delayed(0) == []
    clock.advance(60, queue)
    assert drain(queue) == [b"0.5", b"10", b"10", b"20", b"30"]


def test_a_delayed_message_keeps_key_headers_priority_and_ttl(queue: Queue, clock) -> None:
    queue.enqueue(b"v", key=b"k", headers={"h": b"1"}, priority="critical", delay=10, ttl=60)
    (waiting,) = queue.delayed()
    assert (waiting.key, waiting.headers, waiting.priority) == (b"k", {"h": b"1"}, "critical")
    start = clock.now
    clock.advance(12, queue)
    message = queue.dequeue()
    assert (message.key, message.headers, message.priority) == (b"k", {"h": b"1"}, "critical")
    assert message.expires_at == start + 70
    assert message.timestamp == clock.now


def test_many_delayed_messages_fire_once_each_in_all_lanes(queue: Queue, clock) -> None:
    sent = []
    for lane in range(5):
        batch = [b"%d-%d" % (lane, n) for n in range(700)]
        queue.enqueue_batch(batch, delay=10 + lane, priority=lane)
        sent += batch
    clock.advance(20, queue)
    assert sorted(drain(queue)) == sorted(sent)
    assert queue.stats().delayed == 0


def test_large_delayed_messages_fire_in_portions(queue: Queue, clock) -> None:
    sent = [b"%d" % n + bytes(1_000_000) for n in range(12)]
    queue.enqueue_batch(sent, delay=5)
    clock.advance(6, queue)
    assert drain(queue) == sent


# Cancel


def test_mistake_08_a_cancelled_message_is_never_seen_also_after_reopen(open_queue, clock) -> None:
    queue = open_queue()
    gone, kept = queue.enqueue(b"gone", delay=10), queue.enqueue(b"kept", delay=10)
    assert queue.cancel(gone) is True
    assert queue.cancel(gone) is False
    assert [each.id for each in queue.delayed()] == [kept]
    for _ in range(2):
        queue.close()
        queue = open_queue()
        assert queue.cancel(gone) is False
        assert queue.stats().delayed == 1
    clock.advance(10 * DAY, queue)
    queue.replay_from(offset=0)
    assert drain(queue) == [b"kept"]
    assert queue.browse(0)[0][0].value == b"kept"


def test_cancel_is_too_late_once_a_message_is_due(queue: Queue, clock) -> None:
    rid = queue.enqueue(b"a", delay=10)
    clock.advance(10.02)
    assert queue.cancel(rid) is False
    assert queue.dequeue().id == rid


def test_cancel_of_what_is_not_delayed_says_no(queue: Queue) -> None:
    plain = queue.enqueue(b"a")
    assert queue.cancel(plain) is False
    assert queue.cancel("d0") is False
    assert queue.cancel("d123456") is False
    assert queue.dequeue() is not None


def test_one_message_of_a_delayed_batch_can_be_cancelled(queue: Queue, clock) -> None:
    ids = queue.enqueue_batch([b"a", b"b", b"c"], delay=10)
    assert queue.cancel(ids[1])
    clock.advance(11, queue)
    assert drain(queue) == [b"a", b"c"]


def test_purge_drops_delayed_messages(open_queue, clock) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b"], delay=10)
    queue.enqueue(b"c")
    assert queue.purge() == 3
    queue.close()
    queue = open_queue()
    clock.advance(11, queue)
    assert queue.dequeue() is None
    assert queue.stats().delayed == 0


# Reopen


def test_delays_survive_reopen_and_fire_once(open_queue, clock) -> None:
    queue = open_queue()
    queue.enqueue(b"soon", delay=5)
    queue.enqueue(b"late", delay=9 * DAY)
    queue.close()
    clock.advance(6)
    queue = open_queue()
    assert drain(queue) == [b"soon"]
    queue.close()
    clock.advance(9 * DAY)
    queue = open_queue()
    assert drain(queue) == [b"late"]
    queue.close()
    queue = open_queue()
    assert drain(queue) == []


def test_what_became_due_while_the_queue_was_closed_keeps_its_order(open_queue, clock) -> None:
    queue = open_queue()
    sent = [b"%04d" % n for n in range(2500)]
    for start in range(0, 2500, 100):
        queue.enqueue_batch(sent[start : start + 100], delay=10 + start)
    queue.close()
    clock.advance(5000)
    queue = open_queue()
    assert drain(queue) == sent


def test_delays_survive_compaction_of_their_log(open_queue, clock) -> None:
    queue = open_queue(segment_bytes=64 * 1024)
    kept = []
    for n in range(300):
        ids = queue.enqueue_batch([b"%d" % n + bytes(4000)] * 5, delay=100 + n)
        for message_id in ids[1:]:
            queue.cancel(message_id)
        kept.append(ids[0])
    before = queue.stats().disk_bytes
    assert queue.compact() > 0
    assert queue.stats().disk_bytes < before / 2
    queue.close()
    queue = open_queue(segment_bytes=64 * 1024)
    assert [each.id for each in queue.delayed()] == kept
    clock.advance(1000, queue)
    assert [message.id for message in queue.dequeue_batch(1000)] == kept


def test_a_clock_that_goes_back_delays_but_loses_nothing(queue: Queue, clock) -> None:
    queue.enqueue(b"a", delay=10)
    clock.advance(-100, queue)
    assert queue.dequeue() is None
    clock.advance(109, queue)
    assert queue.dequeue() is None
    clock.advance(1.1, queue)
    assert drain(queue) == [b"a"]


def test_deliver_at_is_a_datetime_or_seconds_since_1970(queue: Queue, clock) -> None:
    moment = datetime.fromtimestamp(clock.now + 5, UTC)
    queue.enqueue(b"one", deliver_at=moment)
    queue.enqueue(b"two", deliver_at=clock.now + 5)
    with queue.transaction() as tx:
        tx.enqueue(b"three", deliver_at=moment)
    assert {message.deliver_at for message in queue.delayed()} == {clock.now + 5}
    with pytest.raises(InvalidArgument, match="hundred years"):
        queue.enqueue(b"in ms", deliver_at=clock.now * 1000)
    clock.advance(5, queue)
    assert len(queue.dequeue_batch(10)) == 3
