"""A queue of a fake led partition, asked as a node's clients ask it. (Test fake.)

Time is that of the virtual loop. Dead letters go to a list instead of another topic, by the same
steps as the real ones: an intent in the ledger, the copy, then the settlement.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from random import Random
from typing import Any, TypeVar

import msgpack
from fake_partition_logs import FakeLed, FakePartition
from simloop import VirtualTimeLoop

from raftq.client.common.errors import NotLeader, RaftqError
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.batch import decode, encode
from raftq.cluster.metadata.topic_config import topic_config
from raftq.node.queue.core.group_delivery import DyingRecords
from raftq.node.queue.leader.deliveries import GroupDeliveries
from raftq.node.queue.leader.engine import QueueTools
from raftq.node.queue.leader.handlers import QueueHandlers
from raftq.node.queue.leader.ledger import TAG_COPIES, Ledger
from raftq.node.queue.leader.registry import QueueRegistry

T = TypeVar("T")
INTENT, DONE = 1, 2


class FakeCopyService:
    """Dead letters that go to `copies`, which outlives the leaders; each intent once."""

    def __init__(
        self, leadership: FakeLed, ledger: Ledger, deliveries: GroupDeliveries, copies: dict
    ) -> None:
        self._leadership = leadership
        self._ledger = ledger
        self._deliveries = deliveries
        self._copies = copies
        self._open: dict[int, tuple[str, list[list[int]], str]] = {}
        self._next = 0
        self._stopped = False

    def begin(self) -> None:
        for number, (group, rows, _) in self._open.items():
            self._deliveries.mark_dying(group, [tuple(row) for row in rows])
            self._leadership.loop.call_later(0.01, self._copy, number)

    def stop(self) -> None:
        self._stopped = True

    def dead_letter(
        self, group: str, letters: Sequence[DyingRecords], error: str
    ) -> "asyncio.Future[None]":
        rows = [[one.nonce, one.start, one.end] for one in letters]
        number = self._next
        intent = [INTENT, number, group, rows, letters[0].reason]
        self._apply(intent)
        decided = self._ledger.write([TAG_COPIES + msgpack.packb(intent)])
        decided.add_done_callback(lambda done: self._decided(number, done))
        return decided

    def _decided(self, number: int, done: "asyncio.Future[None]") -> None:
        if done.exception() is None:
            self._leadership.loop.call_later(0.01, self._copy, number)

    def _copy(self, number: int) -> None:
        if self._stopped or not self._leadership.active or number not in self._open:
            return
        group, rows, reason = self._open[number]
        self._copies[self._leadership.ref.number, number] = (group, rows, reason)
        done = [DONE, number]
        self._apply(done)
        self._deliveries.settle_dead(
            group, [tuple(row) for row in rows], [TAG_COPIES + msgpack.packb(done)]
        )

    def _apply(self, entry: list[Any]) -> None:
        if entry[0] == INTENT:
            self._open[entry[1]] = (entry[2], entry[3], entry[4])
            self._next = max(self._next, entry[1] + 1)
        else:
            self._open.pop(entry[1], None)

    def parked(self, group: str) -> int:
        return 0

    def lost(self, group: str) -> int:
        return 0

    def replay(self, content: bytes) -> None:
        self._apply(msgpack.unpackb(content))

    def snapshot(self) -> Iterable[bytes]:
        yield from (
            msgpack.packb([INTENT, number, group, rows, reason])
            for number, (group, rows, reason) in self._open.items()
        )
        if not self._open and self._next:
            # The next number has to be known even when nothing is open.
            yield msgpack.packb([INTENT, self._next - 1, "", [], ""])
            yield msgpack.packb([DONE, self._next - 1])


class FakeDelayLine:
    def __init__(self, leadership: FakeLed) -> None:
        self.batches: list[int] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def scheduled(self, base: int, batch: memoryview) -> None:
        self.batches.append(base)


class HeldPartition:
    """As much of a Partition as the handlers look at."""

    def __init__(self, partition: FakePartition) -> None:
        self._partition = partition
        self.ref = partition.ref

    def check_leader(self, epoch: int) -> None:
        if self._partition.leadership is None:
            raise NotLeader("nobody leads")


class Cluster:
    """Partitions with their queues, through all epochs, and the handlers of one node."""

    def __init__(self, partitions: int = 1, seed: int = 1, **options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.rng = Random(seed)
        config = topic_config({"fsync": "none", **options.pop("config", {})}, 3)
        self.partitions = [
            FakePartition(number=number, directory=f"/p{number}", config=config, **options)
            for number in range(partitions)
        ]
        self.copies: dict[tuple[int, int], tuple[str, list[list[int]], str]] = {}
        self.damage: list[tuple[int, RaftqError]] = []
        self.skew_ms = 0
        """By how much the leader's clock is ahead of the loop's."""
        self.queues = QueueRegistry(
            QueueTools(
                rng=self.rng,
                wall_ms=lambda: int(self.loop.time() * 1000) + self.skew_ms,
                make_copy_service=lambda leadership, ledger, deliveries: FakeCopyService(
                    leadership, ledger, deliveries, self.copies
                ),
                make_delay_line=FakeDelayLine,
                report_damage=lambda place, partition_log, error: self.damage.append(
                    (partition_log, error)
                ),
            )
        )
        self.cut_off = False
        self.handlers = QueueHandlers(self, self.queues)
        self.enabled: list[str] = []

    def of(self, topic: str, number: int) -> HeldPartition:
        return HeldPartition(self.partitions[number])

    async def enable_queues(self, topic: str) -> None:
        self.enabled.append(topic)
        for number in range(len(self.partitions)):
            if self.partitions[number].leadership is None:
                self.serve(number)

    def serve(self, number: int = 0, settle: bool = True) -> None:
        partition = self.partitions[number]
        if partition.leadership is None:
            partition.lead(settle)
        self.queues.serve(partition.leadership)

    def queue(self, number: int = 0) -> Any:
        return self.queues.of(self.partitions[number].ref)

    def fail_over(
        self, number: int = 0, settle_s: float = 0.01, skew_ms: int | None = None
    ) -> None:
        """The next leader takes over, by a clock of its own; it settles a little later."""
        self.skew_ms = self.skew_ms if skew_ms is None else skew_ms
        queue = self.queues.find(self.partitions[number].ref)
        leadership = self.partitions[number].fail_over(self.rng)
        if queue is not None:
            queue.stop()
        self.queues.serve(leadership)
        self.loop.call_later(settle_s, leadership.settle)

    # What clients do

    def publish(self, *values: bytes, number: int = 0, **columns: Any) -> int:
        """One batch; its base offset. Readable a little later."""
        columns.setdefault("timestamps", int(self.loop.time() * 1000))
        return self.partitions[number].append("data", encode(list(values), **columns))

    async def ask(self, handler: Any, message: Any, session: Any = None) -> Any:
        answer = handler(message, memoryview(b""), session)
        return await answer if isinstance(answer, Coroutine | asyncio.Future) else answer

    async def lease(
        self, group: str = "g", records: int = 100, number: int = 0, **fields: Any
    ) -> "list[Held]":
        """What is leased from one partition; an error of it is raised."""
        reply = await self.lease_from([number], group, records, **fields)
        return [held for found in reply for held in found]

    async def lease_from(
        self, numbers: Iterable[int], group: str = "g", records: int = 100, **fields: Any
    ) -> "list[list[Held]]":
        session = fields.pop("session", None)
        message = wire.Lease(
            group,
            fields.pop("holder", "worker"),
            tuple(wire.LeasePartition("orders", number) for number in numbers),
            records_max=records,
            **fields,
        )
        reply, buffers = await self.ask(self.handlers.lease, message, session)
        raw = b"".join(buffers)
        reply.check(len(raw))
        found = []
        for one in reply.partitions:
            if one.error:
                raise RaftqError.registry[one.error](f"partition {one.partition}")
            found.append(_held(one, raw[one.start : one.start + one.length]))
        return found

    async def settle(
        self, verb: str, held: "Iterable[Held] | Held", group: str = "g", number: int = 0, **f: Any
    ) -> wire.SettleReply:
        every = [held] if isinstance(held, Held) else list(held)
        rows = tuple(wire.ReceiptRow(one.nonce, one.offset, one.offset + 1) for one in every)
        message = wire.Settle(group, "orders", number, verb, rows, **f)
        return await self.ask(self.handlers.settle, message)

    async def steer(self, verb: str, group: str = "g", **fields: Any) -> wire.SteerGroupReply:
        message = wire.SteerGroup(group, "orders", fields.pop("number", 0), verb, **fields)
        return await self.ask(self.handlers.steer_group, message)

    async def describe(self, group: str = "g", number: int = 0) -> wire.QueueGroup:
        message = wire.DescribeQueue("orders", number, group)
        reply = await self.ask(self.handlers.describe_queue, message)
        return reply.groups[0]


class Held:
    """One leased record."""

    def __init__(self, nonce: int, attempt: int, deadline: int, record: Any) -> None:
        self.nonce = nonce
        self.attempt = attempt
        self.deadline = deadline
        self.offset = record.offset
        self.value = record.value
        self.record = record

    def __repr__(self) -> str:
        return f"Held({self.offset} {self.value!r} attempt={self.attempt})"


def _held(one: wire.LeasedPartition, raw: bytes) -> list[Held]:
    records, at = {}, 0
    while at < len(raw):
        batch = decode(raw, at)
        records.update({record.offset: record for record in batch.records()})
        at += batch.length
    return [
        Held(row.nonce, row.attempt, row.deadline, records[offset])
        for row in one.ranges
        for offset in range(row.start, row.end)
    ]


def values(held: Iterable[Held]) -> list[bytes]:
    return [one.value for one in held]


def run(main: Coroutine[Any, Any, T], seconds_max: float = 100_000) -> T:
    """Run on virtual time; nothing may be left that nobody handled."""
    loop = VirtualTimeLoop()
    asyncio.set_event_loop(loop)
    try:
        result = loop.run(main, seconds_max=seconds_max)
        assert loop.unhandled == []
        return result
    finally:
        asyncio.set_event_loop(None)
        loop.end()


async def pause(seconds: float) -> None:
    await asyncio.sleep(seconds)
