"""A replica's log through power losses and kills at every operation of the disk.

On top of logmodel's workload the log gets what a follower does to it: batches stamped elsewhere,
cuts, resets to another offset, and snapshots of its producers. What comes back is a first part of
one history, the old or the new, never of both; and a snapshot never tells of batches that are gone.
"""

from copy import deepcopy
from random import Random

import pytest
from logmodel import DIRECTORY, Model, Workload, check
from replay import points, replayable, seeds
from simdisk import SimCrash, SimDisk

from raftq.client.wire.batch import BatchProducer, decode, encode, stamp
from raftq.node.storage.log import Log
from raftq.node.storage.producer_files import load_newest, rebuild, remove_above, save
from raftq.node.storage.producers import Producers

STEPS = 25
POINTS_MAX = 50


class ReplicaModel(Model):
    """While a reset runs, `reset_to` is the other outcome: empty, at that offset."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.start = self.start_durable = self.start_max = start
        self.end = self.end_durable = self.written = start
        self.ends = [start]
        self.reset_to: int | None = None


class ReplicaWorkload(Workload):
    CALLS = (
        ("append_stamped", 14),
        ("append_many", 3),
        ("sync", 4),
        ("begin_sync", 2),
        ("finish_sync", 3),
        ("roll", 1),
        ("truncate", 3),
        ("truncate_prefix", 1),
        ("retain", 1),
        ("reset", 2),
        ("save_producers", 2),
        ("reopen", 1),
    )

    def batch(self) -> bytearray:
        """With sequences that say which batch it is."""
        rng = self.rng
        count = rng.choice([1, 1, 2, 8])
        values = [rng.randbytes(rng.choice([0, 5, 40, 300, 1200])) for _ in range(count)]
        producer = BatchProducer(rng.randrange(-1, 3), 0, rng.getrandbits(32))
        lane = rng.choice([0, 2, 2, 4])
        return encode(values, timestamps=self.now_ms, lane=lane, producer=producer)

    def append_stamped(self) -> None:
        model, rng = self.model, self.rng
        batches = [self.batch() for _ in range(rng.randint(1, 6))]
        for batch in batches:
            self.epoch += rng.random() < 0.1
            stamp(batch, model.end, self.epoch)
            model.append(decode(batch), self.epoch)
        facts = self.log.append_stamped(b"".join(batches))
        assert len(facts) == len(batches)
        assert self.log.end_offset == model.end
        assert self.log.last_epoch == self.epoch
        model.written = model.end

    def truncate(self) -> None:
        super().truncate()
        self.epoch += 1
        check_producers(self.log)

    def reset(self) -> None:
        model, rng = self.model, self.rng
        near = rng.randint(0, model.end + 40)
        start = rng.choice([0, model.start, model.end, near, near])
        remove_above(self.disk, DIRECTORY, -1)
        model.truncating(model.start)
        model.reset_to = start
        self.log.reset(start)
        assert (self.log.start_offset, self.log.end_offset) == (start, start)
        model.__init__(start)
        self.epoch = rng.randint(0, self.epoch)

    def save_producers(self) -> None:
        producers = load_newest(self.disk, DIRECTORY, self.log.end_offset)
        rebuild(self.log, producers)
        save(producers, self.disk, DIRECTORY)


def check_producers(log: Log) -> None:
    """Snapshot and log together know every batch that the log alone tells of, where it is."""
    whole, found = Producers(log.start_offset), load_newest(log.disk, DIRECTORY, log.end_offset)
    rebuild(log, whole)
    rebuild(log, found)
    newest: dict[int, list[tuple[int, int, int]]] = {}
    for batch in log.batches(log.start_offset):
        if batch.producer_id >= 0:
            own = newest.setdefault(batch.producer_id, [])
            own.append((batch.base_sequence, batch.span, batch.base_offset))
    for name, batches in newest.items():
        for sequence, count, base in batches[-5:]:
            assert whole.check(name, 0, sequence, count) == base
            assert found.check(name, 0, sequence, count) == base
    for name in range(3):
        if name in found:
            last = found._known[name].batches[-1][2]
            assert last < log.end_offset, "a snapshot tells of a batch that is gone"
            if name in whole:
                assert last == whole._known[name].batches[-1][2]


def check_epochs(log: Log, model: Model) -> None:
    expected: list[tuple[int, int]] = []
    for offset in range(log.start_offset, log.end_offset):
        epoch = model.rows[offset][5]
        if not expected or expected[-1][0] != epoch:
            expected.append((epoch, offset))
    assert log.epochs == expected
    if expected:
        assert log.last_epoch == expected[-1][0]


def settle(log: Log, model: ReplicaModel, end_min: int | None = None) -> None:
    """Compare; the model then holds what was found."""
    if model.reset_to is not None and log.start_offset == log.end_offset == model.reset_to:
        model.__init__(model.reset_to)
        end_min = None
    model.reset_to = None
    model.resolve(log, check(log, model, end_min))
    check_epochs(log, model)
    check_producers(log)


def run_until(seed: int, crash_at: int | None = None) -> ReplicaWorkload:
    workload = ReplicaWorkload(seed, SimDisk(seed), ReplicaModel())
    workload.disk.crash_at = crash_at
    try:
        workload.run(STEPS)
    except SimCrash:
        workload.note_flushed()
    return workload


def reopen(image: SimDisk, model: Model, seed: int, end_min: int | None = None) -> ReplicaWorkload:
    workload = ReplicaWorkload(f"{seed} reopened", image.kill(), deepcopy(model))
    log = workload.open()
    workload.operations_of_open = workload.disk.operations
    settle(log, workload.model, end_min)
    return workload


def crash_in_recovery(image: SimDisk, model: Model, seed: int, operations: int) -> None:
    for point in range(1, operations + 1):
        workload = ReplicaWorkload(f"{seed} reopened", image.kill(), deepcopy(model))
        workload.disk.crash_at = point
        with pytest.raises(SimCrash):
            workload.open()
        reopen(workload.disk.crash(Random(f"recovery {seed} {point}")), model, seed)


@pytest.mark.parametrize("seed", seeds(8))
def test_replica_equals_its_model_without_crashes(seed: int) -> None:
    with replayable("replica_equals", seed):
        workload = ReplicaWorkload(seed, SimDisk(seed), ReplicaModel())
        for _ in range(20):
            workload.run(8)
            workload.check_same(workload.log)
            check_epochs(workload.log, workload.model)
            check_producers(workload.log)


@pytest.mark.parametrize("seed", seeds(8))
def test_replica_keeps_one_history_through_a_power_loss_at_every_operation(seed: int) -> None:
    """
    1. Crash at one operation, open what survived: a first part of one history, all that was
       reported as flushed in it, and no snapshot of another.
    2. The same with a second crash at every operation of the reopen.
    3. The log goes on: more random calls, a clean reopen.
    """
    for point in points(run_until(seed).disk.operations, seed, POINTS_MAX):
        with replayable("replica_keeps_one", seed, point):
            workload = run_until(seed, point)
            image = workload.disk.crash(Random(f"crash {seed} {point}"))
            after = reopen(image, workload.model, seed)
            crash_in_recovery(image, workload.model, seed, after.operations_of_open)
            after.run(6)
            after.reopen()


@pytest.mark.parametrize("seed", seeds(4))
def test_killed_replica_loses_nothing_written(seed: int) -> None:
    for point in points(run_until(seed).disk.operations, seed, POINTS_MAX):
        with replayable("killed_replica", seed, point):
            workload = run_until(seed, point)
            after = reopen(workload.disk.kill(), workload.model, seed, workload.model.written)
            rng = Random(f"after kill {seed} {point}")
            reopen(after.disk.crash(rng), after.model, seed)
            after.run(6)
            after.reopen()


@pytest.mark.parametrize("seed", seeds(20))
def test_replica_lives_through_a_chain_of_crashes_and_kills(seed: int) -> None:
    rng = Random(f"chain {seed}")
    model, disk, end_min = ReplicaModel(), SimDisk(seed), None
    for generation in range(12):
        with replayable("replica_lives", seed):
            workload = ReplicaWorkload(f"{seed} {generation}", disk, model)
            disk.crash_at = rng.randint(1, 120)
            try:
                settle(workload.open(), model, end_min)
                workload.run(15)
            except SimCrash:
                workload.note_flushed()
            if rng.random() < 0.6:
                disk = disk.crash(rng)
                model.written = model.end_durable
            else:
                disk = disk.kill()
            end_min = model.written
