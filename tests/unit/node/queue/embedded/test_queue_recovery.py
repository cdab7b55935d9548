"""Reopening stays quick however much a queue was used, and snapshots of the ledger keep it all."""

import shutil
import time
from pathlib import Path

import pytest
import queuefaults as faults
from queuefaults import LATER, START

from raftq.node.queue.embedded import Queue, keeper
from raftq.node.queue.embedded.options import EmbeddedOptions

MIB = 1024 * 1024
REOPEN_S_MAX = 2.0


def ledger_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path / "ledger").iterdir())


@pytest.mark.full
def test_two_hundred_thousand_single_acks_leave_a_small_ledger_and_a_quick_reopen(
    tmp_path: Path,
) -> None:
    """The keeper looks every second; here it looks every 10,000 acks, which is slower than that.
    CPU time, because tests run side by side."""
    path = tmp_path / "queue"
    options = EmbeddedOptions(fsync="none", in_flight_max=200_000)
    queue = faults.open_queue(path, options=options)
    largest = 0
    for _ in range(20):
        queue.enqueue_batch([b"x"] * 10_000)
        for message in queue.dequeue_batch(10_000):
            queue.ack(message)
        queue._keeper._upkeep(START)
        largest = max(largest, ledger_bytes(path))
    assert largest < 32 * MIB
    assert queue._files.ledger.start_offset > 0, "no snapshot was taken"
    killed = Path(shutil.copytree(path, tmp_path / "killed"))
    queue.close()
    for place in (path, killed):
        began = time.process_time()
        with faults.open_queue(place, options=options) as again:
            elapsed = time.process_time() - began
            assert again.stats().settled_offset == 200_000
            assert again.dequeue() is None
        assert elapsed < REOPEN_S_MAX


def test_sessions_that_are_too_short_for_a_snapshot_do_not_grow_the_ledger_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session writes less than a snapshot's worth; together they write many times that."""
    monkeypatch.setattr(keeper, "SNAPSHOT_LEDGER_BYTES", 60_000)
    path = tmp_path / "queue"
    written = 0
    for _ in range(12):
        with faults.open_queue(path) as queue:
            before = ledger_bytes(path)
            queue._keeper._upkeep(START)
            queue.enqueue_batch([b"x"] * 80)
            while message := queue.dequeue():
                queue.ack(message)
            written += max(ledger_bytes(path) - before, 0)
            queue._keeper._upkeep(START)
        assert ledger_bytes(path) < 150_000
    assert written > 200_000


def test_opening_and_closing_does_not_grow_the_ledger_by_much(tmp_path: Path) -> None:
    path = tmp_path / "queue"
    faults.build(path, clean=True)
    before = ledger_bytes(path)
    for _ in range(50):
        faults.open_queue(path).close()
    assert ledger_bytes(path) - before < 50 * 1024


# Snapshots


def rich(path: Path) -> Queue:
    """A queue in which every kind of state is there at once."""
    faults.build(path, clean=True)
    queue = faults.open_queue(path, START + 30)
    queue.redrive(limit=2)
    queue.ack_batch(queue.dequeue_batch(9)[::2])
    waiting = queue.dequeue_batch(4)
    queue.nack(waiting[0], delay=100.0)
    queue.postpone(waiting[1], delay=200.0)
    queue.extend(waiting[2], 500.0)
    queue.dequeue_batch(3, group="audit")
    queue.dequeue_batch(2, group="third")
    queue.pause(group="third")
    queue.checkpoint("audit", group="audit")
    queue.enqueue(b"plain twice", dedup_id="twice")
    queue.enqueue(b"later twice", dedup_id="later", delay=300.0)
    return queue


def facts(queue: Queue) -> list[object]:
    """Everything the ledger knows, in a form that can be compared."""
    state = queue._engine.state
    return [
        [group.state.snapshot() for _, group in sorted(state.groups.items())],
        state.checkpoints,
        state.dedup,
        state.dead_done.dump(),
    ]


@pytest.mark.parametrize("moment", ["after the prefix is dropped", "before the prefix is dropped"])
def test_snapshot_keeps_all_state_across_a_kill(tmp_path: Path, moment: str) -> None:
    """The same kill with and without a snapshot leads to the same state and the same deliveries."""
    path = tmp_path / "queue"
    queue = rich(path)
    plain = Path(shutil.copytree(path, tmp_path / "plain"))
    if moment.startswith("after"):
        queue._keeper.snapshot()
        assert queue._files.ledger.start_offset > 0
    else:
        queue._engine.write_snapshot()
    snapped = Path(shutil.copytree(path, tmp_path / "snapped"))
    live = facts(queue)
    queue.close()

    with faults.open_queue(plain, START + 40) as one, faults.open_queue(snapped, START + 40) as two:
        assert facts(one) == facts(two)
        assert facts(two)[1:] == live[1:]
        assert two.checkpoints().keys() == {"half", "audit"}
        assert two.enqueue(b"no", dedup_id="twice") == one.enqueue(b"no", dedup_id="twice")
        assert two.enqueue(b"no", dedup_id="later").startswith("d")
        assert two.stats().groups["third"]["paused"] == 1
        assert len(two.dead_letters()) == len(one.dead_letters()) > 10
        attempts: list[dict[int, int]] = [{}, {}]
        one._clock.now = two._clock.now = LATER  # type: ignore[attr-defined]
        got = [
            faults.drain(each, "default", seen)
            for each, seen in zip((one, two), attempts, strict=True)
        ]
        assert got[0] == got[1]
        assert attempts[0] == attempts[1]
        assert set(attempts[1].values()) == {1, 2}, "attempts were not kept"


def test_snapshot_of_a_live_queue_changes_nothing_for_its_consumers(tmp_path: Path) -> None:
    queue = rich(tmp_path / "queue")
    held = queue.dequeue_batch(5)
    before = facts(queue)
    for _ in range(3):
        queue._keeper.snapshot()
    assert facts(queue) == before
    queue.ack_batch(held)
    queue.close()
    with faults.open_queue(tmp_path / "queue", LATER) as again:
        offsets = {offset for offset, _ in faults.drain(again, "default", {})}
        assert not offsets & {message.offset for message in held}


def test_compact_drops_the_past_of_the_ledger_and_a_reopen_finds_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "queue"
    queue = rich(path)
    before = ledger_bytes(path)
    assert queue.compact() > 0
    assert ledger_bytes(path) < before / 2
    queue.close()
    found = faults.survey(path)
    assert (found.damaged, found.problems) == (0, [])
    assert found.checkpoints.keys() == {"half", "audit"}
