"""Signs of life: a connection on which nobody waits learns that its node is gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from loops import Go

from raftq.client.common.errors import ConfigError, ConnectionLost
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions
from raftq.client.wire.messages import (
    InitProducer,
    InitProducerReply,
    Metadata,
    Ping,
    PingReply,
    WireMessage,
)
from raftq.node.native.session import Session
from raftq.node.native.tcp import TcpServer


class Node:
    """Answers the first `answers` pings and falls silent; Metadata is never answered."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.pings = 0
        self.asked = asyncio.Event()

    def ping(self, message: Ping, raw: memoryview, session: Session) -> Any:
        self.pings += 1
        self.asked.set()
        if self.pings <= self.answers:
            return PingReply()
        return asyncio.get_running_loop().create_future()

    def never(self, message: WireMessage, raw: memoryview, session: Session) -> Any:
        return asyncio.get_running_loop().create_future()

    def init(self, message: InitProducer, raw: memoryview, session: Session) -> InitProducerReply:
        return InitProducerReply(1, 1)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[TcpServer]:
        handlers = {Ping: self.ping, Metadata: self.never, InitProducer: self.init}
        async with TcpServer(handlers, node_id=1, cluster_id="c") as server:
            await server.start()
            yield server


def test_an_idle_connection_learns_that_its_node_is_silent(go: Go) -> None:
    async def main() -> None:
        node = Node(answers=2)
        async with node.listening() as server:
            options = ConnectionOptions(ping_ms=20)
            connection = await Connection.open("127.0.0.1", server.port, options)
            await asyncio.wait((connection._ended,))
            assert connection.closed
            assert node.pings == 3
            with pytest.raises(ConnectionLost, match="silent for 40 ms"):
                await connection.request(Ping())
            await connection.close()

    go(main())


def test_a_node_that_says_anything_is_not_asked_for_a_sign_of_life(go: Go) -> None:
    async def main() -> None:
        node = Node(answers=0)
        async with node.listening() as server:
            options = ConnectionOptions(ping_ms=300)
            async with await Connection.open("127.0.0.1", server.port, options) as connection:
                loop = asyncio.get_running_loop()
                ends_at = loop.time() + 0.7
                while loop.time() < ends_at:
                    await connection.request(InitProducer())
                    await asyncio.sleep(0.01)
            assert node.pings == 0

    go(main())


def test_requests_in_flight_end_when_their_node_falls_silent(go: Go) -> None:
    async def main() -> None:
        async with Node(answers=0).listening() as server:
            options = ConnectionOptions(ping_ms=20, in_flight_max=1)
            connection = await Connection.open("127.0.0.1", server.port, options)
            sent, queued = connection.submit(Metadata()), connection.submit(Metadata())
            for future, outcome in ((sent, "unknown"), (queued, "failed")):
                with pytest.raises(ConnectionLost, match="silent") as caught:
                    await future
                assert caught.value.outcome == outcome
            await connection.close()

    go(main())


def test_closing_ends_the_pings(go: Go) -> None:
    async def main() -> None:
        node = Node(answers=100)
        async with node.listening() as server:
            options = ConnectionOptions(ping_ms=20)
            async with await Connection.open("127.0.0.1", server.port, options) as connection:
                await node.asked.wait()
            assert connection._beating is None

    go(main())


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="ping_ms"):
        ConnectionOptions(ping_ms=-1)
