"""A node and a cluster in memory, for the HTTP server, and a caller of it."""

import asyncio
import io
import json as json_module
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgpack
from fake_http_queues import FakeQueues
from yarl import URL

from raftq.client.common.errors import (
    Detail,
    OffsetOutOfRange,
    RaftqError,
    TopicExists,
    UnknownTopic,
)
from raftq.client.consumer.pages import Page, Position
from raftq.client.results import Appended, PartitionDescription, TopicDescription
from raftq.client.wire.record import BatchRecord
from raftq.cluster.metadata.state import ClusterState, NodeState, PartitionState, TopicState
from raftq.cluster.metadata.topic_config import topic_config
from raftq.node.http.options import HttpOptions
from raftq.node.http.server import HttpServer
from raftq.node.metrics.counters import NodeMetrics
from raftq.node.metrics.node_status import CoordinatedGroup, DelayedStats, GroupStats, ReplicaStats

NOW_MS = 1_700_000_000_000


class FakeMetadata:
    """The part of a MetadataLog that HTTP looks at."""

    def __init__(self) -> None:
        self._state = ClusterState("test")
        self.looked = asyncio.Event()
        """Set whenever somebody looks at the state."""
        self.index = 7
        self.controller: int | None = 1
        self.is_controller = True
        self.term = 3
        self.voters = (1, 2, 3)
        self._subscribers: list[Callable[[Sequence[Any]], None]] = []
        for node_id in (1, 2, 3):
            self.state.nodes[node_id] = NodeState(
                node_id, "127.0.0.1", 7070 + node_id, 8080, "", "", 1, node_id < 3, False, False
            )

    @property
    def state(self) -> ClusterState:
        self.looked.set()
        return self._state

    def subscribe(self, callback: Callable[[Sequence[Any]], None]) -> None:
        self._subscribers.append(callback)

    def put(self, name: str, partitions: int, config: Mapping[str, Detail]) -> None:
        """Create or grow a topic, and tell."""
        known = self.state.topics.get(name)
        topic_id = self.state.topic_id_next if known is None else known.topic_id
        parts = tuple(PartitionState((1, 2), (1, 2), 1, 1, 1, (1, 1)) for _ in range(partitions))
        topic = TopicState(name, topic_id, topic_config(config, 3), parts, queued=True)
        self.state.topics[name] = topic
        self.state.topic_names[topic_id] = name
        self.state.topic_id_next += known is None
        self.state.partition_count = sum(len(one.partitions) for one in self.state.topics.values())
        self.tell()

    def drop(self, name: str) -> None:
        del self.state.topic_names[self.state.topics.pop(name).topic_id]
        self.tell()

    def tell(self) -> None:
        for callback in self._subscribers:
            callback([])


class FakeFacts:
    node_id = 1
    cluster_id = 'a "test" cluster'
    started_at = NOW_MS - 5_000
    native_address = ("127.0.0.1", 7071)

    def __init__(self, metadata: FakeMetadata) -> None:
        self.metadata: Any = metadata
        self.stats: list[ReplicaStats] = []
        self.group_stats: list[GroupStats] = []
        self.delayed_stats: list[DelayedStats] = []
        self.coordinated_groups: list[CoordinatedGroup] = []
        self.problems: dict[str, tuple[bool, str]] = {"registered": (True, "the cluster knows it")}

    def uptime_s(self) -> float:
        return 5.25

    def connections(self) -> int:
        return 4

    def replicas(self) -> Iterable[ReplicaStats]:
        return iter(self.stats)

    def groups(self) -> Iterable[GroupStats]:
        return iter(self.group_stats)

    def delayed(self) -> Iterable[DelayedStats]:
        return iter(self.delayed_stats)

    def coordinated(self) -> Iterable[CoordinatedGroup]:
        return iter(self.coordinated_groups)

    def checks(self) -> Mapping[str, tuple[bool, str]]:
        return self.problems


class FakeClients(FakeQueues):
    """The clients of an HTTP server over a cluster of lists: producer, admin client and members in
    one. `error` is raised by the next calls, `gate` holds them up."""

    def __init__(self, metadata: FakeMetadata) -> None:
        super().__init__()
        self._metadata = metadata
        self.producer = self.admin = self.members = self
        self.logs: dict[str, list[list[BatchRecord]]] = {}
        self.published: list[dict[str, Any]] = []
        self.failing: dict[int, RaftqError] = {}
        self.gate: asyncio.Event | None = None
        self.waiting_count = 0
        self.reached = asyncio.Condition()
        self.reading = asyncio.Event()
        self.closed = False
        self.start_offset = 0

    async def _pass(self) -> None:
        self._enter()
        if self.gate is not None:
            async with self.reached:
                self.waiting_count += 1
                self.reached.notify_all()
            await self.gate.wait()

    async def until_waiting(self, count: int) -> None:
        async with self.reached:
            await self.reached.wait_for(lambda: self.waiting_count >= count)

    # The producer.

    async def expect(self, topic: str, partitions: int) -> None:
        await self._pass()

    async def send_many(
        self,
        topic: str,
        values: list[bytes],
        keys: list[bytes | None] | None,
        *,
        partial: bool,
        **columns: Any,
    ) -> "FakeDeliveries":
        self.published.append({"values": values, "keys": keys, **columns})
        rows = [
            dict(zip(columns, row, strict=True))
            for row in zip(*[one or [None] * len(values) for one in columns.values()], strict=True)
        ]
        outcomes: list[Appended | RaftqError] = []
        for at, (value, row) in enumerate(zip(values, rows, strict=True)):
            if at in self.failing:
                outcomes.append(self.failing[at])
                continue
            number = row["partitions"]
            number = at % len(self.logs[topic]) if number is None else number
            log = self.logs[topic][number]
            lane = 2 if row["priorities"] is None else row["priorities"]
            key = keys[at] if keys else None
            log.append(BatchRecord(len(log), NOW_MS, key, value, row["headers"] or {}, lane))
            due, _ = row["times"] or (0, 0)
            outcomes.append(
                Appended(topic, number, len(log) - 1, NOW_MS, due > 0, due if due else None)
            )
        return FakeDeliveries(outcomes)

    # The admin client.

    async def read_page(
        self, topic: str, partition: int, position: Position, limit: int, bytes_max: int
    ) -> Any:
        await self._pass()
        self.reading.set()
        log = self.logs[topic][partition]
        offset = self.start_offset if position.offset is None else position.offset
        if position.time_ms is not None:
            times = [record.offset for record in log if record.timestamp >= position.time_ms]
            offset = min(times, default=len(log))
        if not self.start_offset <= offset <= len(log):
            raise OffsetOutOfRange(f"offset {offset} is not kept")
        records: list[Any] = log[offset : offset + limit]
        return Page(records, offset + len(records))

    async def describe_topic(self, name: str) -> TopicDescription:
        await self._pass()
        parts = [
            PartitionDescription(number, 1, 1, (1,), (1,), (), self.start_offset, len(log))
            for number, log in enumerate(self.logs[name])
        ]
        return TopicDescription(name, 1, {}, tuple(parts))

    async def create_topic(
        self, name: str, partitions: int, replication: int, config: Mapping[str, Detail]
    ) -> TopicDescription:
        await self._pass()
        if name in self.logs:
            raise TopicExists(f"topic {name!r} exists")
        topic_config(config, replication or 3)
        self.logs[name] = [[] for _ in range(partitions)]
        self._metadata.put(name, partitions, config)
        return await self.describe_topic(name)

    async def delete_topic(self, name: str) -> None:
        await self._pass()
        if name not in self.logs:
            raise UnknownTopic(f"no topic is named {name!r}")
        del self.logs[name]
        self._metadata.drop(name)

    async def add_partitions(self, name: str, total: int) -> TopicDescription:
        await self._pass()
        self.logs[name] += [[] for _ in range(total - len(self.logs[name]))]
        self._metadata.put(name, total, {})
        return await self.describe_topic(name)

    async def close(self) -> None:
        self.closed = True


class FakeDeliveries:
    def __init__(self, found: list[Appended | RaftqError]) -> None:
        self._found = found

    async def outcomes(self) -> list[Appended | RaftqError]:
        return self._found


class WatchedMetrics(NodeMetrics):
    """Metrics that tell when no HTTP request is under way."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self._in_flight = 0
        super().__init__()

    @property
    def http_in_flight(self) -> int:  # type: ignore[override]
        return self._in_flight

    @http_in_flight.setter
    def http_in_flight(self, count: int) -> None:
        self._in_flight = count
        if count:
            self.idle.clear()
        else:
            self.idle.set()


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    raw: bytes
    body: Any = field(default=None)


class Rest:
    """A server with fakes behind it, on a free port, and a caller."""

    def __init__(self, options: HttpOptions | None = None) -> None:
        self.metadata = FakeMetadata()
        self.facts = FakeFacts(self.metadata)
        self.cluster = FakeClients(self.metadata)
        self.metrics = WatchedMetrics()
        self.now_ms = NOW_MS
        self.port = 0
        self.server = HttpServer(
            self.facts, self.cluster, self.metrics, lambda: self.now_ms, options
        )
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        await self.server.start("127.0.0.1", 0)
        self.port = self.server.port
        self._session = aiohttp.ClientSession(f"http://127.0.0.1:{self.server.port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self.server.stop()

    async def call(
        self,
        method: str,
        path: str | URL,
        json: Any = None,
        *,
        data: Any = None,
        packed: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        sent = dict(headers or {})
        if json is not None:
            data = json_module.dumps(json).encode()
            sent.setdefault("Content-Type", "application/json")
        if packed is not None:
            data = msgpack.packb(packed)
            sent.setdefault("Content-Type", "application/msgpack")
        if isinstance(data, bytes) and len(data) > 1_000_000:
            data = io.BytesIO(data)
        async with self._session.request(method, path, data=data, headers=sent) as response:
            raw = await response.read()
            answer = Answer(response.status, response.headers, raw)
        kind = answer.headers.get("Content-Type", "")
        if raw and kind == "application/json":
            answer.body = json_module.loads(raw)
        elif raw and kind == "application/msgpack":
            answer.body = msgpack.unpackb(raw)
        return answer

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.call("GET", path, **options)

    async def post(self, path: str, json: Any = None, **options: Any) -> Answer:
        return await self.call("POST", path, json, **options)

    async def make_topic(self, name: str = "orders", partitions: int = 3) -> None:
        answer = await self.post("/topics", {"name": name, "num_partitions": partitions})
        assert answer.status == 201, answer.body

    async def talk(self, sent: bytes) -> bytes:
        """Bytes on a connection of their own, and everything that comes back until its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(sent)
        await writer.drain()
        try:
            return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


def served(story: Callable[[Rest], Awaitable[None]], options: HttpOptions | None = None) -> None:
    """Run a story with a server of its own."""

    async def run() -> None:
        async with asyncio.timeout(20), Rest(options) as rest:
            await story(rest)

    asyncio.run(run())
