"""What must hold once nothing goes wrong any more: everything works, and then nothing happens.

`calm_time`     operators change settings and clients write, without a fault: every record is
                acknowledged soon, and nobody leaves an in-sync set
`come_to_rest`  with nobody asking for anything: no decision is made, no partition has something
                open, and no process begins more tasks than it ends
"""

import asyncio
from random import Random

from clusterchecks import Broken
from history import Partition, Send
from simcluster import SimCluster
from simworkload import Workload

from raftq.cluster.metadata.commands import AlterTopic
from raftq.cluster.metadata.state import PartitionState

ROUNDS = 4
ANSWER_S = 4.0
AFTERMATH_S = 6.0
LATE_S = 0.3
REST_S = 40.0
"""Everything is at rest after this long."""
QUIET_S = 5.0
"""For so long nothing must happen to count as rest."""


async def calm_time(cluster: SimCluster, workload: Workload) -> None:
    # Connections that hung since before the heal are given up, and leases end, in this time.
    await asyncio.sleep(AFTERMATH_S)
    await cluster.until("every partition is whole after a while", cluster.is_whole, 30.0)
    process = cluster.client("prober")
    await process.spawn(_probe(cluster, workload))
    process.kill()


async def _probe(cluster: SimCluster, workload: Workload) -> None:
    rng = Random(f"calm {cluster.plan.seed}")
    leavers = Leavers(cluster)
    async with workload.prober() as producer:
        for number in range(ROUNDS):
            began = cluster.loop.time()
            places = workload.partitions
            values = {one: f"probe {number} of {one[0]}/{one[1]}".encode() for one in places}
            work = [
                asyncio.create_task(workload.send_one(producer, one, values[one])) for one in places
            ]
            if not cluster.plan.always and number:
                await asyncio.sleep(rng.uniform(0, 2 * cluster.plan.sync_s))
                _alter(cluster, rng, "interval" if number % 2 else "always")
            await _answered(cluster, work, leavers)
            leavers.check()
            took = cluster.loop.time() - began
            if took > ANSWER_S:
                raise Broken(f"records took {took:.1f} s in a calm time\n{cluster.describe()}")
            await asyncio.sleep(rng.uniform(0, 0.5))


async def _answered(
    cluster: SimCluster, work: "list[asyncio.Task[Send]]", leavers: "Leavers"
) -> None:
    end = cluster.loop.time() + 30.0
    pending = set(work)
    while pending:
        _, pending = await asyncio.wait(pending, timeout=0.05)
        leavers.check()
        if cluster.loop.time() > end:
            raise Broken(f"no answer to a record in a calm time\n{cluster.describe()}")
    for one in work:
        send = one.result()
        if send.status != "ok" and "TooLarge" not in send.error:
            raise Broken(f"a record failed in a calm time: {send}\n{cluster.describe()}")


def _alter(cluster: SimCluster, rng: Random, fsync: str) -> None:
    """An operator changes when topics sync; the answer may take its time."""
    node = rng.choice(list(cluster.nodes.values()))
    assert node.process is not None
    assert node.node is not None
    for topic in cluster.plan.topics:
        command = AlterTopic(topic.name, {"fsync": fsync, "value_bytes_max": None})
        node.process.spawn(node.node.metadata.propose(command))


class Leavers:
    """Who was in sync when the calm time began, and must stay so.

    A node that is late may be put out under a new leader: the leader gives it a fixed time to come,
    and its metadata, or that of the leader, may use up most of it. To have heard of the leader is
    not enough, because the node still has to connect and subscribe. Nor is it enough to have come,
    while the leader has more than it, or has proposed to go on without it. The excuse ends when all
    have come and have everything: from then on nothing that is late about the epoch is left, and
    whoever leaves in it is put out for no reason.
    """

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._began: dict[Partition, PartitionState] = {
            (topic.name, number): one
            for topic, number, one in cluster.consensus.state.all_partitions()
        }
        late = {one for one, lag_s in cluster.plan.world.lags_s.items() if lag_s > LATE_S}
        voters = set(cluster.plan.voters)
        # An observer hears no sooner than the voter that it watches, and that may be any.
        self._late = late if late.isdisjoint(voters) else late | (set(cluster.nodes) - voters)
        self._settled: dict[Partition, int] = {}
        """By partition: the newest epoch in which the leader has seen all with everything."""
        self._note_settled()

    def _note_settled(self) -> None:
        for topic, number, one in self._cluster.consensus.state.all_partitions():
            key = (topic.name, number)
            copy = None if one.leader is None else self._cluster.nodes[one.leader].copy_of(key)
            if copy is None or copy.replica.role != "leader":
                continue
            replica = copy.replica
            if replica._proposed is None and not replica.is_behind():
                self._settled[key] = replica.epoch

    def check(self) -> None:
        for topic, number, one in self._cluster.consensus.state.all_partitions():
            began = self._began.get((topic.name, number), one)
            for member in began.isr:
                late = member in self._late or one.leader in self._late
                if late and one.epoch != self._settled.get((topic.name, number)):
                    continue
                if member in one.replicas and member not in one.isr:
                    raise Broken(
                        f"node-{member} left the isr of {topic.name}/{number} in a calm time\n"
                        f"{self._cluster.describe()}"
                    )
        self._note_settled()


async def come_to_rest(cluster: SimCluster) -> None:
    """Clients are gone; what still moves after a while is named."""
    for process in cluster.clients:
        process.kill()
    end = cluster.loop.time() + REST_S
    while True:
        moving = await _moves(cluster)
        if not moving:
            return
        if cluster.loop.time() > end:
            raise Broken(f"no rest after {REST_S:.0f} s: {'; '.join(moving)}\n{cluster.describe()}")


async def _moves(cluster: SimCluster) -> list[str]:
    """What happened in the next `QUIET_S`."""
    consensus = cluster.consensus
    index = consensus.commit_index
    tasks = {name: len(names) for name, names in _tasks(cluster).items()}
    touched: dict[str, None] = {}
    for _ in range(10):
        await asyncio.sleep(QUIET_S / 10)
        for node in cluster.nodes.values():
            if node.node is not None:
                found = [str(one.ref) for one in node.node.partitions._active]
                touched.update(dict.fromkeys(f"{node.machine.name} {one}" for one in found))
    moving = []
    if consensus.commit_index != index:
        last = consensus.last_entry()
        moving.append(f"{consensus.commit_index - index} entries in {QUIET_S} s, last {last}")
    if touched:
        moving.append(f"touched {', '.join(touched)}")
    for name, names in _tasks(cluster).items():
        if len(names) > tasks.get(name, 0):
            moving.append(f"{name} has {len(names)} tasks after {tasks.get(name, 0)}: {names}")
    return moving


def _tasks(cluster: SimCluster) -> dict[str, list[str]]:
    """What each node's process has open."""
    return {
        node.process.name: sorted(node.process.open_tasks())
        for node in cluster.nodes.values()
        if node.process is not None
    }
