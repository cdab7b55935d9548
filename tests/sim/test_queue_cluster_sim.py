"""Queues on whole clusters under random faults: one holder per record, one end, none forgotten.

One seed is one simulation: real nodes, real producers, workers that do everything a worker can do,
a few seconds of faults in which nodes and workers die; then everything heals, the workers drain the
queues, and the history is judged. `RAFTQ_SIM_SEED=17` runs one seed, `RAFTQ_SIM_SEEDS=1000` that
many; `RAFTQ_SIM_STORY=1` prints what happened.
"""

import pytest
from replay import replayable, seed_groups
from simcluster import SimCluster
from simqueues import QueueWorkload
from simscenario import simulate_queues

SEEDS_PER_TEST = 5


def simulate(seed: int) -> SimCluster:
    return simulate_queues(seed, QueueWorkload)


@pytest.mark.parametrize("group", seed_groups(40, SEEDS_PER_TEST))
def test_queues_survive_the_faults_of_their_cluster(group: list[int]) -> None:
    for seed in group:
        with replayable("test_queues_survive_the_faults_of_their_cluster", seed):
            simulate(seed)


def test_the_same_seed_gives_the_same_trace() -> None:
    assert simulate(1).loop.trace_hash() == simulate(1).loop.trace_hash()
