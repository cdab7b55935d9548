"""Clients of the simulated cluster: real producers and consumers, and what they were told.

Every producer is a process on a machine of its own, sends records with values of their own to
random partitions at random times, and notes how each of them ended. Consumers follow all partitions
from the beginning while faults happen. In the end the logs of the leaders are read.

Some partitions are written to by nobody, and consumers follow those that are there when they begin.
Nobody reads a topic that is deleted and created anew.
"""

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any, Literal

from clusterchecks import Invariants
from history import Log, Partition, Read, Send
from simcluster import WALL_MS, SimCluster
from simoperators import SCRATCH

from raftq.client.common.errors import RaftqError, StorageError
from raftq.client.consumer.consumer import Consumer
from raftq.client.producer.producer import Producer
from raftq.client.wire.batch import Batch
from raftq.node.storage.producers import WINDOW

Acks = Literal["none", "leader", "all"]


class Workload:
    """The clients of one simulation."""

    def __init__(self, cluster: SimCluster, invariants: Invariants) -> None:
        self._cluster = cluster
        self._invariants = invariants
        self._loop = cluster.loop
        self._plan = cluster.plan
        self.rng = Random(f"workload {cluster.plan.seed}")
        self._followed: list[Partition] = [
            (topic.name, number)
            for topic in self._plan.topics
            for number in range(topic.partitions)
            if topic.name != SCRATCH
        ]
        idle_share = self._plan.world.idle_share
        self._idle = [
            one for one in self._followed if idle_share and self.rng.random() < idle_share
        ]
        self.positions: dict[tuple[str, Partition], int] = {}
        self.producing: list[asyncio.Task[None]] = []
        self._readers: list[str] = []
        self._consuming: list[asyncio.Task[None]] = []
        # A short time: some sends end before the cluster has healed.
        self._delivery_ms = self.rng.choice((2_000, 100_000))

    @property
    def partitions(self) -> list[Partition]:
        """All that are there now, but for the cluster's own and those of queues."""
        names = {one.name for one in self._plan.topics}
        return [
            (topic.name, number)
            for topic, number, _ in self._cluster.consensus.state.all_partitions()
            if topic.name in names
        ]

    def _written(self) -> list[Partition]:
        return [one for one in self.partitions if one not in self._idle] or self._followed

    def _settings(self, name: str) -> dict[str, Any]:
        rng = Random(f"{name} {self._plan.seed}")
        return {
            "name": name,
            "connect_ms": 1_000,
            "request_ms": 3_000,
            "rng": rng,
            "wall_ms": lambda: WALL_MS + int(self._loop.time() * 1000),
        }

    def start(self) -> None:
        for at in range(self._plan.producers):
            # Those that ask for less get less: their records count as sent, not as kept.
            acks: Acks = "leader" if at == 2 else "all"
            name = f"producer-{at}"
            process = self._cluster.client(name)
            self.producing.append(process.spawn(self._produce(name, acks)))
        if self._plan.world.profile == "splits":
            process = self._cluster.client("hurried")
            self.producing.append(process.spawn(self._hurry("hurried")))
        for at in range(2):
            name = f"consumer-{at}"
            self._readers.append(name)
            self._consuming.append(self._cluster.client(name).spawn(self._consume(name)))

    # Producers.

    async def _produce(self, name: str, acks: Acks) -> None:
        rng = Random(f"{name} {self._plan.seed} sends")
        producer = self._producer(name, acks, rng.choice((0, 5, 50)))
        pause_s = self._plan.faults_s / self._plan.records
        async with producer, asyncio.TaskGroup() as group:
            for number in range(self._plan.records):
                partition = rng.choice(self._written())
                value = f"{name} {number} {'x' * rng.choice((0, 10, 300))}".encode()
                send = self._cluster.history.send(name, partition, value, acks, self._loop.time())
                if await self._begin(group, producer, send) and rng.random() < 0.7:
                    await asyncio.sleep(rng.uniform(0, 2 * pause_s))

    async def _hurry(self, name: str) -> None:
        """Write to the partition that is hot all the time, while faults happen."""
        async with self._producer(name, "leader", 0) as producer, asyncio.TaskGroup() as group:
            number = 0
            while not self._cluster.healed:
                await asyncio.sleep(0.05)
                hot, now = self._cluster.hot, self._loop.time()
                if hot is not None:
                    number += 1
                    value = f"{name} {number}".encode()
                    send = self._cluster.history.send(name, hot, value, "leader", now)
                    await self._begin(group, producer, send)

    def _producer(self, name: str, acks: Acks, linger_ms: int) -> Producer:
        return Producer(
            self._plan.bootstrap,
            **self._settings(name),
            acks=acks,
            linger_ms=linger_ms,
            delivery_timeout_ms=self._delivery_ms,
            max_block_ms=100_000,
            bootstrap_ms=100_000,
            stall_ms=500,
        )

    async def _begin(self, group: asyncio.TaskGroup, producer: Producer, send: Send) -> bool:
        """Hand a record to its producer; whether it took it."""
        topic, partition = send.partition
        try:
            delivery = await producer.send(topic, send.value, partition=partition)
        except RaftqError as error:
            self._failed(send, error)
            return False
        group.create_task(self._settle(send, delivery))
        return True

    async def _settle(self, send: Send, delivery: Any) -> None:
        try:
            appended = await delivery
        except RaftqError as error:
            self._failed(send, error)
            return
        self._cluster.history.ok(send, appended.offset, self._loop.time())
        self._loop.trace(f"ok {send.value!r} {appended.offset}")
        if send.acks == "all":
            self._cluster.acknowledged.set()
            self._invariants.acknowledged(send)

    def _failed(self, send: Send, error: RaftqError) -> None:
        self._loop.trace(f"{error.outcome} {send.value!r} {error.code}")
        self._cluster.history.failed(send, error.outcome, repr(error), self._loop.time())

    # Consumers.

    async def _consume(self, name: str) -> None:
        consumer = Consumer(
            self._plan.bootstrap, **self._settings(name), fetch_wait_ms=300, bootstrap_ms=100_000
        )
        async with consumer:
            await consumer.assign(self._followed)
            while True:
                try:
                    records = await consumer.poll(max_records=50, timeout=1.0)
                except StorageError:
                    await asyncio.sleep(0.2)  # a copy that is damaged, or a disk that fails
                    continue
                for record in records:
                    partition = (record.topic, record.partition)
                    self._cluster.history.read(
                        Read(name, partition, record.offset, record.value, self._loop.time())
                    )
                    self.positions[name, partition] = record.offset + 1

    def caught_up(self) -> bool:
        """Whether every record is readable, and every consumer has read all of them."""
        for one in self._consuming:
            if one.done():
                one.result()  # a consumer never ends by itself: raise what it ended with
        ends = self._ends()
        return ends is not None and all(
            self.positions.get((name, partition), 0) == end
            for name in self._readers
            for partition, end in ends.items()
            if partition in self._followed
        )

    def _ends(self) -> dict[Partition, int] | None:
        """Where the partitions end; None while some replica ends elsewhere, or hides something."""
        found = {}
        for key in self.partitions:
            state = self._cluster.consensus.state.partition(*key)
            if state is None or state.leader is None:
                return None
            copies = [self._cluster.nodes[one].copy_of(key) for one in state.replicas]
            leader = self._cluster.nodes[state.leader].copy_of(key)
            if leader is None or leader.replica.role != "leader":
                return None
            end = leader.replica.high_watermark
            if any(copy is None or copy.log.end_offset != end for copy in copies):
                return None
            found[key] = end
        return found

    async def send_one(self, producer: Producer, partition: Partition, value: bytes) -> Send:
        """Send a record and wait for what becomes of it."""
        send = self._cluster.history.send("prober", partition, value, "all", self._loop.time())
        try:
            delivery = await producer.send(partition[0], value, partition=partition[1])
        except RaftqError as error:
            self._failed(send, error)
        else:
            await self._settle(send, delivery)
        return send

    def prober(self) -> Producer:
        self._delivery_ms = 100_000
        return self._producer("prober", "all", 0)

    def starts(self) -> dict[Partition, int]:
        """Where the partitions that have a limit begin."""
        found: dict[Partition, int] = {}
        for name, number in self.partitions:
            topic = self._cluster.consensus.state.topics[name]
            leader = topic.partitions[number].leader
            if topic.config.retention_bytes is not None and leader is not None:
                copy = self._cluster.nodes[leader].copy_of((name, number))
                assert copy is not None
                found[name, number] = copy.log.start_offset
        return found

    def final(self) -> dict[Partition, Log]:
        """What every partition holds, read from the logs of its leaders."""
        return {
            key: [
                pair
                for batch in self._batches(key)
                for pair in zip(batch.offsets(), batch.values(), strict=True)
            ]
            for key in self.partitions
        }

    def _batches(self, key: Partition) -> Iterator[Batch]:
        state = self._cluster.consensus.state.partition(*key)
        assert state is not None
        assert state.leader is not None
        node = self._cluster.nodes[state.leader].node
        assert node is not None
        log = node.partitions.of(*key).log
        return log.batches(log.start_offset)

    def repeats(self) -> set[tuple[Partition, int]]:
        """Where records may be again although their producer sent them once: a first batch whose
        producer was forgotten looks like a beginning, and so does what was in flight behind it.
        Every other one is told that it is unknown. So this holds for what follows a repeated
        sequence 0, as far as a window reaches, and only where producers are forgotten."""
        found: set[tuple[Partition, int]] = set()
        for key in self.partitions if self._plan.world.forgets else ():
            again: dict[tuple[int, int], int] = {}  # -> batches since it began once more
            for batch in self._batches(key):
                who = (batch.producer_id, batch.producer_epoch)
                if batch.base_sequence == 0:
                    again[who] = 0 if who in again else WINDOW
                elif who in again:
                    again[who] += 1
                if batch.producer_id >= 0 and again.get(who, WINDOW) < WINDOW:
                    found.update((key, offset) for offset in batch.offsets())
        return found
