"""Clusters under random loss, delay, reorder, reconnects, crashes at writes and full stops."""

import hashlib

import pytest
from raftsim import Sim
from replay import replayable, seeds
from simdisk import SimDisk


def disturb(sim: Sim) -> None:
    """One fault, or the end of one."""
    rng = sim.rng_faults
    kind = rng.choice(
        [
            "loss",
            "calm",
            "cut",
            "mend",
            "flap",
            "crash",
            "kill",
            "crash_at",
            "start",
            "all",
            "pause",
            "abdicate",
        ]
    )
    one, other = rng.sample(sim.ids, 2)
    pair = (min(one, other), max(one, other))
    if kind == "loss":
        sim.loss = rng.choice([0.02, 0.1, 0.3])
        sim.duplicates = rng.choice([0.0, 0.1])
        sim.reorder = rng.choice([0.0, 0.1])
    elif kind == "calm":
        sim.loss = sim.duplicates = sim.reorder = 0.0
    elif kind == "cut":
        sim.cut.add(pair)
        if rng.random() < 0.7:  # otherwise the connection stays and only new ones are refused
            sim.disconnect(*pair)
    elif kind == "mend":
        sim.cut.discard(pair)
    elif kind == "flap":
        sim.disconnect(*pair)
    elif kind in ("crash", "kill") and one in sim.up:
        sim.crash(one, power=kind == "crash")
    elif kind == "crash_at" and one in sim.up:
        sim.disks[one].crash_at = sim.disks[one].operations + rng.randint(1, 60)
    elif kind == "abdicate" and (leader := sim.leader()) is not None:
        sim.nodes[leader].abdication_asked = True
    elif kind == "all":
        for node in sim.ids:
            if node in sim.up:
                sim.crash(node, power=rng.random() < 0.5)
    if kind in ("start", "all"):
        for node in sim.ids:
            if node not in sim.up:
                sim.start(node)
                if rng.random() < 0.2 and node in sim.up:
                    sim.disks[node].crash_at = sim.disks[node].operations + rng.randint(1, 20)
    for a in sim.ids:
        for b in sim.ids:
            if a < b:
                sim.reconnect(a, b)


def run(seed: int) -> Sim:
    sim = Sim(seed, size=5 if seed % 5 == 0 else 3)
    sim.run(2.0, work=20)
    for _ in range(25):
        disturb(sim)
        sim.run(sim.rng_faults.choice([0.1, 0.5, 1.5]), work=40)
    sim.verdict()
    return sim


@pytest.mark.parametrize("seed", seeds(40))
def test_no_acknowledged_command_is_lost_or_applied_twice_under(seed: int) -> None:
    with replayable("applied_twice_under", seed):
        sim = run(seed)
        assert sim.acknowledged, "the cluster did something"


def test_the_same_seed_gives_the_same_trace() -> None:
    traces = [hashlib.sha256("\n".join(run(3).trace).encode()).hexdigest() for _ in range(2)]
    assert traces[0] == traces[1]


def test_the_schedules_reach_compaction_snapshots_and_crashes() -> None:
    sims = [run(seed) for seed in (1, 2, 4)]
    assert sum(sim.crashes for sim in sims) > 5
    assert any(" install_snapshot" in line for sim in sims for line in sim.trace)
    assert all(node.journal.base_index > 1 for sim in sims for node in sim.nodes.values())


@pytest.mark.parametrize("seed", seeds(5))
def test_a_voter_that_lost_its_disk_is_brought_back_without_loss(seed: int) -> None:
    sim = Sim(seed)
    sim.run(4.0, work=40)
    victim = sim.rng_faults.choice(sim.ids)
    sim.crash(victim)
    sim.disks[victim] = SimDisk(seed)
    sim.terms[victim] = 0
    sim.run(1.0, work=40)
    sim.start(victim)
    assert not sim.nodes[victim].journal.may_vote
    sim.run(2.0, work=40)
    assert sim.nodes[victim].journal.may_vote
    sim.verdict()
