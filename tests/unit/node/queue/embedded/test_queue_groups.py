"""Groups of the embedded queue: own progress, subscribe, checkpoints, replay, browse, purge."""

import pytest

from raftq import Queue
from raftq.client.common.errors import (
    AlreadySettled,
    InvalidArgument,
    LeaseExpired,
    LeaseReplaced,
    OffsetOutOfRange,
)


def values(messages) -> list[bytes]:
    return [message.value for message in messages]


def drain(queue: Queue, group: str = "default") -> list[bytes]:
    found = []
    while messages := queue.dequeue_batch(100, group=group):
        queue.ack_batch(messages)
        found += values(messages)
    return found


def test_each_group_sees_everything_and_has_progress_of_its_own(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b", b"c"])
    assert drain(queue, "one") == [b"a", b"b", b"c"]
    queue.ack(queue.dequeue(group="two"))
    assert drain(queue) == [b"a", b"b", b"c"]
    queue.enqueue(b"d")
    assert drain(queue, "two") == [b"b", b"c", b"d"]
    assert drain(queue, "one") == [b"d"]
    assert queue.groups() == ["default", "one", "two"]


def test_groups_survive_reopen(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b"])
    queue.ack(queue.dequeue(group="gruppe-ä"))
    queue.close()
    queue = open_queue()
    assert queue.groups() == ["default", "gruppe-ä"]
    assert drain(queue, "gruppe-ä") == [b"b"]


def test_a_deleted_group_is_gone_for_good_and_starts_anew(open_queue) -> None:
    queue = open_queue()
    queue.enqueue(b"a")
    drain(queue, "g")
    assert queue.delete_group("g")
    queue.close()
    queue = open_queue()
    assert queue.groups() == ["default"]
    assert drain(queue, "g") == [b"a"]


def test_a_group_that_lags_keeps_messages_from_being_dropped(open_queue) -> None:
    queue = open_queue(segment_bytes=4096)
    queue.dequeue(group="slow")
    sent = [b"%04d" % n + bytes(200) for n in range(200)]
    for value in sent:
        queue.enqueue(value)
    drain(queue)
    queue.compact()
    assert drain(queue, "slow") == sent
    assert queue.compact() > 0
    assert queue.stats().start_offset == 200


# Subscribe


def test_subscribe_acks_a_message_when_the_next_is_asked_for(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b", b"c"])
    seen = []
    for message in queue.subscribe("g", timeout=0):
        seen.append(message.value)
        assert queue.stats().groups["g"]["acked"] == len(seen) - 1
    assert seen == [b"a", b"b", b"c"]
    assert queue.stats().groups["g"]["acked"] == 3


@pytest.mark.parametrize("way", ["break", "raise"])
def test_leaving_a_subscription_gives_the_message_back_at_once_without_an_attempt(
    queue: Queue, way: str
) -> None:
    queue.enqueue_batch([b"a", b"b"])

    def handle() -> None:
        for message in queue.subscribe("g", timeout=0):
            if message.value == b"b":
                if way == "raise":
                    raise KeyError(message.id)
                break

    if way == "raise":
        with pytest.raises(KeyError):
            handle()
    else:
        handle()
    message = queue.dequeue(group="g")
    assert (message.value, message.attempt) == (b"b", 1)


def test_a_subscriber_may_settle_messages_itself(queue: Queue, clock) -> None:
    queue.enqueue_batch([b"ack", b"nack", b"reject", b"late"])
    for message in queue.subscribe("g", timeout=0):
        if message.value == b"ack":
            queue.ack(message)
        elif message.value == b"nack":
            queue.nack(message, 100)
        elif message.value == b"reject":
            queue.reject(message, "bad")
        else:
            clock.advance(31)
            break
    stats = queue.stats()
    assert (stats.groups["g"]["acked"], stats.dead, stats.counters["acked"]) == (1, 1, 0)
    clock.advance(100, queue)
    assert values(queue.dequeue_batch(5, group="g")) == [b"nack", b"late"]


def test_subscribe_without_auto_ack_leaves_settling_to_the_loop(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b"])
    seen = list(queue.subscribe("g", timeout=0, auto_ack=False))
    assert queue.stats().groups["g"]["in_flight"] == 2
    queue.ack_batch(seen)


# Checkpoint and replay


def test_replay_from_an_offset_delivers_everything_from_there_again(queue: Queue) -> None:
    queue.enqueue_batch([b"%d" % n for n in range(10)])
    drain(queue)
    assert queue.replay_from(offset=7) == 7
    found = queue.dequeue_batch(10)
    assert [(m.value, m.attempt) for m in found] == [(b"7", 1), (b"8", 1), (b"9", 1)]
    assert queue.replay_from(offset=10) == 10
    assert queue.dequeue() is None
    queue.enqueue(b"new")
    assert values(queue.dequeue_batch(5)) == [b"new"]


def test_replay_concerns_one_group_only(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b"])
    drain(queue)
    drain(queue, "other")
    queue.replay_from(offset=0, group="other")
    assert queue.dequeue() is None
    assert drain(queue, "other") == [b"a", b"b"]
    assert queue.replay_from(offset=1, group="new") == 1
    assert drain(queue, "new") == [b"b"]


def test_replay_from_a_time(queue: Queue, clock) -> None:
    times = []
    for n in range(5):
        clock.advance(10.123)
        queue.enqueue(b"%d" % n)
        times.append(clock.now)
    messages = queue.dequeue_batch(5)
    queue.ack_batch(messages)
    assert queue.replay_from(timestamp=times[2] - 5) == 2
    for message in messages:
        assert queue.replay_from(timestamp=message.timestamp) == message.offset
    assert queue.replay_from(timestamp=times[4] + 1) == 5


def test_a_message_s_own_timestamp_finds_it_at_every_millisecond(queue: Queue, clock) -> None:
    for number in range(200):
        clock.now = 1_700_000_000 + number / 1000
        queue.enqueue(b"x")
    messages = queue.dequeue_batch(200)
    firsts = {message.timestamp: message.offset for message in reversed(messages)}
    assert len(firsts) > 90
    for timestamp, offset in firsts.items():
        assert queue.replay_from(timestamp=timestamp) == offset


def test_replay_from_a_checkpoint_survives_reopen_and_snapshots(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b", b"c"])
    queue.ack(queue.dequeue())
    assert queue.checkpoint("here") == 1
    assert drain(queue) == [b"b", b"c"]
    assert queue.checkpoint("end") == 3
    queue._keeper.snapshot()
    queue.close()
    queue = open_queue()
    assert queue.checkpoints() == {"here": 1, "end": 3}
    assert queue.replay_from(checkpoint="here") == 1
    assert drain(queue) == [b"b", b"c"]
    assert queue.checkpoint("here") == 3


def test_a_checkpoint_of_a_group_is_that_group_s_progress(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b"])
    drain(queue, "g")
    assert queue.checkpoint("g-place", group="g") == 2
    assert queue.checkpoint("place") == 0
    with pytest.raises(InvalidArgument, match="no group"):
        queue.checkpoint("x", group="nobody")


def test_a_checkpoint_whose_messages_were_dropped_replays_what_is_left(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b"])
    assert queue.checkpoint("start") == 0
    drain(queue)
    queue.compact()
    queue.enqueue(b"c")
    assert queue.replay_from(checkpoint="start") == 2
    assert drain(queue) == [b"c"]
    with pytest.raises(OffsetOutOfRange, match="2 to 3"):
        queue.replay_from(offset=0)


def test_replay_takes_messages_from_their_holders(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b"])
    a, b = queue.dequeue_batch(2)
    queue.replay_from(offset=0)
    with pytest.raises(LeaseExpired):
        queue.ack(a)
    again = queue.dequeue_batch(2)
    with pytest.raises(LeaseReplaced):
        queue.ack(b)
    queue.ack_batch(again)
    assert queue.stats().settled_offset == 2


def test_replay_brings_back_dead_lettered_and_expired_messages_only_when_still_alive(
    queue: Queue, clock
) -> None:
    queue.enqueue(b"rejected")
    queue.enqueue(b"expired", ttl=5)
    queue.reject(queue.dequeue(), "bad")
    clock.advance(6)
    assert queue.dequeue() is None
    queue.replay_from(offset=0)
    assert drain(queue) == [b"rejected"]
    assert queue.stats().dead == 1


def test_replay_survives_reopen(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b"])
    drain(queue)
    queue.replay_from(offset=1)
    queue.close()
    assert drain(open_queue()) == [b"b"]


# Looking without taking


def test_peek_shows_what_comes_next_and_takes_nothing(queue: Queue) -> None:
    queue.enqueue(b"low", priority="low")
    queue.enqueue_batch([b"a", b"b", b"c"])
    queue.enqueue(b"first", priority="critical")
    assert values(queue.peek()) == [b"first", b"a", b"b", b"c", b"low"]
    assert values(queue.peek(2)) == [b"first", b"a"]
    assert queue.stats().in_flight == 0
    queue.ack(queue.dequeue())
    queue.nack(queue.dequeue(), 100)
    peeked = queue.peek()
    assert [(m.value, m.attempt) for m in peeked] == [
        (b"a", 1), (b"b", 0), (b"c", 0), (b"low", 0),
    ]  # fmt: skip


def test_peek_leaves_out_what_is_settled_or_in_flight(queue: Queue) -> None:
    queue.enqueue_batch([b"%d" % n for n in range(6)])
    messages = queue.dequeue_batch(4)
    queue.ack(messages[1])
    assert values(queue.peek()) == [b"4", b"5"]
    queue.postpone(messages[2], 50)
    assert values(queue.peek(2)) == [b"2", b"4"]


def test_browse_reads_settled_messages_too_page_by_page(queue: Queue) -> None:
    queue.enqueue_batch([b"%d" % n for n in range(10)])
    drain(queue)
    seen, offset = [], 0
    while True:
        page, after = queue.browse(offset, 3)
        if not page:
            break
        seen += values(page)
        offset = after
    assert seen == [b"%d" % n for n in range(10)]
    assert offset == 10
    assert queue.browse(4, 2)[1] == 6


# Purge


def test_purge_drops_everything_for_every_group(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b", b"c"])
    held = queue.dequeue()
    queue.dequeue(group="g")
    assert queue.purge() == 3
    with pytest.raises(AlreadySettled):
        queue.ack(held)
    assert queue.purge() == 0
    queue.enqueue(b"d")
    queue.close()
    queue = open_queue()
    assert drain(queue) == drain(queue, "g") == [b"d"]
