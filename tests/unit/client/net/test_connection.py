"""A connection against a node that is played by the test: order, bounds, deadlines, endings."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from loops import Go
from raw_peer import RawPeer

from raftq.client.common.errors import (
    ConnectionLost,
    LocalProtocolError,
    NotLeader,
    RemoteProtocolError,
    RequestTimeout,
    Throttled,
    TooLarge,
)
from raftq.client.net.connection import CORRELATION_ID_MAX, Connection
from raftq.client.options import ConnectionOptions
from raftq.client.wire.frames import PREFIX
from raftq.client.wire.messages import (
    ErrorReply,
    Fetch,
    FetchedPartition,
    FetchReply,
    HelloReply,
    InitProducer,
    InitProducerReply,
    Ping,
    PingReply,
    Produce,
    ProduceReply,
    encode_message,
)


class Node:
    """Listens, and hands its ends of connections to the test."""

    def __init__(self) -> None:
        self.port = 0
        self.peers: asyncio.Queue[RawPeer] = asyncio.Queue()

    async def connect(self, **options: Any) -> tuple[Connection, RawPeer]:
        opening = Connection.open("127.0.0.1", self.port, ConnectionOptions(**options))
        async with asyncio.TaskGroup() as group:
            opened = group.create_task(opening)
            peer = await self.peers.get()
            await peer.greet()
        return opened.result(), peer


@asynccontextmanager
async def fake_node() -> AsyncIterator[Node]:
    node, met = Node(), []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(RawPeer(reader, writer))
        node.peers.put_nowait(met[-1])

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    node.port = server.sockets[0].getsockname()[1]
    try:
        yield node
    finally:
        for peer in met:
            await peer.close()
        server.close()


def test_the_handshake_tells_who_answers(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, _ = await node.connect(name="me")
            async with connection:
                assert connection.hello == HelloReply(1, 5, "cluster")
                assert not connection.closed
            assert connection.closed

    go(main())


def test_requests_leave_in_the_order_of_calls_and_replies_return_in_any(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect()
            async with connection:
                futures = [connection.submit(InitProducer(str(n))) for n in range(50)]
                received = [await peer.read() for _ in futures]
                assert [one.name for one, _ in received if isinstance(one, InitProducer)] == [
                    str(n) for n in range(50)
                ]
                for message, id_ in reversed(received):
                    assert isinstance(message, InitProducer)
                    peer.send(InitProducerReply(int(message.name), 0), id_)
                replies = await asyncio.gather(*futures)
                assert [one.message.producer_id for one in replies] == list(range(50))

    go(main())


def test_raw_parts_of_any_size_come_back_even_byte_by_byte(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect()
            async with connection:
                for size in (1, 4_090, 5_000, 300_000):
                    raw = os.urandom(size)
                    future = connection.submit(Produce("t", 0), [raw[:7], memoryview(raw)[7:]])
                    _, id_ = await peer.read()
                    peer.send(ProduceReply((size,)), id_)
                    assert (await future).message.base_offsets == (size,)
                ping = connection.submit(Ping())
                _, id_ = await peer.read()
                for byte in b"".join(encode_message(PingReply(), id_)):
                    peer.writer.write(bytes([byte]))
                    await asyncio.sleep(0)
                assert (await ping).message == PingReply()

    go(main())


def test_the_raw_part_of_a_reply_arrives_whole(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect()
            async with connection:
                raw = os.urandom(3_000_000)
                future = connection.submit(Fetch(()))
                _, id_ = await peer.read()
                peer.send(FetchReply((FetchedPartition("t", 0, length=len(raw)),)), id_, raw)
                assert bytes((await future).raw) == raw

    go(main())


def test_an_error_reply_is_raised_as_its_class(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect()
            async with connection:
                future = connection.submit(Produce("t", 0), [b"x"])
                _, id_ = await peer.read()
                peer.send(ErrorReply.from_error(NotLeader("ask 3").with_details(leader=3)), id_)
                with pytest.raises(NotLeader, match="ask 3") as caught:
                    await future
                assert caught.value.details == {"leader": 3}
                assert caught.value.refresh_route

    go(main())


def test_no_more_requests_are_in_flight_than_allowed(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect(in_flight_max=2)
            async with connection:
                futures = [connection.submit(Ping()) for _ in range(5)]
                assert (connection.in_flight, connection.queued) == (2, 3)
                for left in (2, 1, 0, 0, 0):
                    _, id_ = await peer.read()
                    peer.send(PingReply(), id_)
                    await futures.pop(0)
                    assert connection.queued == left

    go(main())


def test_no_more_bytes_are_in_flight_than_allowed_but_a_big_request_travels_alone(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect(in_flight_bytes_max=10_000)
            async with connection:
                sizes = (6_000, 3_000, 6_000, 50_000, 10)
                futures = [connection.submit(Produce("t", 0), [bytes(size)]) for size in sizes]
                seen = []
                for future in futures:
                    seen.append((connection.in_flight, connection.queued))
                    _, id_ = await peer.read()
                    peer.send(ProduceReply((0,)), id_)
                    await future
                assert seen == [(2, 3), (2, 2), (1, 2), (1, 1), (1, 0)]

    go(main())


def test_a_full_queue_is_throttled(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, _ = await node.connect(in_flight_max=1, queued_max=2)
            futures = [connection.submit(Ping()) for _ in range(3)]
            with pytest.raises(Throttled):
                connection.submit(Ping())
            await connection.close()
            await asyncio.gather(*futures, return_exceptions=True)

    go(main())


def test_a_node_that_does_not_read_makes_requests_wait(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect(in_flight_bytes_max=1 << 30)
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            futures = []
            while not connection.queued:
                futures.append(connection.submit(Produce("t", 0), [bytes(1 << 20)]))
                await asyncio.sleep(0)
                assert len(futures) < 60
            await peer.close()
            ended = await asyncio.gather(*futures, return_exceptions=True)
            assert {type(one) for one in ended} == {ConnectionLost}
            assert ended[-1].outcome == "failed"  # type: ignore[union-attr]
            await connection.close()

    go(main())


def test_a_deadline_after_sending_is_unknown_and_its_late_reply_is_ignored(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect()
            async with connection:
                with pytest.raises(RequestTimeout) as caught:
                    await connection.request(Ping(), timeout_s=0.02)
                assert caught.value.outcome == "unknown"
                assert connection.in_flight == 0
                _, late = await peer.read()
                future = connection.submit(Ping())
                _, id_ = await peer.read()
                assert id_ != late
                peer.send(PingReply(), late)
                peer.send(PingReply(), id_)
                await future
                peer.send(PingReply(), late)  # a second one is no longer owed
                with pytest.raises(ConnectionLost):
                    await connection.request(Ping())

    go(main())


def test_a_deadline_before_sending_has_failed(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect(in_flight_max=1)
            async with connection:
                first = connection.submit(Ping())
                with pytest.raises(RequestTimeout) as caught:
                    await connection.request(Ping(), timeout_s=0.02)
                assert caught.value.outcome == "failed"
                _, id_ = await peer.read()
                peer.send(PingReply(), id_)
                await first
                assert (connection.in_flight, connection.queued) == (0, 0)

    go(main())


def test_the_earlier_of_two_deadlines_rings_first(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, _ = await node.connect()
            async with connection:
                late = connection.submit(Ping(), timeout_s=0.1)
                early = connection.submit(Ping(), timeout_s=0.01)
                await asyncio.wait((late, early), return_when=asyncio.FIRST_COMPLETED)
                assert early.done()
                assert not late.done()
                for future in (early, late):
                    with pytest.raises(RequestTimeout):
                        await future

    go(main())


def test_a_node_that_owes_too_many_replies_is_given_up(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, _ = await node.connect(abandoned_max=3)
            futures = [connection.submit(Ping(), timeout_s=0.01) for _ in range(4)]
            await asyncio.gather(*futures, return_exceptions=True)
            assert connection.closed
            with pytest.raises(ConnectionLost, match="owes 4 replies"):
                await connection.request(Ping())
            await connection.close()

    go(main())


def test_closing_tells_each_request_what_became_of_it(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, _ = await node.connect(in_flight_max=2)
            futures = [connection.submit(Ping()) for _ in range(3)]
            await connection.close()
            ended = await asyncio.gather(*futures, return_exceptions=True)
            assert [one.outcome for one in ended if isinstance(one, ConnectionLost)] == [
                "unknown", "unknown", "failed",
            ]  # fmt: skip
            with pytest.raises(ConnectionLost) as caught:
                await connection.request(Ping())
            assert caught.value.outcome == "failed"
            await connection.close()

    go(main())


def test_a_lost_node_ends_every_request(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect(in_flight_max=1)
            sent, queued = connection.submit(Ping()), connection.submit(Ping())
            await peer.read()
            await peer.close()
            for future, outcome in ((sent, "unknown"), (queued, "failed")):
                with pytest.raises(ConnectionLost) as caught:
                    await future
                assert caught.value.outcome == outcome
                assert caught.value.retriable
            await connection.close()

    go(main())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda id_: b"\xff" * 16, "over the limit"),
        (lambda id_: encode_message(Ping(), id_)[0], "kind 3 is not known"),
        (lambda id_: encode_message(InitProducerReply(1, 1), id_)[0], "another kind of request"),
        (lambda id_: encode_message(PingReply(), id_ + 1)[0], "which is not open"),
        (lambda id_: PREFIX.pack(13, 4, 0, 0, 1, id_) + b"\xc1", "MessagePack data is malformed"),
    ],
)
def test_a_node_that_breaks_the_protocol_is_left(
    go: Go, answer: Callable[[int], bytes], reason: str
) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect()
            future = connection.submit(Ping())
            _, id_ = await peer.read()
            peer.writer.write(answer(id_))
            with pytest.raises(ConnectionLost, match=reason) as caught:
                await future
            assert isinstance(caught.value.__cause__, RemoteProtocolError)
            assert caught.value.outcome == "unknown"
            await connection.close()

    go(main())


def test_the_reason_of_a_node_that_closes_is_passed_on(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect()
            future = connection.submit(Ping())
            peer.send(ErrorReply.from_error(Throttled("too many of you")), 0)
            with pytest.raises(ConnectionLost, match="too many of you"):
                await future
            await connection.close()

    go(main())


def test_a_cancelled_request_frees_its_place_when_the_reply_comes(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect(in_flight_max=1)
            async with connection:
                first, second, third = (connection.submit(Ping()) for _ in range(3))
                first.cancel()
                second.cancel()
                assert connection.in_flight == 1
                _, id_ = await peer.read()
                peer.send(PingReply(), id_)
                _, id_ = await peer.read()
                peer.send(PingReply(), id_)
                await third

    go(main())


def test_correlation_ids_wrap_around_those_in_use(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect()
            async with connection:
                connection._last_id = CORRELATION_ID_MAX - 1
                futures = [connection.submit(Ping()) for _ in range(3)]
                connection._last_id = CORRELATION_ID_MAX - 1
                futures.append(connection.submit(Ping()))
                ids = [(await peer.read())[1] for _ in futures]
                assert ids == [CORRELATION_ID_MAX, 1, 2, 3]
                for id_ in ids:
                    peer.send(PingReply(), id_)
                await asyncio.gather(*futures)

    go(main())


def test_a_bad_request_is_refused_and_harms_nothing(go: Go) -> None:
    async def main() -> None:
        async with fake_node() as node:
            connection, peer = await node.connect(frame_bytes_max=10_000)
            async with connection:
                with pytest.raises(LocalProtocolError):
                    await connection.request(Produce("t", -1), [b"x"])
                with pytest.raises(TooLarge):
                    await connection.request(Produce("t", 1), [bytes(10_000)])
                assert connection.in_flight == 0
                future = connection.submit(Ping())
                _, id_ = await peer.read()
                peer.send(PingReply(), id_)
                await future

    go(main())
