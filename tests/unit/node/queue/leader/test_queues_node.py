"""A queue on one real node, through its sockets: what a worker and a reader ask of it."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from real_node import address, connect, node_with_topic, run, until

from raftq import aio
from raftq.client.net.connection import Connection
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.batch import decode
from raftq.node.app import Node

queue_of = partial(node_with_topic, partitions=2)


async def publish(node: Node, *values: bytes, partition: int = 0) -> None:
    async with aio.Producer(address(node)) as producer:
        for value in values:
            await producer.send("orders", value, partition=partition)
        await producer.flush()


async def lease(connection: Connection, **fields: Any) -> Any:
    places = (wire.LeasePartition("orders", 0), wire.LeasePartition("orders", 1))
    reply = await connection.request(wire.Lease("g", "w", places, **fields))
    return reply.message.partitions, bytes(reply.raw)


def test_a_queue_over_the_wire_survives_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with queue_of(tmp_path) as (node, connection):
            waiting = asyncio.ensure_future(lease(connection, wait_ms=5_000))
            await publish(node, b"a")
            ((found,), raw) = await waiting
            assert decode(raw).values() == [b"a"]
            (row,) = found.ranges
            await publish(node, b"b", b"c", partition=1)
            reply = await connection.request(
                wire.Settle("g", "orders", 0, "ack", (wire.ReceiptRow(row.nonce, 0, 1),))
            )
            assert reply.message.errors == ("",)
            ((second,), _) = await lease(connection, wait_ms=5_000)
            rows = (wire.ReceiptRow(second.ranges[0].nonce, 0, 1),)
            await connection.request(wire.Settle("g", "orders", 1, "nack", rows, delay_ms=0))
            stored = (wire.StoreOffset("orders", 1, 2, 7),)
            await connection.request(wire.StoreOffsets("readers", "m", stored))
        async with queue_of(tmp_path, seed=2) as (_, connection):
            # What was held is still held, what was returned comes again, with its attempt.
            (found, raw) = await lease(connection, wait_ms=5_000)
            assert [(one.start, one.end, one.attempt) for one in found[0].ranges] == [(0, 1, 2)]
            again = await connection.request(wire.DescribeQueue("orders", 0))
            assert again.message.groups[0].settled_offset == 1
            read = await connection.request(
                wire.ReadOffsets("readers", "m", (wire.ReadOffset("orders", 1, 6),))
            )
            assert read.message.offsets[0].error == "fenced_generation"
            read = await connection.request(
                wire.ReadOffsets("readers", "m", (wire.ReadOffset("orders", 1, 8),))
            )
            assert (read.message.offsets[0].offset, read.message.offsets[0].owner_epoch) == (2, 8)

    run(scenario)


def test_a_connection_that_ends_leaves_no_parked_lease_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with queue_of(tmp_path) as (node, connection):
            async with await connect(node) as other:
                parked = asyncio.ensure_future(lease(other, wait_ms=20_000))
                await until(lambda: bool(node.services.queue_handlers._parked))
            await asyncio.wait([parked])
            assert parked.exception() is not None
            await until(lambda: not node.services.queue_handlers._parked)
            await publish(node, b"a")
            ((found,), _) = await lease(connection, wait_ms=5_000)
            assert found.ranges[0].attempt == 1

    run(scenario)


def test_a_topic_that_nobody_queued_can_be_described_and_stays_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with queue_of(tmp_path) as (node, connection):
            reply = await connection.request(wire.DescribeQueue("orders", 0))
            assert reply.message.groups == ()
            assert not node.metadata.state.topics["orders"].queued

    run(scenario)
