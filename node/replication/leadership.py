"""A partition while this node leads it, as its service sees it. (Shell.)

There is one object per epoch. When the epoch ends, it refuses everything. leader_log.py has the
promises.
"""

import asyncio
from collections.abc import Callable

from raftq.client.common.errors import RaftqError
from raftq.cluster.metadata.topic_config import TopicConfig
from raftq.node.replication.leader_log import LeaderLog
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import PartitionLog

_NEVER = float("inf")


class PartitionLeaderLog:
    """A LeaderLog over a PartitionLog."""

    __slots__ = ("_leadership", "_log_progress", "_partition_log", "log")

    def __init__(self, leadership: "PartitionLeadership", partition_log: PartitionLog) -> None:
        self._leadership = leadership
        self._partition_log = partition_log
        self._log_progress = partition_log.progress
        self.log = partition_log.log

    @property
    def high_watermark(self) -> int:
        return self._log_progress.high_watermark

    def append(self, batch: bytearray) -> int:
        self._leadership.check()
        return self._partition_log.append(batch)

    def replicated(self, end: int) -> "asyncio.Future[None]":
        if not self._leadership.active or end <= self._log_progress.high_watermark:
            future: asyncio.Future[None] = self._leadership.loop.create_future()
            if self._leadership.active:
                future.set_result(None)
            else:
                _fail(future, self._leadership.not_leader())
            return future
        return self._partition_log.for_all.add(end, _NEVER, None)

    def truncate_prefix(self, offset: int) -> None:
        self._leadership.check()
        self._partition_log.drop_below(offset)


class _Watcher:
    """A reader of a log that calls a function."""

    __slots__ = ("more",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.more = callback


class PartitionLeadership:
    """A Leadership over a Partition."""

    def __init__(self, partition: Partition, loop: asyncio.AbstractEventLoop) -> None:
        self._partition = partition
        self.ref = partition.ref
        self.epoch = partition.replica.epoch
        self.loop = loop
        self.active = True
        self.data: LeaderLog = PartitionLeaderLog(self, partition.data)
        self.ledger: LeaderLog | None = self._log(partition.ledger)
        self.delays: LeaderLog | None = self._log(partition.delays)
        self.old_epochs_replicated: asyncio.Future[None] = loop.create_future()
        self._readers: list[tuple[PartitionLog, _Watcher]] = []
        self._old_epoch_watchers: list[tuple[PartitionLog, _Watcher]] = []
        if not partition.old_epochs_replicated:
            self._old_epoch_watchers = [_watch(log, self._settle) for log in partition.logs]
        else:
            self.old_epochs_replicated.set_result(None)

    def _log(self, partition_log: PartitionLog | None) -> PartitionLeaderLog | None:
        return None if partition_log is None else PartitionLeaderLog(self, partition_log)

    @property
    def config(self) -> TopicConfig:
        return self._partition.config

    def _settle(self) -> None:
        if not self.old_epochs_replicated.done() and self._partition.old_epochs_replicated:
            _forget(self._old_epoch_watchers)
            self.old_epochs_replicated.set_result(None)

    def watch_readable(self, callback: Callable[[], None]) -> None:
        if self.active:
            self._readers.append(_watch(self._partition.data, callback))

    def has_enough_replicas(self) -> bool:
        return self._partition.replica.may_accept()

    def not_leader(self) -> RaftqError:
        return self._partition.leader_lost()

    def check(self) -> None:
        """Raise NotLeader, with nothing done, when the epoch is over."""
        if not self.active:
            raise self._partition.not_leader()

    def end(self, error: RaftqError) -> None:
        """End the epoch."""
        self.active = False
        _forget(self._readers)
        _forget(self._old_epoch_watchers)
        if not self.old_epochs_replicated.done():
            _fail(self.old_epochs_replicated, error)


def _watch(
    partition_log: PartitionLog, callback: Callable[[], None]
) -> tuple[PartitionLog, _Watcher]:
    watcher = _Watcher(callback)
    partition_log.readers[watcher] = None
    return partition_log, watcher


def _forget(watchers: list[tuple[PartitionLog, _Watcher]]) -> None:
    for partition_log, watcher in watchers:
        partition_log.readers.pop(watcher, None)
    watchers.clear()


def _fail(future: "asyncio.Future[None]", error: RaftqError) -> None:
    future.set_exception(error)
    future.exception()  # a waiter is not required
