"""Whom a fault hits: nodes by their role now, links by whom they join. (Pure but for questions.)

Roles are looked up when a fault is injected, past the proxies. Where nobody has the role at the
moment, any running node stands in: a fault that does nothing tests nothing. All choices are made
with the world's own chance.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from raftq.chaos.world import CLIENTS, Pair, World

Who = Literal["leader", "follower", "controller", "any"] | int
"""A role, or a node id."""
Where = Literal["peers", "clients", "everywhere"]
"""Links between nodes, links from clients, or both."""


def choose(world: World, who: Who, topic: str = "") -> int:
    """A node. Leaders and followers are of a partition of a topic whose name begins so."""
    if isinstance(who, int):
        return who
    running = [one for one in world.ids if world.is_running(one)] or list(world.ids)
    if who == "any":
        return world.rng.choice(running)
    if who == "controller":
        controller = world.controller()
        return controller if controller in running else world.rng.choice(running)
    leader = _leader(world, topic, running)
    if who == "leader":
        return leader
    others = [one for one in running if one != leader]
    return world.rng.choice(others or running)


def _leader(world: World, topic: str, running: Sequence[int]) -> int:
    leaders = [
        leader
        for (name, _), leader in sorted(world.leaders().items())
        if name.startswith(topic) and leader in running
    ]
    return world.rng.choice(leaders or running)


def others(world: World, node_id: int) -> list[int]:
    return [one for one in world.ids if one != node_id]


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
    return [(CLIENTS, one) for one in nodes]
