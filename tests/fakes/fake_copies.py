"""Two topics with their queues and a courier between them that fails in every way. (Test fake.)"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from random import Random
from typing import Any

from fake_partition_logs import FakePartition
from fake_queue import HeldPartition

from raftq.client.common.errors import (
    ConnectionLost,
    NotLeader,
    RaftqError,
    RequestTimeout,
    TooLarge,
    UnknownTopic,
)
from raftq.client.common.tasks import sleep
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.batch import Batch, decode, encode
from raftq.client.wire.record import BatchRecord
from raftq.cluster.metadata.topic_config import topic_config
from raftq.node.queue.leader.copy_service import CopyService
from raftq.node.queue.leader.delay_handlers import DelayHandlers
from raftq.node.queue.leader.engine import QueueTools
from raftq.node.queue.leader.handlers import QueueHandlers
from raftq.node.queue.leader.registry import QueueRegistry
from raftq.node.storage.producers import Producers

SOURCE, DEAD = "orders", "orders.dlq"


class Topic:
    """One partition and what its leader knows of producers."""

    def __init__(self, name: str, topic_id: int, **options: Any) -> None:
        self.partition = FakePartition(name, topic_id=topic_id, directory=f"/{name}", **options)
        self.producers = Producers()

    def rebuild(self) -> None:
        """As a new leader knows it: from the log."""
        self.producers = Producers()
        log = self.partition.logs["data"].log
        for batch in log.batches(log.start_offset):
            self._note(batch, batch.base_offset)

    def _note(self, batch: Batch, base: int) -> None:
        self.producers.note(
            batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.count, base
        )

    async def produce(self, raw: bytearray) -> None:
        leadership = self.partition.leadership
        if leadership is None:
            raise NotLeader("nobody")
        batch = Batch(bytes(raw))
        known = self.producers.check(
            batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.count
        )
        base = leadership.data.append(bytearray(raw)) if known is None else known
        if known is None:
            self._note(batch, base)
        await leadership.data.replicated(base + batch.count)


class NoDelays:
    """A delay line without records."""

    def __init__(self, leadership) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Courier:
    """A copy sender. `faults` is the share of sends that go wrong."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.faults = 0.0
        self.refused: dict[bytes, None] = {}
        """Values that no topic takes."""
        self.sent = 0
        self.ids = 100
        self.tasks: list[asyncio.Task[None]] = []

    async def make_dead_letters(self, topic: str) -> None:
        self.world.made[topic + ".dlq"] = None

    async def producer_id(self) -> int:
        await sleep(0.001)
        self.ids += 1
        return self.ids

    def exists(self, target: tuple[str, int]) -> bool:
        return target[0] in self.world.topics and target[1] == 0

    async def send(self, target: tuple[str, int], batch: bytearray) -> None:
        rng = self.world.rng
        self.sent += 1
        if not self.exists(target):
            raise UnknownTopic(target[0])
        if any(record.value in self.refused for record in Batch(bytes(batch)).records()):
            raise TooLarge("a value that is over the limit")
        topic = self.world.topics[target[0]]
        fault = rng.random() < self.faults
        kind = rng.choice(("lost", "late", "no reply")) if fault else ""
        await sleep(rng.choice((0, 0.001, 0.01)))
        if kind == "lost":
            raise ConnectionLost("before it came").with_outcome("failed")
        if kind == "late":
            # It arrives long after its sender has given up on it.
            loop = asyncio.get_running_loop()
            self.tasks.append(loop.create_task(self._later(topic, batch)))
            raise RequestTimeout("no answer")
        await topic.produce(batch)
        if kind == "no reply":
            raise ConnectionLost("after it came")

    async def _later(self, topic: Topic, batch: bytearray) -> None:
        await sleep(self.world.rng.choice((0.01, 0.3, 3)))
        with suppress(RaftqError):  # fenced, out of order, no leader: nobody hears of it
            await topic.produce(batch)


class World:
    """Topics, their queues and the copies between them, without a network."""

    def __init__(self, seed: int, lag_s: float | None = 0.002, **settings: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.rng = Random(seed)
        config = topic_config({"fsync": "none", **settings}, 3)
        options = {"lag_s": lag_s, "segment_bytes": 1 << 16, "config": config}
        self.topics = {SOURCE: Topic(SOURCE, 1, **options), DEAD: Topic(DEAD, 2, **options)}
        self.made: dict[str, None] = {}
        self.copy_sender = Courier(self)
        self.queues = QueueRegistry(
            QueueTools(
                rng=self.rng,
                wall_ms=self.wall_ms,
                make_copy_service=lambda leadership, ledger, deliveries: CopyService(
                    leadership, ledger, deliveries, self.copy_sender, self.rng, self.wall_ms
                ),
                make_delay_line=NoDelays,
            )
        )
        self.cut_off = False
        self.handlers = QueueHandlers(self, self.queues)
        self.more_handlers = DelayHandlers(
            self, self.queues, self.handlers.queue, self.copy_sender.exists
        )
        for topic in self.topics.values():
            self.queues.serve(topic.partition.lead())

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + int(self.loop.time() * 1000)

    # As the node's partitions

    def of(self, topic: str, number: int) -> Any:
        return HeldPartition(self.topics[topic].partition)

    async def enable_queues(self, topic: str) -> None: ...

    # What happens

    def fail_over(self, name: str, settle_s: float = 0.01) -> None:
        topic = self.topics[name]
        queue = self.queues.find(topic.partition.ref)
        leadership = topic.partition.fail_over(self.rng)
        topic.rebuild()
        if queue is not None:
            queue.stop()
        self.queues.serve(leadership)
        self.loop.call_later(settle_s, leadership.settle)

    def stop(self) -> None:
        for topic in self.topics.values():
            queue = self.queues.find(topic.partition.ref)
            if queue is not None:
                queue.stop()

    def publish(self, *values: bytes, **more: Any) -> int:
        more.setdefault("timestamps", self.wall_ms())
        return self.topics[SOURCE].partition.append("data", encode(list(values), **more))

    async def ask(self, handler: Any, message: Any) -> Any:
        answer = handler(message, memoryview(b""), None)
        return await answer if isinstance(answer, Coroutine | asyncio.Future) else answer

    async def lease(
        self, records: int = 100, group: str = "g", topic: str = SOURCE, wait_ms: int = 0
    ) -> list[wire.LeasedRange]:
        places = (wire.LeasePartition(topic, 0),)
        message = wire.Lease(group, "w", places, records_max=records, wait_ms=wait_ms)
        reply, _ = await self.ask(self.handlers.lease, message)
        return list(reply.partitions[0].ranges) if reply.partitions else []

    async def settle(
        self, verb: str, rows: list[wire.LeasedRange], group: str = "g", **more: Any
    ) -> wire.SettleReply:
        receipts = tuple(wire.ReceiptRow(row.nonce, row.start, row.end) for row in rows)
        return await self.ask(
            self.handlers.settle, wire.Settle(group, SOURCE, 0, verb, receipts, **more)
        )

    async def described(self, group: str = "g") -> wire.QueueGroup:
        message = wire.DescribeQueue(SOURCE, 0, group)
        reply = await self.ask(self.handlers.describe_queue, message)
        (found,) = reply.groups
        return found

    async def letters(self, verb: str = "browse", **more: Any) -> tuple[Any, list[BatchRecord]]:
        message = wire.DeadLetters(DEAD, 0, verb, **more)
        answer = await self.ask(self.more_handlers.dead_letters, message)
        reply, buffers = answer if isinstance(answer, tuple) else (answer, [])
        records = [record for one in buffers for record in decode(bytes(one)).records()]
        return reply, sorted(records, key=lambda record: record.offset)

    def records(self, name: str) -> list[BatchRecord]:
        """Everything readable of a topic."""
        partition_log = self.topics[name].partition.logs["data"]
        batches = partition_log.log.batches(
            partition_log.log.start_offset, partition_log.high_watermark
        )
        return [record for batch in batches for record in batch.records()]
