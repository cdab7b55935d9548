"""Putting messages into the embedded queue: fields, ids, batches, dedup, and one long example."""

from pathlib import Path

import pytest

from raftq import Message, Queue
from raftq.client.common.errors import QueueClosed


def drain(queue: Queue, group: str = "default") -> list[Message]:
    found = []
    while messages := queue.dequeue_batch(100, group=group):
        queue.ack_batch(messages)
        found += messages
    return found


def values(messages: list[Message]) -> list[bytes]:
    return [message.value for message in messages]


def test_the_verbs_of_a_queue_work_together_on_a_real_directory(tmp_path: Path) -> None:
    """One story through the public API.

    1. Publish with all that can be said about a message; consume, ack, nack, postpone, extend.
    2. Reject, browse dead letters, redrive.
    3. Delay and cancel; checkpoint and replay; pause and resume; subscribe with two groups.
    4. Transaction; compact, sync, purge; reopen.
    """
    with Queue.open(tmp_path / "orders", fsync="none") as q:
        first = q.enqueue(
            b"order-1", key=b"customer-7", priority="high", ttl=3600, headers={"trace": b"abc"},
            dedup_id="order-1",
        )  # fmt: skip
        assert q.enqueue(b"order-1", dedup_id="order-1") == first
        ids = q.enqueue_batch([b"a", b"b", b"c"])
        assert len(set(ids)) == 3
        message = q.dequeue(timeout=0)
        assert message is not None
        assert (message.id, message.value, message.key) == (first, b"order-1", b"customer-7")
        assert (message.priority, message.headers) == ("high", {"trace": b"abc"})
        assert (message.attempt, message.group) == (1, "default")
        q.ack(message)
        a, b, c = q.dequeue_batch(10)
        q.nack(a, delay=0)
        q.postpone(b, 0)
        q.extend(c, 60)
        again = q.dequeue_batch(10)
        assert [(m.value, m.attempt) for m in again] == [(b"a", 2), (b"b", 1)]
        q.reject(c, "malformed", error="no JSON")
        assert [letter.reason for letter in q.dead_letters()] == ["malformed"]
        assert q.redrive(reason="malformed") == 1
        q.ack_batch(again)
        assert values(drain(q)) == [b"c"]
        assert q.dequeue() is None
        assert q.dequeue_batch(5) == []

        later = q.enqueue(b"later", delay=3600)
        assert [each.id for each in q.delayed()] == [later]
        assert q.cancel(later) is True
        assert q.cancel(later) is False

        place = q.checkpoint("before-d")
        q.enqueue(b"d")
        assert values(drain(q)) == [b"d"]
        assert q.replay_from(checkpoint="before-d") == place
        assert values(q.peek()) == [b"d"]
        q.pause()
        assert q.dequeue() is None
        q.resume()
        assert values(drain(q)) == [b"d"]
        for group in ("billing", "mail"):
            seen = [m.value for m in q.subscribe(group, timeout=0)]
            assert seen == [b"order-1", b"a", b"b", b"c", b"c", b"d"]

        q.enqueue(b"in")
        source = q.dequeue()
        with q.transaction() as tx:
            tx.ack(source)
            tx.enqueue(b"out")
        assert values(q.peek()) == [b"out"]
        assert len(tx.ids) == 1
        q.sync()
        assert q.stats().flushed_offset == q.stats().end_offset
        assert q.purge() == 2  # for billing and mail, "in" is as new as "out"
        assert q.compact() > 0
        assert q.dequeue() is None
    with Queue.open(tmp_path / "orders") as q:
        assert q.stats().pending == 0
        assert sorted(q.groups()) == ["billing", "default", "mail"]
    with pytest.raises(QueueClosed):
        q.enqueue(b"x")


def test_ids_count_up_and_are_what_the_consumer_sees(queue: Queue) -> None:
    ids = [queue.enqueue(b"x"), *queue.enqueue_batch([b"y", b"z"]), queue.enqueue(b"w", key=b"k")]
    assert ids == ["0", "1", "2", "3"]
    assert [message.id for message in drain(queue)] == ids


def test_a_batch_keeps_keys_headers_and_order(queue: Queue) -> None:
    queue.enqueue_batch(
        [b"a", b"b", b"c"], keys=[b"k", None, b""], headers=[None, {"h": b"1"}, {}], priority="low"
    )
    found = drain(queue)
    assert [(m.value, m.key, m.headers, m.priority) for m in found] == [
        (b"a", b"k", {}, "low"),
        (b"b", None, {"h": b"1"}, "low"),
        (b"c", b"", {}, "low"),
    ]


def test_an_empty_batch_publishes_nothing_and_gives_no_ids(queue: Queue) -> None:
    assert queue.enqueue_batch([]) == []
    assert queue.enqueue_batch(()) == []
    assert queue.enqueue_batch([], keys=[], headers=[]) == []
    assert queue.stats().total == 0


def test_a_batch_may_come_from_a_generator(queue: Queue) -> None:
    assert queue.enqueue_batch(b"%d" % n for n in range(3)) == ["0", "1", "2"]
    assert values(drain(queue)) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_a_large_batch_is_cut_into_readable_pieces_and_stays_in_order(
    open_queue, compression: str
) -> None:
    queue = open_queue(compression=compression)
    sent = [b"%06d" % n + bytes(300) for n in range(12_000)]
    assert len(queue.enqueue_batch(sent)) == 12_000
    assert values(drain(queue)) == sent


def test_a_batch_of_large_keys_and_headers_is_cut_as_well(queue: Queue) -> None:
    count = 700
    keys = [b"%d" % n + bytes(60_000) for n in range(count)]
    headers = [{"h": bytes(60_000)}] * count
    for delay in (None, 10):
        assert len(
            queue.enqueue_batch([b"v"] * count, keys=keys, headers=headers, delay=delay)
        ) == (count)
    queue._clock.advance(11, queue)
    found = drain(queue)
    assert sorted(m.key for m in found) == sorted(keys * 2)


def test_empty_values_are_messages_too(queue: Queue) -> None:
    queue.enqueue(b"")
    queue.enqueue_batch([b"", b""])
    assert values(drain(queue)) == [b"", b"", b""]


def test_priority_is_given_by_name_or_number(queue: Queue) -> None:
    names = ("critical", "high", "normal", "low", "background")
    for number, name in reversed(list(enumerate(names))):
        queue.enqueue(name.encode(), priority=name)
        queue.enqueue(b"%d" % number, priority=number, key=b"k")
    found = drain(queue)
    assert len(found) == 10
    for number, name in enumerate(names):
        assert values([m for m in found if m.priority == name]) == [name.encode(), b"%d" % number]


def test_the_timestamp_is_when_it_was_enqueued(queue: Queue, clock) -> None:
    queue.enqueue(b"a")
    clock.advance(1.5)
    queue.enqueue(b"b", key=b"k")
    found = drain(queue)
    assert [m.timestamp for m in found] == [clock.now - 1.5, clock.now]


def test_a_receipt_names_the_delivery(queue: Queue) -> None:
    queue.enqueue(b"a")
    message = queue.dequeue()
    parts = message.receipt.split(":")
    assert parts[:4] == ["q", "0", "0", "1"]
    assert "id=0" in repr(message)
    queue.nack(message, 0)
    assert queue.dequeue().receipt != message.receipt


# Dedup


def test_a_dedup_id_adds_a_message_once_within_its_window(open_queue, clock) -> None:
    queue = open_queue(dedup_window=60)
    first = queue.enqueue(b"a", dedup_id="x")
    clock.advance(59.9)
    assert queue.enqueue(b"b", dedup_id="x") == first
    assert queue.enqueue(b"c", dedup_id="y") != first
    clock.advance(0.1)
    assert queue.enqueue(b"d", dedup_id="x") not in (first, "1")
    assert values(drain(queue)) == [b"a", b"c", b"d"]


def test_a_dedup_id_is_still_known_when_its_message_was_acked(queue: Queue) -> None:
    first = queue.enqueue(b"a", dedup_id="x")
    drain(queue)
    assert queue.enqueue(b"a", dedup_id="x") == first
    assert queue.dequeue() is None


def test_dedup_ids_survive_reopen_and_snapshots(open_queue, clock) -> None:
    queue = open_queue(dedup_window=60)
    first = queue.enqueue(b"a", dedup_id="x")
    late = queue.enqueue(b"b", dedup_id="late", delay=5)
    queue._keeper.snapshot()
    queue.close()
    queue = open_queue(dedup_window=60)
    assert queue.enqueue(b"a", dedup_id="x") == first
    assert queue.enqueue(b"b", dedup_id="late") == late
    clock.advance(61, queue)
    queue.close()
    queue = open_queue(dedup_window=60)
    assert queue.enqueue(b"c", dedup_id="x") != first
    assert values(drain(queue)) == [b"a", b"b", b"c"]


def test_a_dedup_window_that_became_shorter_holds_for_new_ids(open_queue, clock) -> None:
    queue = open_queue(dedup_window=3600)
    queue.enqueue(b"long", dedup_id="long")
    queue.close()
    queue = open_queue(dedup_window=10)
    queue.enqueue(b"1", dedup_id="short")
    clock.advance(11)
    queue.enqueue(b"2", dedup_id="short")
    assert values(drain(queue)) == [b"long", b"1", b"2"]


def test_a_dedup_window_of_zero_dedups_nothing(open_queue) -> None:
    queue = open_queue(dedup_window=0)
    assert queue.enqueue(b"a", dedup_id="x") != queue.enqueue(b"a", dedup_id="x")


def test_dedup_covers_delayed_messages(queue: Queue, clock) -> None:
    first = queue.enqueue(b"a", delay=10, dedup_id="x")
    assert first.startswith("d")
    assert queue.enqueue(b"a", delay=20, dedup_id="x") == first
    assert queue.enqueue(b"a", dedup_id="x") == first
    clock.advance(30, queue)
    assert [m.id for m in drain(queue)] == [first]


@pytest.mark.parametrize("fsync", ["none", "interval", "always"])
def test_every_fsync_policy_accepts_and_keeps_messages(tmp_path: Path, fsync: str) -> None:
    with Queue.open(tmp_path / "q", fsync=fsync, fsync_interval=0.01) as queue:
        queue.enqueue(b"a")
        queue.enqueue_batch([b"b", b"c"])
        queue.enqueue(b"d", dedup_id="d", key=b"k")
        message = queue.dequeue()
        queue.ack(message)
        if fsync == "always":
            assert queue.stats().flushed_offset == 4
    with Queue.open(tmp_path / "q", fsync=fsync) as queue:
        assert values(drain(queue)) == [b"b", b"c", b"d"]
