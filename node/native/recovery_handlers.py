"""Handlers of requests by an operator about partitions without a leader. (Shell.)"""

from typing import Any

from raftq.client.wire.admin_messages import (
    CopyInfo,
    DescribeCopies,
    DescribeCopiesReply,
    RecoverPartition,
    RecoverPartitionReply,
)
from raftq.cluster.metadata.commands import Recover
from raftq.cluster.metadata.log import MetadataLog
from raftq.node.replication.end_reports import ends_of
from raftq.node.replication.partition import Partition
from raftq.node.replication.partitions import Partitions


class RecoveryHandlers:
    """Handlers of requests about copies and recovery."""

    def __init__(self, partitions: Partitions, log: MetadataLog) -> None:
        self._partitions = partitions
        self._log = log

    def describe(
        self, message: DescribeCopies, raw: memoryview, session: Any
    ) -> DescribeCopiesReply:
        found = [self._partitions.find(key) for key in message.partitions]
        return DescribeCopiesReply(tuple(_info(copy) for copy in found if copy is not None))

    async def recover(
        self, message: RecoverPartition, raw: memoryview, session: Any
    ) -> RecoverPartitionReply:
        command = Recover(message.topic_id, message.partition, message.version)
        return RecoverPartitionReply(tuple(await self._log.propose(command)))

    def table(self) -> dict[type, Any]:
        """Return request class -> handler."""
        return {DescribeCopies: self.describe, RecoverPartition: self.recover}


def _info(copy: Partition) -> CopyInfo:
    ref = copy.ref
    logs = tuple((*ends_of(log), log.progress.high_watermark) for log in copy.logs)
    return CopyInfo(ref.topic_id, ref.number, logs)
