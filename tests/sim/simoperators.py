"""Operators of the simulated cluster, who change it while everything else goes wrong.

Each action is a fault like any other: it begins, lasts and is taken back. What they ask for may be
refused, and its outcome may stay unknown to them. `tidy` leaves the cluster as it should be in the
end: nobody drained, every topic there.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from simcluster import Key, SimCluster, SimNode

from raftq.client.common.errors import RaftqError
from raftq.cluster.metadata.commands import (
    AddPartitions,
    AlterTopic,
    Command,
    CreateTopic,
    DeleteTopic,
    ElectPreferred,
    EnableQueues,
    MoveReplicas,
    SetDraining,
)
from raftq.cluster.metadata.state import PartitionState

ASK_S = 6.0
SCRATCH = "scratch"
PARTITIONS_MAX = 5


def topic_command(cluster: SimCluster, name: str) -> CreateTopic:
    """What creates a topic of the plan."""
    (topic,) = (one for one in cluster.plan.topics if one.name == name)
    config: dict[str, Any] = {
        "fsync": topic.fsync, "segment_bytes": topic.segment_bytes, "min_insync": topic.min_insync,
        "retention_bytes": topic.retention_bytes,
    }  # fmt: skip
    return CreateTopic(name, topic.partitions, 3, config)


class Operators:
    """Operators that change the cluster while faults last. `last` sleeps for as long as a fault
    lasts."""

    def __init__(self, cluster: SimCluster, rng: Random, last: Callable[[float], Any]) -> None:
        self._cluster = cluster
        self._consensus = cluster.consensus
        self._rng = rng
        self._last = last

    # Asking.

    def tell(self, command: Command) -> "asyncio.Task[Any] | None":
        """Have some node that serves propose it; None when there is none."""
        ready = [
            one
            for one in self._cluster.nodes.values()
            if one.ready and one.process is not None and not one.process.paused
        ]
        if not ready:
            return None
        node = self._rng.choice(ready)
        assert node.process is not None
        return node.process.spawn(_propose(node, command))

    async def ask(self, command: Command) -> Any:
        """The result, or None when it was refused or did not come."""
        task = self.tell(command)
        if task is not None:
            await asyncio.wait((task,), timeout=ASK_S)
            if task.done() and not task.cancelled():
                return task.result()
        return None

    async def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        loop = self._cluster.loop
        end = loop.time() + seconds
        while not holds() and loop.time() < end:
            await asyncio.sleep(0.005)
            await asyncio.sleep(0)

    # Choosing.

    def _partition(self) -> tuple[Key, PartitionState] | None:
        found = [
            ((topic.name, number), one)
            for topic, number, one in self._consensus.state.all_partitions()
            if not topic.name.startswith("__")
        ]
        return self._rng.choice(found) if found else None

    def _nodes(self) -> list[int]:
        return list(self._cluster.nodes)

    # Moves.

    async def move(self) -> None:
        """A partition to other nodes, perhaps to fewer or more."""
        chosen = self._partition()
        if chosen is not None:
            count = min(self._rng.choice((2, 3, 3, 3, 4)), len(self._cluster.nodes))
            target = tuple(self._rng.sample(self._nodes(), count))
            self.tell(MoveReplicas(*chosen[0], target))
        await self._last(1.0)

    async def move_and_back(self) -> None:
        """One replica away and back again, soon."""
        chosen = self._partition()
        if chosen is not None:
            await self._away_and_back(*chosen, self._rng.choice(chosen[1].replicas))

    async def move_and_pause(self) -> None:
        """The same while the node in question does not listen."""
        chosen = self._partition()
        if chosen is None:
            return
        mover = self._rng.choice(chosen[1].replicas)
        process = self._cluster.nodes[mover].process
        if process is None or process.paused or process.dead:
            return
        process.pause()
        await self._away_and_back(*chosen, mover)
        await asyncio.sleep(self._rng.uniform(0, 0.4))
        if process.paused and not process.dead:
            process.resume()

    async def _away_and_back(self, key: Key, state: PartitionState, mover: int) -> None:
        rng = self._rng
        stay = [one for one in state.replicas if one != mover]
        spare = [one for one in self._nodes() if one not in state.replicas]
        away = (*stay, *([rng.choice(spare)] if spare else []))
        self.tell(MoveReplicas(*key, away))
        if rng.random() < 0.8:
            await self._until(lambda: mover not in self._replicas(key), 3.0)
            await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 0.3))))
        else:
            await asyncio.sleep(rng.uniform(0, 0.3))
        back = (mover, *stay) if rng.random() < 0.5 else (*stay, mover)
        self.tell(MoveReplicas(*key, back))
        await self._until(lambda: mover in self._replicas(key), 1.0)

    def _replicas(self, key: Key) -> Sequence[int]:
        state = self._consensus.state.partition(*key)
        return () if state is None else state.replicas

    async def elect_preferred(self) -> None:
        state = self._consensus.state
        places = tuple((topic.topic_id, number) for topic, number, _ in state.all_partitions())
        self.tell(ElectPreferred(places))
        await self._last(0.5)

    # Topics.

    def _topic(self) -> str:
        return self._rng.choice(self._cluster.plan.topics).name

    async def alter(self) -> None:
        rng = self._rng
        change: dict[str, Any] = rng.choice((
            {"fsync": rng.choice(("always", "interval", "none"))},
            {"fsync": rng.choice(("always", "interval"))},
            {"min_insync": rng.choice((2, 3))},
            {"value_bytes_max": rng.choice((200, 1 << 20))},
            {"segment_bytes": rng.choice((4096, 1 << 26))},
        ))  # fmt: skip
        self.tell(AlterTopic(self._topic(), change))
        await self._last(0.5)

    async def add_partitions(self) -> None:
        topic = self._consensus.state.topics.get(self._topic())
        if topic is not None and len(topic.partitions) < PARTITIONS_MAX:
            self.tell(AddPartitions(topic.name, len(topic.partitions) + 1))
        await self._last(0.5)

    async def enable_queues(self) -> None:
        topic = self._consensus.state.topics.get(self._topic())
        if topic is not None:
            self.tell(EnableQueues(topic.topic_id))
        await self._last(0.5)

    async def recreate(self) -> None:
        """Delete the topic that is there for it, and create it anew."""
        if SCRATCH not in {one.name for one in self._cluster.plan.topics}:
            return
        self._cluster.deleted[SCRATCH] = None
        await self.ask(DeleteTopic(SCRATCH))
        await self._last(2.0)
        await self.ask(topic_command(self._cluster, SCRATCH))

    # Nodes.

    async def drain(self) -> None:
        await self._drain(decommission=False)

    async def decommission(self) -> None:
        """Its replicas go elsewhere, as far as there is time; then it is taken back."""
        await self._drain(decommission=True)

    async def _drain(self, decommission: bool) -> None:
        node = self._rng.choice(self._nodes())
        await self.ask(SetDraining(node, True, decommission))
        await self._last(6.0)
        await self.ask(SetDraining(node, False))

    # The end.

    async def tidy(self) -> None:
        """Take back what was not, after everything else has healed."""
        end = self._cluster.loop.time() + 60.0
        while self._cluster.loop.time() < end:
            state = self._consensus.state
            todo: list[Command] = [
                SetDraining(one.node_id, False) for one in state.nodes.values() if one.draining
            ]
            todo += [
                topic_command(self._cluster, one.name)
                for one in self._cluster.plan.topics
                if one.name not in state.topics
            ]
            if not todo:
                return
            for command in todo:
                await self.ask(command)
        raise AssertionError(f"operators get nothing done\n{self._cluster.describe()}")


async def _propose(node: SimNode, command: Command) -> Any:
    if node.node is not None:
        with suppress(RaftqError):
            return await node.node.metadata.propose(command)
    return None
