"""Leader side of replication: one session per follower node. (Shell.)

A session remembers the logs that its follower subscribed to and how far it was handed batches.
Requests are numbered and come one after the other. Each brings what changed at the follower. It is
answered as soon as there is something to report, or after its wait. A newer request answers the
parked one. The work grows with the logs that have news, not with all that are subscribed.

The reports of a follower move the high watermark (partition_log.py, replica.py). They count only
when they come from the incarnation that the metadata knows: a node that lost its tail is known to
have lost it before its next report counts. And they count only for the assignment under which the
follower is a replica: a node that was moved away and has not learned it yet is about to delete what
it reports.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from raftq.client.common.errors import (
    CorruptBatch,
    FencedEpoch,
    NotLeader,
    RaftqError,
    RemoteProtocolError,
    UnknownPartition,
)
from raftq.client.common.types import Buffer
from raftq.client.wire.node_messages import (
    Progress,
    Replicate,
    Replicated,
    ReplicateReply,
    Subscription,
)
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import LogKey, PartitionLog
from raftq.node.replication.replica import common_end

logger = logging.getLogger(__name__)

Key = tuple[int, int]
Find = Callable[[Key], Partition | None]
Answer = tuple[ReplicateReply, Sequence[Buffer]]
ITEMS_PER_REPLY = 1000


class Throttle:
    """The bytes that may still be handed to replicas that are being moved. It refills with time."""

    def __init__(self, bytes_s: int) -> None:
        self._bytes_s = bytes_s
        self._left = float(bytes_s)
        self._at = 0.0

    def wait_s(self, now: float) -> float:
        """Return 0.0 when something may be handed over, else how many seconds to wait."""
        self._left = min(self._bytes_s, self._left + (now - self._at) * self._bytes_s)
        self._at = now
        return 0.0 if self._left > 0 else -self._left / self._bytes_s + 0.01

    def spend(self, size: int) -> None:
        self._left -= size


class FollowerSession:
    """The leader side of replication with one follower, over one connection."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        follower: tuple[int, int],
        find: Find,
        throttle: Throttle,
    ) -> None:
        self._loop = loop
        self.node_id, self.incarnation = follower
        self._find = find
        self._throttle = throttle
        self._subscribed: dict[LogKey, PartitionLog] = {}
        self._assignments: dict[LogKey, int] = {}
        self._new_batches: dict[LogKey, PartitionLog] = {}
        self._new_watermarks: dict[LogKey, PartitionLog] = {}
        self._refused: list[Replicated] = []
        self._parked: asyncio.Future[Answer] | None = None
        self._bytes_max = 0
        self._timer: asyncio.TimerHandle | None = None
        self.number = -1
        self.closed = False

    # Requests

    def handle(self, message: Replicate) -> "asyncio.Future[Answer]":
        """Handle a request, and return the future of its reply.

        It is always a future: replies have to leave in the order of their requests, and the reply
        of a parked request leaves only when the loop comes to it.
        """
        if message.number != self.number + 1:
            raise RemoteProtocolError(f"request {message.number} after {self.number}")
        self.number = message.number
        if self._parked is not None:
            self._answer()
        leave = message.leave
        for key in zip(leave[::3], leave[1::3], leave[2::3], strict=True):
            self._unsubscribe(key)
        self._bytes_max = message.bytes_max
        for subscription in message.subscribe:
            self._subscribe(subscription)
        for progress in message.progress:
            self._note_progress(progress)
        answer = self._collect()
        future: asyncio.Future[Answer] = self._loop.create_future()
        if answer is not None:
            future.set_result(answer)
            return future
        self._parked = future
        self._timer = self._loop.call_later(message.wait_ms / 1000, self._answer)
        return future

    def _subscribe(self, wanted: Subscription) -> None:
        key = (wanted.topic_id, wanted.partition, wanted.log_number)
        self._unsubscribe(key)
        partition = self._find(key[:2])
        partition_log = None if partition is None else partition.log_of(wanted.log_number)
        if partition_log is None:
            self._refuse(key, wanted.epoch, UnknownPartition.code)
            return
        replica = partition_log.replica
        if replica.role != "leader" or wanted.epoch > replica.epoch:
            self._refuse(key, wanted.epoch, NotLeader.code)
            return
        if not replica.accepts_reports_of(self.node_id, wanted.epoch, wanted.assignment):
            # One of the two nodes does not have the latest metadata yet: the follower asks again.
            self._refuse(key, wanted.epoch, FencedEpoch.code)
            return
        self._assignments[key] = wanted.assignment
        log = partition_log.log
        point = common_end(log.epochs, log.end_offset, wanted.pairs(), wanted.end_offset)
        if point < log.start_offset or point < wanted.start_offset:
            # No record that the leader keeps is known to be the same.
            self._instruct(partition_log, "reset", log.start_offset)
        elif point < wanted.end_offset:
            self._instruct(partition_log, "truncate", point)
        else:
            if wanted.refused:
                self._check_refused(partition_log, wanted.end_offset)
            self._subscribed[key] = partition_log
            partition_log.listeners[self] = wanted.end_offset
            if wanted.end_offset < log.end_offset:
                self._new_batches[key] = partition_log
            partition_log.on_progress(self.node_id, self.incarnation, wanted.end_offset)

    def _check_refused(self, partition_log: PartitionLog, offset: int) -> None:
        """Look for damage in batches that the follower could not use.

        Batches are handed over unchecked, and no scrub checks the active segment: damage is found
        here.
        """
        left = self._bytes_max
        try:
            for batch in partition_log.log.batches(offset):
                left -= batch.length
                if left <= 0:
                    break
        except CorruptBatch as error:
            logger.error(
                "partition=%s node=%d refused the batches from offset %d on: %s",
                partition_log, self.node_id, offset, error,
            )  # fmt: skip
            partition_log.damaged(error)
        except RaftqError as error:
            logger.warning(
                "partition=%s node=%d refused batches that cannot be checked: %s",
                partition_log,
                self.node_id,
                error,
            )

    def _note_progress(self, progress: Progress) -> None:
        key = (progress.topic_id, progress.partition, progress.log_number)
        partition_log = self._subscribed.get(key)
        if partition_log is None or not partition_log.replica.accepts_reports_of(
            self.node_id, progress.epoch, progress.assignment
        ):
            return  # a reply tells the follower that its subscription is over
        if progress.end_offset > partition_log.listeners[self]:
            # The follower is wrong about this log. Its other subscriptions must not suffer for
            # that.
            logger.error(
                "partition=%s node=%d reports end=%d, but was handed batches up to %d only",
                partition_log, self.node_id, progress.end_offset, partition_log.listeners[self],
            )  # fmt: skip
            self._unsubscribe(key)
            self._refuse(key, progress.epoch, RemoteProtocolError.code)
            return
        partition_log.on_progress(self.node_id, self.incarnation, progress.end_offset)

    def _instruct(self, partition_log: PartitionLog, verb: Any, offset: int) -> None:
        topic_id, number, log_number = partition_log.key
        self._refused.append(
            Replicated(
                topic_id,
                number,
                partition_log.replica.epoch,
                verb,
                partition_log.progress.high_watermark,
                partition_log.log.start_offset,
                offset,
                log_number=log_number,
                assignment=self._assignments[partition_log.key],
            )
        )

    def _refuse(self, key: LogKey, epoch: int, code: str) -> None:
        self._refused.append(_refusal(key, epoch, code))

    def _unsubscribe(self, key: LogKey) -> None:
        self._assignments.pop(key, None)
        partition_log = self._subscribed.pop(key, None)
        if partition_log is not None:
            partition_log.listeners.pop(self, None)
            self._new_batches.pop(key, None)
            self._new_watermarks.pop(key, None)

    # Calls from logs

    def accepts_reports(self, partition_log: PartitionLog) -> bool:
        key, replica = partition_log.key, partition_log.replica
        return replica.accepts_reports_of(self.node_id, replica.epoch, self._assignments[key])

    def on_append(self, partition_log: PartitionLog) -> None:
        """Hand new batches at once to a follower that waits.

        It handles them while the next batch is read. What comes meanwhile goes with its next
        request.
        """
        self._new_batches[partition_log.key] = partition_log
        if self._parked is not None:
            self._answer_parked()

    def on_high_watermark(self, partition_log: PartitionLog) -> None:
        """Send the new high watermark with the next reply: it is not worth one of its own."""
        self._new_watermarks[partition_log.key] = partition_log

    def end_subscription(self, partition_log: PartitionLog) -> None:
        key = partition_log.key
        self._unsubscribe(key)
        self._refuse(key, partition_log.replica.epoch, NotLeader.code)
        if self._parked is not None:
            self._answer_parked()

    def _answer_parked(self) -> None:
        answer = self._collect()
        if answer is not None:
            self._reply(answer)

    def _answer(self) -> None:
        """Answer the parked request, even with nothing."""
        if self._parked is not None:
            self._reply(self._collect() or (self._reply_of([]), ()))

    def _reply(self, answer: Answer) -> None:
        parked, self._parked = self._parked, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if parked is not None and not parked.done():
            parked.set_result(answer)

    # Replies

    def _collect(self) -> Answer | None:
        """Return everything there is to report, as far as it fits, or None without anything
        urgent."""
        items, self._refused = self._refused[:ITEMS_PER_REPLY], self._refused[ITEMS_PER_REPLY:]
        buffers: list[Buffer] = []
        size = 0
        for key, partition_log in list(self._new_batches.items()):
            if size >= self._bytes_max or len(items) >= ITEMS_PER_REPLY:
                break
            del self._new_batches[key]
            item, more = self._batches_of(key, partition_log, self._bytes_max - size, size)
            if item is not None:
                buffers += more
                size += item.length
                items.append(item)
        if not items:
            return None
        return self._reply_of(items), buffers

    def _reply_of(self, items: list[Replicated]) -> ReplicateReply:
        """Make a reply of these items and the high watermarks that are not reported yet."""
        for key, partition_log in list(self._new_watermarks.items())[:ITEMS_PER_REPLY]:
            del self._new_watermarks[key]
            topic_id, number, log_number = key
            items.append(
                Replicated(
                    topic_id,
                    number,
                    partition_log.replica.epoch,
                    "append",
                    partition_log.progress.high_watermark,
                    partition_log.log.start_offset,
                    log_number=log_number,
                    assignment=self._assignments[key],
                )
            )
        return ReplicateReply(tuple(items))

    def _batches_of(
        self, key: LogKey, partition_log: PartitionLog, bytes_max: int, start: int
    ) -> tuple[Replicated | None, list[Buffer]]:
        decided = partition_log.replica.decided
        throttled = decided.moving and bool(decided.isr) and self.node_id not in decided.isr
        if throttled:
            wait_s = self._throttle.wait_s(self._loop.time())
            if wait_s > 0:
                self._loop.call_later(wait_s, self._resume, key)
                return None, []
        try:
            buffers, size = partition_log.hand_over(self, bytes_max)
        except CorruptBatch as error:
            partition_log.damaged(error)
            self._unsubscribe(key)
            return _refusal(key, decided.epoch, error.code), []
        except RaftqError as error:
            # Retention has dropped what the follower needs, or the disk fails: the follower asks
            # again.
            logger.warning("partition=%s node=%d %s", partition_log, self.node_id, error)
            self._unsubscribe(key)
            return _refusal(key, decided.epoch, error.code), []
        if not size:
            return None, []
        if throttled:
            self._throttle.spend(size)
        log = partition_log.log
        if partition_log.listeners[self] < log.end_offset:
            self._new_batches[key] = partition_log
        self._new_watermarks.pop(key, None)
        topic_id, number, log_number = key
        item = Replicated(
            topic_id, number, decided.epoch, "append", partition_log.progress.high_watermark,
            log.start_offset, 0, start, size, "", log_number, self._assignments[key],
        )  # fmt: skip
        return item, buffers

    def _resume(self, key: LogKey) -> None:
        """Go on with a log that was throttled."""
        partition_log = self._subscribed.get(key)
        if partition_log is not None and not self.closed:
            self._new_batches[key] = partition_log
            if self._parked is not None:
                self._answer_parked()

    def close(self) -> None:
        """End the session: the connection is gone, or the follower starts over."""
        self.closed = True
        for key in list(self._subscribed):
            self._unsubscribe(key)
        if self._timer is not None:
            self._timer.cancel()
        if self._parked is not None and not self._parked.done():
            self._parked.cancel()
        self._parked = None


def _refusal(key: LogKey, epoch: int, code: str) -> Replicated:
    topic_id, number, partition_log = key
    return Replicated(topic_id, number, epoch, "refuse", error=code, log_number=partition_log)


class FollowerSessions:
    """The sessions with all followers, by follower node."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        find: Find,
        incarnation_of: Callable[[int], int | None],
        note_request: Callable[[int, float], None],
        move_bytes_s: int,
    ) -> None:
        """`note_request` is called with the node and the time of every request."""
        self._loop = loop
        self._find = find
        self._incarnation_of = incarnation_of
        self._note_request = note_request
        self._throttle = Throttle(move_bytes_s)
        self._by_session: dict[Any, FollowerSession] = {}
        self._by_node: dict[int, Any] = {}

    def handle(self, message: Replicate, raw: memoryview, session: Any) -> "asyncio.Future[Answer]":
        """Handle a Replicate request."""
        if message.number == 0:
            self._begin(message, session)
        follower_session = self._by_session.get(session)
        if follower_session is None or follower_session.node_id != message.node_id:
            raise FencedEpoch(
                f"request {message.number} belongs to no session: begin again with request 0"
            )
        self._note_request(message.node_id, self._loop.time())
        return follower_session.handle(message)

    def _begin(self, message: Replicate, session: Any) -> None:
        known = self._incarnation_of(message.node_id)
        if known != message.incarnation:
            raise FencedEpoch(
                f"node {message.node_id} is known here as incarnation {known}, "
                f"not {message.incarnation}"
            )
        self.session_ended(self._by_node.get(message.node_id))
        self.session_ended(session)
        self._by_node[message.node_id] = session
        self._by_session[session] = FollowerSession(
            self._loop, (message.node_id, message.incarnation), self._find, self._throttle
        )

    def session_ended(self, session: Any) -> None:
        """End the session of a connection that is gone."""
        follower_session = self._by_session.pop(session, None)
        if follower_session is not None:
            follower_session.close()
            if self._by_node.get(follower_session.node_id) is session:
                del self._by_node[follower_session.node_id]

    def fence(self) -> None:
        """End the sessions with incarnations that the metadata no longer knows."""
        for session, follower_session in list(self._by_session.items()):
            if self._incarnation_of(follower_session.node_id) != follower_session.incarnation:
                self.session_ended(session)
