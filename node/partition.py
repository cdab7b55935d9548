"""One replica of a partition: its logs and its role. (Shell.)

Joins the strands (strand.py) and the role that they share (replica.py), and answers producers.
Everything runs on the event loop, per batch; nothing here awaits.

    leader    produce: check, deduplicate, append, hand to followers, answer when `acks` is met
    follower  appends what the leader handed over; cuts where the leader says the logs part

Who leads is decided by the metadata (partitions.py brings it), when the in-sync set changes is
decided by the role and proposed by partitions.py. An acknowledgement of `all` means: every member
of the in-sync set has it, as durable as the topic's fsync policy asks.

While it leads, a service may own what the strands mean (leading.py). It ends with the epoch.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from raftq.client.wire.batch import Buffer
from raftq.client.wire.errors import (
    FencedEpoch,
    InvalidArgument,
    LeaderLost,
    NotEnoughReplicas,
    NotLeader,
    StorageError,
    StorageFailed,
)
from raftq.client.wire.messages import EPOCH_ANY, Produce, ProduceReply
from raftq.cluster.topic_config import TopicConfig
from raftq.node.place import Place
from raftq.node.replica import Decided, IsrChange, Replica
from raftq.node.storage.log import Log
from raftq.node.storage.producers import Producers
from raftq.node.strand import DELAYS, LEDGER, NAMES, Home, Reader, Strand
from raftq.node.walk import each_batch

if TYPE_CHECKING:
    from raftq.node.leading import Service
    from raftq.node.led import LedPartition

logger = logging.getLogger(__name__)

__all__ = ["Home", "Partition", "Place", "Reader"]


class Partition:
    """See the module's docstring. `data` is always there; the other strands are opened later, both
    at once, when the topic is a queue."""

    __slots__ = (
        "_home", "closed", "config", "counts", "data", "led", "log", "place", "readers", "replica",
        "service", "strands",
    )  # fmt: skip

    def __init__(
        self, place: Place, log: Log, producers: Producers, replica: Replica, home: Home
    ) -> None:
        self.place = place
        self.replica = replica
        self.closed = False
        self.service: Service | None = None
        """Owns what the strands mean, while this node leads; None: nobody does."""
        self.led: LedPartition | None = None
        self._home = home
        self.strands: list[Strand] = []
        self.data = Strand(self, log, producers, replica.data, home)
        self.strands.append(self.data)
        # Of the data.
        self.log = log
        self.counts = self.data.counts
        self.readers = self.data.readers

    def configure(self, config: TopicConfig) -> None:
        """Take on the topic's settings; those of the log's files hold from the next open."""
        self.config = config
        for strand in self.strands:
            strand.configure(config)

    # Strands

    @property
    def is_queue(self) -> bool:
        """Whether all strands are open."""
        return len(self.strands) == len(NAMES)

    @property
    def ledger(self) -> Strand | None:
        return self.strand(LEDGER)

    @property
    def delays(self) -> Strand | None:
        return self.strand(DELAYS)

    def strand(self, number: int) -> Strand | None:
        """None while it is not open."""
        strands = self.strands
        return strands[number] if number < len(strands) else None

    def open_strand(self, log: Log, producers: Producers) -> Strand:
        """There is one more strand from now on, whatever the role."""
        own_end = log.flushed_offset if self.config.fsync == "always" else log.end_offset
        reach = self.replica.open_strand(log.end_offset, own_end, self._home.loop.time())
        strand = Strand(self, log, producers, reach, self._home)
        strand.configure(self.config)
        self.strands.append(strand)
        if own_end < log.end_offset:
            strand.flush()
        return strand

    # Roles

    def decide(self, decided: Decided, me: int) -> None:
        """Act on what the metadata says now."""
        replica = self.replica
        now = self._home.loop.time()
        if decided.epoch == replica.epoch:
            if decided.version >= replica.decided.version and decided != replica.decided:
                moved = replica.update(decided, now)
                for strand in self.strands:
                    strand.end_disbelieved()
                self._moved(moved)
        elif decided.epoch > replica.epoch:
            self._begin(decided, me, now)
            logger.info("partition=%s %s", self.place, replica.describe())
        if replica.role == "leader":
            self._home.touched(self)

    def answered(self, change: IsrChange, version: int) -> None:
        """See Replica."""
        self._moved(self.replica.answered(change, version))

    def _moved(self, numbers: list[int]) -> None:
        for number in numbers:
            self.strands[number].moved()

    def _begin(self, decided: Decided, me: int, now: float) -> None:
        """A new epoch."""
        replica = self.replica
        led = replica.role == "leader"
        if decided.leader != me:
            replica.follow(decided)
        if led:
            self._stand_down()
        if decided.leader == me:
            ends = [(one.log.end_offset, one.own_end) for one in self.strands]
            replica.lead(decided, ends, now)
            for strand, (log_end, own_end) in zip(self.strands, ends, strict=True):
                if own_end < log_end:
                    strand.flush()
            self._moved(replica.advance())

    def _stand_down(self) -> None:
        """Whoever waits for this leader has to go on elsewhere."""
        error = self.leader_lost()
        led, service = self.led, self.service
        self.led = self.service = None
        if led is not None:
            led.end(error)
        for strand in self.strands:
            strand.stand_down(error)
        if service is not None:
            try:
                service.stop()
            except Exception as error:
                self._home.failed(self, error)

    def not_leader(self) -> NotLeader:
        decided = self.replica.decided
        text = f"node {decided.leader} leads {self.place}"
        if decided.leader is None:
            text = f"nobody leads {self.place} at the moment"
        error = NotLeader(f"{text}, in epoch {decided.epoch}")
        return error.with_details(leader=decided.leader, epoch=decided.epoch)

    def leader_lost(self) -> LeaderLost:
        """For whoever waits: what was written here may have been replicated or not."""
        error = self.not_leader()
        return LeaderLost(str(error)).with_details(**error.details)

    @property
    def is_settled(self) -> bool:
        """Whether all of older epochs is replicated, in every strand; of a leader."""
        return all(one.reach.settled for one in self.strands)

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
        bases: list[int] = []
        try:
            if message.delayed:
                strand, end = self._append_delayed(raw, bases)
            else:
                strand = self.data
                end = strand.append_incoming(raw, bases, message.copies)
        except StorageFailed as error:
            # This node ends of it, and another one leads. A producer goes on there; what is known
            # of its sequences tells whether anything of this was written.
            raise LeaderLost(f"the disk of the leader of {self.place} failed: {error}") from error
        reply = ProduceReply(tuple(bases), replica.epoch)
        if acks == "all":
            if end <= strand.reach.high_watermark:
                return reply
            return strand.wait_for_all(end, message.timeout_ms, reply)
        if acks == "leader":
            return strand.wait_for_sync(end, message.timeout_ms, reply) or reply
        return reply

    def _append_delayed(self, raw: memoryview, bases: list[int]) -> tuple[Strand, int]:
        """The service hears of every batch that was written, whatever became of those after it."""
        delays, service = self.delays, self.service
        if delays is None:
            raise InvalidArgument(f"{self.place} is no queue and keeps no delayed records")
        before = delays.log.end_offset
        try:
            return delays, delays.append_incoming(raw, bases)
        finally:
            if service is not None:
                for base, batch in zip(bases, each_batch(raw), strict=False):
                    if base >= before:
                        self._tell_scheduled(service, base, batch)

    def _tell_scheduled(self, service: "Service", base: int, batch: memoryview) -> None:
        try:
            service.scheduled(base, batch)
        except Exception as error:
            # It would not know of these records until another epoch begins.
            self._home.failed(self, error)

    def expire(self, now: float) -> bool:
        """End produce requests whose time is over; whether any still wait."""
        waits = False
        for strand in self.strands:
            waits = strand.expire(now) or waits
        return waits

    @property
    def is_moving(self) -> bool:
        return self.replica.decided.moving

    # Reads

    def read(self, offset: int, bytes_max: int) -> Buffer:
        """Raw batches of the data below its high watermark; empty when there are none from here."""
        return self.data.read(offset, bytes_max)

    def close(self, clean: bool = True) -> None:
        """Let go of everyone and close the files; all of them, whatever one of them raises."""
        if self.closed:
            return
        self.closed = True
        self.replica.close()
        self._stand_down()
        failure: StorageError | None = None
        for strand in self.strands:
            try:
                strand.close(clean)
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure
