"""The native listener: requests and answers, refusals, and one bad caller among good ones."""

import asyncio
import logging
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from loops import Go
from raw_peer import caller, serving

from raftq.client.common.errors import (
    AccessDenied,
    ConfigError,
    InternalError,
    InvalidArgument,
    NotLeader,
    Throttled,
    UnsupportedVersion,
)
from raftq.client.net.connection import Connection, node_name
from raftq.client.options import ConnectionOptions
from raftq.client.wire.frames import PREFIX
from raftq.client.wire.messages import (
    Fetch,
    FetchedPartition,
    FetchReply,
    Hello,
    HelloReply,
    InitProducer,
    InitProducerReply,
    Metadata,
    Ping,
    PingReply,
    Produce,
    ProduceReply,
    Role,
    WireMessage,
    encode_message,
)
from raftq.node.config import ServerOptions
from raftq.node.native.session import Handler, Session
from raftq.node.native.tcp import TcpServer


def echo_length(message: Produce, raw: memoryview, session: Session) -> ProduceReply:
    return ProduceReply((len(raw), sum(raw[:100])))


def raises(error: Exception) -> Handler:
    def handler(message: WireMessage, raw: memoryview, session: Session) -> PingReply:
        raise error

    return handler


def test_a_plain_an_async_and_a_future_handler_all_answer(go: Go) -> None:
    async def wait(message: Fetch, raw: memoryview, session: Session) -> Any:
        await asyncio.sleep(0)
        return FetchReply((FetchedPartition("t", 0, length=6),)), [b"abc", b"def"]

    def promise(message: InitProducer, raw: memoryview, session: Session) -> "asyncio.Future[Any]":
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, InitProducerReply(7, 1))
        return future

    async def main() -> None:
        handlers: dict[type[WireMessage], Handler] = {
            Produce: echo_length, Fetch: wait, InitProducer: promise,
        }  # fmt: skip
        async with (
            serving(handlers) as server,
            await Connection.open("127.0.0.1", server.port) as connection,
        ):
            assert connection.hello == HelloReply(1, 1, "c")
            assert (await connection.request(Ping())).message == PingReply()
            for size in (1, 5_000, 3_000_000):
                reply = await connection.request(Produce("t", 0), [b"\1" * size])
                assert reply.message.base_offsets == (size, min(size, 100))
            assert bytes((await connection.request(Fetch(()))).raw) == b"abcdef"
            assert (await connection.request(InitProducer())).message.producer_id == 7

    go(main())


def test_replies_leave_as_they_are_ready(go: Go) -> None:
    async def main() -> None:
        waiting: dict[str, asyncio.Future[Any]] = {}

        def park(message: InitProducer, raw: memoryview, session: Session) -> Any:
            waiting[message.name] = asyncio.get_running_loop().create_future()
            return waiting[message.name]

        async with serving({InitProducer: park}) as server, caller(server) as one:
            for id_ in (10, 11, 12):
                one.send(InitProducer(str(id_)), id_)
            one.send(Ping(), 13)
            assert (await one.read())[1] == 13
            for id_ in (12, 10, 11):
                waiting[str(id_)].set_result(InitProducerReply(0, 0))
                assert (await one.read())[1] == id_

    go(main())


def test_a_caller_that_sends_byte_by_byte_is_answered(go: Go) -> None:
    async def main() -> None:
        async with serving({Produce: echo_length}) as server, caller(server, False) as one:
            stream = [
                *encode_message(Hello(1, 1, "client"), 1),
                *encode_message(Produce("t", 0), 2, [b"\1" * 300]),
                *encode_message(Ping(), 3),
            ]
            for byte in b"".join(stream):
                one.writer.write(bytes([byte]))
                await asyncio.sleep(0)
            assert [(await one.read())[1] for _ in range(3)] == [1, 2, 3]

    go(main())


@pytest.mark.parametrize(
    ("bytes_", "reason"),
    [
        (b"\xff" * 16, "over the limit"),
        (PREFIX.pack(12, 200, 0, 0, 0, 5), "kind 200 is not known"),
        (PREFIX.pack(12, PingReply.kind, 0, 0, 0, 5), "kind 4 is not known"),
        (PREFIX.pack(12, Ping.kind, 4, 0, 0, 5), "flags 0x4"),
        (PREFIX.pack(13, Ping.kind, 0, 0, 1, 5) + b"\xc1", "MessagePack data is malformed"),
        (encode_message(Ping(), 0)[0], "correlation id 0 is not free"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5_000, "over the limit"),
    ],
    ids=["ones", "kind", "reply", "flags", "msgpack", "id", "http"],
)
def test_a_malformed_frame_ends_its_connection_with_a_reason_and_no_other(
    go: Go, bytes_: bytes, reason: str
) -> None:
    async def main() -> None:
        async with serving() as server, caller(server) as good, caller(server) as bad:
            bad.writer.write(encode_message(Ping(), 4)[0] + bytes_)
            assert await bad.read() == (PingReply(), 4)
            assert reason in (await bad.farewell()).message
            good.send(Ping(), 2)
            assert await good.read() == (PingReply(), 2)

    go(main())


def test_a_correlation_id_in_use_is_refused(go: Go) -> None:
    async def never(message: WireMessage, raw: memoryview, session: Session) -> PingReply:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def main() -> None:
        async with serving({Metadata: never}) as server, caller(server) as one:
            one.send(Metadata(), 9)
            one.send(Ping(), 9)
            assert "correlation id 9" in (await one.farewell()).message

    go(main())


def test_the_first_message_is_hello(go: Go) -> None:
    async def main() -> None:
        async with serving() as server, caller(server, hello=False) as one:
            one.send(Ping(), 1)
            assert "Ping before Hello" in (await one.farewell()).message

    go(main())


def test_before_the_handshake_frames_are_small(go: Go) -> None:
    async def main() -> None:
        async with serving() as server, caller(server, hello=False) as one:
            one.writer.write(PREFIX.pack(100_000, Produce.kind, 0, 0, 10, 1))
            assert "over the limit of 65536" in (await one.farewell()).message

    go(main())


def test_a_version_that_is_not_spoken_is_refused_with_the_reason(go: Go) -> None:
    async def main() -> None:
        async with serving(version_min=2, version_max=4) as server:
            for low, high in ((1, 1), (5, 9)):
                with pytest.raises(
                    UnsupportedVersion, match=f"versions 2 to 4, the caller {low} to {high}"
                ):
                    await Connection.open(
                        "127.0.0.1", server.port,
                        ConnectionOptions(version_min=low, version_max=high),
                    )  # fmt: skip
            for low, high, chosen in ((1, 3, 3), (3, 9, 4), (2, 2, 2)):
                options = ConnectionOptions(version_min=low, version_max=high)
                async with await Connection.open("127.0.0.1", server.port, options) as connection:
                    assert connection.hello is not None
                    assert connection.hello.version == chosen

    go(main())


def test_a_caller_is_refused_with_the_very_error_of_the_node(go: Go) -> None:
    def admit(hello: Hello) -> None:
        if hello.role == "node" and hello.cluster_proof != b"secret":
            raise AccessDenied("wrong proof")

    async def main() -> None:
        async with TcpServer({}, node_id=1, cluster_id="c", admit=admit) as server:
            await server.start()
            for proof in (b"", b"wrong"):
                options = ConnectionOptions(cluster_proof=proof, role="node")
                with pytest.raises(AccessDenied, match="wrong proof") as caught:
                    await Connection.open("127.0.0.1", server.port, options)
                assert not caught.value.retriable
            options = ConnectionOptions(cluster_proof=b"secret", role="node")
            async with await Connection.open("127.0.0.1", server.port, options) as connection:
                await connection.request(Ping())

    go(main())


@pytest.mark.parametrize(
    ("role", "name", "node_id"),
    [
        ("node", node_name(7), 7),
        ("node", "node-", None),
        ("node", "node-7x", None),
        ("client", "node-7", None),
    ],
)
def test_a_node_is_known_by_its_number_until_its_connection_ends(
    go: Go, role: Role, name: str, node_id: int | None
) -> None:
    seen: list[int | None] = []
    left: list[int | None] = []
    gone = asyncio.Event()

    def note(message: InitProducer, raw: memoryview, session: Session) -> InitProducerReply:
        seen.append(session.node_id)
        return InitProducerReply(1, 1)

    def on_leave(session: Session) -> None:
        left.append(session.node_id)
        gone.set()

    async def main() -> None:
        async with TcpServer(
            {InitProducer: note}, node_id=1, cluster_id="c", on_leave=on_leave
        ) as server:
            await server.start()
            options = ConnectionOptions(role=role, name=name)
            async with await Connection.open("127.0.0.1", server.port, options) as connection:
                await connection.request(InitProducer())
                assert left == []
            await gone.wait()
            async with caller(server, hello=False) as stranger:
                stranger.writer.write(bytes(100))
                await stranger.reader.read()
        assert (seen, left) == ([node_id], [node_id])

    go(main())


def test_the_raw_part_of_a_request_may_be_kept_and_changed(go: Go) -> None:
    kept: list[memoryview] = []

    def keep(message: Produce, raw: memoryview, session: Session) -> ProduceReply:
        raw[0] = 255
        kept.append(raw)
        return ProduceReply((len(raw),))

    async def main() -> None:
        async with (
            serving({Produce: keep}) as server,
            await Connection.open("127.0.0.1", server.port) as connection,
        ):
            sizes = [10, 5_000, 70_000, 300_000, 10, 300_000, 2_000_000, 5_000]
            await asyncio.gather(
                *(
                    connection.submit(Produce("t", 0), [bytes([number]) * size])
                    for number, size in enumerate(sizes)
                )
            )
            for number, (raw, size) in enumerate(zip(kept, sizes, strict=True)):
                assert bytes(raw) == b"\xff" + bytes([number]) * (size - 1)

    go(main())


def test_an_error_of_a_handler_reaches_the_caller_as_its_class(go: Go) -> None:
    async def later(message: WireMessage, raw: memoryview, session: Session) -> PingReply:
        await asyncio.sleep(0)
        raise Throttled("slowly").with_details(wait_ms=5)

    async def main() -> None:
        handlers: dict[type[WireMessage], Handler] = {
            Produce: raises(NotLeader("not me")), Fetch: later,
        }  # fmt: skip
        async with (
            serving(handlers) as server,
            await Connection.open("127.0.0.1", server.port) as connection,
        ):
            with pytest.raises(NotLeader, match="not me"):
                await connection.request(Produce("t", 0), [b"x"])
            with pytest.raises(Throttled, match="slowly") as caught:
                await connection.request(Fetch(()))
            assert caught.value.details == {"wait_ms": 5}
            with pytest.raises(InvalidArgument, match="does not serve Metadata"):
                await connection.request(Metadata())

    go(main())


def test_a_handler_that_breaks_is_an_internal_error_and_is_logged(
    go: Go, caplog: pytest.LogCaptureFixture
) -> None:
    async def later(message: WireMessage, raw: memoryview, session: Session) -> PingReply:
        await asyncio.sleep(0)
        raise KeyError("secret of the node")

    def mistaken(message: WireMessage, raw: memoryview, session: Session) -> PingReply:
        return PingReply()

    async def main() -> None:
        handlers: dict[type[WireMessage], Handler] = {
            Produce: raises(ZeroDivisionError("secret of the node")),
            Fetch: later,
            InitProducer: mistaken,
        }
        async with (
            serving(handlers) as server,
            await Connection.open("127.0.0.1", server.port) as connection,
        ):
            for request in (Produce("t", 0), Fetch(()), InitProducer()):
                with pytest.raises(InternalError) as caught:
                    await connection.request(request, [b"x"] if request.carries_raw else [])
                assert "secret" not in str(caught.value)
                assert caught.value.outcome == "unknown"
            await connection.request(Ping())

    with caplog.at_level(logging.ERROR):
        go(main())
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert len(logged) == 3
    assert "PingReply does not answer InitProducer" in logged[2]


def test_more_connections_than_allowed_are_refused_with_a_reason(go: Go) -> None:
    async def main() -> None:
        async with serving(connections_max=1) as server, caller(server) as first:
            async with caller(server, hello=False) as second:
                assert (await second.farewell()).code == Throttled.code
            first.send(Ping(), 2)
            await first.read()

    go(main())


def test_a_context_for_tls_is_used(go: Go, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out",
         certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(certificate, key)
    outside = ssl.create_default_context(cafile=certificate)

    async def main() -> None:
        handlers: dict[type[WireMessage], Handler] = {Produce: echo_length}
        async with TcpServer(handlers, node_id=1, cluster_id="c") as server:
            await server.start(tls=inside)
            async with await Connection.open("localhost", server.port, tls=outside) as connection:
                reply = await connection.request(Produce("t", 0), [b"\1" * 1_000_000])
                assert reply.message.base_offsets == (1_000_000, 100)

    go(main())


def test_settings_that_make_no_sense_are_all_reported() -> None:
    with pytest.raises(ConfigError, match=r"idle_ms .*; write_bytes_high is over"):
        ServerOptions(idle_ms=0, write_bytes_high=10, write_bytes_max=5)
