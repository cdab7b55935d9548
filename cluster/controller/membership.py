"""This node's membership in the cluster: its registration and its heartbeats. (Shell.)

    start ──RegisterNode decided──> member ──heartbeats──> member
    start ──another process holds the id──> ask that process; see `_claim`
    member ──the state says that it is fenced──> register again
    member ──the state says that another process is this node──> end with NodeIdTaken

Heartbeats go to the controller over one kept connection, which is opened again when the controller
changes. Its end tells the controller at once that this process is gone. On the node that hosts the
controller a heartbeat is a plain call. A heartbeat that fails is only logged: the next one comes
soon, and the lease outlasts several.

A node is cut off when the controller has accepted none of its heartbeats for a whole lease: by now
other nodes may lead its partitions. `on_cut_off` reports that, and again when a heartbeat is
accepted.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from raftq.client.common.errors import (
    ConnectFailed,
    ConsensusStopped,
    Detail,
    NodeIdTaken,
    RaftqError,
    RequestTimeout,
)
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions
from raftq.client.wire.node_messages import Heartbeat, HeartbeatReply, Identify
from raftq.cluster.metadata.apply import Change, NodeChanged
from raftq.cluster.metadata.commands import RegisterNode
from raftq.cluster.metadata.log import MetadataLog
from raftq.cluster.metadata.state import AddressOf, own_address
from raftq.cluster.metadata.waiting import wait_for_event

logger = logging.getLogger(__name__)

BEAT_S_MAX = 1.0
"""A heartbeat that takes longer, with connecting, has failed."""
RETRY_S_MIN, RETRY_S_MAX = 0.05, 2.0
ASK_S_MAX = 1.0
"""A holder of the id that answers later than this counts as not answering."""
HOLDER_S = 0.25
LEASES_MAX = 10
"""How many leases to wait until a holder that does not answer has lost its own."""


Claim = Callable[[RegisterNode, NodeIdTaken], Awaitable[RegisterNode]]


class HeartbeatTaker(Protocol):
    """The controller in this process, whether it is in control or not."""

    def heartbeat(self, node_id: int, incarnation: int) -> HeartbeatReply: ...


class Membership:
    """The membership of this node. `registration` says who it is and what it lost."""

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
        self._cut_off_timer: asyncio.TimerHandle | None = None
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
        self._claim_ends_at: float | None = None
        self.beats = 0
        """The heartbeats that the controller has accepted."""
        self.heartbeats_accepted = asyncio.Event()
        """Set while the controller accepts heartbeats."""

    async def start(self) -> None:
        """Register this node and begin its heartbeats. Raises when it is refused."""
        assert self._task is None, "the membership has been started"
        self._metadata.subscribe(self._on_changes)
        self._metadata.on_controller(self._on_controller)
        await self._register(await self._ask_holder_first(self._registration), self._claim)
        # From now on this incarnation may be fenced, but it cannot lose anything.
        self._registration = replace(self._registration, lost="nothing")
        self._accepted(asyncio.get_running_loop().time())
        self._task = asyncio.get_running_loop().create_task(self._run(), name="membership")
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Stop the heartbeats. The node does not register again when it is fenced."""
        self._stopping.set()
        if self._cut_off_timer is not None:
            self._cut_off_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, NodeIdTaken):
                logger.critical("membership ends: %r", error, exc_info=error)
            if self._on_fatal is not None:
                self._on_fatal(error)

    # Registering.

    async def _register(
        self,
        registration: RegisterNode,
        claim: Claim | None = None,
    ) -> None:
        retry_s = RETRY_S_MIN
        while not self._stopping.is_set():
            try:
                await self._metadata.propose(registration)
            except NodeIdTaken as error:
                if claim is None:
                    raise
                registration = await claim(registration, error)
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

    async def _ask_holder_first(self, registration: RegisterNode) -> RegisterNode:
        """Ask the known holder of the id first, instead of being refused first."""
        node = self._metadata.state.nodes.get(registration.node_id)
        if node is None or not node.alive or node.incarnation != registration.before:
            return registration
        holder: dict[str, Detail] = {
            "incarnation": node.incarnation,
            "host": node.host,
            "port": node.port,
        }
        if await self._answers(holder):
            raise NodeIdTaken(
                f"node {node.node_id} is alive at {node.host}:{node.port}, with a copy of this "
                "directory; stop it first"
            )
        return replace(registration, silent=node.incarnation)

    async def _claim(self, registration: RegisterNode, error: NodeIdTaken) -> RegisterNode:
        """Return the registration to try next, now that another process holds the id.

        Raises the error when that process answers. A process that does not answer looks gone from
        here. If its directory is here, this process follows it at once. If not, it may only be cut
        off: then its lease has to end first, and the wait for that is bounded.
        """
        holder = error.details
        if await self._answers(holder):
            raise error
        incarnation = holder.get("incarnation")
        assert incarnation is None or isinstance(incarnation, int), error
        if incarnation is not None and registration.before == incarnation:
            return replace(registration, silent=incarnation)
        loop, me = asyncio.get_running_loop(), registration.node_id
        if self._claim_ends_at is None:
            self._claim_ends_at = loop.time() + LEASES_MAX * self._lease_s
            logger.warning(
                "node=%d waits until the lease of the process at %s:%s is over, which holds its id "
                "and does not answer",
                me, holder.get("host"), holder.get("port"),
            )  # fmt: skip
        while not await wait_for_event(self._stopping, HOLDER_S):
            if not self._metadata.state.is_alive(me, incarnation):
                break
            if await self._answers(holder):
                raise error
            if loop.time() >= self._claim_ends_at:
                waited = LEASES_MAX * self._lease_s
                raise NodeIdTaken(
                    f"{error}; it does not answer, nor lose its lease in {waited:.0f} s"
                )
        return registration

    async def _answers(self, holder: Mapping[str, Detail]) -> bool:
        """Report whether the registered process answers."""
        host, port = holder.get("host"), holder.get("port")
        if not isinstance(host, str) or not isinstance(port, int):
            return False
        try:
            async with asyncio.timeout(ASK_S_MAX):
                connection = await Connection.open(host, port, self._options)
                try:
                    reply = (await connection.request(Identify())).message
                finally:
                    connection.end()
        except (RaftqError, TimeoutError) as error:
            logger.info("nobody answers at %s:%d: %s", host, port, error)
            return False
        known = (self._registration.node_id, holder.get("incarnation"))
        return known == (reply.node_id, reply.incarnation)

    async def _register_again(self) -> None:
        """Handle a state in which this node is not a member, or another process is this node."""
        me = self._registration
        node = self._metadata.state.nodes.get(me.node_id)
        if node is not None and node.incarnation != me.incarnation:
            # Two processes that take the id from each other would never stop, and each time the
            # data of the other is given up.
            raise self._replaced(node.host, node.port)
        logger.warning("node=%d was fenced: it registers again", me.node_id)
        try:
            await self._register(me)
        except NodeIdTaken as error:
            holder = error.details
            raise self._replaced(holder.get("host"), holder.get("port")) from None
        except RaftqError as error:
            logger.error("node=%d cannot register: %s", me.node_id, error)

    def _replaced(self, host: Detail, port: Detail) -> NodeIdTaken:
        return NodeIdTaken(
            f"another process, at {host}:{port}, registered as node {self._registration.node_id} "
            "after this one, which ends"
        )

    def _is_member(self) -> bool:
        me = self._registration
        return self._metadata.state.is_alive(me.node_id, me.incarnation)

    def _on_changes(self, changes: Sequence[Change]) -> None:
        if NodeChanged(self._registration.node_id) in changes and not self._is_member():
            self._changed.set()

    def _on_controller(self, controller: int | None, term: int) -> None:
        self._changed.set()
        if self._scope is not None and not self._scope.expired():
            # The heartbeat under way goes to the controller before.
            self._scope.reschedule(asyncio.get_running_loop().time())

    # Heartbeats.

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
            self.heartbeats_accepted.clear()
            return
        try:
            if controller == me.node_id:
                reply = self._local.heartbeat(me.node_id, me.incarnation)
            else:
                reply = await self._beat_remote(controller)
        except RaftqError as error:
            logger.info("node=%d beat to controller=%d failed: %s", me.node_id, controller, error)
            self.heartbeats_accepted.clear()
            await self._disconnect()
            return
        if reply.controls:
            self.beats += 1
            self.heartbeats_accepted.set()
            self._accepted(began)
        else:
            self.heartbeats_accepted.clear()

    def _accepted(self, at: float) -> None:
        """Note an accepted heartbeat. The lease counts at the latest from `at`, when it was
        sent."""
        if self._cut_off_timer is not None:
            self._cut_off_timer.cancel()
        loop = asyncio.get_running_loop()
        self._cut_off_timer = loop.call_at(at + self._lease_s, self._cut_off_now)
        if self._cut_off:
            self._cut_off = False
            self._on_cut_off(False)

    def _cut_off_now(self) -> None:
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
