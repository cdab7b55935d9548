"""Queue workers of the simulated cluster: real producers, workers that note everything, deaths.

Every client is a process on a machine of its own. Workers die and others come in their place; what
they held is left to its lease. Some records are for later, some of those are cancelled, and some
have an end. The nodes' clocks disagree, by up to a minute each way in half of the runs: leases and
retries must not notice, so nothing is forgiven there. Due times and ends of records are wall-clock
times, for which the checkers forgive as much as the clocks are apart.
"""

import asyncio
from random import Random
from typing import Any

from simcluster import WALL_MS, SimCluster
from simloop import Process

from raftq.chaos.history import DeadLetterSeen, Final, History, Publish
from raftq.chaos.recorder import Recorder, publish
from raftq.chaos.workers import POISON, Habits, QueueWorker
from raftq.client.common.errors import RaftqError
from raftq.client.common.types import PartitionKey
from raftq.client.producer.producer import Producer
from raftq.client.wire.queue_messages import DelayStats, DescribeQueue

GROUP = "g"
HABITS = Habits(lease_s=3.0, wait_s=0.4, work_s=0.1)


class QueueWorkload:
    """The clients of one simulation of queues."""

    skews_s: tuple[float, ...] = (2.0, 60.0)
    """How wrong the clocks of nodes may be; one of these for each run."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._loop = cluster.loop
        self._plan = cluster.plan
        self.rng = Random(f"queue workload {cluster.plan.seed}")
        skew_s = self.rng.choice(self.skews_s)
        self.skew_s = 2 * skew_s + 0.1
        """How far two clocks are apart at most."""
        for node in cluster.nodes.values():
            node._skew_ms = int(self.rng.uniform(-skew_s, skew_s) * 1000)
        self.history = History()
        self.places: list[PartitionKey] = [
            (topic.name, number)
            for topic in self._plan.topics
            for number in range(topic.partitions)
        ]
        self.producing: list[asyncio.Task[None]] = []
        self._workers: list[tuple[Process, QueueWorker, asyncio.Task[None]]] = []
        self._born = 0

    def clock(self) -> float:
        return WALL_MS / 1000 + self._loop.time()

    def _settings(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "connect_ms": 1_000,
            "request_ms": 3_000,
            "bootstrap_ms": 100_000,
            "rng": Random(f"{name} {self._plan.seed}"),
            "wall_ms": lambda: int(self.clock() * 1000),
        }

    def start(self) -> None:
        for at in range(self._plan.producers):
            name = f"producer-{at}"
            process = self._cluster.client(name)
            self.producing.append(process.spawn(self._produce(name)))
        for _ in range(self.rng.randint(2, 4)):
            self._hire()

    def _hire(self) -> None:
        self._born += 1
        name = f"worker-{self._born}"
        process = self._cluster.client(name)
        recorder = self._recorder(name)
        worker = QueueWorker(recorder, self.places, HABITS, Random(f"{name} {self._plan.seed} w"))
        task = process.spawn(worker.run())
        self._workers.append((process, worker, task))

    def replace_one(self) -> None:
        """kill -9 of a worker, and another one begins."""
        process, _, _ = self._workers.pop(self.rng.randrange(len(self._workers)))
        self._loop.trace(f"kill {process.name}")
        process.kill()
        self._hire()

    async def misfortune(self) -> None:
        """Workers die now and then, while faults happen."""
        end = self._loop.time() + self._plan.faults_s
        while self._loop.time() < end:
            await asyncio.sleep(self.rng.uniform(0.5, 4.0))
            self.replace_one()

    async def _produce(self, name: str) -> None:
        rng = Random(f"{name} {self._plan.seed} sends")
        producer = Producer(
            self._plan.bootstrap,
            **self._settings(name),
            linger_ms=rng.choice((0, 5, 50)),
            delivery_timeout_ms=100_000,
            max_block_ms=100_000,
            stall_ms=500,
        )
        pause_s = self._plan.faults_s / self._plan.records
        async with producer, asyncio.TaskGroup() as group:
            for number in range(self._plan.records):
                noted = self._record(name, number, rng)
                group.create_task(self._send(producer, noted, rng.random() < 0.3))
                if rng.random() < 0.7:
                    await asyncio.sleep(rng.uniform(0, 2 * pause_s))

    def _record(self, name: str, number: int, rng: Random) -> Publish:
        topic, partition = rng.choice(self.places)
        kind = POISON if rng.random() < 0.04 else "v"
        made = Publish(
            client=name,
            topic=topic,
            partition=partition,
            at=self.clock(),
            value=f"{kind} {name} {number}",
            priority=rng.randrange(5),
        )
        if rng.random() < 0.2:
            made.deliver_at = made.at + rng.uniform(0.05, 10.0)
        if rng.random() < 0.1:
            made.expires_at = max(made.at, made.deliver_at) + rng.uniform(1.0, 15.0)
        return made

    async def _send(self, producer: Producer, noted: Publish, regretted: bool) -> None:
        """Send it; a delayed one that is regretted is cancelled, if there is still time."""
        await publish(producer, self.history, self.clock, noted)
        if noted.deliver_at and regretted and noted.offset is not None:
            async with self._recorder(f"{noted.client} canceller") as canceller:
                await canceller.cancel(noted.partition_key, noted.offset, noted.value)

    def _recorder(self, name: str) -> Recorder:
        return Recorder(
            self._plan.bootstrap, self.history, GROUP, self.clock, **self._settings(name)
        )

    # The end.

    def check_alive(self) -> None:
        for _, _, task in self._workers:
            if task.done():
                task.result()

    async def drain(self, seconds: float) -> None:
        # By a clock that is behind, a record that was due a moment ago is due only now.
        await self.until_drained(seconds + self.skew_s)

    async def until_drained(self, seconds: float) -> None:
        """Waits until the group has nothing left to do, anywhere."""
        process = self._cluster.client("overseer")
        await process.spawn(self._until_drained(seconds))

    async def _until_drained(self, seconds: float) -> None:
        end = self._loop.time() + seconds
        async with self._recorder("overseer") as overseer:
            sweeps = 0
            while sweeps < 2:  # what was fired just now is not readable yet
                self.check_alive()
                await asyncio.sleep(0.5)
                states = {place: await self._state(overseer, place) for place in self.places}
                busy = {place: state for place, state in states.items() if state != "empty"}
                sweeps = 0 if busy else sweeps + 1
                if self._loop.time() > end:
                    raise AssertionError(
                        f"not drained in {seconds} s: {busy}\n{self._cluster.describe()}"
                    )

    async def _state(self, overseer: Recorder, place: PartitionKey) -> str:
        try:
            stats = (await overseer.ask(place, DelayStats(*place))).message
            if stats.pending:
                return repr(stats)
        except RaftqError as error:
            return repr(error)
        return await self._left(overseer, place)

    async def _left(self, overseer: Recorder, place: PartitionKey) -> str:
        """What is left to do for the group: "empty", or something to read in a failure."""
        try:
            reply = await overseer.ask(place, DescribeQueue(*place, GROUP))
        except RaftqError as error:
            return repr(error)
        if not reply.message.groups:
            return "empty" if not reply.message.high_watermark else "nobody has leased there yet"
        (one,) = reply.message.groups
        if one.unsettled or one.in_flight or one.waiting:
            return repr(one)
        return "empty"

    async def stop(self) -> None:
        for _, worker, _ in self._workers:
            worker.stopping = True
        await asyncio.wait([task for _, _, task in self._workers], timeout=60.0)
        self.check_alive()

    def final(self) -> Final:
        made = Final(drained={GROUP: [topic.name for topic in self._plan.topics]})
        for topic, number, _ in self._cluster.consensus.state.all_partitions():
            if topic.name.endswith(".dlq"):
                made.letters += [
                    _letter(headers, value)
                    for _, value, headers in self._records(topic.name, number)
                ]
            elif not topic.name.startswith("__"):
                made.logs[topic.name, number] = [
                    (offset, value.decode())
                    for offset, value, _ in self._records(topic.name, number)
                ]
        return made

    def _records(self, topic: str, number: int) -> list[tuple[int, bytes, dict[str, bytes]]]:
        """Of the leader's log."""
        state = self._cluster.consensus.state.partition(topic, number)
        assert state is not None
        assert state.leader is not None
        node = self._cluster.nodes[state.leader].node
        assert node is not None
        log = node.partitions.of(topic, number).log
        return [
            row
            for batch in log.batches(log.start_offset)
            for row in zip(batch.offsets(), batch.values(), batch.headers(), strict=True)
        ]


def _letter(headers: dict[str, bytes], value: bytes) -> DeadLetterSeen:
    facts = {name.removeprefix("x-dlq-"): text.decode() for name, text in headers.items()}
    return DeadLetterSeen(
        topic=facts["topic"],
        partition=int(facts["partition"]),
        offset=int(facts["offset"]),
        group=facts["group"],
        value=bytes(value).decode(),
        attempts=int(facts["attempts"]),
        reason=facts["reason"],
    )
