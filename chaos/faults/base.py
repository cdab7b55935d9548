"""Shell: what faults have in common: the node or the links that they disturb, and how they heal."""

from dataclasses import dataclass, field
from typing import ClassVar

from raftq.chaos.faults.targets import Who, choose
from raftq.chaos.world import TOXIPROXY, Pair, World

NOTHING: frozenset[str] = frozenset()
LINKS = frozenset({TOXIPROXY})


@dataclass(slots=True)
class NodeFault:
    """A fault of one node. Subclasses say what they do to it and how that is undone."""

    who: Who = "leader"
    topic: str = ""
    needs: ClassVar[frozenset[str]] = NOTHING
    _node: int | None = field(default=None, init=False)

    def inject(self, world: World) -> str:
        self._node = choose(world, self.who, self.topic)
        return self._disturb(world, self._node)

    def heal(self, world: World) -> None:
        if self._node is not None:
            self._undo(world, self._node)
            self._node = None

    def _disturb(self, world: World, node_id: int) -> str:
        """Disturbs the node and says in one line what it did."""
        raise NotImplementedError

    def _undo(self, world: World, node_id: int) -> None:
        world.restart(node_id)


@dataclass(slots=True)
class NodesFault:
    """A fault of one node, or of all nodes if `who` is None."""

    who: Who | None = "leader"
    topic: str = ""
    needs: ClassVar[frozenset[str]] = NOTHING
    _nodes: tuple[int, ...] = field(default=(), init=False)

    @property
    def _whom(self) -> str:
        return "all" if self.who is None else str(self.who)

    def inject(self, world: World) -> str:
        self._nodes = world.ids if self.who is None else (choose(world, self.who, self.topic),)
        return self._disturb(world)

    def heal(self, world: World) -> None:
        for node_id in self._nodes:
            self._undo(world, node_id)
        self._nodes = ()

    def _disturb(self, world: World) -> str:
        """Disturbs `_nodes` and says in one line what it did."""
        raise NotImplementedError

    def _undo(self, world: World, node_id: int) -> None:
        world.restart(node_id)


@dataclass(slots=True)
class LinkFault:
    """A fault of links. `inject` of a subclass notes the links that it disturbs in `_pairs`."""

    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class NodeLinkFault(LinkFault):
    """A fault of the links of one node."""

    who: Who = "leader"
    topic: str = ""
