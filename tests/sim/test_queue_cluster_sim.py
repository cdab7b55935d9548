"""Queues on whole clusters under random faults: one holder per record, one end, none forgotten.

One seed is one simulation: real nodes, real producers, workers that do everything a worker can do,
a few seconds of faults in which nodes and workers die; then everything heals, the workers drain the
queues, and the history is judged. `RAFTQ_SIM_SEED=17` runs one seed, `RAFTQ_SIM_SEEDS=1000` that
many; `RAFTQ_SIM_STORY=1` prints what happened.
"""

import asyncio
import os
import sys

import pytest
from clusterchecks import Invariants
from replay import replayable, seed_groups
from simcluster import SimCluster, make_plan
from simfaults import Faults
from simplan import unsettled
from simqueues import QueueWorkload

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
    for node in cluster.nodes.values():
        node.start()
    await cluster.until("all nodes serve", cluster.is_whole, 30)
    await create_topics(cluster)
    await cluster.until("the topics are there", cluster.is_whole, 30)
    cluster.consensus.churn = cluster.plan.churn
    workload.start()
    await asyncio.gather(faults.run(), workload.misfortune())
    cluster.heal()
    await cluster.until(
        "every send has ended", lambda: all(one.done() for one in workload.producing), 200
    )
    for one in workload.producing:
        one.result()
    await cluster.until("every partition is whole", cluster.is_whole, HEAL_S)
    # A record that was due a moment ago is so only now, by a clock that is behind.
    await workload.until_drained(HEAL_S + workload.skew_s)
    await workload.stop()
    await cluster.until("every partition is whole still", cluster.is_whole, HEAL_S)
    anomalies = judge(workload.history, workload.final(), Rules(skew_s=workload.skew_s))
    assert not anomalies, "\n".join(map(str, anomalies))


def simulate(seed: int) -> SimCluster:
    cluster = SimCluster(unsettled(make_plan(seed)))
    if "RAFTQ_SIM_STORY" in os.environ:
        cluster.loop.story = []
    invariants = Invariants(cluster)
    workload = QueueWorkload(cluster)
    faults = Faults(cluster)
    try:
        cluster.run(scenario(cluster, workload, faults), invariants.after_turn)
    finally:
        if cluster.loop.story is not None:
            sys.stdout.write("\n".join(cluster.loop.story) + "\n")
            sys.stdout.write(f"{workload.history.counts()}\n")
    assert not cluster.bugs, cluster.bugs
    assert not cluster.complaints.found, cluster.complaints.found
    assert not cluster.loop.unhandled, cluster.loop.unhandled
    return cluster


@pytest.mark.parametrize("group", seed_groups(40, SEEDS_PER_TEST))
def test_queues_survive_the_faults_of_their_cluster(group: list[int]) -> None:
    for seed in group:
        with replayable("test_queues_survive_the_faults_of_their_cluster", seed):
            simulate(seed)


def test_the_same_seed_gives_the_same_trace() -> None:
    assert simulate(1).loop.trace_hash() == simulate(1).loop.trace_hash()
