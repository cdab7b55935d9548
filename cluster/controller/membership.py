"""This node's place in the cluster: registered, and heard by the controller. (Shell.)

    start ──RegisterNode decided──> member ──beats──> member
    start ──another process holds the id──> it is asked; see `_claim`
    member ──the state says that it is fenced──> registers again
    member ──the state says that another process is this node──> ends, as NodeIdTaken

Beats go to the controller over one kept connection, which is opened anew when the controller
changes; the end of that connection tells the controller at once that this process is gone. The node
that hosts the controller beats by a plain call. A beat that fails is only noted: the next one comes
soon, and the lease outlasts several.

A node none of whose beats was taken for a whole lease is cut off: by now others may lead what it
leads. It is told so by `on_cut_off`, and again when a beat is taken.
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
"""A beat that takes longer, with connecting, has failed."""
RETRY_S_MIN, RETRY_S_MAX = 0.05, 2.0
ASK_S_MAX = 1.0
"""A holder of the id that answers later than this does not answer."""
HOLDER_S = 0.25
LEASES_MAX = 10
"""For how many leases to wait until a holder that does not answer has lost its own."""


Claim = Callable[[RegisterNode, NodeIdTaken], Awaitable[RegisterNode]]


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
        self._claim_ends_at: float | None = None
        self.beats = 0
        """Beats that the controller has taken."""
        self.heard = asyncio.Event()
        """Set while the controller takes them."""

    async def start(self) -> None:
        """Return when this node is registered and its beats go out; raise when it is refused."""
        assert self._task is None, "the membership has been started"
        self._metadata.subscribe(self._on_changes)
        self._metadata.on_controller(self._on_controller)
        await self._register(await self._asked_first(self._registration), self._claim)
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
            if not isinstance(error, NodeIdTaken):
                logger.critical("membership stops: %r", error, exc_info=error)
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

    async def _asked_first(self, registration: RegisterNode) -> RegisterNode:
        """What would be refused first is asked first, as far as the holder is known here."""
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
        """The registration to try next, now that another process holds the id; raises the error
        when that one is there.

        One that does not answer is gone for all that can be seen from here. If its directory is
        here, this process follows it at once. If not, it may be cut off only: then its lease has to
        be over first, and nobody waits for that for ever.
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
        """Whether the process that is registered so is there."""
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
        """The state says that this node is not a member, or that another process is it."""
        me = self._registration
        node = self._metadata.state.nodes.get(me.node_id)
        if node is not None and node.incarnation != me.incarnation:
            # Two processes that take the id from each other would never come to rest, and each
            # time what the other one has is given up.
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
