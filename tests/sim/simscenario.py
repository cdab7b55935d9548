"""The parts that simulations of whole clusters have in common, and how they are run."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from clusterchecks import Invariants
from simcluster import SimCluster, make_plan
from simfaults import Faults
from simplan import Plan, unsettled
from simqueues import QueueWorkload

from raftq.chaos.checkers import Rules, judge
from raftq.cluster.metadata.commands import CreateTopic

HEAL_S = 60.0


def new_cluster(plan: Plan) -> SimCluster:
    """A cluster that keeps its story if RAFTQ_SIM_STORY is set."""
    cluster = SimCluster(plan)
    if "RAFTQ_SIM_STORY" in os.environ:
        cluster.loop.story = []
    return cluster


def run_cluster(
    cluster: SimCluster,
    main: Coroutine[Any, Any, None],
    invariants: Invariants,
    counts: Callable[[], object] | None = None,
) -> None:
    """Runs a scenario, prints its story if it is kept, and checks that no node has complained."""
    try:
        cluster.run(main, invariants.after_turn)
    finally:
        if cluster.loop.story is not None:
            sys.stdout.write("\n".join(cluster.loop.story) + "\n")
            if counts is not None:
                sys.stdout.write(f"{counts()}\n")
    assert not cluster.bugs, cluster.bugs
    assert not cluster.complaints.found, cluster.complaints.found
    assert not cluster.loop.unhandled, cluster.loop.unhandled


async def begin(
    cluster: SimCluster, create_topics: Callable[[SimCluster], Awaitable[None]]
) -> None:
    """Starts all nodes and creates the topics."""
    for node in cluster.nodes.values():
        node.start()
    await cluster.until("all nodes serve", cluster.is_whole, 30)
    await create_topics(cluster)
    await cluster.until("the topics are there", cluster.is_whole, 30)


async def until_sent(cluster: SimCluster, producing: Sequence["asyncio.Future[Any]"]) -> None:
    """Waits until every send has ended; raises the error of one that failed."""
    await cluster.until("every send has ended", lambda: all(task.done() for task in producing), 200)
    for task in producing:
        task.result()


async def create_queues(cluster: SimCluster) -> None:
    """Creates the topics of the plan, with a short backoff."""
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


async def judged_scenario(cluster: SimCluster, workload: QueueWorkload, faults: Faults) -> None:
    """
    1. Start the nodes, create the topics, start producers and workers or members.
    2. Faults, as the seed has them; workers or members die, too.
    3. Heal. Every send ends, every partition is whole again, and the workload is drained.
    4. The history has no anomaly.
    """
    await begin(cluster, create_queues)
    cluster.consensus.churn = cluster.plan.churn
    workload.start()
    await asyncio.gather(faults.run(), workload.misfortune())
    cluster.heal()
    await until_sent(cluster, workload.producing)
    await cluster.until("every partition is whole", cluster.is_whole, HEAL_S)
    await workload.drain(HEAL_S)
    await workload.stop()
    await cluster.until("every partition is whole still", cluster.is_whole, HEAL_S)
    anomalies = judge(workload.history, workload.final(), Rules(skew_s=workload.skew_s))
    assert not anomalies, "\n".join(map(str, anomalies))


def simulate_queues(seed: int, kind: type[QueueWorkload]) -> SimCluster:
    """Runs that scenario with a workload of this kind."""
    cluster = new_cluster(unsettled(make_plan(seed)))
    invariants = Invariants(cluster)
    workload = kind(cluster)
    main = judged_scenario(cluster, workload, Faults(cluster))
    run_cluster(cluster, main, invariants, workload.history.counts)
    return cluster
