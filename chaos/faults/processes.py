"""Faults of processes: killed, stopped, paused, wiped. (Shell.)"""

from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar

from raftq.chaos.faults.targets import Who, choose
from raftq.chaos.world import World

NOTHING: frozenset[str] = frozenset()


@dataclass(slots=True)
class Kill:
    """kill -9 of one node; healed, it is started again."""

    who: Who = "leader"
    topic: str = ""
    needs: ClassVar[frozenset[str]] = NOTHING
    _node: int | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"kill {self.who}"

    def inject(self, world: World) -> str:
        self._node = choose(world, self.who, self.topic)
        world.kill(self._node)
        return f"node {self._node} killed"

    def heal(self, world: World) -> None:
        if self._node is not None:
            world.restart(self._node)
            self._node = None


@dataclass(slots=True)
class KillMany:
    """kill -9 of several nodes at once, one after the other without a pause; None means all."""

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
    """Every node in turn is stopped, or killed if `hard`, and started again when it is down.

    It is over when `inject` returns."""

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
class Pause:
    """SIGSTOP of one node: it stands still, and its connections stay open."""

    who: Who = "leader"
    topic: str = ""
    needs: ClassVar[frozenset[str]] = NOTHING
    _node: int | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"pause {self.who}"

    def inject(self, world: World) -> str:
        self._node = choose(world, self.who, self.topic)
        world.pause(self._node)
        return f"node {self._node} paused"

    def heal(self, world: World) -> None:
        if self._node is not None:
            world.resume(self._node)
            self._node = None


@dataclass(slots=True)
class Wipe:
    """One node is killed and loses its disk; healed, it comes back empty."""

    who: Who = "follower"
    topic: str = ""
    needs: ClassVar[frozenset[str]] = NOTHING
    _node: int | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"wipe {self.who}"

    def inject(self, world: World) -> str:
        self._node = choose(world, self.who, self.topic)
        world.kill(self._node)
        world.wipe(self._node)
        return f"node {self._node} killed and wiped"

    def heal(self, world: World) -> None:
        if self._node is not None:
            world.restart(self._node)
            self._node = None
