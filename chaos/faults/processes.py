"""Shell: faults of processes: killed, stopped, paused, wiped."""

from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar

from raftq.chaos.faults.base import NOTHING, NodeFault
from raftq.chaos.faults.targets import Who
from raftq.chaos.world import World


@dataclass(slots=True)
class Kill(NodeFault):
    """Kills one node with SIGKILL. Healing starts it again."""

    @property
    def name(self) -> str:
        return f"kill {self.who}"

    def _disturb(self, world: World, node_id: int) -> str:
        world.kill(node_id)
        return f"node {node_id} killed"


@dataclass(slots=True)
class KillMany:
    """Kills several nodes with SIGKILL, one after the other without a pause. None means all."""

    count: int | None = None
    needs: ClassVar[frozenset[str]] = NOTHING
    _nodes: list[int] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return "kill all" if self.count is None else f"kill {self.count}"

    def inject(self, world: World) -> str:
        count = len(world.ids) if self.count is None else self.count
        self._nodes = world.rng.sample(world.ids, count)
        for node_id in self._nodes:
            world.kill(node_id)
        return f"nodes {sorted(self._nodes)} killed"

    def heal(self, world: World) -> None:
        for node_id in self._nodes:
            world.restart(node_id)
        self._nodes = []


@dataclass(slots=True)
class RollingRestart:
    """Stops every node in turn, or kills it if `hard`, and starts it again when it is down.

    All nodes run again when `inject` returns."""

    hard: bool = False
    gap_s: float = 1.0
    needs: ClassVar[frozenset[str]] = NOTHING

    @property
    def name(self) -> str:
        return "rolling kills" if self.hard else "rolling restart"

    def inject(self, world: World) -> str:
        order = world.rng.sample(world.ids, len(world.ids))
        for node_id in order:
            if self.hard:
                world.kill(node_id)
            else:
                world.stop(node_id)
            world.restart(node_id)
            Event().wait(self.gap_s)
        return f"nodes {order} restarted in turn"

    def heal(self, world: World) -> None:
        for node_id in world.ids:
            world.restart(node_id)


@dataclass(slots=True)
class Pause(NodeFault):
    """Pauses one node with SIGSTOP. Its connections stay open."""

    @property
    def name(self) -> str:
        return f"pause {self.who}"

    def _disturb(self, world: World, node_id: int) -> str:
        world.pause(node_id)
        return f"node {node_id} paused"

    def _undo(self, world: World, node_id: int) -> None:
        world.resume(node_id)


@dataclass(slots=True)
class Wipe(NodeFault):
    """Kills one node and deletes its data. Healing starts it again, empty."""

    who: Who = "follower"

    @property
    def name(self) -> str:
        return f"wipe {self.who}"

    def _disturb(self, world: World, node_id: int) -> str:
        world.kill(node_id)
        world.wipe(node_id)
        return f"node {node_id} killed and wiped"
