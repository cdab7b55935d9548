"""The native listener's bounds: in flight, unread replies, silence, stopping, many connections."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from loops import Go
from raw_peer import caller, serving

from raftq.client.common.errors import ConnectionLost, NodeStopping
from raftq.client.net.connection import Connection
from raftq.client.net.transport import new_event_loop
from raftq.client.wire.messages import (
    Fetch,
    FetchedPartition,
    FetchReply,
    Hello,
    Metadata,
    MetadataReply,
    Ping,
    PingReply,
    Produce,
    ProduceReply,
    WireMessage,
    encode_message,
)
from raftq.node.native.session import Session
from raftq.node.native.tcp import TcpServer

CONNECTIONS = 10_000

# Opens connections, shakes hands on each, says so, and keeps them until its input ends.
CROWD = """
import resource, socket, sys
port, count, hello = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
crowd = []
for start in range(0, count, 200):
    some = [socket.create_connection(("127.0.0.1", port)) for _ in range(min(200, count - start))]
    for one in some:
        one.sendall(hello)
    for one in some:
        assert one.recv(4096)
    crowd += some
print(len(crowd), flush=True)
sys.stdin.read()
"""


class Parked:
    """A handler whose requests wait until the test lets them go."""

    def __init__(self, reply: WireMessage, *raw: bytes) -> None:
        self.answer = (reply, raw) if raw else reply
        self.waiting: list[asyncio.Future[Any]] = []
        self.arrived = asyncio.Event()

    def __call__(self, message: WireMessage, raw: memoryview, session: Session) -> Any:
        self.waiting.append(asyncio.get_running_loop().create_future())
        self.arrived.set()
        return self.waiting[-1]

    def release(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            future.set_result(self.answer)


def big_reply(size: int) -> tuple[FetchReply, list[bytes]]:
    return FetchReply((FetchedPartition("t", 0, length=size),)), [bytes(size)]


async def until(condition: Callable[[], bool]) -> None:
    """The loop runs on until the condition holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never happened")


async def exchange(server: TcpServer) -> None:
    """Another caller is served as usual."""
    async with caller(server) as other:
        other.send(Ping(), 5)
        assert await other.read() == (PingReply(), 5)


def test_no_more_requests_are_in_flight_than_allowed(go: Go) -> None:
    """1. Two of ten requests reach their handler. 2. Others are served. 3. All are answered."""

    async def main() -> None:
        park = Parked(MetadataReply("c", (), ()))
        async with serving({Metadata: park}, in_flight_max=2) as server, caller(server) as one:
            for id_ in range(10, 20):
                one.send(Metadata(), id_)
            await one.writer.drain()
            answered = []
            while len(answered) < 10:
                await park.arrived.wait()
                await exchange(server)
                assert len(park.waiting) == 2
                park.arrived.clear()
                park.release()
                answered += [(await one.read())[1] for _ in range(2)]
            assert answered == list(range(10, 20))

    go(main())


def test_no_more_bytes_are_in_flight_than_allowed(go: Go) -> None:
    async def main() -> None:
        park = Parked(ProduceReply((0,)))
        async with (
            serving({Produce: park}, in_flight_bytes_max=100_000) as server,
            caller(server) as one,
        ):
            for id_ in range(10, 16):
                one.send(Produce("t", 0), id_, bytes(60_000))
            answered = []
            while len(answered) < 6:
                while len(park.waiting) < 2:
                    park.arrived.clear()
                    await park.arrived.wait()
                await exchange(server)
                assert len(park.waiting) == 2
                park.release()
                answered += [(await one.read())[1] for _ in range(2)]
            assert answered == list(range(10, 16))

    go(main())


def test_a_caller_that_does_not_read_is_no_longer_served_until_it_does(go: Go) -> None:
    """1. It asks for 200 MB, reading nothing. 2. Few requests are handled. 3. It reads: all are."""

    async def main() -> None:
        handled = 0

        def fetch(message: Fetch, raw: memoryview, session: Session) -> Any:
            nonlocal handled
            handled += 1
            return big_reply(1 << 20)

        async with serving({Fetch: fetch}) as server, caller(server) as one:
            one.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for id_ in range(10, 210):
                one.send(Fetch(()), id_)
            await one.writer.drain()
            for _ in range(10):
                await exchange(server)
            assert 1 <= handled < 30
            one.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert [(await one.read())[1] for _ in range(200)] == list(range(10, 210))
            assert handled == 200

    go(main())


def test_a_caller_with_too_many_unread_replies_is_cut(go: Go) -> None:
    async def main() -> None:
        reply, raw = big_reply(1 << 20)
        park = Parked(reply, *raw)
        async with serving({Fetch: park}, write_bytes_max=8 << 20) as server, caller(server) as one:
            one.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for id_ in range(10, 110):
                one.send(Fetch(()), id_)
            while len(park.waiting) < 100:
                park.arrived.clear()
                await park.arrived.wait()
            park.release()
            await until(lambda: server.connections == 0)
            await exchange(server)

    go(main())


def test_a_caller_that_leaves_replies_unread_for_too_long_is_cut(go: Go) -> None:
    async def main() -> None:
        def fetch(message: Fetch, raw: memoryview, session: Session) -> Any:
            return big_reply(8 << 20)

        async with serving({Fetch: fetch}, write_stall_ms=50) as server, caller(server) as one:
            one.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for id_ in range(10, 15):
                one.send(Fetch(()), id_)
            await until(lambda: server.connections == 0)
            await exchange(server)

    go(main())


def test_a_caller_without_hello_is_sent_away_even_if_it_trickles(go: Go) -> None:
    async def main() -> None:
        async with serving(handshake_ms=60) as server, caller(server, hello=False) as one:
            async with asyncio.TaskGroup() as group:
                farewell = group.create_task(one.farewell())
                for byte in b"".join(encode_message(Hello(1, 1, "client", "x" * 200), 1))[:-1]:
                    if farewell.done():
                        break
                    one.writer.write(bytes([byte]))
                    await asyncio.sleep(0.001)
            assert "no Hello within 60 ms" in farewell.result().message

    go(main())


def test_an_idle_caller_is_sent_away_but_not_one_that_waits_for_an_answer(go: Go) -> None:
    async def main() -> None:
        park = Parked(MetadataReply("c", (), ()))
        async with (
            serving({Metadata: park}, idle_ms=40) as server,
            caller(server) as waiting,
            caller(server) as idle,
        ):
            waiting.send(Metadata(), 2)
            assert "nothing was asked for 40 ms" in (await idle.farewell()).message
            park.release()
            assert (await waiting.read())[1] == 2
            assert "nothing was asked" in (await waiting.farewell()).message

    go(main())


def test_one_who_was_sent_away_and_stays_is_cut(go: Go) -> None:
    async def main() -> None:
        async with serving(linger_ms=40) as server, caller(server) as one:
            one.writer.write(b"\xff" * 16)
            await one.read()
            while server.connections:
                one.writer.write(b"more" * 1000)
                await asyncio.sleep(0.001)

    go(main())


def test_the_requests_of_a_caller_who_is_gone_are_cancelled(go: Go) -> None:
    async def main() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def wait(message: WireMessage, raw: memoryview, session: Session) -> PingReply:
            started.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                cancelled.set()
            return PingReply()

        park = Parked(ProduceReply((0,)))
        async with serving({Metadata: wait, Produce: park}) as server:
            async with caller(server) as one:
                one.send(Metadata(), 2)
                one.send(Produce("t", 0), 3, b"x")
                await started.wait()
                await park.arrived.wait()
            await cancelled.wait()
            assert [future.cancelled() for future in park.waiting] == [True]
            await exchange(server)

    go(main())


def test_draining_finishes_what_is_in_flight_and_refuses_the_rest(go: Go) -> None:
    async def main() -> None:
        park = Parked(MetadataReply("c", (), ()))
        async with serving({Metadata: park}) as server:
            connection = await Connection.open("127.0.0.1", server.port)
            future = connection.submit(Metadata())
            await park.arrived.wait()
            async with asyncio.TaskGroup() as group:
                drained = group.create_task(server.drain(10.0))
                await asyncio.sleep(0)
                with pytest.raises(NodeStopping):
                    await connection.request(Ping())
                park.release()
            assert drained.result() is True
            assert (await future).message == park.answer
            with pytest.raises(ConnectionLost):
                await connection.request(Ping())
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await asyncio.open_connection("127.0.0.1", server.port)
            await connection.close()

    go(main())


def test_draining_gives_up_after_its_time(go: Go) -> None:
    async def main() -> None:
        park = Parked(MetadataReply("c", (), ()))
        async with serving({Metadata: park}) as server:
            connection = await Connection.open("127.0.0.1", server.port)
            future = connection.submit(Metadata())
            await park.arrived.wait()
            assert await server.drain(0.02) is False
            with pytest.raises(ConnectionLost) as caught:
                await future
            assert caught.value.outcome == "unknown"
            await connection.close()

    go(main())


def test_a_port_of_zero_is_a_free_one_on_loopback(go: Go) -> None:
    async def main() -> None:
        async with serving() as first, serving() as second:
            assert len({first.port, second.port, 0}) == 3
            assert first._listener is not None
            assert first._listener.sockets[0].getsockname()[0] == "127.0.0.1"

    go(main())


@pytest.mark.full
def test_ten_thousand_idle_connections_disturb_nobody() -> None:
    """1. Another process opens them. 2. A caller is served meanwhile and after. 3. They all go."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(CONNECTIONS, hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def main() -> None:
        hello = b"".join(encode_message(Hello(1, 1, "client"), 1)).hex()
        loop = asyncio.get_running_loop()
        async with serving() as server, caller(server) as one:
            arguments = [sys.executable, "-c", CROWD, str(server.port), str(count), hello]
            with subprocess.Popen(  # noqa: ASYNC220  # takes a moment, once
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as crowd:
                assert crowd.stdout is not None
                opened = loop.run_in_executor(None, crowd.stdout.readline)
                pings = 0
                while not opened.done():
                    one.send(Ping(), 2)
                    await one.read()
                    pings += 1
                    await asyncio.sleep(0.001)
                assert int(await opened) == count
                assert server.connections == count + 1
                assert pings > 10
                await exchange(server)
                assert crowd.stdin is not None
                crowd.stdin.close()
                await until(lambda: server.connections == 1)
            await exchange(server)

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if count < CONNECTIONS:
        pytest.skip(f"only {count} connections are allowed here; they were tested")
