"""What the owner of a led partition's logs sees of it. (Interface.)

A partition has up to three replicated logs, its logs: `data` always, `ledger` and `delays` once
its topic is used as a queue. While a node leads a partition, a service owns what the other two
mean: it is made when the epoch begins and stopped when it ends, and everything it remembers beyond
the logs ends with it.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from raftq.cluster.metadata.topic_config import TopicConfig
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.storage.log import Log


class LeaderLog(Protocol):
    """One log, as the leader of one epoch sees it."""

    log: Log

    @property
    def high_watermark(self) -> int: ...

    def append(self, batch: bytearray) -> int:
        """Stamp and write a batch and hand it to the followers; its base offset. NotLeader when
        the epoch is over. The buffer must not change any more: followers get the same bytes."""

    def replicated(self, end: int) -> "asyncio.Future[None]":
        """Done when the high watermark has reached `end`; NotLeader, outcome unknown, when the
        epoch ends before."""

    def truncate_prefix(self, offset: int) -> None:
        """Forget what is below the offset, which is readable: soon, when everything readable now
        is on disk here. The followers do the same."""


class Leadership(Protocol):
    """A partition while this node leads it, in one epoch."""

    ref: PartitionRef
    epoch: int
    loop: asyncio.AbstractEventLoop
    data: LeaderLog
    ledger: LeaderLog | None
    delays: LeaderLog | None
    old_epochs_replicated: "asyncio.Future[None]"
    """Done when everything of older epochs is replicated in every log: only then may be told
    what the logs say."""

    @property
    def config(self) -> TopicConfig: ...

    @property
    def active(self) -> bool:
        """Whether it is still this epoch."""

    def watch_readable(self, callback: Callable[[], None]) -> None:
        """Call this whenever the high watermark of `data` has moved."""

    def has_enough_replicas(self) -> bool:
        """Whether a write can be acknowledged by the in-sync set now."""


class LeaderService(Protocol):
    """Owns the meaning of a led partition's logs for one epoch."""

    def stop(self) -> None:
        """The epoch is over. Whoever waits gets NotLeader."""

    def scheduled(self, base: int, batch: memoryview) -> None:
        """The partition has appended a batch of delayed records to `delays`, stamped, at `base`."""
