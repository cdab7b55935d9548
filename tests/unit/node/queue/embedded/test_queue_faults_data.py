"""Damage in the data log: what is hit is reported, the rest is delivered at its offset."""

import logging
import shutil
from pathlib import Path

import pytest
import queuefaults as faults
from queuefaults import HARMS, START, Survey

from raftq.node.queue.embedded.options import EmbeddedOptions

# The message that was nacked, and so comes out of turn or ends as a dead letter.
RETRIED = 33
ONE_BATCH = [name for name in HARMS if "flipped" in name]


@pytest.fixture(scope="module", params=["closed", "killed"])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / request.param
    faults.build(path, clean=request.param == "closed")
    return path


@pytest.fixture(scope="module")
def healthy(image: Path) -> Survey:
    copy = image.with_name(image.name + "-healthy")
    shutil.copytree(image, copy)
    found = faults.survey(copy)
    assert (found.damaged, found.problems) == (0, [])
    assert len(found.plain) > 90
    assert len(found.fired) == 47
    return found


@pytest.fixture
def copy(image: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(image, tmp_path / "queue"))


def inside(offset: int, ranges: list[tuple[int, int]]) -> bool:
    return any(start <= offset < end for start, end in ranges)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("segment", [0, 1, 3, -1])
def test_damaged_segment_costs_only_the_messages_it_held(
    image: Path, copy: Path, healthy: Survey, segment: int, harm: str
) -> None:
    file = faults.segment_files(copy, "data")[segment]
    sealed = segment != -1
    before = faults.batch_positions(file)
    # What a killed process had not synced may go without a trace, but only the end of the log.
    known = segment != -1 or image.name == "closed"
    HARMS[harm](file)

    found = faults.survey(copy)

    ranges = found.ranges["data"]
    lost = {offset for offset, value in healthy.plain.items() if found.plain.get(offset) != value}
    assert all(before[0][1] <= offset < before[-1][2] for offset in lost)
    assert not set(found.plain) - set(healthy.plain), "settled messages came back"
    if known:
        assert all(inside(offset, ranges) for offset in lost), f"{lost} is not reported: {ranges}"
    if sealed:
        assert ranges
        assert found.damaged == sum(end - start for start, end in ranges)
        assert all(any(str(start) in line for line in found.problems) for start, _ in ranges)
        assert found.fired == healthy.fired
    if sealed and harm in ONE_BATCH:
        assert ranges in [[(start, end)] for _, start, end in before]
    order = [offset for offset, _ in found.default if offset != RETRIED]
    assert order == sorted(order)


@pytest.mark.parametrize("records", [1, 7, 1000])
def test_flipped_header_in_the_middle_of_a_sealed_segment_costs_one_batch(
    copy: Path, healthy: Survey, records: int
) -> None:
    """The consumer reads ahead: the bad header lies inside bytes that it already holds."""
    file = faults.segment_files(copy, "data")[2]
    position, start, end = faults.batch_positions(file)[4]
    with faults.open_queue(copy) as queue:
        faults.flip(lambda size: position + 5)(file)  # now, so that opening does not see it
        got = {}
        while messages := queue.dequeue_batch(records):
            got.update((message.offset, message.value) for message in messages)
            queue.ack_batch(messages)
        missing = set(healthy.plain) - set(got)

        assert missing - {RETRIED} == {start}
        assert faults.damaged_ranges(queue)["data"] == [(start, end)]
        assert queue.stats().damaged == 1


def test_every_byte_of_a_segment_costs_at_most_its_own_batch(copy: Path) -> None:
    """Flip one bit in each part of a batch (every 13th byte of two batches), one at a time."""
    file = faults.segment_files(copy, "data")[1]
    good = file.read_bytes()
    batches = faults.batch_positions(file)
    first, last = batches[5][0], batches[7][0]
    for position in range(first, last, 13):
        bad = bytearray(good)
        bad[position] ^= 0x10
        file.write_bytes(bad)
        hit = batches[5 if position < batches[6][0] else 6]
        with faults.open_queue(copy) as queue:
            queue.delete_group("probe")
            got = [m.offset for m in queue.dequeue_batch(1000, group="probe")]
            expected = [o for o in range(queue.stats().end_offset) if o != hit[1]]
            assert got == expected, f"byte {position}"
            assert queue.stats().damaged == 1
    file.write_bytes(good)


def test_damage_is_counted_once_however_many_groups_meet_it(copy: Path) -> None:
    file = faults.segment_files(copy, "data")[2]
    faults.flip(lambda size: 40)(file)
    with faults.open_queue(copy) as queue:
        for group in ("default", "audit", "third"):
            faults.drain(queue, group, {})
        assert queue.stats().damaged == 1


def test_damage_is_logged_when_it_is_found(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """1. Damage in a sealed file is found by its reader. 2. A missing file is found at open."""
    faults.flip(lambda size: 40)(faults.segment_files(copy, "data")[2])
    with caplog.at_level(logging.ERROR, "raftq.queue"), faults.open_queue(copy) as queue:
        faults.drain(queue, "default", {})
    assert "event=damage_found" in caplog.text
    assert "log=data" in caplog.text
    caplog.clear()
    faults.delete(faults.segment_files(copy, "data")[1])
    with caplog.at_level(logging.ERROR, "raftq.queue"):
        faults.open_queue(copy).close()
    assert "event=damage_found" in caplog.text
    assert "start=25" in caplog.text


def test_large_damaged_batch_is_passed_over_quickly(tmp_path: Path) -> None:
    """One flipped bit in 10,000 messages: the next message comes at once, one by one or not."""
    options = EmbeddedOptions(fsync="none", reserve_bytes=0)
    path = tmp_path / "queue"
    with faults.open_queue(path, options=options) as queue:
        queue.enqueue_batch([b"%d" % n + b"x" * 100 for n in range(10_000)])
        queue.enqueue(b"behind")
        queue._files.data.roll()
    faults.flip(lambda size: 50_000)(faults.segment_files(path, "data")[0])
    with faults.open_queue(path, options=options) as queue:
        reads = 0
        data = queue._files.data
        segment_read = type(data).read

        def counted(self: object, offset: int, bytes_max: int) -> bytes:
            nonlocal reads
            reads += 1
            return segment_read(data, offset, bytes_max)

        type(data).read = counted  # type: ignore[method-assign]
        try:
            message = queue.dequeue()
        finally:
            type(data).read = segment_read  # type: ignore[method-assign]
        assert message is not None
        assert message.value == b"behind"
        assert queue.stats().damaged == 10_000
        assert reads < 20


def test_settled_prefix_passes_damage_so_that_space_is_released(copy: Path) -> None:
    """What nobody can read is nobody's: it must not keep every later segment on disk."""
    faults.zeros(faults.segment_files(copy, "data")[2])
    faults.delete(faults.segment_files(copy, "data")[1])
    faults.survey(copy)
    with faults.open_queue(copy, faults.LATER) as queue:
        faults.drain(queue, "audit", {})
        assert queue.stats().settled_offset == queue.stats().end_offset
        queue.compact()
        assert queue.stats().start_offset == queue.stats().end_offset
        assert queue.stats().damaged == 0


def test_new_group_and_replay_pass_damage_as_well(copy: Path) -> None:
    faults.delete(faults.segment_files(copy, "data")[1])
    with faults.open_queue(copy) as queue:
        queue.replay_from(offset=0)
        for group in ("default", "fresh"):
            got = [offset for offset, _ in faults.drain(queue, group, {})]
            assert got == [o for o in range(queue.stats().end_offset) if not 25 <= o < 49]
        queue.delete_group("audit")
        queue.compact()
        assert queue.stats().start_offset == queue.stats().end_offset


def test_damaged_messages_do_not_count_against_max_messages(copy: Path) -> None:
    faults.delete(faults.segment_files(copy, "data")[1])
    faults.survey(copy)
    options = EmbeddedOptions(fsync="none", max_messages=5, reserve_bytes=0)
    with faults.open_queue(copy, faults.LATER, options) as queue:
        faults.drain(queue, "audit", {})
        for _ in range(5):
            queue.enqueue(b"fits")


@pytest.mark.parametrize("kind", ["missing first segment", "missing all segments"])
def test_missing_files_are_reported_and_no_offset_is_given_out_twice(
    copy: Path, healthy: Survey, kind: str
) -> None:
    files = faults.segment_files(copy, "data")
    gone = files[:1] if "first" in kind else files
    end = int(gone[-1].stem) if kind.endswith("all segments") else int(files[1].stem)
    for file in gone:
        file.unlink()
    found = faults.survey(copy)
    assert found.ranges["data"][0][0] == 0
    assert found.ranges["data"][-1][1] >= end
    assert found.damaged >= end
    if "first" in kind:
        assert found.plain == healthy.plain


def sealed(path: Path, lanes: list[str], size: int = 5) -> list[tuple[int, int, int]]:
    """A sealed segment with one batch for each lane named; its batches."""
    with faults.open_queue(path) as queue:
        for number, lane in enumerate(lanes):
            values = [b"%d-%d" % (number, n) for n in range(size)]
            queue.enqueue_batch(values, priority=lane)
        queue._files.data.roll()
    return faults.batch_positions(faults.segment_files(path, "data")[0])


def test_batch_that_claims_fewer_records_does_not_pass_the_next_one_off_as_its_own(
    tmp_path: Path,
) -> None:
    """
    1. Three batches of five; [5, 8) is settled. 2. One bit makes the second batch claim one record.
    3. The consumer, coming from the first batch, asks for offset 8.
    """
    path = tmp_path / "queue"
    batches = sealed(path, ["normal"] * 3)
    with faults.open_queue(path) as queue:
        queue.ack_batch(queue.dequeue_batch(8)[5:])
    with faults.open_queue(path) as queue:
        faults.flip(lambda size: batches[1][0] + 36, bit=2)(faults.segment_files(path, "data")[0])
        got = []
        while message := queue.dequeue():
            got.append((message.offset, message.value))
            queue.ack(message)
        assert got == [(n, b"0-%d" % n) for n in range(5)] + [
            (10 + n, b"2-%d" % n) for n in range(5)
        ]


@pytest.mark.parametrize("beyond", range(-70, 10, 5))
def test_wrong_length_in_a_batch_of_another_lane_does_not_disturb_this_one(
    tmp_path: Path, beyond: int
) -> None:
    """The length leads the reader of the normal lane to a place near the end of what it holds."""
    path = tmp_path / "queue"
    batches = sealed(path, ["normal", "low", "normal"])
    file = faults.segment_files(path, "data")[0]
    data = bytearray(file.read_bytes())
    at = batches[1][0]
    data[at + 4 : at + 8] = (len(data) - at + beyond).to_bytes(4, "little")
    with faults.open_queue(path) as queue:
        file.write_bytes(data)
        got = sorted(faults.drain(queue, "default", {}))
        assert [offset for offset, _ in got] == [*range(5), *range(10, 15)]
        assert faults.damaged_ranges(queue)["data"] == [(5, 10)]


def test_message_behind_a_flood_of_expired_or_damaged_ones_is_found_at_once(
    tmp_path: Path,
) -> None:
    """Every second message is unreadable, the others have expired: one call gets past them all."""
    path = tmp_path / "queue"
    with faults.open_queue(path) as queue:
        for number in range(400):
            queue.enqueue(b"%d" % number, ttl=10.0)
        queue.enqueue(b"alive")
        queue._files.data.roll()
    for file in faults.segment_files(path, "data")[:-1]:
        data = bytearray(file.read_bytes())
        for position, start, _ in faults.batch_positions(file):
            if start % 2 and start < 400:
                data[position + 60] ^= 1
        file.write_bytes(data)
    with faults.open_queue(path, START + 20) as queue:
        message = queue.dequeue()
        assert message is not None
        assert message.value == b"alive"
        assert queue.stats().damaged == 200
