"""Runs the controller's core with the metadata, heartbeats and timers of this node. (Shell.)

The core runs while this node believes to be the Raft leader. It may be wrong for a moment:
everything it decides is a proposal, and all nodes see proposals in the same order.

A probe opens a connection to a node: the process that answers there as that node is alive. When
nobody listens at its address, or another process of the same node answers, the registered process
is gone. That is known long before its lease ends. It holds for this node itself, too: a controller
may not be registered yet.
"""

import asyncio
import errno
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from raftq.client.common.errors import AccessDenied, NodeStopping, RaftqError
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions
from raftq.client.wire.messages import Ping
from raftq.client.wire.node_messages import HeartbeatReply
from raftq.cluster.controller.core import Controller
from raftq.cluster.controller.events import (
    Abdicate,
    Changed,
    ConnectionEnded,
    ControllerConfig,
    Demoted,
    Event,
    HeartbeatCame,
    ProbeEnded,
    ProbeNode,
    Promoted,
    ProposalEnded,
    ProposeCommand,
    Tick,
)
from raftq.cluster.metadata.apply import Change
from raftq.cluster.metadata.log import MetadataLog
from raftq.cluster.metadata.state import AddressOf, NodeState, own_address

logger = logging.getLogger(__name__)

PROBE_MS = 500
_ANOTHER = -1
"""The incarnation of a process that answers at the address of a node and is not that node."""
_ERRNO = re.compile(r"\[Errno (\d+)\]")


class ControllerDriver:
    """Runs a Controller. `options` are those of connections between nodes, `incarnation` is that
    of this process."""

    def __init__(
        self,
        metadata: MetadataLog,
        config: ControllerConfig,
        rng: Random,
        options: ConnectionOptions,
        *,
        incarnation: int,
        address_of: AddressOf = own_address,
    ) -> None:
        self._incarnation = incarnation
        self._address_of = address_of
        self._metadata = metadata
        self._core = Controller(config, rng)
        self._options = replace(options, connect_ms=PROBE_MS)
        self._group: asyncio.TaskGroup | None = None
        self._in_control = False
        self._alarm: asyncio.TimerHandle | None = None
        self._heard: dict[int, None] = {}
        """Nodes whose heartbeats come over a connection that has not ended."""

    # Calls from the node.

    def heartbeat(self, node_id: int, incarnation: int) -> HeartbeatReply:
        self._heard[node_id] = None
        self._step(HeartbeatCame(node_id, incarnation))
        return HeartbeatReply(self._in_control, self._metadata.controller)

    def session_lost(self, node_id: int) -> None:
        """Note that the connection with the heartbeats of this node has ended."""
        self._heard.pop(node_id, None)
        self._step(ConnectionEnded(node_id))

    async def run(self) -> None:
        """Control the cluster whenever this node is the controller, until cancelled."""
        assert self._group is None, "the driver runs already"
        self._metadata.subscribe(self._on_changes)
        self._metadata.on_controller(self._on_controller)
        async with asyncio.TaskGroup() as self._group:
            try:
                self._on_controller(self._metadata.controller, self._metadata.term)
                await asyncio.get_running_loop().create_future()
            finally:
                # Before the group waits for its tasks: it takes no new ones while it ends.
                self._group = None
                self._disarm()

    @property
    def in_control(self) -> bool:
        return self._in_control

    def describe(self) -> str:
        return self._core.describe()

    # Calls from the metadata.

    def _on_controller(self, controller: int | None, term: int) -> None:
        if self._group is None or self._metadata.is_controller == self._in_control:
            return
        self._in_control = self._metadata.is_controller
        logger.info("controller in_control=%s term=%d", self._in_control, term)
        if self._in_control:
            rivals = tuple(voter for voter in self._metadata.voters if voter != controller)
            self._step(Promoted(self._metadata.state, tuple(self._heard), rivals))
        else:
            self._step(Demoted())

    def _on_changes(self, changes: Sequence[Change]) -> None:
        if self._in_control:
            self._step(Changed(changes, self._metadata.state))

    # The core.

    def _step(self, event: Event) -> None:
        if self._group is None:
            return
        for effect in self._core.step(event, asyncio.get_running_loop().time()):
            if isinstance(effect, ProposeCommand):
                self._group.create_task(self._propose(effect))
            elif isinstance(effect, Abdicate):
                logger.warning("controller abdicates: %s", effect.reason)
                self._metadata.abdicate()
            else:
                self._group.create_task(self._probe(effect))
        self._disarm()
        at = self._core.next_deadline()
        if at is not None:
            self._alarm = asyncio.get_running_loop().call_at(at, self._step, Tick())

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def _propose(self, effect: ProposeCommand) -> None:
        logger.info("controller proposes %r: %s", effect.command, effect.reason)
        failure: RaftqError | None = None
        try:
            await self._metadata.propose(effect.command)
        except RaftqError as error:
            logger.warning("controller proposal %r failed: %s", effect.command, error)
            failure = error
        self._step(ProposalEnded(effect.command, failure))

    async def _probe(self, effect: ProbeNode) -> None:
        node = self._metadata.state.nodes.get(effect.node_id)
        answered, refused = None, False
        if effect.node_id == self._metadata.controller:
            # This process itself, whatever its address looks like from here.
            answered = self._incarnation
        elif node is not None:
            where = self._address_of(node)
            answered, refused = await probe(node, effect.incarnation, self._options, where)
        logger.info(
            "controller probed node=%d answered=%s refused=%s",
            effect.node_id, answered is not None, refused,
        )  # fmt: skip
        self._step(ProbeEnded(effect.node_id, answered, refused, effect.incarnation))


async def probe(
    node: NodeState,
    incarnation: int,
    options: ConnectionOptions,
    where: tuple[str, int] | None = None,
) -> tuple[int | None, bool]:
    """Return (incarnation that answers, whether nobody listens).

    A node that is about to stop does not say which process it is. It counts as the given
    incarnation.
    """
    try:
        connection = await Connection.open(*(where or own_address(node)), options)
    except NodeStopping:
        return incarnation, False
    except AccessDenied:
        return _ANOTHER, False
    except RaftqError as error:
        return None, is_refusal(error)
    try:
        hello = connection.hello
        if hello is None or hello.node_id != node.node_id:
            return _ANOTHER, False
        await connection.request(Ping(), timeout_s=options.connect_ms / 1000)
    except RaftqError:
        return None, False
    finally:
        await connection.close()
    return hello.incarnation, False


def is_refusal(error: BaseException) -> bool:
    """Report whether the host itself says that nobody listens there, at any of its addresses."""
    cause = error.__cause__
    if isinstance(cause, ConnectionRefusedError):
        return True
    if not isinstance(cause, OSError) or cause.errno is not None:
        return False
    # asyncio puts the errors of several addresses into the text of one.
    numbers = _ERRNO.findall(str(cause))
    return bool(numbers) and all(int(number) == errno.ECONNREFUSED for number in numbers)
