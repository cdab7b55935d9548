"""A real node in this process, on loopback and real files."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from raftq import aio
from raftq.client.common.disk import RealDisk
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions
from raftq.cluster.raft.config import RaftTimes
from raftq.node.app import Node, wall_ms
from raftq.node.config import Address, NodeConfig

SECRET = b"0123456789abcdef"
FAST = RaftTimes(election_ms_min=150, election_ms_max=300, append_ms=40, fallback_ms=450)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def make(directory: Path, seed: int = 1, **settings: object) -> Node:
    """A node that is not started yet."""
    facts: dict[str, object] = {
        "node_id": 1,
        "secret": SECRET,
        "data_dir": str(directory),
        "native": Address("127.0.0.1", 0),
        "http": None,
        "raft": Address("127.0.0.1", free_port()),
        "raft_times": FAST,
    }
    config = NodeConfig(**{**facts, **settings})  # type: ignore[arg-type]
    return Node(config, disk=RealDisk(), rng=random.Random(seed), wall_ms=wall_ms)


@asynccontextmanager
async def running(directory: Path, seed: int = 1, **settings: object) -> AsyncIterator[Node]:
    node = make(directory, seed, **settings)
    try:
        await node.start()
        yield node
    finally:
        await node.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def address(node: Node) -> str:
    return f"127.0.0.1:{node.native_port}"


async def connect(node: Node, **options: object) -> Connection:
    made = ConnectionOptions(**options)  # type: ignore[arg-type]
    return await Connection.open("127.0.0.1", node.native_port, made)


@asynccontextmanager
async def node_with_topic(
    directory: Path, seed: int = 1, topic: str = "orders", partitions: int = 1
) -> AsyncIterator[tuple[Node, Connection]]:
    """A running node and a connection to it. The first start (seed 1) creates the topic."""
    async with running(directory, seed) as node, await connect(node) as connection:
        if seed == 1:
            async with aio.Admin(address(node)) as admin:
                await admin.create_topic(topic, partitions=partitions, replication=1)
        yield node, connection


async def until(holds: Callable[[], bool]) -> None:
    """Waits for something that no event reports."""
    for _ in range(1_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to hold")
