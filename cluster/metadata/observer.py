"""The metadata of a node that is not a voter: it asks a voter. (Shell.)

    looking ──a voter answers──> watching ──it fails or is too slow──> looking, at the next address

One kept connection carries a WatchMetadata request, which the voter answers when something was
decided, and the proposals of this node. A proposal gets its command id before it is first sent, so
it can be sent again, to any voter, whatever became of the try before.

Addresses come from the settings and, once there is a state, from its voters. The answers of a voter
are applied to the same kind of copy that voters hold. After a contradiction the observer asks for
the whole state again, and never goes back. Settings that name other voters than the cluster has end
the node. With settings that name none, the node learns them.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random, SystemRandom
from typing import Any

from raftq.client.common.errors import (
    ConfigError,
    ConnectFailed,
    ConsensusStopped,
    NodeStopping,
    NoLeader,
    OutcomeUnknown,
    RaftqError,
    RequestError,
    RequestTimeout,
    Throttled,
    TransportError,
)
from raftq.client.net.connection import Connection, Reply
from raftq.client.options import ConnectionOptions
from raftq.client.wire.node_messages import Propose, WatchMetadata, WatchMetadataReply
from raftq.cluster.metadata.commands import Command, encode_command
from raftq.cluster.metadata.copy import CopiedMetadata
from raftq.cluster.metadata.handlers import decode_watched, unpack_result
from raftq.cluster.metadata.log import PROPOSE_S
from raftq.cluster.metadata.state import AddressOf, own_address
from raftq.cluster.metadata.waiting import wait_for_event
from raftq.cluster.raft.applied import ID_BYTES, make_command_id
from raftq.cluster.raft.voters_file import NOT_YET, shown

logger = logging.getLogger(__name__)

WAIT_MS = 2_000
"""How long a voter may hold a watch. A voter that hangs is noticed after this and `GRACE_S`."""
GRACE_S = 1.0
CONNECT_MS = 1_000
TRY_S = 2.0
"""The time of one try of a proposal. Then it is sent again, perhaps to another voter."""
RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0

_TRY_ELSEWHERE = (TransportError, NodeStopping, ConsensusStopped)
_TRY_AGAIN = (*_TRY_ELSEWHERE, NoLeader, OutcomeUnknown, Throttled)


class ObserverMetadata(CopiedMetadata):
    """A MetadataLog of a node that is not a voter. `seeds` are native addresses of voters.

    `on_fatal` is called when the copy can no longer be trusted: the process should end.
    """

    def __init__(  # noqa: PLR0913 - what an observer is made of
        self,
        cluster_id: str,
        seeds: Sequence[str],
        options: ConnectionOptions,
        *,
        voters: Sequence[int] = (),
        rng: Random | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
        address_of: AddressOf = own_address,
    ) -> None:
        super().__init__(cluster_id, voters)
        self._cluster_id = cluster_id
        self._seeds = [_address(seed) for seed in seeds]
        self._options = replace(options, connect_ms=min(options.connect_ms, CONNECT_MS))
        self._rng = rng or SystemRandom()
        self._connection: Connection | None = None
        self._connected = asyncio.Event()
        self._has_state = asyncio.Event()
        self._stopping = asyncio.Event()
        self._on_fatal = on_fatal
        self._address_of = address_of
        self._tried = 0
        self._whole = True
        """Whether to request the whole state."""
        self._refused: ConfigError | None = None
        """Why this node does not belong to the cluster."""
        self._scope: asyncio.Timeout | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_controller(self) -> bool:
        return False

    def new_command_id(self) -> bytes:
        return make_command_id(self._rng.randbytes(ID_BYTES), self.index)

    async def start(self) -> None:
        """Begin to look for a voter. The first proposal waits until one is found."""
        assert self._task is None, "the observer has been started"
        if not self._seeds:
            raise ConfigError("a node that is no voter needs the addresses of voters (seeds)")
        self._task = asyncio.get_running_loop().create_task(self._run(), name="observer")
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        self._stopping.set()
        self._connected.set()
        self._has_state.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("observer stops: %r", error, exc_info=error)
            if self._on_fatal is not None:
                self._on_fatal(error)

    def abdicate(self) -> None:
        """Does nothing: an observer is never the controller."""

    # Proposals.

    async def propose(
        self, command: Command, timeout_s: float = PROPOSE_S, command_id: bytes | None = None
    ) -> Any:
        encoded = encode_command(command)
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        last: RaftqError = NoLeader("no voter was reached in time")
        if not await wait_for_event(self._has_state, timeout_s):
            raise last
        name = command_id or self.new_command_id()
        while (left := deadline - clock()) > 0 and not self._stopping.is_set():
            try:
                index, result = await self._try(encoded, name, min(left, TRY_S))
            except _TRY_AGAIN as error:
                last = _worse(last, error)
                await wait_for_event(self._stopping, min(RETRY_S_MIN, left))
                continue
            except RequestError as refusal:
                # The state that caused the refusal is known here, too, when the caller gets the
                # error.
                await self._wait_until(_taken_index(refusal), deadline)
                raise
            await self._wait_until(index, deadline)
            return result
        if self._stopping.is_set():
            raise ConsensusStopped("this node stops").with_outcome(last.outcome)
        raise last

    async def _try(self, encoded: bytes, name: bytes, seconds: float) -> tuple[int, Any]:
        if not await wait_for_event(self._connected, seconds) or self._connection is None:
            raise NoLeader("no voter was reached in time")
        connection = self._connection
        message = Propose(encoded, name, max(1, int(seconds * 1000)))
        try:
            # The answer of the voter says more than a timeout here, so it gets a little more time.
            reply = await connection.request(message, timeout_s=seconds + RETRY_S_MIN)
        except _TRY_ELSEWHERE:
            if connection is self._connection:
                self._leave()
            raise
        return reply.message.index, unpack_result(reply.message.result)

    async def _wait_until(self, index: int, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._copy.has_reached(index)
        except TimeoutError:
            raise OutcomeUnknown(
                "it was applied, but this node did not learn of it in time"
            ) from None

    # Watching.

    async def _run(self) -> None:
        retry_s = RETRY_S_MIN
        try:
            while True:
                try:
                    await self._connect()
                    retry_s = RETRY_S_MIN
                    await self._follow()
                except RaftqError as error:
                    if error is self._refused:
                        raise
                    logger.info("observer lost its voter: %s", error)
                    await self._close()
                await wait_for_event(self._stopping, retry_s * self._rng.uniform(0.5, 1.0))
                retry_s = min(retry_s * 2, RETRY_S_MAX)
        finally:
            await self._close()

    async def _connect(self) -> None:
        addresses = self._addresses()
        self._tried += 1
        host, port = addresses[self._tried % len(addresses)]
        connection = await Connection.open(host, port, self._options)
        hello = connection.hello
        if hello is None or hello.cluster_id != self._cluster_id:
            await connection.close()
            raise ConnectFailed(f"{host}:{port} is not of the cluster {self._cluster_id!r}")
        logger.info("observer follows node=%d at %s:%d", hello.node_id, host, port)
        self._connection = connection

    def _addresses(self) -> list[tuple[str, int]]:
        nodes = self.state.nodes
        known = [self._address_of(nodes[voter]) for voter in self._voters if voter in nodes]
        return list(dict.fromkeys([*known, *self._seeds]))

    async def _follow(self) -> None:
        """Apply what the voter sends until it fails."""
        connection = self._connection
        assert connection is not None
        while True:
            index = None if self._whole else self.index
            # The first answer shows that this is a voter, so it should come at once.
            wait_ms = WAIT_MS if self._connected.is_set() else 0
            message = WatchMetadata(index, wait_ms, self.controller, self.term)
            try:
                async with asyncio.timeout(WAIT_MS / 1000 + GRACE_S) as self._scope:
                    reply = await connection.request(message)
            except TimeoutError:
                raise RequestTimeout("the voter does not answer") from None
            finally:
                self._scope = None
            self._check_voters(reply.message)
            try:
                self._take(reply)
            except RaftqError:
                self._whole = True
                raise
            self._whole = False
            self._has_state.set()
            self._connected.set()

    def _check_voters(self, message: WatchMetadataReply) -> None:
        """Check the voters that this voter names.

        A voter with a leader agrees with a majority, so it knows the voters. A voter without one
        may be new and wrong itself.
        """
        if message.controller is None or self._voters == message.voters:
            return
        if self._voters:
            self._refused = ConfigError(
                f"the settings name the voters {shown(self._voters)}, but the cluster's are "
                f"{shown(message.voters)}: {NOT_YET}"
            )
            raise self._refused
        self._voters = message.voters

    def _take(self, reply: Reply[WatchMetadataReply]) -> None:
        message = reply.message
        if message.dump:
            # A voter may be behind what another one has sent already. The copy never goes back.
            if message.index >= self.index:
                self._copy.restored(message.index, bytes(reply.raw))
        else:
            for index, command in decode_watched(message, reply.raw):
                if index > self.index:
                    self._copy.applied(index, command)
            self._copy.reached(message.index)
        self._copy.set_controller(message.controller, message.term)

    def _leave(self) -> None:
        """Give up this voter: the task that follows it looks for another."""
        self._connected.clear()
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def _close(self) -> None:
        connection, self._connection = self._connection, None
        if not self._stopping.is_set():
            self._connected.clear()
        if connection is not None:
            await connection.close()


def _taken_index(refusal: RequestError) -> int:
    """Return the index that the metadata had when the voter answered. It is taken out of the
    details, because it has no meaning elsewhere."""
    details = dict(refusal.details)
    index = details.pop("metadata_index", 0)
    refusal.with_details(**details)
    return index if isinstance(index, int) else 0


def _worse(last: RaftqError, error: RaftqError) -> RaftqError:
    """An unknown outcome stays unknown, whatever later tries say."""
    return last if last.outcome == "unknown" and error.outcome != "unknown" else error


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"seed {text!r} is not host:port")
    return host.strip("[]"), int(port)
