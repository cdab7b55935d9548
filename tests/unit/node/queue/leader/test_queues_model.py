"""Random work on a queue whose leaders change at random, judged by what clients were told.

Each new leader has what was replicated and anything or nothing beyond (`FakePartition.fail_over`).
Whatever the schedule: no record is in two live leases of a group, an acknowledged one never comes
again, attempts are not forgotten, dead letters are copied once, and in the end nothing is missing.
"""

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from fake_queue import Cluster, Held, pause, run

from raftq.client.common.errors import RaftqError
from raftq.node.queue.leader import ledger as ledger_module

GROUPS = ("red", "blue", "green")
LEASE_MS = 4_000
MAX_DELIVERIES = 4


@dataclass(slots=True)
class Delivery:
    """One delivery as its holder knows it. Times are those of the loop, in ms."""

    held: Held
    granted_at: int
    deadline: int
    ended_at: int | None = None  # when its holder sent something that ends it
    how: str = ""  # what it was told came of that; "" when it does not know


@dataclass(slots=True)
class Story:
    """All that is known of one record in one group."""

    deliveries: list[Delivery] = field(default_factory=list)
    acked: bool = False
    maybe_over: bool = False  # acked or rejected with an unknown outcome
    told_settled: bool = False


class Judge:
    """Collects what clients hear, and raises when it contradicts itself."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.stories: dict[tuple[str, int], Story] = {}
        self.values: dict[int, bytes] = {}
        self.delivered = 0

    def now(self) -> int:
        return int(self.cluster.loop.time() * 1000)

    def leased(self, group: str, held: Held) -> Delivery:
        offset = held.offset
        known = self.values.setdefault(offset, held.value)
        assert held.value == known, f"offset {offset} has two values"
        story = self.stories.setdefault((group, offset), Story())
        assert not story.acked, f"{group}: {held} was acknowledged"
        assert not story.told_settled, f"{group}: {held} was said to be settled"
        granted_at = held.deadline - LEASE_MS
        spent = 0
        for one in story.deliveries:
            ended_at = one.deadline if one.ended_at is None else min(one.ended_at, one.deadline)
            assert ended_at <= granted_at, f"{group}: {held} was still leased: {one}"
            unspent = one.how in ("postpone", "release") or (one.ended_at and not one.how)
            spent += not unspent
        assert held.attempt > spent, f"{group}: {held} forgot attempts: {story}"
        assert held.attempt <= MAX_DELIVERIES
        delivery = Delivery(held, granted_at, held.deadline)
        story.deliveries.append(delivery)
        self.delivered += 1
        return delivery


class Client:
    """Does one thing after the other, some of it at the same time as others."""

    def __init__(self, judge: Judge, rng: Random, group: str, holder: str) -> None:
        self.judge = judge
        self.cluster = judge.cluster
        self.rng = rng
        self.group = group
        self.holder = holder
        self.mine: list[Delivery] = []

    async def work(self, until: float) -> None:
        while self.cluster.loop.time() < until:
            await pause(self.rng.expovariate(20))
            if self.mine and self.rng.random() < 0.6:
                await self.settle()
            else:
                await self.lease()

    async def lease(self) -> None:
        try:
            found = await self.cluster.lease(
                self.group,
                self.rng.choice((1, 3, 50)),
                holder=self.holder,
                session=self.holder,
                wait_ms=self.rng.choice((0, 300)),
                bytes_max=self.rng.choice((100, 1000, 1 << 20)),
            )
        except RaftqError:
            return
        self.mine += [self.judge.leased(self.group, held) for held in found]

    async def settle(self) -> None:
        rng = self.rng
        picked = rng.sample(self.mine, rng.randint(1, min(len(self.mine), 8)))
        verb = rng.choice(("ack",) * 6 + ("nack", "nack", "postpone", "release", "reject"))
        if rng.random() < 0.2:
            return  # forgotten: the lease runs out
        now = self.judge.now()
        for one in picked:
            self.mine.remove(one)
            one.ended_at = now
            if verb in ("ack", "reject"):
                self.judge.stories[self.group, one.held.offset].maybe_over = True
        try:
            reply = await self.cluster.settle(
                verb, [one.held for one in picked], self.group, delay_ms=rng.choice((0, 50, 500))
            )
        except RaftqError:
            return
        for one, error in zip(picked, reply.errors, strict=True):
            story = self.judge.stories[self.group, one.held.offset]
            if not error:
                one.how = verb
                story.acked = story.acked or verb == "ack"
            elif error == "already_settled":
                story.told_settled = True
            else:
                assert error in ("lease_expired", "lease_replaced"), error
                # It was not in time: the lease had run out, and its attempt is spent.
                one.ended_at = None


async def disturb(cluster: Cluster, rng: Random, until: float) -> None:
    """Change leaders and stop replication for a while."""
    partition = cluster.partitions[0]
    while cluster.loop.time() < until:
        await pause(rng.expovariate(1.0))
        if rng.random() < 0.5:
            partition.lag_s = None
            await pause(rng.uniform(0, 0.3))
            if rng.random() < 0.7:
                cluster.fail_over(settle_s=rng.uniform(0, 0.2))
            partition.lag_s = rng.choice((0, 0.001, 0.02))
            partition.replicate()
        else:
            cluster.fail_over(settle_s=rng.uniform(0, 0.2))


async def publish(cluster: Cluster, rng: Random, until: float) -> None:
    number = 0
    while cluster.loop.time() < until:
        await pause(rng.expovariate(10))
        values = [
            b"%d" % (number := number + 1) * rng.choice((1, 20, 60))
            for _ in range(rng.choice((1, 2, 30)))
        ]
        if cluster.partitions[0].leadership is not None:
            cluster.publish(*values, lane=rng.randrange(5))


async def drain(cluster: Cluster, judge: Judge, group: str) -> None:
    """With nobody in the way, everything that is left is delivered and acknowledged."""
    for _ in range(10_000):
        held = await cluster.lease(group, 1000, holder="drain", wait_ms=20_000)
        for one in held:
            judge.leased(group, one)
        if not held and not (await cluster.describe(group)).unsettled:
            return
        reply = await cluster.settle("ack", held, group)
        for one, error in zip(held, reply.errors, strict=True):
            judge.stories[group, one.offset].acked = not error
    raise AssertionError(f"{group} is never done")


def check_end(cluster: Cluster, judge: Judge) -> None:
    end = cluster.partitions[0].logs["data"].high_watermark
    dead: dict[str, list[int]] = {group: [] for group in GROUPS}
    for group, rows, _ in cluster.copies.values():
        for _, start, stop in rows:
            dead[group] += range(start, stop)
    for group in GROUPS:
        assert len(dead[group]) == len(set(dead[group])), f"{group}: two copies"
        for offset in range(end):
            # Nobody may have heard of it, if the answers of all its leases were lost.
            story = judge.stories.get((group, offset), Story())
            over = story.acked or story.maybe_over or offset in dead[group]
            assert over, f"{group}: {offset} is forgotten: {story}"
            assert not (story.acked and offset in dead[group]), f"{group}: {offset} died acked"
        cluster.queue().engine.deliveries.groups[group].core.check_invariants()


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_of_leaders_breaks_a_promise(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "SNAPSHOT_RECORDS", 150)

    async def main() -> None:
        rng = Random(seed)
        config: dict[str, Any] = {
            "visibility_timeout_ms": LEASE_MS,
            "max_deliveries": MAX_DELIVERIES,
            "backoff_ms": 100,
            "in_flight_max": 60,
        }
        cluster = Cluster(seed=seed, config=config, segment_bytes=1 << 16)
        cluster.serve()
        judge = Judge(cluster)
        until = cluster.loop.time() + 15
        clients = [
            Client(judge, Random(rng.random()), group, f"{group}-{number}")
            for group in GROUPS
            for number in range(3)
        ]
        await asyncio.gather(
            publish(cluster, Random(rng.random()), until),
            disturb(cluster, Random(rng.random()), until),
            *(client.work(until) for client in clients),
        )
        cluster.partitions[0].lag_s = 0.001
        cluster.partitions[0].replicate()
        for group in GROUPS:
            await drain(cluster, judge, group)
        await pause(1)
        check_end(cluster, judge)
        assert judge.delivered > 200
        assert cluster.partitions[0].logs["ledger"].log.start_offset > 0

    run(main())
