"""The journal on a disk that is full, at each of its writes, once or for a while."""

from collections.abc import Callable
from random import Random

import pytest
from simdisk import SimCrash, SimDisk

from raftq.client.common.errors import DiskFull, StorageFailed
from raftq.cluster.raft.journal import RaftJournal

State = tuple[int, str | None, bool, list[tuple[bytes, int, int]]]


def state(journal: RaftJournal) -> State:
    return journal.term, journal.vote, journal.may_vote, list(journal.entries)


def reopened(disk: SimDisk) -> State:
    journal = RaftJournal.open(disk, "/raft")
    found = state(journal)
    journal.close()
    return found


def append(journal: RaftJournal) -> None:
    journal.append(b"x" * 30, journal.last_index + 1, journal.term)


def vote(journal: RaftJournal) -> None:
    journal.set_term(journal.term + 1, "b")


def cut(journal: RaftJournal) -> None:
    journal.truncate(journal.last_index)


CHANGES: dict[str, Callable[[RaftJournal], None]] = {
    "append": append,
    "term and vote": vote,
    "truncate": cut,
    "may vote": RaftJournal.set_may_vote,
}
WRITES: dict[str, Callable[[RaftJournal], None]] = {
    "flush": RaftJournal.flush,
    "compact": lambda journal: journal.compact(3),
    "reset": lambda journal: journal.reset(3, 1),
    "reset to another log": lambda journal: journal.reset(9, 2),
}


def filled(disk: SimDisk) -> RaftJournal:
    journal = RaftJournal.open(disk, "/raft")
    journal.set_term(1, "a")
    for _ in range(4):
        append(journal)
    journal.flush()
    journal.set_commit(3)
    return journal


class FullAt:
    """The disk is full for its n-th operation from now on, and for no other."""

    def __init__(self, disk: SimDisk, number: int) -> None:
        self._left = number
        disk.between = self

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise DiskFull("no space left on the simulated disk")

    @property
    def was_met(self) -> bool:
        return self._left <= 0


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_full_disk_at_any_operation_leaves_all_or_nothing_and_the_next_try_goes_on(
    change: Callable[[RaftJournal], None], write: Callable[[RaftJournal], None]
) -> None:
    """
    1. Something is changed and written; at one operation of that the disk is full.
    2. What a restart finds then is the old state or the new one.
    3. The next try goes on, or the journal says that it must be opened again, and that works.
    4. More is written, and all of it is there once after a restart.
    """
    whole = filled(SimDisk())
    change(whole)
    write(whole)
    written = state(whole)
    number = 0
    while True:
        number += 1
        disk = SimDisk(number)
        journal = filled(disk)
        before = state(journal)
        change(journal)
        changed = state(journal)
        full = FullAt(disk, number)
        try:
            write(journal)
        except DiskFull:
            disk.between = None
            found = reopened(disk.kill())
            assert found == before
            assert state(journal) == changed
            write(journal)
        except StorageFailed:
            disk.between = None
            disk = disk.kill()
            found = reopened(disk)
            journal.close()
            journal = RaftJournal.open(disk, "/raft")
            assert state(journal) == found
            assert found in (before, written)
        disk.between = None
        append(journal)
        journal.flush()
        assert journal.durable_index == journal.last_index
        journal.close()
        for image in (disk.kill(), disk.crash(Random(number))):
            assert reopened(image) == state(journal)
        if not full.was_met:
            assert number > 3
            return


def test_a_full_disk_while_the_journal_is_opened_only_keeps_it_from_opening() -> None:
    """At each operation: of a new journal, and of one that has a torn tail and leftovers."""
    for old in (False, True):
        number = 0
        while True:
            number += 1
            disk = SimDisk(number)
            expected = None
            if old:
                journal = filled(disk)
                expected = state(journal)
                journal.close()
                file = disk.open("/raft/journal")
                file.append([b"RQJG torn"])
                disk.open("/raft/journal.tmp", create=True).append([b"half"])
            full = FullAt(disk, number)
            try:
                RaftJournal.open(disk, "/raft").close()
            except (DiskFull, StorageFailed):
                assert full.was_met
            disk.between = None
            found = reopened(disk)
            assert expected is None or found == expected
            if not full.was_met:
                break


def test_where_bytes_cannot_be_overwritten_entries_are_there_once() -> None:
    disk = SimDisk(1)
    journal = filled(disk)
    disk.full_overwrites = True
    for _ in range(3):
        append(journal)
        journal.flush()
        assert journal.durable_index == journal.last_index
        assert reopened(disk.kill()) == state(journal)
    disk.full_overwrites = False
    vote(journal)
    journal.flush()
    assert reopened(disk.crash(Random(1))) == state(journal)


def random_change(journal: RaftJournal, rng: Random) -> None:
    kind = rng.choice(["append", "append", "append", "term", "cut", "commit"])
    if kind == "append":
        journal.append(rng.randbytes(rng.randint(0, 60)), journal.last_index + 1, journal.term)
    elif kind == "term":
        journal.set_term(journal.term + 1, rng.choice([None, "a", "b"]))
    elif kind == "cut" and journal.last_index > journal.commit_index + 1:
        journal.truncate(rng.randint(journal.commit_index + 1, journal.last_index))
    elif kind == "commit" and journal.durable_index > journal.commit_index:
        journal.set_commit(rng.randint(journal.commit_index, journal.durable_index))


class Life:
    """One process with the journal, on a disk that is full now and then."""

    def __init__(self, disk: SimDisk, rng: Random) -> None:
        self.disk = disk
        self.rng = rng
        self.journal = RaftJournal.open(disk, "/raft")
        self.allowed = [state(self.journal)]
        """What a restart may find: the last durable state and all that came after it."""

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.refuse_something()
            random_change(self.journal, self.rng)
            self.allowed.append(state(self.journal))
            if self.rng.random() < 0.5:
                self.write()

    def refuse_something(self) -> None:
        disk, rng = self.disk, self.rng
        disk.full_overwrites = rng.random() < 0.3
        disk.capacity = disk.used_bytes() + rng.choice([0, 100, 2000])
        disk.between = None
        if rng.random() < 0.3:
            FullAt(disk, rng.randint(1, 6))

    def write(self) -> None:
        journal, rng = self.journal, self.rng
        try:
            journal.flush()
            del self.allowed[:-1]
            assert journal.durable_index == journal.last_index
            if rng.random() < 0.3:
                base = rng.randint(journal.base_index, journal.commit_index)
                kept = journal.entries[base - journal.base_index :]
                entries = [(b"", base, kept[0][2]), *kept[1:]]
                self.allowed.append((*state(journal)[:3], entries))
                journal.compact(base)
                del self.allowed[:-1]
        except DiskFull:
            if state(journal) not in self.allowed:
                self.allowed.append(state(journal))


@pytest.mark.parametrize("seed", range(100))
def test_a_journal_lives_on_with_a_disk_that_is_full_now_and_then(seed: int) -> None:
    """Several processes, one after the other, each ended by a crash, a failure or a kill."""
    rng = Random(f"full journal {seed}")
    disk = SimDisk(seed)
    for _ in range(5):
        disk.capacity, disk.full_overwrites, disk.between = None, False, None
        life = Life(disk, rng)
        disk.crash_at = disk.operations + rng.randint(20, 150)
        try:
            life.run(40)
        except (SimCrash, StorageFailed):
            disk = disk.crash(rng) if rng.random() < 0.5 else disk.kill()
        else:
            disk = disk.kill()
        disk.capacity = None
        assert reopened(disk) in life.allowed
