"""The last copy in sync loses its disk, again and again: the longest of the others always leads.

Records are lost here, by what is done to them: what only one disk had is gone with it. But nothing
that another copy still has, every partition comes back by itself, and all copies are the same then.

One more loss is allowed: the last one in sync may have lost power, and with it its tail. It leads
with what it has, and longer copies are cut to that. But what it lacks is of its last second.
"""

import asyncio
import re
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from clusterchecks import check_replicas
from replay import replayable, seeds
from simcluster import WALL_MS, SimCluster, make_plan

from raftq.client.common.errors import RaftqError
from raftq.client.producer.producer import Producer
from raftq.cluster.metadata.commands import CreateTopic, RegisterNode, TellEnds
from raftq.cluster.metadata.state import PartitionState
from raftq.node.replication.replica import LogProgress

TOPIC = "t"
PARTITIONS = 2
ROUNDS = 3
LAST_S = 1.0
"""What fsync `interval` may cost the last one in sync. Logs are synced every half second here."""

ANY = -1
"""Offset: nothing is said about it."""

CUT = re.compile(rf"partition={TOPIC}/(\d+) truncated from=\d+ to=(\d+) high_watermark=\d+")


class Readable:
    """What was readable of a partition, and when; and where it had to go on with less."""

    def __init__(self) -> None:
        self._steps = [(0.0, 0)]
        self._less_from: int | None = None
        self._floor = 0
        self.cuts: list[int] = []
        """Where the last one in sync ended, each time that it had lost its tail."""

    def since(self, time: float) -> int:
        """The least that was readable from then on."""
        at = max(place for place, (then, _) in enumerate(self._steps) if then <= time or not place)
        return min(offset for _, offset in self._steps[at:])

    def expect_less(self, epoch: int, floor: int = ANY) -> None:
        """Who leads from this epoch on may have less than was readable. With a `floor` it lost its
        tail, and may not have less than that."""
        # One that was elected may be gone again before it leads.
        self._floor = floor if self._less_from is None else min(floor, self._floor)
        self._less_from = epoch

    def look(self, now: float, leader: LogProgress, epoch: int) -> None:
        """At one that leads, or still believes so."""
        readable = self._steps[-1][1]
        if self._less_from is None:
            if leader.high_watermark > readable:
                self._steps.append((now, leader.high_watermark))
        elif epoch >= self._less_from:
            self._less_from = None
            end = leader.epoch_start
            assert end >= self._floor, f"{self._floor} were readable in time: {leader.describe()}"
            if self._floor != ANY:
                self.cuts.append(end)
            self._steps.append((now, min(readable, end)))


class Recoveries:
    """Looks at every election of one that may have less than others had."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.seen = 0
        self._before: dict[int, PartitionState] = {}
        self._readable = [Readable() for _ in range(PARTITIONS)]
        self._copied_at: dict[tuple[int, int], float] = {}
        """Until when a node had a part in a partition."""
        cluster.consensus.on_decided = self.check

    def check(self) -> None:
        topic = self.cluster.consensus.state.topics.get(TOPIC)
        if topic is None:
            return
        command = self.cluster.consensus.entries[-1].command
        for number, one in enumerate(topic.partitions):
            before = self._before.get(number)
            if before is not None and before.epoch < one.epoch and one.leader:
                if before.recovery is not None:
                    self._readable[number].expect_less(one.epoch)
                    if isinstance(command, TellEnds):
                        self.seen += 1
                        self._check_longest(number, before, one)
                elif isinstance(command, RegisterNode) and command.lost == "tail":
                    self._expect_lost_tail(command.node_id, number, before, one)
            self._before[number] = one

    def _expect_lost_tail(
        self, node_id: int, number: int, before: PartitionState, one: PartitionState
    ) -> None:
        """Only the last one in sync leads without its tail."""
        if before.isr == one.isr == (node_id,):
            readable = self._readable[number]
            until = self._copied_at[node_id, number]
            readable.expect_less(one.epoch, readable.since(until - LAST_S))

    def look(self) -> None:
        """After each step."""
        now = self.cluster.loop.time()
        for node_id, node in self.cluster.nodes.items():
            for number, readable in enumerate(self._readable):
                copy = node.copy_of((TOPIC, number))
                if copy is not None and copy.replica.role != "idle":
                    self._copied_at[node_id, number] = now
                    if copy.replica.role == "leader":
                        readable.look(now, copy.replica.data, copy.replica.epoch)

    def unexplained(self, complaints: list[str]) -> list[str]:
        """All but cuts to where a last one in sync ended that had lost its tail."""
        found = []
        for one in complaints:
            cut = CUT.fullmatch(one)
            if cut is None or int(cut[2]) not in self._readable[int(cut[1])].cuts:
                found.append(one)
        return found

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


def is_complete(cluster: SimCluster) -> bool:
    """Whether also what the producer has given up is replicated: it is still on its way then."""
    for number, one in enumerate(cluster.consensus.state.topics[TOPIC].partitions):
        ends = set()
        for node_id in one.replicas:
            copy = cluster.nodes[node_id].copy_of((TOPIC, number))
            ends.add(None if copy is None else copy.log.end_offset)
            if copy is not None and copy.replica.role == "leader":
                ends.add(copy.replica.high_watermark)
        if len(ends) > 1:
            return False
    return cluster.is_whole()


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
    await cluster.until("all copies are complete", lambda: is_complete(cluster), 60)
    check_replicas(cluster)


def simulate(seed: int) -> int:
    cluster = SimCluster(replace(make_plan(seed), nodes=5))
    recoveries = Recoveries(cluster)
    cluster.run(scenario(cluster), recoveries.look)
    assert not cluster.bugs, cluster.bugs
    unexplained = recoveries.unexplained(cluster.complaints.found)
    assert not unexplained, unexplained
    assert not cluster.loop.unhandled, cluster.loop.unhandled
    return recoveries.seen


@pytest.mark.parametrize("seed", seeds(6, found=(48, 587)))
def test_the_longest_copy_leads_whenever_the_last_disk_is_lost(seed: int) -> None:
    with replayable("test_the_longest_copy_leads_whenever_the_last_disk_is_lost", seed):
        assert simulate(seed), "no copies were compared"
