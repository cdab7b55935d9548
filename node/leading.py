"""What the owner of a led partition's logs sees of it. (Interface.)

A partition has up to three replicated logs, its strands: `data` always, `ledger` and `delays` once
its topic is used as a queue. While a node leads a partition, a service owns what the other two
mean: it is made when the epoch begins and stopped when it ends, and everything it remembers beyond
the logs ends with it.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from raftq.cluster.topic_config import TopicConfig
from raftq.node.place import Place
from raftq.node.storage.log import Log


class ReplicatedLog(Protocol):
    """One strand, as the leader of one epoch sees it."""

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


class Led(Protocol):
    """A partition while this node leads it, in one epoch."""

    place: Place
    epoch: int
    loop: asyncio.AbstractEventLoop
    data: ReplicatedLog
    ledger: ReplicatedLog | None
    delays: ReplicatedLog | None
    settled: "asyncio.Future[None]"
    """Done when everything of older epochs is replicated in every strand: only then may be told
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


class Service(Protocol):
    """Owns the meaning of a led partition's logs for one epoch."""

    def stop(self) -> None:
        """The epoch is over. Whoever waits gets NotLeader."""

    def scheduled(self, base: int, batch: memoryview) -> None:
        """The partition has appended a batch of delayed records to `delays`, stamped, at `base`."""
