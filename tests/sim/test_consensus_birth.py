"""How a cluster begins, and that voters with lost disks never begin a second one."""

from collections.abc import Callable

import pytest
from raftsim import Sim
from simdisk import SimDisk

from raftq.cluster.raft.journal import FIRST_INDEX


def run_until(sim: Sim, what: Callable[[], bool], seconds: float = 10.0) -> None:
    end = sim.now + seconds
    while not what():
        assert sim.now < end, "it did not come so far"
        sim.run(0.001)


def wipe(sim: Sim, one: str) -> None:
    sim.disks[one] = SimDisk(sim.seed)
    sim.terms[one] = 0


@pytest.mark.parametrize("seed", range(20))
def test_two_voters_go_on_when_the_first_leader_dies_while_only_one_knows_it(seed: int) -> None:
    """
    1. the first leader is elected and cut off from one voter, in most runs before it speaks to it
    2. the other one stores its first entry and hears that it is committed
    3. the leader dies for good; the two that are left can reach each other
    """
    sim = Sim(seed)
    run_until(sim, lambda: all(node.journal.may_vote for node in sim.nodes.values()))
    run_until(sim, lambda: sim.leader() is not None)
    leader = sim.leader()
    assert leader is not None
    near, far = sorted(sim.up - {leader})
    if seed % 2:
        near, far = far, near
    sim.cut.add((min(leader, far), max(leader, far)))
    sim.disconnect(leader, far)
    run_until(sim, lambda: sim.nodes[near].commit > FIRST_INDEX)
    sim.crash(leader)
    run_until(sim, lambda: sim.leader() is not None)
    assert sim.leader() in (near, far)
    sim.verdict()


@pytest.mark.parametrize("seed", range(40))
def test_a_cluster_begins_whatever_crashes_in_its_first_moments(seed: int) -> None:
    sim = Sim(seed, size=5 if seed % 4 == 0 else 3)
    for _ in range(8):
        for one in sim.ids:
            if sim.rng_faults.random() < 0.4:
                operations = sim.disks[one].operations
                sim.disks[one].crash_at = operations + sim.rng_faults.randint(1, 6)
        sim.run(sim.rng_faults.choice([0.3, 0.7, 1.2]))
        sim.heal()
    sim.verdict()


@pytest.mark.parametrize("seed", range(5))
def test_a_new_cluster_waits_for_all_its_voters(seed: int) -> None:
    sim = Sim(seed)
    sim.crash("c")
    wipe(sim, "c")
    sim.run(10.0)
    assert sim.leader() is None
    sim.verdict()


@pytest.mark.parametrize("seed", range(5))
def test_a_majority_of_voters_with_lost_disks_does_not_begin_anew(seed: int) -> None:
    sim = Sim(seed)
    sim.run(4.0, work=40)
    assert sim.acknowledged
    survivor = sim.rng_faults.choice(sim.ids)
    for one in sim.ids:
        sim.crash(one)
    for one in sim.ids:
        if one != survivor:
            wipe(sim, one)
            sim.start(one)
    sim.run(10.0)
    assert sim.leader() is None
    sim.start(survivor)
    sim.run(10.0)
    assert sim.leader() is None, "a person has to decide what is still to be believed"
