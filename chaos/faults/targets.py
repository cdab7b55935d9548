"""Shell: chooses the nodes and links that a fault hits.

Roles are looked up when a fault is injected, past the proxies. If no node has the role at that
moment, any running node is taken: a fault that does nothing tests nothing. All choices use the
world's random generator, so that a seed repeats them.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from raftq.chaos.world import CLIENTS, Pair, World

Who = Literal["leader", "follower", "controller", "any"] | int
"""A role, or a node id."""
Where = Literal["peers", "clients", "everywhere"]
"""Links between nodes, links from clients, or both."""


def choose(world: World, who: Who, topic: str = "") -> int:
    """Chooses a node. `leader` and `follower` refer to topics whose names begin with `topic`."""
    if isinstance(who, int):
        return who
    running = [node_id for node_id in world.ids if world.is_running(node_id)] or list(world.ids)
    if who == "any":
        return world.rng.choice(running)
    if who == "controller":
        controller = world.controller()
        return controller if controller in running else world.rng.choice(running)
    leader = _leader(world, topic, running)
    if who == "leader":
        return leader
    others = [node_id for node_id in running if node_id != leader]
    return world.rng.choice(others or running)


def _leader(world: World, topic: str, running: Sequence[int]) -> int:
    leaders = [
        leader
        for (name, _), leader in sorted(world.leaders().items())
        if name.startswith(topic) and leader in running
    ]
    return world.rng.choice(leaders or running)


def others(world: World, node_id: int) -> list[int]:
    return [peer for peer in world.ids if peer != node_id]


def around(world: World, node_id: int) -> list[Pair]:
    """All links between a node and its peers, in both directions."""
    return between([node_id], others(world, node_id))


def between(some: Iterable[int], rest: Iterable[int]) -> list[Pair]:
    """All links between nodes of two sets, in both directions."""
    there = list(rest)
    return [pair for a in some for b in there if a != b for pair in ((a, b), (b, a))]


def links(world: World, where: Where) -> list[Pair]:
    found: list[Pair] = []
    if where != "clients":
        found += [(a, b) for a in world.ids for b in world.ids if a != b]
    if where != "peers":
        found += from_clients(world.ids)
    return found


def from_clients(nodes: Iterable[int]) -> list[Pair]:
    return [(CLIENTS, node_id) for node_id in nodes]
