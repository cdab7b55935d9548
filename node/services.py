"""Who owns the strands of the partitions that this node leads, and what clients may ask. (Shell.)

A queue owns those of ordinary topics, a coordinator those of `__groups`. Services are made per
partition and epoch (leading.py); this makes them, and has the handlers that find them again.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from raftq.client.wire.errors import CorruptBatch
from raftq.client.wire.group_messages import GROUPS_TOPIC
from raftq.cluster.topic_config import is_internal
from raftq.node.coordinators import Coordinators
from raftq.node.leading import Led, Service
from raftq.node.partitions import Partitions
from raftq.node.place import Place
from raftq.node.queues.courier import NodeCourier
from raftq.node.queues.delay_handlers import DelayHandlers
from raftq.node.queues.delay_line import DelayLine
from raftq.node.queues.deliveries import Deliveries
from raftq.node.queues.engine import QueueTools
from raftq.node.queues.handlers import QueueHandlers
from raftq.node.queues.ledger import Ledger
from raftq.node.queues.parts import NoDelayLine
from raftq.node.queues.serving import Queues
from raftq.node.queues.transfers import LedTransfers
from raftq.node.strand import DATA, DELAYS


class Services:
    """See the module's docstring."""

    def __init__(
        self,
        partitions: Partitions,
        rng: Random,
        wall_ms: Callable[[], int],
        coordinators: Coordinators,
        courier: NodeCourier,
    ) -> None:
        self._partitions = partitions
        self._wall_ms = wall_ms
        self._rng = rng
        self._courier = courier
        self.coordinators = coordinators
        self.queues = Queues(
            QueueTools(
                rng=rng,
                wall_ms=wall_ms,
                make_transfers=self._transfers,
                make_delay_line=self._delay_line,
                report_damage=self._damaged,
            )
        )
        self.queue_handlers = QueueHandlers(partitions, self.queues)
        self.delay_handlers = DelayHandlers(
            partitions, self.queues, self.queue_handlers.queue, courier.exists
        )
        partitions.serve = self.serve

    def serve(self, led: Led) -> Service:
        if led.place.topic == GROUPS_TOPIC:
            return self.coordinators.serve(led)
        return NoDelayLine(led) if is_internal(led.place.topic) else self.queues.serve(led)

    def table(self) -> dict[type, Any]:
        """Request class -> handler."""
        return {
            **self.queue_handlers.table(),
            **self.delay_handlers.table(),
            **self.coordinators.table(),
        }

    def _transfers(self, led: Led, ledger: Ledger, deliveries: Deliveries) -> LedTransfers:
        place = led.place
        return LedTransfers(
            *(led, ledger, deliveries, self._courier, self._rng, self._wall_ms),
            lambda error: self._damaged(place, DATA, error),
        )

    def _delay_line(self, led: Led) -> DelayLine:
        place = led.place

        def broken(error: BaseException) -> None:
            partition = self._partitions.find((place.topic_id, place.number))
            if partition is not None:
                self._partitions.failed(partition, error)

        return DelayLine(
            led, self._wall_ms, lambda error: self._damaged(place, DELAYS, error), broken
        )

    def _damaged(self, place: Place, strand: int, error: CorruptBatch) -> None:
        partition = self._partitions.find((place.topic_id, place.number))
        if partition is not None and strand < len(partition.strands):
            partition.strands[strand].damaged(error)
