"""The services of the partitions that this node leads, and their handlers. (Shell.)

A queue interprets the logs of ordinary topics, a coordinator those of `__groups`. A service is made
per partition and epoch (leader_log.py). This module makes the services, and has the handlers that
find them again.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from raftq.client.common.errors import CorruptBatch
from raftq.client.common.names import is_internal
from raftq.client.wire.group_messages import GROUPS_TOPIC
from raftq.node.groups.coordinators import Coordinators
from raftq.node.queue.leader.copy_sender import NodeCopySender
from raftq.node.queue.leader.copy_service import CopyService
from raftq.node.queue.leader.delay_handlers import DelayHandlers
from raftq.node.queue.leader.delay_line import DelayLine
from raftq.node.queue.leader.deliveries import GroupDeliveries
from raftq.node.queue.leader.engine import QueueTools
from raftq.node.queue.leader.handlers import QueueHandlers
from raftq.node.queue.leader.ledger import Ledger
from raftq.node.queue.leader.registry import QueueRegistry
from raftq.node.replication.leader_log import LeaderService, Leadership
from raftq.node.replication.partition_log import DATA, DELAYS
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.replication.partitions import Partitions


class NoService:
    """The service of an internal topic: it has no queue."""

    def stop(self) -> None: ...

    def scheduled(self, base: int, batch: memoryview) -> None: ...


class Services:
    """Makes the services of partitions, and has their handlers."""

    def __init__(
        self,
        partitions: Partitions,
        rng: Random,
        wall_ms: Callable[[], int],
        coordinators: Coordinators,
        copy_sender: NodeCopySender,
    ) -> None:
        self._partitions = partitions
        self._wall_ms = wall_ms
        self._rng = rng
        self._copy_sender = copy_sender
        self.coordinators = coordinators
        self.queues = QueueRegistry(
            QueueTools(
                rng=rng,
                wall_ms=wall_ms,
                make_copy_service=self._copy_service,
                make_delay_line=self._delay_line,
                report_damage=self._damaged,
            )
        )
        self.queue_handlers = QueueHandlers(partitions, self.queues)
        self.delay_handlers = DelayHandlers(
            partitions, self.queues, self.queue_handlers.queue, copy_sender.exists
        )
        partitions.serve = self.serve

    def serve(self, leadership: Leadership) -> LeaderService:
        if leadership.ref.topic == GROUPS_TOPIC:
            return self.coordinators.serve(leadership)
        return NoService() if is_internal(leadership.ref.topic) else self.queues.serve(leadership)

    def table(self) -> dict[type, Any]:
        """Return request class -> handler."""
        return {
            **self.queue_handlers.table(),
            **self.delay_handlers.table(),
            **self.coordinators.table(),
        }

    def _copy_service(
        self, leadership: Leadership, ledger: Ledger, deliveries: GroupDeliveries
    ) -> CopyService:
        ref = leadership.ref
        return CopyService(
            *(leadership, ledger, deliveries, self._copy_sender, self._rng, self._wall_ms),
            lambda error: self._damaged(ref, DATA, error),
        )

    def _delay_line(self, leadership: Leadership) -> DelayLine:
        ref = leadership.ref

        def broken(error: BaseException) -> None:
            partition = self._partitions.find((ref.topic_id, ref.number))
            if partition is not None:
                self._partitions.failed(partition, error)

        return DelayLine(
            leadership, self._wall_ms, lambda error: self._damaged(ref, DELAYS, error), broken
        )

    def _damaged(self, ref: PartitionRef, partition_log: int, error: CorruptBatch) -> None:
        partition = self._partitions.find((ref.topic_id, ref.number))
        if partition is not None and partition_log < len(partition.logs):
            partition.logs[partition_log].damaged(error)
