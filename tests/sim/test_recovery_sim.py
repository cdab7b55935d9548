"""The last copy in sync loses its disk, again and again: the longest of the others always leads.

Records are lost here, by what is done to them: what only one disk had is gone with it. But nothing
that another copy still has, every partition comes back by itself, and all copies are the same then.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from clusterchecks import check_replicas
from replay import replayable, seeds
from simcluster import WALL_MS, SimCluster, make_plan

from raftq.client.common.errors import RaftqError
from raftq.client.producer.producer import Producer
from raftq.cluster.metadata.commands import CreateTopic, TellEnds
from raftq.cluster.metadata.state import PartitionState

TOPIC = "t"
PARTITIONS = 2
ROUNDS = 3


class Recoveries:
    """Looks at every election that ends a recovery."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.seen = 0
        self._before: dict[int, PartitionState] = {}
        cluster.consensus.on_decided = self.check

    def check(self) -> None:
        topic = self.cluster.consensus.state.topics.get(TOPIC)
        if topic is None:
            return
        told = isinstance(self.cluster.consensus.entries[-1].command, TellEnds)
        for number, one in enumerate(topic.partitions):
            before = self._before.get(number)
            if told and before is not None and before.recovery is not None and one.leader:
                self.seen += 1
                self._check_longest(number, before, one)
            self._before[number] = one

    def _check_longest(self, number: int, before: PartitionState, one: PartitionState) -> None:
        ends: dict[int, tuple[int, int]] = {}
        assert before.recovery is not None
        for node_id in before.recovery.asked:
            copy = self.cluster.nodes[node_id].copy_of((TOPIC, number))
            if copy is not None:
                ends[node_id] = (max(copy.log.last_epoch, 0), copy.log.end_offset)
        leader = one.leader
        assert leader is not None
        assert one.isr == (leader,), one
        if leader in ends:  # it may have died since it told
            assert ends[leader] == max(ends.values()), (before, one, ends)


async def produce(cluster: SimCluster, stop: asyncio.Event) -> None:
    producer = Producer(
        cluster.plan.bootstrap,
        name="producer",
        connect_ms=1_000,
        request_ms=3_000,
        rng=Random(cluster.plan.seed),
        wall_ms=lambda: WALL_MS + int(cluster.loop.time() * 1000),
        delivery_timeout_ms=2_000,
        max_block_ms=2_000,
        bootstrap_ms=100_000,
    )
    number = 0
    with suppress(RaftqError):  # at its end it tells of what was not delivered
        async with producer:
            while not stop.is_set():
                number += 1
                with suppress(RaftqError):  # nobody leads; the next one may get through
                    await producer.send(TOPIC, b"%d" % number, partition=number % PARTITIONS)
                await asyncio.sleep(0.1)


async def lose_the_last(cluster: SimCluster, rng: Random) -> None:
    """All copies of a partition but its leader's die, one after the other; then that disk."""
    one = cluster.consensus.state.topics[TOPIC].partitions[rng.randrange(PARTITIONS)]
    last = one.leader
    if last is None:
        return
    for other in one.replicas:
        if other != last:
            cluster.nodes[other].kill(power=rng.random() < 0.5)
            await asyncio.sleep(rng.uniform(0.1, 4.0))
    cluster.nodes[last].kill(wipe=True)
    back = list(one.replicas)
    rng.shuffle(back)
    for node_id in back:
        await asyncio.sleep(rng.choice((0.0, 0.3, 3.0)))
        node = cluster.nodes[node_id]
        node.start()
        if rng.random() < 0.25:
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            node.kill(wipe=rng.random() < 0.3)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            node.start()


async def scenario(cluster: SimCluster) -> None:
    rng = Random(f"recovery {cluster.plan.seed}")
    for node in cluster.nodes.values():
        node.start()
    await cluster.until("all nodes serve", cluster.is_whole, 30)
    first = cluster.nodes[1]
    assert first.node is not None
    assert first.process is not None
    command = CreateTopic(TOPIC, PARTITIONS, 3, {"min_insync": 1})
    await first.process.spawn(first.node.metadata.propose(command))
    await cluster.until("the topic is there", cluster.is_whole, 30)
    stop = asyncio.Event()
    producing = cluster.client("producer").spawn(produce(cluster, stop))
    for _ in range(ROUNDS):
        await asyncio.sleep(rng.uniform(0.5, 6.0))
        await lose_the_last(cluster, rng)
    cluster.heal()
    await cluster.until("every partition is whole", cluster.is_whole, 60)
    stop.set()
    await cluster.until("the producer has ended", producing.done, 60)
    producing.result()
    await cluster.until("every partition is whole", cluster.is_whole, 60)
    check_replicas(cluster)


def simulate(seed: int) -> int:
    cluster = SimCluster(replace(make_plan(seed), nodes=5))
    recoveries = Recoveries(cluster)
    cluster.run(scenario(cluster), lambda: None)
    assert not cluster.bugs, cluster.bugs
    assert not cluster.complaints.found, cluster.complaints.found
    assert not cluster.loop.unhandled, cluster.loop.unhandled
    return recoveries.seen


@pytest.mark.parametrize("seed", seeds(6))
def test_the_longest_copy_leads_whenever_the_last_disk_is_lost(seed: int) -> None:
    with replayable("test_the_longest_copy_leads_whenever_the_last_disk_is_lost", seed):
        assert simulate(seed), "no copies were compared"
