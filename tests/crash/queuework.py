"""Queues on real clusters: a stage on which workers work, nodes are killed, and all is judged."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from clusterwork import until

from raftq import aio
from raftq.chaos.checkers import Rules, judge
from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.history import DeadLetterSeen, Final, History, Publish
from raftq.chaos.recorder import Recorder, publish
from raftq.chaos.workers import Habits, QueueWorker
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey
from raftq.client.wire.queue_messages import DescribeQueue, QueueGroup

clock = time.time


class Stage:
    """One topic of one cluster, and the history of what its clients did.

    Use as `async with Stage(...) as stage`; tasks that still run then are cancelled.
    """

    def __init__(
        self, cluster: LocalCluster, topic: str = "work", partitions: int = 2, **config: Any
    ) -> None:
        self.cluster = cluster
        self.topic = topic
        self.config = config
        self.history = History()
        self.places: list[PartitionKey] = [(topic, number) for number in range(partitions)]
        self.workers: list[QueueWorker] = []
        self.admin = aio.Admin(cluster.bootstrap)
        self.producer = aio.Producer(cluster.bootstrap, linger_ms=5)
        self._recorders: list[Recorder] = []
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> "Stage":
        count = len(self.places)
        await self.admin.create_topic(
            self.topic, partitions=count, replication=3, config=self.config
        )
        return self

    async def __aexit__(self, *problem: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in (*self._recorders, self.admin):
            await client.close()
        with suppress(RaftqError):  # what was not acknowledged is in the history
            await self.producer.close(timeout=5.0)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        self._tasks.append(asyncio.get_running_loop().create_task(work))
        return self._tasks[-1]

    async def recorder(self, name: str, group: str = "g") -> Recorder:
        made = Recorder(self.cluster.bootstrap, self.history, group, clock, name=name)
        self._recorders.append(made)
        return await made.start()

    async def work(self, name: str, habits: Habits, group: str = "g") -> "asyncio.Task[Any]":
        """A worker on all partitions; cancel the task and close its connections to kill it."""
        recorder = await self.recorder(name, group)
        worker = QueueWorker(recorder, self.places, habits, Random(name))
        self.workers.append(worker)
        return self.spawn(worker.run())

    async def send(self, value: str, partition: int = 0, **more: Any) -> Publish:
        noted = Publish(
            client="producer",
            topic=self.topic,
            partition=partition,
            at=clock(),
            value=value,
            **more,
        )
        return await publish(self.producer, self.history, clock, noted)

    async def send_many(self, values: list[str], pause_s: float = 0.0) -> list[Publish]:
        """Round robin, each before its end is known."""
        sent = []
        for number, value in enumerate(values):
            sent.append(self.spawn(self.send(value, number % len(self.places))))
            await sleep(pause_s)
        return list(await asyncio.gather(*sent))

    # Faults.

    async def leader(self, place: PartitionKey) -> int:
        found: list[int] = []

        async def known() -> bool:
            described = await self.admin.describe_topic(place[0])
            leader = described.partitions[place[1]].leader
            found[:] = [] if leader is None else [leader]
            return bool(found) and self.cluster.is_running(found[0])

        await until(known, 20)
        return found[0]

    async def kill_leader(self, place: PartitionKey | None = None, down_s: float = 0.7) -> int:
        """kill -9 of whoever leads, and back again after a while; returns when all are in sync."""
        killed = await self.leader(place or self.places[0])
        await asyncio.to_thread(self.cluster.kill, killed)
        await sleep(down_s)
        await asyncio.to_thread(self.cluster.restart, killed)
        await until(self.is_whole, 20)
        return killed

    async def is_whole(self) -> bool:
        for topic in await self.admin.describe_topics():
            if any(len(one.isr) != len(one.replicas) for one in topic.partitions):
                return False
        return True

    # The end.

    async def describe(self, place: PartitionKey, group: str = "g") -> QueueGroup:
        found: list[QueueGroup] = []
        recorder = self._recorders[0]

        async def answered() -> bool:
            try:
                reply = await recorder.ask(place, DescribeQueue(*place, group))
            except RaftqError:
                return False
            found[:] = reply.message.groups
            return bool(found)

        await until(answered, 15)
        return found[0]

    async def drained(self, group: str = "g", within_s: float = 30.0) -> None:
        """Until nothing is left for the group; its workers go on meanwhile."""

        async def empty() -> bool:
            for place in self.places:
                one = await self.describe(place, group)
                if one.unsettled or one.in_flight or one.waiting:
                    return False
            return True

        await until(empty, within_s)

    async def stop_workers(self) -> None:
        for worker in self.workers:
            worker.stopping = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def final(self, *groups: str) -> Final:
        """What is in the logs and among the dead letters."""
        made = Final(drained={group: [self.topic] for group in groups})
        for place in self.places:
            made.logs[place] = [(one.offset, one.value.decode()) for one in await self.read(*place)]
        dead = f"{self.topic}.dlq"
        if dead in await self.admin.list_topics():
            described = await self.admin.describe_topic(dead)
            for number in range(len(described.partitions)):
                made.letters += [letter_of(one) for one in await self.read(dead, number)]
        return made

    async def read(self, topic: str, partition: int) -> list[Any]:
        """Every readable record of a partition, in order."""
        described = await self.admin.describe_topic(topic)
        end = described.partitions[partition].high_watermark
        assert end is not None
        records: list[Any] = []
        async with aio.Consumer(self.cluster.bootstrap) as consumer:
            await consumer.assign([(topic, partition)])
            await consumer.seek(topic, partition, to="earliest")
            while not records or records[-1].offset < end - 1:
                if end == 0:
                    break
                found = await consumer.poll(max_records=1000, timeout=5.0)
                assert found, f"only {len(records)} records of {topic}/{partition} came"
                records += found
        return records

    def judge(self, final: Final, **rules: Any) -> None:
        """No anomaly, or the history is kept and the test fails with the first ones."""
        found = judge(self.history, final, Rules(**rules))
        if not found:
            return
        path = Path(self.cluster.files.directory) / "history.json"
        whole = {"history": self.history.to_json(), "final": final.to_json()}
        path.write_text(json.dumps(whole))
        texts = "\n".join(str(one) for one in found[:10])
        raise AssertionError(f"{len(found)} anomalies, history in {path}:\n{texts}")


def letter_of(record: Any) -> DeadLetterSeen:
    """A dead letter, from the headers it has."""
    headers = {name: value.decode() for name, value in record.headers.items()}
    return DeadLetterSeen(
        topic=headers["x-dlq-topic"],
        partition=int(headers["x-dlq-partition"]),
        offset=int(headers["x-dlq-offset"]),
        group=headers["x-dlq-group"],
        value=record.value.decode(),
        attempts=int(headers["x-dlq-attempts"]),
        reason=headers["x-dlq-reason"],
    )


def on_stage(
    cluster: LocalCluster, scene: Callable[[Stage], Awaitable[None]], **settings: Any
) -> None:
    """Run a scene on a stage of its own, in a loop of its own."""

    async def run() -> None:
        async with Stage(cluster, **settings) as stage:
            await scene(stage)

    asyncio.run(run())
