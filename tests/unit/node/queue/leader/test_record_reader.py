"""Single records of a log: what was written is read, wherever it lies; what changed is not."""

import random
from typing import Any

import pytest
from simdisk import SimDisk

from raftq.client.common.errors import CorruptBatch
from raftq.client.wire.batch import CODEC_LZ4, Batch, encode
from raftq.client.wire.record import BatchRecord
from raftq.node.queue.leader import record_reader as scattered
from raftq.node.queue.leader.record_reader import RecordReader
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log


def new_log(segment_bytes: int = 1 << 20) -> Log:
    disk = SimDisk()
    disk.make_directory("/l")
    return Log.open(disk, "/l/x", LogConfig(segment_bytes=segment_bytes), 0)


def fill(log: Log, rng: random.Random, batches: int) -> dict[int, BatchRecord]:
    """Batches of all kinds; what each record is."""
    expected: dict[int, BatchRecord] = {}
    for _ in range(batches):
        count = rng.choice((1, 2, 30, 400))
        values = [rng.randbytes(rng.choice((0, 10, 200))) for _ in range(count)]
        columns: dict[str, Any] = {"lane": rng.randrange(5)}
        columns["timestamps"] = rng.choice((7, [rng.randrange(9) for _ in values]))
        if rng.random() < 0.5:
            columns["keys"] = [rng.choice((None, b"", b"key%d" % at)) for at in range(count)]
        if rng.random() < 0.5:
            columns["headers"] = [rng.choice(({}, {"a": b"b", "c": b""})) for _ in values]
        if rng.random() < 0.5:
            columns["expiries"] = [rng.randrange(3) for _ in values]
        if rng.random() < 0.3:
            columns["codec"] = CODEC_LZ4
            values = [b"the same" * 20 for _ in values]
        batch = encode(values, **columns)
        base = log.append(batch)
        for record in Batch(bytes(batch)).records():
            expected[record.offset] = record
        assert base + count == log.end_offset
    return expected


@pytest.mark.parametrize("seed", range(20))
def test_records_are_read_as_they_were_written(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(scattered, "SMALL_BYTES", rng.choice((0, 300, 5_000)))
    monkeypatch.setattr(scattered, "COLUMN_RECORDS_MAX", rng.choice((1, 500, 10**6)))
    monkeypatch.setattr(scattered, "UNPACKED_BYTES_MAX", rng.choice((1, 10**6)))
    monkeypatch.setattr(scattered, "GAP_BYTES", rng.choice((0, 400)))
    log = new_log(rng.choice((1 << 14, 1 << 20)))
    expected = fill(log, rng, 40)
    records = RecordReader(log)
    if rng.random() < 0.5:
        for batch in log.batches(0):
            records.learn(batch)
    for _ in range(60):
        wanted = rng.sample(sorted(expected), min(rng.choice((1, 5, 300)), len(expected)))
        bytes_max = rng.choice((1, 3_000, 1 << 30))
        left, found = wanted, {}
        for _ in range(10_000):
            some, rest = records.read(left, bytes_max)
            assert some, "it always gets on"
            assert not some.keys() & set(rest)
            found.update(some)
            left = rest
            if not left:
                break
        assert found == {place: expected[place] for place in wanted}


def test_only_what_changed_on_the_disk_is_refused() -> None:
    log = new_log()
    batch = encode([b"%04d" % at * 20 for at in range(400)], timestamps=1)
    log.append(batch)
    damage: list[CorruptBatch] = []
    records = RecordReader(log, damage.append)
    assert len(records.read(range(400))[0]) == 400
    path = log.segments.active.path
    whole = log.disk.read_file(path, 1 << 20)
    log.disk.flip_bit(path, 8 * whole.index(b"0123"))
    assert len(records.read([7, 9, 300])[0]) == 3
    found, rest = records.read([122, 123])
    assert 123 not in found
    assert rest == []
    assert damage


def test_places_below_the_start_of_the_log_are_left_out() -> None:
    log = new_log()
    for _ in range(3):
        log.append(encode([bytes(100)] * 300, timestamps=1))
        log.roll()
    records = RecordReader(log)
    assert len(records.read([0, 300, 600])[0]) == 3
    log.truncate_prefix(300)
    records.forget_below(300)
    found, rest = records.read([0, 300, 600])
    assert (sorted(found), rest) == ([300, 600], [])


def test_one_read_looks_into_few_new_batches() -> None:
    log = new_log()
    for _ in range(20):
        log.append(encode([bytes(100)] * 300, timestamps=1))
    records = RecordReader(log)
    found, rest = records.read(range(0, 6_000, 300))
    assert (len(found), len(rest)) == (scattered.LEARN_MAX, 20 - scattered.LEARN_MAX)
