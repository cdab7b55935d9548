"""Everything the ledger of a led partition decides, from its replay to its end. (Shell.)

An engine lives while its ledger can be written: when that fails (disk full) memory knows more than
the log, and the queue goes on with a new engine. What it is made of:

    ledger      the log, one writer
    deliveries  what groups of workers lease and settle
    offsets     what groups of readers store
    transfers   dead letters and redrives on their way
    coverer     reads the batches of leased records
"""

import asyncio
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

Waits = list["asyncio.Future[None]"]
"""What has to be replicated before somebody is told."""

# How many leases end in one go before others have the loop.
EXPIRE_ROUNDS_MAX = 4


@dataclass(frozen=True, slots=True)
class QueueTools:
    """What every queue of a node needs from the node."""

    rng: random.Random
    wall_ms: Callable[[], int]
    make_copy_service: Callable[[Leadership, Ledger, GroupDeliveries], CopyService]
    make_delay_line: Callable[[Leadership], DelayLine]
    report_damage: Callable[[PartitionRef, int, CorruptBatch], None] = (
        lambda ref, partition_log, error: None
    )
    """Have a log repaired."""


class LedgerEngine:
    """See the module's docstring."""

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
        self.ledger.keep(
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
        """Read the ledger; with `skip_damaged` believe what is left of it."""
        self.deliveries.damaged = skip_damaged
        yield from self.ledger.replay(skip_damaged)

    def begin(self) -> None:
        """The logs are replicated: what they say holds."""
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
        """Refuse what could not be answered anyway."""
        if not self.leadership.has_enough_replicas():
            raise NotEnoughReplicas(f"{self.leadership.ref} has too few live replicas in sync")

    def dead_letter(self, group: GroupState, letters: list[DyingRecords], error: str = "") -> Waits:
        """Hand dying records over to the transfers."""
        return [self.copy_service.dead_letter(group.core.group, letters, error)] if letters else []

    def expire(self, group: GroupState, now: float) -> None:
        """End the leases of a group whose time is up, and see which waiting records are due."""
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
