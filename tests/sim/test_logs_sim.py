"""Partitions with all their logs under random faults: what was replicated stays, everywhere.

The cluster simulation of test_cluster_sim.py with topics that are queues, from the beginning or at
some moment amid the faults, and owners that write to the other logs while clients write data.
"""

import asyncio

import pytest
from clusterchecks import Invariants, check_replicas
from history import judge
from replay import replayable, seed_groups
from simcluster import SimCluster, make_plan
from simfaults import Faults
from simlogs import Logs
from simplan import unsettled
from simscenario import begin, new_cluster, run_cluster, until_sent
from simworkload import Workload
from test_cluster_sim import HEAL_S, create_topics

SEEDS_PER_TEST = 5
FOUND = [300]
"""All nodes were killed before they had noted who they had registered as, and no controller
stayed: each took processes that waited for their predecessors' leases for nodes that do not get
there."""


async def scenario(cluster: SimCluster, workload: Workload, logs: Logs, faults: Faults) -> None:
    """
    1. Start the nodes and the clients; some topics are queues at once, others become some later.
    2. Faults, as the seed has them, while the owners write.
    3. Heal. Everything works: every log of every partition takes new entries.
    4. All copies are the same, nothing that was replicated is missing.
    """
    await begin(cluster, create_topics)
    cluster.consensus.churn = cluster.plan.churn
    workload.start()
    async with asyncio.TaskGroup() as group:
        for topic in cluster.plan.topics:
            delay_s = logs.rng.choice((0.0, logs.rng.uniform(0, cluster.plan.faults_s)))
            group.create_task(logs.enable(topic.name, delay_s))
        await faults.run()
        cluster.heal()
    await until_sent(cluster, workload.producing)
    await cluster.until("every partition is whole", cluster.is_whole, HEAL_S)
    before = logs.counts()
    assert before
    await cluster.until(
        "every log takes new entries",
        lambda: all(count > before[key] for key, count in logs.counts().items()),
        HEAL_S,
    )
    logs.writing = False
    await cluster.until(
        "all copies are complete",
        lambda: workload.caught_up() and logs.is_same() and cluster.is_whole(),
        HEAL_S,
    )
    check_replicas(cluster)
    logs.check_leaders()
    anomalies = judge(cluster.history, workload.final())
    assert not anomalies, "\n".join(map(str, anomalies))


def simulate(seed: int) -> tuple[SimCluster, Logs]:
    cluster = new_cluster(unsettled(make_plan(seed)))
    invariants = Invariants(cluster)
    logs = Logs(cluster)
    workload = Workload(cluster, invariants)
    faults = Faults(cluster)
    run_cluster(cluster, scenario(cluster, workload, logs, faults), invariants)
    return cluster, logs


@pytest.mark.parametrize("group", [FOUND, *seed_groups(40, SEEDS_PER_TEST)])
def test_logs_survive_the_faults_of_their_cluster(group: list[int]) -> None:
    for seed in group:
        with replayable("test_logs_survive_the_faults_of_their_cluster", seed):
            simulate(seed)


def test_owners_see_failovers_and_the_same_seed_gives_the_same_trace() -> None:
    cluster, logs = simulate(3)
    assert sum(map(len, logs.replicated.values())) > 50
    assert logs.cuts
    assert logs.epochs > len(logs.counts()) // 2, "some partition has had several leaders"
    assert simulate(3)[0].loop.trace_hash() == cluster.loop.trace_hash()
