"""What the embedded queue says about itself."""

from raftq import Queue


def test_a_new_queue_counts_nothing(queue: Queue) -> None:
    stats = queue.stats()
    assert (stats.total, stats.pending, stats.in_flight, stats.delayed, stats.dead) == (0,) * 5
    assert set(stats.lanes) == {"critical", "high", "normal", "low", "background"}
    assert list(stats.groups) == ["default"]
    assert set(stats.counters.values()) == {0}
    assert (stats.start_offset, stats.end_offset, stats.settled_offset) == (0, 0, 0)


def test_every_message_is_counted_where_it_is(queue: Queue, clock) -> None:
    queue.enqueue_batch([b"x"] * 10)
    queue.enqueue_batch([b"y"] * 4, priority="high")
    queue.enqueue_batch([b"z"] * 3, delay=60)
    taken = queue.dequeue_batch(9)
    queue.ack_batch(taken[:2])
    queue.nack(taken[2], 60)
    queue.postpone(taken[3], 60)
    queue.reject(taken[4], "bad")
    stats = queue.stats()
    assert (stats.total, stats.delayed, stats.dead) == (14, 3, 1)
    assert (stats.in_flight, stats.waiting, stats.pending, stats.settled) == (4, 2, 7, 3)
    assert stats.pending + stats.in_flight + stats.settled == stats.total
    assert sum(lane.pending for lane in stats.lanes.values()) == stats.pending
    assert (stats.lanes["normal"].total, stats.lanes["high"].total) == (10, 4)
    assert stats.counters["acked"] == 2
    assert stats.counters["nacked"] == stats.counters["postponed"] == stats.counters["dead"] == 1
    clock.advance(60, queue)
    stats = queue.stats()
    assert (stats.delayed, stats.total, stats.in_flight) == (0, 17, 0)
    assert stats.counters["lease_expired"] == 4
    redelivered = len([m for m in queue.dequeue_batch(100) if m.attempt > 1])
    assert redelivered == 5


def test_each_group_has_counts_of_its_own(queue: Queue) -> None:
    queue.enqueue_batch([b"x"] * 5)
    queue.ack_batch(queue.dequeue_batch(2, group="g"))
    queue.dequeue(group="g")
    queue.pause(group="g")
    assert queue.stats().groups["g"] == {
        "pending": 2, "in_flight": 1, "waiting": 0, "settled_offset": 2, "acked": 2, "dead": 0,
        "paused": 1,
    }  # fmt: skip
    assert queue.stats().groups["default"]["pending"] == 5


def test_counts_survive_reopen(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"x"] * 5)
    a, b, *_ = queue.dequeue_batch(5)
    queue.ack(a)
    queue.reject(b, "bad")
    queue.enqueue(b"y", delay=60)
    queue.close()
    queue = open_queue()
    stats = queue.stats()
    assert (stats.total, stats.settled, stats.pending, stats.dead, stats.delayed) == (5, 2, 3, 1, 1)
    assert (stats.counters["acked"], stats.counters["dead"]) == (1, 1)


def test_rates_are_over_the_last_seconds(queue: Queue, clock) -> None:
    assert queue.stats().rates == {"enqueued_per_s": 0.0, "acked_per_s": 0.0}
    queue._keeper._upkeep(clock.now)
    queue.enqueue_batch([b"x"] * 100)
    queue.ack_batch(queue.dequeue_batch(50))
    clock.advance(5, queue)
    assert queue.stats().rates == {"enqueued_per_s": 20.0, "acked_per_s": 10.0}


def test_sync_moves_the_flushed_offset_to_the_end(queue: Queue) -> None:
    queue.enqueue_batch([b"x"] * 5)
    assert queue.stats().flushed_offset == 0
    queue.sync()
    assert queue.stats().flushed_offset == 5


def test_segments_and_bytes_grow_with_the_messages(open_queue) -> None:
    queue = open_queue(segment_bytes=4096)
    before = queue.stats()
    for _ in range(20):
        queue.enqueue(bytes(1000))
    after = queue.stats()
    assert after.segments > before.segments == 1
    assert after.disk_bytes - before.disk_bytes > 20_000


def test_verify_reads_everything_and_reports_damage(open_queue, tmp_path) -> None:
    queue = open_queue()
    queue.enqueue(b"a" * 100)
    queue.enqueue(b"b" * 100)
    assert queue.verify() == []
    (path,) = (tmp_path / "q" / "data").glob("*.log")
    content = bytearray(path.read_bytes())
    content[120] ^= 1
    path.write_bytes(content)
    (problem,) = queue.verify()
    assert problem.startswith("data: ")
    assert [m.value for m in queue.dequeue_batch(5)] == [b"b" * 100]
    stats = queue.stats()
    assert (stats.damaged, stats.counters["skipped"]) == (1, 1)
