"""A partition while this node leads it, as the owner of its strands sees it. (Shell.)

One object per epoch: when the epoch ends it is of no use any more, and says so. See leading.py for
what is promised.
"""

import asyncio
from collections.abc import Callable

from raftq.client.wire.errors import RaftqError
from raftq.cluster.topic_config import TopicConfig
from raftq.node.leading import ReplicatedLog
from raftq.node.partition import Partition
from raftq.node.strand import Strand

_NEVER = float("inf")


class LedLog:
    """A ReplicatedLog over a strand."""

    __slots__ = ("_led", "_reach", "_strand", "log")

    def __init__(self, led: "LedPartition", strand: Strand) -> None:
        self._led = led
        self._strand = strand
        self._reach = strand.reach
        self.log = strand.log

    @property
    def high_watermark(self) -> int:
        return self._reach.high_watermark

    def append(self, batch: bytearray) -> int:
        self._led.check()
        return self._strand.append(batch)

    def replicated(self, end: int) -> "asyncio.Future[None]":
        if not self._led.active or end <= self._reach.high_watermark:
            future: asyncio.Future[None] = self._led.loop.create_future()
            if self._led.active:
                future.set_result(None)
            else:
                _fail(future, self._led.not_leader())
            return future
        return self._strand.for_all.add(end, _NEVER, None)

    def truncate_prefix(self, offset: int) -> None:
        self._led.check()
        self._strand.drop_below(offset)


class _Watcher:
    """A reader of a strand that calls somebody."""

    __slots__ = ("more",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.more = callback


class LedPartition:
    """A Led over a partition."""

    def __init__(self, partition: Partition, loop: asyncio.AbstractEventLoop) -> None:
        self._partition = partition
        self.place = partition.place
        self.epoch = partition.replica.epoch
        self.loop = loop
        self.active = True
        self.data: ReplicatedLog = LedLog(self, partition.data)
        self.ledger: ReplicatedLog | None = self._log(partition.ledger)
        self.delays: ReplicatedLog | None = self._log(partition.delays)
        self.settled: asyncio.Future[None] = loop.create_future()
        self._readers: list[tuple[Strand, _Watcher]] = []
        self._settlers: list[tuple[Strand, _Watcher]] = []
        if not partition.is_settled:
            self._settlers = [_watch(one, self._settle) for one in partition.strands]
        else:
            self.settled.set_result(None)

    def _log(self, strand: Strand | None) -> LedLog | None:
        return None if strand is None else LedLog(self, strand)

    @property
    def config(self) -> TopicConfig:
        return self._partition.config

    def _settle(self) -> None:
        if not self.settled.done() and self._partition.is_settled:
            _forget(self._settlers)
            self.settled.set_result(None)

    def watch_readable(self, callback: Callable[[], None]) -> None:
        if self.active:
            self._readers.append(_watch(self._partition.data, callback))

    def has_enough_replicas(self) -> bool:
        return self._partition.replica.may_accept()

    def not_leader(self) -> RaftqError:
        return self._partition.leader_lost()

    def check(self) -> None:
        """Raise NotLeader, and nothing was done, unless it is still this epoch."""
        if not self.active:
            raise self._partition.not_leader()

    def end(self, error: RaftqError) -> None:
        """The epoch is over."""
        self.active = False
        _forget(self._readers)
        _forget(self._settlers)
        if not self.settled.done():
            _fail(self.settled, error)


def _watch(strand: Strand, callback: Callable[[], None]) -> tuple[Strand, _Watcher]:
    watcher = _Watcher(callback)
    strand.readers[watcher] = None
    return strand, watcher


def _forget(watchers: list[tuple[Strand, _Watcher]]) -> None:
    for strand, watcher in watchers:
        strand.readers.pop(watcher, None)
    watchers.clear()


def _fail(future: "asyncio.Future[None]", error: RaftqError) -> None:
    future.set_exception(error)
    future.exception()  # nobody has to wait for it
