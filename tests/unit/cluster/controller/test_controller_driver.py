"""ControllerDriver: the core on real metadata events, timers and probes over sockets."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from random import Random

import pytest
from metadatafake import FakeLog, FakeMetadata

from raftq.client.common.errors import AccessDenied, ConnectFailed, NoLeader, RaftqError
from raftq.client.options import ConnectionOptions
from raftq.client.wire.messages import Hello
from raftq.cluster.controller.driver import ControllerDriver, is_refusal, probe
from raftq.cluster.controller.events import ControllerConfig
from raftq.cluster.metadata.commands import Command, CreateTopic, FenceNode, RegisterNode
from raftq.node.native.tcp import TcpServer

PATIENT = ControllerConfig(lease_ms=60_000)
"""Leases do not run out in a test: a node that is fenced was found out."""


class World:
    """The driver is that of node 1; nodes 1 to 3 listen."""

    def __init__(self, config: ControllerConfig = PATIENT) -> None:
        self.log = FakeLog()
        self.log.leader = None
        self.metadata = FakeMetadata(self.log, 1)
        self.options = ConnectionOptions(role="node")
        self.driver = ControllerDriver(
            self.metadata, config, Random(1), self.options, incarnation=1
        )
        self.servers = {
            one: TcpServer({}, node_id=one, cluster_id="test", incarnation=1, admit=self.admit)
            for one in (1, 2, 3)
        }
        self.hellos: list[Hello] = []
        self.refuse = False

    def admit(self, hello: Hello) -> None:
        self.hellos.append(hello)
        if self.refuse:
            raise AccessDenied("another cluster")

    async def register(self, node_id: int, incarnation: int = 1) -> None:
        port = self.servers[node_id].port
        before = incarnation - 1 or None
        await self.metadata.propose(
            RegisterNode(
                *(node_id, "127.0.0.1", port, 0, "", "", incarnation), before=before, silent=before
            )
        )

    async def until(self, what: Callable[[], bool]) -> None:
        while not what():
            await self.metadata.copy.moved()

    def alive(self) -> list[int]:
        return [one for one, node in self.metadata.state.nodes.items() if node.alive]


def run(body: Callable[[World], Awaitable[None]], config: ControllerConfig = PATIENT) -> None:
    async def main() -> None:
        world = World(config)
        async with asyncio.timeout(10), AsyncExitStack() as stack:
            for server in world.servers.values():
                await stack.enter_async_context(server)
                await server.start()
            await world.metadata.start()
            world.log.lead(2)
            for node_id in world.servers:
                await world.register(node_id)
            task = asyncio.ensure_future(world.driver.run())
            try:
                await asyncio.sleep(0)
                await body(world)
            finally:
                task.cancel()
                await asyncio.wait((task,))
            assert task.cancelled() or task.exception() is None, task.exception()

    asyncio.run(main())


def test_a_node_that_is_not_the_controller_only_says_so() -> None:
    async def body(world: World) -> None:
        reply = world.driver.heartbeat(3, 1)
        assert (reply.controls, reply.controller) == (False, 2)
        world.driver.session_lost(3)
        assert not world.driver.in_control
        world.log.lead(1)
        reply = world.driver.heartbeat(3, 1)
        assert (reply.controls, reply.controller) == (True, 1)
        world.log.lead(3)
        assert not world.driver.heartbeat(3, 1).controls
        assert world.driver.describe() == "controller: not in control"

    run(body)


def test_a_new_controller_fences_at_once_the_node_whose_process_is_gone() -> None:
    async def body(world: World) -> None:
        await world.metadata.propose(CreateTopic("orders", 3, 3))
        await world.servers[2].close()
        world.log.lead(1)
        await world.until(lambda: 2 not in world.alive())
        assert world.alive() == [1, 3]
        assert all(one.leader in (1, 3) for _, _, one in world.metadata.state.all_partitions())

    run(body)


@pytest.mark.parametrize("node_id", [1, 2], ids=["of the controller", "of another node"])
def test_a_process_whose_successor_is_there_is_fenced_at_once(node_id: int) -> None:
    """The successor, which answers, may have to wait for that: it has no proof that it is one. It
    must not count as somebody who is well and does not get here."""

    async def body(world: World) -> None:
        await world.register(node_id, incarnation=2)
        world.log.lead(1)
        await world.until(lambda: node_id not in world.alive())
        assert len(world.alive()) == 2

    run(body)


def test_the_end_of_a_beating_connection_makes_the_controller_look_and_fence() -> None:
    async def body(world: World) -> None:
        world.log.lead(1)
        for node_id in (2, 3):
            world.driver.heartbeat(node_id, 1)
        # A node whose connection only broke answers the probe and stays.
        world.driver.session_lost(2)
        await world.servers[3].close()
        world.driver.session_lost(3)
        await world.until(lambda: 3 not in world.alive())
        assert world.alive() == [1, 2]
        # It comes back as another process, and is watched again.
        await world.register(2, incarnation=2)
        assert world.driver.heartbeat(2, 2).controls

    run(body)


def test_a_node_that_is_not_heard_is_fenced_when_its_lease_ends_and_the_others_are_not() -> None:
    short = replace(PATIENT, lease_ms=300, probe_ms=50)

    async def body(world: World) -> None:
        world.log.lead(1)
        loop = asyncio.get_running_loop()

        def beat() -> None:
            for node_id in (1, 2):
                world.driver.heartbeat(node_id, 1)
            world.timer = loop.call_later(0.05, beat)  # type: ignore[attr-defined]

        beat()
        began = loop.time()
        await world.until(lambda: 3 not in world.alive())
        world.timer.cancel()  # type: ignore[attr-defined]
        assert loop.time() - began > 0.2
        assert world.alive() == [1, 2]

    run(body, short)


def test_a_controller_to_whom_no_beat_gets_leaves_it_to_another() -> None:
    short = replace(PATIENT, lease_ms=400, probe_ms=50)

    async def body(world: World) -> None:
        world.log.lead(1)
        for node_id in (1, 2, 3):
            world.driver.heartbeat(node_id, 1)
        await world.until(lambda: world.metadata.controller != 1)
        assert not world.driver.in_control
        assert world.alive() == [1, 2, 3]

    run(body, short)


def test_a_refused_proposal_is_made_again_and_ends_nothing() -> None:
    quick = replace(PATIENT, retry_ms=10)

    async def body(world: World) -> None:
        errors: list[RaftqError] = [NoLeader("none"), NoLeader("none")]
        fences = []

        def refuse(command: Command) -> RaftqError | None:
            assert isinstance(command, FenceNode)
            fences.append(command)
            return errors.pop() if errors else None

        await world.servers[2].close()
        world.metadata.refuse = refuse
        world.log.lead(1)
        await world.until(lambda: 2 not in world.alive())
        assert fences == [FenceNode(2, 1)] * 3

    run(body, quick)


# Probes.


def test_a_probe_tells_an_answer_from_silence_from_nobody_there() -> None:
    async def body(world: World) -> None:
        node = world.metadata.state.nodes[2]
        quick = replace(world.options, connect_ms=100)
        assert await probe(node, 5, quick) == (1, False)
        # The address belongs to another node by now, or to another cluster.
        other = replace(node, port=world.servers[3].port)
        assert await probe(other, 5, quick) == (-1, False)
        world.refuse = True
        assert await probe(node, 5, quick) == (-1, False)
        world.refuse = False
        # A process that hangs: the kernel still accepts for it.
        with socket.create_server(("127.0.0.1", 0)) as silent:
            hung = replace(node, port=silent.getsockname()[1])
            assert await probe(hung, 5, quick) == (None, False)
        assert await probe(hung, 5, quick) == (None, True)
        world.servers[2].draining = True
        assert await probe(node, 5, quick) == (5, False)

    run(body)


@pytest.mark.parametrize(
    ("cause", "refused"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), True),
        (ConnectionRefusedError("without a number"), True),
        (OSError(errno.EHOSTUNREACH, "no route"), False),
        (OSError("Multiple exceptions: [Errno 111] a ('::1', 1), [Errno 111] b"), True),
        (OSError("Multiple exceptions: [Errno 111] a ('::1', 1), [Errno 113] b"), False),
        (OSError("who knows"), False),
        (TimeoutError(), False),
        (None, False),
    ],
)
def test_only_a_refusal_of_every_address_is_one(cause: OSError | None, refused: bool) -> None:
    error = ConnectFailed("not connected")
    error.__cause__ = cause
    assert is_refusal(error) == refused


def test_a_driver_that_is_stopping_starts_no_further_probe() -> None:
    """1. Probes of nodes 1 and 2 are under way. 2. The driver is cancelled and waits for them.
    3. The connection of node 3 ends meanwhile."""

    async def main() -> None:
        world = World()
        async with asyncio.timeout(10), AsyncExitStack() as stack:
            for server in world.servers.values():
                await stack.enter_async_context(server)
                await server.start()
            await world.metadata.start()
            world.log.lead(2)
            for node_id in world.servers:
                await world.register(node_id)
            task = asyncio.ensure_future(world.driver.run())
            await asyncio.sleep(0)
            world.driver.heartbeat(3, 1)
            world.log.lead(1)
            await asyncio.sleep(0)
            assert world.driver.in_control
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
            world.driver.session_lost(3)
            await asyncio.wait((task,))
            assert task.cancelled()

    asyncio.run(main())
