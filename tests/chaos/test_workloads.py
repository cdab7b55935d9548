"""Workloads on real nodes that are killed and paused: they survive it, note it, and find nothing
wrong; and what they read back is everything."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from raftq.chaos.checkers import Rules, judge
from raftq.chaos.history import Final, History, Publish, Receive, Sighting
from raftq.chaos.scene import NotDrained, Scene, Workload
from raftq.chaos.workloads.appends import Appends
from raftq.client.tasks import pause
from raftq.node.local_cluster import LocalCluster

Faults = Callable[[LocalCluster], Awaitable[None]]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", nodes=3) as made:
        yield made


def scene_of(cluster: LocalCluster) -> Scene:
    return Scene(
        bootstrap=cluster.bootstrap,
        direct={one: cluster.addresses(one).native for one in cluster.ids},
        history=History(),
        clock=time.time,
        rng=Random(7),
        secret=Path(cluster.files.secret).read_bytes().strip(),
    )


def play(cluster: LocalCluster, workload: Workload, faults: Faults) -> tuple[Scene, Final]:
    """Run a workload while something happens to the cluster, and judge it."""

    async def run() -> tuple[Scene, Final]:
        scene, final = scene_of(cluster), Final()
        await workload.prepare(scene)
        async with asyncio.TaskGroup() as group:
            group.create_task(workload.run(scene))
            await faults(cluster)
            scene.stopping.set()
        await workload.finish(scene, final)
        return scene, final

    scene, final = asyncio.run(run())
    assert judge(scene.history, final, Rules()) == []
    return scene, final


async def kill_and_pause(cluster: LocalCluster) -> None:
    """Each node once, one of them with a pause: some of them lead."""
    await pause(1.5)
    for node, is_killed in ((1, True), (2, False), (3, True)):
        if is_killed:
            cluster.kill(node)
            await pause(0.5)
            await asyncio.to_thread(cluster.restart, node)
        else:
            cluster.pause(node)
            await pause(2.5)
            cluster.resume(node)
        await pause(1.0)


def test_appends_survive_kills_and_pauses_and_are_read_back_from_every_node(
    cluster: LocalCluster,
) -> None:
    appends = Appends()
    scene, final = play(cluster, appends, kill_and_pause)
    counts = scene.history.counts()
    assert counts["publish ok"] > 300, counts
    assert {one.node for one in scene.history.of(Sighting)} == {1, 2, 3}
    kept = sum(len(rows) for rows in final.logs.values())
    assert kept >= counts["publish ok"]
    assert len(final.logs) == 3
    for number in range(3):
        copies = final.copies[appends.topic, number, "data"]
        assert sorted(copies) == [1, 2, 3]
        assert copies[1]
    seen = {(one.client, one.value) for one in scene.history.of(Receive)}
    assert len(seen) == 2 * kept
    assert not [one for one in scene.history.of(Publish) if one.status == "open"]


def test_a_cluster_that_does_not_heal_is_told_in_time(cluster: LocalCluster) -> None:
    async def faults(cluster: LocalCluster) -> None:
        await pause(0.5)
        cluster.kill(3)

    async def run() -> None:
        scene, final = scene_of(cluster), Final()
        scene.drain_s = 4.0
        workload = Appends(producers=1, readers=1)
        await workload.prepare(scene)
        async with asyncio.TaskGroup() as group:
            group.create_task(workload.run(scene))
            await faults(cluster)
            scene.stopping.set()
        with pytest.raises(NotDrained, match="in sync"):
            await workload.finish(scene, final)

    asyncio.run(run())
