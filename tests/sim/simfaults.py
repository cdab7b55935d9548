"""The faults of the cluster simulation, and the schedule that a seed makes of them.

Each fault is injected, lasts a while and is taken back. What must not happen is what no cluster can
survive: two machines that lose unsynced data before the first has caught up again. So nodes that
lost data are `tainted` until they are back in every in-sync set, and while one is, no other loses
any (topics that sync before they acknowledge may lose power at will).
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Any

from simcluster import SimCluster, SimNode

from raftq.client.wire.errors import RaftqError
from raftq.cluster.commands import Command, MoveReplicas

Fault = Callable[[], Coroutine[Any, Any, None]]


class Faults:
    """Runs the schedule of a seed: `async with asyncio.TaskGroup() as group: faults.run(group)`."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._network = cluster.network
        self.rng = Random(f"faults {cluster.plan.seed}")
        self.injected: dict[str, int] = {}
        kinds: dict[str, Fault] = {
            "kill": self.kill,
            "kill_many": self.kill_many,
            "power_cut": self.power_cut,
            "wipe": self.wipe,
            "pause": self.pause,
            "isolate": self.isolate,
            "split": self.split,
            "one_way": self.one_way,
            "shut": self.shut,
            "slow": self.slow,
            "full_disk": self.full_disk,
            "slow_metadata": self.slow_metadata,
            "restart": self.restart,
            "move": self.move,
        }
        # Each seed has some of them, so that rare combinations come about too.
        names = self.rng.sample(list(kinds), self.rng.randint(2, len(kinds)))
        if cluster.plan.always:
            names.append("power_cut")
        self._kinds = {name: kinds[name] for name in names}

    async def run(self) -> None:
        """Inject faults until the plan's time is over and all of them have been taken back."""
        cluster, plan = self._cluster, self._cluster.plan
        end = cluster.loop.time() + plan.faults_s
        async with asyncio.TaskGroup() as group:
            while cluster.loop.time() < end:
                await asyncio.sleep(self.rng.expovariate(1 / plan.fault_every_s))
                name = self.rng.choice(list(self._kinds))
                cluster.loop.trace(f"fault {name}")
                self.injected[name] = self.injected.get(name, 0) + 1
                group.create_task(self._kinds[name]())

    def _node(self) -> SimNode:
        """The leader of some partition, or just any node."""
        state = self._cluster.consensus.state
        leaders = [one.leader for _, _, one in state.all_partitions() if one.leader is not None]
        if leaders and self.rng.random() < 0.6:
            return self._cluster.nodes[self.rng.choice(leaders)]
        return self.rng.choice(list(self._cluster.nodes.values()))

    async def _last(self, seconds_max: float) -> None:
        # Mostly short, now and then up to the limit.
        await asyncio.sleep(min(self.rng.expovariate(3 / seconds_max), seconds_max))

    async def _at_a_bad_time(self) -> None:
        """Often just when something was acknowledged: then there is most to lose."""
        if self.rng.random() < 0.6:
            self._cluster.acknowledged.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._cluster.acknowledged.wait()

    def _may_lose_data(self, node: SimNode) -> bool:
        """Whether everybody else has what this node is about to lose."""
        cluster = self._cluster
        for other in cluster.nodes.values():
            if other.tainted and self._is_back(other):
                other.tainted = other.wiped = False
        return all(one is node or not one.tainted for one in cluster.nodes.values())

    def _may_lose_power(self, node: SimNode) -> bool:
        """With fsync `always` a power cut costs nothing that was acknowledged."""
        return self._cluster.plan.always or self._may_lose_data(node)

    def _is_back(self, node: SimNode) -> bool:
        state = self._cluster.consensus.state
        return node.ready and all(
            node.node_id in one.isr
            for _, _, one in state.all_partitions()
            if node.node_id in one.replicas
        )

    # Processes and machines.

    async def kill(self) -> None:
        await self._at_a_bad_time()
        node = self._node()
        node.kill()
        await self._last(4.0)
        node.start()

    async def kill_many(self) -> None:
        await self._at_a_bad_time()
        nodes = self.rng.sample(
            list(self._cluster.nodes.values()), self.rng.randint(2, len(self._cluster.nodes))
        )
        for node in nodes:
            node.kill()
        for node in nodes:
            await self._last(2.0)
            node.start()

    async def power_cut(self) -> None:
        await self._at_a_bad_time()
        nodes = [self._node()]
        if self._cluster.plan.always and self.rng.random() < 0.5:
            nodes = list(self._cluster.nodes.values())
        for node in nodes:
            if node.up and self._may_lose_power(node):
                node.kill(power=True)
        for node in nodes:
            await self._last(3.0)
            node.start()

    async def restart(self) -> None:
        """As SIGTERM does: hand on, finish, close, exit; killed when it takes too long."""
        node = self._node()
        process = node.process
        if not node.ready or process is None or process.paused:
            return
        stopping = process.spawn(node.leave())
        await asyncio.wait((stopping,), timeout=8.0)
        if process is node.process:
            node.kill()
        await self._last(2.0)
        node.start()

    async def wipe(self) -> None:
        node = self._node()
        if node.up and self._may_lose_data(node) and self._is_back(node):
            node.kill(wipe=True)
        await self._last(3.0)
        node.start()

    async def pause(self) -> None:
        process = self._node().process
        if process is not None and not process.paused:
            process.pause()
            await self._last(5.0)
            process.resume()

    async def move(self) -> None:
        """An operator moves a partition to other nodes."""
        cluster, node = self._cluster, self._node()
        topic = self.rng.choice(cluster.plan.topics)
        number = self.rng.randrange(topic.partitions)
        target = tuple(self.rng.sample(list(cluster.nodes), 3))
        if node.ready and node.process is not None and node.node is not None:
            command = MoveReplicas(topic.name, number, target)
            node.process.spawn(_propose(node, command))
        await self._last(1.0)

    # Links.

    async def isolate(self) -> None:
        """One node from all others; clients still reach it, or not."""
        names = [one.machine.name for one in self._cluster.nodes.values()]
        alone = self.rng.choice(names)
        others = [name for name in names if name != alone]
        if self.rng.random() < 0.5:
            others += [one.machine.name for one in self._cluster.clients]
        await self._cut([(alone, one) for one in others] + [(one, alone) for one in others])

    async def split(self) -> None:
        """Two groups of machines, clients among them."""
        names = [one.machine.name for one in self._cluster.nodes.values()]
        names += [one.machine.name for one in self._cluster.clients]
        left = [name for name in names if self.rng.random() < 0.5]
        right = [name for name in names if name not in left]
        pairs = [(one, other) for one in left for other in right]
        await self._cut(pairs + [(other, one) for one, other in pairs])

    async def one_way(self) -> None:
        names = [one.machine.name for one in self._cluster.nodes.values()]
        pairs = [(one, other) for one in names for other in names if one != other]
        await self._cut(self.rng.sample(pairs, self.rng.randint(1, 2)))

    async def shut(self) -> None:
        """Nobody can connect to a node any more, and it reaches everybody itself."""
        name = self._node().machine.name
        self._network.shut(name, refuses=self.rng.random() < 0.5)
        await self._last(8.0)
        self._network.open_again(name)

    async def _cut(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            self._network.cut(*pair)
        await self._last(5.0)
        for pair in pairs:
            self._network.heal(*pair)

    async def slow(self) -> None:
        names = [one.machine.name for one in self._cluster.nodes.values()]
        pair = (self.rng.choice(names), self.rng.choice(names))
        self._network.slow[pair] = self.rng.choice((0.05, 0.3, 1.0))
        await self._last(5.0)
        self._network.slow.pop(pair, None)

    async def slow_metadata(self) -> None:
        node = self._node()
        seat = self._cluster.consensus.seats[node.node_id]
        member = seat.member
        if member is not None:
            member.slow_s = self.rng.choice((0.1, 1.0))
            await self._last(5.0)
            member.slow_s = 0.0

    # Disks.

    async def full_disk(self) -> None:
        node = self._node()
        node.disk.capacity = node.disk.used_bytes() + self.rng.randint(0, 2_000)
        await self._last(4.0)
        node.disk.capacity = None


async def _propose(node: SimNode, command: Command) -> None:
    assert node.node is not None
    with suppress(RaftqError):
        await node.node.metadata.propose(command)
