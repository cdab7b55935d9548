"""A lease request over several partitions of this node, from its arrival to its answer. (Shell.)

    arrived ──something there──> taken ──replicated──> answered
        └──nothing, wait_ms──> parked ──offered, or one partition ended──┘
                                 └──time is over, superseded──> answered with nothing

It needs no task: partitions call it when they may have records. If the caller is gone by the time
the lease is replicated, the records are given back.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from raftq.client.common.errors import RaftqError
from raftq.client.common.types import Buffer
from raftq.client.wire.queue_messages import Lease, LeasedPartition, LeasePartition, LeaseReply
from raftq.node.queue.leader.group_admin import start_group
from raftq.node.queue.leader.leasing import LeaseAsk, Leased, give_back, lease
from raftq.node.queue.leader.partition_queue import PartitionQueue

REPLY_BYTES_MAX = 32 * 1024 * 1024

LeaseAnswer = tuple[LeaseReply, Sequence[Buffer]]
LeaseSource = tuple[LeasePartition, "PartitionQueue | RaftqError"]


class LeaseRequest:
    """One request, with the queues of its partitions or the errors that they gave."""

    __slots__ = (
        "_ask", "_begun", "_errors", "_message", "_on_end", "_open", "_sources", "_taken", "_timer",
        "future",
    )  # fmt: skip

    def __init__(
        self, message: Lease, sources: list[LeaseSource], on_end: Callable[["LeaseRequest"], None]
    ) -> None:
        self._message = message
        self._sources = sources
        self._on_end = on_end
        self._ask = LeaseAsk(
            message.holder,
            message.records_max,
            min(max(message.bytes_max, 1), REPLY_BYTES_MAX),
            message.lease_ms / 1000 if message.lease_ms else None,
        )
        self._taken: dict[PartitionQueue, Leased] = {}
        self._errors: dict[PartitionQueue, RaftqError] = {}
        # Where this request created the group. An empty answer also tells the caller that the group
        # begins here, so it must be replicated first.
        self._begun: dict[PartitionQueue, asyncio.Future[None]] = {}
        self._open = 0  # writes that are not replicated yet
        self._timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self.future: asyncio.Future[LeaseAnswer] = loop.create_future()

    @property
    def is_parked(self) -> bool:
        return self._timer is not None

    def begin(self, first: int) -> "LeaseAnswer | asyncio.Future[LeaseAnswer]":
        """Take what there is now, or wait. `first` is the index of the queue to ask first."""
        queues = [source[1] for source in self._sources]
        failed = False
        records, size = self._ask.records_max, self._ask.bytes_max
        for queue in queues[first:] + queues[:first]:
            if isinstance(queue, RaftqError):
                failed = True
            elif records > 0 and size > 0:
                taken = self._take(queue, records, size)
                if taken is not None:
                    records -= taken.records
                    size -= taken.size
        if self._taken:
            self._wait_replicated()
        elif self._message.wait_ms and not failed and not self._errors:
            self._park()
        elif self._begun:
            self._wait_replicated()
        else:
            return self._answer()
        return self.future

    def _take(self, queue: PartitionQueue, records: int, size: int) -> Leased | None:
        ask = self._ask
        message = self._message
        try:
            engine = queue.engine
            engine.check_writable()
            if message.group not in engine.deliveries.groups:
                start_group(engine, message.group, message.start)
                self._begun[queue] = engine.ledger.barrier()
            group = engine.deliveries.groups[message.group]
            taken = lease(engine, group, LeaseAsk(ask.holder, records, size, ask.lease_s))
        except RaftqError as error:
            self._errors[queue] = error
            return None
        if taken is not None:
            self._taken[queue] = taken
        return taken

    # Waiting for records

    def _park(self) -> None:
        group = self._message.group
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._message.wait_ms / 1000, self.finish)
        for _, queue in self._sources:
            assert isinstance(queue, PartitionQueue)
            queue.park(group, self)
        self.future.add_done_callback(self._leave)

    def _leave(self, future: "asyncio.Future[LeaseAnswer] | None" = None) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        for _, queue in self._sources:
            if isinstance(queue, PartitionQueue):
                queue.leave(self._message.group, self)
        self._on_end(self)

    def offer(self, queue: PartitionQueue) -> bool:
        if self.future.done():
            return False
        taken = self._take(queue, self._ask.records_max, self._ask.bytes_max)
        if taken is None:
            if self._errors:
                self.finish()
            return False
        self._leave()
        self._wait_replicated()
        return True

    def ended(self, queue: PartitionQueue, error: RaftqError) -> None:
        self._errors[queue] = error
        self.finish()

    def turn_away(self, error: RaftqError) -> None:
        """Answer with an error instead of waiting."""
        for _, queue in self._sources:
            if isinstance(queue, PartitionQueue):
                self._errors.setdefault(queue, error)
        self.finish()

    def finish(self) -> None:
        """Answer with no records."""
        if not self.future.done() and not self._open:
            self._leave()
            if any(not begun.done() for begun in self._begun.values()):
                self._wait_replicated()
            else:
                self.future.set_result(self._answer())

    # Waiting for replicas

    def _wait_replicated(self) -> None:
        waits = [(queue, taken.replicated) for queue, taken in self._taken.items()]
        waits += [one for one in self._begun.items() if one[0] not in self._taken]
        self._open = len(waits)
        for queue, replicated in waits:
            replicated.add_done_callback(partial(self._replicated, queue))

    def _replicated(self, queue: PartitionQueue, replicated: "asyncio.Future[None]") -> None:
        error = replicated.exception()
        if error is not None:
            assert isinstance(error, RaftqError), error
            self._taken.pop(queue, None)
            self._errors[queue] = error
        self._open -= 1
        if self._open:
            return
        if self.future.done():  # the caller has gone away
            for each, taken in self._taken.items():
                if each.is_ready:
                    give_back(each.engine, taken)
            return
        self.future.set_result(self._answer())

    def _answer(self) -> LeaseAnswer:
        found: list[LeasedPartition] = []
        buffers: list[Buffer] = []
        start = 0
        for wanted, queue in self._sources:
            topic, number = wanted.topic, wanted.partition
            error = queue if isinstance(queue, RaftqError) else self._errors.get(queue)
            if error is not None:
                found.append(LeasedPartition(topic, number, error.code))
                continue
            assert isinstance(queue, PartitionQueue)
            taken = self._taken.get(queue)
            if taken is not None:
                found.append(
                    LeasedPartition(
                        topic, number, "", taken.ranges, start, taken.size, queue.leadership.epoch
                    )
                )
                buffers += taken.buffers
                start += taken.size
        return LeaseReply(tuple(found)), buffers
