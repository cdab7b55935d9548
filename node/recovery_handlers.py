"""Handlers of what an operator asks about partitions that nobody leads. (Shell.)"""

from typing import Any

from raftq.client.wire.admin_messages import (
    CopyInfo,
    DescribeCopies,
    DescribeCopiesReply,
    RecoverPartition,
    RecoverPartitionReply,
)
from raftq.cluster.commands import Recover
from raftq.cluster.metadata_log import MetadataLog
from raftq.node.partition import Partition
from raftq.node.partitions import Partitions
from raftq.node.telling import ends_of


class RecoveryHandlers:
    """See the module's docstring."""

    def __init__(self, partitions: Partitions, log: MetadataLog) -> None:
        self._partitions = partitions
        self._log = log

    def describe(
        self, message: DescribeCopies, raw: memoryview, session: Any
    ) -> DescribeCopiesReply:
        found = [self._partitions.find(key) for key in message.partitions]
        return DescribeCopiesReply(tuple(_info(one) for one in found if one is not None))

    async def recover(
        self, message: RecoverPartition, raw: memoryview, session: Any
    ) -> RecoverPartitionReply:
        command = Recover(message.topic_id, message.partition, message.version)
        return RecoverPartitionReply(tuple(await self._log.propose(command)))

    def table(self) -> dict[type, Any]:
        """Request class -> handler."""
        return {DescribeCopies: self.describe, RecoverPartition: self.recover}


def _info(copy: Partition) -> CopyInfo:
    place = copy.place
    strands = tuple((*ends_of(one), one.reach.high_watermark) for one in copy.strands)
    return CopyInfo(place.topic_id, place.number, strands)
