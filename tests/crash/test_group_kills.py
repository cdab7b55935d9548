"""Stream groups on real nodes: members, leaders and coordinators are killed, nothing is skipped."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from clusterwork import until
from queuework import Stage, clock, on_stage

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.history import Final
from raftq.chaos.members import StreamMember
from raftq.chaos.recorder import Recorder
from raftq.client.common.tasks import sleep
from raftq.client.wire.group_messages import GROUPS_TOPIC
from raftq.node.groups.coordinators import PARTITIONS, partition_of

GROUP = "readers"
COORDINATOR = (GROUPS_TOPIC, partition_of(GROUP, PARTITIONS))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", nodes=3) as made:
        yield made


class Group:
    """The members of one group on a stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.members: dict[str, tuple[StreamMember, asyncio.Task[None]]] = {}

    def join(self, name: str, **settings: object) -> StreamMember:
        stage = self.stage
        member = StreamMember(
            stage.cluster.bootstrap,
            stage.history,
            clock,
            Random(name),
            name=name,
            group=GROUP,
            topics=[stage.topic],
            session_ms=1500,
            heartbeat_ms=300,
            fetch_wait_ms=200,
            **settings,
        )
        self.members[name] = (member, stage.spawn(member.run()))
        return member

    async def leave(self, name: str) -> None:
        member, task = self.members.pop(name)
        member.stopping = True
        await task

    async def kill(self, name: str) -> None:
        member, task = self.members.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await member.kill()

    def owned(self) -> dict[str, list[tuple[str, int]]]:
        return {name: member.consumer.assignment() for name, (member, _) in self.members.items()}

    async def settled(self) -> bool:
        """Every partition has one owner, and nobody has more than a fair share."""
        self.check()
        owned = [place for held in self.owned().values() for place in held]
        share = -(-len(self.stage.places) // len(self.members))
        most = max(map(len, self.owned().values()))
        return sorted(owned) == sorted(self.stage.places) and most <= share

    def check(self) -> None:
        for _, task in self.members.values():
            if task.done():
                task.result()

    async def caught_up(self, overseer: Recorder) -> bool:
        """The group has stored the end of every partition."""
        self.check()
        described = await self.stage.admin.describe_topic(self.stage.topic)
        for place in self.stage.places:
            recalled = await overseer.recall(place)
            if recalled.offset != described.partitions[place[1]].high_watermark:
                return False
        return True


async def judge(stage: Stage) -> None:
    final: Final = await stage.final()
    final.read = {GROUP: [stage.topic]}
    stage.judge(final)


def test_a_group_goes_on_when_members_leaders_and_coordinators_are_killed(
    cluster: LocalCluster,
) -> None:
    """1. Three members read what comes in and store their positions.
    2. A member is killed; then the leader of a partition; then, while a member joins, the
       coordinator.
    3. The group settles, reads everything, and no stored position ever went back; each partition
       had one owner per generation, and was given up before it was given on.
    """

    async def scene(stage: Stage) -> None:
        group = Group(stage)
        overseer = await stage.recorder("overseer", GROUP)
        for name in ("m1", "m2", "m3"):
            group.join(name)
        sending = stage.spawn(stage.send_many([f"v{at}" for at in range(900)], pause_s=0.01))
        await until(group.settled, 15)
        await group.kill("m1")
        await stage.kill_leader(stage.places[0], down_s=0.3)
        for place in stage.places:
            await overseer.recall(place)
        group.join("m4")
        await stage.kill_leader(COORDINATOR, down_s=0.3)
        await sending
        await until(group.settled, 20)
        await until(lambda: group.caught_up(overseer), 20)
        for name in list(group.members):
            await group.leave(name)
        await judge(stage)

    on_stage(cluster, scene, partitions=4)


@pytest.mark.full
def test_members_that_come_and_go_skip_nothing_and_never_share_a_partition(
    cluster: LocalCluster,
) -> None:
    """A storm of joins, ends and kills while records come in, one leader killed in the midst."""

    async def scene(stage: Stage) -> None:
        group = Group(stage)
        overseer = await stage.recorder("overseer", GROUP)
        rng = Random("storm")
        sending = stage.spawn(stage.send_many([f"v{at}" for at in range(800)], pause_s=0.01))
        killing: asyncio.Task[int] | None = None
        for number in range(18):
            if len(group.members) < 2 or (rng.random() < 0.55 and len(group.members) < 6):
                group.join(f"m{number}")
            elif rng.random() < 0.5:
                await group.leave(rng.choice(list(group.members)))
            else:
                await group.kill(rng.choice(list(group.members)))
            if number == 8:
                killing = stage.spawn(stage.kill_leader(COORDINATOR, down_s=0.3))
            await sleep(rng.uniform(0.05, 0.5))
        assert killing is not None
        await killing
        await sending
        await until(group.settled, 20)
        await until(lambda: group.caught_up(overseer), 20)
        for name in list(group.members):
            await group.leave(name)
        await judge(stage)

    on_stage(cluster, scene, partitions=4)
