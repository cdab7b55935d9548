"""One replica of a partition: its logs and its role. (Shell.)

Joins the logs (partition_log.py) and the role that they share (replica.py), and answers producers.
Everything runs on the event loop, per batch; nothing here awaits.

    leader    produce: check, deduplicate, append, hand to followers, answer when `acks` is met
    follower  appends what the leader handed over; cuts where the leader says the logs part

Who leads is decided by the metadata (partitions.py brings it), when the in-sync set changes is
decided by the role and proposed by partitions.py. An acknowledgement of `all` means: every member
of the in-sync set has it, as durable as the topic's fsync policy asks.

While it leads, a service may own what the logs mean (leader_log.py). It ends with the epoch.
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
    """See the module's docstring. `data` is always there; the other logs are opened later, both
    at once, when the topic is a queue."""

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
        """Owns what the logs mean, while this node leads; None: nobody does."""
        self.leadership: PartitionLeadership | None = None
        self._home = home
        self.logs: list[PartitionLog] = []
        self.data = PartitionLog(self, log, producers, replica.data, home)
        self.logs.append(self.data)
        self.log = log  # of `data`

    def configure(self, config: TopicConfig) -> None:
        """Take on the topic's settings; those of the log's files hold from the next open."""
        self.config = config
        for partition_log in self.logs:
            partition_log.configure(config)

    # Logs

    @property
    def is_queue(self) -> bool:
        """Whether all logs are open."""
        return len(self.logs) == len(NAMES)

    @property
    def ledger(self) -> PartitionLog | None:
        return self.log_of(LEDGER)

    @property
    def delays(self) -> PartitionLog | None:
        return self.log_of(DELAYS)

    def log_of(self, number: int) -> PartitionLog | None:
        """None while it is not open."""
        logs = self.logs
        return logs[number] if number < len(logs) else None

    def open_log(self, log: Log, producers: Producers) -> PartitionLog:
        """There is one more log from now on, whatever the role."""
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
        """Act on what the metadata says now."""
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
        """A new epoch."""
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
        """Whoever waits for this leader has to go on elsewhere."""
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
            text = f"nobody leads {self.ref} at the moment"
        error = NotLeader(f"{text}, in epoch {decided.epoch}")
        return error.with_details(leader=decided.leader, epoch=decided.epoch)

    def leader_lost(self) -> LeaderLost:
        """For whoever waits: what was written here may have been replicated or not."""
        error = self.not_leader()
        return LeaderLost(str(error)).with_details(**error.details)

    @property
    def old_epochs_replicated(self) -> bool:
        """Whether all of older epochs is replicated, in every log; of a leader."""
        return all(log.progress.old_epochs_replicated for log in self.logs)

    def check_leader(self, epoch: int) -> None:
        """Raise unless this is the leader and the caller knows that."""
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
        """Append the batches and answer as `acks` asks."""
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
            # This node ends of it, and another one leads. A producer goes on there; what is known
            # of its sequences tells whether anything of this was written.
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
        """The service hears of every batch that was written, whatever became of those after it."""
        delays, service = self.delays, self.service
        if delays is None:
            raise InvalidArgument(f"{self.ref} is no queue and keeps no delayed records")
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
            # It would not know of these records until another epoch begins.
            self._home.failed(self, error)

    def expire(self, now: float) -> bool:
        """End produce requests whose time is over; whether any still wait."""
        waits = False
        for partition_log in self.logs:
            waits = partition_log.expire(now) or waits
        return waits

    @property
    def is_moving(self) -> bool:
        return self.replica.decided.moving

    def close(self, clean: bool = True) -> None:
        """Let go of everyone and close the files; all of them, whatever one of them raises."""
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
