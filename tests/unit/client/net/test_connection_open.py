"""Opening a connection: who is not a node, does not answer, or speaks another version."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from raftq.client.common.errors import (
    ConfigError,
    ConnectFailed,
    ProtocolError,
    RaftqError,
    UnsupportedVersion,
)
from raftq.client.net.connection import Connection
from raftq.client.net.transport import run
from raftq.client.options import ConnectionOptions
from raftq.client.wire.messages import ErrorReply, HelloReply, encode_message

Answer = Callable[[asyncio.StreamWriter], None]


def opened_against(answer: Answer, connect_ms: int = 5_000) -> RaftqError:
    """The error of opening a connection to somebody who says this to anything."""

    async def main() -> RaftqError:
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            await reader.read(10)
            answer(writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            options = ConnectionOptions(connect_ms=connect_ms)
            with pytest.raises(RaftqError) as caught:
                await Connection.open("127.0.0.1", port, options)
            return caught.value
        finally:
            server.close()
            for writer in writers:
                writer.transport.abort()

    return run(main())


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectFailed, match=f"127.0.0.1:{port}") as caught:
        run(Connection.open("127.0.0.1", port))
    assert caught.value.outcome == "failed"
    assert caught.value.retriable


def test_somebody_listens_and_says_nothing() -> None:
    error = opened_against(lambda writer: None, connect_ms=50)
    assert isinstance(error, ConnectFailed)
    assert "no answer in 50 ms" in str(error)
    assert error.outcome == "failed"


def test_somebody_hangs_up() -> None:
    assert isinstance(opened_against(lambda writer: writer.transport.abort()), ConnectFailed)


def test_somebody_speaks_http() -> None:
    error = opened_against(lambda writer: writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    assert isinstance(error, ConnectFailed)
    assert "broke the protocol" in str(error)


def test_the_node_chooses_a_version_that_was_not_offered() -> None:
    reply = encode_message(HelloReply(9, 1, "c"), 1)
    error = opened_against(lambda writer: writer.writelines(reply))
    assert isinstance(error, ProtocolError)
    assert "chose version 9" in str(error)


def test_the_node_refuses_with_a_reason() -> None:
    reply = encode_message(ErrorReply.from_error(UnsupportedVersion("too old for me")), 1)
    error = opened_against(lambda writer: writer.writelines(reply))
    assert isinstance(error, UnsupportedVersion)
    assert str(error) == "too old for me"


def test_settings_that_make_no_sense_are_all_reported() -> None:
    with pytest.raises(ConfigError, match=r"request_ms .*; in_flight_max"):
        ConnectionOptions(request_ms=0, in_flight_max=-1)
