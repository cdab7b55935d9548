"""Queue workers on real nodes that are killed: each record has one holder, an end, and one only."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from clusterwork import until
from queuework import Stage, clock, on_stage

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.history import Redrive
from raftq.chaos.recorder import Recorder
from raftq.chaos.workers import Habits
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey
from raftq.client.wire.queue_messages import DeadLetters


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
        values = [f"{'poison' if at % 40 == 0 else 'v'} {at}" for at in range(600)]
        sending = stage.spawn(stage.send_many(values, pause_s=0.008))
        await sleep(0.5)
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


async def redrive(recorder: Recorder, place: PartitionKey) -> None:
    """Until every letter of the partition has been sent back, whoever leads it by then."""

    async def done() -> bool:
        try:
            reply = await recorder.ask(place, DeadLetters(*place, "redrive", limit=7))
        except RaftqError:
            return False
        return reply.message.count == 0

    await until(done, 20)


@pytest.mark.full
def test_dead_letters_are_made_once_and_sent_back_once_whoever_is_killed(
    cluster: LocalCluster,
) -> None:
    """1. Half of the records are never done; the leaders of the queue and of its dead letters are
       killed while these are made.
    2. Each is a dead letter once, and the queue is empty.
    3. All are sent back while a leader of the dead letters is killed: each comes once, with its
       attempts counted anew, and no letter is left.
    """

    async def scene(stage: Stage) -> None:
        values = [f"{'poison' if at % 2 else 'v'} {at}" for at in range(120)]
        await stage.send_many(values)
        for number in range(3):
            await stage.work(f"w{number}", Habits(lease_s=0.8, records_max=4))
        await sleep(0.3)
        await stage.kill_leader(("work", 1), down_s=0.3)
        await stage.kill_leader(("work.dlq", 0), down_s=0.3)
        await stage.drained()
        await stage.stop_workers()
        final = await stage.final("g")
        stage.judge(final)
        letters = {letter.value for letter in final.letters}
        assert letters >= {value for value in values if value.startswith("poison")}

        keeper = await stage.recorder("keeper")
        for letter in final.letters:
            noted = Redrive(
                client="keeper", topic="work", partition=letter.partition, at=clock(),
                value=letter.value,
            )  # fmt: skip
            noted.end("ok", clock())
            stage.history.add(noted)
        dead = [("work.dlq", number) for number in range(2)]
        sending = [stage.spawn(redrive(keeper, place)) for place in dead]
        await stage.kill_leader(("work.dlq", 1), down_s=0.3)
        for task in sending:
            await task
        left = list(letters)
        while left:
            for one in await keeper.lease(stage.places, wait_s=1.0, lease_s=20.0):
                assert one.attempt == 1, one
                left.remove(one.value)
                await keeper.settle([one], "ack")
        await stage.drained()
        for place in dead:
            browsed = (await keeper.ask(place, DeadLetters(*place, "browse"))).message
            assert not browsed.offsets
        again = await stage.final("g")
        assert again.letters == final.letters, "no dead letter of a dead letter"
        stage.judge(again)

    on_stage(cluster, scene, backoff_ms=50)


@pytest.mark.full
def test_a_record_stays_at_its_source_until_its_dead_letter_is_safe(cluster: LocalCluster) -> None:
    """The dead letters need all three nodes, and one is down: the record is not forgotten, nor
    given to anybody; when the node is back the letter is there, once."""

    async def scene(stage: Stage) -> None:
        await stage.admin.create_topic(
            "work.dlq", partitions=1, replication=3, config={"min_insync": 3}
        )
        worker = await stage.recorder("w")
        await stage.send("broken")
        await stage.send("fine")
        given = await worker.lease(stage.places, wait_s=5.0, lease_s=2.0)
        broken = next(one for one in given if one.value == "broken")
        leader = await stage.leader(stage.places[0])
        down = next(node for node in cluster.ids if node != leader)
        cluster.kill(down)
        await worker.settle([broken], "reject", reason="broken")
        await worker.settle([one for one in given if one is not broken], "ack")
        await sleep(3.0)  # longer than its lease
        described = await stage.describe(stage.places[0])
        assert described.unsettled == 1
        assert not await worker.lease(stage.places, wait_s=0.3)
        cluster.restart(down)
        await stage.drained(within_s=15)
        final = await stage.final("g")
        assert [letter.value for letter in final.letters] == ["broken"]
        stage.judge(final)

    on_stage(cluster, scene, partitions=1)
