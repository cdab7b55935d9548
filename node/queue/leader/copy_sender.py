"""How a node sends copies to other topics: to itself, or to the node that leads. (Shell.)"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from raftq.client.common.errors import (
    NotLeader,
    TopicExists,
    TransportError,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.common.names import DLQ_SUFFIX
from raftq.client.net.connection import Connection
from raftq.client.wire.messages import Produce
from raftq.cluster.metadata.commands import AddPartitions, AllocateProducerIds, CreateTopic
from raftq.cluster.metadata.log import MetadataLog
from raftq.cluster.metadata.topic_config import HOUR_MS
from raftq.node.queue.core.copy_ledger import Target
from raftq.node.replication.partition import Partition

SEND_MS = 10_000
RETENTION_MS = 336 * HOUR_MS
# Settings of a topic that its dead letters have as well, so that everything fits that fitted there.
_SHARED = ("min_insync", "value_bytes_max", "fsync", "segment_bytes")


class NodeCopySender:
    """Sends copies for all partitions of a node. `connect` connects to another node."""

    def __init__(
        self,
        node_id: int,
        partition_of: Callable[[str, int], Partition],
        metadata: MetadataLog,
        connect: Callable[[int], Awaitable[Connection]],
    ) -> None:
        self._node_id = node_id
        self._partition_of = partition_of
        self._metadata = metadata
        self._connect = connect
        self._connections: dict[int, Connection] = {}
        self._locks: dict[Any, asyncio.Lock] = {}

    async def make_dead_letters(self, topic: str) -> None:
        name = topic + DLQ_SUFFIX
        topics = self._metadata.state.topics
        if topic not in topics or self._has_all(topic, name):
            return
        async with self._lock(name):
            topics = self._metadata.state.topics
            if topic not in topics or self._has_all(topic, name):
                return
            source = topics[topic]
            total = len(source.partitions)
            if name in topics:
                await self._metadata.propose(AddPartitions(name, total))
                return
            settings = source.config.settings()
            config = {one: settings[one] for one in _SHARED} | {"retention_ms": RETENTION_MS}
            try:
                await self._metadata.propose(CreateTopic(name, total, source.replication, config))
            except TopicExists:
                return

    def _has_all(self, topic: str, name: str) -> bool:
        topics = self._metadata.state.topics
        return name in topics and len(topics[name].partitions) >= len(topics[topic].partitions)

    def _lock(self, key: object) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    async def producer_id(self) -> int:
        return int(await self._metadata.propose(AllocateProducerIds(self._node_id, 1)))

    def exists(self, target: Target) -> bool:
        known = self._metadata.state.topics.get(target[0])
        return known is not None and target[1] < len(known.partitions)

    async def send(self, target: Target, batch: bytearray) -> None:
        topic, number = target
        known = self._metadata.state.topics.get(topic)
        if known is None:
            raise UnknownTopic(f"no topic {topic!r}")
        if number >= len(known.partitions):
            raise UnknownPartition(f"topic {topic!r} has no partition {number}")
        leader = known.partitions[number].leader
        if leader is None:
            raise NotLeader(f"{topic}/{number} has no leader at the moment")
        message = Produce(topic, number, acks="all", timeout_ms=SEND_MS, copies=True)
        if leader == self._node_id:
            answer = self._partition_of(topic, number).produce(message, memoryview(batch))
            if isinstance(answer, asyncio.Future):
                await answer
            return
        connection = await self._connection(leader)
        try:
            await connection.request(message, (batch,), 1.5 * SEND_MS / 1000)
        except TransportError:
            # It may be the connection: the next one is made anew.
            if self._connections.get(leader) is connection:
                del self._connections[leader]
            connection.end()
            raise

    async def _connection(self, node_id: int) -> Connection:
        async with self._lock(node_id):
            found = self._connections.get(node_id)
            if found is None or found.closed:
                found = self._connections[node_id] = await self._connect(node_id)
            return found

    async def close(self) -> None:
        """Let go of all connections."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.close()
