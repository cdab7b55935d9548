"""A cluster in memory behind real listeners: what clients talk to in their tests.

Nodes answer the native protocol like real ones: only leaders take and give records, sequences are
checked, and metadata is shared by all at once. `before`, `after` and `fetching` say what goes
wrong. `simulate` runs it all in virtual time over a simulated network.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from simloop import VirtualTimeLoop
from simnet import SimNetwork

from raftq.client.common.errors import (
    ConnectionLost,
    InvalidArgument,
    NotLeader,
    OffsetOutOfRange,
    RaftqError,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.wire import admin_messages as admin
from raftq.client.wire.batch import Batch, decode
from raftq.client.wire.encoder import stamp
from raftq.client.wire.messages import (
    Fetch,
    FetchedPartition,
    FetchReply,
    InitProducer,
    InitProducerReply,
    ListOffsets,
    ListOffsetsReply,
    Metadata,
    MetadataReply,
    NodeInfo,
    OffsetAnswer,
    PartitionInfo,
    Produce,
    ProduceReply,
    TopicInfo,
)
from raftq.node.native.session import Session
from raftq.node.native.tcp import TcpServer
from raftq.node.storage.producers import Producers


class FakePartition:
    """The log of one partition; all replicas are one, so nothing is ever lost by a failover."""

    def __init__(self, leader: int) -> None:
        self.leader: int | None = leader
        self.epoch = 1
        self.batches: list[bytearray] = []
        self.ends: list[int] = []
        self.start = 0
        self.end = 0
        self.producers = Producers()
        self.grown = asyncio.Event()
        self.keep = True
        self._delays: FakePartition | None = None

    @property
    def delays(self) -> "FakePartition":
        """The log of records that are not yet due."""
        if self._delays is None:
            self._delays = FakePartition(0)
        return self._delays

    def partition_log(self, request: Produce) -> "FakePartition":
        return self.delays if request.delayed else self

    def append(self, raw: memoryview) -> tuple[int, ...]:
        """The base offset; nothing for a request that only asks whether a batch would be taken."""
        return (self._append(raw),) if raw else ()

    def _append(self, raw: memoryview) -> int:
        batch = decode(raw) if self.keep else Batch(raw)
        assert batch.length == len(raw), "one batch per request"
        origin = (batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.count)
        known = self.producers.check(*origin)
        if known is not None:
            return known
        self.producers.note(*origin, self.end)
        base = self.end
        self.end += batch.span
        if self.keep:
            stored = bytearray(raw)
            stamp(stored, base, self.epoch)
            self.batches.append(stored)
            self.ends.append(self.end)
            grown, self.grown = self.grown, asyncio.Event()
            grown.set()
        return base

    def values(self) -> list[bytes]:
        return [value for raw in self.batches for value in decode(raw).values()]

    def read(self, offset: int, bytes_max: int) -> list[bytearray]:
        if not self.start <= offset <= self.end:
            raise OffsetOutOfRange(f"{offset} is not in [{self.start}, {self.end}]")
        found: list[bytearray] = []
        size = 0
        for raw, end in zip(self.batches, self.ends, strict=True):
            if end > offset and (not found or size + len(raw) <= bytes_max):
                found.append(raw)
                size += len(raw)
            elif found:
                break
        return found


class FakeCluster:
    """Nodes 1..n. `before` and `after` may raise or wait, before and after a Produce is done."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.topics: dict[str, list[FakePartition]] = {}
        self.ids: dict[str, int] = {}
        self.servers: dict[int, TcpServer] = {}
        self.stacks: dict[int, Any] = {}
        self.ports: dict[int, int] = {}
        self.next_producer = 0
        self.next_topic = 0
        self.produced = 0
        self.asked = 0
        self.before: Callable[[Produce, int], Any] | None = None
        self.after: Callable[[Produce, int], Any] | None = None
        self.fetching: Callable[[Fetch, int], Any] | None = None

    def add_topic(self, name: str, partitions: int = 1) -> list[FakePartition]:
        nodes = sorted(self.servers)
        parts = [FakePartition(nodes[n % len(nodes)]) for n in range(partitions)]
        self.topics[name] = parts
        self.next_topic += 1
        self.ids[name] = self.next_topic
        return parts

    def lead(self, topic: str, partition: int, node_id: int | None) -> None:
        part = self.topics[topic][partition]
        part.leader = node_id
        part.epoch += 1
        part.grown.set()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports.values())

    async def start_node(self, node_id: int) -> None:
        handlers: dict[Any, Any] = {}
        for kind, handle in (
            (Metadata, self._metadata), (Produce, self._produce), (Fetch, self._fetch),
            (ListOffsets, self._list_offsets), (InitProducer, self._init_producer),
            (admin.CreateTopic, self._create_topic), (admin.DeleteTopic, self._delete_topic),
            (admin.AddPartitions, self._add_partitions), (admin.AlterTopic, self._alter_topic),
            *self.more_handlers().items(),
        ):  # fmt: skip
            handlers[kind] = _bound(handle, node_id)
        server = TcpServer(handlers, node_id=node_id, cluster_id="fake")
        await server.__aenter__()
        await server.start("127.0.0.1", self.ports.get(node_id, 0))
        self.servers[node_id] = server
        self.ports[node_id] = server.port

    def more_handlers(self) -> dict[Any, Any]:
        """What a kind of cluster answers beyond this; called with request, raw part and node."""
        return {}

    async def stop_node(self, node_id: int) -> None:
        server = self.servers.pop(node_id)
        await server.__aexit__(None, None, None)

    def _leadership(self, topic: str, partition: int, node_id: int) -> FakePartition:
        parts = self.topics.get(topic)
        if parts is None:
            raise UnknownTopic(f"no {topic}")
        if partition >= len(parts):
            raise UnknownPartition(f"no {topic}/{partition}")
        part = parts[partition]
        if part.leader != node_id:
            raise NotLeader(f"node {part.leader} leads").with_details(
                leader=part.leader, epoch=part.epoch
            )
        return part

    def _metadata(self, request: Metadata, raw: memoryview, node_id: int) -> MetadataReply:
        self.asked += 1
        nodes = tuple(
            NodeInfo(one, "127.0.0.1", port, alive=one in self.servers)
            for one, port in self.ports.items()
        )
        names = list(self.topics) if request.topics is None else request.topics
        infos = []
        for name in names:
            if name in self.topics:
                parts = tuple(
                    PartitionInfo(n, part.leader, part.epoch, tuple(self.ports), tuple(self.ports))
                    for n, part in enumerate(self.topics[name])
                )
                infos.append(TopicInfo(name, parts, topic_id=self.ids[name]))
            else:
                infos.append(TopicInfo(name, error="unknown_topic"))
        return MetadataReply("fake", nodes, tuple(infos), min(self.servers, default=None))

    def _init_producer(self, request: Any, raw: memoryview, node_id: int) -> InitProducerReply:
        self.next_producer += 1
        return InitProducerReply(self.next_producer, 0)

    def _produce(self, request: Produce, raw: memoryview, node_id: int) -> Any:
        if self.before is None and self.after is None:
            part = self._leadership(request.topic, request.partition, node_id)
            self.produced += 1
            return ProduceReply(part.partition_log(request).append(raw), part.epoch)
        return self._produce_badly(request, raw, node_id)

    async def _produce_badly(self, request: Produce, raw: memoryview, node_id: int) -> ProduceReply:
        if self.before is not None and (wait := self.before(request, node_id)) is not None:
            await wait
        part = self._leadership(request.topic, request.partition, node_id)
        bases = part.partition_log(request).append(raw)
        if self.after is not None and (wait := self.after(request, node_id)) is not None:
            await wait
        return ProduceReply(bases, part.epoch)

    async def _fetch(self, request: Fetch, raw: memoryview, node_id: int) -> Any:
        if self.fetching is not None and (wait := self.fetching(request, node_id)) is not None:
            await wait
        reply = self._read(request, node_id)
        if not any(one.length or one.error for one in reply[0].partitions) and request.wait_ms:
            parts = [self.topics[one.topic][one.partition] for one in request.partitions]
            waits = [asyncio.ensure_future(part.grown.wait()) for part in parts]
            try:
                await asyncio.wait(
                    waits, timeout=request.wait_ms / 1000, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for wait in waits:
                    wait.cancel()
            for one, part in zip(request.partitions, parts, strict=True):
                if part not in self.topics.get(one.topic, ()):
                    raise UnknownTopic(f"{one.topic} was deleted meanwhile")
            reply = self._read(request, node_id)
        return reply

    def _read(self, request: Fetch, node_id: int) -> tuple[FetchReply, list[bytearray]]:
        answers: list[FetchedPartition] = []
        parts: list[bytearray] = []
        at = 0
        for one in request.partitions:
            try:
                part = self._leadership(one.topic, one.partition, node_id)
                found = part.read(one.offset, one.bytes_max)
            except RaftqError as error:
                answers.append(FetchedPartition(one.topic, one.partition, error.code))
                continue
            size = sum(map(len, found))
            answers.append(
                FetchedPartition(
                    one.topic, one.partition, "", part.end, part.start, at if size else 0, size,
                    part.epoch,
                )
            )  # fmt: skip
            parts += found
            at += size
        return FetchReply(tuple(answers)), parts

    def _list_offsets(self, request: ListOffsets, raw: memoryview, node_id: int) -> Any:
        answers = []
        for query in request.queries:
            try:
                part = self._leadership(query.topic, query.partition, node_id)
            except RaftqError as error:
                answers.append(OffsetAnswer(query.topic, query.partition, error.code))
                continue
            offset = {"earliest": part.start, "latest": part.end}.get(query.by)
            if offset is None:
                offset = part.end
                for stored in part.batches:
                    batch = decode(stored)
                    if batch.max_timestamp >= query.at:
                        at = [t >= query.at for t in batch.timestamps()].index(True)
                        offset = batch.base_offset + at
                        break
            answers.append(OffsetAnswer(query.topic, query.partition, "", offset, part.epoch))
        return ListOffsetsReply(tuple(answers))

    def _create_topic(self, request: Any, raw: memoryview, node_id: int) -> Any:
        if request.topic in self.topics:
            raise TopicExists(f"{request.topic} is there")
        count = request.partitions or 3
        self.add_topic(request.topic, count)
        return admin.CreateTopicReply(self.ids[request.topic], count, request.replication or 1)

    def _delete_topic(self, request: Any, raw: memoryview, node_id: int) -> Any:
        if self.topics.pop(request.topic, None) is None:
            raise UnknownTopic(f"no {request.topic}")
        return admin.DeleteTopicReply()

    def _alter_topic(self, request: Any, raw: memoryview, node_id: int) -> Any:
        raise InvalidArgument("unknown settings: " + ", ".join(request.config))

    def _add_partitions(self, request: Any, raw: memoryview, node_id: int) -> Any:
        parts = self.topics[request.topic]
        nodes = sorted(self.servers)
        while len(parts) < request.partitions:
            parts.append(FakePartition(nodes[len(parts) % len(nodes)]))
        return admin.AddPartitionsReply(len(parts))


def _bound(handle: Any, node_id: int) -> Any:
    def call(request: Any, raw: memoryview, session: Session) -> Any:
        return handle(request, raw, node_id)

    return call


def lost() -> ConnectionLost:
    """An error after which a client cannot know whether its request was done."""
    return ConnectionLost("the reply is lost")


def fake_cluster(nodes: int = 1, seed: int = 0) -> AbstractAsyncContextManager[FakeCluster]:
    return started(FakeCluster(random.Random(seed)), nodes)


C = TypeVar("C", bound=FakeCluster)


@asynccontextmanager
async def started(cluster: C, nodes: int) -> AsyncIterator[C]:
    """The cluster with this many running nodes."""
    try:
        for node_id in range(1, nodes + 1):
            await cluster.start_node(node_id)
        yield cluster
    finally:
        for node_id in list(cluster.servers):
            await cluster.stop_node(node_id)


def simulate(main: Coroutine[Any, Any, Any], seed: int = 0, seconds_max: float = 600.0) -> Any:
    """Run on a virtual-time loop and network; an error that nobody handles fails the test."""
    loop = VirtualTimeLoop()
    SimNetwork(loop, random.Random(seed))
    try:
        result = loop.run(main, seconds_max=seconds_max, turns_max=2_000_000)
        assert not asyncio.all_tasks(loop), "tasks are left behind"
        assert not loop.unhandled, loop.unhandled
        return result
    finally:
        loop.end()
