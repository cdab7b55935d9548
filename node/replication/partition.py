"""One replica of a partition: its logs and its role. (Shell.)

It joins the logs (partition_log.py) and the role that they share (replica.py), and answers
producers. Everything runs on the event loop, once per batch; nothing here awaits.

    leader    produce: check, deduplicate, append, hand to followers, answer when `acks` is met
    follower  appends what the leader handed over; cuts its log where it differs from the leader's

The metadata decides who leads, and partitions.py brings those decisions here. The role decides when
the in-sync set should change, and partitions.py proposes it. An acknowledgement of `all` means that
every member of the in-sync set has the records, as durable as the topic's fsync policy asks.

While this node leads, a service may interpret the ledger and delays logs (leader_log.py). It ends
with the epoch.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from raftq.client.common.errors import (
    FencedEpoch,
    InvalidArgument,
    LeaderLost,
    NotEnoughReplicas,
    NotLeader,
    StorageError,
    StorageFailed,
)
from raftq.client.wire.headers import iter_batches
from raftq.client.wire.messages import EPOCH_ANY, Produce, ProduceReply
from raftq.cluster.metadata.topic_config import TopicConfig
from raftq.node.replication.partition_log import (
    DELAYS,
    LEDGER,
    NAMES,
    PartitionLog,
    ReadWaiter,
    ReplicaHost,
)
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.replication.replica import Decided, Replica
from raftq.node.storage.log import Log
from raftq.node.storage.producers import Producers

if TYPE_CHECKING:
    from raftq.node.replication.leader_log import LeaderService
    from raftq.node.replication.leadership import PartitionLeadership

logger = logging.getLogger(__name__)

__all__ = ["Partition", "PartitionRef", "ReadWaiter", "ReplicaHost"]


class Partition:
    """One replica of a partition on this node.

    `data` always exists. The ledger and delays logs are opened together, when the topic becomes a
    queue.
    """

    __slots__ = (
        "_home",
        "closed",
        "config",
        "data",
        "leadership",
        "log",
        "logs",
        "ref",
        "replica",
        "service",
    )  # fmt: skip

    def __init__(
        self,
        ref: PartitionRef,
        log: Log,
        producers: Producers,
        replica: Replica,
        home: ReplicaHost,
    ) -> None:
        self.ref = ref
        self.replica = replica
        self.closed = False
        self.service: LeaderService | None = None
        """Interprets the ledger and delays logs while this node leads, or None."""
        self.leadership: PartitionLeadership | None = None
        self._home = home
        self.logs: list[PartitionLog] = []
        self.data = PartitionLog(self, log, producers, replica.data, home)
        self.logs.append(self.data)
        self.log = log  # of `data`

    def configure(self, config: TopicConfig) -> None:
        """Apply the settings of the topic. Those of the log files apply from the next open on."""
        self.config = config
        for partition_log in self.logs:
            partition_log.configure(config)

    # Logs

    @property
    def is_queue(self) -> bool:
        """Whether the ledger and delays logs are open, too."""
        return len(self.logs) == len(NAMES)

    @property
    def ledger(self) -> PartitionLog | None:
        return self.log_of(LEDGER)

    @property
    def delays(self) -> PartitionLog | None:
        return self.log_of(DELAYS)

    def log_of(self, number: int) -> PartitionLog | None:
        """Return the log with this number, or None while it is not open."""
        logs = self.logs
        return logs[number] if number < len(logs) else None

    def open_log(self, log: Log, producers: Producers) -> PartitionLog:
        """Add one more log, in whichever role."""
        own_end = log.flushed_offset if self.config.fsync == "always" else log.end_offset
        progress = self.replica.open_log(log.end_offset, own_end, self._home.loop.time())
        partition_log = PartitionLog(self, log, producers, progress, self._home)
        partition_log.configure(self.config)
        self.logs.append(partition_log)
        if own_end < log.end_offset:
            partition_log.flush()
        return partition_log

    # Roles

    def decide(self, decided: Decided, me: int) -> None:
        """Act on what the metadata says now. `me` is the id of this node."""
        replica = self.replica
        now = self._home.loop.time()
        if decided.epoch == replica.epoch:
            if decided.version >= replica.decided.version and decided != replica.decided:
                replica.update(decided, now)
                for partition_log in self.logs:
                    partition_log.end_outdated_subscriptions()
        elif decided.epoch > replica.epoch:
            self._begin(decided, me, now)
            logger.info("partition=%s %s", self.ref, replica.describe())
        if replica.role == "leader":
            self._home.mark_active(self)

    def _begin(self, decided: Decided, me: int, now: float) -> None:
        """Begin a new epoch."""
        replica = self.replica
        leadership = replica.role == "leader"
        if decided.leader != me:
            replica.follow(decided)
        if leadership:
            self._stand_down()
        if decided.leader == me:
            ends = [(log.log.end_offset, log.own_end) for log in self.logs]
            replica.lead(decided, ends, now)
            for partition_log, (log_end, own_end) in zip(self.logs, ends, strict=True):
                if own_end < log_end:
                    partition_log.flush()
            replica.advance()

    def _stand_down(self) -> None:
        """End everything that belongs to the leadership that is over."""
        error = self.leader_lost()
        leadership, service = self.leadership, self.service
        self.leadership = self.service = None
        if leadership is not None:
            leadership.end(error)
        for partition_log in self.logs:
            partition_log.stand_down(error)
        if service is not None:
            try:
                service.stop()
            except Exception as error:
                self._home.failed(self, error)

    def not_leader(self) -> NotLeader:
        decided = self.replica.decided
        text = f"node {decided.leader} leads {self.ref}"
        if decided.leader is None:
            text = f"no node leads {self.ref} at the moment"
        error = NotLeader(f"{text}, in epoch {decided.epoch}")
        return error.with_details(leader=decided.leader, epoch=decided.epoch)

    def leader_lost(self) -> LeaderLost:
        """Make the error for callers that wait: it is unknown whether their records are
        replicated."""
        error = self.not_leader()
        return LeaderLost(str(error)).with_details(**error.details)

    @property
    def old_epochs_replicated(self) -> bool:
        """Whether everything of older epochs is replicated, in every log. Only asked of a
        leader."""
        return all(log.progress.old_epochs_replicated for log in self.logs)

    def check_leader(self, epoch: int) -> None:
        """Raise unless this node leads and the caller knows the epoch."""
        replica = self.replica
        if replica.role != "leader":
            raise self.not_leader()
        if epoch not in (EPOCH_ANY, replica.epoch):
            error = FencedEpoch(f"{self.ref} is in epoch {replica.epoch}, not {epoch}")
            raise error.with_details(epoch=replica.epoch)

    # The leader writes

    def produce(
        self, message: Produce, raw: memoryview
    ) -> "ProduceReply | asyncio.Future[ProduceReply]":
        """Append the batches and reply when `acks` is met."""
        self.check_leader(message.epoch)
        replica = self.replica
        acks = message.acks
        if acks == "all" and not replica.may_accept():
            decided = replica.decided
            raise NotEnoughReplicas(
                f"{self.ref} has too few live replicas in sync: isr {list(decided.isr)}, "
                f"min_insync {decided.min_insync}"
            )
        bases: list[int] = []
        try:
            if message.delayed:
                partition_log, end = self._append_delayed(raw, bases)
            else:
                partition_log = self.data
                end = partition_log.append_incoming(raw, bases, message.copies)
        except StorageFailed as error:
            # This node stops because of it, and another one will lead. The producer goes on there:
            # its sequences tell whether any of this was written.
            raise LeaderLost(f"the disk of the leader of {self.ref} failed: {error}") from error
        reply = ProduceReply(tuple(bases), replica.epoch)
        if acks == "all":
            if end <= partition_log.progress.high_watermark:
                return reply
            return partition_log.wait_for_all(end, message.timeout_ms, reply)
        if acks == "leader":
            return partition_log.wait_for_sync(end, message.timeout_ms, reply) or reply
        return reply

    def _append_delayed(self, raw: memoryview, bases: list[int]) -> tuple[PartitionLog, int]:
        """Append delayed records. The service learns of every batch that was written, even when a
        later one failed."""
        delays, service = self.delays, self.service
        if delays is None:
            raise InvalidArgument(f"{self.ref} is not a queue, so it keeps no delayed records")
        before = delays.log.end_offset
        try:
            return delays, delays.append_incoming(raw, bases)
        finally:
            if service is not None:
                for base, batch in zip(bases, iter_batches(raw), strict=False):
                    if base >= before:
                        self._tell_scheduled(service, base, batch)

    def _tell_scheduled(self, service: "LeaderService", base: int, batch: memoryview) -> None:
        try:
            service.scheduled(base, batch)
        except Exception as error:
            # The service would miss these records until the next epoch.
            self._home.failed(self, error)

    def expire(self, now: float) -> bool:
        """End produce requests whose time is over, and report whether any still wait."""
        waits = False
        for partition_log in self.logs:
            waits = partition_log.expire(now) or waits
        return waits

    @property
    def is_moving(self) -> bool:
        return self.replica.decided.moving

    def close(self, clean: bool = True) -> None:
        """End everything that waits and close all files, even when one of them raises."""
        if self.closed:
            return
        self.closed = True
        self.replica.close()
        self._stand_down()
        failure: StorageError | None = None
        for partition_log in self.logs:
            try:
                partition_log.close(clean)
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure
