"""The faults of the cluster simulation, and the schedule that a seed makes of them.

Each fault is injected, lasts a while and is taken back. What must not happen is what no cluster can
survive: two machines that lose unsynced data before the first has caught up again. So nodes that
lost data are `tainted` until they are back in every in-sync set, and while one is, no other loses
any (topics that sync before they acknowledge may lose power at will).

A plan names its kinds of faults, or leaves the choice to the seed. In a world of long faults most
are still short, and some last so long that several timeouts run out during one.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Any

from simcluster import Key, SimCluster, SimNode
from simoperators import Operators

from raftq.cluster.metadata.commands import ChangeIsr, Command

Fault = Callable[[], Coroutine[Any, Any, None]]
LONGEST_S = 30.0
_PLAIN = (
    "kill", "kill_many", "power_cut", "wipe", "pause", "isolate", "split", "one_way", "shut",
    "slow", "full_disk", "slow_metadata", "restart", "move",
)  # fmt: skip


class Faults:
    """Runs the schedule of a seed: `async with asyncio.TaskGroup() as group: faults.run(group)`."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._network = cluster.network
        self.rng = Random(f"faults {cluster.plan.seed}")
        self.injected: dict[str, int] = {}
        self.operators = Operators(cluster, self.rng, self._last)
        self._joining: asyncio.Event = asyncio.Event()
        self._joining.set()
        self._in_sync: tuple[int, ...] = ()
        self._place: Key | None = None
        cluster.consensus.on_proposed = self._note_proposed
        kinds = self._all_kinds()
        if cluster.plan.kinds:
            self._kinds = {f"{one}.{at}": kinds[one] for at, one in enumerate(cluster.plan.kinds)}
            return
        # Each seed has some of them, so that rare combinations come about too.
        names = self.rng.sample(list(_PLAIN), self.rng.randint(2, len(_PLAIN)))
        if cluster.plan.always:
            names.append("power_cut")
        self._kinds = {name: kinds[name] for name in names}

    def _all_kinds(self) -> dict[str, Fault]:
        operators = self.operators
        return {
            "kill": self.kill,
            "kill_many": self.kill_many,
            "power_cut": self.power_cut,
            "wipe": self.wipe,
            "pause": self.pause,
            "isolate": self.isolate,
            "split": self.split,
            "split_joiner": self.split_joiner,
            "one_way": self.one_way,
            "shut": self.shut,
            "slow": self.slow,
            "full_disk": self.full_disk,
            "fail_syncs": self.fail_syncs,
            "fail_read": self.fail_read,
            "rot": self.rot,
            "clock_jump": self.clock_jump,
            "slow_metadata": self.slow_metadata,
            "restart": self.restart,
            "move": operators.move,
            "move_and_back": operators.move_and_back,
            "move_and_pause": operators.move_and_pause,
            "alter": operators.alter,
            "recreate": operators.recreate,
            "add_partitions": operators.add_partitions,
            "enable_queues": operators.enable_queues,
            "elect_preferred": operators.elect_preferred,
            "drain": operators.drain,
            "decommission": operators.decommission,
        }

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
        if self._cluster.plan.world.long and self.rng.random() < 0.4:
            longer = seconds_max * self.rng.paretovariate(0.7) / 2
            await asyncio.sleep(min(longer, LONGEST_S))
            return
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
        rotten = set(cluster.rotten.values()) - {node.node_id}
        return not rotten and all(one is node or not one.tainted for one in cluster.nodes.values())

    def _may_lose_power(self, node: SimNode) -> bool:
        """With fsync `always` a power cut costs nothing that was acknowledged."""
        if node.suspect or self._cluster.rotten:
            return False
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

    async def split_joiner(self) -> None:
        """A leader and those in sync with it on one side, and on the other whoever was just
        proposed to be let in, for longer than it takes to give up on the proposal."""
        cluster, rng = self._cluster, self.rng
        out = self._follower()
        if out is None or not self._joining.is_set():
            return  # one at a time
        self._joining.clear()
        out.kill()
        await asyncio.sleep(rng.uniform(0.5, 3.5))
        out.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(8.0):
                await self._joining.wait()
        leader = cluster.consensus.leader
        if not self._joining.is_set() or (leader in self._in_sync and rng.random() < 0.8):
            self._joining.set()
            return  # with the one who decides on their side, they would hear of it
        await asyncio.sleep(rng.uniform(0.001, 0.002 + cluster.plan.decide_s / 8))
        near = [cluster.nodes[one].machine.name for one in self._in_sync]
        far = [one.machine.name for one in cluster.nodes.values() if one.machine.name not in near]
        for client in cluster.clients:
            (near if rng.random() < 0.8 else far).append(client.machine.name)
        pairs = [(one, other) for one in near for other in far]
        cluster.hot = self._place
        await self._cut_for(rng.uniform(9.0, 22.0), pairs + [(b, a) for a, b in pairs])
        cluster.hot = None

    def _follower(self) -> SimNode | None:
        """Some node that runs and follows in an in-sync set."""
        nodes = self._cluster.nodes
        found = [
            nodes[one]
            for _, _, state in self._cluster.consensus.state.all_partitions()
            for one in state.isr
            if one != state.leader and nodes[one].ready
        ]
        return self.rng.choice(found) if found else None

    def _note_proposed(self, node_id: int, command: Command) -> None:
        """A proposal is on its way; one that lets somebody in is a bad time for a fault."""
        if isinstance(command, ChangeIsr) and not self._joining.is_set():
            topic = self._cluster.consensus.state.topic_by_id(command.topic_id)
            isr = () if topic is None else topic.partitions[command.partition].isr
            if topic is not None and len(command.isr) > len(isr):
                self._in_sync = isr
                self._place = (topic.name, command.partition)
                self._joining.set()

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

    async def _cut_for(self, seconds: float, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            self._network.cut(*pair)
        await asyncio.sleep(seconds)
        for pair in pairs:
            self._network.heal(*pair)

    async def slow(self) -> None:
        names = [one.machine.name for one in self._cluster.nodes.values()]
        pair = (self.rng.choice(names), self.rng.choice(names))
        self._network.slow[pair] = self.rng.choice((0.05, 0.3, 1.0))
        await self._last(5.0)
        self._network.slow.pop(pair, None)

    async def slow_metadata(self) -> None:
        node, consensus = self._node(), self._cluster.consensus
        if consensus.slow_down(node.node_id, self.rng.choice((0.1, 1.0))):
            await self._last(5.0)
            consensus.slow_down(node.node_id, 0.0)

    # Disks.

    async def full_disk(self) -> None:
        node = self._node()
        disk = node.disk
        disk.capacity = disk.used_bytes() + self.rng.randint(0, 2_000)
        disk.copies_on_write = self._cluster.plan.world.copies_on_write
        await self._last(4.0)
        node.disk.capacity = None
        disk.copies_on_write = False

    async def fail_syncs(self) -> None:
        """What it should have written is lost with the next power cut, so there is none."""
        node = self._node()
        node.suspect = True
        disk = node.disk
        disk.fail_sync = True
        await self._last(1.0)
        disk.fail_sync = False

    async def fail_read(self) -> None:
        disk = self._node().disk
        disk.fail_read = True
        await self._last(0.5)
        disk.fail_read = False

    async def rot(self) -> None:
        """A bit flips in what is durable of one copy. Each partition rots once, on one node, and
        where another copy that is in sync is good; in sealed segments, elsewhere than in `disks`,
        since nobody looks for damage in active ones."""
        cluster, rng = self._cluster, self.rng
        node = self._node()
        found = [
            (one.ref, one.log.directory)
            for one in (node.node.partitions if node.ready and node.node is not None else ())
            if (one.ref.topic_id, one.ref.number) not in cluster.rotten
            and self._has_good_copy((one.ref.topic, one.ref.number), node)
        ]
        if not found or not self._may_lose_data(node):
            return
        place, directory = rng.choice(found)
        names = [one for one in node.disk.list(directory) if one.endswith(".log")]
        if cluster.plan.world.profile != "disks":
            names = names[:-1]
        files = [f"{directory}/{one}" for one in names]
        sizes = {path: node.disk.durable_bytes(path) for path in files}
        files = [path for path, size in sizes.items() if size]
        if files:
            path = rng.choice(files)
            cluster.loop.trace(f"rot {node.machine.name} {path}")
            cluster.rotten[place.topic_id, place.number] = node.node_id
            node.disk.flip_bit(path, rng.randrange(sizes[path] * 8))

    def _has_good_copy(self, key: Key, node: SimNode) -> bool:
        state = self._cluster.consensus.state.partition(*key)
        others = () if state is None else state.isr
        return sum(one != node.node_id and self._cluster.nodes[one].ready for one in others) > 0

    async def clock_jump(self) -> None:
        """Somebody sets the clock of a machine; its node follows slowly, or when it restarts."""
        self._node().skew_ms = self.rng.randint(-60_000, 60_000)
