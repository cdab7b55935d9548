"""The simulated network: what connections see of kills, pauses, power cuts and cut links."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest
from simloop import Process
from simnet import NetworkShape
from simworld import PORT, World, ping, serve

from raftq.client.common.errors import ConnectFailed, ConnectionLost, RaftqError, RequestTimeout
from raftq.client.net.connection import Connection
from raftq.client.wire.messages import Ping, PingReply


def with_server(
    main: Callable[[World, Process, Process], Coroutine[Any, Any, None]],
    seed: int = 0,
    shape: NetworkShape | None = None,
) -> World:
    """Run `main` in a client process beside a node that answers pings."""
    world = World(seed, shape)

    async def outer() -> None:
        node, client = world.process("node"), world.process("client")
        node.spawn(serve())
        await asyncio.sleep(0.1)
        await client.spawn(main(world, node, client))

    world.run(outer())
    return world


def test_connection_and_server_talk_over_the_simulated_network() -> None:
    async def main(world: World, node: Process, client: Process) -> None:
        assert await ping() == PingReply()

    with_server(main)


def test_frames_arrive_whole_though_bytes_arrive_in_pieces() -> None:
    async def main(world: World, node: Process, client: Process) -> None:
        async with await Connection.open("n", PORT) as connection:
            replies = await asyncio.gather(*(connection.request(Ping()) for _ in range(200)))
            assert len(replies) == 200

    with_server(main, shape=NetworkShape(split_share=0.9))


def test_a_dead_process_refuses_connections() -> None:
    async def main(world: World, node: Process, client: Process) -> None:
        world.kill(node)
        started = world.loop.time()
        with pytest.raises(ConnectFailed, match="Connect call failed"):
            await ping()
        assert world.loop.time() - started < 0.1

    with_server(main)


def test_a_killed_peer_ends_the_connection_at_once() -> None:
    async def main(world: World, node: Process, client: Process) -> None:
        connection = await Connection.open("n", PORT)
        node.pause()
        request = connection.submit(Ping())
        await asyncio.sleep(1)
        assert not request.done()
        world.kill(node)
        with pytest.raises(ConnectionLost):
            await request

    with_server(main)


def test_a_machine_without_power_is_silent_until_it_is_back() -> None:
    """
    1. Off: a request gets no answer and a connection is never made.
    2. On again, nobody listening: the old connection is reset, new ones are refused.
    """

    async def main(world: World, node: Process, client: Process) -> None:
        connection = await Connection.open("n", PORT)
        world.kill(node, powered=False)
        with pytest.raises(RequestTimeout):
            await connection.request(Ping(), timeout_s=3)
        with pytest.raises(ConnectFailed, match="no answer"):
            await ping(connect_ms=2_000)
        assert not connection.closed
        node.machine.powered = True
        world.network.wake()
        with pytest.raises(ConnectionLost):
            await connection.request(Ping())
        with pytest.raises(ConnectFailed, match="Connect call failed"):
            await ping()

    with_server(main)


@pytest.mark.parametrize("direction", [("client", "node"), ("node", "client")])
def test_bytes_held_by_a_cut_arrive_after_it(direction: tuple[str, str]) -> None:
    async def main(world: World, node: Process, client: Process) -> None:
        connection = await Connection.open("n", PORT)
        world.network.cut(*direction)
        request = connection.submit(Ping())
        with pytest.raises(ConnectFailed, match="no answer"):
            await ping(connect_ms=2_000)
        assert not request.done()
        world.network.heal(*direction)
        assert (await request).message == PingReply()
        await connection.close()

    with_server(main)


def test_a_paused_process_accepts_and_does_not_answer() -> None:
    async def main(world: World, node: Process, client: Process) -> None:
        node.pause()
        with pytest.raises(ConnectFailed, match="no answer"):
            await ping(connect_ms=1_000)
        late = asyncio.get_running_loop().create_task(ping())
        await asyncio.sleep(1)
        node.resume()
        assert await late == PingReply()

    with_server(main)


class Sink(asyncio.Protocol):
    """Collects what it gets; reads only while it is told to."""

    def __init__(self) -> None:
        self.got = b""
        self.events: list[str] = []
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got += data

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def eof_received(self) -> bool:
        self.events.append("eof")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append(f"lost {type(exc).__name__}")


def between_sinks(main: Callable[[Sink, Sink], Coroutine[Any, Any, None]]) -> None:
    world = World()

    async def outer() -> None:
        loop, far, near = world.loop, Sink(), Sink()
        server = await loop.create_server(lambda: far, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await loop.create_connection(lambda: near, "127.0.0.1", port)
        await asyncio.sleep(1)
        await main(near, far)
        server.close()

    world.run(outer())


def test_a_writer_is_paused_while_the_reader_does_not_read() -> None:
    async def main(near: Sink, far: Sink) -> None:
        far.transport.pause_reading()
        sent = bytes(range(256)) * 4096
        near.transport.write(sent)
        await asyncio.sleep(1)
        assert (near.events, far.got) == (["pause"], b"")
        assert near.transport.get_write_buffer_size() > 0
        far.transport.resume_reading()
        await asyncio.sleep(1)
        assert near.events == ["pause", "resume"]
        assert far.got == sent

    between_sinks(main)


def test_close_sends_what_was_written_and_then_the_end() -> None:
    async def main(near: Sink, far: Sink) -> None:
        near.transport.write(b"a" * 1000)
        near.transport.close()
        near.transport.write(b"never")
        await asyncio.sleep(1)
        assert near.events == ["lost NoneType"]
        assert (far.got, far.events) == (b"a" * 1000, ["eof"])

    between_sinks(main)


def test_half_closed_connections_still_read() -> None:
    async def main(near: Sink, far: Sink) -> None:
        near.transport.write_eof()
        await asyncio.sleep(1)
        far.transport.write(b"reason")
        await asyncio.sleep(1)
        assert near.got == b"reason"
        far.transport.close()
        await asyncio.sleep(1)
        assert near.events == ["eof"]

    between_sinks(main)


def test_abort_resets_the_other_end() -> None:
    async def main(near: Sink, far: Sink) -> None:
        near.transport.abort()
        await asyncio.sleep(1)
        assert near.events == ["lost NoneType"]
        assert far.events == ["lost ConnectionResetError"]

    between_sinks(main)


def test_bytes_for_a_closed_end_cause_a_reset() -> None:
    async def main(near: Sink, far: Sink) -> None:
        near.transport.close()
        await asyncio.sleep(1)
        far.transport.write(b"too late")
        await asyncio.sleep(1)
        assert far.events == ["eof", "lost ConnectionResetError"]

    between_sinks(main)


def trace_of(seed: int) -> str:
    async def main(world: World, node: Process, client: Process) -> None:
        rng = Random(seed)
        for _ in range(20):
            cut = rng.random() < 0.3
            if cut:
                world.network.cut("client", "node")
            try:
                await ping(connect_ms=500)
            except RaftqError:
                world.network.heal_all()

    return with_server(main, seed).loop.trace_hash()


def test_the_same_seed_gives_the_same_trace() -> None:
    assert trace_of(1) == trace_of(1)
    assert trace_of(1) != trace_of(2)
