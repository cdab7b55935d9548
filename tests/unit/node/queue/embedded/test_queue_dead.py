"""Dead letters of the embedded queue: how messages get there, what they say, how they leave."""

import subprocess
import sys
from pathlib import Path

import pytest

from raftq import Queue
from raftq.client.common.errors import AlreadySettled, LeaseExpired
from raftq.client.wire.batch import encode


def values(messages) -> list[bytes]:
    return [message.value for message in messages]


def fail_until_dead(queue: Queue, clock, times: int = 3) -> None:
    for _ in range(times):
        message = queue.dequeue()
        assert message is not None
        queue.nack(message, 0)
    assert queue.dequeue() is None


def test_a_message_that_fails_too_often_is_one_dead_letter_with_all_its_facts(
    queue: Queue, clock
) -> None:
    queue.enqueue(b"v", key=b"k", priority="low", headers={"mine": b"1"})
    start = clock.now
    for attempt in (1, 2, 3):
        message = queue.dequeue()
        assert message.attempt == attempt
        queue.nack(message, 10)
        clock.advance(10, queue)
    assert queue.dequeue() is None
    (letter,) = queue.dead_letters()
    assert (letter.value, letter.key, letter.headers) == (b"v", b"k", {"mine": b"1"})
    assert (letter.priority, letter.offset, letter.group) == ("low", 0, "default")
    assert (letter.reason, letter.error, letter.attempts) == ("max_deliveries", "", 3)
    assert (letter.first_delivery, letter.last_delivery) == (start, start + 20)
    assert letter.timestamp == start + 20
    stats = queue.stats()
    assert (stats.dead, stats.counters["dead"], stats.pending, stats.in_flight) == (1, 1, 0, 0)


def test_the_stored_dead_letter_has_the_facts_as_headers(queue: Queue) -> None:
    queue.enqueue(b"v", headers={"mine": b"1"})
    queue.reject(queue.dequeue(), "bad", "no JSON")
    (record,) = [r for batch in queue._files.dead.batches(0) for r in batch.records()]
    facts = {name.removeprefix("x-dlq-"): value for name, value in record.headers.items()}
    assert facts.pop("mine") == b"1"
    assert facts.pop("first-delivery") == facts.pop("last-delivery") == b"1700000000000"
    assert facts == {
        "reason": b"bad", "topic": b"q", "partition": b"0", "offset": b"0", "group": b"default",
        "attempts": b"1", "error": b"no JSON",
    }  # fmt: skip


def test_the_dead_letters_of_an_older_directory_have_their_times_in_seconds(queue: Queue) -> None:
    headers = {"x-dlq-first-delivery": b"1700000000.25", "x-dlq-last-delivery": b"1700000001250"}
    queue._files.dead.append(encode([b"v"], headers=[headers]))
    (letter,) = queue.dead_letters()
    assert (letter.first_delivery, letter.last_delivery) == (1700000000.25, 1700000001.25)


def test_leases_that_end_without_an_ack_spend_attempts_and_end_as_a_dead_letter(
    queue: Queue, clock
) -> None:
    queue.enqueue(b"a")
    for _ in range(3):
        assert queue.dequeue() is not None
        clock.advance(30, queue)
    assert [(d.reason, d.attempts) for d in queue.dead_letters()] == [("max_deliveries", 3)]
    assert queue.dequeue() is None


def test_max_deliveries_of_one_gives_up_at_the_first_failure(open_queue, clock) -> None:
    queue = open_queue(max_deliveries=1)
    queue.enqueue_batch([b"a", b"b"])
    a, b = queue.dequeue_batch(2)
    queue.nack(a)
    clock.advance(30, queue)
    assert values(queue.dead_letters()) == [b"a", b"b"]
    with pytest.raises(AlreadySettled):
        queue.ack(b)


def test_each_group_gives_up_for_itself(queue: Queue) -> None:
    queue.enqueue(b"a")
    queue.reject(queue.dequeue(group="one"), "bad")
    message = queue.dequeue(group="two")
    queue.ack(message)
    assert [letter.group for letter in queue.dead_letters()] == ["one"]


def test_a_mass_expiry_makes_one_dead_letter_each(open_queue, clock) -> None:
    queue = open_queue(max_deliveries=1)
    sent = [b"%05d" % n for n in range(2500)]
    for lane in ("critical", "low"):
        queue.enqueue_batch(sent, priority=lane, headers=[{"h": b"1"}] * len(sent))
    assert len(queue.dequeue_batch(10_000)) == 5000
    clock.advance(30, queue)
    assert queue.dequeue() is None
    letters = queue.dead_letters()
    for lane in ("critical", "low"):
        assert values([d for d in letters if d.priority == lane]) == sent
    assert queue.stats().settled_offset == 5000
    assert queue.redrive() == 5000
    assert sorted(values(queue.dequeue_batch(10_000))) == sorted(sent * 2)


def test_large_messages_die_together_in_portions_that_fit_a_batch(open_queue, clock) -> None:
    queue = open_queue(max_deliveries=1, value_bytes_max=4 * 1024 * 1024)
    sent = [b"%d" % n + bytes(3 * 1024 * 1024) for n in range(25)]
    queue.enqueue_batch(sent)
    assert len(queue.dequeue_batch(25)) == 25
    clock.advance(30, queue)
    assert [value[:2] for value in values(queue.dead_letters())] == [value[:2] for value in sent]
    assert queue.stats().in_flight == queue.stats().pending == 0
    assert queue.redrive() == 25
    queue.close()
    queue = open_queue(max_deliveries=1)
    assert values(queue.dequeue_batch(25)) == sent


def test_messages_with_large_headers_die_together_too(open_queue, clock) -> None:
    queue = open_queue(max_deliveries=1)
    keys = [b"%d" % n + bytes(60_000) for n in range(700)]
    queue.enqueue_batch([b"v"] * 700, keys=keys, headers=[{"h": bytes(60_000)}] * 700)
    queue.dequeue_batch(700)
    clock.advance(30, queue)
    assert [letter.key for letter in queue.dead_letters()] == keys
    assert queue.redrive() == 700
    assert [message.key for message in queue.dequeue_batch(700)] == keys


# Redrive


def test_redrive_puts_a_message_back_as_it_was(queue: Queue) -> None:
    queue.enqueue(b"v", key=b"k", priority="high", headers={"mine": b"1", "x-dlq-like": b"2"})
    queue.reject(queue.dequeue(), "bad")
    assert queue.redrive() == 1
    message = queue.dequeue()
    assert (message.value, message.key, message.priority) == (b"v", b"k", "high")
    assert message.headers == {"mine": b"1", "x-dlq-like": b"2"}
    assert (message.attempt, message.offset) == (1, 1)
    assert queue.dead_letters() == []


def test_redrive_is_idempotent(queue: Queue) -> None:
    queue.enqueue(b"v")
    queue.reject(queue.dequeue(), "bad")
    assert [queue.redrive(), queue.redrive(), queue.redrive()] == [1, 0, 0]
    assert queue.stats().total == 2


def test_redrive_by_reason_and_limit_takes_the_oldest_first(queue: Queue) -> None:
    queue.enqueue_batch([b"%d" % n for n in range(6)])
    for number, message in enumerate(queue.dequeue_batch(6)):
        queue.reject(message, "odd" if number % 2 else "even")
    assert queue.redrive("nothing like it") == 0
    assert queue.redrive(limit=0) == 0
    assert queue.redrive("odd", limit=2) == 2
    assert values(queue.dequeue_batch(10)) == [b"1", b"3"]
    assert values(queue.dead_letters()) == [b"0", b"2", b"4", b"5"]
    assert values(queue.dead_letters(reason="even", limit=2)) == [b"0", b"2"]
    assert queue.redrive(limit=1) == 1
    assert queue.redrive() == 3
    assert queue.stats().dead == 0


def test_a_redriven_message_can_die_again_and_is_one_dead_letter_again(queue: Queue, clock) -> None:
    queue.enqueue(b"v", headers={"mine": b"1"})
    for round_ in range(3):
        fail_until_dead(queue, clock)
        (letter,) = queue.dead_letters()
        assert (letter.headers, letter.attempts) == ({"mine": b"1"}, 3)
        assert letter.offset == round_
        assert queue.redrive() == 1
    assert queue.stats().dead == 0


def test_redriven_and_remaining_dead_letters_survive_reopen(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b", b"c"])
    for message in queue.dequeue_batch(3):
        queue.reject(message, message.value.decode())
    assert queue.redrive("b") == 1
    for _ in range(2):
        queue.close()
        queue = open_queue()
        assert [letter.reason for letter in queue.dead_letters()] == ["a", "c"]
        assert queue.stats().dead == 2
        assert queue.redrive("b") == 0
        queue._keeper.snapshot()
    assert values(queue.dequeue_batch(5)) == [b"b"]


def test_purge_dead_letters_forgets_them_for_good(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b"])
    for message in queue.dequeue_batch(2):
        queue.reject(message, "bad")
    assert queue.purge_dead_letters() == 2
    assert queue.purge_dead_letters() == 0
    assert queue.redrive() == 0
    queue.close()
    queue = open_queue()
    assert queue.dead_letters() == []
    queue.enqueue(b"c")
    queue.reject(queue.dequeue(), "new")
    assert values(queue.dead_letters()) == [b"c"]


def test_purge_keeps_dead_letters(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b"])
    queue.reject(queue.dequeue(), "bad")
    assert queue.purge() == 1
    assert values(queue.dead_letters()) == [b"a"]


def test_dead_letters_are_dropped_when_their_retention_ends(open_queue, clock) -> None:
    queue = open_queue(dead_letter_retention=3600)
    queue.enqueue_batch([b"a", b"b"])
    queue.reject(queue.dequeue(), "bad")
    clock.advance(3000)
    queue._keeper.retain(clock.now)
    assert values(queue.dead_letters()) == [b"a"]
    clock.advance(700)
    queue._keeper.retain(clock.now)
    queue._keeper.retain(clock.now)
    assert queue.dead_letters() == []
    assert (queue.stats().dead, queue.redrive()) == (0, 0)
    queue.reject(queue.dequeue(), "bad")
    assert values(queue.dead_letters()) == [b"b"]


def test_dead_letters_without_retention_stay(open_queue, clock) -> None:
    queue = open_queue(dead_letter_retention=None)
    queue.enqueue(b"a")
    queue.reject(queue.dequeue(), "bad")
    clock.advance(1000 * 86400)
    queue._keeper.retain(clock.now)
    assert values(queue.dead_letters()) == [b"a"]


def test_a_rejected_receipt_is_spent(queue: Queue) -> None:
    queue.enqueue(b"a")
    message = queue.dequeue()
    queue.reject(message, "bad")
    with pytest.raises(AlreadySettled):
        queue.reject(message, "bad")
    assert queue.stats().dead == 1


def test_rejecting_after_the_lease_ended_makes_no_dead_letter(queue: Queue, clock) -> None:
    queue.enqueue(b"a")
    message = queue.dequeue()
    clock.advance(30, queue)
    with pytest.raises(LeaseExpired):
        queue.reject(message, "late")
    assert queue.dead_letters() == []
    assert queue.dequeue().attempt == 2


def test_a_damaged_message_that_dies_leaves_the_others_whole(open_queue, clock, tmp_path) -> None:
    queue = open_queue(max_deliveries=1)
    queue.enqueue_batch([b"a" * 100])
    queue.enqueue_batch([b"b" * 100])
    assert len(queue.dequeue_batch(2)) == 2
    (path,) = (tmp_path / "q" / "data").glob("*.log")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    queue._engine.readers.clear()
    clock.advance(30, queue)
    assert values(queue.dead_letters()) == [b"b" * 100]
    assert queue.stats().settled_offset == 2


# A consumer that dies

KILLER = """
import os, sys
from raftq import Queue
queue = Queue.open(sys.argv[1], max_deliveries=2, fsync="none", reserve_bytes=0)
message = queue.dequeue()
print(message and message.attempt, flush=True)
os._exit(9)
"""


def test_a_message_that_kills_its_consumer_spends_its_attempts_and_dies(tmp_path: Path) -> None:
    """1. The process is gone without a goodbye. 2. The lease ends at the next open, at once."""
    path = tmp_path / "q"
    with Queue.open(path, fsync="none") as queue:
        queue.enqueue(b"poison")
        queue.enqueue(b"fine")
    said = []
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-c", KILLER, str(path)], capture_output=True, timeout=30, check=False
        )
        assert run.returncode == 9, run.stderr
        said.append(run.stdout.strip())
    assert said == [b"1", b"2", b"1"]
    with Queue.open(path, max_deliveries=2, fsync="none") as queue:
        assert [(d.value, d.attempts) for d in queue.dead_letters()] == [(b"poison", 2)]
        message = queue.dequeue()
        assert (message.value, message.attempt) == (b"fine", 2)
