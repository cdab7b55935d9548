"""One replicated log of a partition, and the only writer of its files. (Shell.)

    0 data     what producers wrote; always there
    1 ledger   what was done with it: leases, settlements, stored offsets
    2 delays   what producers wrote to be delivered later

A PartitionLog joins a log on disk, the producers' sequences in it and the progress of its copies
(replica.py). It knows who waits: requests wait for the high watermark or for a sync, readers wait
for new records, followers wait for new batches. Everything runs on the event loop, once per batch;
nothing here awaits. The role belongs to the partition, not to its logs.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from raftq.client.common.errors import (
    CorruptBatch,
    DiskFull,
    OffsetOutOfRange,
    RaftqError,
    RequestTimeout,
    StorageFailed,
)
from raftq.client.common.types import Buffer
from raftq.client.wire.headers import (
    FACTS,
    PRODUCER,
    PRODUCER_AT,
    REST_AT,
    clip_below,
    end_offset_of,
)
from raftq.cluster.metadata.topic_config import TopicConfig
from raftq.node.replication.offset_waiters import OffsetWaiters
from raftq.node.replication.recent_batches import RecentBatches
from raftq.node.replication.replica import LogProgress
from raftq.node.storage import producer_files
from raftq.node.storage.incoming import DEFAULT_LIMITS, Limits, check_incoming
from raftq.node.storage.log import Log
from raftq.node.storage.producers import PRODUCERS_MAX, Producers
from raftq.node.storage.reserve import Reserve
from raftq.node.storage.syncer import Syncer

if TYPE_CHECKING:
    from raftq.node.replication.follower import LeaderFetcher
    from raftq.node.replication.leader import FollowerSession
    from raftq.node.replication.partition import Partition

logger = logging.getLogger(__name__)

DATA, LEDGER, DELAYS = range(3)
NAMES = ("data", "ledger", "delays")
TAIL_BYTES_MAX = 4 * 1024 * 1024

T = TypeVar("T")
LogKey = tuple[int, int, int]
"""(topic id, partition number, log number)"""


class ReplicaHost(Protocol):
    """What a partition and its logs need from the node."""

    loop: asyncio.AbstractEventLoop
    syncer: Syncer

    def mark_active(self, partition: "Partition") -> None:
        """Look at this partition at every tick: it has waiting requests, or followers that are
        behind."""

    def damaged(self, partition_log: "PartitionLog", error: BaseException) -> None:
        """Report that a part of this log cannot be read."""

    def disk_full(self) -> None:
        """Report that a write found no room on the disk."""

    def failed(self, partition: "Partition", error: BaseException) -> None:
        """Report that the partition cannot go on: a log refuses writes, or its service is
        broken."""


class ReadWaiter(Protocol):
    """A reader that waits for more records."""

    def more(self) -> None: ...


class LogCounts:
    """Counters of one log since it was opened, for metrics."""

    __slots__ = (
        "append_s", "appended_bytes", "appended_records", "appends", "duplicates", "read_bytes",
        "truncations",
    )  # fmt: skip

    def __init__(self) -> None:
        self.appended_bytes = 0
        self.appended_records = 0
        self.appends = 0
        self.append_s = 0.0
        self.duplicates = 0
        self.read_bytes = 0
        self.truncations = 0


class PartitionLog:
    """One replicated log of a partition, in whichever role its node has."""

    __slots__ = (
        "_current", "_directory", "_flushing", "_front", "_home", "_limits", "_owed", "_saved_base",
        "_syncs", "counts", "fetcher", "for_all", "for_sync", "key", "listeners", "log", "name",
        "number", "partition", "producers", "progress", "readers", "replica", "reserve", "tail",
    )  # fmt: skip

    def __init__(
        self,
        partition: "Partition",
        log: Log,
        producers: Producers,
        progress: LogProgress,
        home: ReplicaHost,
    ) -> None:
        ref, number = partition.ref, len(partition.logs)
        self.partition = partition
        self.replica = partition.replica
        self.number = number
        self.key: LogKey = (ref.topic_id, ref.number, number)
        self.name = str(ref) if number == DATA else f"{ref}/{NAMES[number]}"
        self.log = log
        self.producers = producers
        self.progress = progress
        # What was readable before a restart still is: every possible leader has it.
        progress.high_watermark = max(progress.high_watermark, log.readable_offset)
        progress.on_advance = self.on_high_watermark
        self.listeners: dict[FollowerSession, int] = {}
        """The session of each follower -> the offset up to which it was handed batches."""
        self.readers: dict[ReadWaiter, None] = {}
        self.fetcher: LeaderFetcher | None = None
        """Follows the leader of this log while another node leads, or None."""
        self.for_all = OffsetWaiters()
        self.for_sync = OffsetWaiters()
        self.tail = RecentBatches(TAIL_BYTES_MAX)
        self.counts = LogCounts()
        self.reserve: Reserve | None = None
        self._home = home
        self._directory = producers_directory(ref.directory, number)
        self._syncs: bool | None = None
        self._flushing = False
        self._front: tuple[int, int] | None = None
        self._saved_base = log.segments.active.base_offset
        # Of a follower: whether it keeps up with what is readable, and up to where it has to sync
        # what it copied when it did not.
        self._current = False
        self._owed = 0

    def __str__(self) -> str:
        return self.name

    def configure(self, config: TopicConfig) -> None:
        before, self._syncs = self._syncs, config.fsync == "always"
        self._limits = Limits(value_bytes_max=config.value_bytes_max, delayed=self.number == DELAYS)
        if before is not None and before != self._syncs:
            # This copy counts up to another offset now. A follower does not withdraw an end that it
            # has reported: that end was right under the old setting.
            if self.replica.role == "leader" or not self._syncs:
                self._on_own_end()
            if self.own_end < self.log.end_offset:
                self.flush()

    @property
    def own_end(self) -> int:
        """The offset up to which this copy counts.

        What was readable before this copy took it counts only once it is synced, whatever the
        topic asks for. A power cut may cost a member of the isr what was written in the last
        moment. It must not cost what was copied in the last moment.
        """
        flushed = self.log.flushed_offset
        return flushed if self._syncs or flushed < self._owed else self.log.end_offset

    # The leader writes

    def append_incoming(self, raw: memoryview, bases: list[int], copies: bool = False) -> int:
        """Append a client's batches, except repeated ones, and return the end of the last.

        Adds the base offsets to `bases`, so that a caller that gets an error knows how far the
        write got. `copies` of records that were accepted earlier are accepted whatever the topic's
        limits are now. Without any batch, the result is the end of the log: a client asks whether a
        batch would be accepted.
        """
        limits = DEFAULT_LIMITS if copies else self._limits
        batches = check_incoming(raw, limits) if len(raw) else []
        self._check_room()
        log, producers = self.log, self.producers
        before = log.end_offset
        began = self._home.loop.time()
        epoch = self.replica.epoch
        keep = bool(self.listeners)
        last = 0 if batches else before
        try:
            for start, length, producer_id, producer_epoch, sequence, count, timestamp in batches:
                if producer_id >= 0:
                    known = producers.check(producer_id, producer_epoch, sequence, count)
                    if known is not None:
                        bases.append(known)
                        last = max(last, known + count)
                        self.counts.duplicates += 1
                        continue
                batch = raw[start : start + length]
                base = log.append(batch, epoch)
                if producer_id >= 0:
                    producers.note(producer_id, producer_epoch, sequence, count, base, timestamp)
                if keep:
                    self.tail.put(base, log.end_offset, batch)
                bases.append(base)
                last = max(last, base + count)
        except RaftqError as error:
            self._not_written(error, bool(bases))
            raise
        finally:
            if log.end_offset > before:
                self._on_append(before, len(raw), began)
        return last

    def _not_written(self, error: RaftqError, others_were: bool) -> None:
        if isinstance(error, StorageFailed):
            self._home.failed(self.partition, error)
        elif others_were:
            error.outcome = "unknown"
        if isinstance(error, DiskFull):
            self._home.disk_full()

    def append(self, batch: bytearray) -> int:
        """Append a batch of this node and return its base offset. The log owns the buffer
        afterwards."""
        log = self.log
        before = log.end_offset
        began = self._home.loop.time()
        self._check_room()
        epoch = self.replica.epoch
        try:
            base = log.append(batch, epoch)
        except (DiskFull, StorageFailed) as error:
            base = self._write_again(error, lambda: log.append(batch, epoch))
        producer_id, producer_epoch, sequence = PRODUCER.unpack_from(batch, PRODUCER_AT)
        if producer_id >= 0:
            count = log.end_offset - base
            *_, timestamp = FACTS.unpack_from(batch, REST_AT)
            self.producers.note(producer_id, producer_epoch, sequence, count, base, timestamp)
        if self.listeners:
            self.tail.put(base, log.end_offset, batch)
        self._on_append(before, len(batch), began)
        return base

    def _check_room(self) -> None:
        """Raise DiskFull when the rest of the disk is reserved for ledgers."""
        if self.reserve is not None and self.number != LEDGER:
            try:
                self.reserve.check(self._home.loop.time())
            except DiskFull:
                self._home.disk_full()
                raise

    def _write_again(self, error: DiskFull | StorageFailed, write: Callable[[], T]) -> T:
        """Try a failed write again: a ledger may use the room that is reserved for it."""
        if isinstance(error, DiskFull):
            self._home.disk_full()
        try:
            if self.reserve is None or self.number != LEDGER or isinstance(error, StorageFailed):
                raise error
            if not self.reserve.give_up():
                raise error
            return write()
        except StorageFailed as failure:
            self._home.failed(self.partition, failure)
            raise

    def _on_append(self, before: int, size: int, began: float) -> None:
        log, counts = self.log, self.counts
        now = self._home.loop.time()
        counts.appended_records += log.end_offset - before
        counts.appended_bytes += size
        counts.appends += 1
        counts.append_s += now - began
        progress = self.progress
        progress.on_append(log.end_offset, self.own_end, now)
        for listener in self.listeners:
            listener.on_append(self)
        if self._syncs:
            self.flush()
        if progress.followers:
            self._home.mark_active(self.partition)
        if log.segments.active.base_offset != self._saved_base:
            self._rolled()

    def _rolled(self) -> None:
        """Sync the segment that was sealed soon, so that not too many wait for a sync."""
        self.save_producers()
        self.flush()

    def save_producers(self) -> None:
        """Save the sequences beside the log, so that an open reads only what came after."""
        self._saved_base = self.log.segments.active.base_offset
        self.producers.end_offset = self.log.end_offset
        producer_files.save(self.producers, self.log.disk, self._directory)

    def wait_for_all(self, end: int, timeout_ms: int, reply: T) -> "asyncio.Future[T]":
        """Return the reply once every member of the in-sync set has everything below `end`."""
        self._home.mark_active(self.partition)
        return self.for_all.add(end, self._home.loop.time() + timeout_ms / 1000, reply)

    def wait_for_sync(self, end: int, timeout_ms: int, reply: T) -> "asyncio.Future[T] | None":
        """Return the reply once `end` is as durable here as the topic asks; None if it is
        already."""
        if not self._syncs or end <= self.log.flushed_offset:
            return None
        self._home.mark_active(self.partition)
        return self.for_sync.add(end, self._home.loop.time() + timeout_ms / 1000, reply)

    # Syncs

    def flush(self) -> None:
        """Request a sync of everything so far. Only one runs at a time, so many writes share it."""
        if self._flushing or self.partition.closed:
            return
        self._flushing = True
        self._home.syncer.submit([(self.log, self.log.end_offset)], self._synced)

    def _synced(self, error: RaftqError | None) -> None:
        """Called from the syncer's thread."""
        self._home.loop.call_soon_threadsafe(self._flushed, error)

    def _flushed(self, error: RaftqError | None) -> None:
        self._flushing = False
        if self.partition.closed:
            return
        if error is not None and self.log.failure is not None:
            self._home.failed(self.partition, error)
            return
        flushed = self.log.flushed_offset
        self._on_own_end()
        if self._front is not None and flushed >= self._front[1]:
            self._drop_front(self._front[0])
        if flushed < self.log.end_offset and (
            self._syncs or self._front is not None or flushed < self._saved_base or self._must_pay
        ):
            self.flush()

    @property
    def _must_pay(self) -> bool:
        """Whether what was copied must be synced now. While more is copied, the sync can wait."""
        is_copying = self.replica.role == "follower" and not self._current
        return self.log.flushed_offset < self._owed and not is_copying

    def _on_own_end(self) -> None:
        """Note that this copy counts up to `own_end` now.

        The topic's fsync setting may have changed since the sync began, so a follower reports its
        end in any case.
        """
        if self.replica.role == "leader":
            self.for_sync.release(self.own_end)
            self.progress.on_own_end(self.own_end)
        else:
            self._report_end()

    def _report_end(self) -> None:
        """Let the leader know that the log of this follower ends further on."""
        if self.fetcher is not None:
            self.fetcher.report_end(self)

    # The beginning of the log

    def drop_below(self, offset: int) -> None:
        """Drop what is below the offset, once everything that is readable now is on disk.

        What replaces the dropped records is then on disk too. The followers of a leader do the
        same.
        """
        progress = self.progress
        assert offset <= progress.high_watermark, f"{self}: {offset} is not readable yet"
        if offset > self.log.start_offset and (self._front is None or offset > self._front[0]):
            self._front = (offset, progress.high_watermark)
            self.flush()

    def _drop_front(self, offset: int) -> None:
        self._front = None
        try:
            freed = self.log.truncate_prefix(offset)
        except (DiskFull, StorageFailed) as error:
            self._not_written(error, False)
            return
        logger.info("partition=%s start_offset=%d freed=%d", self, offset, freed)
        for listener in self.listeners:
            listener.on_high_watermark(self)

    # Who waits

    def on_high_watermark(self) -> None:
        """Pass on that the high watermark has moved."""
        high_watermark = self.progress.high_watermark
        self.log.set_readable(high_watermark)
        self.for_all.release(high_watermark)
        for listener in self.listeners:
            listener.on_high_watermark(self)
        if self.readers:
            self.wake_readers()

    def wake_readers(self) -> None:
        for reader in list(self.readers):
            reader.more()

    def expire(self, now: float) -> bool:
        """End requests whose time is over, and report whether any still wait."""
        if not self.for_all and not self.for_sync:
            return False
        error = RequestTimeout(f"{self} has the records, but not enough replicas have them in time")
        self.for_all.expire(now, error)
        self.for_sync.expire(now, error)
        return bool(self.for_all or self.for_sync)

    def stand_down(self, error: RaftqError) -> None:
        """End everything that waits for this leader: its clients must go on elsewhere."""
        self.for_all.fail(error)
        self.for_sync.fail(error)
        self.tail.clear()
        for listener in list(self.listeners):
            listener.end_subscription(self)
        self.listeners.clear()
        self.wake_readers()

    # Followers of this leader

    def end_outdated_subscriptions(self) -> None:
        """End the subscriptions of nodes that are no longer replicas, or became replicas again."""
        for listener in list(self.listeners):
            if not listener.accepts_reports(self):
                listener.end_subscription(self)

    def damaged(self, error: CorruptBatch) -> None:
        """Report damage that a reader has found."""
        self._home.damaged(self, error)

    def hand_over(self, listener: "FollowerSession", bytes_max: int) -> tuple[list[Buffer], int]:
        """Return the next batches for a follower, from memory or file, and their size in bytes."""
        offset = self.listeners[listener]
        log = self.log
        if offset >= log.end_offset:
            return [], 0
        found = self.tail.take(offset, bytes_max)
        if found is None:
            data = log.read(offset, bytes_max)
            buffers: list[Buffer] = [data]
            size, end = len(data), end_offset_of(data)
        else:
            buffers, size, end = found
        self.listeners[listener] = end
        self.tail.release(min(self.listeners.values()))
        return buffers, size

    def on_progress(self, node: int, incarnation: int, end_offset: int) -> None:
        """Note where a follower's log ends."""
        end_offset = min(end_offset, self.log.end_offset)
        self.progress.on_progress(node, incarnation, end_offset, self._home.loop.time())
        if node not in self.replica.decided.isr:
            self._home.mark_active(self.partition)

    # The follower writes

    def subscribes(self) -> None:
        """Assume that readable records are missing here until batches show otherwise."""
        self._current = False

    def take(self, raw: Buffer, high_watermark: int, start_offset: int) -> None:
        """Append what the leader handed over. Raises CorruptBatch when it does not fit here."""
        log, producers = self.log, self.producers
        before = log.end_offset
        if len(raw):
            try:
                facts = log.append_stamped(raw)
            except (DiskFull, StorageFailed) as error:
                facts = self._write_again(error, lambda: log.append_stamped(raw))
            for producer_id, producer_epoch, sequence, count, base, timestamp in facts:
                if producer_id >= 0:
                    producers.note(producer_id, producer_epoch, sequence, count, base, timestamp)
            self.counts.appended_records += log.end_offset - before
            self.counts.appended_bytes += len(raw)
            self._copied(before, high_watermark)
            if self._syncs or self._must_pay:
                self.flush()
            else:
                self._report_end()
            if log.segments.active.base_offset != self._saved_base:
                self._rolled()
        progress = self.progress
        known = min(high_watermark, log.end_offset)
        if known > progress.high_watermark:
            progress.high_watermark = known
            log.set_readable(known)
        # The readable records must be here first: they replace what the leader has dropped.
        if start_offset > log.start_offset and start_offset <= high_watermark <= log.end_offset:
            self.drop_below(start_offset)

    def _copied(self, before: int, high_watermark: int) -> None:
        """Note what has to be synced after a copy. The log ended at `before`, and everything below
        `high_watermark` was readable.

        A member of the isr lacks nothing readable. A follower that lacked some of it must sync what
        it copied. Once it keeps up it need not: otherwise it would be a sync behind for as long as
        there are writers.
        """
        end = self.log.end_offset
        if not self._current or end < high_watermark:
            if before < high_watermark:
                self._owed = end
            self._current = end >= high_watermark

    def cut(self, end_offset: int) -> None:
        """Drop the end of the log that the leader does not have."""
        high_watermark, log = self.progress.high_watermark, self.log
        level = logging.ERROR if end_offset < high_watermark else logging.WARNING
        logger.log(
            level, "partition=%s truncated from=%d to=%d high_watermark=%d",
            self, log.end_offset, end_offset, high_watermark,
        )  # fmt: skip
        log.truncate(end_offset)
        self._rewritten()

    def restart_at(self, start_offset: int) -> None:
        """Drop everything: the log of the leader begins after the end of this one."""
        logger.warning(
            "partition=%s restarts at=%d was=[%d,%d)",
            self, start_offset, self.log.start_offset, self.log.end_offset,
        )  # fmt: skip
        # Remove the snapshots first: one at exactly the new start would be trusted.
        producer_files.remove_above(self.log.disk, self._directory, -1)
        self.log.reset(start_offset)
        self._rewritten()

    def _rewritten(self) -> None:
        self.counts.truncations += 1
        self._front = None
        progress = self.progress
        progress.high_watermark = min(progress.high_watermark, self.log.end_offset)
        self._owed = min(self._owed, self.log.end_offset)
        self.producers = known_producers(self.log, self._directory, self.producers.producers_max)

    # Reads

    def read(self, offset: int, bytes_max: int) -> Buffer:
        """Return raw batches below the high watermark; empty when there are none from `offset`
        on."""
        log, high_watermark = self.log, self.progress.high_watermark
        if offset >= high_watermark:
            if offset > log.end_offset:
                raise OffsetOutOfRange(f"{self} ends at {high_watermark}, before offset {offset}")
            return b""
        data: Buffer = log.read(offset, bytes_max)
        if high_watermark < log.end_offset:
            data = clip_below(data, high_watermark)
        self.counts.read_bytes += len(data)
        return data

    def close(self, clean: bool) -> None:
        self._home.syncer.remove(self.log)
        if clean and self.log.failure is None:
            self.save_producers()
        self.log.close(clean=clean)


def producers_directory(replica: str, number: int) -> str:
    """Return the directory of the producer snapshots of a log."""
    return replica if number == DATA else f"{replica}/{NAMES[number]}"


def known_producers(log: Log, directory: str, producers_max: int = PRODUCERS_MAX) -> Producers:
    """Return the producers' sequences at the end of the log, from the newest snapshot and the
    log."""
    producers = producer_files.load_newest(log.disk, directory, log.end_offset, producers_max)
    producer_files.rebuild(log, producers)
    return producers
