"""A log while other threads sync it, on a disk that fails in every way it knows.

The owner of the log does what a queue or a follower does; at each operation of the disk, and
wherever the log's lock is taken, threads that do what the flusher does may begin a sync, get on
with one, or leave it where it is for a long time. Syncs fail, the disk is full, also for bytes that
are only overwritten, reads fail, bits rot and are put right, the process is killed, power is lost.
Whatever was ever reported as flushed must be there afterwards, and nothing else than the model
allows.
"""

from collections.abc import Sequence
from contextlib import suppress
from random import Random

import pytest
from logmodel import Model, Workload, check
from replay import replayable, seeds
from simdisk import SimCrash, SimDisk
from simthreads import Threads
from test_log_replica_crashes import ReplicaModel, ReplicaWorkload, settle

from raftq.client.common.errors import (
    CorruptBatch,
    DiskFull,
    RaftqError,
    StorageError,
    StorageFailed,
)
from raftq.client.wire.batch import decode, stamp
from raftq.node.storage.log import Log

LIVES = 4
STEPS = 20
SYNCS_MAX = 2
FAULTS = ("crash", "fail_sync", "full_overwrites", "capacity", "fail_read", "rot")


class Threaded(Workload):
    """One life of the process; `faults` are those that may happen in it."""

    BACKGROUND = (("background_sync", 6), ("toggle_fault", 3), ("rot", 1))

    def __init__(
        self, seed: str, disk: SimDisk, model: Model, faults: Sequence[str] = FAULTS
    ) -> None:
        super().__init__(seed, disk, model)
        self.at_lines = False
        rng = Random(f"threads {seed}")
        self.threads = Threads(rng, rng.choice([0.2, 0.5, 0.8]))
        self.syncs_s = rng.choice([0.05, 0.2, 0.5])
        self.schedule = rng
        self.faults = [fault for fault in faults if self.rng.random() < 0.4]
        disk.between = self.between
        if "crash" in self.faults:
            disk.crash_at = disk.operations + self.rng.randint(1, 150)

    def open(self) -> Log:
        log = super().open()
        log._durability._lock = self.threads.lock()
        if self.at_lines:
            self.threads.switch_at_lines("storage/log.py", "storage/durability.py")
        return log

    def settle(self, end_min: int | None) -> None:
        """Open the log and compare; the model then holds what was found."""
        log = self.open()
        self.cut_hole()
        self.model.resolve(log, check(log, self.model, end_min))

    def cut_hole(self) -> None:
        """Where a sync failed and power was lost, bytes may be missing before good batches.

        Such a hole is no torn end but reported as damage, because the checkpoint may be too low. It
        can only be where nothing was flushed, and there the owner may cut.
        """
        log, model = self.log, self.model
        assert log is not None
        if log.damaged and self.disk.dropped:
            hole = min(one.start for one in log.damaged)
            assert hole >= model.end_durable, "what was flushed is damaged"
            model.truncating(hole)
            log.truncate(hole)
        self.disk.dropped = False  # all that is there has been written again

    def between(self) -> None:
        """Before an operation of the disk: a sync may begin, or another thread go on."""
        if self.log is not None and self.threads.in_main:
            self.note_flushed()
            if self.schedule.random() < self.syncs_s:
                self.background_sync()
        self.threads.switch()

    def background_sync(self) -> None:
        if self.threads.others < SYNCS_MAX:
            self.threads.spawn("sync", self.sync_as_the_flusher_does)

    def sync_as_the_flusher_does(self) -> None:
        assert self.log is not None
        with suppress(RaftqError):
            self.log.begin_sync().run()

    def run(self, steps: int) -> None:
        """Random calls; what a full disk refuses must leave everything as it was."""
        for _ in range(steps):
            self.now_ms += self.rng.choice([0, 1, 50])
            name = self.rng.choice(self.names)
            self.story.append(f"{self.disk.operations + 1} {name}")
            try:
                getattr(self, name)()
            except DiskFull:
                self.refused()
            self.note_flushed()
            self.look()

    def look(self) -> None:
        log, model = self.log, self.model
        assert log is not None
        assert (log.start_offset, log.end_offset) == (model.start, model.end)
        assert log.flushed_offset <= log.end_offset

    def refused(self) -> None:
        log, model = self.log, self.model
        assert log is not None
        if log.failure is not None:
            raise StorageFailed("the log failed on a full disk") from log.failure
        model.flushed_max = None
        model.start_max = model.start

    # Calls

    def toggle_fault(self) -> None:
        disk, rng = self.disk, self.rng
        if "fail_sync" in self.faults and rng.random() < 0.2:
            disk.fail_sync = True
        if "fail_read" in self.faults and rng.random() < 0.2:
            disk.fail_read = True
        if "full_overwrites" in self.faults:
            disk.full_overwrites = not disk.full_overwrites
        if "capacity" in self.faults:
            room = rng.choice([None, 0, 2000, 9000])
            disk.capacity = None if room is None else disk.used_bytes() + room

    def reopen(self) -> None:
        self.threads.finish()
        with suppress(DiskFull):
            self.log.close()
        self.disk.full_overwrites, self.disk.capacity = False, None
        self.check_same(self.open())

    def rot(self) -> None:
        """A bit of one batch flips: found by who reads it, and put right with a good copy."""
        log, rng, model, disk = self.log, self.rng, self.model, self.disk
        if "rot" not in self.faults or not {"crash", "fail_sync"}.isdisjoint(self.faults):
            return
        if disk.fail_read or model.start == model.end:
            return
        offset = rng.randrange(model.start, model.end)
        good = log.read(offset, 1)
        segment, position = log.stored_at(offset)
        disk.flip_bit(segment.path, 8 * position + rng.randrange(8 * len(good)))
        hit = decode(good)
        found = [one.base_offset for one in log.batches(log.start_offset, skip_damaged=True)]
        assert hit.base_offset not in found
        assert [(one.start, one.end) for one in log.damaged] == [(hit.base_offset, hit.end_offset)]
        with pytest.raises(CorruptBatch):
            log.repair(hit.base_offset, good[:-1])
        with suppress(DiskFull):
            log.repair(hit.base_offset, good)
        if log.damaged:
            disk.full_overwrites, disk.capacity = False, None
            log.repair(hit.base_offset, good)
        check(log, model, end_min=model.end)


class ThreadedLog(Threaded):
    """The log of an embedded queue, which is compacted."""

    CALLS = (*(one for one in Workload.CALLS if "_sync" not in one[0]), *Threaded.BACKGROUND)
    new_model = Model


class ThreadedReplica(Threaded, ReplicaWorkload):
    """A follower's log, which is cut and begun anew."""

    CALLS = (*(one for one in ReplicaWorkload.CALLS if "_sync" not in one[0]), *Threaded.BACKGROUND)
    new_model = ReplicaModel

    def settle(self, end_min: int | None) -> None:
        log = self.open()
        self.cut_hole()
        settle(log, self.model, end_min)

    def refused(self) -> None:
        super().refused()
        self.model.reset_to = None

    def append_stamped(self) -> None:
        model, rng = self.model, self.rng
        batches = [self.batch() for _ in range(rng.randint(1, 6))]
        for batch in batches:
            self.epoch += rng.random() < 0.1
            stamp(batch, model.end, self.epoch)
            model.append(decode(batch), self.epoch)
        # After a failed write nobody knows how much of it is there. Otherwise the log does, even if
        # another thread's sync has failed meanwhile: some may have found no room.
        try:
            self.log.append_stamped(b"".join(batches))
        except DiskFull:
            self.note_end()
            raise
        self.note_end()
        model.written = model.end

    def note_end(self) -> None:
        assert self.log is not None
        self.model.cut(self.log.end_offset)
        self.epoch = max(self.log.last_epoch, 0)


def live(workload: Threaded, end_min: int | None) -> bool:
    """Open the log and use it; whether it ended as a process does that stops in order."""
    disk, threads = workload.disk, workload.threads
    try:
        workload.settle(end_min)
        workload.run(STEPS)
        disk.fail_read = disk.fail_sync = False
        workload.reopen()
        threads.finish()
    except (SimCrash, StorageError) as error:
        threads.finish()
        if workload.log is not None:
            workload.note_flushed()
        failing = disk.fail_read or disk.fail_sync
        broken = workload.log is None or workload.log.failure is not None
        if isinstance(error, StorageError) and not (failing or broken):
            raise
        return False
    return True


def run_lives(
    kind: type[ThreadedLog] | type[ThreadedReplica],
    seed: int,
    faults: Sequence[str],
    at_lines: bool = False,
) -> None:
    """
    1. A process lives with some kinds of faults; it ends by a crash, a failed log, or in order.
    2. The next one finds on the disk, after a power loss or as it is, what the model allows.
    """
    rng = Random(f"lives {seed}")
    model, disk, end_min = kind.new_model(), SimDisk(seed), None
    for life in range(LIVES):
        workload = kind(f"{seed} {life}", disk, model, faults)
        workload.at_lines = at_lines
        in_order = live(workload, end_min)
        if in_order or rng.random() < 0.5:
            disk = disk.kill()
        else:
            disk = disk.crash(rng)
            model.written = model.end_durable
        disk.capacity = None
        end_min = model.written


KINDS = pytest.mark.parametrize("kind", [ThreadedLog, ThreadedReplica])


@KINDS
@pytest.mark.parametrize("seed", seeds(20))
def test_syncs_of_other_threads_vouch_for_nothing_that_is_not_durable(
    seed: int, kind: type[ThreadedLog] | type[ThreadedReplica]
) -> None:
    """Nothing fails but the power: what goes wrong is a race."""
    with replayable("vouch_for_nothing", seed):
        run_lives(kind, seed, ["crash"])


@KINDS
@pytest.mark.parametrize("seed", seeds(20))
def test_what_was_flushed_survives_whatever_fails_while_others_sync(
    seed: int, kind: type[ThreadedLog] | type[ThreadedReplica]
) -> None:
    with replayable("whatever_fails", seed):
        run_lives(kind, seed, FAULTS)


@KINDS
@pytest.mark.parametrize("seed", seeds(5))
def test_threads_may_meet_at_any_line_of_the_log(
    seed: int, kind: type[ThreadedLog] | type[ThreadedReplica]
) -> None:
    with replayable("at_any_line", seed):
        run_lives(kind, seed, ["crash"], at_lines=True)


@KINDS
@pytest.mark.parametrize("seed", range(2))
def test_same_seed_gives_the_same_schedule(
    seed: int, kind: type[ThreadedLog] | type[ThreadedReplica]
) -> None:
    def run() -> tuple[list[str], list[str], list[str]]:
        workload = kind(f"{seed} same", SimDisk(seed), kind.new_model())
        live(workload, None)
        return workload.threads.trace, workload.disk.trace, workload.story

    assert run() == run()
