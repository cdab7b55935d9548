"""One end of a connection that sends exactly what a test wants, and a listener for it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from raftq.client.wire.frames import PREFIX, PREFIX_BYTES, Frame
from raftq.client.wire.messages import (
    ErrorReply,
    Hello,
    HelloReply,
    WireMessage,
    decode_message,
    encode_message,
)
from raftq.node.config import ServerOptions
from raftq.node.native.session import Handler
from raftq.node.native.tcp import TcpServer


class RawPeer:
    """Sends and reads single messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, message: WireMessage, id_: int, *raw: bytes) -> None:
        self.writer.writelines(encode_message(message, id_, raw))

    async def read(self) -> tuple[WireMessage, int]:
        prefix = await self.reader.readexactly(PREFIX_BYTES)
        length, kind, _, _, header_length, id_ = PREFIX.unpack(prefix)
        rest = await self.reader.readexactly(length + 4 - PREFIX_BYTES)
        raw = memoryview(rest)[header_length:]
        return decode_message(Frame(kind, id_, rest[:header_length], raw)), id_

    async def farewell(self) -> ErrorReply:
        """The reason that the other end gives before it closes."""
        message, id_ = await self.read()
        assert isinstance(message, ErrorReply)
        assert id_ == 0
        assert await self.reader.read() == b""
        return message

    async def greet(self) -> None:
        """Answers the Hello of the other end, as a node does."""
        message, id_ = await self.read()
        assert isinstance(message, Hello)
        self.send(HelloReply(1, 5, "cluster"), id_)

    async def close(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def caller(server: TcpServer, hello: bool = True) -> AsyncIterator[RawPeer]:
    """A client of the server; with `hello` it has shaken hands."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    peer = RawPeer(reader, writer)
    try:
        if hello:
            peer.send(Hello(1, 1, "client"), 1)
            assert isinstance((await peer.read())[0], HelloReply)
        yield peer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def serving(
    handlers: Mapping[type[WireMessage], Handler] | None = None, **options: Any
) -> AsyncIterator[TcpServer]:
    """A native listener with these handlers."""
    made = ServerOptions(**options)
    async with TcpServer(handlers or {}, node_id=1, cluster_id="c", options=made) as server:
        await server.start()
        yield server
