"""A truncation, or a reset, that other threads meet with their syncs; and one on a full disk."""

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from simdisk import SimDisk

from raftq.client.common.disk import File, RealDisk, RealFile
from raftq.client.common.errors import DiskFull
from raftq.client.wire.batch import encode, stamp
from raftq.node.storage.checkpoint import is_truncated
from raftq.node.storage.config import LogConfig
from raftq.node.storage.durability import SyncTicket
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.log import Log

CONFIG = LogConfig(segment_bytes=4096, index_interval_bytes=256, seal_sync=False)


def write(log: Log, epoch: int, text: bytes = b"") -> None:
    batch = encode([text or b"%d of %d" % (log.end_offset, epoch)], timestamps=1000)
    stamp(batch, log.end_offset, epoch)
    log.append_stamped(batch)


def filled(disk: SimDisk, count: int = 10, size: int = 0) -> Log:
    log = Log.open(disk, "/log", CONFIG, 0)
    for _ in range(count):
        write(log, 1, b"x" * size)
    log.sync()
    return log


def values(log: Log) -> list[bytes]:
    return [value for batch in log.batches(log.start_offset) for value in batch.values()]


CUTS: dict[str, Callable[[Log], None]] = {
    "truncate": lambda log: log.truncate(6),
    "truncate below sealed segments": lambda log: log.truncate(2),
    "truncate to nothing": lambda log: log.truncate(0),
    "reset": lambda log: log.reset(3),
    "reset further on": lambda log: log.reset(9),
}


@pytest.mark.parametrize("size", [0, 1500], ids=["one segment", "several"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_sync_begun_anywhere_in_a_truncation_vouches_for_nothing_that_came_after(
    cut: Callable[[Log], None], size: int
) -> None:
    """
    1. At every operation of the disk in a truncation, another thread begins a sync.
    2. The log grows again, to below its old end; then those syncs are run, none of the new bytes.
    3. Only what a sync of the new bytes covered is flushed, and only that survives for certain.
    """
    disk = SimDisk(1)
    log = filled(disk, size=size)
    tickets: list[SyncTicket] = []
    disk.between = lambda: tickets.append(log.begin_sync())
    cut(log)
    disk.between = None
    assert tickets
    end = log.end_offset
    assert log.flushed_offset == end
    write(log, 2)
    for ticket in tickets:
        ticket.run()
        assert log.flushed_offset == end
    assert not is_truncated(disk.kill(), "/log")
    log.sync()
    assert log.flushed_offset == end + 1
    for seed in range(20):
        again = Log.open(disk.crash(Random(seed)), "/log", CONFIG, 0)
        assert (again.end_offset, again.damaged) == (end + 1, [])
        assert values(again)[-1] == b"%d of 2" % end


def test_a_sync_that_ends_after_a_truncation_is_not_waited_for_in_vain() -> None:
    """Whoever writes after the truncation gets a sync of its own bytes."""
    disk = SimDisk(1)
    log = filled(disk)
    tickets: list[SyncTicket] = []
    disk.between = lambda: tickets.append(log.begin_sync())
    log.truncate(6)
    disk.between = None
    write(log, 2)
    for ticket in tickets:
        ticket.run()
    answers: list[object] = []
    flusher = Flusher()
    answered = threading.Event()
    flusher.add(log)
    before = sum(" sync " in step for step in disk.trace)

    def answer(error: object) -> None:
        answers.append(error)
        answered.set()

    flusher.submit([(log, log.end_offset)], answer)
    assert answered.wait(10)
    flusher.close()
    assert answers == [None]
    assert sum(" sync " in step for step in disk.trace) > before


class SlowFile(RealFile):
    """A sync that comes back late, as from a disk that is busy."""

    __slots__ = ()

    def sync(self) -> None:
        super().sync()
        threading.Event().wait(0.002)


class SlowDisk(RealDisk):
    def open(self, path: str, create: bool = False) -> File:
        file = super().open(path, create)
        assert isinstance(file, RealFile)
        return SlowFile(file._fd, path)


def test_no_log_is_flushed_beyond_its_end_while_real_threads_sync(tmp_path: Path) -> None:
    """Some logs grow and are cut while the flusher's threads sync them all the time."""
    flusher, disk = Flusher(0.005, 4), SlowDisk()
    logs = [Log.open(disk, str(tmp_path / f"{n}/data"), CONFIG, 0) for n in range(4)]
    for log in logs:
        flusher.add(log)
    for epoch in range(1, 26):
        for log in logs:
            for _ in range(6):
                write(log, epoch, b"y" * 200)
        for log in logs:
            log.truncate(log.end_offset - 3)
            assert log.flushed_offset == log.end_offset
        flusher.wait([(log, log.end_offset) for log in logs])
        for log in logs:
            assert log.flushed_offset <= log.end_offset
    flusher.close()
    for log in logs:
        log.close()


def test_a_truncation_that_the_full_disk_refuses_changes_nothing_and_can_be_repeated() -> None:
    disk = SimDisk(1)
    log = filled(disk)
    disk.full_overwrites = True
    with pytest.raises(DiskFull):
        log.truncate(6)
    assert log.end_offset == 10
    write(log, 1)
    log.sync()
    assert log.flushed_offset == log.end_offset == 11
    disk.full_overwrites = False
    log.truncate(6)
    assert log.flushed_offset == log.end_offset == 6


def test_a_truncation_that_could_only_not_note_its_end_is_done() -> None:
    """
    1. A log is cut from 10 to 6. Its last write, a hint, finds no room: it is cut all the same.
    2. With room again the log grows, and power is lost while the next hint is written: that the
       log was cut is still known, so there is no hole up to 10.
    """
    disk = SimDisk(1)
    log = filled(disk)

    def fill_up() -> None:
        if " truncate " in disk.trace[-1]:
            disk.full_overwrites = True

    disk.between = fill_up
    log.truncate(6)
    assert disk.full_overwrites
    disk.between, disk.full_overwrites = None, False
    assert log.flushed_offset == log.end_offset == 6
    write(log, 2)
    log.sync()
    for seed in range(40):
        again = Log.open(disk.crash(Random(seed)), "/log", CONFIG, 0)
        assert (again.end_offset, again.damaged) == (7, [])


def test_a_start_that_could_not_be_noted_stays_where_it_was() -> None:
    disk = SimDisk(1)
    log = filled(disk, size=1500)
    disk.full_overwrites = True
    with pytest.raises(DiskFull):
        log.truncate_prefix(5)
    assert log.start_offset == 0
    assert len(values(log)) == 10
    disk.full_overwrites = False
    log.truncate_prefix(5)
    assert log.start_offset == 5
