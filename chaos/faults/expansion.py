"""Shell: a split that begins while a follower returns to the in-sync replicas.

The leader asks for the change and the controller decides it, but the leader never learns of it:
the decision is delayed on its way to the leader until the links are cut.
"""

from dataclasses import dataclass, field
from threading import Event

from raftq.chaos.faults.base import LinkFault
from raftq.chaos.faults.changes import movable, until
from raftq.chaos.faults.targets import between
from raftq.chaos.world import PartitionView, World
from raftq.client.common.errors import RequestTimeout
from raftq.client.common.types import PartitionKey

DELAY_MS = 300
DELAYS = 3
"""Added one after the other: all at once would look as if the controller had died."""


@dataclass(slots=True)
class SplitAtExpansion(LinkFault):
    """Pauses a follower until it has left the in-sync replicas, and resumes it.

    When it is in sync again, all other copies, the leader's too, are cut off from it and from the
    controller."""

    topic: str = ""
    _paused: int | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return "split at an expansion"

    def inject(self, world: World) -> str:
        key, follower = self._choose(world)
        operator = world.operator
        self._paused = follower
        world.pause(follower)
        until(
            lambda: _goes_on_without(operator.partitions()[key], follower),
            f"{key}: {follower} out",
        )
        small = [node for node in operator.partitions()[key].replicas if node != follower]
        controller = world.controller()
        large = [node for node in world.ids if node not in small]
        # The links of the controller are cut first: its decision must not arrive.
        large.sort(key=lambda node: node != controller)
        self._pairs = between(large, small)
        if controller in large:
            self._delay(world, controller, small)
        world.resume(follower)
        self._paused = None
        until(
            lambda: follower in operator.partitions()[key].isr,
            f"{key}: {follower} in sync again",
        )
        world.links.cut(self._pairs)
        return (
            f"nodes {sorted(small)} cut off when node {follower} was let in again to "
            f"{key[0]}/{key[1]}, node {controller} controls"
        )

    def _choose(self, world: World) -> tuple[PartitionKey, int]:
        """Chooses a partition and one of its followers.

        The other copies are fewer than half of the nodes. If possible, the controller has no copy
        of the partition."""
        controller = world.controller()
        found = movable(world, self.topic)
        every = [
            (key, node_id)
            for key, view in found.items()
            for node_id in view.replicas
            if node_id != view.leader and 2 * (len(view.replicas) - 1) < len(world.ids)
        ]
        if not every:
            raise RequestTimeout(f"no partition of {self.topic!r} can be split")
        beside = [choice for choice in every if controller not in found[choice[0]].replicas]
        return world.rng.choice(beside or every)

    def _delay(self, world: World, controller: int, small: list[int]) -> None:
        for _ in range(DELAYS):
            for upstream in (True, False):
                pairs = [(controller, node) if upstream else (node, controller) for node in small]
                world.links.toxic(pairs, "latency", upstream, latency=DELAY_MS, jitter=0)
            Event().wait(2 * DELAY_MS / 1000)

    def heal(self, world: World) -> None:
        if self._paused is not None:
            world.resume(self._paused)
            self._paused = None
        LinkFault.heal(self, world)


def _goes_on_without(view: PartitionView, node_id: int) -> bool:
    return view.leader not in (None, node_id) and node_id not in view.isr
