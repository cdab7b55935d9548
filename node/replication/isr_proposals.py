"""What a node proposes about partitions it leads: an in-sync set, or to resign. (Shell.)

A change of the in-sync set is proposed until the state machine has answered or the epoch is over,
because the nodes that it lets in count as members until then. All tries are the same command with
the same id: it is applied once, and the answer tells what became of it. A try that certainly failed
says nothing about the tries before it. A resignation is proposed once: the next epoch shows whether
it was accepted.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from raftq.client.common.errors import (
    FencedEpoch,
    InvalidArgument,
    RaftqError,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.common.tasks import sleep
from raftq.cluster.metadata.commands import ChangeIsr, Resign
from raftq.cluster.metadata.log import MetadataLog
from raftq.node.replication.partition import Partition
from raftq.node.replication.replica import IsrChange

if TYPE_CHECKING:
    from raftq.node.replication.partitions import Partitions

logger = logging.getLogger(__name__)

PROPOSALS_MAX = 64
RETRY_S = 0.2
REFUSALS = (FencedEpoch, InvalidArgument, UnknownPartition, UnknownTopic)
"""The state machine refuses a change with these errors. Any other error means that it has not
answered."""


class IsrProposals:
    """Proposes changes of in-sync sets and resignations, a bounded number at a time."""

    def __init__(self, node_id: int, metadata: MetadataLog, partitions: "Partitions") -> None:
        self._node_id = node_id
        self._metadata = metadata
        self._partitions = partitions
        self._room = asyncio.Semaphore(PROPOSALS_MAX)

    async def change(self, partition: Partition, change: IsrChange) -> None:
        ref, replica = partition.ref, partition.replica
        logger.info("partition=%s isr=%s %s", ref, change.members, change.reason)
        command = ChangeIsr(
            *(ref.topic_id, ref.number, self._node_id, change.epoch, change.version),
            change.members,
        )
        command_id = self._metadata.new_command_id()
        async with self._room:
            while self._partitions.is_started and replica.awaits(change):
                if await self._is_answered(partition, change, command, command_id):
                    self._take_answer(partition, change)
                    break
                await sleep(RETRY_S)
        self._partitions.mark_active(partition)

    async def _is_answered(
        self, partition: Partition, change: IsrChange, command: ChangeIsr, command_id: bytes
    ) -> bool:
        """Propose once, and report whether the state machine has answered, even with a refusal."""
        try:
            await self._metadata.propose(command, command_id=command_id)
        except REFUSALS as error:
            logger.info("partition=%s isr change refused: %s", partition.ref, error)
        except RaftqError as error:
            logger.info("partition=%s isr change not answered: %s", partition.ref, error)
            return False
        else:
            self._partitions.metrics.isr_expansions += change.joins
            self._partitions.metrics.isr_shrinks += change.leaves
        return True

    def _take_answer(self, partition: Partition, change: IsrChange) -> None:
        """Pass on the answer. By now the metadata here has every decision up to it."""
        ref = partition.ref
        topic = self._metadata.state.topic_by_id(ref.topic_id)
        if topic is None:
            return  # the partition will be closed when that change arrives
        partition.replica.end_proposal(change, topic.partitions[ref.number].version)

    async def resign(self, partition: Partition, reason: str) -> None:
        ref, epoch = partition.ref, partition.replica.epoch
        logger.warning("partition=%s should have another leader: %s", ref, reason)
        async with self._room:
            try:
                await self._metadata.propose(Resign(ref.topic_id, ref.number, self._node_id, epoch))
            except RaftqError as error:
                logger.info("partition=%s resignation ended: %s", ref, error)
        self._partitions.mark_active(partition)
