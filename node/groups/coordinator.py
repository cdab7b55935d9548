"""The coordinator of the groups of one partition of `__groups`, for one epoch. (Shell.)

It runs the core (cluster/groups/groups.py) on the log of the partition. The decisions of the core
are appended, all records of one turn of the loop as one batch. Every answer waits until the log, as
it was when the answer was made, is replicated. A coordinator that takes over reads the log from its
start, which is a snapshot once the log has grown.

An answer renews the session of a member, so it must not come from a coordinator that was replaced
and does not know it: the next one counts from when it took over. Therefore a record has to be
appended after the request came and be replicated before the answer. Without another record this is
a Beat, which all answers of a moment share. Queue members own nothing and need no such proof.

A heartbeat that may wait is parked while there is no news for its member: nothing new to take or to
release since the last answer. There is at most one parked heartbeat per member; a newer one
replaces it.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NamedTuple

from raftq.client.common.errors import (
    DiskFull,
    FencedGeneration,
    NotEnoughReplicas,
    NotLeader,
    RaftqError,
    RequestTimeout,
    StorageError,
)
from raftq.client.wire.encoder import encode
from raftq.client.wire.group_messages import (
    DeleteGroupReply,
    GivenPartition,
    GroupHeartbeat,
    GroupHeartbeatReply,
    LeaveGroup,
    LeaveGroupReply,
)
from raftq.client.wire.messages import WireMessage
from raftq.client.wire.schema import ITEMS_MAX
from raftq.cluster.groups.group import MemberView
from raftq.cluster.groups.groups import Groups, GroupsConfig
from raftq.cluster.groups.records import (
    Beat,
    GroupRecord,
    MemberGone,
    MemberPut,
    Raised,
    Retargeted,
    pack,
    unpack,
)
from raftq.node.replication.leader_log import Leadership

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 3_000
PROOF_S = 0.2
"""Answers without news wait this long for others to share a Beat with."""
REPEAT_S = 0.5
"""A member that has not yet done what the last answer said gets it again after this time."""
READY_S = 10.0
"""How long a request waits for a coordinator that is reading its log."""
RETRY_S = 1.0
"""The wait before a log that cannot be read or written is tried again."""
BATCH_BYTES_MAX = 1024 * 1024
SNAPSHOT_BYTES_MIN = 1024 * 1024
"""The log is replaced by a snapshot when it has grown by this, and by four times its snapshot."""

Key = tuple[str, str]
"""(group, member id)"""


@dataclass(frozen=True, slots=True)
class _LastAnswer:
    generation: int
    assigned: tuple[tuple[str, int, int], ...]


class _Heartbeat:
    """A heartbeat that is not answered yet."""

    __slots__ = ("epoch", "future", "is_join", "key", "message", "named", "timer")

    def __init__(self, message: GroupHeartbeat, key: Key, epoch: int) -> None:
        self.message = message
        self.key = key
        self.epoch = epoch
        self.is_join = not message.member_id or not message.member_epoch
        self.named = {(slot.topic, slot.partition) for slot in message.owned}
        self.future: asyncio.Future[GroupHeartbeatReply] = (
            asyncio.get_running_loop().create_future()
        )
        self.timer: asyncio.TimerHandle | None = None


Outcome = WireMessage | RaftqError


class _Due(NamedTuple):
    """An answer that waits for the log."""

    future: "asyncio.Future[Any]"
    make: Callable[[], Outcome]
    proves: bool
    """Whether only a leader may give this answer."""


class Coordinator:
    """The coordinator of one partition of `__groups` for one epoch.

    `counts` returns the partitions of each topic, `ended` makes the error for those who wait when
    the epoch is over, and `on_stop` is called then.
    """

    def __init__(  # noqa: PLR0913 - one thing from each part of a node
        self,
        leadership: Leadership,
        config: GroupsConfig,
        rng: Random,
        wall_ms: Callable[[], int],
        counts: Callable[[], dict[str, int]],
        ended: Callable[[], NotLeader],
        on_stop: Callable[["Coordinator"], None],
    ) -> None:
        self.leadership = leadership
        self.core = Groups(config, rng)
        self.ready: asyncio.Future[None] = leadership.loop.create_future()
        """Done when the log has been read."""
        self.snapshot_bytes_min = SNAPSHOT_BYTES_MIN
        self._loop = leadership.loop
        self._wall_ms = wall_ms
        self._counts = counts
        self._ended = ended
        self._on_stop = on_stop
        self._stopped = False
        self._parked: dict[str, dict[str, _Heartbeat]] = {}
        self._last_answers: dict[Key, _LastAnswer] = {}
        self._outbox: list[bytes] = []
        self._due: list[_Due] = []
        self._in_flight: dict[asyncio.Future[Any], None] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._flush_soon = False
        self._retrying = False
        self._tick_timer: asyncio.TimerHandle | None = None
        self._log_bytes = 0  # since the last snapshot
        self._snapshot_bytes = 0
        self._snapshotting = False
        leadership.old_epochs_replicated.add_done_callback(self._settled)

    # Life.

    def _settled(self, future: "asyncio.Future[None]") -> None:
        if not self._stopped and not future.cancelled() and future.exception() is None:
            self._load()

    def _load(self) -> None:
        if self._stopped or not self.leadership.active:
            return
        log, ref = self.leadership.data.log, self.leadership.ref
        began = self._loop.time()
        self.core = Groups(self.core.config, self.core.rng)
        try:
            for batch in log.batches(log.start_offset):
                for value in batch.values():
                    self.core.restore(unpack(value))
        except StorageError as error:
            # It may be repaired from another replica meanwhile.
            logger.critical("partition=%s groups cannot be read: %s", ref, error)
            self._loop.call_later(RETRY_S, self._load)
            return
        self._log_bytes = log.size_bytes
        now = self._loop.time()
        self.core.start(self._counts(), now)
        logger.info(
            "partition=%s coordinates epoch=%d took=%.3f %s",
            ref, self.leadership.epoch, now - began, self.core.describe(),
        )  # fmt: skip
        self.ready.set_result(None)
        self._react()

    def stop(self) -> None:
        """Stop with the epoch: every waiter gets an error."""
        if self._stopped:
            return
        self._stopped = True
        for timer in (self._flush_timer, self._tick_timer):
            if timer is not None:
                timer.cancel()
        error = self._ended()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # a waiter is not required
        unknown = self._ended().with_outcome("unknown")
        for heartbeats in list(self._parked.values()):
            for heartbeat in list(heartbeats.values()):
                self._unpark(heartbeat)
                _finish(heartbeat.future, unknown)
        for future in [*(answer.future for answer in self._due), *self._in_flight]:
            _finish(future, unknown)
        self._due.clear()
        self._in_flight.clear()
        self._on_stop(self)

    def scheduled(self, base: int, batch: memoryview) -> None:
        """Groups have no delayed records."""

    async def until_ready(self) -> None:
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.shield(self.ready)
        except TimeoutError:
            raise RequestTimeout("the coordinator is still reading its groups") from None

    # Requests.

    def heartbeat(
        self, message: GroupHeartbeat, host: str
    ) -> "asyncio.Future[GroupHeartbeatReply]":
        """Return the answer: at once, with news, or when the time to wait is over."""
        is_join = not message.member_id or not message.member_epoch
        self._check(is_join)
        now = self._loop.time()
        try:
            member_id = self.core.heartbeat(message, host, now)
        finally:
            self._react()
        view = self.core.view(message.group, member_id)
        assert view is not None, member_id
        heartbeat = _Heartbeat(message, (message.group, member_id), view.member_epoch)
        before = self._parked.get(message.group, {}).get(member_id)
        if before is not None:
            self._answer(before)
        news = self._is_news(heartbeat, view)
        wait_s = self._wait_s(heartbeat, view)
        if news or not wait_s:
            self._answer(heartbeat, at_once=news)
        else:
            self._parked.setdefault(message.group, {})[member_id] = heartbeat
            heartbeat.timer = self._loop.call_later(wait_s, self._answer, heartbeat)
            heartbeat.future.add_done_callback(lambda future: self._unpark(heartbeat))
        return heartbeat.future

    def leave(self, message: LeaveGroup) -> "asyncio.Future[LeaveGroupReply]":
        self._check(changes=True)
        left = self.core.leave(
            message.group, message.member_id, message.member_epoch, self._loop.time()
        )
        self._react()
        return self._when_replicated(lambda: LeaveGroupReply(left))

    def delete(self, group: str) -> "asyncio.Future[DeleteGroupReply]":
        self._check(changes=True)
        self.core.delete(group, self._loop.time())
        self._react()
        return self._when_replicated(DeleteGroupReply)

    def topics_changed(self) -> None:
        if self.ready.done() and not self._stopped:
            self.core.set_topics(self._counts(), self._loop.time())
            self._react()

    def _check(self, changes: bool) -> None:
        if self._stopped or not self.leadership.active:
            raise self._ended()
        if changes and not self.leadership.has_enough_replicas():
            raise NotEnoughReplicas(f"{self.leadership.ref} has too few live replicas in sync")

    # Heartbeats that wait.

    def _is_news(self, heartbeat: _Heartbeat, view: MemberView) -> bool:
        if heartbeat.is_join:
            return True
        answer = self._last_answers.get(heartbeat.key)
        if answer is not None and heartbeat.message.generation >= answer.generation:
            # The member has that answer, and may still be working on it.
            return answer.assigned != view.assigned
        if heartbeat.message.mode == "queue":
            return heartbeat.message.generation != view.generation
        return heartbeat.named != _slots(view)

    def _wait_s(self, heartbeat: _Heartbeat, view: MemberView) -> float:
        """Return how long the heartbeat may wait: at most a third of the session, which runs
        from when it was sent."""
        wait_s = min(heartbeat.message.wait_ms, heartbeat.message.session_ms // 3) / 1000
        if heartbeat.message.mode == "stream" and heartbeat.named != _slots(view):
            wait_s = min(wait_s, REPEAT_S)
        return wait_s

    def _unpark(self, heartbeat: _Heartbeat) -> None:
        if heartbeat.timer is not None:
            heartbeat.timer.cancel()
            heartbeat.timer = None
        group, member_id = heartbeat.key
        parked = self._parked.get(group)
        if parked is not None and parked.get(member_id) is heartbeat:
            del parked[member_id]
            if not parked:
                del self._parked[group]

    def _answer(self, heartbeat: _Heartbeat, at_once: bool = False) -> None:
        self._unpark(heartbeat)
        if not heartbeat.future.done():
            proves = heartbeat.message.mode == "stream"
            self._due.append(_Due(heartbeat.future, partial(self._reply, heartbeat), proves))
            self._flush_within(PROOF_S if proves and not at_once else 0.0)

    def _reply(self, heartbeat: _Heartbeat) -> Outcome:
        """Make the answer from everything that is in the log now."""
        group, member_id = heartbeat.key
        view = self.core.view(group, member_id)
        if view is None or view.member_epoch != heartbeat.epoch:
            return FencedGeneration(f"member {member_id!r} of group {group!r} is gone")
        self._last_answers[heartbeat.key] = _LastAnswer(view.generation, view.assigned)
        return GroupHeartbeatReply(
            member_id,
            view.member_epoch,
            view.generation,
            tuple(GivenPartition(*slot) for slot in view.assigned[:ITEMS_MAX]),
            view.pending,
            min(HEARTBEAT_MS, max(heartbeat.message.session_ms // 4, 1)),
        )

    # What the core decided.

    def _react(self) -> None:
        """Handle what the last step of the core changed."""
        if self._stopped:
            return
        records, changed = self.core.take()
        for record in records:
            self._note(record)
            self._outbox.append(pack(record))
        if records:
            self._flush_within(0.0)
        for group in changed:
            for heartbeat in list(self._parked.get(group, {}).values()):
                view = self.core.view(*heartbeat.key)
                if (
                    view is None
                    or view.member_epoch != heartbeat.epoch
                    or self._is_news(heartbeat, view)
                ):
                    self._answer(heartbeat, at_once=True)
        self._arm()

    def _note(self, record: GroupRecord) -> None:
        if isinstance(record, MemberGone):
            self._last_answers.pop((record.group, record.member_id), None)
            logger.info(
                "group=%s member=%s gone: %s", record.group, record.member_id, record.reason
            )
        elif isinstance(record, MemberPut):
            logger.info(
                "group=%s member=%s epoch=%d host=%s",
                record.group, record.member_id, record.epoch, record.host,
            )  # fmt: skip
        elif isinstance(record, Raised):
            logger.error(
                "group=%s event=generations_went_back partitions know owner epochs that this group "
                "never had; it goes on with generation=%d", record.group, record.generation,
            )  # fmt: skip
        elif isinstance(record, Retargeted):
            moved = sum(len(found) for moves in record.changes.values() for found in moves.values())
            logger.info(
                "group=%s generation=%d partitions_moved=%d",
                record.group, record.generation, moved,
            )  # fmt: skip

    def _arm(self) -> None:
        deadline = self.core.next_deadline()
        timer = self._tick_timer
        if deadline is None or (timer is not None and timer.when() <= deadline):
            return
        if timer is not None:
            timer.cancel()
        self._tick_timer = self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._tick_timer = None
        if self.leadership.active:
            self.core.tick(self._loop.time())
            self._react()

    # The log.

    def _when_replicated(self, make: Callable[[], Outcome]) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = self._loop.create_future()
        self._due.append(_Due(future, make, proves=False))
        self._flush_within(0.0)
        return future

    def _flush_within(self, wait_s: float) -> None:
        if self._retrying or self._flush_soon:
            return
        timer = self._flush_timer
        if wait_s <= 0:
            self._flush_soon = True
            self._loop.call_soon(self._flush)
        elif timer is None:
            self._flush_timer = self._loop.call_later(wait_s, self._flush)
        if timer is not None and self._flush_soon:
            timer.cancel()
            self._flush_timer = None

    def _flush(self) -> None:
        """Write down what there is, and answer those who wait once it is replicated."""
        self._flush_soon = self._retrying = False
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._stopped or not (self._due or self._outbox):
            return
        try:
            end = self._append()
        except DiskFull as error:
            logger.error("partition=%s groups cannot be written: %s", self.leadership.ref, error)
            self._retrying = True
            self._flush_timer = self._loop.call_later(RETRY_S, self._flush)
            return
        except RaftqError as error:
            for answer in self._due:
                _finish(answer.future, error)
            self._due.clear()
            return
        due, self._due = self._due, []
        answers = [(answer.future, answer.make()) for answer in due if not answer.future.done()]
        for future, _ in answers:
            self._in_flight[future] = None
        self.leadership.data.replicated(end).add_done_callback(partial(self._replicated, answers))
        if self._log_bytes >= max(self.snapshot_bytes_min, 4 * self._snapshot_bytes):
            self._snapshot()

    def _append(self) -> int:
        """Append everything, and return the end of the log."""
        data = self.leadership.data
        if not self._outbox and any(answer.proves for answer in self._due):
            self._outbox.append(pack(Beat()))
        while self._outbox:
            count, size = 0, 0
            while count < len(self._outbox) and (not count or size < BATCH_BYTES_MAX):
                size += len(self._outbox[count])
                count += 1
            batch = encode(self._outbox[:count], timestamps=self._wall_ms())
            data.append(batch)
            self._log_bytes += len(batch)
            del self._outbox[:count]
        return data.log.end_offset

    def _replicated(
        self,
        answers: "list[tuple[asyncio.Future[Any], Outcome]]",
        replicated: "asyncio.Future[None]",
    ) -> None:
        error = self._ended().with_outcome("unknown") if replicated.cancelled() else None
        error = error or replicated.exception()  # type: ignore[assignment]
        for future, outcome in answers:
            self._in_flight.pop(future, None)
            _finish(future, outcome if error is None else error)

    def _snapshot(self) -> None:
        """Write a snapshot. Once it is replicated, drop what came before."""
        if self._snapshotting:
            return
        data = self.leadership.data
        try:
            data.log.roll()
            base = data.log.end_offset
            self._log_bytes = self._snapshot_bytes = 0
            self._outbox += map(pack, self.core.snapshot())
            end = self._append()
        except StorageError as error:
            logger.error("partition=%s no snapshot of groups: %s", self.leadership.ref, error)
            return
        self._snapshot_bytes = self._log_bytes
        self._log_bytes = 0
        self._snapshotting = True
        data.replicated(end).add_done_callback(partial(self._cut, base))

    def _cut(self, base: int, replicated: "asyncio.Future[None]") -> None:
        self._snapshotting = False
        failed = replicated.cancelled() or replicated.exception() is not None
        if not failed and not self._stopped and self.leadership.active:
            self.leadership.data.truncate_prefix(base)
            logger.info("partition=%s starts with a snapshot at=%d", self.leadership.ref, base)


def _slots(view: MemberView) -> set[tuple[str, int]]:
    return {(topic, number) for topic, number, _ in view.assigned}


def _finish(future: "asyncio.Future[Any]", outcome: WireMessage | BaseException) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
