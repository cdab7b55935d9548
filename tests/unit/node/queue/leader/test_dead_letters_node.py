"""Dead letters on one real node, through its sockets: made, looked at, sent back, purged."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from real_node import address, connect, run, running

from raftq import aio
from raftq.client.common.errors import (
    AccessDenied,
    InvalidArgument,
    NotLeader,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.net.connection import Connection
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.batch import decode, encode
from raftq.client.wire.messages import Produce
from raftq.client.wire.record import BatchRecord
from raftq.node.app import Node


async def publish(node: Node, *values: bytes, **more: Any) -> None:
    async with aio.Producer(address(node)) as producer:
        for value in values:
            await producer.send("orders", value, b"key-" + value, partition=1, **more)
        await producer.flush()


async def lease(connection: Connection, topic: str = "orders") -> tuple[Any, list[BatchRecord]]:
    places = (wire.LeasePartition(topic, 1),)
    reply = await connection.request(wire.Lease("g", "w", places, wait_ms=3_000))
    (found,) = reply.message.partitions
    records, raw, at = [], bytes(reply.raw), 0
    while at < len(raw):
        batch = decode(raw, at)
        records += batch.records()
        at += batch.length
    return found, records


async def reject_all(connection: Connection, reason: str) -> int:
    found, _ = await lease(connection)
    rows = tuple(wire.ReceiptRow(one.nonce, one.start, one.end) for one in found.ranges)
    message = wire.Settle("g", "orders", 1, "reject", rows, reason=reason, error="no such item")
    reply = await connection.request(message)
    assert set(reply.message.errors) == {""}
    return int(reply.message.dead)


async def letters(connection: Connection, **fields: Any) -> tuple[Any, list[BatchRecord]]:
    reply = await connection.request(
        wire.DeadLetters("orders.dlq", 1, fields.pop("verb", "browse"), **fields)
    )
    records, raw, at = [], bytes(reply.raw), 0
    while at < len(raw):
        batch = decode(raw, at)
        records += batch.records()
        at += batch.length
    return reply.message, records


async def letters_when(connection: Connection, count: int) -> list[BatchRecord]:
    for _ in range(300):
        with suppress(UnknownTopic, UnknownPartition, NotLeader):  # it is just being made
            _, found = await letters(connection)
            if len(found) == count:
                return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"never {count} letters")


def test_rejected_records_become_letters_that_can_be_redriven_and_purged(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node, await connect(node) as connection:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("orders", partitions=2, replication=1)
            await publish(node, b"a", b"b", b"c", headers={"h": b"1"}, priority=1)
            assert await reject_all(connection, "bad") == 3
            found = await letters_when(connection, 3)
            assert [one.value for one in found] == [b"a", b"b", b"c"]
            first = found[0]
            assert (first.key, first.priority, first.headers["h"]) == (b"key-a", 1, b"1")
            facts = {name[6:]: item for name, item in first.headers.items() if name != "h"}
            times = facts.pop("first-delivery"), facts.pop("last-delivery")
            assert all(time.isdigit() for time in times)
            assert facts == {
                "reason": b"bad",
                "topic": b"orders",
                "partition": b"1",
                "offset": b"0",
                "group": b"g",
                "attempts": b"1",
                "error": b"no such item",
            }
            source = node.metadata.state.topics["orders.dlq"]
            assert len(source.partitions) == 2
            assert source.config.retention_ms == 336 * 3_600_000

            reply, some = await letters(connection, key=b"key-b")
            assert ([one.value for one in some], reply.next_offset) == ([b"b"], 3)
            assert (await letters(connection, reason="else"))[1] == []
            assert (await letters(connection, group="g", limit=2))[0].next_offset == 2
            reply, _ = await letters(connection, verb="redrive", key=b"key-b")
            assert reply.count == 1
            reply, _ = await letters(connection, verb="redrive", key=b"key-b")
            assert reply.count == 0
            reply, _ = await letters(connection, verb="purge", key=b"key-c")
            assert reply.count == 1
            assert [one.value for one in (await letters(connection))[1]] == [b"a"]

            _, again = await lease(connection)
            assert [(one.value, one.key, one.priority) for one in again] == [(b"b", b"key-b", 1)]
            assert again[0].headers == {"h": b"1", "x-redriven-from": b"orders.dlq/1/1"}
            described = await connection.request(wire.DescribeQueue("orders", 1, "g"))
            assert described.message.groups[0].settled_offset == 3
            assert described.message.groups[0].counters["dead"] == 3

    run(scenario)


def test_letters_survive_a_restart_and_no_letter_dies_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node, await connect(node) as connection:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("orders", partitions=2, replication=1)
            await publish(node, b"a", b"b")
            assert await reject_all(connection, "bad") == 2
            await letters_when(connection, 2)
            await letters(connection, verb="purge", limit=1)
        async with running(tmp_path, 2) as node, await connect(node) as connection:
            assert [one.value for one in await letters_when(connection, 1)] == [b"b"]
            found, _ = await lease(connection, "orders.dlq")
            rows = tuple(wire.ReceiptRow(one.nonce, one.start, one.end) for one in found.ranges)
            await connection.request(wire.Settle("g", "orders.dlq", 1, "reject", rows))
            await asyncio.sleep(0.2)
            assert "orders.dlq.dlq" not in node.metadata.state.topics
            await publish(node, b"c")
            assert await reject_all(connection, "bad") == 1
            assert [one.value for one in await letters_when(connection, 2)] == [b"b", b"c"]

    run(scenario)


def test_letters_are_taken_whatever_the_limits_of_their_topics_are_now(tmp_path: Path) -> None:
    """
    1. The limit of a topic is raised when its dead letters have been made.
    2. A large record and small ones after it are rejected: all of them are letters.
    3. The limit is lowered below what the letters have; they are sent back all the same.
    """

    async def scenario() -> None:
        large = 2 * 1024 * 1024
        async with running(tmp_path) as node, await connect(node) as connection:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("orders", partitions=2, replication=1)
                await publish(node, b"first")
                assert await reject_all(connection, "bad") == 1
                await letters_when(connection, 1)
                await admin.alter_topic("orders", {"value_bytes_max": 2 * large})
                async with aio.Producer(address(node), value_bytes_max=2 * large) as producer:
                    await producer.send("orders", bytes(large), partition=1)
                    await producer.flush()
                await publish(node, b"a", b"b")
                dead = 0
                while dead < 3:
                    dead += await reject_all(connection, "bad")
                found = await letters_when(connection, 4)
                assert [len(one.value) for one in found] == [5, large, 1, 1]
                await admin.alter_topic("orders", {"value_bytes_max": 10})
            reply, _ = await letters(connection, verb="redrive")
            assert reply.count == 4

    run(scenario)


def test_topic_whose_dead_letters_could_have_no_name_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node, aio.Admin(address(node)) as admin:
            with pytest.raises(InvalidArgument, match="1 to 245"):
                await admin.create_topic("t" * 246, partitions=1, replication=1)
            await admin.create_topic("t" * 245, partitions=1, replication=1)
            await node.copy_sender.make_dead_letters("t" * 245)
            assert "t" * 245 + ".dlq" in await admin.list_topics()

    run(scenario)


def test_refused_letters_are_told_where_users_look(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            running(tmp_path) as node,
            await connect(node) as connection,
            aio.Admin(address(node)) as admin,
        ):
            await admin.create_topic("orders", partitions=2, replication=1)
            await publish(node, b"a", b"b")
            assert await admin.parked_letters("orders") == 0

            async def refuse(topic: str) -> None:
                raise InvalidArgument("no such name")

            node.copy_sender.make_dead_letters = refuse  # type: ignore[method-assign]
            assert await reject_all(connection, "bad") == 2
            assert await parked_when(admin, 2)
            (one,) = [one for one in (await admin.describe_group("g")).partitions if one.counters]
            assert one.counters is not None
            assert (one.counters["parked"], one.counters["dead"]) == (2, 0)

    run(scenario)


async def parked_when(admin: aio.Admin, count: int) -> bool:
    for _ in range(300):
        if await admin.parked_letters("orders.dlq") == count:
            return True
        await asyncio.sleep(0.02)
    return False


def test_copies_are_taken_from_nodes_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node, await connect(node) as connection:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("orders", partitions=2, replication=1)
            with pytest.raises(AccessDenied):
                await connection.request(Produce("orders", 1, copies=True), (encode([b"v"]),))

    run(scenario)
