"""Workloads on real nodes that are killed and paused: they survive it, note it, and find nothing
wrong; and what they read back is everything."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from raftq.chaos.checkers import judge
from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.history import Final, History, Publish, Receive, Sighting
from raftq.chaos.scene import NotDrained, Scene, Workload
from raftq.chaos.workloads.appends import Appends
from raftq.chaos.workloads.changes import Changes
from raftq.chaos.workloads.delays import DelayWorkload
from raftq.chaos.workloads.queues import QueueWorkload
from raftq.chaos.workloads.streams import StreamWorkload
from raftq.client.common.tasks import sleep

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


def play(cluster: LocalCluster, faults: Faults, *workloads: Workload) -> tuple[Scene, Final]:
    """Run workloads while something happens to the cluster, and judge them."""

    async def run() -> tuple[Scene, Final]:
        scene, final = scene_of(cluster), Final()
        for one in workloads:
            await one.prepare(scene)
        async with asyncio.TaskGroup() as group:
            for one in workloads:
                group.create_task(one.run(scene))
            await faults(cluster)
            scene.stopping.set()
        for one in workloads:
            await one.finish(scene, final)
        return scene, final

    scene, final = asyncio.run(run())
    found = judge(scene.history, final)
    assert not found, "\n".join(map(str, found[:10]))
    return scene, final


async def kill_and_pause(cluster: LocalCluster) -> None:
    """Each node once, one of them with a pause: some of them lead."""
    await sleep(1.5)
    for node, is_killed in ((1, True), (2, False), (3, True)):
        if is_killed:
            cluster.kill(node)
            await sleep(0.5)
            await asyncio.to_thread(cluster.restart, node)
        else:
            cluster.pause(node)
            await sleep(2.5)
            cluster.resume(node)
        await sleep(1.0)


def test_appends_survive_kills_and_pauses_and_are_read_back_from_every_node(
    cluster: LocalCluster,
) -> None:
    appends = Appends()
    scene, final = play(cluster, kill_and_pause, appends)
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


@pytest.mark.full
def test_clients_beside_every_node_and_hasty_ones_write_to_leaders_and_promise_what_they_may(
    cluster: LocalCluster,
) -> None:
    scene, _ = play(cluster, kill_and_pause, Appends(insiders=True, hasty=1, per_second=10.0))
    sent = list(scene.history.of(Publish))
    hasty = [one for one in sent if one.client.endswith((" p3", " leader"))]
    assert hasty
    assert {one.status for one in hasty} <= {"unknown", "failed"}
    for node in (1, 2, 3):
        beside = [one for one in sent if one.client.endswith(f" beside {node} all")]
        assert any(one.status == "ok" for one in beside), node
    assert not [one for one in sent if one.status == "open"]


@pytest.mark.full
def test_groups_queues_delays_and_changes_survive_kills_and_pauses(cluster: LocalCluster) -> None:
    """1. All of them at once, while each node is killed or paused.
    2. Everything was done that they can do, and nothing is wrong with it.
    """
    streams, queues, delays, changes = StreamWorkload(), QueueWorkload(), DelayWorkload(), Changes()
    scene, final = play(cluster, kill_and_pause, streams, queues, delays, changes)
    counts = scene.history.counts()
    for what in (
        "publish ok", "receive", "store ok", "recall ok", "delivery", "ack ok", "nack ok",
        "postpone ok", "release ok", "reject ok", "extend ok", "cancel ok", "change ok",
    ):  # fmt: skip
        assert counts.get(what), counts
    assert final.letters
    assert {partition_log for _, _, partition_log in final.copies} == {"data", "ledger", "delays"}
    assert set(final.read) == {streams.group}
    assert len(final.drained) == 2
    assert final.topics[changes.topic]


@pytest.mark.full
def test_a_cluster_that_does_not_heal_is_told_in_time(cluster: LocalCluster) -> None:
    async def faults(cluster: LocalCluster) -> None:
        await sleep(0.5)
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
