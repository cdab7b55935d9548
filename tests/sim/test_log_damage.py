"""The log on a disk that flips bits, fills up or fails to sync."""

from copy import deepcopy
from random import Random

import pytest
from logmodel import DIRECTORY, Row, Workload, check
from replay import replayable, seeds
from simdisk import SimDisk

from raftq.client.common.errors import CorruptBatch, DiskFull, StorageFailed
from raftq.client.wire.batch import decode
from raftq.node.storage.compaction import compact_by_key
from raftq.node.storage.log import Log


def closed_log(seed: int, steps: int = 20) -> Workload:
    """A cleanly closed log with a few records at least."""
    workload = Workload(seed, SimDisk(seed))
    workload.run(steps)
    workload.append_many()
    workload.log.close()
    return workload


def batches_of(data: bytes) -> list[tuple[int, int, int, int]]:
    """(position, end position, base offset, end offset) of each batch of a segment."""
    found, position = [], 0
    while position < len(data):
        batch = decode(data, position)
        found.append((position, position + batch.length, batch.base_offset, batch.end_offset))
        position += batch.length
    return found


def flip_somewhere(disk: SimDisk, rng: Random, suffix: str = "") -> tuple[str, bytes, int]:
    """(path, bytes before, bit) of one flipped bit in a file whose name ends like that."""
    paths = [f"{DIRECTORY}/{name}" for name in disk.list(DIRECTORY) if name.endswith(suffix)]
    path = rng.choice([path for path in paths if disk.size(path)])
    data = disk.read_file(path, 1 << 20)
    bit = rng.randrange(8 * len(data))
    disk.flip_bit(path, bit)
    return path, data, bit


def readable_rows(log: Log) -> dict[int, Row]:
    rows = {}
    for batch in log.batches(log.start_offset, skip_damaged=True):
        for offset, *row in batch.tuples():
            rows[offset] = (*row, batch.lane, batch.epoch)
    return {offset: row for offset, row in rows.items() if offset >= log.start_offset}


def check_damaged(log: Log, workload: Workload, hit: tuple[int, int]) -> None:
    """Everything but the batch [base, end) is intact, and that one is reported."""
    model, (base, end) = workload.model, hit
    assert (log.start_offset, log.end_offset) == (model.start, model.end), "silently shorter"
    expected = {
        offset: row
        for offset, row in model.rows.items()
        if model.start <= offset < model.end
        and offset not in model.removed
        and not base <= offset < end
    }
    assert readable_rows(log) == expected
    if end <= model.start:
        return
    inside = max(base, model.start)
    with pytest.raises(CorruptBatch):
        log.batch_at(inside)
    with pytest.raises(CorruptBatch):
        list(log.batches(inside))
    assert any(damage.start <= inside and end <= damage.end for damage in log.damaged)
    assert sum(damage.end - damage.start for damage in log.damaged) == end - base
    assert log.next_readable(inside) == end


@pytest.mark.parametrize("seed", seeds(40))
def test_one_flipped_bit_costs_at_most_its_own_batch_and_is_reported(seed: int) -> None:
    """
    1. Close a log cleanly and flip one bit anywhere in any of its files.
    2. In a segment: the batch with the bit is reported, all others are intact.
    3. In an index or the checkpoint: everything is intact.
    """
    rng = Random(f"flip {seed}")
    workload = closed_log(seed)
    for _ in range(6):
        with replayable("one_flipped_bit", seed):
            disk = workload.disk.kill()
            path, data, bit = flip_somewhere(disk, rng)
            log = Log.open(disk, DIRECTORY, workload.config, workload.now_ms)
            if path.endswith(".log"):
                [hit] = [(b[2], b[3]) for b in batches_of(data) if b[0] <= bit // 8 < b[1]]
                check_damaged(log, workload, hit)
            elif path.endswith(".index"):
                workload.check_same(log)
            else:
                # The older slot of the checkpoint may not know the newest start.
                model = deepcopy(workload.model)
                model.start_durable = 0
                check(log, model, end_min=model.end)


@pytest.mark.parametrize("seed", seeds(20))
def test_damaged_log_accepts_appends_and_keeps_its_offsets_over_a_reopen(seed: int) -> None:
    rng = Random(f"flip then append {seed}")
    workload = closed_log(seed)
    with replayable("damaged_log_accepts", seed):
        disk, model = workload.disk, workload.model
        _, data, bit = flip_somewhere(disk, rng, ".log")
        [hit] = [(b[2], b[3]) for b in batches_of(data) if b[0] <= bit // 8 < b[1]]
        for _ in range(3):
            log = workload.open()
            assert log.end_offset == model.end
            for _ in range(3):
                workload.append_many()
            workload.sync()
            check_damaged(log, workload, hit)
            if rng.random() < 0.5:
                log.close()
            workload.disk = workload.disk.crash(rng)


@pytest.mark.parametrize("seed", seeds(40))
def test_full_disk_refuses_whole_appends_and_loses_nothing(seed: int) -> None:
    """
    1. Fill the disk; each append succeeds entirely or raises DiskFull and changes nothing.
    2. A reopen on the full disk, clean or by a kill, has everything.
    3. With room again the log goes on.
    """
    rng = Random(f"full {seed}")
    workload = Workload(seed, SimDisk(seed))
    with replayable("full_disk", seed):
        workload.run(rng.randint(0, 10))
        disk, model = workload.disk, workload.model
        disk.capacity = disk.used_bytes() + rng.randint(0, 3000)
        refused = 0
        for _ in range(60):
            try:
                rng.choice([workload.append_one, workload.append_batch, workload.append_many])()
                if rng.random() < 0.2:
                    workload.sync()
            except DiskFull:
                refused += 1
                assert workload.log.end_offset == model.end
            workload.note_flushed()
        assert refused
        workload.check_same(workload.log)
        if rng.random() < 0.5:
            workload.disk = disk = disk.kill()
        else:
            try:
                workload.log.close()
            except DiskFull:
                workload.disk = disk = disk.kill()
        workload.check_same(workload.open())
        workload.disk.capacity = None
        workload.append_many()
        workload.sync()
        workload.note_flushed()
        workload.disk = workload.disk.crash(rng)
        workload.check_same(workload.open())


WRITES = {
    "append": lambda workload: workload.log.append(workload.batch()),
    "append_many": lambda workload: workload.log.append_many([workload.batch()]),
    "sync": lambda workload: workload.log.sync(),
    "roll": lambda workload: workload.log.roll(),
    "truncate": lambda workload: workload.log.truncate(workload.model.start),
    "truncate_prefix": lambda workload: workload.log.truncate_prefix(workload.model.end),
    "retain": lambda workload: workload.log.retain(workload.now_ms, bytes_max=0),
    "compact": lambda workload: compact_by_key(workload.log, workload.now_ms, 0),
}


@pytest.mark.parametrize("seed", seeds(30))
def test_failed_sync_refuses_every_write_until_the_log_is_reopened(seed: int) -> None:
    """
    1. A sync fails: every write is refused, also when syncs would work again.
    2. After a reopen everything reported as flushed is there and appends work.
    3. What the reopened log reports as flushed survives a power loss, although the kernel counts
       the pages of the failed sync as clean.
    """
    rng = Random(f"fail sync {seed}")
    workload = Workload(seed, SimDisk(seed))
    with replayable("failed_sync", seed):
        workload.run(rng.randint(1, 15))
        workload.append_many()
        flushed = workload.log.flushed_offset
        workload.disk.fail_sync = True
        with pytest.raises(StorageFailed):
            workload.log.sync()
        assert workload.log.flushed_offset == flushed
        workload.disk.fail_sync = False
        for name, write in WRITES.items():
            before = workload.disk.operations
            with pytest.raises(StorageFailed):
                write(workload)
            assert workload.disk.operations == before, f"{name} wrote something"
        image = workload.disk.kill() if rng.random() < 0.5 else workload.disk.crash(rng)
        after = Workload(f"{seed} after", image, workload.model)
        log = after.open()
        after.model.resolve(log, check(log, after.model))
        after.append_many()
        after.sync()
        after.note_flushed()
        after.disk = after.disk.crash(rng)
        check(after.open(), after.model)
