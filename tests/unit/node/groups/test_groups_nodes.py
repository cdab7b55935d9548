"""Groups on real nodes, through their sockets: joining, moving on, and a coordinator that dies."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from real_node import FAST, address, connect, free_port, node_with_topic, run, running

from raftq import aio
from raftq.client.common.errors import (
    FencedGeneration,
    GroupNotEmpty,
    InvalidArgument,
    NotLeader,
    RaftqError,
    UnknownGroup,
)
from raftq.client.net.connection import Connection
from raftq.client.wire.group_messages import (
    GROUPS_TOPIC,
    DeleteGroup,
    DescribeGroup,
    FindCoordinator,
    GroupHeartbeat,
    GroupHeartbeatReply,
    LeaveGroup,
    ListGroups,
    Owned,
)
from raftq.client.wire.queue_messages import ReadOffset, ReadOffsets
from raftq.node.app import Node
from raftq.node.config import Address
from raftq.node.groups.coordinators import partition_of


class Someone:
    """A member that does at once what it is told."""

    def __init__(self, connection: Connection, name: str, **fields: Any) -> None:
        self.connection = connection
        self.fields: dict[str, Any] = {"topics": ("t",), "session_ms": 5_000, **fields}
        self.member_id = name
        self.epoch = 0
        self.generation = 0
        self.owned: dict[tuple[str, int], int] = {}

    async def beat(self, wait_ms: int = 0, group: str = "g") -> GroupHeartbeatReply:
        reply = (
            await self.connection.request(
                GroupHeartbeat(
                    group,
                    self.member_id,
                    self.epoch,
                    self.generation,
                    owned=tuple(Owned(*slot) for slot in self.owned),
                    wait_ms=wait_ms,
                    **self.fields,
                )
            )
        ).message
        self.member_id, self.epoch = reply.member_id, reply.member_epoch
        self.generation = reply.generation
        self.owned = {(one.topic, one.partition): one.owner_epoch for one in reply.assigned}
        return reply


async def settle(*members: Someone, wait_ms: int = 0) -> None:
    """Beat until everybody has what it should."""
    async with asyncio.timeout(20):
        while True:
            before = [dict(one.owned) for one in members]
            replies = [await one.beat(wait_ms) for one in members]
            if before == [one.owned for one in members] and not any(r.pending for r in replies):
                return


one_node = partial(node_with_topic, topic="t", partitions=8)


def test_members_share_the_partitions_and_a_restart_of_the_node_keeps_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_node(tmp_path) as (node, connection):
            found = (await connection.request(FindCoordinator("g"))).message
            assert (found.node_id, found.port) == (1, node.native_port)
            a, b = Someone(connection, "a"), Someone(connection, "b")
            reply = await a.beat()
            assert len(reply.assigned) == 8
            await b.beat()
            await settle(a, b)
            assert sorted([*a.owned, *b.owned]) == [("t", number) for number in range(8)]
            assert len(a.owned) == len(b.owned) == 4
            kept = dict(a.owned), dict(b.owned)
        async with one_node(tmp_path, seed=2) as (_, connection):
            a.connection = b.connection = connection
            generation = a.generation
            await settle(a, b)
            assert (a.owned, b.owned) == kept
            assert a.generation == generation
            left = await connection.request(LeaveGroup("g", "b"))
            assert left.message.left
            await settle(a)
            assert len(a.owned) == 8
            with pytest.raises(FencedGeneration):
                await b.beat()

    run(scenario)


def test_news_reaches_a_member_that_waits_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_node(tmp_path) as (node, connection), await connect(node) as other:
            a = Someone(connection, "a", session_ms=180_000)
            b = Someone(other, "b", session_ms=180_000)
            await settle(a)
            waiting = asyncio.ensure_future(a.beat(wait_ms=60_000))
            began = time.monotonic()
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await b.beat()
            reply = await waiting
            assert time.monotonic() - began < 30
            assert len(reply.assigned) == 4
            waiting = asyncio.ensure_future(b.beat(wait_ms=60_000))
            await asyncio.sleep(0.05)
            await a.beat()
            began = time.monotonic()
            await waiting
            assert time.monotonic() - began < 30
            assert len(b.owned) == 4
            # Partitions that are added are news, too.
            await settle(a, b)
            waiting = asyncio.ensure_future(a.beat(wait_ms=1_600))
            async with aio.Admin(address(node)) as admin:
                await admin.add_partitions("t", 10)
            assert len((await waiting).assigned) == 5

    run(scenario)


def test_groups_are_listed_described_and_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_node(tmp_path) as (_, connection):
            assert (await connection.request(ListGroups())).message.groups == ()
            with pytest.raises(UnknownGroup):
                await connection.request(DescribeGroup("g"))
            a = Someone(connection, "a", client_id="app", instance_id="one")
            q = Someone(connection, "q", mode="queue", topics=(), pattern="t|u")
            await a.beat()
            await q.beat(group="work")
            listed = (await connection.request(ListGroups())).message.groups
            assert [(one.group, one.state, one.mode, one.members) for one in listed] == [
                ("g", "stable", "stream", 1), ("work", "stable", "queue", 1),
            ]  # fmt: skip
            found = (await connection.request(DescribeGroup("g"))).message
            assert (found.coordinator, found.topics) == (1, ("t",))
            (member,) = found.members
            assert (member.member_id, member.client_id, member.instance_id) == ("a", "app", "one")
            assert (member.host, len(member.assigned), member.topics) == ("127.0.0.1", 8, ("t",))
            with pytest.raises(GroupNotEmpty):
                await connection.request(DeleteGroup("g"))
            await connection.request(LeaveGroup("g", "a"))
            found = (await connection.request(DescribeGroup("g"))).message
            assert (found.state, found.members) == ("empty", ())
            await connection.request(DeleteGroup("g"))
            with pytest.raises(UnknownGroup):
                await connection.request(DeleteGroup("g"))
            generation = found.generation
            a.epoch = a.generation = 0
            await a.beat()
            assert min(a.owned.values()) > generation

    run(scenario)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_node(tmp_path) as (node, connection):
            for fields in (
                {"topics": ()}, {"session_ms": 10}, {"topics": (), "pattern": "("},
            ):  # fmt: skip
                with pytest.raises(InvalidArgument):
                    await Someone(connection, "a", **fields).beat()
            with pytest.raises(InvalidArgument):
                await Someone(connection, "a").beat(group="")
            async with aio.Producer(address(node)) as producer:
                with pytest.raises(RaftqError):
                    await (await producer.send(GROUPS_TOPIC, b"x", partition=0))
            assert not node.fatal.done()

    run(scenario)


@asynccontextmanager
async def three_nodes(directory: Path) -> AsyncIterator[dict[int, Node]]:
    ports = {number: free_port() for number in (1, 2, 3)}
    voters = {number: f"127.0.0.1:{port}" for number, port in ports.items()}
    async with AsyncExitStack() as stack:
        managers = [
            running(
                directory / str(number),
                seed=number,
                node_id=number,
                voters=voters,
                raft=Address("127.0.0.1", ports[number]),
                raft_times=FAST,
            )
            for number in ports
        ]
        nodes = await asyncio.gather(*(stack.enter_async_context(one) for one in managers))
        yield {node.node_id: node for node in nodes}


def test_another_node_takes_over_the_groups_of_one_that_dies(tmp_path: Path) -> None:
    """
    1. Two members share eight partitions; any node says who coordinates, others say NotLeader.
    2. The coordinator's node stops.
    3. The members find the next one, keep what they have, in the same generation.
    """

    async def scenario() -> None:
        async with three_nodes(tmp_path) as nodes:
            async with aio.Admin(address(nodes[1])) as admin:
                await admin.create_topic("t", partitions=8, replication=3)
            async with await connect(nodes[1]) as any_node:
                leader = await coordinator_of(any_node)
                state = nodes[1].metadata.state.topics[GROUPS_TOPIC]
                assert len(state.partitions) == 8
                assert all(len(one.replicas) == 3 for one in state.partitions)
                assert state.config.min_insync == 2
            other = next(node for number, node in nodes.items() if number != leader)
            async with await connect(other) as connection:
                with pytest.raises(NotLeader) as refused:
                    await Someone(connection, "a").beat()
                assert refused.value.details["leader"] == leader
            async with await connect(nodes[leader]) as connection:
                a, b = Someone(connection, "a"), Someone(connection, "b")
                await settle(a, b)
            kept = dict(a.owned), dict(b.owned), a.generation
            await nodes[leader].drain()
            await nodes[leader].stop()
            rest = [node for number, node in nodes.items() if number != leader]
            async with await connect(rest[0]) as any_node:
                now = await coordinator_of(any_node, not_this=leader)
            async with await connect(nodes[now]) as connection:
                a.connection = b.connection = connection
                await settle(a, b)
            assert (a.owned, b.owned, a.generation) == kept
            number = partition_of("g", 8)
            assert rest[0].metadata.state.topics[GROUPS_TOPIC].partitions[number].leader == now

    run(scenario)


async def coordinator_of(connection: Connection, not_this: int | None = None) -> int:
    async with asyncio.timeout(20):
        while True:
            try:
                found = (await connection.request(FindCoordinator("g"))).message
            except RaftqError as error:
                if not error.retriable:
                    raise
            else:
                if found.node_id not in (None, not_this):
                    return int(found.node_id)
            await asyncio.sleep(0.05)


@pytest.mark.full
def test_two_hundred_members_settle(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with one_node(tmp_path) as (node, connection):
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("many", partitions=200, replication=1)
            members = [
                Someone(connection, f"m{at:03}", topics=("many",), session_ms=30_000)
                for at in range(200)
            ]
            settled = asyncio.Event()

            async def live(member: Someone, at: int) -> None:
                await asyncio.sleep(at * 0.01)
                while True:
                    await member.beat(wait_ms=3_000)
                    if all(len(one.owned) == 1 for one in members):
                        settled.set()

            began = time.monotonic()
            tasks = [asyncio.ensure_future(live(one, at)) for at, one in enumerate(members)]
            async with asyncio.timeout(60):
                await settled.wait()
            took = time.monotonic() - began
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert len({slot for one in members for slot in one.owned}) == 200
            assert max(one.generation for one in members) <= took / 0.3 + 2
            assert took < 20

    run(scenario)


def test_a_group_goes_on_where_partitions_know_later_owners_than_its_coordinator(
    tmp_path: Path,
) -> None:
    """As after a loss of the cluster's groups: their generations begin again, and the ledgers of
    partitions have those from before."""

    async def scenario() -> None:
        async with running(tmp_path) as node, await connect(node) as connection:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic("t", partitions=2, replication=1)
            async with aio.Producer(address(node)) as producer:
                for number in range(2):
                    await producer.send("t", b"%d" % number, partition=number)
                await producer.flush()
            claim = ReadOffsets("g", "before", (ReadOffset("t", 0, 70), ReadOffset("t", 1, 50)))
            reply = await connection.request(claim)
            assert {one.error for one in reply.message.offsets} == {""}
            found: list[bytes] = []
            settings = {"heartbeat_ms": 200, "session_ms": 5_000}
            async with aio.Consumer(address(node), group="g", topics=["t"], **settings) as consumer:
                async with asyncio.timeout(20):
                    while len(found) < 2:
                        found += [one.value for one in await consumer.poll(timeout=0.5)]
                await consumer.commit()
            assert sorted(found) == [b"0", b"1"]
            rows = (ReadOffset("t", 0), ReadOffset("t", 1))
            reply = await connection.request(ReadOffsets("g", "", rows))
            assert [(one.offset, one.owner_epoch) for one in reply.message.offsets] == [
                (1, 71), (1, 71),
            ]  # fmt: skip

    run(scenario)
