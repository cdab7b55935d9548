"""Handlers of requests from queue workers, stream groups and operators. (Shell.)

The first request that needs a queue makes its topic one (`Partitions.enable_queues`). A request
that comes before the queue of a new leader is ready waits for it: `_serve` finds the queues of a
request and then calls its work. If all queues are ready, that needs no task.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from raftq.client.common.errors import InvalidArgument, NotLeader, OffsetOutOfRange, RaftqError
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.messages import EPOCH_ANY
from raftq.node.queue.leader.engine import LedgerEngine
from raftq.node.queue.leader.group_admin import describe, steer
from raftq.node.queue.leader.lease_request import LeaseAnswer, LeaseRequest
from raftq.node.queue.leader.partition_queue import PartitionQueue
from raftq.node.queue.leader.registry import QueueRegistry, check_group, check_topic
from raftq.node.queue.leader.settling import settle
from raftq.node.queue.leader.stored_offsets import NOTHING
from raftq.node.replication.partition import Partition

LEASE_MS_MAX = 7 * 24 * 3_600_000

T = TypeVar("T")
# A connection has at most one waiting lease request per group and holder.
Holder = tuple[Any, str, str]
# A topic, the number of a partition, and the epoch in which the caller knows its leader.
Place = tuple[str, int, int]
# The queue of a place, or why it cannot be used.
Found = PartitionQueue | RaftqError


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
        self, places: Sequence[Place], work: "Callable[[list[Found]], T | asyncio.Future[T]]"
    ) -> "T | Awaitable[T]":
        """Do the work when the queues of these places are ready: at once if they are."""
        found: list[Found] = []
        for place in places:
            try:
                queue = self._ready(*place)
            except RaftqError as error:
                found.append(error)
                continue
            if queue is None:
                return self._serve_later(places, work)
            found.append(queue)
        return work(found)

    async def _serve_later(
        self, places: Sequence[Place], work: "Callable[[list[Found]], T | asyncio.Future[T]]"
    ) -> T:
        opened = [self.queue(*place) for place in places]
        found: list[Found] = []
        for queue in await asyncio.gather(*opened, return_exceptions=True):
            if isinstance(queue, BaseException) and not isinstance(queue, RaftqError):
                raise queue
            found.append(queue)
        answer = work(found)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def _when_replicated(self, engine: LedgerEngine, reply: T) -> "T | asyncio.Future[T]":
        """The reply, when all that is in the ledger by now is replicated."""
        replicated = engine.ledger.barrier()
        if replicated.done():
            replicated.result()
            return reply
        answer: asyncio.Future[T] = self._loop.create_future()

        def done(replicated: "asyncio.Future[None]") -> None:
            if answer.done():  # the caller has gone away
                return
            if (error := replicated.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(reply)

        replicated.add_done_callback(done)
        return answer

    # Leases

    def lease(
        self, message: wire.Lease, raw: memoryview, session: Any
    ) -> "LeaseAnswer | Awaitable[LeaseAnswer]":
        check_group(message.group)
        if not message.records_max or not message.partitions:
            raise InvalidArgument("a lease of no records, or of no partitions")
        if message.lease_ms > LEASE_MS_MAX:
            raise InvalidArgument(f"a lease of {message.lease_ms} ms: the most is {LEASE_MS_MAX}")
        places = [(wanted.topic, wanted.partition, wanted.epoch) for wanted in message.partitions]
        if len(places) > 1 and len({place[:2] for place in places}) != len(places):
            raise InvalidArgument("a lease that names a partition twice")
        return self._serve(places, partial(self._lease, message, session))

    def _lease(
        self, message: wire.Lease, session: Any, found: list[Found]
    ) -> "LeaseAnswer | asyncio.Future[LeaseAnswer]":
        sources = list(zip(message.partitions, found, strict=True))
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
        place = (message.topic, message.partition, message.epoch)
        return self._serve((place,), partial(self._settle, message))

    def _settle(
        self, message: wire.Settle, found: list[Found]
    ) -> "wire.SettleReply | asyncio.Future[wire.SettleReply]":
        engine = _engine(found)
        result = settle(engine, message)
        group = engine.deliveries.groups.get(message.group)
        reply = wire.SettleReply(
            result.errors,
            result.dead,
            0 if group is None else group.core.settled.prefix,
            0 if group is None else group.core.in_flight,
            round(result.next_visible * 1000),
        )
        return self._when_replicated(engine, reply)

    # Stored offsets

    async def store_offsets(
        self, message: wire.StoreOffsets, raw: memoryview, session: Any
    ) -> wire.StoreOffsetsReply:
        check_group(message.group)

        def store(engine: LedgerEngine, row: wire.StoreOffset) -> "asyncio.Future[None]":
            engine.check_writable()
            data = engine.leadership.data
            if row.offset > data.log.end_offset:
                raise OffsetOutOfRange(f"{engine.leadership.ref} ends before offset {row.offset}")
            owner = (row.owner_epoch, message.member, row.turn)
            return engine.offsets.store(message.group, row.offset, *owner)

        stored = [self._at_offset(message.group, row, store) for row in message.offsets]
        return wire.StoreOffsetsReply(tuple(await asyncio.gather(*stored)))

    async def read_offsets(
        self, message: wire.ReadOffsets, raw: memoryview, session: Any
    ) -> wire.ReadOffsetsReply:
        check_group(message.group)

        def claim(engine: LedgerEngine, row: wire.ReadOffset) -> "asyncio.Future[None]":
            if row.owner_epoch < 0:
                return engine.ledger.barrier()
            engine.check_writable()
            return engine.offsets.claim(message.group, row.owner_epoch, message.member)

        stored = [self._at_offset(message.group, row, claim) for row in message.offsets]
        return wire.ReadOffsetsReply(tuple(await asyncio.gather(*stored)))

    async def _at_offset(
        self, group: str, row: T, work: "Callable[[LedgerEngine, T], asyncio.Future[None]]"
    ) -> wire.StoredOffset:
        """Do the work at one partition; returns what is stored there afterwards."""
        assert isinstance(row, wire.StoreOffset | wire.ReadOffset)
        topic, number = row.topic, row.partition
        try:
            queue = self._ready(topic, number) or await self.queue(topic, number)
            engine = queue.engine
            replicated = work(engine, row)
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

        def work(found: list[Found]) -> "wire.SteerGroupReply | asyncio.Future[Any]":
            engine = _engine(found)
            return self._when_replicated(engine, steer(engine, message))

        return self._serve([(message.topic, message.partition, EPOCH_ANY)], work)

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

        def work(found: list[Found]) -> wire.DescribeQueueReply:
            engine = _engine(found)
            data = engine.leadership.data
            return wire.DescribeQueueReply(
                describe(engine, message.group), data.log.start_offset, data.high_watermark
            )

        return self._serve([(message.topic, message.partition, EPOCH_ANY)], work)


def _engine(found: list[Found]) -> LedgerEngine:
    """The engine of the one queue that a request needs."""
    (queue,) = found
    if isinstance(queue, RaftqError):
        raise queue
    return queue.engine


def _cut_off() -> NotLeader:
    return NotLeader("this node is cut off from the controller: another one may lead by now")
