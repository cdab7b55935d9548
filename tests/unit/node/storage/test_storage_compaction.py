"""Compaction keeps offsets, epochs, order and lanes; scrub finds rot in sealed segments."""

import random
from pathlib import Path

import pytest

from raftq.client.common.disk import RealDisk
from raftq.client.common.errors import CorruptBatch
from raftq.client.wire.batch import LANE_COUNT, Batch, BatchProducer, encode, encode_one
from raftq.node.storage.compaction import compact, compact_by_key, compaction_steps
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log

SMALL = LogConfig(segment_bytes=4096, index_interval_bytes=256)
Row = tuple[int, int, bytes | None, bytes, dict[str, bytes]]


def open_log(path: Path) -> Log:
    return Log.open(RealDisk(), str(path), SMALL, 0)


def rows(log: Log) -> dict[int, Row]:
    return {row[0]: row for batch in log.batches(log.start_offset) for row in batch.tuples()}


def every_offset_has_a_batch(log: Log) -> None:
    expected = log.start_offset
    for batch in log.batches(log.start_offset):
        assert batch.base_offset <= expected
        expected = batch.end_offset
    assert expected == log.end_offset
    for offset in range(log.start_offset, log.end_offset):
        batch = log.batch_at(offset)
        assert batch.base_offset <= offset < batch.end_offset


def fill_keyed(log: Log, rng: random.Random, batches: int, keys: int) -> None:
    for number in range(batches):
        count = rng.randint(1, 6)
        names = [rng.choice([None, *(b"k%d" % key for key in range(keys))]) for _ in range(count)]
        log.append(
            encode(
                [rng.randbytes(30) for _ in range(count)],
                names,
                [{"n": b"%d" % number} for _ in range(count)] if number % 3 else None,
                timestamps=[number * 10 + at for at in range(count)],
                lane=number % LANE_COUNT,
                codec=number % 3,
            ),
            epoch=number // 40,
        )


def test_mistake_12_compaction_keeps_every_offset(tmp_path: Path) -> None:
    """
    1. A log of many segments with few keys, several epochs, lanes and codecs.
    2. Compact: the last record of each key and all without key are there, byte for byte, at their
       old offsets; every offset still belongs to a batch; epochs and order are as before.
    3. The same after a reopen, with indexes and without, and after a second compaction.
    """
    log = open_log(tmp_path)
    fill_keyed(log, random.Random(1), 200, keys=5)
    before, epochs, end = rows(log), log.epochs, log.end_offset
    lanes = {batch.base_offset: batch.lane for batch in log.batches(0)}
    latest = {row[2]: offset for offset, row in before.items() if row[2] is not None}
    sealed = log.segments.active.base_offset
    wanted = {
        offset: row
        for offset, row in before.items()
        if row[2] is None or latest[row[2]] == offset or offset >= sealed
    }
    size = log.size_bytes
    freed = compact_by_key(log, 10_000)
    assert freed == size - log.size_bytes > size // 3
    for attempt in range(4):
        assert rows(log) == wanted
        assert (log.end_offset, log.epochs, log.damaged) == (end, epochs, [])
        every_offset_has_a_batch(log)
        counted = sum(log.count_from(lane, 0) for lane in range(LANE_COUNT))
        assert counted == len(wanted)
        for offset in wanted:
            lane = lanes[max(base for base in lanes if base <= offset)]
            assert log.next_run(lane, offset) is not None
            run = log.next_run(lane, offset)
            assert run is not None
            assert run[0] == offset
        if attempt == 2:
            assert compact_by_key(log, 10_000) == 0
        log.close()
        if attempt == 1:
            for index in tmp_path.glob("*.index"):
                index.unlink()
        log = open_log(tmp_path)
    log.close()


def test_compacted_batches_keep_every_column(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    columns = {
        "timestamps": [5, 6, 7],
        "expiries": [50, 60, 70],
        "deliver_at": [51, 61, 71],
        "delay_offsets": [1, 2, 3],
    }
    producer = BatchProducer(9, 2, 100)
    log.append(encode([b"a", b"b", b"c"], control=True, producer=producer, lane=4, **columns), 3)
    log.roll()
    compact(log, lambda batch: [0, 2])
    batch = log.batch_at(1)
    assert list(batch.offsets()) == [0, 2]
    assert (batch.count, batch.span, batch.lane, batch.epoch) == (2, 3, 4, 3)
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (9, 2, 100)
    assert batch.flags & 256
    assert (batch.values(), batch.timestamps(), batch.expiries()) == (
        [b"a", b"c"],
        [5, 7],
        [50, 70],
    )
    assert (batch.deliver_at(), batch.delay_offsets()) == ([51, 71], [1, 3])
    assert batch.keys() == [None, None]
    log.close()


def test_wholly_removed_neighbours_become_one_filler_per_epoch(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for number in range(10):
        log.append(encode_one(b"x", 100 + number), epoch=number // 6)
    log.roll()
    assert compact(log, lambda batch: [] if batch.base_offset != 3 else None) > 0
    found = [(batch.base_offset, batch.span, batch.count) for batch in log.batches(0)]
    assert found == [(0, 3, 0), (3, 1, 1), (4, 2, 0), (6, 4, 0)]
    assert log.epochs == [(0, 0), (1, 6)]
    assert log.offset_for_time(100) == 3
    assert log.offset_for_time(104) == 10
    assert compact(log, lambda batch: None) == 0
    every_offset_has_a_batch(log)
    log.close()


def test_nothing_to_remove_leaves_the_files_alone(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill_keyed(log, random.Random(2), 60, keys=5)
    before = {path: path.stat().st_ino for path in tmp_path.glob("*.log")}
    assert compact(log, lambda batch: None) == 0
    assert compact(log, lambda batch: list(range(batch.count))) == 0
    assert {path: path.stat().st_ino for path in tmp_path.glob("*.log")} == before
    assert list(tmp_path.glob("*.tmp")) == []
    log.close()


def test_tombstones_remove_older_records_and_go_when_they_are_old(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for key, value, time in (
        (b"a", b"1", 10),
        (b"b", b"1", 10),
        (b"a", b"", 1000),
        (b"b", b"2", 20),
    ):
        log.append(encode([value], [key], timestamps=time))
    log.append(encode([b""], timestamps=1))
    log.roll()
    compact_by_key(log, 1500, tombstone_ms=1000)
    assert sorted(rows(log)) == [2, 3, 4]
    compact_by_key(log, 2001, tombstone_ms=1000)
    assert sorted(rows(log)) == [3, 4]
    every_offset_has_a_batch(log)
    log.close()


def test_key_table_is_bounded_and_what_does_not_fit_stays(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for number in range(60):
        log.append(encode([b"v"], [b"k%d" % (number % 6)]))
    log.roll()
    compact_by_key(log, 0, keys_max=2)
    assert sorted(rows(log)) == [at for at in range(60) if at % 6 > 1 or at >= 54]
    compact_by_key(log, 0)
    assert sorted(rows(log)) == list(range(54, 60))
    log.close()


def test_damaged_segment_is_not_rewritten_and_keeps_tombstones_alive(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for key, value in ((b"a", b"1"), (b"b", b"1")):
        log.append(encode([value * 50], [key], timestamps=1))
    log.roll()
    log.append(encode([b""], [b"a"], timestamps=1))
    log.roll()
    first = log.segments.items[0]
    data = bytearray(Path(first.path).read_bytes())
    data[-1] ^= 1
    Path(first.path).write_bytes(data)
    compact_by_key(log, 1 << 40)
    assert Path(first.path).read_bytes() == data
    assert [(one.start, one.end) for one in log.damaged] == [(1, 2)]
    assert [batch.base_offset for batch in log.batches(0, skip_damaged=True)] == [0, 2]
    log.close()


def test_steps_let_the_log_go_on_between_segments(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    fill_keyed(log, random.Random(4), 120, keys=3)
    steps = compaction_steps(log, lambda batch: [])
    freed = [next(steps), next(steps)]
    assert min(freed) > 0
    log.truncate_prefix(log.segments.bases[3])
    log.append(encode_one(b"new", 1), epoch=9)
    assert sum(steps) > 0
    every_offset_has_a_batch(log)
    log.close()


def test_scrub_finds_rot_in_small_steps_and_starts_over(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for offset in range(300):
        log.append(encode_one(b"%d" % offset + bytes(50), 1))
    victims = {}
    for number in (1, 4):
        segment = log.segments.items[number]
        victim = segment.base_offset + 7
        position = log._reader.find(victim)[2]
        data = bytearray(Path(segment.path).read_bytes())
        data[position + 95] ^= 4
        Path(segment.path).write_bytes(data)
        victims[victim] = segment.path
    sealed = log.size_bytes - log.segments.active.facts.size
    for found_now in (victims, {}):
        found, verified, steps = {}, 0, 0
        while True:
            step = log.scrub(1000)
            found.update({one.start: one.path for one in step.damaged})
            verified += step.verified_bytes
            steps += 1
            if step.wrapped:
                break
        assert found == found_now
        assert sealed * 0.9 < verified < sealed * 1.5
        assert steps > 10
    assert [one.start for one in log.damaged] == sorted(victims)
    for victim in victims:
        with pytest.raises(CorruptBatch):
            log.batch_at(victim)
        assert log.batch_at(victim + 1).base_offset == victim + 1
    log.close()


def test_scrub_of_a_log_without_sealed_segments_has_nothing_to_do(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(encode_one(b"", 0))
    step = log.scrub(1 << 20)
    assert (step.wrapped, step.verified_bytes, step.damaged) == (True, 0, [])
    log.close()


def test_sparse_batches_may_be_appended_as_a_follower_does(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(encode([b"a", b"c"], offset_deltas=[0, 2], span=4, lane=1))
    log.append_many([encode([], offset_deltas=[], span=3), encode_one(b"h", 0, lane=1)])
    runs = []
    offset = 0
    while (run := log.next_run(1, offset)) is not None:
        runs.append(run)
        offset = run[1]
    assert runs == [(0, 1), (2, 3), (7, 8)]
    assert log.count_from(1, 1) == 2
    assert isinstance(log.batch_at(5), Batch)
    log.close()
    log = open_log(tmp_path)
    assert log.count_from(1, 0) == 3
    log.close()
