"""A partition that this node leads, without disk and followers: a log in memory that becomes
replicated after a while, can be cut off from its followers, and be handed to the next leader."""

import asyncio
from collections.abc import Callable, Iterator

from raftq.client.common.errors import DiskFull, LeaderLost, NotLeader
from raftq.client.wire.batch import Batch, decode
from raftq.client.wire.encoder import stamp
from raftq.node.replication.partition_ref import PartitionRef


class MemoryLog:
    """As much of a Log as the owner of one needs."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, bytes]] = []  # base, end, batch
        self.start_offset = 0
        self.end_offset = 0
        self.rolls = 0

    @property
    def size_bytes(self) -> int:
        return sum(len(batch) for _, _, batch in self.rows)

    def batches(self, start: int, end: int | None = None) -> Iterator[Batch]:
        for base, after, batch in self.rows:
            if after > start and (end is None or base < end):
                yield decode(batch)

    def roll(self) -> None:
        self.rolls += 1

    def cut(self, end: int) -> "MemoryLog":
        """A copy that ends there, or with the batch before."""
        copy = MemoryLog()
        copy.start_offset = copy.end_offset = self.start_offset
        copy.rows = [row for row in self.rows if row[1] <= end]
        if copy.rows:
            copy.end_offset = copy.rows[-1][1]
        return copy


class MemoryPartitionLog:
    """A ReplicatedLog."""

    def __init__(self, leadership: "FakeLed", log: MemoryLog, delay: Callable[[], float]) -> None:
        self.log = log
        self.high_watermark = log.end_offset
        self.appends = 0
        self.full = False
        self._leadership = leadership
        self._delay = delay
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def append(self, batch: bytearray) -> int:
        if not self._leadership.active:
            raise NotLeader("the epoch is over")
        if self.full:
            raise DiskFull("no space left")
        self.appends += 1
        base = self.log.end_offset
        stamp(batch, base, self._leadership.epoch)
        end = base + decode(batch).span
        self.log.rows.append((base, end, bytes(batch)))
        self.log.end_offset = end
        self._leadership.loop.call_later(self._delay(), self._log_progress, end)
        return base

    def _log_progress(self, end: int) -> None:
        if self._leadership.active and not self._leadership.cut_off:
            self.high_watermark = max(self.high_watermark, end)
            for after, future in self._waiting:
                if after <= self.high_watermark and not future.done():
                    future.set_result(None)
            self._waiting = [one for one in self._waiting if not one[1].done()]

    def replicated(self, end: int) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = self._leadership.loop.create_future()
        if end <= self.high_watermark:
            future.set_result(None)
        else:
            self._waiting.append((end, future))
        return future

    def fail(self) -> None:
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(LeaderLost("the epoch is over"))
        self._waiting.clear()

    def truncate_prefix(self, offset: int) -> None:
        self.log.start_offset = offset
        self.log.rows = [row for row in self.log.rows if row[0] >= offset]


class FakeLed:
    """A Led."""

    def __init__(
        self,
        number: int = 0,
        epoch: int = 1,
        log: MemoryLog | None = None,
        delay: Callable[[], float] = lambda: 0.001,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.ref = PartitionRef("__groups", 1, number, "")
        self.epoch = epoch
        self.active = True
        self.cut_off = False
        """Nothing is replicated any more, and nobody here knows it."""
        self.enough = True
        self.data = MemoryPartitionLog(self, log or MemoryLog(), delay)
        self.ledger = None
        self.delays = None
        self.old_epochs_replicated: asyncio.Future[None] = self.loop.create_future()
        self._delay = delay

    def watch_readable(self, callback: Callable[[], None]) -> None:
        raise AssertionError("nobody asks for that")

    def has_enough_replicas(self) -> bool:
        return self.enough

    def end(self) -> None:
        """The epoch is over, and this node hears of it."""
        self.active = False
        self.data.fail()

    def successor(self, end: int | None = None) -> "FakeLed":
        """The next leader, which has everything that was replicated, and what is below `end`."""
        known = self.data.high_watermark
        log = self.data.log.cut(self.data.log.end_offset if end is None else max(known, end))
        return FakeLed(self.ref.number, self.epoch + 1, log, self._delay)
