"""Workers that come, go and are cut off, by chance: what holds whatever happens.

no two handlers work on one record at a time, whoever they belong to
a record that was acked is never leased again
in the end every record is settled, and nothing is left leased
"""

import asyncio
import random
from typing import Any

import pytest
from fake_cluster import lost, simulate
from fake_groups import FakeGroups, fake_groups, fill

from raftq.aio import LeasedRecord, QueueClient, Worker
from raftq.client.common.errors import NotLeader, RaftqError
from raftq.client.wire.queue_messages import Lease, Settle
from raftq.node.queue.core.config import DeliveryConfig

PARTITIONS = 4
STORM_S = 30.0


class Storm:
    """One group of workers under a storm."""

    def __init__(self, cluster: FakeGroups, rng: random.Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self.busy: dict[tuple[int, int], str] = {}
        self.cut: set[str] = set()
        self.silent = False
        self.calm = False
        self.wrong: list[str] = []

    def asking(self, request: Any, node: int) -> Any:
        if isinstance(request, Lease) and request.holder in self.cut:
            raise lost()
        if isinstance(request, Settle) and self.silent:
            raise lost()
        if self.calm:
            return None
        if self.rng.random() < 0.03:
            raise NotLeader("not me, perhaps")
        if self.rng.random() < 0.01:
            number = self.rng.randrange(PARTITIONS)
            self.cluster.lead("t", number, self.rng.randrange(1, 4))
        return asyncio.sleep(self.rng.random() * 0.2) if self.rng.random() < 0.05 else None

    def answering(self, request: Any, node: int) -> Any:
        if self.calm:
            return None
        if isinstance(request, Settle) and self.rng.random() < 0.1:
            raise lost()
        if isinstance(request, Lease) and self.rng.random() < 0.02:
            raise lost()  # leased, and nobody knows
        return asyncio.sleep(self.rng.random() * 0.3) if self.rng.random() < 0.05 else None

    async def worker(self, number: int, stops_at: float) -> None:
        rng = random.Random(self.rng.random())
        loop = asyncio.get_running_loop()

        async def handle(record: LeasedRecord) -> None:
            key = record.partition, record.offset
            if key in self.busy:
                self.wrong.append(f"w{number} got {key}, at which {self.busy[key]} is")
            self.busy[key] = f"w{number}"
            try:
                slow = not self.calm and rng.random() < 0.02
                await asyncio.sleep(rng.random() * (6.0 if slow else 0.05))
                if rng.random() < 0.05:
                    raise ValueError("chance")
            finally:
                del self.busy[key]

        worker = Worker(
            self.cluster.bootstrap, group="g", topics=["t"], handler=handle, handle_signals=False,
            concurrency=rng.randrange(1, 6), prefetch=rng.randrange(6), visibility_timeout=2.0,
            grace=rng.random() * 2, rng=rng, name=f"w{number}",
        )  # fmt: skip
        loop.call_at(stops_at, worker.stop)
        await worker.run()

    async def client(self, number: int, stops_at: float) -> None:
        """One that leases and sometimes forgets."""
        rng = random.Random(self.rng.random())
        loop = asyncio.get_running_loop()
        async with QueueClient(
            self.cluster.bootstrap, group="g", topics=["t"], visibility_timeout=2.0, rng=rng,
            settle_ms=3_000, name=f"c{number}",
        ) as queue:  # fmt: skip
            while loop.time() < stops_at:
                found = await queue.lease(rng.randrange(1, 9), timeout=rng.random() * 0.5)
                try:
                    if found and rng.random() < 0.8:
                        await queue.ack_many(found)
                except RaftqError as error:
                    if error.code not in ("lease_expired", "lease_replaced", "request_timeout"):
                        self.wrong.append(f"c{number}: {error!r}")
                await asyncio.sleep(rng.random() * 0.3)

    async def disturb(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            await asyncio.sleep(self.rng.random() * 6)
            self.silent = True
            await asyncio.sleep(self.rng.random() * 4)
            self.silent = False


def judge(cluster: FakeGroups) -> list[str]:
    """What the history of leases and acks says."""
    wrong = []
    acked = set()
    for verb, *rest in cluster.history:
        place = tuple(rest[:3])
        if verb == "ack":
            if place in acked:
                wrong.append(f"{place} was acked twice")
            acked.add(place)
        elif verb == "lease" and place in acked:
            wrong.append(f"{place} was leased after its ack")
    return wrong


async def storm(seed: int) -> None:
    async with fake_groups(3, seed) as cluster:
        cluster.delivery = DeliveryConfig(max_deliveries=10_000, backoff_s=0.1, backoff_cap_s=1.0)
        logs = cluster.add_topic("t", PARTITIONS)
        one = Storm(cluster, random.Random(seed))
        cluster.asking, cluster.answering = one.asking, one.answering
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + STORM_S
        tasks = [asyncio.ensure_future(one.disturb(ends_at))]
        number = 0
        while loop.time() < ends_at:
            stops_at = ends_at + 20 if number == 0 else loop.time() + 1 + one.rng.random() * 10
            work = one.client if number % 4 == 3 else one.worker
            tasks.append(asyncio.ensure_future(work(number, stops_at)))
            number += 1
            for _ in range(10):
                fill(one.rng.choice(logs), [b"x"] * one.rng.randrange(1, 6))
                await asyncio.sleep(one.rng.random() * 0.5)
        one.calm = True
        for task in tasks:
            await task
        assert not one.wrong, one.wrong[:5]
        assert not judge(cluster), judge(cluster)[:5]
        for at, log in enumerate(logs):
            group = cluster.queue("t", at).groups["g"]
            assert (group.settled.prefix, group.in_flight) == (log.end, 0)


@pytest.mark.parametrize("seed", range(4))
def test_what_holds_in_a_storm(seed: int) -> None:
    simulate(storm(seed), seed, seconds_max=3_000)
