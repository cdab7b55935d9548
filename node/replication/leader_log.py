"""What the service of a partition sees of it while this node leads. (Interface.)

A partition has up to three replicated logs: `data` always, `ledger` and `delays` once its topic is
used as a queue. While a node leads a partition, a service interprets the ledger and the delays log.
It is made when the epoch begins and stopped when it ends, and everything it remembers beyond the
logs ends with it.
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
        """Stamp and write a batch, hand it to the followers, and return its base offset.

        Raises NotLeader when the epoch is over. The buffer must not change afterwards: the
        followers get the same bytes.
        """

    def replicated(self, end: int) -> "asyncio.Future[None]":
        """Return a future that is done when the high watermark has reached `end`. It fails with
        NotLeader, outcome unknown, when the epoch ends before."""

    def truncate_prefix(self, offset: int) -> None:
        """Drop what is below the offset, which must be readable.

        It happens soon, when everything that is readable now is on disk here. The followers do the
        same.
        """


class Leadership(Protocol):
    """A partition while this node leads it, in one epoch."""

    ref: PartitionRef
    epoch: int
    loop: asyncio.AbstractEventLoop
    data: LeaderLog
    ledger: LeaderLog | None
    delays: LeaderLog | None
    old_epochs_replicated: "asyncio.Future[None]"
    """Done when everything of older epochs is replicated in every log. Only then may a service
    answer from the logs."""

    @property
    def config(self) -> TopicConfig: ...

    @property
    def active(self) -> bool:
        """Whether the epoch is not over."""

    def watch_readable(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the high watermark of `data` has moved."""

    def has_enough_replicas(self) -> bool:
        """Report whether the in-sync set can acknowledge a write now."""


class LeaderService(Protocol):
    """Interprets the logs of a partition for one epoch."""

    def stop(self) -> None:
        """End with the epoch. Every waiter gets NotLeader."""

    def scheduled(self, base: int, batch: memoryview) -> None:
        """Note a stamped batch of delayed records that was appended to `delays` at `base`."""
