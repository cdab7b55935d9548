"""Shell: changes topics of a cluster under faults, and looks at the result.

It asks the controller, past the proxies, because it knows of a change first. If the controller
cannot be reached, it asks another node. Every call opens its own connection and makes one attempt
per node.
"""

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from raftq.chaos.world import PartitionView
from raftq.client.common.errors import (
    ConnectFailed,
    Detail,
    RaftqError,
    TransportError,
    UnknownTopic,
)
from raftq.client.common.names import is_internal
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions
from raftq.client.wire.admin_messages import (
    AddPartitions,
    AlterTopic,
    ClusterStatus,
    CreateTopic,
    DeleteTopic,
    MoveReplicas,
)
from raftq.client.wire.messages import Metadata, MetadataReply, Request, WireMessage
from raftq.node.config import Address

ANSWER_MS = 8_000
_OPTIONS = ConnectionOptions(name="chaos-operator", connect_ms=1_000, request_ms=ANSWER_MS)

R = TypeVar("R", bound=WireMessage)


class Asked(Protocol):
    """The part of a cluster that an operator needs."""

    @property
    def ids(self) -> tuple[int, ...]: ...
    def is_running(self, node_id: int) -> bool: ...
    def direct(self, node_id: int) -> str: ...
    def controller(self) -> int | None: ...


class DirectOperator:
    """An Operator. Calls block, and only one thread at a time may call."""

    def __init__(self, world: Asked, thread: ThreadPoolExecutor) -> None:
        """`thread` runs the calls, because the caller's thread may already run a loop."""
        self._world = world
        self._thread = thread
        self._controller: int | None = None

    def partitions(self) -> dict[tuple[str, int], PartitionView]:
        return {
            (topic.topic, partition.partition): PartitionView(
                partition.leader, partition.replicas, partition.isr, bool(partition.target)
            )
            for topic in self._metadata(None).topics
            if not is_internal(topic.topic)
            for partition in topic.partitions
        }

    def settings(self, topic: str) -> Mapping[str, Detail]:
        for one in self._metadata((topic,)).topics:
            if one.topic == topic and not one.error:
                return one.config
        raise UnknownTopic(f"no topic is named {topic!r}")

    def metadata_index(self) -> int:
        return self._ask(ClusterStatus()).applied_index

    def move(self, topic: str, partition: int, replicas: Iterable[int]) -> None:
        self._ask(MoveReplicas(topic, partition, tuple(replicas)))

    def alter(self, topic: str, settings: Mapping[str, Detail]) -> None:
        self._ask(AlterTopic(topic, dict(settings)))

    def grow(self, topic: str, total: int) -> None:
        self._ask(AddPartitions(topic, total))

    def create(self, topic: str, partitions: int, copies: int) -> None:
        self._ask(CreateTopic(topic, partitions, copies))

    def delete(self, topic: str) -> None:
        self._ask(DeleteTopic(topic))

    def _metadata(self, topics: tuple[str, ...] | None) -> MetadataReply:
        return self._ask(Metadata(topics))

    def _ask(self, request: Request[R]) -> R:
        """Asks the controller, and other nodes only if it cannot be reached."""
        failed: RaftqError = ConnectFailed("no node runs")
        for node_id in self._order():
            address = Address.parse(self._world.direct(node_id))
            try:
                answer = self._thread.submit(asyncio.run, _request(address, request))
                found = answer.result()
            except TransportError as error:
                failed, self._controller = error, None
                if error.outcome == "unknown":
                    raise
            else:
                if isinstance(found, MetadataReply):
                    self._controller = found.controller
                return found
        raise failed

    def _order(self) -> list[int]:
        running = [node_id for node_id in self._world.ids if self._world.is_running(node_id)]
        if self._controller not in running:
            self._controller = self._world.controller()
        return sorted(running, key=lambda one: one != self._controller)


async def _request(address: Address, request: Request[R]) -> R:
    async with await Connection.open(address.host, address.port, _OPTIONS) as connection:
        return (await connection.request(request)).message
