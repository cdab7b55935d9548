"""Delayed records on one real node, through its sockets."""

import asyncio
from pathlib import Path
from typing import Any

from real_node import node_with_topic, run

from raftq.client.net.connection import Connection
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.batch import decode, encode
from raftq.client.wire.messages import Fetch, FetchPartition, Produce
from raftq.node.app import wall_ms


async def delay(connection: Connection, values: list[bytes], delays_ms: list[int]) -> int:
    now = wall_ms()
    batch = encode(values, timestamps=now, deliver_at=[now + one for one in delays_ms])
    reply = await connection.request(Produce("orders", 0, delayed=True), (batch,))
    return int(reply.message.base_offsets[0])


async def fetch(connection: Connection, count: int) -> list[bytes]:
    values: list[bytes] = []
    while len(values) < count:
        wanted = FetchPartition("orders", 0, len(values))
        reply = await connection.request(Fetch((wanted,), wait_ms=5_000))
        at = 0
        raw = bytes(reply.raw)
        while at < len(raw):
            batch = decode(raw, at)
            values += batch.values()
            at += batch.length
    return values


async def ask(connection: Connection, message: Any) -> Any:
    return (await connection.request(message)).message


def test_delayed_records_are_listed_cancelled_and_fired_also_after_a_restart(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with node_with_topic(tmp_path) as (_, connection):
            assert (await ask(connection, wire.ListDelayed("orders", 0))).records == ()
            assert await delay(connection, [b"a", b"b", b"c"], [60_000, 300, 900]) == 0
            reply = await connection.request(wire.ListDelayed("orders", 0, values=True))
            assert [one.offset for one in reply.message.records] == [1, 2, 0]
            batch = decode(bytes(reply.raw))
            assert list(zip(batch.offsets(), batch.values(), strict=True)) == [
                (0, b"a"),
                (1, b"b"),
                (2, b"c"),
            ]
            assert await fetch(connection, 1) == [b"b"]
            gone = await ask(connection, wire.CancelDelayed("orders", 0, (0, 1)))
            assert gone.cancelled == (0,)
            stats = await ask(connection, wire.DelayStats("orders", 0))
            assert (stats.pending, stats.scheduled, stats.fired, stats.cancelled) == (1, 3, 1, 1)
            await delay(connection, [b"d"], [1_500])
        await asyncio.sleep(1)
        async with node_with_topic(tmp_path, seed=2) as (_, connection):
            assert await fetch(connection, 3) == [b"b", b"c", b"d"]
            left = await ask(connection, wire.ListDelayed("orders", 0))
            assert (left.records, left.pending) == ((), 0)
            one = await ask(connection, wire.ListDelayed("orders", 0, offset=0))
            assert one.records == ()

    run(scenario)
