"""A led partition without a node: real logs on a simulated disk, replication by hand. (Test fake.)

`FakePartition` is what stays: the logs, and what is replicated of them. `lead` makes the leader of
the next epoch; `fail_over` ends it, and cuts each log somewhere at or above what is replicated:
what a new leader may have. Replication happens `lag_s` after an append, or when `replicate` is
called if `lag_s` is None.
"""

import asyncio
from collections.abc import Callable
from random import Random

from simdisk import SimDisk

from raftq.client.common.errors import LeaderLost, NotLeader
from raftq.cluster.metadata.topic_config import TopicConfig, topic_config
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log

NAMES = ("data", "ledger", "delays")


class FakePartitionLog:
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
        """Where the log may be cut: ends of batches at or above what is replicated."""
        starts = [batch.end_offset for batch in self.log.batches(self.log.start_offset)]
        return sorted({self.high_watermark, *(end for end in starts if end > self.high_watermark)})


class LedLogCopy:
    """One log in one epoch."""

    def __init__(self, leadership: "FakeLed", partition_log: FakePartitionLog) -> None:
        self.leadership = leadership
        self.partition_log = partition_log

    @property
    def log(self) -> Log:
        return self.partition_log.log

    @property
    def high_watermark(self) -> int:
        return self.partition_log.high_watermark

    def append(self, batch: bytearray) -> int:
        self.leadership.check()
        base = self.log.append(batch, self.leadership.epoch)
        self.leadership.partition.appended(self.leadership)
        return base

    def replicated(self, end: int) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = self.leadership.loop.create_future()
        if not self.leadership.active:
            future.set_exception(LeaderLost("over"))
            future.exception()
        elif end <= self.high_watermark:
            future.set_result(None)
        else:
            self.partition_log.waiting.append((end, future))
        return future

    def truncate_prefix(self, offset: int) -> None:
        self.leadership.check()
        self.log.truncate_prefix(offset)


class FakeLed:
    """A Led."""

    def __init__(self, partition: "FakePartition", epoch: int) -> None:
        self.partition = partition
        self.ref = partition.ref
        self.epoch = epoch
        self.loop = asyncio.get_running_loop()
        self.data = LedLogCopy(self, partition.logs["data"])
        self.ledger = LedLogCopy(self, partition.logs["ledger"])
        self.delays = LedLogCopy(self, partition.logs["delays"])
        self.active = True
        self.enough = True
        self.old_epochs_replicated: asyncio.Future[None] = self.loop.create_future()
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
        if not self.old_epochs_replicated.done():
            self.old_epochs_replicated.set_result(None)


class FakePartition:
    """A partition with all its logs, without replication."""

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
        self.ref = PartitionRef(topic, topic_id, number, directory)
        self.config = config or topic_config({"fsync": "none"}, 3)
        self.lag_s = lag_s
        self.disk = disk or SimDisk()
        options = LogConfig(segment_bytes=segment_bytes, seal_sync=False, page_cache_bytes=None)
        self.disk.make_directory(directory)
        self.logs = {
            name: FakePartitionLog(Log.open(self.disk, f"{directory}/{name}", options, 0))
            for name in NAMES
        }
        self.epoch = 0
        self.leadership: FakeLed | None = None
        self._soon = False

    def lead(self, settle: bool = True) -> FakeLed:
        self.epoch += 1
        self.leadership = FakeLed(self, self.epoch)
        if settle:
            self.leadership.settle()
        return self.leadership

    def appended(self, leadership: FakeLed) -> None:
        if self.lag_s is not None and not self._soon:
            self._soon = True
            leadership.loop.call_later(self.lag_s, self._later, leadership)

    def _later(self, leadership: FakeLed) -> None:
        self._soon = False
        if leadership.active:
            self.replicate()

    def replicate(self) -> None:
        for name in ("delays", "ledger", "data"):
            moved = self.logs[name].replicate()
            if moved and name == "data" and self.leadership is not None:
                for watcher in self.leadership.watchers:
                    watcher()

    def end_epoch(self) -> None:
        leadership, self.leadership = self.leadership, None
        self._soon = False
        if leadership is not None:
            leadership.active = False
            for partition_log in self.logs.values():
                waiting, partition_log.waiting = partition_log.waiting, []
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(LeaderLost("over"))
                        future.exception()

    def fail_over(self, rng: Random) -> FakeLed:
        """Another replica leads: it has what is replicated, and anything or nothing beyond."""
        self.end_epoch()
        for partition_log in self.logs.values():
            partition_log.log.truncate(rng.choice(partition_log.ends()))
        return self.lead(settle=False)

    def append(self, name: str, batch: bytearray) -> int:
        """As a client's produce would."""
        assert self.leadership is not None
        return getattr(self.leadership, name).append(batch)
