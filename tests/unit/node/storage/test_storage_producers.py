"""What a partition remembers of its producers, against a naive model, and its snapshots."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.client.common.disk import File, RealDisk, RealFile
from raftq.client.common.errors import (
    CorruptFile,
    DiskFull,
    FencedProducer,
    OutOfOrderSequence,
    UnknownFormat,
)
from raftq.client.common.types import Buffer
from raftq.client.wire.batch import BatchProducer, encode
from raftq.client.wire.encoder import encode_control
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log
from raftq.node.storage.producer_files import load_newest, rebuild, remove_above, save
from raftq.node.storage.producers import IDLE_MS_MAX, WINDOW, Producers

WRAP = 1 << 32
DISK = RealDisk()


class Naive:
    """Every batch ever appended, in order; answers by looking through all of them."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int, int, int]] = []
        self.end = 0

    def check(self, producer_id: int, epoch: int, sequence: int, count: int) -> int | str | None:
        mine = [batch for batch in self.batches if batch[0] == producer_id]
        newest = max((batch[1] for batch in mine), default=-1)
        if epoch < newest:
            return "fenced"
        if epoch > newest:
            return None if sequence == 0 else "order"
        current = [batch for batch in mine if batch[1] == epoch]
        if sequence == (current[-1][2] + current[-1][3]) % WRAP:
            return None
        for batch in current[-WINDOW:]:
            if batch[2:4] == (sequence, count):
                return batch[4]
        return "order"

    def append(self, producer_id: int, epoch: int, sequence: int, count: int) -> int:
        self.batches.append((producer_id, epoch, sequence, count, self.end))
        self.end += count
        return self.end - count


def answer(producers: Producers, *batch: int) -> int | str | None:
    try:
        return producers.check(*batch)
    except FencedProducer:
        return "fenced"
    except OutOfOrderSequence:
        return "order"


def state(producers: Producers) -> bytes:
    return producers.dump()


@st.composite
def sends(draw: st.DrawFn) -> list[tuple[int, int, str, int, int]]:
    """(producer, epoch, how, back, count): resolved against what was sent before."""
    how = st.sampled_from(["next", "next", "next", "again", "other count", "gap", "zero"])
    one = st.tuples(
        st.integers(0, 2), st.integers(0, 2), how, st.integers(1, 8), st.sampled_from([1, 2, 7])
    )
    return draw(st.lists(one, max_size=60))


def resolve(naive: Naive, producer_id: int, epoch: int, how: str, back: int, count: int):
    mine = [batch for batch in naive.batches if batch[:2] == (producer_id, epoch)]
    due = (mine[-1][2] + mine[-1][3]) % WRAP if mine else 0
    if how == "again" and len(mine) >= back:
        return producer_id, epoch, mine[-back][2], mine[-back][3]
    if how == "other count" and len(mine) >= back:
        return producer_id, epoch, mine[-back][2], mine[-back][3] + 1
    if how == "gap":
        return producer_id, epoch, (due + back) % WRAP, count
    return producer_id, epoch, 0 if how == "zero" else due, count


@given(sends())
@settings(max_examples=300, deadline=None)
def test_answers_are_those_of_a_model_that_keeps_everything(
    plan: list[tuple[int, int, str, int, int]],
) -> None:
    naive, producers = Naive(), Producers()
    for step in plan:
        batch = resolve(naive, *step)
        expected = naive.check(*batch)
        assert answer(producers, *batch) == expected
        if expected is None:
            producers.note(*batch, naive.append(*batch))
            assert producers.end_offset == naive.end


@given(sends(), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_a_dump_in_between_changes_no_answer(
    plan: list[tuple[int, int, str, int, int]], at: int
) -> None:
    naive, producers = Naive(), Producers()
    for number, step in enumerate(plan):
        if number == at:
            producers = Producers.load(producers.dump())
        batch = resolve(naive, *step)
        expected = naive.check(*batch)
        assert answer(producers, *batch) == expected
        if expected is None:
            producers.note(*batch, naive.append(*batch), 5)
    assert state(Producers.load(state(producers))) == state(producers)


def test_sequences_wrap_after_two_to_the_thirty_second() -> None:
    producers = Producers()
    producers.note(1, 0, WRAP - 3, 2, 100)
    assert producers.check(1, 0, WRAP - 1, 4) is None
    producers.note(1, 0, WRAP - 1, 4, 102)
    assert producers.check(1, 0, 3, 1) is None
    assert producers.check(1, 0, WRAP - 1, 4) == 102
    assert producers.check(1, 0, WRAP - 3, 2) == 100
    with pytest.raises(OutOfOrderSequence, match="3 is due"):
        producers.check(1, 0, 4, 1)


def test_batches_without_a_producer_are_always_new() -> None:
    producers = Producers()
    producers.note(-1, 0, 0, 3, 0)
    assert producers.check(-1, 0, 0, 3) is None
    assert (len(producers), producers.end_offset) == (0, 3)


def test_errors_tell_programs_what_is_due() -> None:
    producers = Producers()
    producers.note(1, 4, 0, 3, 0)
    with pytest.raises(OutOfOrderSequence) as order:
        producers.check(1, 4, 5, 1)
    assert order.value.details == {"due": 3}
    with pytest.raises(FencedProducer) as fenced:
        producers.check(1, 3, 3, 1)
    assert fenced.value.details == {"epoch": 4}
    with pytest.raises(OutOfOrderSequence, match="0 is due"):
        producers.check(2, 0, 1, 1)


def test_idle_producers_go_and_record_times_long_past_do_not_age_them() -> None:
    producers = Producers()
    now = 100 * IDLE_MS_MAX
    producers.note(1, 0, 0, 1, 0, timestamp=5)
    assert producers.expire(now) == 0, "nobody had told the time when it wrote"
    producers.note(2, 0, 0, 1, 1, timestamp=5)
    assert producers.expire(now + IDLE_MS_MAX) == 0
    producers.note(2, 0, 1, 1, 2, timestamp=5)
    assert producers.expire(now + IDLE_MS_MAX + 1) == 1
    assert (1 in producers, 2 in producers) == (False, True)


def test_the_number_of_producers_is_bounded_and_the_longest_silent_goes() -> None:
    producers = Producers(producers_max=3)
    for name in (1, 2, 3):
        producers.note(name, 0, 0, 1, name)
    producers.note(1, 0, 1, 1, 4)
    producers.note(4, 0, 0, 1, 5)
    assert [name for name in range(6) if name in producers] == [1, 3, 4]


@pytest.mark.parametrize("at", range(0, 300, 7))
def test_a_flipped_bit_in_a_dump_is_noticed(at: int) -> None:
    producers = Producers()
    for name in range(3):
        for number in range(6):
            producers.note(name, 1, number, 1, 10 * number + name, 77)
    data = bytearray(producers.dump())
    data[at % len(data)] ^= 1 << at % 8
    with pytest.raises((CorruptFile, UnknownFormat)):
        Producers.load(bytes(data))
    for cut in (0, 3, 20, len(data) - 1):
        with pytest.raises(CorruptFile):
            Producers.load(producers.dump()[:cut])
    with pytest.raises(CorruptFile):
        Producers.load(producers.dump() + b"\0")


# With a log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    config = LogConfig(segment_bytes=4096, index_interval_bytes=256)
    log = Log.open(DISK, str(tmp_path / "data"), config, 0)
    yield log
    log.close()


def write(log: Log, producers: Producers | None, count: int, sequences: dict[int, int]) -> None:
    """Batches of three producers in turn, with some of nobody and some control batches between."""
    for number in range(count):
        name = number % 5
        if name == 4:
            log.append(encode_control(b"control"))
            continue
        if name == 3:
            log.append(encode([b"nobody's"]))
            continue
        size = 1 + number % 3
        sequence = sequences.get(name, 0)
        batch = encode([b"v" * 40] * size, producer=BatchProducer(name, 1, sequence))
        base = log.append(batch)
        sequences[name] = sequence + size
        if producers is not None:
            producers.note(name, 1, sequence, size, base, 0)


def rebuilt(log: Log, directory: str) -> Producers:
    producers = load_newest(DISK, directory, log.end_offset)
    rebuild(log, producers)
    return producers


def test_rebuild_from_the_log_equals_what_was_noted(log: Log, tmp_path: Path) -> None:
    noted = Producers()
    write(log, noted, 100, {})
    assert log.segment_count > 2
    noted.end_offset = log.end_offset
    assert state(rebuilt(log, str(tmp_path))) == state(noted)


@pytest.mark.parametrize("kept", [0, 10, 40, 60, 99])
def test_rebuild_after_truncation_equals_never_having_appended(
    log: Log, tmp_path: Path, kept: int
) -> None:
    producers, sequences = Producers(), dict[int, int]()
    ends, states = [0], [state(producers)]
    for number in range(100):
        write(log, producers, number % 5 + 1, sequences)
        producers.end_offset = log.end_offset
        ends.append(log.end_offset)
        states.append(state(producers))
        if number in (30, 50, 90):
            assert save(producers, DISK, str(tmp_path))
    log.truncate(ends[kept])
    assert state(rebuilt(log, str(tmp_path))) == states[kept]
    names = sorted(path.name for path in tmp_path.glob("*.snapshot"))
    assert all(int(name[10:30]) <= ends[kept] for name in names), "one beyond the end would lie"


def test_the_newest_two_snapshots_are_kept_and_a_damaged_one_passed_over(
    log: Log, tmp_path: Path
) -> None:
    producers, sequences = Producers(), dict[int, int]()
    for _ in range(4):
        write(log, producers, 20, sequences)
        producers.end_offset = log.end_offset
        save(producers, DISK, str(tmp_path))
    older, newest = sorted(tmp_path.glob("producers-*.snapshot"))
    assert load_newest(DISK, str(tmp_path), 1 << 40).end_offset == log.end_offset
    newest.write_bytes(newest.read_bytes()[:-1])
    found = load_newest(DISK, str(tmp_path), log.end_offset)
    assert 0 < found.end_offset < log.end_offset
    read = rebuild(log, found)
    assert state(found) == state(producers)
    assert read < log.size_bytes
    older.write_bytes(b"")
    assert load_newest(DISK, str(tmp_path), log.end_offset).end_offset == 0
    remove_above(DISK, str(tmp_path), -1)
    assert list(tmp_path.glob("producers-*")) == []


def test_rebuild_passes_over_damage(log: Log, tmp_path: Path) -> None:
    sequences: dict[int, int] = {}
    write(log, None, 60, sequences)
    segment = sorted((tmp_path / "data").glob("*.log"))[0]
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    producers = Producers()
    rebuild(log, producers)
    assert len(log.damaged) == 1
    for name, due in sequences.items():
        assert producers.check(name, 1, due, 1) is None


def test_a_snapshot_below_the_start_of_the_log_is_not_believed(log: Log, tmp_path: Path) -> None:
    producers = Producers()
    write(log, producers, 10, {})
    producers.end_offset = log.end_offset
    save(producers, DISK, str(tmp_path))
    log.reset(log.end_offset + 50)
    found = rebuilt(log, str(tmp_path))
    assert (len(found), found.end_offset) == (0, log.end_offset)


class FullFile(RealFile):
    """A file on a disk that takes no more bytes."""

    def append(self, buffers: Sequence[Buffer]) -> None:
        raise DiskFull(f"no space for {len(buffers)} buffers")


class FullDisk(RealDisk):
    def open(self, path: str, create: bool = False) -> File:
        return FullFile(os.open(path, os.O_RDWR | os.O_CREAT), path)


def test_a_full_disk_costs_the_snapshot_only(tmp_path: Path) -> None:
    assert save(Producers(), FullDisk(), str(tmp_path)) is False
    assert list(tmp_path.iterdir()) == []
