"""Queues on whole clusters under random faults: one holder per record, one end, none forgotten.

One seed is one simulation: real nodes, real producers, workers that do everything a worker can do,
a few seconds of faults in which nodes and workers die; then everything heals, the workers drain the
queues, and the history is judged. `RAFTQ_SIM_SEED=17` runs one seed, `RAFTQ_SIM_SEEDS=1000` that
many; `RAFTQ_SIM_STORY=1` prints what happened.
"""

import asyncio

import pytest
from clusterchecks import Invariants
from replay import replayable, seed_groups
from simcluster import SimCluster, make_plan
from simfaults import Faults
from simplan import unsettled
from simqueues import QueueWorkload
from simscenario import begin, new_cluster, run_cluster, until_sent

from raftq.chaos.checkers import Rules, judge
from raftq.cluster.metadata.commands import CreateTopic

SEEDS_PER_TEST = 5
HEAL_S = 60.0


async def create_topics(cluster: SimCluster) -> None:
    node = cluster.nodes[1]
    assert node.node is not None
    assert node.process is not None
    for topic in cluster.plan.topics:
        config = {
            "fsync": topic.fsync, "segment_bytes": topic.segment_bytes, "min_insync": 2,
            "backoff_ms": 300,
        }  # fmt: skip
        command = CreateTopic(topic.name, topic.partitions, 3, config)
        await node.process.spawn(node.node.metadata.propose(command))


async def scenario(cluster: SimCluster, workload: QueueWorkload, faults: Faults) -> None:
    """
    1. Start the nodes, create the topics, start producers and workers.
    2. Faults, as the seed has them; workers die, too.
    3. Heal. Every send ends, every partition is whole again, the workers drain every queue.
    4. The history has no anomaly.
    """
    await begin(cluster, create_topics)
    cluster.consensus.churn = cluster.plan.churn
    workload.start()
    await asyncio.gather(faults.run(), workload.misfortune())
    cluster.heal()
    await until_sent(cluster, workload.producing)
    await cluster.until("every partition is whole", cluster.is_whole, HEAL_S)
    # A record that was due a moment ago is so only now, by a clock that is behind.
    await workload.until_drained(HEAL_S + workload.skew_s)
    await workload.stop()
    await cluster.until("every partition is whole still", cluster.is_whole, HEAL_S)
    anomalies = judge(workload.history, workload.final(), Rules(skew_s=workload.skew_s))
    assert not anomalies, "\n".join(map(str, anomalies))


def simulate(seed: int) -> SimCluster:
    cluster = new_cluster(unsettled(make_plan(seed)))
    invariants = Invariants(cluster)
    workload = QueueWorkload(cluster)
    faults = Faults(cluster)
    run_cluster(cluster, scenario(cluster, workload, faults), invariants, workload.history.counts)
    return cluster


@pytest.mark.parametrize("group", seed_groups(40, SEEDS_PER_TEST))
def test_queues_survive_the_faults_of_their_cluster(group: list[int]) -> None:
    for seed in group:
        with replayable("test_queues_survive_the_faults_of_their_cluster", seed):
            simulate(seed)


def test_the_same_seed_gives_the_same_trace() -> None:
    assert simulate(1).loop.trace_hash() == simulate(1).loop.trace_hash()
