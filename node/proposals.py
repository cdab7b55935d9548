"""What a node proposes about partitions it leads: who is in sync, or that it resigns. (Shell.)

A change of the in-sync set is proposed until it is decided or the epoch is over, because those it
lets in count as members until then. A resignation is proposed once: whether it was decided shows in
the next epoch.
"""

import asyncio
import logging
from typing import Protocol

from raftq.client.tasks import pause
from raftq.client.wire.errors import RaftqError
from raftq.cluster.commands import ChangeIsr, Resign
from raftq.cluster.metadata_log import MetadataLog
from raftq.node.metrics import NodeMetrics
from raftq.node.partition import Partition
from raftq.node.replica import IsrChange

logger = logging.getLogger(__name__)

PROPOSALS_MAX = 64
RETRY_S = 0.2


class Home(Protocol):
    """Who has the partitions."""

    metrics: NodeMetrics
    is_started: bool

    def touched(self, partition: Partition) -> None: ...


class Proposals:
    """See the module's docstring."""

    def __init__(self, node_id: int, metadata: MetadataLog, home: Home) -> None:
        self._node_id = node_id
        self._metadata = metadata
        self._home = home
        self._room = asyncio.Semaphore(PROPOSALS_MAX)

    async def change(self, partition: Partition, change: IsrChange) -> None:
        place, replica, home = partition.place, partition.replica, self._home
        logger.info("partition=%s isr=%s %s", place, change.members, change.reason)
        command = ChangeIsr(
            *(place.topic_id, place.number, self._node_id, change.epoch, change.version),
            change.members,
        )
        async with self._room:
            while home.is_started:
                try:
                    await self._metadata.propose(command)
                    decided = True
                    home.metrics.isr_expansions += change.joins
                    home.metrics.isr_shrinks += change.leaves
                except RaftqError as error:
                    decided = error.outcome == "failed"
                    logger.info("partition=%s isr change ended: %s", place, error)
                if not replica.change_ended(change, decided):
                    break
                await pause(RETRY_S)
        home.touched(partition)

    async def resign(self, partition: Partition) -> None:
        place, epoch = partition.place, partition.replica.epoch
        logger.warning(
            "partition=%s no follower fetches here: it should have another leader", place
        )
        async with self._room:
            try:
                await self._metadata.propose(
                    Resign(place.topic_id, place.number, self._node_id, epoch)
                )
            except RaftqError as error:
                logger.info("partition=%s resignation ended: %s", place, error)
        self._home.touched(partition)
