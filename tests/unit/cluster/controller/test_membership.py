"""Membership: registering, beats over one connection, and coming back after being fenced."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from metadatafake import FakeLog, FakeMetadata

from raftq.client.common.errors import InvalidArgument, NodeIdTaken, NoLeader, RaftqError
from raftq.client.options import ConnectionOptions
from raftq.client.wire.node_messages import Heartbeat, HeartbeatReply, Identify, IdentifyReply
from raftq.cluster.controller.membership import Membership
from raftq.cluster.metadata.commands import Command, FenceNode, Lost, RegisterNode, decode_command
from raftq.node.native.session import Session
from raftq.node.native.tcp import TcpServer

PERIOD_MS = 20
LEASE_MS = 300


class Controller:
    """A node that takes beats over the wire."""

    def __init__(self, log: FakeLog, node_id: int) -> None:
        self.node_id = node_id
        self.metadata = FakeMetadata(log, node_id)
        self.beats: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.sessions: list[Session] = []
        self.left: asyncio.Queue[Session] = asyncio.Queue()
        self.hanging = False
        self.server = TcpServer(
            {Heartbeat: self._answer},
            node_id=node_id,
            cluster_id=log.cluster_id,
            on_leave=self.left.put_nowait,
        )

    def _answer(self, message: Heartbeat, raw: memoryview, session: Session) -> Any:
        if session not in self.sessions:
            self.sessions.append(session)
        self.beats.put_nowait((message.node_id, message.incarnation))
        if self.hanging:
            return asyncio.get_running_loop().create_future()
        return HeartbeatReply(self.metadata.is_controller, self.metadata.controller)

    async def register(self) -> None:
        port = self.server.port
        await self.metadata.propose(RegisterNode(self.node_id, "127.0.0.1", port, 0, "", "", 1))


class Holder:
    """Another process that is registered as a node, and answers."""

    def __init__(self, log: FakeLog, node_id: int, incarnation: int) -> None:
        self.server = TcpServer(
            {Identify: lambda message, raw, session: IdentifyReply(node_id, incarnation)},
            node_id=node_id,
            cluster_id=log.cluster_id,
        )


class Local:
    """The controller in the same process."""

    def __init__(self) -> None:
        self.beats: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    def heartbeat(self, node_id: int, incarnation: int) -> HeartbeatReply:
        self.beats.put_nowait((node_id, incarnation))
        return HeartbeatReply(True, node_id)


class World:
    """Nodes 1 and 2 may control; the membership under test is that of node 3."""

    def __init__(self) -> None:
        self.log = FakeLog()
        self.controllers = [Controller(self.log, one) for one in (1, 2)]
        self.metadata = FakeMetadata(self.log, 3)
        self.local = Local()
        self.cut_off: asyncio.Queue[bool] = asyncio.Queue()
        self.fatal: asyncio.Queue[BaseException] = asyncio.Queue()
        self.membership = self.make()

    def make(
        self, incarnation: int = 77, lost: Lost = "nothing", before: int | None = None
    ) -> Membership:
        registration = RegisterNode(3, "127.0.0.1", 9, 0, "", "", incarnation, lost, before)
        options = ConnectionOptions(role="node")
        return Membership(
            self.metadata,
            registration,
            PERIOD_MS,
            options,
            self.local,
            lease_ms=LEASE_MS,
            on_fatal=self.fatal.put_nowait,
            on_cut_off=self.cut_off.put_nowait,
        )

    def registrations(self) -> list[RegisterNode]:
        made = [decode_command(one) for _, one in self.log.entries if one is not None]
        return [one for one in made if isinstance(one, RegisterNode) and one.node_id == 3]


def run(body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        async with asyncio.timeout(10), AsyncExitStack() as stack:
            for controller in world.controllers:
                await stack.enter_async_context(controller.server)
                await controller.server.start()
                await controller.metadata.start()
                await controller.register()
            await world.metadata.start()
            stack.push_async_callback(world.membership.stop)
            await body(world)

    asyncio.run(main())


def test_a_node_is_registered_when_start_returns_and_beats_over_one_connection() -> None:
    async def body(world: World) -> None:
        first = world.controllers[0]
        await world.membership.start()
        assert world.metadata.state.is_alive(3, 77)
        for _ in range(5):
            assert await first.beats.get() == (3, 77)
        assert len(first.sessions) == 1
        assert world.controllers[1].beats.empty()
        await world.membership.stop()
        assert await first.left.get() is first.sessions[0], "the controller notices at once"
        assert world.membership.beats >= 4

    run(body)


def test_what_was_lost_is_said_at_the_first_registration_and_not_at_later_ones() -> None:
    async def body(world: World) -> None:
        world.membership = world.make(lost="tail")
        await world.membership.start()
        await world.controllers[0].metadata.propose(FenceNode(3, 77))
        while not world.metadata.state.is_alive(3, 77):
            await world.metadata.copy.moved()
        assert [one.lost for one in world.registrations()] == ["tail", "nothing"]
        assert {one.incarnation for one in world.registrations()} == {77}
        await world.membership.stop()

    run(body)


def test_a_node_whose_beats_are_not_taken_for_a_lease_knows_that_it_is_cut_off() -> None:
    async def body(world: World) -> None:
        first = world.controllers[0]
        await world.membership.start()
        for _ in range(LEASE_MS // PERIOD_MS + 5):
            await first.beats.get()
        assert world.cut_off.empty(), "its beats are taken"
        first.hanging = True
        began = asyncio.get_running_loop().time()
        assert await world.cut_off.get() is True
        waited = asyncio.get_running_loop().time() - began
        assert waited > (LEASE_MS - PERIOD_MS) / 2000, "not with the first beat that fails"
        world.log.lead(2)
        assert await world.cut_off.get() is False
        await world.membership.stop()

    run(body)


def test_registering_is_tried_until_it_is_done() -> None:
    async def body(world: World) -> None:
        errors: list[RaftqError] = [NoLeader("none"), NoLeader("none")]

        def refuse(command: Command) -> RaftqError | None:
            return errors.pop() if errors else None

        world.metadata.refuse = refuse
        await world.membership.start()
        assert world.metadata.proposals == 3
        assert world.metadata.state.is_alive(3, 77)

    run(body)


def test_a_registration_that_is_refused_for_good_is_raised() -> None:
    async def body(world: World) -> None:
        world.metadata.refuse = lambda command: InvalidArgument("too many nodes")
        with pytest.raises(InvalidArgument, match="too many nodes"):
            await world.membership.start()

    run(body)


def test_beats_follow_the_controller() -> None:
    async def body(world: World) -> None:
        first, second = world.controllers
        await world.membership.start()
        await first.beats.get()
        world.log.lead(2)
        assert await second.beats.get() == (3, 77)
        assert await first.left.get() is first.sessions[0]
        world.log.lead(3)
        assert await world.local.beats.get() == (3, 77)
        world.log.lead(None)
        world.log.lead(1)
        while len(first.sessions) == 1:
            await first.beats.get()

    run(body)


def test_a_controller_that_hangs_does_not_keep_the_beats_from_the_next_one() -> None:
    async def body(world: World) -> None:
        first, second = world.controllers
        first.hanging = True
        await world.membership.start()
        await first.beats.get()
        world.log.lead(2)
        async with asyncio.timeout(0.5):
            assert await second.beats.get() == (3, 77)

    run(body)


def test_a_lost_connection_is_opened_again() -> None:
    async def body(world: World) -> None:
        first = world.controllers[0]
        await world.membership.start()
        await world.membership.heartbeats_accepted.wait()
        first.sessions[0].cut("as if the network had failed")
        while len(first.sessions) == 1:
            await first.beats.get()
        world.log.lead(None)
        world.membership.heartbeats_accepted.clear()
        world.log.lead(2)
        await world.membership.heartbeats_accepted.wait()
        assert not world.controllers[1].beats.empty()

    run(body)


def test_a_node_that_finds_another_process_in_its_place_ends() -> None:
    async def body(world: World) -> None:
        await world.membership.start()
        other = RegisterNode(3, "10.0.0.9", 9, 0, "", "", 78, "nothing", 77, False, 77)
        await world.controllers[0].metadata.propose(other)
        error = await world.fatal.get()
        assert isinstance(error, NodeIdTaken)
        assert "another process, at 10.0.0.9:9, registered as node 3" in str(error)
        assert [one.incarnation for one in world.registrations()] == [77, 78]
        assert world.metadata.state.is_alive(3, 78)

    run(body)


def test_an_id_whose_holder_answers_is_not_taken() -> None:
    """An empty directory, and a copy of the holder's."""

    async def body(world: World) -> None:
        holder = Holder(world.log, 3, 66)
        async with holder.server:
            await holder.server.start()
            port = holder.server.port
            first = RegisterNode(3, "127.0.0.1", port, 0, "", "", 66)
            await world.controllers[0].metadata.propose(first)
            for lost, before in (("everything", None), ("nothing", 66), ("nothing", 5)):
                world.membership = world.make(lost=lost, before=before)
                with pytest.raises(NodeIdTaken, match=f"node 3 is alive at 127.0.0.1:{port}"):
                    await world.membership.start()
                assert world.metadata.state.is_alive(3, 66)

    run(body)


def test_the_next_process_of_a_directory_does_not_wait_for_the_lease_of_the_one_before() -> None:
    async def body(world: World) -> None:
        first = RegisterNode(3, "127.0.0.1", 9, 0, "", "", 66)
        await world.controllers[0].metadata.propose(first)
        world.membership = world.make(before=66)
        await world.membership.start()
        assert world.metadata.state.is_alive(3, 77)
        (_, made) = world.registrations()
        assert (made.before, made.silent) == (66, 66)

    run(body)


def test_a_holder_that_this_copy_has_not_heard_of_is_asked_when_it_is_in_the_way() -> None:
    async def body(world: World) -> None:
        taken = NodeIdTaken("node 3 is alive")
        taken.with_details(incarnation=66, host="127.0.0.1", port=9)
        world.metadata.refuse = lambda command: taken if world.metadata.proposals == 1 else None
        world.membership = world.make(before=66)
        await world.membership.start()
        assert [one.silent for one in world.registrations()] == [66]

    run(body)


def test_an_empty_directory_waits_until_the_lease_of_a_silent_holder_is_over() -> None:
    async def body(world: World) -> None:
        first = RegisterNode(3, "127.0.0.1", 9, 0, "", "", 66)
        await world.controllers[0].metadata.propose(first)
        world.membership = world.make(lost="everything")
        starting = asyncio.get_running_loop().create_task(world.membership.start())
        done, _ = await asyncio.wait((starting,), timeout=LEASE_MS / 1000)
        assert not done
        await world.controllers[0].metadata.propose(FenceNode(3, 66))
        await starting
        assert world.metadata.state.is_alive(3, 77)

    run(body)


def test_nobody_waits_for_a_lease_for_ever() -> None:
    async def body(world: World) -> None:
        first = RegisterNode(3, "127.0.0.1", 9, 0, "", "", 66)
        await world.controllers[0].metadata.propose(first)
        world.membership = world.make(lost="everything")
        with pytest.raises(NodeIdTaken, match="does not answer, nor lose its lease in 3 s"):
            await world.membership.start()

    run(body)


def test_after_stop_a_fenced_node_stays_fenced() -> None:
    async def body(world: World) -> None:
        await world.membership.start()
        await world.membership.stop()
        await world.metadata.propose(FenceNode(3, 77))
        await world.metadata.propose(FenceNode(3, 77))
        assert len(world.registrations()) == 1
        assert not world.metadata.state.is_alive(3)

    run(body)
