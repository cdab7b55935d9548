"""What a replica asks of its log: stamped appends, epochs, reset, repair, and syncs on the loop."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raftq.client.common.disk import RealDisk
from raftq.client.common.errors import (
    CorruptBatch,
    DiskFull,
    InvalidArgument,
    RaftqError,
    StorageFailed,
    UnknownFormat,
)
from raftq.client.wire.batch import Batch, BatchProducer, encode, encode_one, stamp
from raftq.node.storage.compaction import compact_by_key
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log
from raftq.node.storage.syncer import LoopSyncer

SMALL = LogConfig(segment_bytes=4096, index_interval_bytes=256)
Open = Callable[..., Log]


@pytest.fixture
def open_log(tmp_path: Path) -> Iterator[Open]:
    opened: list[Log] = []

    def open_(name: str = "follower", config: LogConfig = SMALL) -> Log:
        log = Log.open(RealDisk(), str(tmp_path / name), config, 0)
        opened.append(log)
        return log

    yield open_
    for log in opened:
        log.close()


def lead(log: Log, count: int, seed: int = 0) -> Log:
    """A leader's log: batches of all lanes, codecs and sizes, in rising epochs."""
    rng = random.Random(seed)
    epoch = max(log.last_epoch, 0)
    for number in range(count):
        epoch += rng.random() < 0.1
        values = [rng.randbytes(rng.choice([0, 10, 200])) for _ in range(rng.choice([1, 1, 5]))]
        batch = encode(
            values,
            [rng.choice([b"a", b"b", b"c"]) for _ in values],
            timestamps=1000 + 10 * number,
            lane=rng.randrange(5),
            codec=rng.choice([0, 1]),
            producer=BatchProducer(rng.randrange(3), 0, number),
        )
        log.append(batch, epoch)
    return log


def copy(leader: Log, follower: Log, bytes_max: int = 1000) -> list[tuple[int, ...]]:
    facts = []
    while follower.end_offset < leader.end_offset:
        facts += follower.append_stamped(leader.read(follower.end_offset, bytes_max))
    return facts


def content(log: Log) -> bytes:
    offset, parts = log.start_offset, []
    while offset < log.end_offset:
        parts.append(data := log.read(offset, 1 << 20))
        at = 0
        while at < len(data):
            batch = Batch(data, at)
            at += batch.length
        offset = batch.end_offset
    return b"".join(parts)


def everything(log: Log) -> tuple[object, ...]:
    """What a log answers, apart from where its segments begin."""
    lanes = [[log.count_from(lane, 0), log.next_run(lane, 5)] for lane in range(5)]
    times = [log.offset_for_time(time) for time in range(1000, 3000, 170)]
    bounds = (log.start_offset, log.end_offset, log.epochs, log.last_epoch)
    return bounds, lanes, times, content(log)


@pytest.mark.parametrize("bytes_max", [1, 700, 100_000])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_copied_log_answers_like_the_leaders(open_log: Open, bytes_max: int, kind: type) -> None:
    leader, follower = lead(open_log("leader"), 200), open_log()
    facts = []
    while follower.end_offset < leader.end_offset:
        facts += follower.append_stamped(kind(leader.read(follower.end_offset, bytes_max)))
    assert everything(follower) == everything(leader)
    batches = list(leader.batches(0))
    assert facts == [
        (
            *(batch.producer_id, batch.producer_epoch, batch.base_sequence),
            *(batch.span, batch.base_offset, batch.max_timestamp),
        )
        for batch in batches
    ]
    follower.close()
    assert everything(open_log()) == everything(leader)


def test_a_large_piece_is_spread_over_segments(open_log: Open) -> None:
    leader = lead(open_log("leader", LogConfig(segment_bytes=1 << 20)), 300)
    follower = open_log()
    assert len(follower.append_stamped(content(leader))) == 300
    assert follower.segment_count > 5
    assert everything(follower) == everything(leader)
    for segment in follower.segments.items[:-1]:
        assert segment.facts.size <= SMALL.segment_bytes


def test_batches_with_gaps_of_a_compacted_leader_are_taken(open_log: Open) -> None:
    leader = lead(open_log("leader"), 100)
    leader.roll()
    assert compact_by_key(leader, now_ms=10**9) > 0
    follower = open_log()
    facts = copy(leader, follower)
    assert content(follower) == content(leader)
    assert follower.epochs == leader.epochs
    assert sum(fact[3] for fact in facts) == leader.end_offset, "spans cover every offset"
    runs = [(log.count_from(2, 0), log.next_run(2, 9)) for log in (leader, follower)]
    follower.close()
    again = open_log()
    assert (again.count_from(2, 0), again.next_run(2, 9)) == runs[1]


def refuse(log: Log, raw: bytes | bytearray, match: str, error: type = CorruptBatch) -> None:
    before = log.end_offset, log.size_bytes, log.epochs
    with pytest.raises(error, match=match):
        log.append_stamped(raw)
    assert (log.end_offset, log.size_bytes, log.epochs) == before
    assert log.failure is None


def test_nothing_of_a_piece_with_one_bad_batch_is_written(open_log: Open) -> None:
    leader = lead(open_log("leader", LogConfig()), 20)
    follower = open_log()
    raw = content(leader)
    follower.append_stamped(leader.read(0, 1))
    start = leader.batch_at(0).length
    for bit in random.Random(1).sample(range(8 * start, 8 * len(raw)), 200):
        bad = bytearray(raw[start:])
        bad[bit // 8 - start] ^= 1 << bit % 8
        before = follower.end_offset, follower.size_bytes
        with pytest.raises((CorruptBatch, UnknownFormat)):
            follower.append_stamped(bad)
        assert (follower.end_offset, follower.size_bytes) == before
    refuse(follower, raw, f"offset 0 arrived where {follower.end_offset} is due")
    refuse(follower, raw[start:-1], "cut|no batch|bytes left")
    refuse(follower, raw[start:] + b"x", "bytes left")
    follower.append_stamped(raw[start:])
    assert everything(follower) == everything(leader)
    assert follower.append_stamped(b"") == []


def test_epochs_never_go_back_not_even_after_a_roll(open_log: Open) -> None:
    log = open_log()
    log.append(encode_one(b"a", 0), 4)
    log.roll()
    assert (log.last_epoch, log.epochs) == (4, [(4, 0)])
    batch = encode_one(b"b", 0)
    stamp(batch, 1, 3)
    refuse(log, batch, "epoch 3, the log is at 4")
    with pytest.raises(AssertionError, match="epoch 3 after 4"):
        log.append(encode_one(b"c", 0), 3)


def test_a_newer_version_is_not_taken_for_damage(open_log: Open) -> None:
    batch = encode_one(b"b", 0)
    batch[2] = 9
    stamp(batch, 0, 0)
    refuse(open_log(), batch, "newer version", UnknownFormat)


def test_a_disk_that_fills_up_at_a_roll_keeps_the_part_before(
    open_log: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = lead(open_log("leader", LogConfig()), 100)
    follower = open_log()

    def no_room(*_: object, **__: object) -> None:
        raise DiskFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(type(follower.segments), "create", no_room)
        facts = follower.append_stamped(content(leader))
        assert 0 < len(facts) < 100
        assert follower.end_offset == facts[-1][4] + facts[-1][3]
        with pytest.raises(DiskFull):
            copy(leader, follower)
    copy(leader, follower)
    assert everything(follower) == everything(leader)


# Epochs


def test_epochs_follow_truncation_retention_reset_and_reopen(open_log: Open) -> None:
    log = open_log()
    for epoch, count in ((1, 30), (2, 30), (5, 30)):
        for _ in range(count):
            log.append(encode_one(b"x" * 60, 1000), epoch)
    assert log.epochs == [(1, 0), (2, 30), (5, 60)]
    assert log.epoch_pairs(2) == [(2, 30), (5, 60)]
    assert log.epoch_pairs(9) == log.epochs
    assert log.epoch_pairs(0) == []
    assert log.epochs is log.epochs, "asked for often, so not put together every time"
    log.truncate(70)
    assert (log.last_epoch, log.epochs[-1]) == (5, (5, 60))
    log.truncate(60)
    assert (log.last_epoch, log.epochs) == (2, [(1, 0), (2, 30)])
    log.truncate_prefix(40)
    assert log.epochs == [(2, 40)]
    log.truncate_prefix(60)
    assert (log.last_epoch, log.epochs) == (2, [])
    log.append(encode_one(b"x", 0), 2)
    assert log.epochs == [(2, 60)]
    log.append(encode_one(b"x", 0), 3)
    log.close()
    log = open_log()
    assert (log.last_epoch, log.epochs) == (3, [(2, 60), (3, 61)])
    log.reset(10)
    assert (log.last_epoch, log.epochs) == (-1, [])
    log.append(encode_one(b"x", 0), 1)
    assert log.epochs == [(1, 10)]


# Reset


@pytest.mark.parametrize("start", [0, 7, 150, 100_000])
@pytest.mark.parametrize("trimmed", [0, 50])
def test_reset_leaves_an_empty_log_that_goes_on_at_the_new_start(
    open_log: Open, tmp_path: Path, start: int, trimmed: int
) -> None:
    log = lead(open_log(), 100)
    log.truncate_prefix(trimmed)
    ticket = log.begin_sync()
    log.reset(start)
    ticket.run()
    assert (log.start_offset, log.end_offset, log.flushed_offset) == (start, start, start)
    assert (log.size_bytes, log.segment_count, log.read(start, 100)) == (0, 1, b"")
    assert [path.name for path in (tmp_path / "follower").glob("*.log")] == [f"{start:020d}.log"]
    lead(log, 50, seed=1)
    after = everything(log)
    log.close()
    assert everything(open_log()) == after
    assert log.start_offset == start


def test_a_reset_that_fails_leaves_a_log_that_refuses_writes_and_can_be_opened(
    open_log: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = lead(open_log(), 20)

    def no_room(*_: object) -> None:
        raise DiskFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(type(log.segments), "create", no_room)
        with pytest.raises(DiskFull):
            log.reset(500)
    assert (log.start_offset, log.end_offset, log.size_bytes) == (500, 500, 0)
    assert log.read(500, 10) == b""
    with pytest.raises(StorageFailed):
        log.append(encode_one(b"x", 0))
    log.close()
    assert open_log().append(encode_one(b"x", 0)) == 500


# Repair


def damage(path: Path, position: int, length: int = 1) -> bytes:
    data = bytearray(path.read_bytes())
    old = bytes(data[position : position + length])
    data[position : position + length] = bytes(byte ^ 0xFF for byte in old)
    path.write_bytes(data)
    return old


def segment_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "follower").glob("*.log"))


def find_damage(log: Log) -> None:
    assert len(list(log.batches(log.start_offset, skip_damaged=True))) > 0


@pytest.mark.parametrize("place", ["sealed", "active"])
@pytest.mark.parametrize("part", ["header", "body"])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_damaged_batch_is_repaired_from_another_replica(
    open_log: Open, tmp_path: Path, place: str, part: str, reopened: bool
) -> None:
    leader, follower = lead(open_log("leader"), 100), open_log()
    copy(leader, follower)
    good = everything(follower)
    number = 1 if place == "sealed" else -1
    victim = follower.segments.items[number]
    base = (
        victim.base_offset
        if place == "sealed"
        else follower.batch_at(follower.segments.items[-1].base_offset).end_offset
    )
    batch = follower.batch_at(base)
    position = follower._reader.find(base)[2]
    damage(segment_files(tmp_path)[number], position + (8 if part == "header" else 90))
    if reopened:
        follower.close()
        for index in (tmp_path / "follower").glob("*.index"):
            index.unlink()
        follower = open_log()
    find_damage(follower)
    (found,) = follower.damaged
    assert (found.start, found.end) == (base, batch.end_offset)
    follower.repair(base, leader.read(base, 1))
    assert follower.damaged == []
    assert everything(follower) == good
    follower.append(encode_one(b"more", 5000), 99)
    follower.close()
    follower = open_log()
    assert follower.damaged == []
    assert content(follower)[: len(good[3])] == good[3]


def test_several_damaged_batches_in_a_row_are_repaired_at_once(
    open_log: Open, tmp_path: Path
) -> None:
    leader, follower = lead(open_log("leader"), 100), open_log()
    copy(leader, follower)
    good = everything(follower)
    damage(segment_files(tmp_path)[0], 0, 700)
    find_damage(follower)
    (found,) = follower.damaged
    assert found.start == 0
    raw = content(leader)[: found.end_position]
    follower.repair(found.end - 1, raw)
    assert everything(follower) == good


@pytest.mark.parametrize("left", [1, 87, 200, -1])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_sealed_segment_that_lost_its_end_gets_it_back(
    open_log: Open, tmp_path: Path, left: int, reopened: bool
) -> None:
    """`left` bytes of it are left, or all but so many."""
    leader, follower = lead(open_log("leader"), 100), open_log()
    copy(leader, follower)
    good = everything(follower)
    victim = segment_files(tmp_path)[1]
    if reopened:
        follower.close()
    os.truncate(victim, left if left > 0 else victim.stat().st_size + left)
    if reopened:
        follower = open_log()
    find_damage(follower)
    (found,) = follower.damaged
    parts, offset = [], found.start
    while offset < found.end:
        batch = leader.batch_at(offset)
        parts.append(leader.read(offset, 1))
        offset = batch.end_offset
    with pytest.raises(CorruptBatch):
        follower.repair(found.start, b"".join(parts)[:-1])
    follower.repair(found.start, b"".join(parts))
    assert follower.damaged == []
    assert everything(follower) == good
    follower.close()
    assert everything(open_log()) == good


def test_repair_refuses_what_does_not_fit(open_log: Open, tmp_path: Path) -> None:
    leader, follower = lead(open_log("leader"), 100), open_log()
    copy(leader, follower)
    raw = leader.read(0, 1)
    with pytest.raises(InvalidArgument, match="not known to be damaged"):
        follower.repair(0, raw)
    damage(segment_files(tmp_path)[0], 90)
    find_damage(follower)
    second = leader.batch_at(leader.batch_at(0).end_offset)
    bad = bytearray(raw)
    bad[95] ^= 1
    later = bytearray(raw)
    stamp(later, 0, 1000)
    for wrong in (raw + b"x", raw[:-1], leader.read(second.base_offset, 1), bad, later):
        with pytest.raises(CorruptBatch):
            follower.repair(0, wrong)
    assert len(follower.damaged) == 1
    follower.repair(0, raw)
    assert follower.damaged == []


def batches_between(log: Log, start: int, end: int) -> list[bytes]:
    parts = []
    while start < end:
        parts.append(log.read(start, 1))
        start = log.batch_at(start).end_offset
    return parts


def lose_files(files: list[Path], how: str) -> None:
    """Take bytes from a stopped follower so that no damaged ones are left in their place."""
    if how == "first file":
        files[0].unlink()
    elif how == "middle file":
        files[1].unlink()
    elif how == "two files":
        files[1].unlink()
        files[2].unlink()
    elif how == "last file":
        files[-1].unlink()
    elif how == "all files":
        for file in files:
            file.unlink()
    elif how == "emptied":
        os.truncate(files[1], 0)
    elif how == "emptied first":
        os.truncate(files[0], 0)
    elif how == "cut between batches":
        os.truncate(files[1], Batch(files[1].read_bytes()).length)
    else:
        raise AssertionError(how)


@pytest.mark.parametrize(
    "how",
    [
        "first file",
        "middle file",
        "two files",
        "last file",
        "all files",
        "emptied",
        "emptied first",
        "cut between batches",
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_offsets_that_no_file_holds_are_filled_from_another_replica(
    open_log: Open, tmp_path: Path, how: str, at_once: bool
) -> None:
    leader, follower = lead(open_log("leader"), 100), open_log()
    copy(leader, follower)
    good = everything(follower)
    follower.close()
    lose_files(segment_files(tmp_path), how)
    follower = open_log()
    (gap,) = follower.damaged
    parts = batches_between(leader, gap.start, gap.end)
    assert len(parts) > 1
    if at_once:
        follower.repair(gap.start, b"".join(parts))
    else:
        for part in parts:
            start = follower.damaged[0].start
            with pytest.raises(CorruptBatch):
                follower.read(start, 1)
            follower.repair(start, part)
            assert follower.read(start, 1) == part
    assert follower.damaged == []
    counts = [follower.count_from(lane, 0) for lane in range(5)]
    assert counts == [leader.count_from(lane, 0) for lane in range(5)]
    assert [*everything(follower)[::2], content(follower)] == [*good[::2], good[3]]
    follower.append(encode_one(b"more", 5000), 99)
    follower.close()
    follower = open_log()
    assert follower.damaged == []
    assert content(follower)[: len(good[3])] == good[3]


def test_a_gap_at_the_start_of_a_log_is_filled_from_within_a_batch(
    open_log: Open, tmp_path: Path
) -> None:
    leader, follower = open_log("leader"), open_log()
    for number in range(60):
        leader.append(encode([b"x" * 50] * 5, timestamps=number), 1)
    copy(leader, follower)
    second = follower.segments.bases[1]
    start = second + 2
    assert follower.batch_at(start).base_offset < start
    leader.truncate_prefix(start)
    follower.truncate_prefix(start)
    good = everything(leader)
    follower.close()
    segment_files(tmp_path)[0].unlink()
    follower = open_log()
    (gap,) = follower.damaged
    assert (gap.start, follower.start_offset) == (start, start)
    follower.repair(start, b"".join(batches_between(leader, start, gap.end)))
    assert (follower.damaged, everything(follower)) == ([], good)
    follower.close()
    follower = open_log()
    assert (follower.damaged, everything(follower)) == ([], good)


def test_a_gap_is_filled_only_with_what_fits(open_log: Open, tmp_path: Path) -> None:
    leader, follower = lead(open_log("leader"), 100), open_log()
    copy(leader, follower)
    follower.close()
    segment_files(tmp_path)[1].unlink()
    follower = open_log()
    (gap,) = follower.damaged
    parts = batches_between(leader, gap.start, leader.end_offset)
    raw = b"".join(batches_between(leader, gap.start, gap.end))
    bad = bytearray(raw)
    bad[95] ^= 1
    later = bytearray(parts[0])
    stamp(later, gap.start, 1000)
    before = leader.read(gap.start - 1, 1)
    for wrong in (b"", raw[:-1], raw + b"x", parts[1], before, bad, later, b"".join(parts)):
        with pytest.raises(CorruptBatch):
            follower.repair(gap.start, wrong)
        assert follower.damaged == [gap]
    follower.repair(gap.start, raw)
    assert follower.damaged == []


# Syncs on the loop


def test_loop_syncer_syncs_once_for_all_who_wait(open_log: Open) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        log, other = open_log("a"), open_log("b")
        syncer = LoopSyncer(loop, delay_s=0.001)
        syncer.add(log)
        syncer.add(other)
        answers: list[RaftqError | None] = []
        done = asyncio.Event()

        def called(error: RaftqError | None) -> None:
            answers.append(error)
            if len(answers) == 3:
                done.set()

        syncer.submit([(log, 0)], called)
        assert answers == [None], "nothing to do"
        log.append(encode_one(b"x", 0))
        other.append(encode_one(b"x", 0))
        syncer.submit([(log, 1)], called)
        syncer.submit([(log, 1), (other, 1)], called)
        assert log.flushed_offset == 0
        await asyncio.wait_for(done.wait(), 5)
        assert answers == [None, None, None]
        assert (log.flushed_offset, other.flushed_offset, syncer.rounds) == (1, 1, 1)
        syncer.close()

    asyncio.run(run())


def test_loop_syncer_reports_what_it_cannot_sync(open_log: Open) -> None:
    async def run() -> None:
        log = open_log("a")
        syncer = LoopSyncer(asyncio.get_running_loop())
        answers: list[RaftqError | None] = []
        syncer.add(log)
        syncer.remove(log)
        log.append(encode_one(b"x", 0))
        syncer.submit([(log, 1)], answers.append)
        syncer.close()
        syncer.submit([(log, 1)], answers.append)
        assert [type(error) for error in answers] == [StorageFailed, StorageFailed]

    asyncio.run(run())


def test_loop_syncer_with_an_interval_needs_no_request(open_log: Open) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        log = open_log("a")
        synced = asyncio.Event()

        class Watching(LoopSyncer):
            def _sync(self, logs: list[Log]) -> None:
                super()._sync(logs)
                if log.flushed_offset == 1:
                    synced.set()

        syncer = Watching(loop, interval_s=0.001)
        syncer.add(log)
        log.append(encode_one(b"x", 0))
        await asyncio.wait_for(synced.wait(), 5)
        syncer.close()

    asyncio.run(run())
