"""Shell: faults of clocks: the wall clock of a node jumps, once or many times."""

from dataclasses import dataclass
from threading import Event
from typing import ClassVar

from raftq.chaos.faults.base import NodeFault, NodesFault
from raftq.chaos.world import CLOCK, World

CLOCKS = frozenset({CLOCK})


@dataclass(slots=True)
class ClockBump(NodesFault):
    """The wall clock of a node, or of all nodes, is wrong by `seconds`."""

    seconds: float = 3600.0
    needs: ClassVar[frozenset[str]] = CLOCKS

    @property
    def name(self) -> str:
        return f"clock of {self._whom} {self.seconds:+g} s"

    def _disturb(self, world: World) -> str:
        for node_id in self._nodes:
            world.shift_clock(node_id, self.seconds)
        return f"the clocks of {list(self._nodes)} are wrong by {self.seconds:+g} s"

    def _undo(self, world: World, node_id: int) -> None:
        world.shift_clock(node_id, 0.0)


@dataclass(slots=True)
class ClockStrobe(NodeFault):
    """The wall clock of a node jumps many times. It is right again when `inject` returns."""

    seconds: float = 3600.0
    rounds: int = 20
    gap_s: float = 0.1
    needs: ClassVar[frozenset[str]] = CLOCKS

    @property
    def name(self) -> str:
        return f"clock strobe of {self.who}"

    def _disturb(self, world: World, node_id: int) -> str:
        for _ in range(self.rounds):
            world.shift_clock(node_id, world.rng.uniform(-self.seconds, self.seconds))
            Event().wait(self.gap_s)
        world.shift_clock(node_id, 0.0)
        return f"the clock of node {node_id} jumped {self.rounds} times"

    def _undo(self, world: World, node_id: int) -> None:
        world.shift_clock(node_id, 0.0)
