"""Priorities of the embedded queue: shares, starvation, order, and nobody skipped."""

from collections import Counter

import pytest

from raftq import Queue

SHARES = {"critical": 50, "high": 25, "normal": 15, "low": 7, "background": 3}


def fill(queue: Queue, counts: dict[str, int]) -> None:
    for lane, count in counts.items():
        queue.enqueue_batch([b"%s-%06d" % (lane.encode(), n) for n in range(count)], priority=lane)


@pytest.mark.parametrize("size", [1, 7, 100, 500])
def test_mistake_02_busy_lanes_get_their_shares_within_two_points(queue: Queue, size: int) -> None:
    total = 4000
    fill(queue, dict.fromkeys(SHARES, total))
    served: Counter[str] = Counter()
    while (count := served.total()) < total:
        messages = queue.dequeue_batch(size) if size > 1 else [queue.dequeue()]
        queue.ack_batch(messages)
        served.update(message.priority for message in messages)
        assert len(messages) == size, f"after {count}"
    for lane, share in SHARES.items():
        assert abs(100 * served[lane] / served.total() - share) < 2, served


@pytest.mark.parametrize("size", [1, 13, 200])
def test_mistake_01_no_message_of_a_lower_lane_is_ever_skipped(queue: Queue, size: int) -> None:
    sent = Counter()
    for round_ in range(40):
        for lane in ("background", "critical", "low", "high", "normal"):
            value = b"%s-%03d" % (lane.encode(), round_)
            queue.enqueue(value, priority=lane)
            sent[value] += 1
        for message in queue.dequeue_batch(2):
            queue.ack(message)
            sent[message.value] -= 1
    while messages := queue.dequeue_batch(size):
        queue.ack_batch(messages)
        sent.subtract(message.value for message in messages)
    assert set(sent.values()) == {0}
    assert queue.stats().settled_offset == 200


def test_each_lane_keeps_its_order(queue: Queue) -> None:
    fill(queue, {"low": 300, "critical": 300})
    fill(queue, {"background": 300})
    seen: dict[str, list[bytes]] = {}
    while messages := queue.dequeue_batch(17):
        for message in messages:
            seen.setdefault(message.priority, []).append(message.value)
    for lane, found in seen.items():
        assert found == [b"%s-%06d" % (lane.encode(), n) for n in range(300)]


def test_a_retry_goes_before_fresh_messages_of_its_lane(queue: Queue) -> None:
    fill(queue, {"normal": 5})
    queue.nack(queue.dequeue(), 0)
    message = queue.dequeue()
    assert (message.value, message.attempt) == (b"normal-000000", 2)


def test_a_lone_lane_gets_everything(queue: Queue) -> None:
    fill(queue, {"background": 500})
    assert len(queue.dequeue_batch(500)) == 500


def test_a_lane_that_was_not_served_for_half_a_minute_is_next(queue: Queue, clock) -> None:
    """One message a second: background waits for 3 of 100 turns, but never longer than 30 s."""
    fill(queue, dict.fromkeys(SHARES, 1000))
    last = dict.fromkeys(SHARES, clock.now)
    for _ in range(400):
        message = queue.dequeue()
        queue.ack(message)
        last[message.priority] = clock.now
        clock.advance(1)
        for lane, served in last.items():
            assert clock.now - served <= 31 + len(SHARES), lane


def test_lanes_survive_reopen(open_queue) -> None:
    queue = open_queue()
    fill(queue, {"low": 10, "high": 10})
    taken = queue.dequeue_batch(5)
    queue.ack_batch(taken)
    queue.close()
    queue = open_queue()
    rest = queue.dequeue_batch(100)
    assert len(rest) == 15
    assert len({message.value for message in rest + taken}) == 20
    stats = queue.stats()
    assert stats.lanes["low"].total == stats.lanes["high"].total == 10


def test_lanes_of_one_batch_size_do_not_disturb_groups(queue: Queue) -> None:
    fill(queue, {"high": 20, "low": 20})
    mine = queue.dequeue_batch(10)
    theirs = queue.dequeue_batch(40, group="other")
    assert len(mine) == 10
    assert len(theirs) == 40
