"""Stream groups on whole clusters under random faults: one owner per partition, nothing skipped.

One seed is one simulation: real nodes, coordinators among them, real consumers that join and die, a
few seconds of faults; then everything heals, the group settles and reads to the end, and the
history is judged. `RAFTQ_SIM_SEED=17` runs one seed, `RAFTQ_SIM_SEEDS=1000` that many.
"""

import pytest
from replay import replayable, seed_groups
from simcluster import SimCluster
from simmembers import GroupWorkload
from simscenario import simulate_queues

SEEDS_PER_TEST = 5


def simulate(seed: int) -> SimCluster:
    return simulate_queues(seed, GroupWorkload)


@pytest.mark.parametrize("group", seed_groups(20, SEEDS_PER_TEST))
def test_groups_survive_the_faults_of_their_cluster(group: list[int]) -> None:
    for seed in group:
        with replayable("test_groups_survive_the_faults_of_their_cluster", seed):
            simulate(seed)
