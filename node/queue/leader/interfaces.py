"""What the queue of a led partition needs from the parts it is made of. (Interface.)

    queue.py     makes the parts, replays the ledger, waits for `leadership.old_epochs_replicated`,
    calls `begin` transfers    chapter T of the ledger: dead letters and redrives, exactly one copy
    each delay line   the delays log: what is not due yet; keeps its own log, not the ledger

Everything that is decided in the ledger ends with the object that decided it: when the ledger
cannot be written (disk full) the queue makes new transfers and deliveries and replays them, as a
new leader does, and the old ones are stopped. The delay line stays.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from raftq.node.queue.core.group_delivery import DyingRecords
from raftq.node.queue.leader.deliveries import GroupDeliveries
from raftq.node.queue.leader.ledger import Chapter, Ledger
from raftq.node.replication.leader_log import Leadership


class Transfers(Chapter, Protocol):
    """Copies records to other topics, once each, whatever fails on the way."""

    def begin(self) -> None:
        """Everything is replayed and replicated: go on with what is not finished.

        The records of unfinished intents are to be marked first (`GroupDeliveries.doom`), so that
        nobody leases or settles them meanwhile.
        """

    def stop(self) -> None:
        """Another one takes over, here or elsewhere."""

    def bury(
        self, group: str, letters: Sequence[DyingRecords], error: str
    ) -> "asyncio.Future[None]":
        """Copy these dying records to the dead letters, then settle them (`settle_dead`).

        Done when it is sure to happen: the intent is replicated. If it cannot be decided now,
        `GroupDeliveries.spare` gives the records back and the future fails.
        """

    def parked(self, group: str) -> int:
        """Records of a group whose copies are refused, for whatever reason, and wait."""

    def lost(self, group: str) -> int:
        """Records of a group that were gone before their copy was made, since this leader began."""


class Delays(Protocol):
    """The records of a partition that are not due yet."""

    def start(self) -> None:
        """Rebuild what the log says; fire once everything of older epochs is replicated."""

    def stop(self) -> None: ...

    def scheduled(self, base: int, batch: memoryview) -> None:
        """A batch was appended to the delays log; at any time after `start`."""


MakeTransfers = Callable[[Leadership, Ledger, GroupDeliveries], Transfers]
MakeDelayLine = Callable[[Leadership], Delays]


class NoDelayLine:
    """Where nothing is delayed."""

    def __init__(self, leadership: Leadership) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def scheduled(self, base: int, batch: memoryview) -> None: ...
