"""Limits of the embedded queue: full queues, reclaimed space, retention, full disks."""

from collections.abc import Iterator

import pytest
from simdisk import SimDisk

from raftq import Queue
from raftq.client.common.errors import DiskFull, QueueFull
from raftq.node.queue.embedded.options import EmbeddedOptions
from raftq.node.storage.flusher import Flusher


def values(messages) -> list[bytes]:
    return [message.value for message in messages]


def ack_all(queue: Queue) -> list[bytes]:
    found = []
    while messages := queue.dequeue_batch(1000):
        queue.ack_batch(messages)
        found += values(messages)
    return found


def test_max_messages_counts_what_is_not_settled_delayed_ones_included(open_queue) -> None:
    queue = open_queue(max_messages=4)
    queue.enqueue(b"a")
    queue.enqueue(b"b", key=b"k")
    queue.enqueue(b"c", delay=100)
    queue.enqueue(b"d", dedup_id="d")
    for call in (
        lambda: queue.enqueue(b"x"),
        lambda: queue.enqueue(b"x", key=b"k"),
        lambda: queue.enqueue(b"x", delay=5),
        lambda: queue.enqueue(b"x", dedup_id="x"),
        lambda: queue.enqueue_batch([b"x"]),
    ):
        with pytest.raises(QueueFull, match="4 unsettled messages of at most 4") as caught:
            call()
        assert caught.value.retriable
    assert queue.enqueue(b"d", dedup_id="d") == "2"
    assert (queue.stats().total, queue.stats().delayed) == (3, 1)
    queue.ack(queue.dequeue())
    with pytest.raises(QueueFull):
        queue.enqueue_batch([b"x", b"y"])
    queue.enqueue(b"x")
    assert queue.stats().total == 4


def test_the_group_that_lags_most_fills_the_queue(open_queue) -> None:
    queue = open_queue(max_messages=2)
    queue.dequeue(group="slow")
    queue.enqueue_batch([b"a", b"b"])
    ack_all(queue)
    with pytest.raises(QueueFull):
        queue.enqueue(b"c")
    queue.delete_group("slow")
    queue.enqueue(b"c")


def test_a_refused_dedup_id_is_not_remembered(open_queue) -> None:
    queue = open_queue(max_messages=1)
    queue.enqueue(b"a")
    with pytest.raises(QueueFull):
        queue.enqueue(b"b", dedup_id="b")
    ack_all(queue)
    queue.enqueue(b"b", dedup_id="b")
    assert ack_all(queue) == [b"b"]


@pytest.mark.parametrize("segment_bytes", [4096, 64 * 1024 * 1024])
def test_max_bytes_refuses_what_does_not_fit_and_settled_space_comes_back(
    open_queue, segment_bytes: int
) -> None:
    queue = open_queue(max_bytes=256 * 1024, segment_bytes=segment_bytes)
    sent = 0
    with pytest.raises(QueueFull, match="bytes"):  # noqa: PT012
        while True:
            queue.enqueue(bytes(1000))
            sent += 1
    assert 150 < sent < 262
    with pytest.raises(QueueFull):
        queue.enqueue_batch([bytes(1000)] * 10)
    assert queue.stats().total == sent
    assert len(ack_all(queue)) == sent
    queue.enqueue(bytes(1000))
    assert ack_all(queue) == [bytes(1000)]


@pytest.mark.parametrize("how", [{}, {"delay": 0.01}, {"dedup_id": "x"}, {"key": b"k"}])
def test_a_queue_that_is_kept_empty_is_never_full(open_queue, clock, how) -> None:
    """Twenty times its size goes through a small queue."""
    queue = open_queue(max_bytes=256 * 1024)
    for n in range(2500):
        if "dedup_id" in how:
            how = {"dedup_id": f"{n}"}
        queue.enqueue(bytes(2000), **how)
        clock.advance(0.02, queue)
        queue.ack(queue.dequeue())
    assert queue.stats().settled == queue.stats().total
    assert sum(log.size_bytes for log in queue._files.message_logs) <= 256 * 1024


def test_an_almost_full_queue_takes_what_just_fits(open_queue) -> None:
    queue = open_queue(max_messages=10)
    queue.enqueue_batch([b"x"] * 9)
    with pytest.raises(QueueFull):
        queue.enqueue_batch([b"y", b"z"])
    queue.enqueue_batch([b"y"])
    assert queue.stats().total == 10


# Retention and compaction


def test_settled_messages_are_kept_for_replay_until_their_retention_ends(open_queue, clock) -> None:
    queue = open_queue(retention=3600, segment_bytes=4096)
    queue.enqueue_batch([bytes(100)] * 100)
    queue.enqueue(b"open")
    messages = queue.dequeue_batch(101)
    queue.ack_batch(messages[:-1])
    clock.advance(1800)
    queue._keeper.retain(clock.now)
    assert queue.stats().start_offset == 0
    clock.advance(1900)
    queue._keeper.retain(clock.now)
    assert queue.stats().start_offset == 100
    assert values(queue.dequeue_batch(5)) == [b"open"]


def test_a_small_queue_that_never_fills_a_segment_is_dropped_by_age_too(open_queue, clock) -> None:
    queue = open_queue(retention=3600)
    queue.enqueue_batch([b"a", b"b"])
    ack_all(queue)
    clock.advance(3700)
    queue._keeper.retain(clock.now)
    queue._keeper.retain(clock.now)
    assert (queue.stats().total, queue.stats().start_offset) == (0, 2)


def test_what_is_not_settled_is_never_dropped_by_age_or_size(open_queue, clock) -> None:
    queue = open_queue(retention=10, retention_bytes=4096, segment_bytes=4096)
    for n in range(100):
        queue.enqueue(b"%03d" % n + bytes(500))
    clock.advance(1000)
    queue._keeper.retain(clock.now)
    assert len(ack_all(queue)) == 100


def test_retention_bytes_drops_settled_segments_before_their_time(open_queue, clock) -> None:
    queue = open_queue(retention_bytes=10_000, segment_bytes=4096)
    for _ in range(100):
        queue.enqueue(bytes(500))
    ack_all(queue)
    queue._keeper.retain(clock.now)
    assert 0 < queue.stats().start_offset < 100
    assert queue._files.data.size_bytes <= 14_096


def test_compact_frees_what_is_settled_and_keeps_the_rest(open_queue) -> None:
    queue = open_queue(segment_bytes=4096)
    for n in range(100):
        queue.enqueue(b"%03d" % n + bytes(500))
    messages = queue.dequeue_batch(100)
    queue.ack_batch(messages[:90])
    before = queue.stats().disk_bytes
    freed = queue.compact()
    assert freed > 35_000
    assert queue.stats().disk_bytes == before - freed
    queue.close()
    queue = open_queue(segment_bytes=4096)
    assert [value[:3] for value in ack_all(queue)] == [b"%03d" % n for n in range(90, 100)]
    queue.compact()
    assert queue.enqueue(b"next") == "100"
    assert ack_all(queue) == [b"next"]


def test_compact_of_an_empty_queue_is_harmless(open_queue) -> None:
    queue = open_queue()
    for _ in range(3):
        queue.compact()
    assert queue.enqueue(b"a") == "0"
    queue.compact()
    assert ack_all(queue) == [b"a"]


def test_the_ledger_does_not_grow_for_ever(open_queue) -> None:
    queue = open_queue()
    for _ in range(300):
        queue.enqueue_batch([b"x"] * 5)
        for message in queue.dequeue_batch(5):
            queue.ack(message)
    before = queue._files.ledger.size_bytes
    queue._keeper.snapshot()
    assert queue._files.ledger.size_bytes < before / 10
    queue.close()
    assert open_queue().stats().settled_offset == 1500


# Full disk


class InlineFlusher(Flusher):
    """Syncs nothing: the simulated disk of these tests never loses power."""

    def add(self, log) -> None:
        self._logs.append(log)

    def wait(self, targets) -> None:
        for log, _ in targets:
            log.sync()

    def close(self) -> None:
        self._logs.clear()


@pytest.fixture
def full_disk(clock) -> Iterator[tuple[SimDisk, Queue]]:
    disk = SimDisk(1)
    options = EmbeddedOptions(reserve_bytes=16 * 1024, fsync="none", max_deliveries=2)
    queue = Queue("/q", options, disk=disk, clock=clock, keeper=False, flusher=InlineFlusher())
    yield disk, queue
    disk.capacity = None
    queue.close()


def test_on_a_full_disk_publishing_is_refused_and_acks_go_on(full_disk, clock) -> None:
    disk, queue = full_disk
    queue.enqueue_batch([b"%d" % n for n in range(50)])
    disk.capacity = disk.used_bytes() + 100
    for call in (
        lambda: queue.enqueue(bytes(1000)),
        lambda: queue.enqueue_batch([bytes(1000)]),
        lambda: queue.enqueue(bytes(1000), delay=5),
        lambda: queue.enqueue(bytes(1000), dedup_id="x"),
    ):
        with pytest.raises(DiskFull) as caught:
            call()
        assert caught.value.retriable
    for _ in range(25):
        queue.ack(queue.dequeue())
    disk.capacity = None
    queue.enqueue(b"again")
    assert len(ack_all(queue)) == 26
    assert queue.stats().delayed == 0


def test_a_delayed_batch_that_does_not_fit_is_refused_whole(full_disk) -> None:
    disk, queue = full_disk
    disk.capacity = disk.used_bytes() + 3 * 1024 * 1024
    with pytest.raises(DiskFull):
        queue.enqueue_batch([bytes(500_000)] * 10, delay=5)
    assert (queue.stats().delayed, queue.delayed()) == (0, [])
    disk.capacity = None
    assert queue.enqueue_batch([b"a"], delay=5) == ["d0"]


def test_messages_are_delivered_while_delayed_ones_cannot_fire(full_disk, clock) -> None:
    disk, queue = full_disk
    queue.enqueue_batch([bytes(1000)] * 100, delay=5)
    queue.enqueue_batch([b"a", b"b"])
    disk.capacity = disk.used_bytes() + 100
    clock.advance(6)
    assert values(queue.dequeue_batch(5)) == [b"a", b"b"]
    disk.capacity = None
    clock.advance(1)
    assert len(queue.dequeue_batch(500)) == 100


def test_messages_are_delivered_while_dead_letters_cannot_be_written(full_disk, clock) -> None:
    disk, queue = full_disk
    queue.enqueue_batch([bytes(1000)] * 2500)
    for _ in range(2):
        assert len(queue.dequeue_batch(2500)) == 2500
        clock.advance(30)
    queue.enqueue(b"fresh")
    disk.capacity = disk.used_bytes() + 100
    assert values(queue.dequeue_batch(5)) == [b"fresh"]
    assert queue.stats().dead == 0
    disk.capacity = None
    clock.advance(2)
    assert queue.dequeue() is None
    assert queue.stats().dead == 2500
    assert (queue.stats().pending, queue.stats().in_flight) == (0, 1)
