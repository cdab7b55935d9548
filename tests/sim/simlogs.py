"""Owners of the logs of simulated partitions: they write, and remember what was replicated.

Whoever leads a partition of a queue writes entries of its own to the ledger and the delays, many at
once, and notes those that it is told are replicated; now and then it writes what stands for all
before it, and cuts the rest off. Every new leader, once it is settled, must have all of them that
its epoch can know of: a node that is late may only now begin to lead, in an epoch that is over.
"""

import asyncio
from contextlib import suppress
from functools import partial
from random import Random

from clusterchecks import Broken
from simcluster import Key, SimCluster

from raftq.client.common.errors import DiskFull, NotLeader, RaftqError
from raftq.client.wire.batch import encode
from raftq.node.app import Node
from raftq.node.replication.leader_log import LeaderLog, Leadership
from raftq.node.replication.partition_log import DELAYS, LEDGER, NAMES
from raftq.node.replication.partitions import Serve

LogOf = tuple[str, int, int]
PAUSE_S = 0.05
DUE = [4_000_000_000_000]


class Logs:
    """What all owners of one simulation were told."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.rng = Random(f"logs {cluster.plan.seed}")
        self.replicated: dict[LogOf, dict[int, tuple[int, bytes]]] = {}
        """offset -> (epoch, value)"""
        self.cuts: dict[LogOf, int] = {}
        self.writing = True
        self.epochs = 0
        self._owners = 0
        cluster.serve = self._serve

    def _serve(self, node: Node) -> Serve:
        return lambda leadership: self._own(node, leadership)

    def _own(self, node: Node, leadership: Leadership) -> "Owner":
        self._owners += 1
        return Owner(
            self, node, leadership, Random(f"owner {self.cluster.plan.seed} {self._owners}")
        )

    def note(self, key: LogOf, offset: int, epoch: int, value: bytes) -> None:
        self.cluster.loop.trace(f"replicated {key} {offset}")
        self.replicated.setdefault(key, {})[offset] = (epoch, value)
        self.cluster.acknowledged.set()

    def check(self, key: LogOf, partition_log: LeaderLog, epoch: int) -> None:
        """That a leader has everything that was replicated up to its epoch and not cut off."""
        log, cut = partition_log.log, self.cuts.get(key, 0)
        if log.start_offset > cut:
            raise Broken(f"{key} begins at {log.start_offset}, and was cut at {cut}")
        found = {
            offset: value
            for batch in log.batches(log.start_offset, partition_log.high_watermark)
            for offset, value in zip(batch.offsets(), batch.values(), strict=True)
        }
        for offset, (written, value) in self.replicated.get(key, {}).items():
            if offset >= cut and written <= epoch and found.get(offset) != value:
                raise Broken(
                    f"{key}: {value!r} was replicated at {offset}, and now there is "
                    f"{found.get(offset)!r} in [{log.start_offset}, {partition_log.high_watermark})"
                )

    # Making topics queues

    async def enable(self, topic: str, delay_s: float) -> None:
        """Ask nodes until one has made the topic a queue."""
        cluster = self.cluster
        await asyncio.sleep(delay_s)
        while not cluster.consensus.state.topics[topic].queued:
            node = self.rng.choice(list(cluster.nodes.values()))
            if node.ready and node.process is not None and node.node is not None:
                work = node.process.spawn(_enable(node.node, topic))
                await asyncio.wait((work,), timeout=6.0)
            await asyncio.sleep(0.2)

    # How it is in the end

    def counts(self) -> dict[LogOf, int]:
        """How many entries of each log of each queue were replicated so far."""
        return {
            key: len(self.replicated.get(key, {}))
            for topic, number, _ in self.cluster.consensus.state.all_partitions()
            for key in ((topic.name, number, LEDGER), (topic.name, number, DELAYS))
            if topic.queued
        }

    def is_same(self) -> bool:
        """Whether all copies of all logs end where their leader's high watermark is."""
        for topic, number, state in self.cluster.consensus.state.all_partitions():
            if state.leader is None:
                return False
            key: Key = (topic.name, number)
            leader = self.cluster.nodes[state.leader].copy_of(key)
            if leader is None or leader.replica.role != "leader":
                return False
            ends = [progress.high_watermark for progress in leader.replica.logs]
            for replica in state.replicas:
                copy = self.cluster.nodes[replica].copy_of(key)
                if copy is None or [one.log.end_offset for one in copy.logs] != ends:
                    return False
        return True

    def check_leaders(self) -> None:
        for topic, number, state in self.cluster.consensus.state.all_partitions():
            assert state.leader is not None
            copy = self.cluster.nodes[state.leader].copy_of((topic.name, number))
            assert copy is not None
            if topic.queued:
                assert copy.leadership is not None
                for partition_log, log in (
                    (LEDGER, copy.leadership.ledger),
                    (DELAYS, copy.leadership.delays),
                ):
                    assert log is not None
                    self.check((topic.name, number, partition_log), log, copy.leadership.epoch)


async def _enable(node: Node, topic: str) -> None:
    with suppress(RaftqError):
        await node.partitions.enable_queues(topic)


class Owner:
    """A service; see the module's docstring."""

    def __init__(self, logs: Logs, node: Node, leadership: Leadership, rng: Random) -> None:
        self._owned = logs
        self._leadership = leadership
        self._rng = rng
        self._written = 0
        self._stopped = False
        assert leadership.ledger is not None
        assert leadership.delays is not None
        self._logs = {LEDGER: leadership.ledger, DELAYS: leadership.delays}
        node.spawn(self._work())

    def stop(self) -> None:
        assert not self._leadership.active
        self._stopped = True

    def scheduled(self, base: int, batch: memoryview) -> None: ...

    def _key(self, partition_log: int) -> LogOf:
        place = self._leadership.ref
        return place.topic, place.number, partition_log

    async def _work(self) -> None:
        leadership = self._leadership
        try:
            await leadership.old_epochs_replicated
            self._owned.epochs += 1
            for partition_log, log in self._logs.items():
                self._owned.check(self._key(partition_log), log, leadership.epoch)
            while leadership.active:
                await asyncio.sleep(self._rng.expovariate(1 / PAUSE_S))
                if self._owned.writing and leadership.active:
                    with suppress(DiskFull):
                        await self._step()
        except NotLeader:
            assert not leadership.active
        assert self._stopped

    async def _step(self) -> None:
        rng = self._rng
        for _ in range(rng.choice((1, 1, 3))):
            self._append(rng.choice((LEDGER, DELAYS)), b"x" * rng.choice((0, 10, 500)))
        if rng.random() < 0.1:
            await self._cut(rng.choice((LEDGER, DELAYS)))

    def _append(self, partition_log: int, padding: bytes) -> int:
        leadership, log, key = self._leadership, self._logs[partition_log], self._key(partition_log)
        self._written += 1
        value = b"%s %d %d %d " % (
            NAMES[partition_log].encode(),
            key[1],
            leadership.epoch,
            self._written,
        )
        value += padding
        due = DUE if partition_log == DELAYS else None
        base = log.append(encode([value], deliver_at=due))
        assert base + 1 == log.log.end_offset
        waiting = log.replicated(base + 1)
        waiting.add_done_callback(partial(self._replicated, key, base, value))
        return base

    def _replicated(
        self, key: LogOf, base: int, value: bytes, waiting: "asyncio.Future[None]"
    ) -> None:
        if waiting.cancelled():
            return
        error = waiting.exception()
        if error is None:
            self._owned.note(key, base, self._leadership.epoch, value)
        else:
            assert isinstance(error, NotLeader), error
            assert error.outcome == "unknown"

    async def _cut(self, partition_log: int) -> None:
        log, key = self._logs[partition_log], self._key(partition_log)
        if self._rng.random() < 0.5:
            with suppress(DiskFull):
                log.log.roll()
        base = self._append(partition_log, b"in place of all before")
        await log.replicated(base + 1)
        if self._leadership.active:
            cuts = self._owned.cuts
            cuts[key] = max(cuts.get(key, 0), base)
            log.truncate_prefix(base)
