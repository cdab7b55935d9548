"""Owners of the strands of simulated partitions: they write, and remember what was replicated.

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

from raftq.client.wire.batch import encode
from raftq.client.wire.errors import DiskFull, NotLeader, RaftqError
from raftq.node.app import Node
from raftq.node.leading import Led, ReplicatedLog
from raftq.node.partitions import Serve
from raftq.node.strand import DELAYS, LEDGER, NAMES

StrandOf = tuple[str, int, int]
PAUSE_S = 0.05
DUE = [4_000_000_000_000]


class Strands:
    """What all owners of one simulation were told."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.rng = Random(f"strands {cluster.plan.seed}")
        self.replicated: dict[StrandOf, dict[int, tuple[int, bytes]]] = {}
        """offset -> (epoch, value)"""
        self.cuts: dict[StrandOf, int] = {}
        self.writing = True
        self.epochs = 0
        self._owners = 0
        cluster.serve = self._serve

    def _serve(self, node: Node) -> Serve:
        return lambda led: self._own(node, led)

    def _own(self, node: Node, led: Led) -> "Owner":
        self._owners += 1
        return Owner(self, node, led, Random(f"owner {self.cluster.plan.seed} {self._owners}"))

    def note(self, key: StrandOf, offset: int, epoch: int, value: bytes) -> None:
        self.cluster.loop.trace(f"replicated {key} {offset}")
        self.replicated.setdefault(key, {})[offset] = (epoch, value)
        self.cluster.acknowledged.set()

    def check(self, key: StrandOf, strand: ReplicatedLog, epoch: int) -> None:
        """That a leader has everything that was replicated up to its epoch and not cut off."""
        log, cut = strand.log, self.cuts.get(key, 0)
        if log.start_offset > cut:
            raise Broken(f"{key} begins at {log.start_offset}, and was cut at {cut}")
        found = {
            offset: value
            for batch in log.batches(log.start_offset, strand.high_watermark)
            for offset, value in zip(batch.offsets(), batch.values(), strict=True)
        }
        for offset, (written, value) in self.replicated.get(key, {}).items():
            if offset >= cut and written <= epoch and found.get(offset) != value:
                raise Broken(
                    f"{key}: {value!r} was replicated at {offset}, and now there is "
                    f"{found.get(offset)!r} in [{log.start_offset}, {strand.high_watermark})"
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

    def counts(self) -> dict[StrandOf, int]:
        """How many entries of each strand of each queue were replicated so far."""
        return {
            key: len(self.replicated.get(key, {}))
            for topic, number, _ in self.cluster.consensus.state.all_partitions()
            for key in ((topic.name, number, LEDGER), (topic.name, number, DELAYS))
            if topic.queued
        }

    def is_same(self) -> bool:
        """Whether all copies of all strands end where their leader's high watermark is."""
        for topic, number, state in self.cluster.consensus.state.all_partitions():
            if state.leader is None:
                return False
            key: Key = (topic.name, number)
            leader = self.cluster.nodes[state.leader].copy_of(key)
            if leader is None or leader.replica.role != "leader":
                return False
            ends = [reach.high_watermark for reach in leader.replica.strands]
            for replica in state.replicas:
                copy = self.cluster.nodes[replica].copy_of(key)
                if copy is None or [one.log.end_offset for one in copy.strands] != ends:
                    return False
        return True

    def check_leaders(self) -> None:
        for topic, number, state in self.cluster.consensus.state.all_partitions():
            assert state.leader is not None
            copy = self.cluster.nodes[state.leader].copy_of((topic.name, number))
            assert copy is not None
            if topic.queued:
                assert copy.led is not None
                for strand, log in ((LEDGER, copy.led.ledger), (DELAYS, copy.led.delays)):
                    assert log is not None
                    self.check((topic.name, number, strand), log, copy.led.epoch)


async def _enable(node: Node, topic: str) -> None:
    with suppress(RaftqError):
        await node.partitions.enable_queues(topic)


class Owner:
    """A service; see the module's docstring."""

    def __init__(self, strands: Strands, node: Node, led: Led, rng: Random) -> None:
        self._strands = strands
        self._led = led
        self._rng = rng
        self._written = 0
        self._stopped = False
        assert led.ledger is not None
        assert led.delays is not None
        self._logs = {LEDGER: led.ledger, DELAYS: led.delays}
        node.spawn(self._work())

    def stop(self) -> None:
        assert not self._led.active
        self._stopped = True

    def scheduled(self, base: int, batch: memoryview) -> None: ...

    def _key(self, strand: int) -> StrandOf:
        place = self._led.place
        return place.topic, place.number, strand

    async def _work(self) -> None:
        led = self._led
        try:
            await led.settled
            self._strands.epochs += 1
            for strand, log in self._logs.items():
                self._strands.check(self._key(strand), log, led.epoch)
            while led.active:
                await asyncio.sleep(self._rng.expovariate(1 / PAUSE_S))
                if self._strands.writing and led.active:
                    with suppress(DiskFull):
                        await self._step()
        except NotLeader:
            assert not led.active
        assert self._stopped

    async def _step(self) -> None:
        rng = self._rng
        for _ in range(rng.choice((1, 1, 3))):
            self._append(rng.choice((LEDGER, DELAYS)), b"x" * rng.choice((0, 10, 500)))
        if rng.random() < 0.1:
            await self._cut(rng.choice((LEDGER, DELAYS)))

    def _append(self, strand: int, padding: bytes) -> int:
        led, log, key = self._led, self._logs[strand], self._key(strand)
        self._written += 1
        value = b"%s %d %d %d " % (NAMES[strand].encode(), key[1], led.epoch, self._written)
        value += padding
        due = DUE if strand == DELAYS else None
        base = log.append(encode([value], deliver_at=due))
        assert base + 1 == log.log.end_offset
        waiting = log.replicated(base + 1)
        waiting.add_done_callback(partial(self._replicated, key, base, value))
        return base

    def _replicated(
        self, key: StrandOf, base: int, value: bytes, waiting: "asyncio.Future[None]"
    ) -> None:
        if waiting.cancelled():
            return
        error = waiting.exception()
        if error is None:
            self._strands.note(key, base, self._led.epoch, value)
        else:
            assert isinstance(error, NotLeader), error
            assert error.outcome == "unknown"

    async def _cut(self, strand: int) -> None:
        log, key = self._logs[strand], self._key(strand)
        if self._rng.random() < 0.5:
            with suppress(DiskFull):
                log.log.roll()
        base = self._append(strand, b"in place of all before")
        await log.replicated(base + 1)
        if self._led.active:
            cuts = self._strands.cuts
            cuts[key] = max(cuts.get(key, 0), base)
            log.truncate_prefix(base)
