"""The log on a real disk: append, read, roll, look up, truncate, retain."""

import os
import random
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftq.client.common.disk import File, RealDisk, RealFile
from raftq.client.common.errors import (
    ConfigError,
    CorruptBatch,
    DirectoryReadOnly,
    DiskFull,
    OffsetOutOfRange,
    StorageFailed,
)
from raftq.client.wire.batch import LANE_COUNT, Batch, decode, encode, encode_one
from raftq.node.storage import segment as segment_module
from raftq.node.storage.config import LogConfig
from raftq.node.storage.index import LaneRuns
from raftq.node.storage.log import Log

SMALL = LogConfig(segment_bytes=4096, index_interval_bytes=256)


def open_log(path: Path, config: LogConfig = SMALL, disk: RealDisk | None = None) -> Log:
    return Log.open(disk or RealDisk(), str(path / "log"), config, 0)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = open_log(tmp_path)
    yield log
    log.close()


def fill(log: Log, count: int, size: int = 50) -> None:
    """Records that say their own offset, with timestamps 10 apart."""
    for offset in range(log.end_offset, log.end_offset + count):
        log.append(encode_one(b"%d" % offset + b" " * size, 1000 + 10 * offset))


def decoded(data: bytes) -> list[Batch]:
    batches, at = [], 0
    while at < len(data):
        batches.append(decode(data, at))
        at += batches[-1].length
    return batches


def check_whole(log: Log) -> None:
    """Every offset is found, from every side."""
    expected = log.start_offset
    for batch in log.batches(log.start_offset):
        assert batch.base_offset == expected
        expected = batch.end_offset
    assert expected == log.end_offset
    for offset in range(log.start_offset, log.end_offset):
        batch = log.batch_at(offset)
        assert batch.base_offset <= offset < batch.end_offset
        assert decode(log.read(offset, 1)).base_offset == batch.base_offset


def test_config_reports_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LogConfig(segment_bytes=1, segment_age_ms=0, index_interval_bytes=0, write_behind_bytes=1)
    for name in ("segment_bytes", "segment_age_ms", "index_interval_bytes", "write_behind_bytes"):
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match="page_cache_bytes"):
        LogConfig(page_cache_bytes=1)


def test_appends_get_consecutive_offsets_and_read_back(log: Log) -> None:
    assert log.append(encode_one(b"a", 1)) == 0
    assert log.append(encode([b"b", b"c"], timestamps=2)) == 1
    assert log.append_many([encode_one(b"d", 3), encode([b"e", b"f"])], epoch=1) == [3, 4]
    assert log.append_many([]) == []
    assert (log.start_offset, log.end_offset) == (0, 6)
    values = [value for batch in log.batches(0) for value in batch.values()]
    assert values == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert log.batch_at(2).base_offset == 1
    assert [batch.base_offset for batch in log.batches(2, 4)] == [1, 3]


def test_read_gives_whole_batches_within_the_limit_but_at_least_one(log: Log) -> None:
    fill(log, 200)
    size = len(encode_one(b"0" + b" " * 50, 0))
    assert log.segment_count > 3
    assert [batch.base_offset for batch in decoded(log.read(7, 1))] == [7]
    assert decoded(log.read(7, 2 * size))[0].base_offset == 7
    for bytes_max in (1, 300, 1000, 10_000):
        batches = decoded(log.read(5, bytes_max))
        assert [batch.base_offset for batch in batches] == list(range(5, 5 + len(batches)))
        assert len(batches) == 1 or sum(batch.length for batch in batches) <= bytes_max
    assert log.read(log.end_offset, 100) == b""


def test_offsets_outside_the_log_are_refused_with_the_range(log: Log) -> None:
    fill(log, 100)
    log.truncate_prefix(60)
    for offset in (-1, 59, 101):
        with pytest.raises(OffsetOutOfRange, match=r"\[60, 100\)"):
            log.read(offset, 1)
        with pytest.raises(OffsetOutOfRange, match=r"\[60, 100\)"):
            log.batch_at(offset)
    with pytest.raises(OffsetOutOfRange):
        log.batch_at(100)


def test_batch_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path, log: Log) -> None:
    fill(log, 3)
    log.append(encode([bytes(100_000)]))
    fill(log, 3)
    assert log.segment_count == 3
    check_whole(log)


def test_reopen_finds_everything_again(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 300)
    epochs, size, segments = log.epochs, log.size_bytes, log.segment_count
    log.close()
    log = open_log(tmp_path)
    assert (log.start_offset, log.end_offset, log.flushed_offset) == (0, 300, 300)
    assert (log.epochs, log.size_bytes, log.segment_count) == (epochs, size, segments)
    assert log.recovered.clean
    assert log.recovered.rebuilt_indexes == 0
    assert log.recovered.scanned_bytes < 4096 + 200
    check_whole(log)
    fill(log, 10)
    check_whole(log)
    log.close()


def test_closed_log_refuses_writes(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.close()
    with pytest.raises(StorageFailed, match="closed"):
        log.append(encode_one(b"", 0))


def test_time_lookup_is_exact_inside_batches_and_across_segments(log: Log) -> None:
    fill(log, 200)
    log.append(encode([b"x"] * 5, timestamps=[5000, 5010, 5020, 5030, 5040]))
    for timestamp, offset in ((0, 0), (1000, 0), (1001, 1), (2985, 199), (2991, 200), (5015, 202)):
        assert log.offset_for_time(timestamp) == offset
    assert log.offset_for_time(5041) == log.end_offset
    log.truncate_prefix(50)
    assert log.offset_for_time(0) == 50


def test_time_lookup_agrees_with_a_plain_search_when_times_jump_about(log: Log) -> None:
    rng = random.Random(5)
    times: list[int] = []
    for _ in range(150):
        stamps = [rng.randrange(1000) for _ in range(rng.randint(1, 4))]
        times += stamps
        log.append(encode([bytes(30)] * len(stamps), timestamps=stamps))
    for wanted in range(0, 1001, 7):
        found = next((at for at, time in enumerate(times) if time >= wanted), len(times))
        assert log.offset_for_time(wanted) == found


def test_lane_runs_agree_with_a_plain_list_in_memory_and_from_disk(tmp_path: Path) -> None:
    """
    1. Append batches of random lanes over many segments, more than indexes are kept.
    2. Walk every lane and count from every offset; compare with a list.
    3. The same after a reopen, and after the start moved.
    """
    rng = random.Random(3)
    log = open_log(tmp_path)
    lanes: list[int] = []
    for _ in range(500):
        lane, count = rng.choice([0, 1, 1, 2, 2, 4]), rng.randint(1, 3)
        log.append(encode([bytes(40)] * count, lane=lane))
        lanes += [lane] * count
    assert log.segment_count > segment_module.INDEXES_MAX + 3
    check_lanes(log, lanes)
    log.close()
    log = open_log(tmp_path)
    check_lanes(log, lanes)
    log.truncate_prefix(333)
    check_lanes(log, lanes)
    log.truncate(700)
    check_lanes(log, lanes[: log.end_offset])
    log.close()


def check_lanes(log: Log, lanes: list[int]) -> None:
    start = log.start_offset
    assert len(lanes) == log.end_offset
    for lane in range(LANE_COUNT):
        mine = [offset for offset in range(start, len(lanes)) if lanes[offset] == lane]
        found: list[int] = []
        offset = 0
        while (run := log.next_run(lane, offset)) is not None:
            assert offset <= run[0] < run[1]
            found += range(*run)
            offset = run[1]
        assert found == mine
        for offset in range(0, len(lanes) + 2, 13):
            assert log.count_from(lane, offset) == sum(at >= offset for at in mine)


def test_lane_runs_cut_back_to_any_offset() -> None:
    for cut in range(25):
        runs = LaneRuns(array("q", [2, 9, 15]), array("q", [6, 10, 21]))
        runs.cut(cut)
        kept = [at for at in (*range(2, 6), *range(9, 10), *range(15, 21)) if at < cut]
        assert runs.total == len(kept) == runs.count_from(0)
        assert [at for pair in zip(runs.starts, runs.ends, strict=True) for at in range(*pair)] == (
            kept
        )


def test_truncate_drops_a_straddling_batch_and_is_durable(tmp_path: Path) -> None:
    for cut in range(0, 61, 3):
        path = tmp_path / str(cut)
        log = open_log(path)
        for number in range(20):
            log.append(
                encode([b"%d" % number + bytes(150)] * 3, lane=number % 3), epoch=number // 7
            )
        log.truncate(cut + 1)
        end = min(cut, 60)
        assert (log.end_offset, log.flushed_offset) == (end, end)
        check_whole(log)
        assert sum(log.count_from(lane, 0) for lane in range(LANE_COUNT)) == end
        assert all(start < end for _, start in log.epochs)
        log.close(clean=False)
        log = open_log(path)
        assert (log.end_offset, log.damaged) == (end, [])
        assert log.append(encode_one(b"next", 5), epoch=9) == end
        check_whole(log)
        log.close()


def test_truncate_to_the_end_changes_nothing_and_below_the_start_is_refused(log: Log) -> None:
    fill(log, 100)
    log.truncate(100)
    log.truncate(1000)
    assert log.end_offset == 100
    log.truncate_prefix(70)
    with pytest.raises(OffsetOutOfRange):
        log.truncate(69)


def test_sync_begun_before_a_truncation_does_not_vouch_for_what_replaced_it(log: Log) -> None:
    fill(log, 10)
    ticket = log.begin_sync()
    log.truncate(5)
    fill(log, 5)
    ticket.run()
    assert (log.flushed_offset, log.end_offset) == (5, 10)


def test_prefix_truncation_keeps_the_start_inside_a_segment(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill(log, 200)
    segments = log.segment_count
    freed = log.truncate_prefix(101)
    assert freed > 0
    assert log.segment_count < segments
    assert log.truncate_prefix(5) == 0
    log.close(clean=False)
    log = open_log(tmp_path)
    assert (log.start_offset, log.end_offset) == (101, 200)
    assert log.batch_at(101).values()[0].startswith(b"101")
    with pytest.raises(OffsetOutOfRange):
        log.truncate_prefix(201)
    log.truncate_prefix(200)
    assert list(log.batches(200)) == []
    log.close()


def test_epochs_are_kept_across_segments_truncation_and_reopen(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for number in range(100):
        log.append(encode_one(bytes(100), 0), epoch=number // 30)
    assert log.epochs == [(0, 0), (1, 30), (2, 60), (3, 90)]
    log.close()
    log = open_log(tmp_path)
    assert log.epochs == [(0, 0), (1, 30), (2, 60), (3, 90)]
    log.truncate(70)
    assert log.epochs == [(0, 0), (1, 30), (2, 60)]
    log.truncate_prefix(45)
    assert log.epochs == [(1, 45), (2, 60)]
    with pytest.raises(AssertionError, match="epoch 1 after 2"):
        log.append(encode_one(b"", 0), epoch=1)
    log.close()


def test_retention_by_age_by_size_and_never_above_the_floor(log: Log) -> None:
    fill(log, 300)
    segment_bytes, newest = 4096, 1000 + 10 * 299
    assert log.retain(newest, age_ms=10_000) == 0
    assert log.retain(newest, age_ms=1, below=0) == 0
    before = log.size_bytes
    freed = log.retain(newest, age_ms=2000)
    assert freed == before - log.size_bytes > 0
    first = log.batch_at(log.start_offset)
    assert newest - first.max_timestamp < 2000 + 10 * 60
    log.retain(newest, bytes_max=2 * segment_bytes)
    assert segment_bytes < log.size_bytes <= 2 * segment_bytes
    log.retain(newest, bytes_max=0, below=log.end_offset)
    assert log.segment_count == 1
    check_whole(log)


def test_retention_seals_an_old_active_segment(tmp_path: Path) -> None:
    log = open_log(tmp_path, LogConfig(segment_age_ms=1000))
    log.append(encode_one(b"", 5000))
    log.retain(5999)
    assert log.segment_count == 1
    log.retain(6000)
    assert log.segment_count == 2
    assert log.retain(6000, age_ms=1000) > 0
    assert (log.start_offset, log.end_offset) == (1, 1)
    log.close()


class FlakyDisk(RealDisk):
    """A disk whose files run full, fail or count their syncs."""

    def __init__(self) -> None:
        self.full = False
        self.fail_sync = False
        self.read_only = False
        self.syncs = 0

    def open(self, path: str, create: bool = False) -> File:
        if self.read_only and create:
            raise DirectoryReadOnly(f"cannot open {path}: Read-only file system")
        return FlakyFile(self, os.open(path, os.O_RDWR | (os.O_CREAT if create else 0)), path)


class FlakyFile(RealFile):
    __slots__ = ("_disk",)

    def __init__(self, disk: FlakyDisk, fd: int, path: str) -> None:
        super().__init__(fd, path)
        self._disk = disk

    def append(self, buffers: object) -> None:
        if self._disk.full:
            raise DiskFull("no space left")
        super().append(buffers)  # type: ignore[arg-type]

    def sync(self) -> None:
        self._disk.syncs += 1
        if self._disk.fail_sync:
            raise StorageFailed("the disk does not answer")
        super().sync()


def test_full_disk_refuses_appends_keeps_reads_and_recovers(tmp_path: Path) -> None:
    disk = FlakyDisk()
    log = open_log(tmp_path, disk=disk)
    fill(log, 50)
    disk.full = True
    for _ in range(2):
        with pytest.raises(DiskFull):
            log.append(encode_one(b"refused", 0))
        with pytest.raises(DiskFull):
            log.append_many([encode_one(b"refused", 0)] * 2)
        log.roll()  # without its index, which can be made later: so what is settled can be dropped
    assert log.end_offset == 50
    check_whole(log)
    disk.full = False
    fill(log, 100)
    check_whole(log)
    log.close()
    assert open_log(tmp_path).end_offset == 150


def test_failed_sync_makes_the_log_refuse_writes_until_it_is_reopened(tmp_path: Path) -> None:
    disk = FlakyDisk()
    log = open_log(tmp_path, disk=disk)
    fill(log, 5)
    disk.fail_sync = True
    with pytest.raises(StorageFailed):
        log.sync()
    disk.fail_sync = False
    assert log.flushed_offset == 0
    for write in (
        lambda: log.append(encode_one(b"", 0)),
        lambda: log.append_many([encode_one(b"", 0)]),
        log.sync,
        log.roll,
        lambda: log.truncate(2),
        lambda: log.truncate_prefix(2),
        lambda: log.retain(0),
    ):
        with pytest.raises(StorageFailed, match="until it is opened again"):
            write()
    check_whole(log)
    log.close()
    log = open_log(tmp_path, disk=disk)
    assert log.recovered.rewritten_bytes == log.size_bytes
    assert log.flushed_offset == 5
    log.close()


def test_read_only_directory_is_refused_by_name(tmp_path: Path) -> None:
    disk = FlakyDisk()
    disk.read_only = True
    with pytest.raises(DirectoryReadOnly, match="log"):
        open_log(tmp_path, disk=disk)


def test_mistake_14_index_under_concurrent_appends_hides_nothing(tmp_path: Path) -> None:
    """
    1. Several producers append under the owner's lock while another thread syncs all the time.
    2. Every acknowledged offset is found with its own record, before and after a reopen.
    """
    log = open_log(tmp_path)
    lock, done = threading.Lock(), threading.Event()
    acknowledged: dict[int, bytes] = {}

    def produce(name: int) -> None:
        for number in range(125):
            value = b"%d/%d" % (name, number)
            with lock:
                offset = log.append(encode_one(value, number, lane=name % LANE_COUNT))
            acknowledged[offset] = value

    def sync() -> None:
        while not done.is_set():
            log.begin_sync().run()

    producers = [threading.Thread(target=produce, args=(name,)) for name in range(8)]
    syncer = threading.Thread(target=sync)
    for thread in (*producers, syncer):
        thread.start()
    for thread in producers:
        thread.join()
    done.set()
    syncer.join()
    assert sorted(acknowledged) == list(range(1000))
    for _ in range(2):
        for offset, value in acknowledged.items():
            assert log.batch_at(offset).values() == [value]
        assert sum(log.count_from(lane, 0) for lane in range(LANE_COUNT)) == 1000
        log.close()
        log = open_log(tmp_path)
    log.close()


def test_reads_reach_over_more_segments_than_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_module, "FILES_MAX", 3)
    log = open_log(tmp_path)
    fill(log, 600)
    assert log.segment_count > 10
    check_whole(log)
    log.close()


def test_page_cache_hints_follow_the_head(tmp_path: Path) -> None:
    config = LogConfig(segment_bytes=1 << 20, write_behind_bytes=1 << 16, page_cache_bytes=1 << 18)
    dropped: list[tuple[int, int]] = []
    started: list[tuple[int, int]] = []

    class Watched(RealFile):
        __slots__ = ()

        def write_behind(self, start: int, end: int) -> None:
            started.append((start, end))

        def drop_cache(self, start: int, end: int) -> None:
            dropped.append((start, end))

    class WatchedDisk(RealDisk):
        def open(self, path: str, create: bool = False) -> File:
            return Watched(os.open(path, os.O_RDWR | (os.O_CREAT if create else 0)), path)

    log = open_log(tmp_path, config, WatchedDisk())
    for _ in range(300):
        log.append(encode([bytes(10_000)]))
    total = log.size_bytes
    log.close()
    written = sum(end - start for start, end in started)
    kept = total - sum(end - start for start, end in dropped)
    assert total * 0.8 < written <= total
    assert kept <= (1 << 18) + 2 * (1 << 16)


def test_batches_of_a_damaged_log_can_be_skipped(tmp_path: Path, log: Log) -> None:
    fill(log, 200)
    segment = log.segments.items[1]
    victim = segment.base_offset + 5
    position = log._reader.find(victim)[2]
    with open(segment.path, "r+b") as file:
        file.seek(position + 100)
        file.write(b"\xff")
    with pytest.raises(CorruptBatch):
        list(log.batches(0))
    assert [(one.start, one.end) for one in log.damaged] == [(victim, victim + 1)]
    found = [batch.base_offset for batch in log.batches(0, skip_damaged=True)]
    assert found == [offset for offset in range(200) if offset != victim]
    assert log.next_readable(victim) == victim + 1
    assert log.next_readable(3) == 3
    for read in (log.batch_at, lambda offset: log.read(offset, 1)):
        with pytest.raises(CorruptBatch, match="damaged"):
            read(victim)
    assert log.batch_at(victim + 1).base_offset == victim + 1
    assert decoded(log.read(victim - 1, 1000))[-1].base_offset == victim - 1
