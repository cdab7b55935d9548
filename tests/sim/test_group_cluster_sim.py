"""Stream groups on whole clusters under random faults: one owner per partition, nothing skipped.

One seed is one simulation: real nodes, coordinators among them, real consumers that join and die, a
few seconds of faults; then everything heals, the group settles and reads to the end, and the
history is judged. `RAFTQ_SIM_SEED=17` runs one seed, `RAFTQ_SIM_SEEDS=1000` that many.
"""

import asyncio

import pytest
from clusterchecks import Invariants
from replay import replayable, seed_groups
from simcluster import SimCluster, make_plan
from simfaults import Faults
from simmembers import GroupWorkload
from simplan import unsettled
from simscenario import begin, new_cluster, run_cluster, until_sent
from test_queue_cluster_sim import HEAL_S, create_topics

from raftq.chaos.checkers import Rules, judge

SEEDS_PER_TEST = 5


async def scenario(cluster: SimCluster, workload: GroupWorkload, faults: Faults) -> None:
    """
    1. Start the nodes, create the topics, start producers and members.
    2. Faults, as the seed has them; members die and join, too.
    3. Heal. The group settles, and reads and stores up to the end of every partition.
    4. The history has no anomaly.
    """
    await begin(cluster, create_topics)
    cluster.consensus.churn = cluster.plan.churn
    workload.start()
    await asyncio.gather(faults.run(), workload.misfortune())
    cluster.heal()
    await until_sent(cluster, workload.producing)
    await cluster.until("every partition is whole", cluster.is_whole, HEAL_S)
    await cluster.until("the group is settled", workload.old_epochs_replicated, HEAL_S)
    await workload.until_drained(HEAL_S)
    await workload.stop()
    await cluster.until("every partition is whole still", cluster.is_whole, HEAL_S)
    anomalies = judge(workload.history, workload.final(), Rules(skew_s=workload.skew_s))
    assert not anomalies, "\n".join(map(str, anomalies))


def simulate(seed: int) -> SimCluster:
    cluster = new_cluster(unsettled(make_plan(seed)))
    invariants = Invariants(cluster)
    workload = GroupWorkload(cluster)
    faults = Faults(cluster)
    run_cluster(cluster, scenario(cluster, workload, faults), invariants, workload.history.counts)
    return cluster


@pytest.mark.parametrize("group", seed_groups(20, SEEDS_PER_TEST))
def test_groups_survive_the_faults_of_their_cluster(group: list[int]) -> None:
    for seed in group:
        with replayable("test_groups_survive_the_faults_of_their_cluster", seed):
            simulate(seed)
