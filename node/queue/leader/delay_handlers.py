"""Handlers of what clients ask about delayed records and dead letters. (Shell.)

Only the leader of a partition answers them. Listing delayed records does not turn a topic into a
queue. For a plain topic the list is empty.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from raftq.client.common.types import Buffer
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.messages import EPOCH_ANY
from raftq.node.queue.leader.dead_letters import Answer, Exists, dead_letters
from raftq.node.queue.leader.delay_line import DelayLine
from raftq.node.queue.leader.handlers import QueueHost
from raftq.node.queue.leader.partition_queue import PartitionQueue
from raftq.node.queue.leader.registry import QueueRegistry, check_topic
from raftq.node.queue.leader.reply_batches import pack_records

LIST_MAX = 10_000


class DelayHandlers:
    """Answers requests about delayed records and dead letters."""

    def __init__(
        self,
        partitions: QueueHost,
        queues: QueueRegistry,
        open_queue: Callable[[str, int], Awaitable[PartitionQueue]],
        exists: Exists,
    ) -> None:
        self._partitions = partitions
        self._queues = queues
        self._open_queue = open_queue
        self._exists = exists

    def table(self) -> dict[type, Any]:
        """Request class -> handler."""
        return {
            wire.ListDelayed: self.list_delayed,
            wire.CancelDelayed: self.cancel_delayed,
            wire.DelayStats: self.delay_stats,
            wire.DeadLetters: self.dead_letters,
        }

    def _line(self, topic: str, number: int) -> DelayLine | None:
        check_topic(topic)
        partition = self._partitions.of(topic, number)
        partition.check_leader(EPOCH_ANY)
        queue = self._queues.find(partition.ref)
        return None if queue is None else queue.delay_line

    async def list_delayed(
        self, message: wire.ListDelayed, raw: memoryview, session: Any
    ) -> "wire.ListDelayedReply | tuple[wire.ListDelayedReply, list[Buffer]]":
        line = self._line(message.topic, message.partition)
        if line is None:
            return wire.ListDelayedReply(())
        if message.offset != wire.NO_OFFSET:
            listed = await line.find(message.offset)
        else:
            listed = await line.listed(message.skip, min(message.limit, LIST_MAX))
        records = line.read([one for one, _ in listed])
        # Those that cannot be read, or are too much for one answer, are not told of now.
        listed = [(one, due) for one, due in listed if one in records]
        reply = wire.ListDelayedReply(
            tuple(wire.DelayedRow(one, due, records[one].priority) for one, due in listed),
            len(line.pending_delays),
        )
        if not message.values:
            return reply
        due_by_id = dict(listed)
        return reply, list(pack_records(records.values(), line.leadership.epoch, due_by_id))

    async def cancel_delayed(
        self, message: wire.CancelDelayed, raw: memoryview, session: Any
    ) -> wire.CancelDelayedReply:
        line = self._line(message.topic, message.partition)
        cancelled = [] if line is None else await line.cancel(message.offsets)
        return wire.CancelDelayedReply(tuple(cancelled))

    def delay_stats(
        self, message: wire.DelayStats, raw: memoryview, session: Any
    ) -> wire.DelayStatsReply:
        line = self._line(message.topic, message.partition)
        if line is None:
            return wire.DelayStatsReply()
        counts = line.counts
        return wire.DelayStatsReply(
            pending=line.pending_count,
            scheduled=counts.scheduled,
            fired=counts.fired,
            cancelled=counts.cancelled,
            delay_ms_sum=counts.delay_ms_sum,
            late_ms_max=counts.late_ms_max,
        )

    async def dead_letters(
        self, message: wire.DeadLetters, raw: memoryview, session: Any
    ) -> Answer:
        queue = await self._open_queue(message.topic, message.partition)
        return await dead_letters(queue.engine, message, self._exists)
