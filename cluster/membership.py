"""This node's place in the cluster: registered, and heard by the controller. (Shell.)

    start ──RegisterNode decided──> member ──beats──> member
    member ──the state says that it is fenced, or another incarnation──> registers again

Beats go to the controller over one kept connection, which is opened anew when the controller
changes; the end of that connection tells the controller at once that this process is gone. The node
that hosts the controller beats by a plain call. A beat that fails is only noted: the next one comes
soon, and the lease outlasts several.

A node none of whose beats was taken for a whole lease is cut off: by now others may lead what it
leads. It is told so by `on_cut_off`, and again when a beat is taken.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from raftq.client.connection import Connection, ConnectionOptions
from raftq.client.wire.errors import ConnectFailed, ConsensusStopped, RaftqError, RequestTimeout
from raftq.client.wire.node_messages import Heartbeat, HeartbeatReply
from raftq.cluster.commands import RegisterNode
from raftq.cluster.metadata import Change, NodeChanged
from raftq.cluster.metadata_log import MetadataLog
from raftq.cluster.state import AddressOf, own_address
from raftq.cluster.waiting import wait_for_event

logger = logging.getLogger(__name__)

BEAT_S_MAX = 1.0
"""A beat that takes longer, with connecting, has failed."""
RETRY_S_MIN, RETRY_S_MAX = 0.05, 2.0


class HeartbeatTaker(Protocol):
    """The controller in this process, which is in control or not."""

    def heartbeat(self, node_id: int, incarnation: int) -> HeartbeatReply: ...


class Membership:
    """See the module's docstring. `registration` says who this node is, and what it lost."""

    def __init__(  # noqa: PLR0913 - one thing from each part of a node
        self,
        metadata: MetadataLog,
        registration: RegisterNode,
        heartbeat_ms: int,
        options: ConnectionOptions,
        local: HeartbeatTaker,
        *,
        on_fatal: Callable[[BaseException], None] | None = None,
        address_of: AddressOf = own_address,
        lease_ms: int = 3_000,
        on_cut_off: Callable[[bool], None] = lambda cut_off: None,
    ) -> None:
        self._address_of = address_of
        self._lease_s = lease_ms / 1000
        self._on_cut_off = on_cut_off
        self._cut_off = False
        self._silence: asyncio.TimerHandle | None = None
        self._metadata = metadata
        self._registration = registration
        self._period = heartbeat_ms / 1000
        self._options = options
        self._local = local
        self._on_fatal = on_fatal
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._connected_to: tuple[int, str, int, int] | None = None
        self._scope: asyncio.Timeout | None = None
        self._takeovers = 0
        self.beats = 0
        """Beats that the controller has taken."""
        self.heard = asyncio.Event()
        """Set while the controller takes them."""

    async def start(self) -> None:
        """Return when this node is registered and its beats go out; raise when it is refused."""
        assert self._task is None, "the membership has been started"
        self._metadata.subscribe(self._on_changes)
        self._metadata.on_controller(self._on_controller)
        await self._register(self._registration)
        # From now on this incarnation may be fenced, but it cannot lose anything.
        self._registration = replace(self._registration, lost="nothing")
        self._was_heard(asyncio.get_running_loop().time())
        self._task = asyncio.get_running_loop().create_task(self._run(), name="membership")
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """No more beats, and no registration when this node is fenced."""
        self._stopping.set()
        if self._silence is not None:
            self._silence.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("membership stops: %r", error, exc_info=error)
            if self._on_fatal is not None:
                self._on_fatal(error)

    # Registering.

    async def _register(self, registration: RegisterNode) -> None:
        retry_s = RETRY_S_MIN
        while not self._stopping.is_set():
            try:
                await self._metadata.propose(registration)
            except RaftqError as error:
                if not error.retriable:
                    raise
                logger.warning("node=%d not registered yet: %s", registration.node_id, error)
                await wait_for_event(self._stopping, retry_s)
                retry_s = min(retry_s * 2, RETRY_S_MAX)
            else:
                logger.info(
                    "node=%d registered incarnation=%d lost=%s",
                    registration.node_id, registration.incarnation, registration.lost,
                )  # fmt: skip
                return
        raise ConsensusStopped("this node stops")

    async def _register_again(self) -> None:
        """The state says that this node is not a member, or that another process is it."""
        me = self._registration
        node = self._metadata.state.nodes.get(me.node_id)
        if node is not None and node.incarnation != me.incarnation:
            # Perhaps a late registration of the process before this one; two processes that go on
            # as the same node must not drown the cluster in registrations.
            self._takeovers += 1
            logger.error("another process registered as node=%d", me.node_id)
            pause = min(RETRY_S_MIN * (1 << min(self._takeovers, 10)), 10 * RETRY_S_MAX)
            await wait_for_event(self._stopping, pause)
        else:
            logger.warning("node=%d was fenced: it registers again", me.node_id)
        try:
            await self._register(me)
        except RaftqError as error:
            logger.error("node=%d cannot register: %s", me.node_id, error)

    def _is_member(self) -> bool:
        me = self._registration
        return self._metadata.state.is_alive(me.node_id, me.incarnation)

    def _on_changes(self, changes: Sequence[Change]) -> None:
        if NodeChanged(self._registration.node_id) in changes and not self._is_member():
            self._changed.set()

    def _on_controller(self, controller: int | None, term: int) -> None:
        self._changed.set()
        if self._scope is not None and not self._scope.expired():
            # What is under way goes to the one before.
            self._scope.reschedule(asyncio.get_running_loop().time())

    # Beating.

    async def _run(self) -> None:
        try:
            while True:
                self._changed.clear()
                if not self._is_member():
                    await self._register_again()
                await self._beat()
                await wait_for_event(self._changed, self._period)
        finally:
            await self._disconnect()

    async def _beat(self) -> None:
        me, controller = self._registration, self._metadata.controller
        began = asyncio.get_running_loop().time()
        if controller is None:
            self.heard.clear()
            return
        try:
            if controller == me.node_id:
                reply = self._local.heartbeat(me.node_id, me.incarnation)
            else:
                reply = await self._beat_remote(controller)
        except RaftqError as error:
            logger.info("node=%d beat to controller=%d failed: %s", me.node_id, controller, error)
            self.heard.clear()
            await self._disconnect()
            return
        if reply.controls:
            self.beats += 1
            self.heard.set()
            self._was_heard(began)
        else:
            self.heard.clear()

    def _was_heard(self, at: float) -> None:
        """A beat was taken that began at this time, which the lease is counted from at the latest
        when the controller counts."""
        if self._silence is not None:
            self._silence.cancel()
        loop = asyncio.get_running_loop()
        self._silence = loop.call_at(at + self._lease_s, self._was_not_heard)
        if self._cut_off:
            self._cut_off = False
            self._on_cut_off(False)

    def _was_not_heard(self) -> None:
        logger.warning("node=%d is cut off from the controller", self._registration.node_id)
        self._cut_off = True
        self._on_cut_off(True)

    async def _beat_remote(self, controller: int) -> HeartbeatReply:
        me = self._registration
        try:
            async with asyncio.timeout(BEAT_S_MAX) as self._scope:
                connection = await self._connect(controller)
                reply = await connection.request(Heartbeat(me.node_id, me.incarnation))
        except TimeoutError:
            raise RequestTimeout("no answer in time, or another controller") from None
        finally:
            self._scope = None
        return reply.message

    async def _connect(self, controller: int) -> Connection:
        node = self._metadata.state.nodes.get(controller)
        if node is None:
            raise ConnectFailed(f"node {controller} is not known")
        host, port = self._address_of(node)
        wanted = (node.node_id, host, port, node.incarnation)
        if self._connection is not None:
            if wanted == self._connected_to and not self._connection.closed:
                return self._connection
            await self._disconnect()
        connection = await Connection.open(host, port, self._options)
        self._connection, self._connected_to = connection, wanted
        if connection.hello is None or connection.hello.node_id != controller:
            raise ConnectFailed(f"{host}:{port} is not node {controller}")
        return connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
