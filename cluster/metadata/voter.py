"""The metadata of a node that is a voter: on the consensus of its own process. (Shell.)

There are two copies of the state. The Raft thread applies commands to its own copy, which gives the
results and the snapshots. The event loop applies the same commands, in the same order, to the copy
that the node reads. A dump that the thread restored is handed over beside its event, one for one.
Both copies are deterministic. If they ever differ, the node stops.

At `start` the copy is empty, or at the last snapshot of this node. The rest follows as soon as it
is known to be committed. Code that needs the current state proposes something first.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from raftq.client.common.disk import Disk
from raftq.client.common.errors import (
    ConsensusBroken,
    NoLeader,
    OutcomeUnknown,
    RaftqError,
    Throttled,
    UnknownFormat,
)
from raftq.cluster.metadata.apply import apply, dump, load
from raftq.cluster.metadata.commands import Command, decode_command, encode_command
from raftq.cluster.metadata.copy import CopiedMetadata
from raftq.cluster.metadata.log import PROPOSE_S
from raftq.cluster.metadata.state import ClusterState
from raftq.cluster.metadata.waiting import wait_for_event
from raftq.cluster.raft.applied import Applied
from raftq.cluster.raft.config import ConsensusConfig
from raftq.cluster.raft.consensus import Change, Consensus, Restored

logger = logging.getLogger(__name__)

RETRY_S = 0.05


class MetadataMachine:
    """The replicated state machine. It belongs to the Raft thread, except `dumps`."""

    def __init__(self, cluster_id: str) -> None:
        self._state = ClusterState(cluster_id)
        self.dumps: deque[bytes] = deque()
        """Dumps that were restored and not yet loaded by the event loop, oldest first."""

    def apply(self, command: bytes, index: int) -> Any:
        try:
            decoded = decode_command(command)
        except UnknownFormat as error:
            # Other nodes may know it: a node that refused it would no longer agree with them.
            raise RuntimeError(f"a newer version of RaftQ decided entry {index}") from error
        result, _ = apply(self._state, decoded, index)
        return result

    def snapshot(self) -> bytes:
        return dump(self._state)

    def restore(self, data: bytes) -> None:
        self._state = load(data)
        self.dumps.append(data)


class VoterMetadata(CopiedMetadata):
    """A MetadataLog on the consensus of this process.

    `on_fatal` is called when this node can no longer take part: its process should end.
    """

    def __init__(
        self,
        config: ConsensusConfig,
        cluster_id: str,
        *,
        on_fatal: Callable[[BaseException], None] | None = None,
        on_stuck: Callable[[float], None] | None = None,
        disk: Disk | None = None,
    ) -> None:
        super().__init__(cluster_id, map(int, config.voters))
        self._node_id = int(config.node_id)
        self._machine = MetadataMachine(cluster_id)
        self._on_fatal = on_fatal
        self._stopping = asyncio.Event()
        self._broken: ConsensusBroken | None = None
        self.consensus = Consensus(
            config,
            self._machine,
            on_change=self._on_change,
            on_leader=self._on_leader,
            on_fatal=on_fatal,
            on_stuck=on_stuck,
            disk=disk,
        )

    @property
    def is_controller(self) -> bool:
        return self._copy.controller == self._node_id

    def new_command_id(self) -> bytes:
        return self.consensus.new_command_id()

    async def start(self) -> None:
        await self.consensus.start()

    async def stop(self) -> None:
        self._stopping.set()
        await self.consensus.stop()

    async def propose(
        self, command: Command, timeout_s: float = PROPOSE_S, command_id: bytes | None = None
    ) -> Any:
        encoded = encode_command(command)
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        name = command_id or self.new_command_id()
        unknown: RaftqError | None = None
        while True:
            if self._broken is not None:
                raise self._broken
            try:
                result = await self.consensus.propose(encoded, deadline - clock(), name)
            except (NoLeader, OutcomeUnknown, Throttled) as error:
                if error.outcome == "unknown":
                    unknown = error
                if clock() + RETRY_S >= deadline:
                    # A later try that failed says nothing about an earlier one that may have been
                    # accepted.
                    raise unknown or error  # noqa: B904 - one of them is this error
                await wait_for_event(self._stopping, RETRY_S)
            else:
                return result

    def abdicate(self) -> None:
        self.consensus.abdicate()

    # Calls from the Raft thread, on the event loop.

    def _on_change(self, change: Change) -> None:
        if self._broken is not None:
            return
        try:
            if isinstance(change, Restored):
                self._copy.restored(change.index, self._machine.dumps.popleft())
            else:
                self._copy.applied(change.index, _trace(change))
        except Exception as error:
            self._broken = ConsensusBroken(f"the copies of the metadata differ: {error!r}")
            logger.critical("metadata node=%d broken: %r", self._node_id, error, exc_info=error)
            if self._on_fatal is not None:
                self._on_fatal(self._broken)

    def _on_leader(self, leader: str | None, term: int) -> None:
        self._copy.set_controller(None if leader is None else int(leader), term)


def _trace(applied: Applied) -> bytes | None:
    """Return the command, if it changed something at its place in the order."""
    return None if applied.repeated or applied.error is not None else applied.command
