"""Handlers of requests about records: produce, fetch, offsets, producer ids. (Shell.)

A session calls a handler with the request, its raw part and the session. It answers at once or with
a future. A fetch that finds too little is parked at its partitions and checks again when one of
them has more; it holds no thread and no task. It ends when its caller asks for one of its
partitions from another offset, because a consumer that has moved on no longer waits.
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any

from msgspec.structs import replace

from raftq.client.common.errors import (
    AccessDenied,
    CorruptBatch,
    InvalidArgument,
    NotEnoughReplicas,
    NotLeader,
    OffsetOutOfRange,
    RaftqError,
)
from raftq.client.common.names import is_internal
from raftq.client.common.types import Buffer
from raftq.client.wire.messages import (
    Fetch,
    FetchedPartition,
    FetchPartition,
    FetchReply,
    InitProducer,
    InitProducerReply,
    ListOffsets,
    ListOffsetsReply,
    OffsetAnswer,
    OffsetQuery,
    Produce,
    ProduceReply,
)
from raftq.client.wire.outline import outlines
from raftq.cluster.metadata.commands import AllocateProducerIds, InitNamedProducer
from raftq.cluster.metadata.log import MetadataLog
from raftq.node.replication.partition import Partition
from raftq.node.replication.partitions import Partitions

logger = logging.getLogger(__name__)

REPLY_BYTES_MAX = 32 * 1024 * 1024
PRODUCER_IDS_PER_BLOCK = 1000

FetchAnswer = tuple[FetchReply, Sequence[Buffer]]


class _ParkedFetch:
    """A fetch that waits for more to read."""

    __slots__ = ("_handlers", "_message", "_partitions", "_session", "_soon", "_timer", "future")

    def __init__(
        self,
        handlers: "DataHandlers",
        message: Fetch,
        partitions: list[Partition],
        session: Any,
    ) -> None:
        loop = handlers.loop
        self._handlers = handlers
        self._session = session
        self._message = message
        self._partitions = partitions
        self._soon = False
        self._timer = loop.call_later(message.wait_ms / 1000, self.finish)
        self.future: asyncio.Future[FetchAnswer] = loop.create_future()
        self.future.add_done_callback(self._leave)
        for partition in partitions:
            partition.data.readers[self] = None

    def more(self) -> None:
        if not self._soon and not self.future.done():
            self._soon = True
            self._handlers.loop.call_soon(self._look)

    def is_replaced_by(self, session: Any, wanted: FetchPartition) -> bool:
        """Report whether the caller now wants one of the partitions from another offset."""
        return self._session is session and any(
            place.topic == wanted.topic
            and place.partition == wanted.partition
            and place.offset != wanted.offset
            for place in self._message.partitions
        )

    def _look(self) -> None:
        self._soon = False
        if not self.future.done():
            answer, enough = self._handlers.collect(self._message)
            if enough:
                self.future.set_result(answer)

    def finish(self) -> None:
        """Answer with what there is, even with nothing."""
        if not self.future.done():
            self.future.set_result(self._handlers.collect(self._message)[0])

    def _leave(self, future: "asyncio.Future[FetchAnswer]") -> None:
        self._timer.cancel()
        for partition in self._partitions:
            partition.data.readers.pop(self, None)


class DataHandlers:
    """Handlers of requests about records."""

    def __init__(self, node_id: int, partitions: Partitions, metadata: MetadataLog) -> None:
        self.loop = asyncio.get_running_loop()
        self._node_id = node_id
        self._partitions = partitions
        self._metadata = metadata
        self._ids = range(0)
        self._ids_used = 0
        self._ids_lock = asyncio.Lock()

    def produce(
        self, message: Produce, raw: memoryview, session: Any
    ) -> "ProduceReply | Awaitable[ProduceReply]":
        if message.copies and (session.hello is None or session.hello.role != "node"):
            raise AccessDenied("copies are made by nodes only")
        if message.delayed or is_internal(message.topic):
            return self._produce_delayed(message, raw)
        return self._partitions.of(message.topic, message.partition).produce(message, raw)

    def _produce_delayed(
        self, message: Produce, raw: memoryview
    ) -> "ProduceReply | Awaitable[ProduceReply]":
        if is_internal(message.topic):
            raise InvalidArgument(f"topic {message.topic!r} is written by the cluster itself only")
        partition = self._partitions.of(message.topic, message.partition)
        if partition.is_queue:
            return partition.produce(message, raw)
        partition.check_leader(message.epoch)
        return self._produce_first(message, raw)

    async def _produce_first(self, message: Produce, raw: memoryview) -> ProduceReply:
        """Make the topic a queue: these are its first delayed records."""
        await self._partitions.enable_queues(message.topic)
        answer = self._partitions.of(message.topic, message.partition).produce(message, raw)
        return answer if isinstance(answer, ProduceReply) else await answer

    # Fetch

    def fetch(
        self, message: Fetch, raw: memoryview, session: Any
    ) -> "FetchAnswer | asyncio.Future[FetchAnswer]":
        self._end_replaced(message, session)
        answer, enough = self.collect(message)
        if enough or not message.wait_ms:
            return answer
        by_name = self._partitions.by_name
        held = [by_name[place.topic, place.partition] for place in message.partitions]
        return _ParkedFetch(self, message, held, session).future

    def _end_replaced(self, message: Fetch, session: Any) -> None:
        by_name = self._partitions.by_name
        for wanted in message.partitions:
            partition = by_name.get((wanted.topic, wanted.partition))
            if partition is not None and partition.data.readers:
                for reader in list(partition.data.readers):
                    if isinstance(reader, _ParkedFetch) and reader.is_replaced_by(session, wanted):
                        reader.finish()

    def collect(self, message: Fetch) -> tuple[FetchAnswer, bool]:
        """Return what can be read now, and whether it is worth an answer."""
        found: list[FetchedPartition] = []
        buffers: list[Buffer] = []
        size = 0
        failed = False
        for wanted in message.partitions:
            room = min(wanted.bytes_max, REPLY_BYTES_MAX - size) if size < REPLY_BYTES_MAX else 0
            reply, data = self._read(wanted, room, size)
            if message.wait_ms and not data and not reply.error and self._partitions.cut_off:
                reply = replace(reply, error=NotLeader.code)
            if reply.error:
                failed = True
            elif data:
                buffers.append(data)
                size += len(data)
            found.append(reply)
        return (FetchReply(tuple(found)), buffers), failed or size >= message.bytes_min

    def _read(
        self, wanted: FetchPartition, room: int, start: int
    ) -> tuple[FetchedPartition, Buffer]:
        topic, number = wanted.topic, wanted.partition
        start_offset = high_watermark = epoch = 0
        try:
            partition = self._partitions.of(topic, number)
            partition.check_leader(wanted.epoch)
            start_offset = partition.log.start_offset
            high_watermark = partition.replica.high_watermark
            epoch = partition.replica.epoch
            data = partition.data.read(wanted.offset, room) if room else b""
            if wanted.outlines and data:
                data = outlines(data)
        except CorruptBatch as error:
            partition.data.damaged(error)
            code = error.code
        except RaftqError as error:
            code = error.code
            if not isinstance(error, OffsetOutOfRange):
                logger.debug("fetch topic=%s partition=%d refused=%s", topic, number, error)
        else:
            reply = FetchedPartition(
                topic, number, "", high_watermark, start_offset, start if data else 0, len(data),
                epoch,
            )  # fmt: skip
            return reply, data
        return FetchedPartition(topic, number, code, high_watermark, start_offset, epoch=epoch), b""

    # Offsets and producers

    def list_offsets(self, message: ListOffsets, raw: memoryview, session: Any) -> ListOffsetsReply:
        return ListOffsetsReply(tuple(map(self._offset, message.queries)))

    def _offset(self, query: OffsetQuery) -> OffsetAnswer:
        try:
            partition = self._partitions.of(query.topic, query.partition)
            partition.check_leader(0xFFFF_FFFF)
            replica = partition.replica
            offset = partition.log.start_offset
            if query.by != "earliest":
                if not replica.old_epochs_replicated:
                    raise NotEnoughReplicas(f"{partition.ref} has a new leader; ask again")
                end = replica.high_watermark
                if query.by == "time":
                    offset = min(partition.log.offset_for_time(query.at), end)
                else:
                    offset = end
        except RaftqError as error:
            return OffsetAnswer(query.topic, query.partition, error.code)
        return OffsetAnswer(query.topic, query.partition, "", offset, replica.epoch)

    async def init_producer(
        self, message: InitProducer, raw: memoryview, session: Any
    ) -> InitProducerReply:
        if message.name:
            producer_id, epoch = await self._metadata.propose(InitNamedProducer(message.name))
            return InitProducerReply(producer_id, epoch)
        async with self._ids_lock:
            if self._ids_used >= len(self._ids):
                first = await self._metadata.propose(
                    AllocateProducerIds(self._node_id, PRODUCER_IDS_PER_BLOCK)
                )
                self._ids = range(first, first + PRODUCER_IDS_PER_BLOCK)
                self._ids_used = 0
            producer_id = self._ids[self._ids_used]
            self._ids_used += 1
        return InitProducerReply(producer_id, 0)
