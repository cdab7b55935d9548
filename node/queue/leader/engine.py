"""The state behind the ledger of a led partition, from its replay to its end. (Shell.)

An engine lives while its ledger can be written. When a write fails (disk full), memory is ahead of
the log, and the queue goes on with a new engine. Its parts:

    ledger        the log, with one writer
    deliveries    leases and settlements of groups of workers
    offsets       stored offsets of groups of readers
    copy_service  dead letters and redrives that are being sent
    batch_reader  reads the batches of leased records
"""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raftq.client.common.errors import CorruptBatch, NotEnoughReplicas, RaftqError
from raftq.node.queue.core.entries import ClippedEntry
from raftq.node.queue.core.group_delivery import DyingRecords
from raftq.node.queue.leader.copy_service import CopyService
from raftq.node.queue.leader.delay_line import DelayLine
from raftq.node.queue.leader.deliveries import GroupDeliveries, GroupState
from raftq.node.queue.leader.leased_batches import LeasedBatchReader
from raftq.node.queue.leader.ledger import TAG_COPIES, TAG_DELIVERY, TAG_OFFSETS, Ledger
from raftq.node.queue.leader.stored_offsets import StoredOffsets
from raftq.node.replication.leader_log import Leadership
from raftq.node.replication.partition_ref import PartitionRef

logger = logging.getLogger(__name__)

# Rounds of expiring leases before other tasks get the loop.
EXPIRE_ROUNDS_MAX = 4


@dataclass(frozen=True, slots=True)
class QueueTools:
    """The parts of the node that every queue uses."""

    rng: random.Random
    wall_ms: Callable[[], int]
    make_copy_service: Callable[[Leadership, Ledger, GroupDeliveries], CopyService]
    make_delay_line: Callable[[Leadership], DelayLine]
    report_damage: Callable[[PartitionRef, int, CorruptBatch], None] = (
        lambda ref, partition_log, error: None
    )
    """Asks for the repair of a damaged log."""


class LedgerEngine:
    """All state of one ledger."""

    def __init__(
        self,
        leadership: Leadership,
        tools: QueueTools,
        on_lost: Callable[[RaftqError], None],
        on_change: Callable[[GroupState], None],
    ) -> None:
        assert leadership.ledger is not None, f"{leadership.ref} has no ledger"
        self.leadership = leadership
        self.tools = tools
        self.ledger = Ledger(leadership.ledger, leadership.loop, on_lost)
        self.deliveries = GroupDeliveries(leadership, self.ledger, tools.rng, self.now())
        self.deliveries.on_change = on_change
        self.offsets = StoredOffsets(self.ledger)
        self.copy_service = tools.make_copy_service(leadership, self.ledger, self.deliveries)
        self.batch_reader = LeasedBatchReader(leadership.data.log)
        self.ledger.set_sections(
            {
                TAG_DELIVERY: self.deliveries,
                TAG_OFFSETS: self.offsets,
                TAG_COPIES: self.copy_service,
            }
        )

    def now(self) -> float:
        """Wall-clock seconds of this node. Deadlines outlive it: see deliveries.py."""
        return self.tools.wall_ms() / 1000

    def replay(self, skip_damaged: bool) -> Iterator[None]:
        """Read the ledger; with `skip_damaged` use what is left of it."""
        self.deliveries.damaged = skip_damaged
        yield from self.ledger.replay(skip_damaged)

    def begin(self) -> None:
        """Begin to serve: everything in the logs is replicated."""
        end = self.leadership.data.log.end_offset
        if self.deliveries.damaged:
            self.deliveries.damaged = False
            self.deliveries.restart_unsettled()
            self.ledger.begin_snapshot()
        self.deliveries.take_over(self.now())
        if self.deliveries.refers_beyond(end):
            logger.error("partition=%s event=ledger_clipped end=%d", self.leadership.ref, end)
            self.deliveries.write([ClippedEntry(None, end)])
        self.offsets.clip(end)
        self.copy_service.begin()

    def stop(self, error: RaftqError) -> None:
        self.copy_service.stop()
        self.ledger.stop(error)

    def check_writable(self) -> None:
        """Refuse writes that could not be replicated now."""
        if not self.leadership.has_enough_replicas():
            raise NotEnoughReplicas(f"{self.leadership.ref} has too few live replicas in sync")

    def dead_letter(self, group: GroupState, letters: list[DyingRecords], error: str = "") -> None:
        """Decide the dead letters of dying records."""
        if letters:
            self.copy_service.dead_letter(group.core.group, letters, error)

    def expire(self, group: GroupState, now: float) -> None:
        """End expired leases of a group, and find waiting records that are due."""
        core = group.core
        for _ in range(EXPIRE_ROUNDS_MAX):
            deadline = core.next_deadline()
            if deadline is None or deadline > now:
                break
            group.idle_at = -1
            entries, letters = core.expire(now)
            if entries:
                self.deliveries.write(entries)
            self.dead_letter(group, letters)
        self.deliveries.on_change(group)
