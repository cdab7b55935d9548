"""Members that come, go, hang and are cut off, by chance: what holds whatever happens.

every record is handed out to somebody, and in order within one owner's time
nothing of a partition is handed out once another member has claimed it
stored positions never go back, and are never beyond what was handed out
"""

import asyncio
import random
from typing import Any

import pytest
from fake_cluster import lost, simulate
from fake_groups import FakeGroups, fake_groups, fill

from raftq.aio import Consumer
from raftq.client.common.errors import NotLeader, RaftqError
from raftq.client.wire.group_messages import GroupHeartbeat

PARTITIONS = 5
STORM_S = 40.0
Key = tuple[str, int]


class Storm:
    """One group under a storm."""

    def __init__(self, cluster: FakeGroups, rng: random.Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self.seen: dict[Key, dict[int, None]] = {("t", n): {} for n in range(PARTITIONS)}
        self.stored: dict[Key, int] = {}
        self.cut: set[str] = set()
        self.calm = False
        self.wrong: list[str] = []

    # What goes wrong.

    def asking(self, request: Any, node: int) -> None:
        if isinstance(request, GroupHeartbeat) and request.member_id in self.cut:
            raise lost()
        if self.calm:
            return
        if self.rng.random() < 0.03:
            raise NotLeader("not me, perhaps")
        if self.rng.random() < 0.01:
            number = self.rng.randrange(PARTITIONS)
            self.cluster.lead("t", number, self.rng.randrange(1, 4))
        if self.rng.random() < 0.01:
            self.cluster.move_coordinator(self.rng.randrange(1, 4))

    def answering(self, request: Any, node: int) -> None:
        if not self.calm and self.rng.random() < 0.03:
            raise lost()

    # What must hold.

    def hand_out(self, consumer: Consumer, name: str, records: list[Any]) -> None:
        for record in records:
            key = record.topic, record.partition
            _, owner = self.cluster.queue(*key).owners["g"]
            if owner != name:
                self.wrong.append(f"{name} got {key} {record.offset}, which is {owner}'s")
            self.seen[key][record.offset] = None

    def look(self) -> None:
        for key, seen in self.seen.items():
            stored = self.cluster.queue(*key).stored.get("g", 0)
            if stored < self.stored.get(key, 0):
                self.wrong.append(f"the position of {key} went back to {stored}")
            self.stored[key] = stored
            if any(offset not in seen for offset in range(stored)):
                self.wrong.append(f"{key} is stored at {stored} beyond what was handed out")

    # Members.

    async def member(self, number: int, leaves_at: float, static: bool) -> None:
        rng = random.Random(self.rng.random())
        loop = asyncio.get_running_loop()
        consumer = Consumer(
            self.cluster.bootstrap, group="g", topics=["t"], heartbeat_ms=150, session_ms=1_000,
            auto_commit_ms=200, max_poll_ms=2_000, name=f"m{number}", rng=rng,
            instance_id=f"i{number}" if static else None,
        )  # fmt: skip
        async with consumer:
            assert consumer._group is not None
            while loop.time() < leaves_at:
                name = consumer._group.member.member_id
                try:
                    found = await consumer.poll(rng.randrange(1, 30), timeout=rng.random() * 0.3)
                except RaftqError as error:
                    self.wrong.append(f"{name}: {error!r}")
                    break
                self.hand_out(consumer, consumer._group.member.member_id, found)
                chance = rng.random()
                if self.calm or chance > 0.2:
                    await asyncio.sleep(rng.random() * 0.02)
                elif chance < 0.01:
                    await asyncio.sleep(rng.random() * 4)  # works for long
                elif chance < 0.03:
                    self.cut.add(name)
                    await asyncio.sleep(rng.random() * 2)
                    self.cut.discard(name)
                elif chance < 0.05 and consumer.assignment():
                    try:
                        await consumer.commit()
                    except RaftqError as error:
                        if error.code not in ("fenced_generation", "request_timeout"):
                            self.wrong.append(f"{name}: {error!r}")

    async def write(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            for log in self.cluster.topics["t"]:
                fill(log, [b"x"] * self.rng.randrange(1, 5))
            self.look()
            await asyncio.sleep(0.1)


async def storm(seed: int) -> None:
    async with fake_groups(3, seed) as cluster:
        cluster.add_topic("t", PARTITIONS)
        one = Storm(cluster, random.Random(seed))
        cluster.asking, cluster.answering = one.asking, one.answering
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + STORM_S
        stays_until = ends_at + 15.0
        tasks = [asyncio.ensure_future(one.write(ends_at))]
        number = 0
        while loop.time() < ends_at:
            stays = number < 2
            leaves_at = stays_until if stays else loop.time() + one.rng.random() * 12
            static = one.rng.random() < 0.2
            tasks.append(asyncio.ensure_future(one.member(number, leaves_at, static)))
            number += 1
            await asyncio.sleep(one.rng.random() * 6)
        one.calm = True
        for task in tasks:
            await task
        one.look()
        assert not one.wrong, one.wrong[:5]
        for key, seen in one.seen.items():
            assert sorted(seen) == list(range(cluster.topics[key[0]][key[1]].end)), key
            assert cluster.queue(*key).stored["g"] == cluster.topics[key[0]][key[1]].end


@pytest.mark.parametrize("seed", range(4))
def test_what_holds_in_a_storm(seed: int) -> None:
    simulate(storm(seed), seed, seconds_max=3_000)
