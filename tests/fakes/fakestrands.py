"""A led partition without a node: real logs on a simulated disk, replication by hand. (Test fake.)

`FakePartition` is what stays: the logs, and what is replicated of them. `lead` makes the leader of
the next epoch; `fail_over` ends it, and cuts each strand somewhere at or above what is replicated:
what a new leader may have. Replication happens `lag_s` after an append, or when `replicate` is
called if `lag_s` is None.
"""

import asyncio
from collections.abc import Callable
from random import Random

from simdisk import SimDisk

from raftq.client.wire.errors import LeaderLost, NotLeader
from raftq.cluster.topic_config import TopicConfig, topic_config
from raftq.node.place import Place
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log

NAMES = ("data", "ledger", "delays")


class FakeStrand:
    """A ReplicatedLog, through all epochs; `FakeLed` hands out a view that ends with its epoch."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.high_watermark = log.end_offset
        self.waiting: list[tuple[int, asyncio.Future[None]]] = []

    def replicate(self, end: int | None = None) -> bool:
        end = self.log.end_offset if end is None else min(end, self.log.end_offset)
        moved = end > self.high_watermark
        self.high_watermark = max(self.high_watermark, end)
        ready = [future for at, future in self.waiting if at <= self.high_watermark]
        self.waiting = [one for one in self.waiting if one[0] > self.high_watermark]
        for future in ready:
            if not future.done():
                future.set_result(None)
        return moved

    def ends(self) -> list[int]:
        """Where the strand may be cut: ends of batches at or above what is replicated."""
        starts = [batch.end_offset for batch in self.log.batches(self.log.start_offset)]
        return sorted({self.high_watermark, *(end for end in starts if end > self.high_watermark)})


class LedStrand:
    """One strand in one epoch."""

    def __init__(self, led: "FakeLed", strand: FakeStrand) -> None:
        self.led = led
        self.strand = strand

    @property
    def log(self) -> Log:
        return self.strand.log

    @property
    def high_watermark(self) -> int:
        return self.strand.high_watermark

    def append(self, batch: bytearray) -> int:
        self.led.check()
        base = self.log.append(batch, self.led.epoch)
        self.led.partition.appended(self.led)
        return base

    def replicated(self, end: int) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = self.led.loop.create_future()
        if not self.led.active:
            future.set_exception(LeaderLost("over"))
            future.exception()
        elif end <= self.high_watermark:
            future.set_result(None)
        else:
            self.strand.waiting.append((end, future))
        return future

    def truncate_prefix(self, offset: int) -> None:
        self.led.check()
        self.log.truncate_prefix(offset)


class FakeLed:
    """A Led."""

    def __init__(self, partition: "FakePartition", epoch: int) -> None:
        self.partition = partition
        self.place = partition.place
        self.epoch = epoch
        self.loop = asyncio.get_running_loop()
        self.data = LedStrand(self, partition.strands["data"])
        self.ledger = LedStrand(self, partition.strands["ledger"])
        self.delays = LedStrand(self, partition.strands["delays"])
        self.active = True
        self.enough = True
        self.settled: asyncio.Future[None] = self.loop.create_future()
        self.watchers: list[Callable[[], None]] = []

    @property
    def config(self) -> TopicConfig:
        return self.partition.config

    def check(self) -> None:
        if not self.active:
            raise NotLeader("the epoch is over")

    def watch_readable(self, callback: Callable[[], None]) -> None:
        self.watchers.append(callback)

    def has_enough_replicas(self) -> bool:
        return self.enough

    def settle(self) -> None:
        self.partition.replicate()
        if not self.settled.done():
            self.settled.set_result(None)


class FakePartition:
    """See the module's docstring."""

    def __init__(
        self,
        topic: str = "orders",
        number: int = 0,
        *,
        lag_s: float | None = 0.001,
        segment_bytes: int = 1 << 20,
        disk: object | None = None,
        directory: str = "/p",
        config: TopicConfig | None = None,
        topic_id: int = 7,
    ) -> None:
        self.place = Place(topic, topic_id, number, directory)
        self.config = config or topic_config({"fsync": "none"}, 3)
        self.lag_s = lag_s
        self.disk = disk or SimDisk()
        options = LogConfig(segment_bytes=segment_bytes, seal_sync=False, page_cache_bytes=None)
        self.disk.make_directory(directory)
        self.strands = {
            name: FakeStrand(Log.open(self.disk, f"{directory}/{name}", options, 0))
            for name in NAMES
        }
        self.epoch = 0
        self.led: FakeLed | None = None
        self._soon = False

    def lead(self, settle: bool = True) -> FakeLed:
        self.epoch += 1
        self.led = FakeLed(self, self.epoch)
        if settle:
            self.led.settle()
        return self.led

    def appended(self, led: FakeLed) -> None:
        if self.lag_s is not None and not self._soon:
            self._soon = True
            led.loop.call_later(self.lag_s, self._later, led)

    def _later(self, led: FakeLed) -> None:
        self._soon = False
        if led.active:
            self.replicate()

    def replicate(self) -> None:
        for name in ("delays", "ledger", "data"):
            moved = self.strands[name].replicate()
            if moved and name == "data" and self.led is not None:
                for watcher in self.led.watchers:
                    watcher()

    def end_epoch(self) -> None:
        led, self.led = self.led, None
        self._soon = False
        if led is not None:
            led.active = False
            for strand in self.strands.values():
                waiting, strand.waiting = strand.waiting, []
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(LeaderLost("over"))
                        future.exception()

    def fail_over(self, rng: Random) -> FakeLed:
        """Another replica leads: it has what is replicated, and anything or nothing beyond."""
        self.end_epoch()
        for strand in self.strands.values():
            strand.log.truncate(rng.choice(strand.ends()))
        return self.lead(settle=False)

    def append(self, name: str, batch: bytearray) -> int:
        """As a client's produce would."""
        assert self.led is not None
        return getattr(self.led, name).append(batch)
