"""Handlers of requests from queue workers, stream groups and operators. (Shell.)

The first request that needs it turns a topic into a queue (`Partitions.enable_queues`). A request
that comes before the queue of a new leader is ready waits for it. If everything is ready, a request
is handled without a task; otherwise it costs one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from raftq.client.common.errors import InvalidArgument, NotLeader, OffsetOutOfRange, RaftqError
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.messages import EPOCH_ANY
from raftq.node.queue.leader.engine import LedgerEngine, Waits
from raftq.node.queue.leader.group_admin import describe, steer
from raftq.node.queue.leader.lease_request import LeaseAnswer, LeaseRequest, LeaseSource
from raftq.node.queue.leader.partition_queue import PartitionQueue
from raftq.node.queue.leader.registry import QueueRegistry, check_group, check_topic
from raftq.node.queue.leader.settling import settle
from raftq.node.queue.leader.stored_offsets import NOTHING
from raftq.node.replication.partition import Partition

LEASE_MS_MAX = 7 * 24 * 3_600_000

T = TypeVar("T")
# A connection has at most one waiting lease request per group and holder.
Holder = tuple[Any, str, str]


class QueueHost(Protocol):
    """The part of the node's partitions that the handlers use."""

    @property
    def cut_off(self) -> bool:
        """Whether this node is cut off from the controller, so that requests must not wait."""

    def of(self, topic: str, number: int) -> Partition: ...

    def enable_queues(self, topic: str) -> Awaitable[None]:
        """Make the topic a queue; returns when its logs are open on this node."""


class QueueHandlers:
    """Answers requests about the queues of this node."""

    def __init__(self, partitions: QueueHost, queues: QueueRegistry) -> None:
        self._loop = asyncio.get_running_loop()
        self._partitions = partitions
        self._queues = queues
        self._parked: dict[Holder, LeaseRequest] = {}
        self._turn = 0

    def table(self) -> dict[type, Any]:
        """Request class -> handler."""
        return {
            wire.Lease: self.lease,
            wire.Settle: self.settle,
            wire.StoreOffsets: self.store_offsets,
            wire.ReadOffsets: self.read_offsets,
            wire.SteerGroup: self.steer_group,
            wire.DescribeQueue: self.describe_queue,
        }

    # Which queue

    def _leadership(self, topic: str, number: int, epoch: int = EPOCH_ANY) -> Partition:
        check_topic(topic)
        partition = self._partitions.of(topic, number)
        partition.check_leader(epoch)
        return partition

    def _ready(self, topic: str, number: int, epoch: int = EPOCH_ANY) -> PartitionQueue | None:
        """The queue, or None if it is not ready."""
        queue = self._queues.find(self._leadership(topic, number, epoch).ref)
        return queue if queue is not None and queue.is_ready else None

    async def queue(self, topic: str, number: int, epoch: int = EPOCH_ANY) -> PartitionQueue:
        """The queue of a partition, when it is ready; turns the topic into a queue if needed."""
        ref = self._leadership(topic, number, epoch).ref
        if self._queues.find(ref) is None:
            await self._partitions.enable_queues(topic)
            ref = self._leadership(topic, number, epoch).ref
        queue = self._queues.of(ref)
        await queue.wait_ready()
        return queue

    def _serve(
        self, topic: str, number: int, epoch: int, work: Callable[[LedgerEngine], T | Awaitable[T]]
    ) -> "T | Awaitable[T]":
        queue = self._ready(topic, number, epoch)
        if queue is not None:
            return work(queue.engine)
        return self._serve_later(topic, number, epoch, work)

    async def _serve_later(
        self, topic: str, number: int, epoch: int, work: Callable[[LedgerEngine], T | Awaitable[T]]
    ) -> T:
        queue = await self.queue(topic, number, epoch)
        answer = work(queue.engine)
        return await answer if isinstance(answer, Awaitable) else answer

    # Leases

    def lease(
        self, message: wire.Lease, raw: memoryview, session: Any
    ) -> "LeaseAnswer | Awaitable[LeaseAnswer]":
        check_group(message.group)
        if not message.records_max or not message.partitions:
            raise InvalidArgument("a lease of no records, or of no partitions")
        if message.lease_ms > LEASE_MS_MAX:
            raise InvalidArgument(f"a lease of {message.lease_ms} ms: the most is {LEASE_MS_MAX}")
        keys = {(one.topic, one.partition) for one in message.partitions}
        if len(keys) != len(message.partitions):
            raise InvalidArgument("a lease that names a partition twice")
        sources: list[LeaseSource] = []
        for one in message.partitions:
            try:
                queue = self._ready(one.topic, one.partition, one.epoch)
            except RaftqError as error:
                sources.append((one, error))
                continue
            if queue is None:
                return self._lease_later(message, session)
            sources.append((one, queue))
        return self._lease(message, session, sources)

    async def _lease_later(self, message: wire.Lease, session: Any) -> LeaseAnswer:
        answers = await asyncio.gather(
            *(self.queue(one.topic, one.partition, one.epoch) for one in message.partitions),
            return_exceptions=True,
        )
        sources: list[LeaseSource] = []
        for one, found in zip(message.partitions, answers, strict=True):
            if isinstance(found, BaseException) and not isinstance(found, RaftqError):
                raise found
            sources.append((one, found))
        answer = self._lease(message, session, sources)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def _lease(
        self, message: wire.Lease, session: Any, sources: list[LeaseSource]
    ) -> "LeaseAnswer | asyncio.Future[LeaseAnswer]":
        key = (session, message.group, message.holder)
        older = self._parked.pop(key, None)
        if older is not None:
            older.finish()
        call = LeaseRequest(message, sources, lambda call: self._ended(key, call))
        # Each request begins with the next partition, so that all partitions get their share.
        self._turn += 1
        answer = call.begin(self._turn % len(sources))
        if call.is_parked:
            self._parked[key] = call
            if self._partitions.cut_off:
                call.turn_away(_cut_off())
        return answer

    def end_waiting(self) -> None:
        """This node is cut off: another node may lead these partitions by now."""
        for call in list(self._parked.values()):
            call.turn_away(_cut_off())

    def _ended(self, key: Holder, call: LeaseRequest) -> None:
        if self._parked.get(key) is call:
            del self._parked[key]

    # Settlements

    def settle(
        self, message: wire.Settle, raw: memoryview, session: Any
    ) -> "wire.SettleReply | Awaitable[wire.SettleReply]":
        check_group(message.group)

        def work(engine: LedgerEngine) -> "wire.SettleReply | Awaitable[wire.SettleReply]":
            done = settle(engine, message)
            group = engine.deliveries.groups.get(message.group)
            reply = wire.SettleReply(
                done.errors,
                done.dead,
                0 if group is None else group.core.settled.prefix,
                0 if group is None else group.core.in_flight,
                round(done.next_visible * 1000),
            )
            return self._when(done.waits, reply)

        return self._serve(message.topic, message.partition, message.epoch, work)

    def _when(self, waits: Waits, reply: T) -> "T | asyncio.Future[T]":
        """The reply, when everything that it depends on is replicated."""
        waits = [one for one in waits if not one.done() or one.exception() is not None]
        if not waits:
            return reply
        future: asyncio.Future[T] = self._loop.create_future()
        left = len(waits)

        def done(replicated: "asyncio.Future[None]") -> None:
            nonlocal left
            left -= 1
            if future.done():
                return
            if (error := replicated.exception()) is not None:
                future.set_exception(error)
            elif not left:
                future.set_result(reply)

        for one in waits:
            one.add_done_callback(done)
        return future

    # Stored offsets

    async def store_offsets(
        self, message: wire.StoreOffsets, raw: memoryview, session: Any
    ) -> wire.StoreOffsetsReply:
        check_group(message.group)

        def store(engine: LedgerEngine, one: wire.StoreOffset) -> "asyncio.Future[None]":
            engine.check_writable()
            data = engine.leadership.data
            if one.offset > data.log.end_offset:
                raise OffsetOutOfRange(f"{engine.leadership.ref} ends before offset {one.offset}")
            owner = (one.owner_epoch, message.member, one.turn)
            return engine.offsets.store(message.group, one.offset, *owner)

        found = [self._at_offset(message.group, one, store) for one in message.offsets]
        return wire.StoreOffsetsReply(tuple(await asyncio.gather(*found)))

    async def read_offsets(
        self, message: wire.ReadOffsets, raw: memoryview, session: Any
    ) -> wire.ReadOffsetsReply:
        check_group(message.group)

        def claim(engine: LedgerEngine, one: wire.ReadOffset) -> "asyncio.Future[None]":
            if one.owner_epoch < 0:
                return engine.ledger.barrier()
            engine.check_writable()
            return engine.offsets.claim(message.group, one.owner_epoch, message.member)

        found = [self._at_offset(message.group, one, claim) for one in message.offsets]
        return wire.ReadOffsetsReply(tuple(await asyncio.gather(*found)))

    async def _at_offset(
        self, group: str, one: T, work: "Callable[[LedgerEngine, T], asyncio.Future[None]]"
    ) -> wire.StoredOffset:
        """Do the work at one partition; returns what is stored there afterwards."""
        assert isinstance(one, wire.StoreOffset | wire.ReadOffset)
        topic, number = one.topic, one.partition
        try:
            queue = self._ready(topic, number) or await self.queue(topic, number)
            engine = queue.engine
            replicated = work(engine, one)
            position = engine.offsets.of(group)
            offset, owner_epoch = position.offset, position.owner_epoch
            if not replicated.done() or replicated.exception() is not None:
                await asyncio.shield(replicated)
        except RaftqError as error:
            known = error.details.get("owner_epoch", NOTHING)
            fenced_by = known if isinstance(known, int) else NOTHING
            return wire.StoredOffset(topic, number, error.code, owner_epoch=fenced_by)
        data = engine.leadership.data
        return wire.StoredOffset(
            topic, number, "", offset, owner_epoch, data.log.start_offset, data.high_watermark
        )

    # Operators

    def steer_group(
        self, message: wire.SteerGroup, raw: memoryview, session: Any
    ) -> "wire.SteerGroupReply | Awaitable[wire.SteerGroupReply]":
        check_group(message.group)

        def work(engine: LedgerEngine) -> "wire.SteerGroupReply | Awaitable[wire.SteerGroupReply]":
            reply, waits = steer(engine, message)
            return self._when(waits, reply)

        return self._serve(message.topic, message.partition, EPOCH_ANY, work)

    def describe_queue(
        self, message: wire.DescribeQueue, raw: memoryview, session: Any
    ) -> "wire.DescribeQueueReply | Awaitable[wire.DescribeQueueReply]":
        partition = self._leadership(message.topic, message.partition)
        if self._queues.find(partition.ref) is None:
            # A plain topic. Describing it does not make it a queue.
            partition_log = partition.data
            return wire.DescribeQueueReply(
                (), partition_log.log.start_offset, partition_log.progress.high_watermark
            )

        def work(engine: LedgerEngine) -> wire.DescribeQueueReply:
            data = engine.leadership.data
            return wire.DescribeQueueReply(
                describe(engine, message.group), data.log.start_offset, data.high_watermark
            )

        return self._serve(message.topic, message.partition, EPOCH_ANY, work)


def _cut_off() -> NotLeader:
    return NotLeader("this node is cut off from the controller: another one may lead by now")
