"""The simulated consensus keeps Raft's promises, so that what builds on it is tested fairly."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from simloop import Machine, Process, VirtualTimeLoop
from simmetadata import SimConsensus, SimMetadata
from simnet import SimNetwork

from raftq.client.common.errors import NoLeader, OutcomeUnknown, TopicExists
from raftq.cluster.metadata.apply import dump
from raftq.cluster.metadata.changes import Change, TopicChanged
from raftq.cluster.metadata.commands import AllocateProducerIds, CreateTopic, RegisterNode

NODES = (1, 2, 3)


class World:
    """Three nodes that do nothing but keep metadata."""

    def __init__(self, seed: int = 0) -> None:
        self.loop = VirtualTimeLoop()
        self.network = SimNetwork(self.loop, Random(f"network {seed}"))
        machines = {node: Machine(f"node-{node}") for node in NODES}
        self.consensus = SimConsensus(self.network, Random(f"raft {seed}"), "c", machines)
        self.processes: dict[int, Process] = {}
        self.metadata: dict[int, SimMetadata] = {}
        self.runs = 0

    def start(self, node: int, index: int | None = None) -> SimMetadata:
        self.runs += 1
        machine = self.consensus.seats[node].machine
        process = Process(self.loop, machine, f"node-{node}.{self.runs}")
        process.on_death.append(lambda: self.network.process_died(process))
        self.processes[node] = process
        metadata = SimMetadata(self.consensus, node, process, index)
        self.metadata[node] = metadata
        process.spawn(metadata.start())
        return metadata

    def propose(self, node: int, command: Any, timeout_s: float = 5.0) -> "asyncio.Task[Any]":
        return self.processes[node].spawn(self.metadata[node].propose(command, timeout_s))

    def isolate(self, node: int) -> None:
        for other in NODES:
            if other != node:
                self.network.cut(f"node-{node}", f"node-{other}")
                self.network.cut(f"node-{other}", f"node-{node}")


def run(main: Callable[[World], Coroutine[Any, Any, None]], seed: int = 0) -> World:
    world = World(seed)

    async def outer() -> None:
        for node in NODES:
            world.start(node)
        await asyncio.sleep(2)
        await main(world)

    try:
        world.loop.run(outer(), seconds_max=600)
    finally:
        for process in world.processes.values():
            process.kill()
        world.loop.end()
    return world


def register(node: int) -> RegisterNode:
    return RegisterNode(node, f"node-{node}", 7070, 0, "", "", 1)


def test_commands_are_applied_everywhere_in_the_same_order() -> None:
    async def main(world: World) -> None:
        for node in NODES:
            await world.propose(node, register(node))
        result = await world.propose(2, CreateTopic("t", 4, 3, {}))
        assert result["partitions"] == 4
        assert world.metadata[2].state.topics["t"].topic_id == result["topic_id"]
        with pytest.raises(TopicExists):
            await world.propose(1, CreateTopic("t", 4, 3, {}))
        await asyncio.sleep(2)
        assert {dump(one.state) for one in world.metadata.values()} == {dump(world.consensus.state)}

    run(main)


def test_all_nodes_agree_on_the_controller() -> None:
    async def main(world: World) -> None:
        leader = world.consensus.leader
        assert {one.controller for one in world.metadata.values()} == {leader}
        assert [node for node in NODES if world.metadata[node].is_controller] == [leader]

    run(main)


def test_a_node_that_is_cut_off_cannot_change_anything_and_stays_behind() -> None:
    """
    1. Cut the leader off: it goes on to believe in itself for a moment, and then does not.
    2. The others elect another; the old one neither decides nor learns anything.
    3. After the cut it catches up.
    """

    async def main(world: World) -> None:
        old = world.consensus.leader
        assert old is not None
        world.isolate(old)
        assert world.metadata[old].is_controller
        with pytest.raises((NoLeader, OutcomeUnknown)):
            await world.propose(old, register(old), 2.0)
        assert world.metadata[old].controller is None
        other = next(node for node in NODES if node != old)
        await world.propose(other, register(other))
        assert world.consensus.leader != old
        assert world.metadata[old].index < world.metadata[other].index
        world.network.heal_all()
        await asyncio.sleep(2)
        assert dump(world.metadata[old].state) == dump(world.consensus.state)
        assert world.metadata[old].controller == world.consensus.leader

    run(main)


def test_without_a_majority_nothing_is_decided() -> None:
    async def main(world: World) -> None:
        world.processes[1].kill()
        world.processes[2].pause()
        with pytest.raises((NoLeader, OutcomeUnknown)):
            await world.propose(3, register(3))
        world.processes[2].resume()
        await world.propose(3, register(3))

    run(main)


def test_a_restarted_node_gets_everything_again_and_tells_its_subscribers() -> None:
    async def main(world: World) -> None:
        for node in NODES:
            await world.propose(node, register(node))
        await world.propose(1, CreateTopic("t", 1, 3, {}))
        world.processes[1].kill()
        await asyncio.sleep(1)
        await world.propose(2, CreateTopic("u", 1, 3, {}))
        for index in (0, 4):
            world.processes[1].kill()
            metadata = world.start(1, index)
            seen: list[Change] = []
            metadata.subscribe(seen.extend)
            await asyncio.sleep(2)
            names = [one.name for one in seen if isinstance(one, TopicChanged)]
            assert names == ["t", "u"]
            assert dump(metadata.state) == dump(world.consensus.state)

    run(main)


@pytest.mark.parametrize("seed", range(20))
def test_a_command_is_applied_once_whatever_happens(seed: int) -> None:
    """Blocks of producer ids never overlap, and an answered one is never lost or repeated."""

    async def one(world: World, node: int, blocks: list[int]) -> None:
        with suppress(NoLeader, OutcomeUnknown):
            blocks.append(await world.propose(node, AllocateProducerIds(node, 10), 10.0))

    async def main(world: World) -> None:
        rng = Random(seed)
        blocks: list[int] = []
        for node in NODES:
            await world.propose(node, register(node))
        async with asyncio.TaskGroup() as group:
            for _ in range(60):
                victim = rng.choice(NODES)
                kind = rng.choice(("cut", "pause", "none"))
                if kind == "cut":
                    world.isolate(victim)
                elif kind == "pause":
                    world.processes[victim].pause()
                for node in NODES:
                    group.create_task(one(world, node, blocks))
                await asyncio.sleep(rng.uniform(0, 1))
                world.network.heal_all()
                world.processes[victim].resume()
        assert len(set(blocks)) == len(blocks)
        assert len(blocks) > 100
        decided = [one for one in world.consensus.entries if one.error is None]
        assert len({one.command_id for one in decided}) == len(decided)

    run(main, seed)
