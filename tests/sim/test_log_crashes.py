"""The log against its model, through power losses and kills at every operation of the disk.

A random workload runs once to count the disk's operations, then once more for each of them, with
the crash there. What a crash may leave is the model's to say, see logmodel.py.
"""

from copy import deepcopy
from random import Random

import pytest
from logmodel import DIRECTORY, Model, Workload, check
from replay import points, replayable, seeds
from simdisk import SimCrash, SimDisk

STEPS = 25
POINTS_MAX = 150


def run_until(seed: int, crash_at: int | None = None, steps: int = STEPS) -> Workload:
    """The workload of this seed, up to the crash or to its end."""
    workload = Workload(seed, SimDisk(seed))
    workload.disk.crash_at = crash_at
    try:
        workload.run(steps)
    except SimCrash:
        workload.note_flushed()
    return workload


def reopen(image: SimDisk, model: Model, seed: int, end_min: int | None = None) -> Workload:
    """Open a copy of the disk and compare; the model then holds what was found."""
    workload = Workload(f"{seed} reopened", image.kill(), deepcopy(model))
    log = workload.open()
    workload.operations_of_open = workload.disk.operations
    workload.model.resolve(log, check(log, workload.model, end_min))
    return workload


def crash_in_recovery(image: SimDisk, model: Model, seed: int, operations: int) -> None:
    """Crash again at each operation of the reopen: that must cost nothing more."""
    for point in range(1, operations + 1):
        workload = Workload(f"{seed} reopened", image.kill(), model)
        workload.disk.crash_at = point
        with pytest.raises(SimCrash):
            workload.open()
        rng = Random(f"recovery {seed} {point}")
        reopen(workload.disk.crash(rng), model, seed)


@pytest.mark.parametrize("seed", seeds(12))
def test_log_equals_its_model_without_crashes(seed: int) -> None:
    with replayable("without_crashes", seed):
        workload = Workload(seed, SimDisk(seed))
        for _ in range(20):
            workload.run(8)
            workload.check_same(workload.log)
        workload.reopen()


@pytest.mark.parametrize("seed", seeds(12))
def test_flushed_records_survive_a_power_loss_at_every_operation(seed: int) -> None:
    """
    1. Crash at one operation of a random workload and open what survived.
    2. Everything reported as flushed is there, nothing that was never appended is.
    3. The log goes on: more random calls, a clean reopen.
    4. The same with a second crash at every operation of the reopen.
    """
    for point in points(run_until(seed).disk.operations, seed, POINTS_MAX):
        with replayable("power_loss_at_every", seed, point):
            workload = run_until(seed, point)
            image = workload.disk.crash(Random(f"crash {seed} {point}"))
            after = reopen(image, workload.model, seed)
            crash_in_recovery(image, workload.model, seed, after.operations_of_open)
            after.run(4)
            after.reopen()


@pytest.mark.parametrize("seed", seeds(8))
def test_killed_process_loses_nothing_written_and_reports_nothing_volatile(seed: int) -> None:
    """
    1. Kill the process at one operation; all its completed calls are there after a reopen.
    2. Lose power right after the reopen: what the reopen reported as flushed is still there.
    """
    for point in points(run_until(seed).disk.operations, seed, POINTS_MAX):
        with replayable("killed_process", seed, point):
            workload = run_until(seed, point)
            image = workload.disk.kill()
            after = reopen(image, workload.model, seed, end_min=workload.model.written)
            rng = Random(f"after kill {seed} {point}")
            reopen(after.disk.crash(rng), after.model, seed)
            crash_in_recovery(image, workload.model, seed, after.operations_of_open)
            after.run(4)
            after.reopen()


@pytest.mark.parametrize("seed", seeds(30))
def test_log_lives_through_a_chain_of_crashes_and_kills(seed: int) -> None:
    rng = Random(f"chain {seed}")
    model, disk, end_min = Model(), SimDisk(seed), None
    for generation in range(12):
        with replayable("chain_of_crashes", seed):
            workload = Workload(f"{seed} {generation}", disk, model)
            disk.crash_at = rng.randint(1, 120)
            try:
                log = workload.open()
                model.resolve(log, check(log, model, end_min))
                workload.run(15)
            except SimCrash:
                workload.note_flushed()
            if rng.random() < 0.6:
                disk = disk.crash(rng)
                model.written = model.end_durable
            else:
                disk = disk.kill()
            end_min = model.written


@pytest.mark.parametrize("seed", range(3))
def test_same_seed_gives_the_same_trace(seed: int) -> None:
    first, second = run_until(seed), run_until(seed)
    assert first.disk.trace == second.disk.trace
    assert first.story == second.story
    names = first.disk.list(DIRECTORY)
    assert names == second.disk.list(DIRECTORY)
    for name in names:
        path = f"{DIRECTORY}/{name}"
        assert first.disk.read_file(path, 1 << 20) == second.disk.read_file(path, 1 << 20)
