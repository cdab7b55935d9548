"""Partitions that remember few producers, and not for long: who is forgotten is told so.

Directed runs of whole clusters. Each asserts that producers were forgotten, so that what they show
is not shown for nothing.
"""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from simcluster import SimCluster
from simplan import World
from test_cluster_sim import simulate
from test_replica_versions import KEY, Sending, begin, partition, quiet_plan

from raftq.client.common.errors import OutOfOrderSequence


def forgetful(seed: int, **world: int) -> SimCluster:
    return SimCluster(replace(quiet_plan(seed, nodes=3), world=World(**world)))  # type: ignore[arg-type]


def forgotten(cluster: SimCluster) -> dict[int, int]:
    """How many each copy has forgotten."""
    copies = {node_id: node.copy_of(KEY) for node_id, node in cluster.nodes.items()}
    return {one: copy.data.producers.forgotten for one, copy in copies.items() if copy is not None}


def kept(cluster: SimCluster) -> Counter[bytes]:
    """How often each record is in the leader's log."""
    leader = partition(cluster).leader
    assert leader is not None
    copy = cluster.nodes[leader].copy_of(KEY)
    assert copy is not None
    return Counter(value for one in copy.log.batches(0) for value in one.values())


async def two_take_turns(cluster: SimCluster) -> None:
    """Each makes the partition forget the other; both go on, and nothing is there twice."""
    await begin(cluster, min_insync=2)
    senders = [Sending(cluster, name, pace=0.3) for name in ("one", "other")]
    await asyncio.sleep(8.0)
    for sending in senders:
        await sending.stop()
        assert not sending.failed, sending.failed
    counts = forgotten(cluster)
    assert len(counts) == 3
    assert min(counts.values()) > 5, counts
    sent = [value for sending in senders for value in sending.acknowledged]
    assert kept(cluster) == Counter(sent)


@pytest.mark.parametrize("seed", range(2))
def test_a_producer_whose_place_another_took_goes_on(seed: int) -> None:
    cluster = forgetful(seed, producers_max=1)
    cluster.run(two_take_turns(cluster), lambda: None)
    assert not cluster.bugs, cluster.bugs


async def one_is_idle(cluster: SimCluster) -> None:
    """It is forgotten between any two of its records, which are there once all the same."""
    await begin(cluster, min_insync=2)
    sending = Sending(cluster, "one", pace=4.0)
    await asyncio.sleep(21.0)
    counts = forgotten(cluster)
    await sending.stop()
    assert not sending.failed, sending.failed
    assert min(counts.values()) > 2, counts
    assert kept(cluster) == Counter(sending.acknowledged.keys())


@pytest.mark.parametrize("seed", range(2))
def test_a_producer_that_was_idle_for_too_long_goes_on(seed: int) -> None:
    cluster = forgetful(seed, producer_idle_ms=500)
    cluster.run(one_is_idle(cluster), lambda: None)
    assert not cluster.bugs, cluster.bugs


async def answers_are_lost(cluster: SimCluster) -> None:
    """
    1. What one producer has written is not answered, because nothing gets to it any more.
    2. Meanwhile another one takes its place.
    3. It sends its records again. The partition cannot tell whether it has them, and says so:
       the outcome is unknown, and they are not there twice.
    """
    await begin(cluster, min_insync=2)
    leader = partition(cluster).leader
    assert leader is not None
    name = cluster.nodes[leader].machine.name
    one = Sending(cluster, "one", pace=0.5)
    await asyncio.sleep(3.0)
    assert one.acknowledged
    cluster.network.cut(name, "one")
    await asyncio.sleep(0.7)
    other = Sending(cluster, "other", pace=0.5)
    await asyncio.sleep(5.0)
    await other.stop()
    cluster.network.heal_all()
    await asyncio.sleep(5.0)
    await one.stop()
    assert min(forgotten(cluster).values()) > 0
    unknown = [error for error in one.failed if isinstance(error, OutOfOrderSequence)]
    assert unknown
    assert all(error.outcome == "unknown" for error in one.failed), one.failed
    counts = kept(cluster)
    assert max(counts.values()) == 1, counts
    assert set(counts) >= {*one.acknowledged, *other.acknowledged}


def test_what_a_forgotten_producer_sends_again_has_an_unknown_outcome() -> None:
    cluster = forgetful(1, producers_max=1)
    cluster.run(answers_are_lost(cluster), lambda: None)
    assert not cluster.bugs, cluster.bugs


def test_random_runs_forget_producers() -> None:
    counts = [simulate(seed, "forgets").forgotten for seed in range(20, 24)]
    assert min(counts) > 0, counts
