"""A split that begins while a follower is let back into the in-sync replicas. (Shell.)

The leader has asked for the change, the controller's side has decided it, and the leader never
hears so: what the controller sends to that side is on its way for long when the links are cut.
"""

from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar

from raftq.chaos.faults.changes import movable, until
from raftq.chaos.faults.network import LINKS
from raftq.chaos.faults.targets import between
from raftq.chaos.world import Pair, PartitionView, World
from raftq.client.common.errors import RequestTimeout
from raftq.client.common.types import PartitionKey

DELAY_MS = 300
DELAYS = 3
"""Added one after the other: all at once would look like the death of the controller."""


@dataclass(slots=True)
class SplitAtExpansion:
    """A follower stands still until it is out of the in-sync replicas. When it is let in again, all
    other copies are cut off from it and from the controller, the leader among them."""

    topic: str = ""
    needs: ClassVar[frozenset[str]] = LINKS
    _paused: int | None = field(default=None, init=False)
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return "split at an expansion"

    def inject(self, world: World) -> str:
        key, follower = self._choose(world)
        operator = world.operator
        self._paused = follower
        world.pause(follower)
        until(
            lambda: _goes_on_without(operator.partition_keys()[key], follower),
            f"{key}: {follower} out",
        )
        small = [one for one in operator.partition_keys()[key].replicas if one != follower]
        controller = world.controller()
        large = [one for one in world.ids if one not in small]
        # The controller first: what it has sent must not arrive.
        large.sort(key=lambda one: one != controller)
        self._pairs = between(large, small)
        if controller in large:
            self._delay(world, controller, small)
        world.resume(follower)
        self._paused = None
        until(
            lambda: follower in operator.partition_keys()[key].isr,
            f"{key}: {follower} in sync again",
        )
        world.links.cut(self._pairs)
        return (
            f"nodes {sorted(small)} cut off when node {follower} was let in again to "
            f"{key[0]}/{key[1]}, node {controller} controls"
        )

    def _choose(self, world: World) -> tuple[PartitionKey, int]:
        """A partition and a follower such that the other copies are fewer than half of the nodes,
        and the controller is neither that follower nor one of them, if possible."""
        controller = world.controller()
        found = movable(world, self.topic)
        every = [
            (key, node_id)
            for key, partition_key in found.items()
            for node_id in partition_key.replicas
            if node_id != partition_key.leader
            and 2 * (len(partition_key.replicas) - 1) < len(world.ids)
        ]
        if not every:
            raise RequestTimeout(f"no partition of {self.topic!r} can be split")
        beside = [one for one in every if controller not in found[one[0]].replicas]
        return world.rng.choice(beside or every)

    def _delay(self, world: World, controller: int, small: list[int]) -> None:
        for _ in range(DELAYS):
            for upstream in (True, False):
                pairs = [(controller, one) if upstream else (one, controller) for one in small]
                world.links.toxic(pairs, "latency", upstream, latency=DELAY_MS, jitter=0)
            Event().wait(2 * DELAY_MS / 1000)

    def heal(self, world: World) -> None:
        if self._paused is not None:
            world.resume(self._paused)
            self._paused = None
        world.links.heal(self._pairs)
        self._pairs = []


def _goes_on_without(partition_key: PartitionView, node_id: int) -> bool:
    return partition_key.leader not in (None, node_id) and node_id not in partition_key.isr
