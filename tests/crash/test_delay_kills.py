"""Delayed records on real nodes that are killed: never early, never lost, never twice."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from queuework import Stage, clock, on_stage

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.history import Cancel
from raftq.chaos.workers import ONLY_ACK
from raftq.client.common.tasks import sleep


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", nodes=3) as made:
        yield made


def test_delays_ends_and_lanes_hold_when_leaders_are_killed(cluster: LocalCluster) -> None:
    """1. Records come in for now and for the next ten seconds, in all lanes, some with an end; some
       are cancelled.
    2. The leaders of both partitions are killed, then all nodes at once.
    3. Nothing came early, after its end, after a cancel, or twice; nothing is missing, nor later
       than the faults explain.
    """

    async def scene(stage: Stage) -> None:
        rng = Random("delays")
        canceller = await stage.recorder("canceller")

        latest = [clock()]

        async def one(number: int) -> None:
            now = clock()
            due = now + rng.uniform(0.02, 10.0) if rng.random() < 0.8 else 0.0
            latest.append(max(due, latest[-1]))
            ends = max(now, due) + rng.uniform(0.5, 3.0) if rng.random() < 0.1 else 0.0
            lane, regretted = rng.randrange(5), rng.random() < 0.2
            sent = await stage.send(
                f"v {number}", number % 2, deliver_at=due, expires_at=ends, priority=lane
            )
            if due and regretted and sent.offset is not None:
                await sleep(rng.uniform(0, 1.0))
                await canceller.cancel(sent.partition_key, sent.offset, sent.value)

        sending = []
        for number in range(400):
            sending.append(stage.spawn(one(number)))
            await sleep(0.005)
        for name in ("w1", "w2"):
            await stage.work(name, ONLY_ACK)
        await sleep(1.0)
        await stage.kill_leader(("work", 0), down_s=0.3)
        await stage.kill_leader(("work", 1), down_s=0.3)
        for node_id in cluster.ids:
            cluster.kill(node_id)
        for node_id in cluster.ids:
            cluster.restart(node_id, timeout=None)
        cluster.wait_ready()
        await asyncio.gather(*sending)
        # Draining is about what has fired, so the last one has to be due.
        await sleep(max(0.0, latest[-1] + 0.5 - clock()))
        await stage.drained()
        await stage.stop_workers()
        cancelled = sum(one.status == "ok" for one in stage.history.of(Cancel))
        assert cancelled >= 20, stage.history.counts()
        stage.judge(await stage.final("g"), late_s=8.0)

    on_stage(cluster, scene)
