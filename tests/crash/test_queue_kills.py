"""Queue workers on real nodes that are killed: each record has one holder, an end, and one only."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from queuework import Stage, on_stage

from raftq.chaos.workers import Habits
from raftq.client.tasks import pause
from raftq.node.local_cluster import LocalCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", nodes=3) as made:
        yield made


def test_leases_and_attempts_survive_the_kill_of_leaders(cluster: LocalCluster) -> None:
    """1. Four workers lease, acknowledge, give back, reject and forget records that come in.
    2. Leaders are killed meanwhile, a worker too, and in the end all nodes at once.
    3. No record had two holders, none came after its end, none is forgotten, no attempt is lost;
       the dead letters are those that were given up, one each.
    """

    async def scene(stage: Stage) -> None:
        habits = Habits()
        tasks = [await stage.work(f"w{number}", habits) for number in range(4)]
        values = [f"{'v'} {at}" for at in range(600)]
        sending = stage.spawn(stage.send_many(values, pause_s=0.008))
        await pause(0.5)
        await stage.kill_leader(("work", 0))
        tasks[0].cancel()
        await stage.kill_leader(("work", 1))
        await sending
        for node_id in cluster.ids:
            cluster.kill(node_id)
        for node_id in cluster.ids:
            cluster.restart(node_id, timeout=None)
        cluster.wait_ready()
        await stage.drained()
        await stage.stop_workers()
        counts = stage.history.counts()
        assert counts["publish ok"] >= 500, counts
        assert counts["ack ok"] >= 400, counts
        stage.judge(await stage.final("g"))

    on_stage(cluster, scene, backoff_ms=100)
