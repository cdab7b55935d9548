"""Damage in the ledger: deliveries may repeat, no message is lost, nothing raises."""

import shutil
from pathlib import Path

import msgpack
import pytest
import queuefaults as faults
from queuefaults import HARMS, LATER, START, Survey

from raftq.client.wire.encoder import encode_control
from raftq.node.queue.embedded import Queue
from raftq.node.queue.embedded.ledger import IntentDecided, pack_shell
from raftq.node.queue.embedded.publish import Draft


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("segment", [0, 1, 2, -1])
def test_damaged_ledger_repeats_deliveries_and_loses_no_message(
    image: Path, copy: Path, healthy: Survey, segment: int, harm: str
) -> None:
    HARMS[harm](faults.segment_files(copy, "ledger")[segment])

    found = faults.survey(copy)

    letters = dict(healthy.dead)
    for offset, value in healthy.plain.items():
        assert found.plain.get(offset) == value
    assert found.fired == healthy.fired
    assert {value for _, value in healthy.audit} <= {value for _, value in found.audit}
    assert set(found.dead) <= set(healthy.dead)
    lost_letters = set(healthy.dead) - set(found.dead)
    # A letter that opening would have written is a message again, its attempts start anew.
    assert {value for _, value in lost_letters} <= set(found.plain.values())
    assert len(lost_letters) <= 1
    assert len(letters) >= 15
    if segment != -1 or image.name == "closed":
        assert any(line.startswith("ledger: ") for line in found.problems)
    assert found.damaged == 0, "no message is damaged"


def test_ledger_is_whole_again_after_one_open(copy: Path) -> None:
    """Opening replaces a damaged ledger by a snapshot, so the next open finds none."""
    faults.zeros(faults.segment_files(copy, "ledger")[1])
    with faults.open_queue(copy, LATER) as queue:
        assert [line for line in queue.verify() if line.startswith("ledger: ")]
        left = queue.stats().pending
    with faults.open_queue(copy, LATER) as queue:
        assert queue.verify() == []
        assert queue.stats().pending == left


def grow(queue: Queue, least_segments: int) -> None:
    """Grants and acks until the ledger has so many segments."""
    while queue._files.ledger.segment_count < least_segments:
        queue.enqueue(b"filler")
        queue.ack(queue.dequeue())  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpoint", ["with checkpoint", "without checkpoint"])
def test_missing_beginning_of_the_ledger_does_not_hide_unsettled_messages(
    tmp_path: Path, checkpoint: str
) -> None:
    """
    1. Ten messages are delivered and not settled; some wait for a retry, some are in flight.
    2. The ledger grows into further segments. 3. Its first one, with those deliveries, is deleted.
    """
    path = tmp_path / "queue"
    queue = faults.open_queue(path)
    for number in range(10):
        queue.enqueue(b"first %d" % number)
    held = queue.dequeue_batch(10, visibility_timeout=100_000)
    for message in held[:5]:
        queue.nack(message, delay=50_000)
    grow(queue, 4)
    killed = Path(shutil.copytree(path, tmp_path / "killed"))
    queue.close()
    faults.segment_files(killed, "ledger")[0].unlink()
    if checkpoint.startswith("without"):
        (killed / "ledger" / "checkpoint").unlink()
    with faults.open_queue(killed, START + 100) as again:
        assert [line for line in again.verify() if line.startswith("ledger: ")]
        got = faults.drain(again, "default", {})
        assert [value for _, value in got[:10]] == [b"first %d" % n for n in range(10)]


def test_redelivery_whose_first_delivery_was_lost_does_not_stop_the_open(tmp_path: Path) -> None:
    """The ledger's second segment grants a record as waiting that its first one returned."""
    path = tmp_path / "queue"
    queue = faults.open_queue(path)
    queue.enqueue(b"retried")
    queue.nack(queue.dequeue(), delay=10.0)  # type: ignore[arg-type]
    grow(queue, 3)
    queue._clock.now += 20  # type: ignore[attr-defined]
    again = queue.dequeue()
    assert again is not None
    assert again.attempt == 2
    killed = Path(shutil.copytree(path, tmp_path / "killed"))
    queue.close()
    faults.segment_files(killed, "ledger")[0].unlink()
    (killed / "ledger" / "checkpoint").unlink()
    with faults.open_queue(killed, START + 100) as reopened:
        assert b"retried" in dict(faults.drain(reopened, "default", {})).values()


def damage_batch(path: Path, number: int) -> None:
    file = faults.segment_files(path, "ledger")[-1]
    position = faults.batch_positions(file)[number][0]
    faults.flip(lambda size: position + 90)(file)


def test_replay_and_pause_after_the_damage_are_still_believed(tmp_path: Path) -> None:
    """Both say where a group stands whatever came before, so the damage before does not matter."""
    path = tmp_path / "queue"
    with faults.open_queue(path) as queue:
        queue.enqueue_batch([b"%d" % n for n in range(10)])
        queue.ack_batch(queue.dequeue_batch(10))
        queue.replay_from(offset=4)
        queue.pause()
    damage_batch(path, 1)
    with faults.open_queue(path) as queue:
        assert queue.verify()
        assert queue.stats().paused
        queue.resume()
        assert [offset for offset, _ in faults.drain(queue, "default", {})] == [4, 5, 6, 7, 8, 9]


def test_purged_messages_stay_purged_when_the_ledger_is_damaged_before_the_purge(
    tmp_path: Path,
) -> None:
    path = tmp_path / "queue"
    with faults.open_queue(path) as queue:
        queue.enqueue_batch([b"%d" % n for n in range(10)])
        queue.ack_batch(queue.dequeue_batch(3))
        queue.purge()
    damage_batch(path, 1)
    with faults.open_queue(path) as queue:
        assert queue.verify()
        assert queue.dequeue() is None


def append_records(path: Path, *records: bytes) -> None:
    """Put records into the ledger that are whole but make no sense."""
    with faults.open_queue(path) as queue:
        for record in records:
            queue._files.ledger.append(encode_control(record))


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"X?",
        b"D\xc1",
        b"S\xc1",
        b"S" + msgpack.packb([[99, 1]]),
        b"S" + msgpack.packb([[]]),
        b"S" + msgpack.packb([7]),
        b"S" + msgpack.packb({"a": 1}),
        b"S" + msgpack.packb([[5, {"data": "x"}]]),
        b"D" + msgpack.packb([[1, "default", 1.0, "", [[2, 0, 9, 1, 5, 2.0, 2.0, False]]]]),
    ],
)
def test_record_that_makes_no_sense_is_damage_not_an_error(copy: Path, record: bytes) -> None:
    append_records(copy, record)
    with faults.open_queue(copy, LATER) as queue:
        assert [line for line in queue.verify() if line.startswith("ledger: ")]
        assert len(faults.drain(queue, "default", {})) > 90
        faults.works_on(queue)
    assert faults.survey(copy).problems == []


def test_intent_that_fits_no_log_is_applied_at_the_end_instead_of_stopping_the_open(
    tmp_path: Path,
) -> None:
    """The log ends inside the offsets the intent was meant for: its messages come behind them."""
    path = tmp_path / "queue"
    with faults.open_queue(path) as queue:
        queue.enqueue_batch([b"%d" % n for n in range(10)])
        batch = queue._publisher.encode(Draft([b"tx 1", b"tx 2", b"tx 3"]), 0)[0]
        entry = IntentDecided([("data", 8, 3, bytes(batch))], b"", [], [])
        queue._files.ledger.append(encode_control(pack_shell([entry])))
    with faults.open_queue(path) as queue:
        values = [value for _, value in faults.drain(queue, "default", {})]
        assert values == [b"%d" % n for n in range(10)] + [b"tx 1", b"tx 2", b"tx 3"]
    with faults.open_queue(path) as queue:
        assert queue.dequeue() is None
