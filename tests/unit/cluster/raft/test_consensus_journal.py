"""The journal: what was flushed survives, what is damaged is refused, a torn tail is cut."""

import struct
from pathlib import Path
from random import Random

import pytest
from crc32c import crc32c
from simdisk import SimCrash, SimDisk

from raftq.client.common.disk import RealDisk
from raftq.client.common.errors import (
    ConsensusBroken,
    CorruptFile,
    DirectoryLocked,
    DiskFull,
    StorageFailed,
    UnknownFormat,
)
from raftq.cluster.raft.journal import RaftJournal

PATH = "/raft/journal"


def filled(disk: SimDisk, count: int = 5) -> RaftJournal:
    journal = RaftJournal.open(disk, "/raft")
    journal.set_term(3, "b")
    for index in range(2, 2 + count):
        journal.append(b"command %d" % index, index, 3)
        journal.flush()
    return journal


def state(journal: RaftJournal) -> tuple[object, ...]:
    return journal.term, journal.vote, journal.commit_index, list(journal.entries)


def test_what_was_flushed_is_there_after_a_power_loss() -> None:
    disk = SimDisk(1)
    journal = filled(disk)
    journal.set_commit(4)
    journal.set_may_vote()
    journal.flush()
    journal.append(b"not flushed", 7, 3)
    again = RaftJournal.open(disk.crash(Random(5)), "/raft")
    assert (again.term, again.vote, again.commit_index, again.may_vote) == (3, "b", 4, True)
    assert again.entries == journal.entries[:-1]


def test_a_torn_tail_is_cut_at_every_length() -> None:
    disk = SimDisk()
    journal = filled(disk)
    start = disk.size(PATH)
    journal.append(b"x" * 20, 7, 3)
    journal.flush()
    whole = disk.read_file(PATH, 10_000)
    for size in range(start, len(whole)):
        torn = SimDisk()
        torn.make_directory("/raft")
        # The mark was written after the sync, so a torn group comes with the mark before it.
        torn.write_file_atomic(PATH, whole[:16] + struct.pack("<QI", 0, 0) + whole[28:size])
        again = RaftJournal.open(torn, "/raft")
        assert again.last_index == 6
        assert again.cut_bytes == size - start
        assert torn.size(PATH) == start


def test_any_flipped_bit_in_the_middle_refuses_to_open() -> None:
    """Header and marks aside, each byte of every group but the last is hit once."""
    clean = SimDisk()
    filled(clean)
    last = clean.read_file(PATH, 10_000).rindex(b"RQJG")
    for byte in [*range(16), *range(32, last)]:
        disk = SimDisk()
        filled(disk)
        disk.flip_bit(PATH, byte * 8 + byte % 8)
        with pytest.raises((CorruptFile, UnknownFormat)):
            RaftJournal.open(disk.kill(), "/raft")


def test_a_flipped_bit_in_the_last_synced_group_is_damage_and_no_torn_tail() -> None:
    disk = SimDisk()
    filled(disk)
    disk.flip_bit(PATH, disk.size(PATH) * 8 - 3)
    with pytest.raises(CorruptFile, match="were synced"):
        RaftJournal.open(disk.kill(), "/raft")


def test_a_file_shorter_than_what_was_synced_refuses_to_open() -> None:
    disk = SimDisk()
    filled(disk)
    last = disk.read_file(PATH, 10_000).rindex(b"RQJG")
    disk.open(PATH).truncate(last)
    with pytest.raises(CorruptFile, match="were synced"):
        RaftJournal.open(disk.kill(), "/raft")


def test_a_newer_format_refuses_to_open() -> None:
    disk = SimDisk()
    filled(disk)
    raw = bytearray(disk.read_file(PATH, 10_000))
    raw[8:10] = struct.pack("<H", 2)
    raw[12:16] = struct.pack("<I", crc32c(raw[:12]))
    disk.write_file_atomic(PATH, raw)
    with pytest.raises(UnknownFormat, match="format 2"):
        RaftJournal.open(disk, "/raft")


def test_a_full_disk_keeps_what_is_pending_and_writes_it_later() -> None:
    disk = SimDisk()
    journal = filled(disk)
    disk.capacity = disk.used_bytes() + 10
    journal.append(b"y" * 50, 7, 3)
    for _ in range(2):
        with pytest.raises(DiskFull):
            journal.flush()
    assert journal.durable_index == 6
    disk.capacity = None
    journal.flush()
    assert journal.durable_index == 7
    assert RaftJournal.open(disk.crash(Random(1)), "/raft").last_index == 7


def test_after_a_failed_sync_nothing_is_written_any_more() -> None:
    disk = SimDisk()
    journal = filled(disk)
    journal.append(b"z", 7, 3)
    disk.fail_sync = True
    with pytest.raises(StorageFailed):
        journal.flush()
    disk.fail_sync = False
    size = disk.size(PATH)
    with pytest.raises(StorageFailed, match="must be reopened"):
        journal.flush()
    with pytest.raises(StorageFailed, match="must be reopened"):
        journal.compact(1) if journal.base_index > 1 else journal.reset(3, 3)
    assert disk.size(PATH) == size


def test_committed_entries_are_never_cut() -> None:
    journal = filled(SimDisk())
    journal.set_commit(4)
    with pytest.raises(ConsensusBroken):
        journal.truncate(4)
    journal.truncate(5)
    assert journal.last_index == 4


def random_operations(journal: RaftJournal, rng: Random, flushed: list[tuple[object, ...]]) -> None:
    """`flushed` gets every state that a crash may leave: the last durable one and later ones."""
    for _ in range(40):
        kind = rng.choice(
            ["append", "append", "term", "cut", "commit", "compact", "flush", "flush"]
        )
        if kind == "append":
            journal.append(rng.randbytes(rng.randint(0, 60)), journal.last_index + 1, journal.term)
        elif kind == "term":
            journal.set_term(journal.term + 1, rng.choice([None, "a", "b"]))
        elif kind == "cut" and journal.last_index > journal.commit_index + 1:
            journal.truncate(rng.randint(journal.commit_index + 1, journal.last_index))
        elif kind == "commit":
            journal.set_commit(rng.randint(journal.commit_index, journal.durable_index))
        elif kind in ("compact", "flush"):
            flushed.append(state(journal))
            if kind == "compact":
                base = rng.randint(journal.base_index, journal.commit_index)
                kept = journal.entries[base - journal.base_index :]
                if base > journal.base_index:
                    entries = [(b"", base, kept[0][2]), *kept[1:]]
                    flushed.append((journal.term, journal.vote, journal.commit_index, entries))
                journal.flush()
                journal.compact(base)
            journal.flush()
            del flushed[:-1]


@pytest.mark.parametrize("seed", range(150))
def test_a_crash_at_any_operation_leaves_the_last_flushed_state_or_the_next(seed: int) -> None:
    disk = SimDisk(seed)
    rng = Random(seed)
    journal = RaftJournal.open(disk, "/raft")
    flushed = [state(journal)]
    disk.crash_at = disk.operations + rng.randint(1, 60)
    try:
        random_operations(journal, rng, flushed)
    except SimCrash:
        disk = disk.crash(rng) if seed % 2 else disk.kill()
    else:
        disk.crash_at = None
    again = RaftJournal.open(disk, "/raft")
    # The commit index is a hint: it may be older than what else is there.
    assert any(
        (again.term, again.vote, again.entries) == (one[0], one[1], one[3])
        and again.commit_index <= one[2]  # type: ignore[operator]
        for one in flushed
    )


@pytest.mark.parametrize("seed", range(60))
def test_what_a_journal_has_when_it_is_opened_is_durable(seed: int) -> None:
    """
    1. The process is killed at any operation: what was written is there, be it synced or not.
    2. The next one opens the journal and goes by what it finds; then power is lost.
    """
    disk = SimDisk(seed)
    rng = Random(seed)
    journal = RaftJournal.open(disk, "/raft")
    disk.crash_at = disk.operations + rng.randint(1, 60)
    disk.fail_sync = seed % 3 == 0 and rng.random() < 0.5
    try:
        random_operations(journal, rng, [state(journal)])
    except (SimCrash, StorageFailed):
        disk = disk.kill()
    disk.crash_at = None
    found = state(RaftJournal.open(disk, "/raft"))
    for number in range(4):
        assert state(RaftJournal.open(disk.crash(Random(number)), "/raft")) == found


def test_the_local_disk_takes_the_same_journal(tmp_path: Path) -> None:
    disk, directory = RealDisk(), str(tmp_path / "deep" / "raft")
    journal = RaftJournal.open(disk, directory)
    journal.set_term(2, "c")
    for index in range(2, 50):
        journal.append(b"c" * index, index, 2)
    journal.flush()
    journal.set_commit(40)
    journal.compact(30)
    journal.close()
    again = RaftJournal.open(disk, directory)
    assert (again.base_index, again.last_index, again.term, again.vote) == (30, 49, 2, "c")
    lock = disk.lock(directory + "/lock")
    with pytest.raises(DirectoryLocked):
        disk.lock(directory + "/lock")
    lock.release()
    disk.lock(directory + "/lock").release()
    with pytest.raises(StorageFailed):
        disk.open(directory + "/nothing")
    assert not disk.exists(directory + "/journal.tmp")
