"""Shell: the membership of one process in a group, kept alive whatever the application does.

    out ──join──> in ──heartbeat──> in
                   ├──fenced──> out: its partitions are lost, and it joins again, but not if another
                   │            process has its instance_id
                   ├──silence for a whole session──> in doubt: the same, under its old name
                   └──leave──> gone

One heartbeat is always at the coordinator, which holds it for `heartbeat_ms` while there is no
news. So news arrives at once. What the member itself has to send (`poke`) does not wait for the
answer: it goes in the next heartbeat at once, and the older answer is ignored.

Each answer contains everything that the member may own, so the next answer replaces a lost one.
ownership.py decides what to do about it.
"""

import asyncio
import logging
from typing import Protocol

from raftq.client.common.backoff import Backoff
from raftq.client.common.errors import FencedGeneration, RaftqError, UnknownGroup
from raftq.client.common.tasks import Tasks, resolve
from raftq.client.net.coordinator import CoordinatorClient
from raftq.client.options import ClientOptions, GroupOptions
from raftq.client.wire.group_messages import (
    GroupHeartbeat,
    GroupHeartbeatReply,
    LeaveGroup,
    Mode,
    Owned,
)

logger = logging.getLogger(__name__)

ANSWER_S = 3.0  # beyond the wait that the request asks for
LEAVE_S = 2.0
PENDING_S = 0.02  # how soon to ask again if more will come: the coordinator holds the request


class MembershipListener(Protocol):
    """Acts on the answers of the coordinator."""

    def owned(self) -> tuple[Owned, ...]: ...
    def on_reply(self, reply: GroupHeartbeatReply) -> None: ...
    def lost(self, error: RaftqError | None) -> None: ...
    def refused(self, error: RaftqError) -> None: ...


class GroupMember:
    """A member of a group, from `start` to `leave`."""

    def __init__(
        self,
        options: ClientOptions,
        membership: GroupOptions,
        mode: Mode,
        client_id: str,
        coordinator: CoordinatorClient,
        listener: MembershipListener,
    ) -> None:
        self._options = options
        self._membership = membership
        self._mode: Mode = mode
        self._client_id = client_id
        self._coordinator = coordinator
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        # Chosen here, so that a join whose answer was lost is the same member when it is repeated.
        self.member_id = client_id
        self.member_epoch = 0  # 0: not a member
        self.generation = 0
        self.fenced_by = 0  # the highest owner epoch that refused a claim
        self.session_end = float("inf")  # when others may own what this member owned
        self._tasks: Tasks
        self._has_asked = False  # so the coordinator may know it
        self._before: GroupHeartbeatReply | None = None
        self._poked = False
        self._waiting: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None
        # The pauses between attempts must not end a session.
        most_ms = min(options.retry_backoff_ms_max, max(membership.session_ms // 20, 1))
        self._backoff = Backoff(min(options.retry_backoff_ms, most_ms), most_ms, options.rng)

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._running = tasks.spawn(self._run())

    def poke(self) -> None:
        """There is something to send to the coordinator."""
        self._poked = True
        if self._waiting is not None:
            resolve(self._waiting)

    def stop(self) -> None:
        """Sends no more heartbeats. The membership ends with its session unless `leave` follows."""
        if self._running is not None:
            self._running.cancel()
            self._running = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def leave(self) -> None:
        """Tells the coordinator, if it answers quickly.

        A member with a fixed name does not leave: its partitions wait for it."""
        self.stop()
        own = self._membership
        if not self._has_asked or own.instance_id is not None:
            return
        try:
            request = LeaveGroup(own.group, self.member_id, self.member_epoch)
            await self._coordinator.ask(request, LEAVE_S)
        except RaftqError as error:
            logger.warning("group %s does not know of the end: %s", own.group, error)

    async def _run(self) -> None:
        while True:
            self._poked = False
            began = self._loop.time()
            try:
                reply = await self._beat()
            except RaftqError as error:
                await self._failed(error)
                continue
            if reply is None:
                continue  # it has something newer to send
            self._backoff.reset()
            is_news = self._take_in(reply, began)
            self._listener.on_reply(reply)
            if not is_news:
                await self._until_next(began, reply.pending)

    async def _until_next(self, began: float, pending: bool) -> None:
        """Waits until the next heartbeat is due.

        It is due at once after one that was held, and after news, as more may follow."""
        interval_s = self._membership.heartbeat_ms / 1000
        if pending:
            interval_s = min(interval_s, PENDING_S)
        left_s = interval_s - (self._loop.time() - began)
        if left_s > 0.1 * interval_s:
            await self._pause(left_s)

    async def _pause(self, seconds: float) -> None:
        """Waits, unless there is something to send."""
        if self._poked:
            return
        self._waiting = self._loop.create_future()
        timer = self._loop.call_later(seconds, resolve, self._waiting)
        try:
            await self._waiting
        finally:
            timer.cancel()
            self._waiting = None

    async def _beat(self) -> GroupHeartbeatReply | None:
        """Sends one heartbeat; None if something newer to send has replaced it."""
        own = self._membership
        wait_ms = own.heartbeat_ms if self.member_epoch else 0
        request = GroupHeartbeat(
            own.group,
            self.member_id,
            self.member_epoch,
            self.generation,
            self._mode,
            tuple(own.topics),
            own.pattern,
            self._listener.owned(),
            own.session_ms,
            own.instance_id or "",
            self._client_id,
            wait_ms,
            self.fenced_by if self.fenced_by > self.generation else 0,
        )
        self._has_asked = True
        asking: asyncio.Task[GroupHeartbeatReply | RaftqError] = self._tasks.spawn(
            self._ask(request, wait_ms / 1000 + ANSWER_S)
        )
        try:
            if wait_ms:
                poked = self._waiting = self._loop.create_future()
                if self._poked:
                    resolve(poked)
                await asyncio.wait((asking, poked), return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    return None
            answer = await asking
        finally:
            self._waiting = None
            if not asking.done():
                asking.cancel()
        if isinstance(answer, RaftqError):
            raise answer
        return answer

    async def _ask(
        self, request: GroupHeartbeat, timeout_s: float
    ) -> GroupHeartbeatReply | RaftqError:
        """The answer or the error, as a value."""
        try:
            return await self._coordinator.ask_once(request, timeout_s)
        except RaftqError as error:
            return error

    def _take_in(self, reply: GroupHeartbeatReply, began: float) -> bool:
        """Takes in an answer; says whether it contains news."""
        self.member_id = reply.member_id
        self.member_epoch = reply.member_epoch
        self.generation = reply.generation
        # The coordinator counts from the moment at which it received this, which is after its
        # sending.
        self.session_end = began + self._membership.session_ms / 1000
        if self._alarm is None:
            self._alarm = self._loop.call_at(self.session_end, self._ring)
        before, self._before = self._before, reply
        return reply != before

    def _ring(self) -> None:
        self._alarm = None
        if self._loop.time() < self.session_end:
            self._alarm = self._loop.call_at(self.session_end, self._ring)
        else:
            self._listener.lost(None)

    async def _failed(self, error: RaftqError) -> None:
        is_out = isinstance(error, FencedGeneration | UnknownGroup)
        if is_out and self.member_epoch:
            logger.warning("member %s lost its membership: %s", self.member_id, error)
            self.member_epoch = self.generation = 0
            self._listener.lost(error)
            if self._membership.instance_id is not None and self._loop.time() < self.session_end:
                # The session had not ended: another process uses the same name.
                self._listener.refused(error)
                self.stop()
                return
        elif is_out and self._membership.instance_id is None:
            # The answer to the join took so long that the coordinator has forgotten the member.
            logger.info("group %s is joined again: %s", self._membership.group, error)
        elif not error.retriable:
            self._listener.refused(error)
            await self._pause(self._membership.heartbeat_ms / 1000)
            return
        else:
            logger.info("a heartbeat of group %s failed: %s", self._membership.group, error)
        await self._pause(self._backoff.next_s())


def holder_name(options: ClientOptions, kind: str) -> str:
    """A unique name for one client of a group."""
    return f"{(options.name or kind)[:200]}-{options.rng.getrandbits(48):012x}"
