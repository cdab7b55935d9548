"""Shell: clients that note what they do and what the cluster answers.

They use the wire protocol with one attempt per call. So an outcome in the history is the answer of
one leader, and retries do not hide it. If the outcome of a call is unknown, the next call decides.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, Unpack

from raftq.chaos.history import (
    Cancel,
    History,
    HistoryCall,
    LeasedDelivery,
    Publish,
    Recall,
    SettleEvent,
    Status,
    Store,
    Verb,
)
from raftq.client.common.errors import NotLeader, RaftqError
from raftq.client.common.types import PartitionKey
from raftq.client.net.client import Client
from raftq.client.net.connection import Reply
from raftq.client.options import Address, Bootstrap, ClientOptions, ClientSettings
from raftq.client.producer.producer import Producer
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.batch import decode
from raftq.client.wire.messages import Request, WireMessage
from raftq.client.wire.queue_messages import LeasedPartition

R = TypeVar("R", bound=WireMessage)
Clock = Callable[[], float]


class Recorder(Client):
    """One client of one group."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        history: History,
        group: str,
        clock: Clock,
        **settings: Unpack[ClientSettings],
    ) -> None:
        """`clock` returns seconds on the clock that the nodes use for deadlines."""
        options = ClientOptions(**settings)
        super().__init__(bootstrap, options, "recorder")
        self.name = options.name
        self.history = history
        self.group = group
        self.clock = clock
        self.answer_s = 5.0
        """How long to wait for an answer, beyond the wait that the request asks for."""

    # Requests.

    async def ask(self, partition_key: PartitionKey, request: Request[R]) -> Reply[R]:
        """Asks the leader of a partition, once."""
        return await self._ask(
            partition_key, await self._leader(partition_key), request, self.answer_s
        )

    async def _leader(self, partition_key: PartitionKey) -> Address:
        self._ensure_started()
        await self._routes.topic(partition_key[0])
        found = self._routes.leader(*partition_key)
        if found is None:
            self._routes.request_refresh()
            raise NotLeader(f"{partition_key} has no leader")
        return found[1]

    async def _ask(
        self, partition_key: PartitionKey, address: Address, request: Request[R], timeout_s: float
    ) -> Reply[R]:
        try:
            connection = await self._pool.get(address)
            return await connection.request(request, timeout_s=timeout_s)
        except RaftqError as error:
            self._learn(partition_key, error)
            raise

    def _learn(self, partition_key: PartitionKey, error: RaftqError) -> None:
        if error.refresh_route:
            self._routes.hint(*partition_key, error)
            self._routes.request_refresh()

    # Queues.

    async def lease(
        self,
        partition_keys: Iterable[PartitionKey],
        records_max: int = 10,
        lease_s: float = 5.0,
        wait_s: float = 0.0,
    ) -> list[LeasedDelivery]:
        """Asks every leader of these partitions at once. Returns the deliveries, which are
        noted."""
        leaders: dict[Address, list[PartitionKey]] = {}
        for partition_key in partition_keys:
            try:
                leaders.setdefault(await self._leader(partition_key), []).append(partition_key)
            except RaftqError as error:
                self._learn(partition_key, error)
        asked = [
            self._lease_at(address, asked, records_max, lease_s, wait_s)
            for address, asked in leaders.items()
        ]
        return [one for found in await asyncio.gather(*asked) for one in found]

    async def _lease_at(
        self,
        address: Address,
        partition_keys: list[PartitionKey],
        records_max: int,
        lease_s: float,
        wait_s: float,
    ) -> list[LeasedDelivery]:
        lease_ms = int(lease_s * 1000)
        request = wire.Lease(
            self.group,
            self.name,
            tuple(wire.LeasePartition(*partition_key) for partition_key in partition_keys),
            records_max=records_max,
            lease_ms=lease_ms,
            wait_ms=int(wait_s * 1000),
        )
        asked = self.clock()
        try:
            reply = await self._ask(partition_keys[0], address, request, wait_s + self.answer_s)
        except RaftqError:
            return []
        found: list[LeasedDelivery] = []
        for partition in reply.message.partitions:
            if partition.error:
                self._learn((partition.topic, partition.partition), _error(partition.error))
                continue
            values = _values(reply.raw[partition.start : partition.start + partition.length])
            found += self._note_leased(partition, values, lease_ms, asked)
        return found

    def _note_leased(
        self, given: LeasedPartition, values: dict[int, str], lease_ms: int, asked: float
    ) -> Iterable[LeasedDelivery]:
        at = self.clock()
        for one in given.ranges:
            for offset in range(one.start, one.end):
                yield self.history.add(
                    LeasedDelivery(
                        client=self.name,
                        topic=given.topic,
                        partition=given.partition,
                        at=at,
                        group=self.group,
                        offset=offset,
                        value=values[offset],
                        attempt=one.attempt,
                        receipt=str(one.nonce),
                        granted=(one.deadline - lease_ms) / 1000,
                        deadline=one.deadline / 1000,
                        asked=asked,
                    )
                )

    async def settle(
        self,
        deliveries: Sequence[LeasedDelivery],
        verb: Verb,
        delay_s: float | None = None,
        reason: str = "",
    ) -> list[SettleEvent]:
        """Settles all of these deliveries, which are of one partition, in the same way."""
        partition_key = deliveries[0].partition_key
        events = [self._begin(delivery, verb, delay_s) for delivery in deliveries]
        rows = tuple(
            wire.ReceiptRow(int(delivery.receipt), delivery.offset, delivery.offset + 1)
            for delivery in deliveries
        )
        delay_ms = None if delay_s is None else int(delay_s * 1000)
        request = wire.Settle(self.group, *partition_key, verb, rows, delay_ms, reason)
        try:
            reply = await self.ask(partition_key, request)
        except RaftqError as error:
            for event in events:
                self._conclude(event, error.outcome, repr(error))
            return events
        for event, code in zip(events, reply.message.errors, strict=True):
            self._conclude(event, _status(code), code)
        return events

    def _now(self, partition_key: PartitionKey) -> dict[str, Any]:
        """The fields of an operation that begins now."""
        topic, partition = partition_key
        return {"client": self.name, "topic": topic, "partition": partition, "at": self.clock()}

    def _conclude(self, call: HistoryCall, status: Status, error: str = "") -> None:
        call.end(status, self.clock(), error)
        self.history.note(call)

    def _begin(self, delivery: LeasedDelivery, verb: Verb, delay_s: float | None) -> SettleEvent:
        return self.history.add(
            SettleEvent(
                **self._now(delivery.partition_key),
                group=delivery.group,
                offset=delivery.offset,
                receipt=delivery.receipt,
                verb=verb,
                delay=delay_s,
            )
        )

    # Stream groups.

    async def store(self, partition_key: PartitionKey, offset: int, owner_epoch: int = -1) -> Store:
        noted = self.history.add(
            Store(
                **self._now(partition_key),
                group=self.group,
                offset=offset,
                owner_epoch=owner_epoch,
            )
        )
        rows = (wire.StoreOffset(*partition_key, offset, owner_epoch),)
        try:
            reply = await self.ask(partition_key, wire.StoreOffsets(self.group, self.name, rows))
        except RaftqError as error:
            self._conclude(noted, error.outcome, repr(error))
            return noted
        self._note_answer(noted, reply.message.offsets[0])
        return noted

    async def recall(self, partition_key: PartitionKey, owner_epoch: int = -1) -> Recall:
        """Reads a stored position. With an epoch, it claims the partition first."""
        noted = self.history.add(
            Recall(
                **self._now(partition_key),
                group=self.group,
                owner_epoch=owner_epoch,
            )
        )
        rows = (wire.ReadOffset(*partition_key, owner_epoch),)
        try:
            reply = await self.ask(partition_key, wire.ReadOffsets(self.group, self.name, rows))
        except RaftqError as error:
            self._conclude(noted, error.outcome, repr(error))
            return noted
        answer = reply.message.offsets[0]
        noted.offset = answer.offset
        self._note_answer(noted, answer)
        return noted

    def _note_answer(self, noted: Store | Recall, answer: wire.StoredOffset) -> None:
        self._conclude(noted, _status(answer.error), answer.error)
        if answer.error:
            self._learn(noted.partition_key, _error(answer.error))

    # Delays.

    async def cancel(self, partition_key: PartitionKey, offset: int, value: str) -> Cancel:
        """Cancels the delayed record at an offset of the delays log."""
        noted = self.history.add(
            Cancel(
                **self._now(partition_key),
                value=value,
            )
        )
        try:
            reply = await self.ask(partition_key, wire.CancelDelayed(*partition_key, (offset,)))
        except RaftqError as error:
            self._conclude(noted, error.outcome, repr(error))
            return noted
        self._conclude(noted, "ok" if offset in reply.message.cancelled else "failed")
        return noted


async def publish(producer: Producer, history: History, clock: Clock, noted: Publish) -> Publish:
    """Sends the noted record and waits for its outcome."""
    history.add(noted)
    ttl = noted.expires_at - max(noted.deliver_at, clock()) if noted.expires_at else None
    try:
        delivery = await producer.send(
            noted.topic,
            noted.value.encode(),
            partition=noted.partition,
            priority=noted.priority,
            deliver_at=noted.deliver_at or None,
            ttl=ttl,
        )
        appended = await delivery
    except RaftqError as error:
        noted.end(error.outcome, clock(), repr(error))
        return noted
    noted.offset = appended.offset
    noted.end("ok", clock())
    return noted


def _error(code: str) -> RaftqError:
    return RaftqError.registry.get(code, RaftqError)(code)


def _status(code: str) -> Status:
    return _error(code).outcome if code else "ok"


def _values(raw: memoryview) -> dict[int, str]:
    found: dict[int, str] = {}
    at = 0
    while at < len(raw):
        batch = decode(raw, at)
        values = [bytes(one).decode() for one in batch.values()]
        found.update(zip(batch.offsets(), values, strict=True))
        at += batch.length
    return found
