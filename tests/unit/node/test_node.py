"""One real node in this process: what it serves, whom it refuses, and how it comes back."""

import asyncio
import random
import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import pytest
import real_node
from real_node import SECRET, address, connect, run

from raftq import aio
from raftq.client.common.errors import (
    AccessDenied,
    ConfigError,
    CorruptBatch,
    DirectoryLocked,
    FencedEpoch,
    InvalidArgument,
    RaftqError,
    UnknownPartition,
    UnknownTopic,
    UnsupportedVersion,
)
from raftq.client.wire.batch import encode
from raftq.client.wire.messages import (
    Fetch,
    FetchPartition,
    ListOffsets,
    OffsetQuery,
    Ping,
    Produce,
)
from raftq.client.wire.node_messages import Heartbeat
from raftq.client.wire.proof import cluster_proof
from raftq.node.app import Node
from raftq.node.config import Address


def make(directory: Path, seed: int = 1, **settings: object) -> Node:
    """A node that also listens for HTTP."""
    return real_node.make(directory, seed, **{"http": Address("127.0.0.1", 0), **settings})


def running(
    directory: Path, seed: int = 1, **settings: object
) -> AbstractAsyncContextManager[Node]:
    """Such a node, running."""
    return real_node.running(directory, seed, **{"http": Address("127.0.0.1", 0), **settings})


def test_records_survive_a_clean_stop_and_a_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("t", partitions=2, replication=1)
            async with aio.Producer(address(node)) as producer:
                await (await producer.send("t", b"kept", partition=1))
        async with running(tmp_path, 2) as node, await connect(node) as connection:
            reply = await connection.request(Fetch((FetchPartition("t", 1, 0),)))
            assert b"kept" in bytes(reply.raw)
            latest = await connection.request(ListOffsets((OffsetQuery("t", 1, "latest"),)))
            assert latest.message.answers[0].offset == 1

    run(scenario)


def test_a_wrong_secret_or_version_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node:
            with pytest.raises(AccessDenied, match="wrong secret or cluster"):
                await connect(node, role="node", name="node-2", cluster_proof=b"no")
            other = cluster_proof(SECRET, "another cluster")
            with pytest.raises(AccessDenied):
                await connect(node, role="node", name="node-2", cluster_proof=other)
            with pytest.raises(UnsupportedVersion, match="speaks protocol versions"):
                await connect(node, version_min=90, version_max=91)
            async with await connect(node) as connection:
                with pytest.raises(AccessDenied, match="for nodes only"):
                    await connection.request(Heartbeat(2, 5))

    run(scenario)


def test_bad_requests_get_clear_errors_and_the_node_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node, await connect(node) as connection:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("t", partitions=1, replication=1)
                with pytest.raises(InvalidArgument, match="unknown setting"):
                    await admin.create_topic("u", config={"colour": "blue"})
                with pytest.raises(InvalidArgument, match="needs as many nodes"):
                    await admin.create_topic("u", replication=3)
                with pytest.raises(InvalidArgument, match="cluster's own"):
                    await admin.create_topic("__mine")
            batch = encode([b"v"])
            bad = bytearray(batch)
            bad[-1] ^= 1
            for request, raw, error in (
                (Produce("nowhere", 0), batch, UnknownTopic),
                (Produce("t", 9), batch, UnknownPartition),
                (Produce("t", 0, epoch=99), batch, FencedEpoch),
                (Produce("t", 0), bad, CorruptBatch),
                (Produce("t", 0), b"nonsense", CorruptBatch),
                (Produce("t", 0), encode([b"v"], control=True), InvalidArgument),
            ):
                with pytest.raises(error):
                    await connection.request(request, [raw])
            reply = await connection.request(Produce("t", 0), [batch])
            assert reply.message.base_offsets == (0,)

    run(scenario)


def test_a_produce_without_a_batch_asks_whether_one_would_be_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node, await connect(node) as connection:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("t", partitions=1, replication=1)
            for acks in ("all", "leader", "none"):
                reply = await connection.request(Produce("t", 0, acks=acks))
                assert reply.message.base_offsets == ()
            with pytest.raises(FencedEpoch):
                await connection.request(Produce("t", 0, epoch=99))
            with pytest.raises(UnknownTopic):
                await connection.request(Produce("nowhere", 0))
            reply = await connection.request(Produce("t", 0), [encode([b"v"])])
            assert reply.message.base_offsets == (0,)
            reply = await connection.request(Produce("t", 0))
            assert reply.message.base_offsets == ()

    run(scenario)


def test_garbage_on_every_port_harms_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        rng = random.Random(7)
        async with running(tmp_path) as node:
            ports = (node.native_port, node.http_port, node.config.raft.port)
            for port in ports * 20:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(rng.randbytes(rng.choice((1, 7, 100, 5000))))
                writer.write_eof()
                async with asyncio.timeout(10):
                    await reader.read()
                writer.close()
            async with await connect(node) as connection:
                await connection.request(Ping())
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{node.http_port}/readyz"
                async with session.get(url) as answer:
                    assert answer.status == 200
            assert not node.fatal.done()

    run(scenario)


def test_a_directory_has_one_node_and_keeps_to_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path):
            second = make(tmp_path, 2)
            with pytest.raises(DirectoryLocked):
                await second.start()
            await second.stop()
        stranger = make(tmp_path, 3, node_id=2)
        with pytest.raises(ConfigError, match="belongs to node_id 1"):
            await stranger.start()
        await stranger.stop()

    run(scenario)


def test_a_node_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            node = make(tmp_path, native=Address("127.0.0.1", port))
            with pytest.raises((RaftqError, OSError)):
                await node.start()
            await node.stop()
        async with running(tmp_path, 2):
            pass

    run(scenario)


def test_a_failed_part_ends_the_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node:

            async def broken() -> None:
                raise RuntimeError("a part is broken")

            node.spawn(broken())
            with pytest.raises(RuntimeError, match="a part is broken"):
                await asyncio.wait_for(asyncio.shield(node.fatal), 5)

    run(scenario)


def test_nobody_waits_for_records_at_a_node_that_is_cut_off(tmp_path: Path) -> None:
    """1. A fetch is parked at the end of the log.
    2. The node is cut off from the controller: the fetch ends, and its caller looks elsewhere.
    3. What is there is still read, and taken: neither needs a controller.
    """

    async def scenario() -> None:
        async with running(tmp_path) as node:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("t", partitions=1, replication=1)
            async with await connect(node) as mine, aio.Producer(address(node)) as producer:
                at_end = Fetch((FetchPartition("t", 0, 0),), wait_ms=30_000)
                parked = mine.submit(at_end)
                await mine.request(ListOffsets((OffsetQuery("t", 0, "latest"),)))
                node._cut_off(True)
                async with asyncio.timeout(5):
                    assert (await parked).message.partitions[0].error == "not_leader"
                    again = await mine.request(at_end)
                    assert again.message.partitions[0].error == "not_leader"
                    now = await mine.request(Fetch((FetchPartition("t", 0, 0),), wait_ms=0))
                    assert not now.message.partitions[0].error
                    await (await producer.send("t", b"v"))
                    read = await mine.request(at_end)
                    assert read.message.partitions[0].length > 0
                node._cut_off(False)
                parked = mine.submit(Fetch((FetchPartition("t", 0, 1),), wait_ms=30_000))
                await (await producer.send("t", b"w"))
                assert (await parked).message.partitions[0].length > 0

    run(scenario)


def test_a_consumer_that_seeks_elsewhere_frees_the_fetch_it_no_longer_waits_for(
    tmp_path: Path,
) -> None:
    """1. A fetch is parked at the end of the log.
    2. Its caller asks for the same partition from another offset: the parked one ends at once.
    3. Another caller's fetch stays parked.
    """

    async def scenario() -> None:
        async with running(tmp_path) as node:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("t", partitions=1, replication=1)
            async with aio.Producer(address(node)) as producer:
                await (await producer.send("t", b"v"))
            async with await connect(node) as mine, await connect(node) as others:
                at_end = Fetch((FetchPartition("t", 0, 1),), wait_ms=30_000)
                parked = mine.submit(at_end)
                waiting = others.submit(at_end)
                await mine.request(ListOffsets((OffsetQuery("t", 0, "latest"),)))
                again = await mine.request(Fetch((FetchPartition("t", 0, 0),)))
                assert again.message.partitions[0].length > 0
                async with asyncio.timeout(5):
                    assert (await parked).message.partitions[0].length == 0
                assert not waiting.done()

    run(scenario)
