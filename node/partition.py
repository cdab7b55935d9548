"""One replica of a partition with its log: the only writer of it. (Shell.)

Joins the log, the role (replica.py) and the producers' sequences, and knows who waits: produce
requests for the high watermark or a sync, fetches for new records, followers for new batches.
Everything runs on the event loop, per batch; nothing here awaits.

    leader    produce: check, deduplicate, append, hand to followers, answer when `acks` is met
    follower  take: append what the leader handed over; cut where the leader says the logs part

Who leads is decided by the metadata (partitions.py brings it), when the in-sync set changes is
decided by the role and proposed by partitions.py. An acknowledgement of `all` means: every member
of the in-sync set has it, as durable as the topic's fsync policy asks.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from raftq.client.wire.batch import Buffer
from raftq.client.wire.errors import (
    CorruptBatch,
    FencedEpoch,
    NotEnoughReplicas,
    NotLeader,
    OffsetOutOfRange,
    RaftqError,
    RequestTimeout,
    StorageFailed,
)
from raftq.client.wire.messages import EPOCH_ANY, Produce, ProduceReply
from raftq.cluster.topic_config import TopicConfig
from raftq.node.pending import Pending
from raftq.node.replica import Decided, Replica
from raftq.node.storage import producer_files
from raftq.node.storage.incoming import Limits, check_incoming
from raftq.node.storage.log import Log
from raftq.node.storage.producers import Producers
from raftq.node.storage.syncer import Syncer
from raftq.node.tail import Tail
from raftq.node.walk import below, end_of_batches

logger = logging.getLogger(__name__)

TAIL_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Place:
    """Which partition this is, and where its files are."""

    topic: str
    topic_id: int
    number: int
    directory: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"


class Home(Protocol):
    """What a partition needs from the node."""

    loop: asyncio.AbstractEventLoop
    syncer: Syncer

    def touched(self, partition: "Partition") -> None:
        """It has something that time may change: waiting requests, followers behind."""

    def reached(self, partition: "Partition") -> None:
        """A follower's log ends further on now, as durable as the topic asks."""

    def damaged(self, partition: "Partition", error: BaseException) -> None:
        """Part of its log cannot be read."""

    def failed(self, partition: "Partition", error: BaseException) -> None:
        """Its log cannot be written any more."""


class Listener(Protocol):
    """A follower's conversation, told about the partitions it subscribed to."""

    def grown(self, partition: "Partition") -> None: ...
    def readable(self, partition: "Partition") -> None: ...
    def ended(self, partition: "Partition") -> None: ...


class Reader(Protocol):
    """A fetch that waits for more."""

    def more(self) -> None: ...


class Counts:
    """What the replica has done since it was opened, for metrics."""

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


class Partition:
    """See the module's docstring."""

    __slots__ = (
        "_flushing", "_for_all", "_for_sync", "_home", "_limits", "_saved_base", "_syncs",
        "closed", "config", "counts", "listeners", "log", "place", "producers", "readers",
        "replica", "tail",
    )  # fmt: skip

    def __init__(
        self, place: Place, log: Log, producers: Producers, replica: Replica, home: Home
    ) -> None:
        self.place = place
        self.log = log
        self.producers = producers
        self.replica = replica
        self.listeners: dict[Listener, int] = {}  # -> offset up to which it was handed batches
        self.readers: dict[Reader, None] = {}
        self.tail = Tail(TAIL_BYTES_MAX)
        self.counts = Counts()
        self.closed = False
        self._home = home
        self._for_all = Pending()
        self._for_sync = Pending()
        self._flushing = False
        self._saved_base = log.segments.active.base_offset

    def configure(self, config: TopicConfig) -> None:
        """Take on the topic's settings; those of the log's files hold from the next open."""
        self.config = config
        self._syncs = config.fsync == "always"
        self._limits = Limits(value_bytes_max=config.value_bytes_max)

    # Roles

    @property
    def own_end(self) -> int:
        """Up to where this copy counts."""
        return self.log.flushed_offset if self._syncs else self.log.end_offset

    def decide(self, decided: Decided, me: int) -> None:
        """Act on what the metadata says now."""
        replica = self.replica
        now = self._home.loop.time()
        if decided.epoch == replica.epoch:
            newer = decided.version >= replica.decided.version and decided != replica.decided
            if newer and replica.update(decided, now):
                self._readable()
        elif decided.epoch > replica.epoch:
            self._begin(decided, me, now)
            logger.info("partition=%s %s", self.place, replica.describe())
        if replica.role == "leader":
            self._home.touched(self)

    def _begin(self, decided: Decided, me: int, now: float) -> None:
        """A new epoch."""
        replica = self.replica
        led = replica.role == "leader"
        if decided.leader != me:
            replica.follow(decided)
        if led:
            self._stand_down()
        if decided.leader == me:
            replica.lead(decided, self.log.end_offset, self.own_end, now)
            if self._syncs and self.own_end < self.log.end_offset:
                self._flush()
            if replica.advance():
                self._readable()

    def _stand_down(self) -> None:
        """Whoever waits for this leader has to go on elsewhere."""
        error = self.not_leader().with_outcome("unknown")
        self._for_all.fail(error)
        self._for_sync.fail(error)
        self.tail.clear()
        for listener in list(self.listeners):
            listener.ended(self)
        self.listeners.clear()
        self._wake_readers()

    def not_leader(self) -> NotLeader:
        decided = self.replica.decided
        text = f"node {decided.leader} leads {self.place}"
        if decided.leader is None:
            text = f"nobody leads {self.place} at the moment"
        error = NotLeader(f"{text}, in epoch {decided.epoch}")
        return error.with_details(leader=decided.leader, epoch=decided.epoch)

    def check_leader(self, epoch: int) -> None:
        """Raise unless this is the leader and the caller knows that."""
        replica = self.replica
        if replica.role != "leader":
            raise self.not_leader()
        if epoch not in (EPOCH_ANY, replica.epoch):
            error = FencedEpoch(f"{self.place} is in epoch {replica.epoch}, not {epoch}")
            raise error.with_details(epoch=replica.epoch)

    # The leader writes

    def produce(
        self, message: Produce, raw: memoryview
    ) -> "ProduceReply | asyncio.Future[ProduceReply]":
        """Append the batches and answer as `acks` asks."""
        self.check_leader(message.epoch)
        replica = self.replica
        acks = message.acks
        if acks == "all" and not replica.may_accept():
            decided = replica.decided
            raise NotEnoughReplicas(
                f"{self.place} has too few live replicas in sync: isr {list(decided.isr)}, "
                f"min_insync {decided.min_insync}"
            )
        bases, end = self._append(raw)
        reply = ProduceReply(tuple(bases), replica.epoch)
        if acks == "all":
            if end <= replica.high_watermark:
                return reply
            return self._wait(self._for_all, end, message.timeout_ms, reply)
        if acks == "leader" and self._syncs and end > self.log.flushed_offset:
            return self._wait(self._for_sync, end, message.timeout_ms, reply)
        return reply

    def _wait(
        self, pending: Pending, end: int, timeout_ms: int, reply: ProduceReply
    ) -> "asyncio.Future[ProduceReply]":
        self._home.touched(self)
        return pending.add(end, self._home.loop.time() + timeout_ms / 1000, reply)

    def _append(self, raw: memoryview) -> tuple[list[int], int]:
        """Base offsets of the batches and the end of the last; repeated ones are not appended."""
        batches = check_incoming(raw, self._limits)
        log, producers = self.log, self.producers
        before = log.end_offset
        began = self._home.loop.time()
        epoch = self.replica.epoch
        keep = bool(self.listeners)
        bases, last = [], 0
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
        except StorageFailed as error:
            self._home.failed(self, error)
            raise
        except RaftqError as error:
            if bases:
                error.outcome = "unknown"  # the batches before it are in the log
            raise
        finally:
            if log.end_offset > before:
                self._grown(before, len(raw), began)
        return bases, last

    def _grown(self, before: int, size: int, began: float) -> None:
        log, counts = self.log, self.counts
        now = self._home.loop.time()
        counts.appended_records += log.end_offset - before
        counts.appended_bytes += size
        counts.appends += 1
        counts.append_s += now - began
        moved = self.replica.appended(before, self.own_end, now)
        for listener in self.listeners:
            listener.grown(self)
        if self._syncs:
            self._flush()
        if moved:
            self._readable()
        if self.listeners or len(self.replica.followers):
            self._home.touched(self)
        if log.segments.active.base_offset != self._saved_base:
            self._rolled()

    def _rolled(self) -> None:
        """A segment was sealed: have it synced soon, so that not too many wait for that."""
        self.save_producers()
        self._flush()

    def save_producers(self) -> None:
        """Keep the sequences beside the log, so that an open reads only what came after."""
        self._saved_base = self.log.segments.active.base_offset
        self.producers.end_offset = self.log.end_offset
        producer_files.save(self.producers, self.log.disk, self.place.directory)

    # Syncs

    def _flush(self) -> None:
        """Ask for a sync of everything so far; one at a time, so that many writes share it."""
        if self._flushing or self.closed:
            return
        self._flushing = True
        self._home.syncer.submit([(self.log, self.log.end_offset)], self._synced)

    def _synced(self, error: RaftqError | None) -> None:
        """Called from the syncer's thread."""
        self._home.loop.call_soon_threadsafe(self._flushed, error)

    def _flushed(self, error: RaftqError | None) -> None:
        self._flushing = False
        if self.closed:
            return
        if error is not None and self.log.failure is not None:
            self._home.failed(self, error)
            return
        flushed = self.log.flushed_offset
        if self.replica.role == "leader":
            self._for_sync.release(flushed)
            if self.replica.flushed(flushed):
                self._readable()
        else:
            self._home.reached(self)
        if flushed < self.log.end_offset:
            self._flush()

    # Who waits

    def _readable(self) -> None:
        """The high watermark moved."""
        self._for_all.release(self.replica.high_watermark)
        for listener in self.listeners:
            listener.readable(self)
        self._wake_readers()

    def _wake_readers(self) -> None:
        if self.readers:
            for reader in list(self.readers):
                reader.more()

    def expire(self, now: float) -> bool:
        """End produce requests whose time is over; whether any still wait."""
        if not self._for_all and not self._for_sync:
            return False
        error = RequestTimeout(
            f"{self.place} has the records, but not enough replicas have them in time"
        )
        self._for_all.expire(now, error)
        self._for_sync.expire(now, error)
        return bool(self._for_all or self._for_sync)

    # Followers of this leader

    @property
    def is_moving(self) -> bool:
        return self.replica.decided.moving

    def damaged(self, error: CorruptBatch) -> None:
        """Some reader met damage."""
        self._home.damaged(self, error)

    def hand_over(self, listener: Listener, bytes_max: int) -> tuple[list[Buffer], int]:
        """The next batches for a follower, from memory or file, and how many bytes they have."""
        offset = self.listeners[listener]
        log = self.log
        if offset >= log.end_offset:
            return [], 0
        found = self.tail.take(offset, bytes_max)
        if found is None:
            data = log.read(offset, bytes_max)
            buffers: list[Buffer] = [data]
            size, end = len(data), end_of_batches(data)
        else:
            buffers, size, end = found
        self.listeners[listener] = end
        self.tail.release(min(self.listeners.values()))
        return buffers, size

    def progressed(self, node: int, incarnation: int, end_offset: int) -> None:
        """A follower's log ends here now."""
        now = self._home.loop.time()
        replica = self.replica
        end_offset = min(end_offset, self.log.end_offset)
        if replica.progressed(node, incarnation, end_offset, self.log.end_offset, now):
            self._readable()
        if node not in replica.decided.isr:
            self._home.touched(self)

    # The follower writes

    def take(self, raw: Buffer, high_watermark: int) -> None:
        """Append what the leader handed over; CorruptBatch when it does not fit here."""
        log, producers = self.log, self.producers
        before = log.end_offset
        if len(raw):
            try:
                facts = log.append_stamped(raw)
            except StorageFailed as error:
                self._home.failed(self, error)
                raise
            for producer_id, producer_epoch, sequence, count, base, timestamp in facts:
                if producer_id >= 0:
                    producers.note(producer_id, producer_epoch, sequence, count, base, timestamp)
            self.counts.appended_records += log.end_offset - before
            self.counts.appended_bytes += len(raw)
            if self._syncs:
                self._flush()
            else:
                self._home.reached(self)
            if log.segments.active.base_offset != self._saved_base:
                self._rolled()
        replica = self.replica
        known = min(high_watermark, log.end_offset)
        if known > replica.high_watermark:
            replica.high_watermark = known

    def cut(self, end_offset: int) -> None:
        """Drop what the leader does not have."""
        replica, log = self.replica, self.log
        level = logging.ERROR if end_offset < replica.high_watermark else logging.WARNING
        logger.log(
            level, "partition=%s truncated from=%d to=%d high_watermark=%d",
            self.place, log.end_offset, end_offset, replica.high_watermark,
        )  # fmt: skip
        log.truncate(end_offset)
        self._rewritten()

    def restart_at(self, start_offset: int) -> None:
        """Drop everything: the leader begins after where this log ends."""
        logger.warning(
            "partition=%s begins anew at=%d was=[%d,%d)",
            self.place, start_offset, self.log.start_offset, self.log.end_offset,
        )  # fmt: skip
        # First: a snapshot at the very offset where the log begins anew would be believed.
        producer_files.remove_above(self.log.disk, self.place.directory, -1)
        self.log.reset(start_offset)
        self._rewritten()

    def _rewritten(self) -> None:
        self.counts.truncations += 1
        replica = self.replica
        replica.high_watermark = min(replica.high_watermark, self.log.end_offset)
        self.producers = known_producers(self.log, self.place.directory)

    # Reads

    def read(self, offset: int, bytes_max: int) -> Buffer:
        """Raw batches below the high watermark; empty when there are none from here."""
        log, high_watermark = self.log, self.replica.high_watermark
        if offset >= high_watermark:
            if offset > log.end_offset:
                raise OffsetOutOfRange(
                    f"{self.place} ends at {high_watermark}, before offset {offset}"
                )
            return b""
        data: Buffer = log.read(offset, bytes_max)
        if high_watermark < log.end_offset:
            data = below(data, high_watermark)
        self.counts.read_bytes += len(data)
        return data

    def close(self, clean: bool = True) -> None:
        """Let go of everyone and close the files."""
        if self.closed:
            return
        self.closed = True
        self._stand_down()
        self._home.syncer.remove(self.log)
        if clean and self.log.failure is None:
            self.save_producers()
        self.log.close(clean=clean)


def known_producers(log: Log, directory: str) -> Producers:
    """The producers' sequences as of the log's end, from the newest snapshot and the log."""
    producers = producer_files.load_newest(log.disk, directory, log.end_offset)
    producer_files.rebuild(log, producers)
    return producers
