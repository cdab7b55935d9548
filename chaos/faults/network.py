"""Faults of links, through toxiproxy: who is cut off from whom. (Shell.)

A cut is a black hole, not a refusal: whoever sends waits for an answer that never comes.
"""

from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar

from raftq.chaos.faults.targets import Who, around, between, choose, from_clients, others
from raftq.chaos.world import TOXIPROXY, Pair, World

LINKS = frozenset({TOXIPROXY})


@dataclass(slots=True)
class Isolate:
    """One node is cut off from its peers, and also from clients if `clients`."""

    who: Who = "leader"
    topic: str = ""
    clients: bool = False
    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"isolate {self.who}" + (" from all" if self.clients else "")

    def inject(self, world: World) -> str:
        node_id = choose(world, self.who, self.topic)
        self._pairs = around(world, node_id)
        if self.clients:
            self._pairs += from_clients([node_id])
        world.links.cut(self._pairs)
        return f"node {node_id} cut off"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class OneWay:
    """One node is deaf: its peers hear it, and it hears nothing of them. Or mute, the reverse."""

    who: Who = "leader"
    topic: str = ""
    mute: bool = False
    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"{'mute' if self.mute else 'deaf'} {self.who}"

    def inject(self, world: World) -> str:
        node_id = choose(world, self.who, self.topic)
        self._pairs = around(world, node_id)
        for one in others(world, node_id):
            if self.mute:
                stop_one_way(world, node_id, one)
            else:
                stop_one_way(world, one, node_id)
        return f"node {node_id} {'is not heard' if self.mute else 'hears nothing'}"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


def stop_one_way(world: World, sender: int, receiver: int) -> None:
    """What one node sends no longer reaches another, on whoever's connection it goes."""
    world.links.toxic([(sender, receiver)], "timeout", upstream=True, timeout=0)
    world.links.toxic([(receiver, sender)], "timeout", upstream=False, timeout=0)


@dataclass(slots=True)
class Split:
    """Two parts that do not see each other; clients see both. `who` is in the smaller one."""

    who: Who = "leader"
    topic: str = ""
    needs: ClassVar[frozenset[str]] = LINKS
    apart: tuple[int, ...] = field(default=(), init=False)
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"split, {self.who} in the minority"

    def inject(self, world: World) -> str:
        node_id = choose(world, self.who, self.topic)
        rest = others(world, node_id)
        small = [node_id, *world.rng.sample(rest, (len(world.ids) - 1) // 2 - 1)]
        self.apart = tuple(small)
        self._pairs = between(small, [one for one in rest if one not in small])
        world.links.cut(self._pairs)
        return f"nodes {sorted(small)} see each other only"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class MajoritiesRing:
    """Every node sees a majority, and no two see the same one.

    Nodes stand in a ring and see their nearest only. Three nodes all are neighbours: there each
    hears only the one before it."""

    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return "majorities ring"

    def inject(self, world: World) -> str:
        ring = world.rng.sample(world.ids, len(world.ids))
        count = len(ring)
        if count <= 3:
            self._pairs = between(ring, ring)
            for partition_key, node_id in enumerate(ring):
                stop_one_way(world, ring[(partition_key + 1) % count], node_id)
            return f"each of {ring} hears only the one before it"
        seen = (count // 2 + 1) // 2  # on each side; with itself that is a majority
        far = [
            (a, b)
            for i, a in enumerate(ring)
            for j, b in enumerate(ring)
            if min((i - j) % count, (j - i) % count) > seen
        ]
        self._pairs = far
        world.links.cut(far)
        return f"in the ring {ring} each sees {seen} on each side"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class Bridge:
    """Two halves that do not see each other, and one node that sees both."""

    who: Who = "any"
    topic: str = ""
    needs: ClassVar[frozenset[str]] = LINKS
    apart: tuple[int, ...] = field(default=(), init=False)
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"bridge over {self.who}"

    def inject(self, world: World) -> str:
        node_id, half = self._choose(world)
        far = [one for one in others(world, node_id) if one not in half]
        controller = world.controller()
        self.apart = tuple(far if controller in half else half if controller in far else ())
        self._pairs = between(half, far)
        world.links.cut(self._pairs)
        return f"nodes {sorted(half)} and {sorted(far)} see each other over node {node_id} only"

    def _choose(self, world: World) -> tuple[int, list[int]]:
        """The bridge, and one of the halves."""
        node_id = choose(world, self.who, self.topic)
        rest = others(world, node_id)
        return node_id, world.rng.sample(rest, len(rest) // 2)

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class BridgeBesideCopies(Bridge):
    """The same, where a leader has all its followers in the other half: it cannot go on, and the
    next one, which is among them, cannot hear it. The bridge is the controller, if it can be, so
    that nobody is thought dead. Needs two nodes more than a partition has copies."""

    @property
    def name(self) -> str:
        return "bridge between a leader and its followers"

    def _choose(self, world: World) -> tuple[int, list[int]]:
        controller, leaders = world.controller(), world.leaders()
        found = [
            (leaders[partition_key], copies)
            for partition_key, copies in sorted(world.copies().items())
            if partition_key in leaders and partition_key[0].startswith(self.topic)
        ]
        beside = [one for one in found if controller not in one[1]]
        leader, copies = world.rng.choice(beside or found)
        without = [one for one in world.ids if one not in copies]
        bridge = controller if controller in without else world.rng.choice(without)
        return bridge, [one for one in copies if one != leader]


@dataclass(slots=True)
class Swizzle:
    """Links are cut one after the other, and healed one after the other in another order."""

    gap_s: float = 0.3
    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return "swizzle"

    def inject(self, world: World) -> str:
        every = [(a, b) for a in world.ids for b in world.ids if a < b]
        lines = world.rng.sample(every, world.rng.randint(len(every) // 2 + 1, len(every)))
        for a, b in lines:
            self._pairs += [(a, b), (b, a)]
            world.links.cut([(a, b), (b, a)])
            Event().wait(self.gap_s)
        return f"links cut one by one: {lines}"

    def heal(self, world: World) -> None:
        lines = self._pairs[::2]
        self._pairs = []
        world.rng.shuffle(lines)
        for a, b in lines:
            world.links.heal([(a, b), (b, a)])
            Event().wait(self.gap_s)
