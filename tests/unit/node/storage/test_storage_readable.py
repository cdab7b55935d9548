"""What was readable is known after a restart, and never more than that."""

from random import Random

import pytest
from simdisk import SimDisk

from raftq.client.wire.batch import encode
from raftq.node.storage.checkpoint import NAME, SLOT_BYTES
from raftq.node.storage.config import LogConfig
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.log import Log

DIRECTORY = "/log"
CONFIG = LogConfig(segment_bytes=1 << 20, seal_sync=False)


def opened(disk: SimDisk) -> Log:
    return Log.open(disk, DIRECTORY, CONFIG, 0)


def fill(log: Log, count: int, epoch: int = 1) -> None:
    for _ in range(count):
        log.append(encode([b"value"]), epoch)


def test_a_restart_knows_what_was_readable_when_it_was_noted() -> None:
    disk = SimDisk(1)
    log = opened(disk)
    fill(log, 10)
    log.set_readable(7)
    assert log.has_unnoted
    log.note_readable()
    assert not log.has_unnoted
    log.set_readable(9)  # nobody notes this
    again = opened(disk.kill())
    assert again.readable_offset == 7


@pytest.mark.parametrize("clean", [True, False])
def test_a_sync_and_a_clean_close_note_it_too(clean: bool) -> None:
    disk = SimDisk(1)
    log = opened(disk)
    fill(log, 10)
    log.set_readable(8)
    if clean:
        log.close()
    else:
        log.sync()
    assert opened(disk.kill()).readable_offset == 8


def test_the_flusher_notes_what_is_readable_of_logs_that_are_synced() -> None:
    disk = SimDisk(1)
    log = opened(disk)
    flusher = Flusher(interval_s=0.001)
    flusher.add(log)
    fill(log, 10)
    flusher.wait([(log, 10)])
    log.set_readable(10)
    rounds = flusher.rounds
    while log.has_unnoted:
        assert flusher.rounds < rounds + 10_000
    flusher.remove(log)
    flusher.close()
    assert opened(disk.kill()).readable_offset == 10


def test_nothing_above_the_end_is_readable_and_what_takes_its_place_is_not_either() -> None:
    """
    1. Ten records are readable; a power cut takes the last of them.
    2. Others come in their place, and are not synced when the process is killed.
    """
    disk = SimDisk(1)
    log = opened(disk)
    fill(log, 6)
    log.sync()
    fill(log, 4)
    log.set_readable(10)
    log.note_readable()
    for seed in range(500):
        cut = disk.crash(Random(seed))
        shorter = opened(cut)
        end = shorter.end_offset
        assert shorter.readable_offset <= end
        if 6 <= shorter.readable_offset == end < 10:
            fill(shorter, 10, epoch=2)
            assert opened(cut.kill()).readable_offset == end
            break
    else:
        raise AssertionError("no cut kept the note and lost what it is about")


def test_a_truncation_takes_back_what_was_readable_above_it() -> None:
    disk = SimDisk(1)
    log = opened(disk)
    fill(log, 10)
    log.set_readable(9)
    log.note_readable()
    log.truncate(5)
    assert log.readable_offset == 5
    fill(log, 5, epoch=2)
    assert opened(disk.kill()).readable_offset == 5


def test_a_log_that_begins_anew_knows_of_nothing_readable_above_its_start() -> None:
    disk = SimDisk(1)
    log = opened(disk)
    fill(log, 10)
    log.set_readable(10)
    log.reset(4)
    fill(log, 10, epoch=2)
    assert log.readable_offset == 0
    assert opened(disk.kill()).readable_offset == 0


def test_a_damaged_newest_slot_makes_it_unknown() -> None:
    """The one before it may be from before a truncation."""
    disk = SimDisk(1)
    log = opened(disk)
    fill(log, 10)
    log.set_readable(10)
    log.note_readable()
    log.truncate(5)
    log.close()
    path = f"{DIRECTORY}/{NAME}"
    file = disk.open(path)
    slots = [file.read(at, SLOT_BYTES) for at in (0, SLOT_BYTES)]
    newest = max((0, 1), key=lambda at: int.from_bytes(slots[at][8:16], "little"))
    file.write_at(newest * SLOT_BYTES, bytes(SLOT_BYTES))
    file.close()
    assert opened(disk.kill()).readable_offset == 0
