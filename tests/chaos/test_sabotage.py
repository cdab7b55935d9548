"""The checkers find a broken promise within one run. Under the same faults they find nothing wrong
with a cluster that keeps its promises."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from raftq import aio
from raftq.chaos.checkers import judge
from raftq.chaos.harness.local_cluster import DISTURBED_COMMAND, LocalCluster
from raftq.chaos.harness.sabotage import SABOTAGES, VARIABLE, break_promises
from raftq.chaos.history import Final, History
from raftq.chaos.scene import NotDrained, Scene
from raftq.chaos.workloads.appends import Appends
from raftq.chaos.workloads.delays import DelayWorkload
from raftq.chaos.workloads.queues import QueueWorkload
from raftq.client.common.errors import ConfigError
from raftq.client.common.tasks import sleep

logger = logging.getLogger(__name__)

NOT_DRAINED = "not drained"
Load = Appends | QueueWorkload | DelayWorkload
Drama = Callable[[LocalCluster, str], Awaitable[None]]


def kinds(directory: Path, sabotage: str, load: Load, *dramas: Drama) -> set[str]:
    """What is found wrong when these things happen to a cluster with a broken promise."""

    async def run(cluster: LocalCluster, secret: bytes) -> set[str]:
        scene = Scene(
            bootstrap=cluster.bootstrap,
            direct={one: cluster.addresses(one).native for one in cluster.ids},
            history=History(),
            clock=time.time,
            rng=Random(11),
            secret=secret,
            drain_s=40.0,
            settle_s=4.0,
        )
        final = Final()
        await load.prepare(scene)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(scene))
            await sleep(1.5)
            for drama in dramas:
                await drama(cluster, load.topic)
            scene.stopping.set()
        found: set[str] = set()
        try:
            await load.finish(scene, final)
        except NotDrained as error:
            logger.warning("%s", error)
            found.add(NOT_DRAINED)
        return found | {one.kind for one in judge(scene.history, final)}

    env = {VARIABLE: sabotage}
    # Only this command reads the variable: a production node ignores it and keeps its promises.
    where = directory / "cluster"
    with LocalCluster(where, nodes=3, env=env, command=DISTURBED_COMMAND) as cluster:
        assert sabotaged(cluster) == ([sabotage] * 3 if sabotage else [])
        secret = Path(cluster.files.secret).read_bytes().strip()
        return asyncio.run(run(cluster, secret))


def sabotaged(cluster: LocalCluster) -> list[str]:
    """The promises that the nodes say they break, one entry for each node and promise."""
    logs = [Path(cluster.files.log(node)).read_text() for node in cluster.ids]
    return [name for log in logs for name in re.findall(r"event=sabotaged promise=([\w-]+)", log)]


# What happens.


async def replicas_of(cluster: LocalCluster, topic: str) -> tuple[int, list[int]]:
    """Who leads the first partition, and who follows, the preferred one first."""
    async with aio.Admin(cluster.bootstrap) as admin:
        while True:
            (one, *_) = (await admin.describe_topic(topic)).partitions
            if one.leader is not None and len(one.isr) == 3:
                return one.leader, [node for node in one.replicas if node != one.leader]
            await sleep(0.1)


async def restart(cluster: LocalCluster, node: int) -> None:
    await asyncio.to_thread(cluster.restart, node)
    await sleep(1.0)


async def leader_dies_alone(cluster: LocalCluster, topic: str) -> None:
    """The followers stand still for a moment, and when they go on the leader is dead."""
    leader, followers = await replicas_of(cluster, topic)
    for node in followers:
        cluster.pause(node)
    await sleep(0.7)
    cluster.kill(leader)
    for node in followers:
        cluster.resume(node)
    await sleep(4.0)  # the new leader writes more than the old one had alone
    await restart(cluster, leader)


async def leader_dies_before_it_answers(cluster: LocalCluster, topic: str) -> None:
    """One follower stands still, so that nothing is acknowledged that the other has already."""
    leader, (_, late) = await replicas_of(cluster, topic)
    cluster.pause(late)
    await sleep(0.7)
    cluster.kill(leader)
    cluster.resume(late)
    await sleep(2.0)
    await restart(cluster, leader)


async def leader_dies(cluster: LocalCluster, topic: str) -> None:
    leader, _ = await replicas_of(cluster, topic)
    cluster.kill(leader)
    await sleep(2.0)
    await restart(cluster, leader)


async def bits_rot(cluster: LocalCluster, topic: str) -> None:
    """A bit of a record in an old segment flips, on the disk of one who follows."""
    _, (*_, node) = await replicas_of(cluster, topic)
    cluster.kill(node)
    flip(Path(cluster.files.directory), f"node-{node}/logs/{topic}-*/0/data", topic.encode())
    await restart(cluster, node)


def flip(directory: Path, pattern: str, text: bytes) -> None:
    (folder,) = directory.glob(pattern)
    segment = sorted(folder.glob("*.log"))[1]
    content = bytearray(segment.read_bytes())
    content[content.index(text, len(content) // 2)] ^= 1
    segment.write_bytes(content)


async def nothing_happens(cluster: LocalCluster, topic: str) -> None:
    await sleep(3.0)


# What is found.


def appends(producers: int = 3) -> Appends:
    config = {"segment_bytes": 4096}
    return Appends(partitions=1, readers=1, producers=producers, config=config)


def test_acknowledged_before_it_is_replicated(tmp_path: Path) -> None:
    assert "lost" in kinds(tmp_path, "ack-before-replication", appends(), leader_dies_alone)


@pytest.mark.full
def test_the_epoch_fence_is_skipped(tmp_path: Path) -> None:
    """What one producer repeats has the same sizes, so that nothing but epochs tells them apart."""
    load = appends(producers=1)
    assert "copies differ" in kinds(tmp_path, "skip-epoch-fence", load, leader_dies_alone)


@pytest.mark.full
def test_what_producers_sent_is_forgotten_on_failover(tmp_path: Path) -> None:
    found = kinds(tmp_path, "forget-dedup-on-failover", appends(), leader_dies_before_it_answers)
    assert "doubled" in found


@pytest.mark.full
def test_the_ledger_is_dropped_on_failover(tmp_path: Path) -> None:
    load = QueueWorkload(partitions=1, deaths_per_minute=0.0)
    assert "redelivered" in kinds(tmp_path, "drop-ledger-on-failover", load, leader_dies)


@pytest.mark.full
def test_records_come_a_tick_too_early(tmp_path: Path) -> None:
    load = DelayWorkload(partitions=1, delay_s_max=2.0, per_second=60.0)
    assert "early" in kinds(tmp_path, "deliver-early", load, nothing_happens)


@pytest.mark.full
def test_checksums_are_skipped(tmp_path: Path) -> None:
    assert "copies differ" in kinds(tmp_path, "skip-crc", appends(), bits_rot)


@pytest.mark.full
def test_a_cluster_that_keeps_its_promises_is_found_to(tmp_path: Path) -> None:
    load = appends()
    dramas = (leader_dies_alone, leader_dies_before_it_answers, bits_rot)
    assert kinds(tmp_path, "", load, *dramas) == set()


# Naming them.


def test_a_promise_that_nobody_made_cannot_be_broken() -> None:
    with pytest.raises(ConfigError, match="be-kind"):
        break_promises("be-kind")


def test_a_broken_node_says_so_loudly(tmp_path: Path) -> None:
    env = {VARIABLE: ",".join(SABOTAGES)}
    where = tmp_path / "cluster"
    with LocalCluster(where, nodes=1, env=env, command=DISTURBED_COMMAND) as made:
        assert sabotaged(made) == list(SABOTAGES)
        log = Path(made.files.log(1)).read_text()
    assert "CRITICAL" in log.upper()
