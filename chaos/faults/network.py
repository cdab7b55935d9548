"""Shell: faults of links, through toxiproxy: nodes are cut off from each other.

A cut is a black hole, not a refusal: the sender waits for an answer that never comes.
"""

from dataclasses import dataclass, field
from threading import Event

from raftq.chaos.faults.base import LinkFault, NodeLinkFault
from raftq.chaos.faults.targets import Who, around, between, choose, from_clients, others
from raftq.chaos.world import World


@dataclass(slots=True)
class Isolate(NodeLinkFault):
    """Cuts one node off from its peers, and also from clients if `clients`."""

    clients: bool = False

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


@dataclass(slots=True)
class OneWay(NodeLinkFault):
    """One node receives nothing from its peers, but they receive what it sends.

    With `mute` it is the reverse."""

    mute: bool = False

    @property
    def name(self) -> str:
        return f"{'mute' if self.mute else 'deaf'} {self.who}"

    def inject(self, world: World) -> str:
        node_id = choose(world, self.who, self.topic)
        self._pairs = around(world, node_id)
        for peer in others(world, node_id):
            if self.mute:
                stop_one_way(world, node_id, peer)
            else:
                stop_one_way(world, peer, node_id)
        return f"node {node_id} {'reaches nobody' if self.mute else 'receives nothing'}"


def stop_one_way(world: World, sender: int, receiver: int) -> None:
    """Stops all data from `sender` to `receiver`, whichever of the two opened the connection."""
    world.links.toxic([(sender, receiver)], "timeout", upstream=True, timeout=0)
    world.links.toxic([(receiver, sender)], "timeout", upstream=False, timeout=0)


@dataclass(slots=True)
class Split(NodeLinkFault):
    """Splits the nodes into two parts that do not see each other. Clients see both.

    `who` is in the smaller part."""

    apart: tuple[int, ...] = field(default=(), init=False)

    @property
    def name(self) -> str:
        return f"split, {self.who} in the minority"

    def inject(self, world: World) -> str:
        node_id = choose(world, self.who, self.topic)
        rest = others(world, node_id)
        small = [node_id, *world.rng.sample(rest, (len(world.ids) - 1) // 2 - 1)]
        self.apart = tuple(small)
        self._pairs = between(small, [peer for peer in rest if peer not in small])
        world.links.cut(self._pairs)
        return f"nodes {sorted(small)} see each other only"


@dataclass(slots=True)
class MajoritiesRing(LinkFault):
    """Every node sees a majority, and no two see the same one.

    The nodes form a ring and see only their neighbours. In a ring of three all are neighbours, so
    there each node receives only from the node before it."""

    @property
    def name(self) -> str:
        return "majorities ring"

    def inject(self, world: World) -> str:
        ring = world.rng.sample(world.ids, len(world.ids))
        count = len(ring)
        if count <= 3:
            self._pairs = between(ring, ring)
            for position, node_id in enumerate(ring):
                stop_one_way(world, ring[(position + 1) % count], node_id)
            return f"each of {ring} receives only from the node before it"
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


@dataclass(slots=True)
class Bridge(NodeLinkFault):
    """Two halves of the nodes do not see each other. One node, the bridge, sees both."""

    who: Who = "any"
    apart: tuple[int, ...] = field(default=(), init=False)

    @property
    def name(self) -> str:
        return f"bridge over {self.who}"

    def inject(self, world: World) -> str:
        node_id, half = self._choose(world)
        far = [peer for peer in others(world, node_id) if peer not in half]
        controller = world.controller()
        self.apart = tuple(far if controller in half else half if controller in far else ())
        self._pairs = between(half, far)
        world.links.cut(self._pairs)
        return f"nodes {sorted(half)} and {sorted(far)} see each other over node {node_id} only"

    def _choose(self, world: World) -> tuple[int, list[int]]:
        """Returns the bridge and the nodes of one half."""
        node_id = choose(world, self.who, self.topic)
        rest = others(world, node_id)
        return node_id, world.rng.sample(rest, len(rest) // 2)


@dataclass(slots=True)
class BridgeBesideCopies(Bridge):
    """A bridge with a leader in one half and all its followers in the other.

    The leader cannot go on, and the next leader, a follower, cannot receive from it. The bridge is
    the controller if possible, so that no node counts as dead. It needs two nodes more than a
    partition has copies."""

    @property
    def name(self) -> str:
        return "bridge between a leader and its followers"

    def _choose(self, world: World) -> tuple[int, list[int]]:
        controller, leaders = world.controller(), world.leaders()
        found = [
            (leaders[key], copies)
            for key, copies in sorted(world.copies().items())
            if key in leaders and key[0].startswith(self.topic)
        ]
        beside = [choice for choice in found if controller not in choice[1]]
        leader, copies = world.rng.choice(beside or found)
        without = [node_id for node_id in world.ids if node_id not in copies]
        bridge = controller if controller in without else world.rng.choice(without)
        return bridge, [node_id for node_id in copies if node_id != leader]


@dataclass(slots=True)
class Swizzle(LinkFault):
    """Cuts links one after the other, and heals them one after the other in another order."""

    gap_s: float = 0.3

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
