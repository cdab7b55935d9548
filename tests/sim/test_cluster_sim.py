"""Whole clusters under random faults: nothing acknowledged is lost, and everything heals.

One seed is one simulation: three to six real nodes, real clients, and what simplan.py draws of
faults and of the world; then everything heals, all of it has to work again, and come to rest.
`RAFTQ_SIM_SEED=17` runs one seed, `RAFTQ_SIM_SEEDS=1000` that many, `RAFTQ_SIM_PROFILE=moves` all
of them in that profile; `RAFTQ_SIM_STORY=1` prints what happened. For thousands of seeds there is
soak.py.
"""

import asyncio
import os

import pytest
from clusterchecks import Invariants, check_replicas, is_readable
from history import judge
from replay import assert_same_trace_elsewhere, replayable, seed_groups
from simcluster import SimCluster, make_plan
from simfaults import Faults
from simoperators import topic_command
from simplan import swarm
from simrest import calm_time, come_to_rest
from simscenario import begin, new_cluster, run_cluster, until_sent
from simworkload import Workload

SEEDS_PER_TEST = 5
HEAL_S = 60.0


async def create_topics(cluster: SimCluster) -> None:
    node = cluster.nodes[1]
    assert node.node is not None
    assert node.process is not None
    for topic in cluster.plan.topics:
        command = topic_command(cluster, topic.name)
        await node.process.spawn(node.node.metadata.propose(command))


async def scenario(cluster: SimCluster, workload: Workload, faults: Faults) -> None:
    """
    1. Start the nodes, create the topics, start the clients.
    2. Faults, as the seed has them.
    3. Heal. Every send ends, every partition is whole again, every consumer reads everything.
    4. A calm time, in which nothing may fail; then all copies are the same, and the clients'
       history has no anomaly.
    5. With nobody asking for anything, everything comes to rest.
    """
    await begin(cluster, create_topics)
    cluster.consensus.churn = cluster.plan.churn
    workload.start()
    await faults.run()
    cluster.heal()
    await faults.operators.tidy()
    await until_sent(cluster, workload.producing)
    await cluster.until("every partition is whole", cluster.is_whole, HEAL_S)
    await cluster.until(
        "every consumer has read everything",
        # A replica may have fallen back again before it had caught up.
        lambda: workload.caught_up() and cluster.is_whole(),
        HEAL_S,
    )
    calm_at = cluster.loop.time()
    await calm_time(cluster, workload)
    await cluster.until(
        "every copy is complete and can be read",
        lambda: workload.caught_up() and cluster.is_whole() and is_readable(cluster),
        HEAL_S,
    )
    check_replicas(cluster)
    since = dict.fromkeys(cluster.deleted, calm_at)
    final, repeats = workload.final(), workload.repeats()
    anomalies = judge(cluster.history, final, workload.starts(), since, repeats)
    assert not anomalies, "\n".join(map(str, anomalies))
    cluster.forgotten = sum(
        partition_log.producers.forgotten
        for node in cluster.nodes.values()
        for copy in (() if node.node is None else node.node.partitions)
        for partition_log in copy.logs
    )
    await come_to_rest(cluster)


def simulate(seed: int, profile: str | None = None) -> SimCluster:
    profile = profile or os.environ.get("RAFTQ_SIM_PROFILE")
    cluster = new_cluster(swarm(make_plan(seed), profile))
    invariants = Invariants(cluster)
    workload = Workload(cluster, invariants)
    faults = Faults(cluster)
    run_cluster(cluster, scenario(cluster, workload, faults), invariants)
    return cluster


@pytest.mark.parametrize("group", seed_groups(60, SEEDS_PER_TEST))
def test_a_cluster_survives_its_faults(group: list[int]) -> None:
    for seed in group:
        with replayable("test_a_cluster_survives_its_faults", seed):
            simulate(seed)


async def nobody_gets_to_the_controller(cluster: SimCluster, refuses: bool) -> None:
    """
    1. Nobody can connect to the controller any more, though its Raft has a majority.
    2. It takes itself for the one at fault: another one controls, no other node is ever fenced,
       and what it led is led by others.
    3. When it can be reached again, everything is whole.
    """
    await begin(cluster, create_topics)
    consensus, began = cluster.consensus, cluster.loop.time()
    shut = consensus.leader
    assert shut is not None
    cluster.network.shut(cluster.nodes[shut].machine.name, refuses)
    replaced_s = 0.0
    while cluster.loop.time() < began + 12.0:
        await asyncio.sleep(0.05)
        alive = [one for one, node in consensus.state.nodes.items() if node.alive]
        assert set(alive) | {shut} == set(cluster.nodes), f"fenced at {cluster.loop.time()}"
        if any(one.leader == shut for _, _, one in consensus.state.all_partitions()):
            replaced_s = cluster.loop.time() - began
    assert consensus.leader != shut
    assert replaced_s < 4.5
    cluster.network.heal_all()
    await cluster.until("every partition is whole", cluster.is_whole, HEAL_S)


@pytest.mark.parametrize("refuses", [True, False], ids=["refuses", "is silent"])
@pytest.mark.parametrize("seed", range(10))
def test_a_controller_that_nobody_can_connect_to_gives_way(seed: int, refuses: bool) -> None:
    cluster = SimCluster(make_plan(seed))
    invariants = Invariants(cluster)
    cluster.run(nobody_gets_to_the_controller(cluster, refuses), invariants.after_turn)
    assert not cluster.bugs, cluster.bugs


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    """Also in another process, where sets and dicts of strings have another order."""
    profile = "raft" if seed == 2 else "mixed"
    mine = simulate(seed, profile).loop.trace_hash()
    assert simulate(seed, profile).loop.trace_hash() == mine
    assert_same_trace_elsewhere(f"simulate({seed}, {profile!r})", "test_cluster_sim", mine)


def test_different_seeds_give_different_traces() -> None:
    assert simulate(1).loop.trace_hash() != simulate(2).loop.trace_hash()
