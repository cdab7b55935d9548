"""Damage is put right with batches of the same history only."""

import pytest
from simdisk import SimDisk

from raftq.client.common.errors import CorruptBatch
from raftq.client.wire.batch import encode, stamp
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log

CONFIG = LogConfig(segment_bytes=4096, index_interval_bytes=256)


def batch(base: int, epoch: int, text: bytes = b"") -> bytes:
    made = encode([text or b"%02d of %d" % (base, epoch)], timestamps=1000)
    stamp(made, base, epoch)
    return bytes(made)


def filled(epochs: list[int], disk: SimDisk | None = None, size: int = 0) -> tuple[SimDisk, Log]:
    disk = disk or SimDisk(1)
    log = Log.open(disk, "/log", CONFIG, 0)
    for base, epoch in enumerate(epochs):
        log.append_stamped(batch(base, epoch, b"x" * size))
    log.sync()
    return disk, log


def rot(disk: SimDisk, log: Log, *offsets: int) -> None:
    places = [log.stored_at(offset) for offset in offsets]
    for segment, position in places:
        disk.flip_bit(segment.path, 8 * (position + 70))


def find(log: Log) -> list[tuple[int, int]]:
    for _ in log.batches(log.start_offset, skip_damaged=True):
        pass
    return [(one.start, one.end) for one in log.damaged]


def test_an_unacknowledged_batch_of_another_epoch_does_not_replace_a_damaged_one() -> None:
    """Epoch 2 was led by another replica, which wrote offset 5 and died; epoch 3 wrote it anew."""
    disk, log = filled([1, 1, 1, 1, 1, 3, 3])
    rot(disk, log, 5)
    assert find(log) == [(5, 6)]
    with pytest.raises(CorruptBatch, match="epoch 2"):
        log.repair(5, batch(5, 2))
    assert find(log) == [(5, 6)]
    log.repair(5, batch(5, 3))
    assert not log.damaged
    assert log.epochs == [(1, 0), (3, 5)]


@pytest.mark.parametrize("hit", [3, 6])
def test_a_batch_in_the_middle_of_an_epoch_is_replaced_by_one_of_that_epoch(hit: int) -> None:
    disk, log = filled([1, 1, 1, 1, 1, 3, 3, 3])
    rot(disk, log, hit)
    assert find(log) == [(hit, hit + 1)]
    right = 1 if hit < 5 else 3
    for wrong in {0, 1, 2, 3, 4} - {right}:
        with pytest.raises(CorruptBatch):
            log.repair(hit, batch(hit, wrong))
    log.repair(hit, batch(hit, right))
    assert not log.damaged


def test_an_epoch_that_began_in_damage_found_at_the_start_is_believed_within_bounds() -> None:
    """
    1. The first batch of epoch 3 is damaged while the log is closed: its index cannot tell whether
       that batch belonged to 1, 2 or 3.
    2. What is older than the batch before or newer than the one behind is refused.
    """
    disk, log = filled([1, 1, 1, 3, 3])
    rot(disk, log, 3)
    log.close()
    for epoch in (1, 2, 3):
        log = Log.open(disk.kill(), "/log", CONFIG, 0)
        assert find(log) == [(3, 4)]
        for wrong in (0, 4):
            with pytest.raises(CorruptBatch):
                log.repair(3, batch(3, wrong))
        log.repair(3, batch(3, epoch))
        assert not log.damaged


def test_two_damages_side_by_side_are_repaired_one_after_the_other() -> None:
    """An epoch begins in the first of them; only what is behind the second is known."""
    disk, log = filled([1, 1, 3, 3, 3])
    rot(disk, log, 3)
    assert find(log) == [(3, 4)]
    rot(disk, log, 2)
    find(log)
    for damage in log.damaged:
        good = [batch(at, 3) for at in range(damage.start, damage.end)]
        log.repair(damage.start, b"".join(good))
    assert not log.damaged
    assert log.epochs == [(1, 0), (3, 2)]


@pytest.mark.parametrize("epochs", [[1] * 12, [1] * 5 + [3] * 7])
def test_a_missing_segment_takes_no_batch_of_an_older_or_a_newer_epoch(epochs: list[int]) -> None:
    disk, log = filled(epochs, size=900)
    log.close()
    segments = [name for name in disk.list("/log") if name.endswith(".log")]
    base, end = int(segments[1][:20]), int(segments[2][:20])
    disk.remove(f"/log/{segments[1]}")
    log = Log.open(disk, "/log", CONFIG, 0)
    assert find(log) == [(base, end)]
    for wrong in (0, 4):
        with pytest.raises(CorruptBatch):
            log.repair(base, batch(base, wrong))
    if epochs[-1] == 1:
        with pytest.raises(CorruptBatch, match="epoch 2"):
            log.repair(base, batch(base, 2))
    log.repair(base, b"".join(batch(at, epochs[at], b"x" * 900) for at in range(base, end)))
    assert not log.damaged


def test_a_lost_end_takes_epochs_that_the_log_has_forgotten() -> None:
    """The whole end is gone, and with it what was noted of its epoch."""
    disk, log = filled([1] * 5 + [3] * 7, size=900)
    log.close()
    segments = [name for name in disk.list("/log") if name.endswith(".log")]
    base = int(segments[-1][:20])
    disk.remove(f"/log/{segments[-1]}")
    log = Log.open(disk, "/log", CONFIG, 0)
    assert find(log) == [(base, 12)]
    with pytest.raises(CorruptBatch):
        log.repair(base, batch(base, 1))
    log.repair(base, b"".join(batch(at, 5, b"x" * 900) for at in range(base, 12)))
    assert not log.damaged
