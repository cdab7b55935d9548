"""Faults of clocks: the wall clock of a node jumps, once or to and fro. (Shell.)"""

from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar

from raftq.chaos.faults.targets import Who, choose
from raftq.chaos.world import CLOCK, World

CLOCKS = frozenset({CLOCK})


@dataclass(slots=True)
class ClockBump:
    """The wall clock of a node is wrong by so much; `who` None means that of every node."""

    who: Who | None = "leader"
    topic: str = ""
    seconds: float = 3600.0
    needs: ClassVar[frozenset[str]] = CLOCKS
    _nodes: tuple[int, ...] = field(default=(), init=False)

    @property
    def name(self) -> str:
        return f"clock of {'all' if self.who is None else self.who} {self.seconds:+g} s"

    def inject(self, world: World) -> str:
        whole = self.who is None
        self._nodes = world.ids if whole else (choose(world, self.who or "any", self.topic),)
        for node_id in self._nodes:
            world.shift_clock(node_id, self.seconds)
        return f"the clocks of {list(self._nodes)} are wrong by {self.seconds:+g} s"

    def heal(self, world: World) -> None:
        for node_id in self._nodes:
            world.shift_clock(node_id, 0.0)
        self._nodes = ()


@dataclass(slots=True)
class ClockStrobe:
    """The wall clock of a node jumps to and fro; it is right again when `inject` returns."""

    who: Who = "leader"
    topic: str = ""
    seconds: float = 3600.0
    rounds: int = 20
    gap_s: float = 0.1
    needs: ClassVar[frozenset[str]] = CLOCKS
    _node: int | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"clock strobe of {self.who}"

    def inject(self, world: World) -> str:
        self._node = choose(world, self.who, self.topic)
        for _ in range(self.rounds):
            world.shift_clock(self._node, world.rng.uniform(-self.seconds, self.seconds))
            Event().wait(self.gap_s)
        world.shift_clock(self._node, 0.0)
        return f"the clock of node {self._node} jumped {self.rounds} times"

    def heal(self, world: World) -> None:
        if self._node is not None:
            world.shift_clock(self._node, 0.0)
            self._node = None
