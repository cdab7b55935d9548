"""The real Raft in a simulated cluster: real nodes, journals on their machines' disks. (Test fake.)

`RaftMetadata` is the real VoterMetadata with the real state machine, copy and hand-over. Only what
is a thread in a real process, and its sockets, are others:

    LoopConsensus  the Raft thread as a chain of timers. What arrives waits until its next round, a
                   round takes as long as the disk does, and what it hands to the event loop gets
                   there a while later (`lag_s`), in order
    Wires          its network: one simulated connection to each other voter

`Council` is what the rest of the simulation knows of all voters: what has been decided, by whoever
applied it first. It checks that all others apply the same.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from posixpath import join
from random import Random
from typing import Any

from simdisk import SimDisk
from simloop import Process, VirtualTimeLoop

from raftq.client.common.errors import ConsensusStopped
from raftq.cluster.metadata.apply import apply
from raftq.cluster.metadata.commands import Command, decode_command
from raftq.cluster.metadata.log import PROPOSE_S
from raftq.cluster.metadata.state import ClusterState
from raftq.cluster.metadata.voter import VoterMetadata
from raftq.cluster.raft import messages as raft_messages
from raftq.cluster.raft.applied import Applied, Applier
from raftq.cluster.raft.config import ConsensusConfig, RaftLimits
from raftq.cluster.raft.consensus import Consensus, Restored
from raftq.cluster.raft.journal import RaftJournal
from raftq.cluster.raft.library import LEADER, Node, Transport
from raftq.cluster.raft.node import RaftNode, RaftSetup
from raftq.cluster.raft.snapshot import Snapshots

TICK_S = 0.05
ORDER_S = 1e-6
_LENGTH = struct.Struct(">I")
SMALL = RaftLimits(compact_entries=60, keep_entries=10)


class Council:
    """All voters, as whoever watches the simulation sees them."""

    def __init__(self, loop: VirtualTimeLoop, rng: Random, cluster_id: str) -> None:
        self.loop = loop
        self.rng = rng
        self.state = ClusterState(cluster_id)
        self.members: dict[int, RaftMetadata] = {}
        self.commit_index = 0
        self.churn = 0.0
        self.decide_s = 0.0
        self.slow_s: dict[int, float] = {}
        self.on_decided: Callable[[], None] | None = None
        self.on_proposed: Callable[[int, Command], None] | None = None
        self._names: dict[int, bytes] = {}
        self._last = ""
        loop.call_later(TICK_S, self._tick, context=loop.neutral)

    @property
    def leader(self) -> int | None:
        """Who leads in the latest term."""
        found = {
            raft.term_now: one
            for one, member in self.members.items()
            if not member.process.dead and (raft := member.raft) is not None
            if raft.state == LEADER
        }
        return found[max(found)] if found else None

    def forget(self, node_id: int) -> None:
        """The journal goes with the disk."""

    def slow_down(self, node_id: int, slow_s: float) -> bool:
        self.slow_s[node_id] = slow_s
        return node_id in self.members

    def last_entry(self) -> str:
        return self._last

    def note(self, node_id: int, applied: Applied) -> None:
        """A voter has applied something."""
        index = applied.index
        known = self._names.setdefault(index, applied.command_id)
        assert known == applied.command_id, f"node {node_id} applied something else at {index}"
        if index <= self.commit_index:
            return
        self.commit_index = index
        command = decode_command(applied.command)
        if not applied.repeated and applied.error is None:
            apply(self.state, command, index)
        self._last = f"{command!r} {applied.error!r}"
        self.loop.trace(f"raft {index} {self._last}")
        if self.on_decided is not None:
            # Not from inside the one who applied it: nothing else has heard of it yet.
            self.loop.call_soon(self.on_decided, context=self.loop.neutral)

    def _tick(self) -> None:
        leader = self.leader
        if leader is not None and self.churn and self.rng.random() < self.churn:
            member = self.members[leader]
            self.loop.trace(f"raft {leader} should abdicate")
            self.loop.call_soon(member.abdicate, context=member.process.context)
        self.loop.call_later(TICK_S, self._tick, context=self.loop.neutral)


class Wires(Transport):  # type: ignore[misc]
    """One connection to each other voter; of each pair the one with the greater id connects.

    What happens waits in `events` for the next round of the one it belongs to.
    """

    def __init__(self, owner: Any, consensus: "LoopConsensus") -> None:
        super().__init__(owner, owner.selfNode, owner.otherNodes)
        self._consensus = consensus
        self._loop = consensus.loop
        self._me = str(owner.selfNode.id)
        self._nodes = {str(one.id): one for one in owner.otherNodes}
        self._times = consensus.config.times
        self._live: dict[str, _Wire] = {}
        self._tried_at: dict[str, float] = {}
        self._trying: dict[str, asyncio.Task[None]] = {}
        self._server: Any = None
        self.events: deque[tuple[str, Node, Any]] = deque()

    async def listen(self) -> None:
        host, _, port = self._consensus.config.voters[self._me].rpartition(":")
        self._server = await self._loop.create_server(lambda: _Wire(self), host, int(port))

    # What Raft asks for.

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        wire = self._live.get(str(node.id))
        if wire is not None:
            data = raft_messages.encode(message)
            self._consensus.after_the_disk(wire.send, data)
        return wire is not None

    def backlog(self, node: Node) -> int:
        wire = self._live.get(str(node.id))
        return 0 if wire is None else wire.backlog

    @property
    def unsettled(self) -> bool:
        return len(self._live) < len(self._nodes)

    def tick(self, now: float) -> None:
        for wire in list(self._live.values()):
            if wire.heard_at < now - self._times.connection_ms / 1000:
                wire.close()
            elif wire.spoke_at < now - self._times.election_ms_max / 1000:
                wire.send(b"")
        for one in sorted(self._nodes):
            again = now - self._tried_at.get(one, 0.0) >= self._times.reconnect_ms / 1000
            if one < self._me and again and one not in self._live and one not in self._trying:
                self._tried_at[one] = now
                self._trying[one] = self._loop.create_task(self._connect(one))

    def destroy(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._trying.values():
            task.cancel()
        for wire in list(self._live.values()):
            wire.close()

    # Connections.

    async def _connect(self, one: str) -> None:
        host, _, port = self._consensus.config.voters[one].rpartition(":")
        try:
            async with asyncio.timeout(self._times.connection_ms / 1000):
                await self._loop.create_connection(lambda: _Wire(self), host, int(port))
        except (OSError, TimeoutError) as error:
            self._loop.trace(f"raft {self._me} does not reach {one}: {type(error).__name__}")
        finally:
            self._trying.pop(one, None)

    def hello(self) -> bytes:
        return self._me.encode()

    def adopt(self, wire: "_Wire", name: str) -> None:
        if name not in self._nodes:
            wire.close()
            return
        old = self._live.pop(name, None)
        if old is not None:
            old.close()
            self._happened("lost", name)
        self._live[name] = wire
        self._happened("connected", name)

    def lost(self, wire: "_Wire") -> None:
        if wire.peer is not None and self._live.get(wire.peer) is wire:
            del self._live[wire.peer]
            self._happened("lost", wire.peer)

    def received(self, wire: "_Wire", data: bytes) -> None:
        if wire.peer is not None and self._live.get(wire.peer) is wire:
            self._happened("message", wire.peer, data)

    def _happened(self, what: str, name: str, data: bytes = b"") -> None:
        self.events.append((what, self._nodes[name], data))
        self._consensus.wake()

    def take_events(self) -> None:
        """What came since the last round."""
        while self.events:
            what, node, data = self.events.popleft()
            if what == "message":
                self._onMessageReceived(node, raft_messages.decode(data))
            elif what == "connected":
                self._onNodeConnected(node)
            else:
                self._onNodeDisconnected(node)


class _Wire(asyncio.Protocol):
    """Frames over one connection. The first says who it is; an empty one is a sign of life."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._transport: Any = None
        self._buffer = b""
        self.peer: str | None = None
        self.heard_at = self.spoke_at = wires._loop.time()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.send(self._wires.hello())

    def connection_lost(self, exc: Exception | None) -> None:
        self._wires.lost(self)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._wires._loop.time()
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            frame, self._buffer = self._buffer[_LENGTH.size : end], self._buffer[end:]
            if self.peer is None:
                self.peer = frame.decode()
                self._wires.adopt(self, self.peer)
            elif frame:
                self._wires.received(self, frame)

    def send(self, data: bytes) -> None:
        self.spoke_at = self._wires._loop.time()
        if not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(data)) + data)

    @property
    def backlog(self) -> int:
        size: int = self._transport.get_write_buffer_size()
        return size

    def close(self) -> None:
        self._transport.abort()
        self._wires.lost(self)


class LoopConsensus(Consensus):
    """The Raft thread as a chain of timers on the virtual loop."""

    def __init__(self, owner: "RaftMetadata", rng: Random, **hooks: Any) -> None:
        super().__init__(owner.config, owner.machine, **hooks)
        self._rng = rng  # type: ignore[assignment]
        self._owner = owner
        self.loop: VirtualTimeLoop = owner.council.loop
        self._wires: Wires | None = None
        self._held: Any = None
        self._timer: asyncio.Handle | None = None
        self._operations = 0
        self._disk_s = 0.0
        self._busy_until = 0.0
        self._handed_at = 0.0

    async def start(self) -> None:
        self._loop = self.loop
        self._disk.make_directory(self.config.directory)
        self._held = self._disk.lock(join(self.config.directory, "lock"))
        try:
            self._node = self._open(self.loop.time)
        except BaseException:
            self._held.release()
            raise
        assert self._wires is not None
        await self._wires.listen()
        self.state = "running"
        self.wake()

    async def stop(self) -> None:
        if self.state == "running":
            self.state = "stopped"
            assert self._node is not None
            self._node.journal.flush()
            self._end(None)
        self._fail_waiting(ConsensusStopped("this node stops"))

    def _open(self, clock: Callable[[], float]) -> RaftNode:
        config, limits = self.config, self.config.limits

        def wires(owner: Any, me: Node, others: Any) -> Wires:
            self._wires = Wires(owner, self)
            return self._wires

        node = RaftNode(
            RaftSetup(
                node_id=config.node_id,
                others=[one for one in config.voters if one != config.node_id],
                times=config.times,
                limits=limits,
                journal=RaftJournal.open(self._disk, config.directory),
                snapshots=Snapshots(self._disk, config.directory),
                applier=Applier(self._machine, limits.recent_ids, limits.recent_result_bytes),
                transport=wires,
                clock=clock,
                rng=Random(self._rng.getrandbits(64)),
                on_applied=self._on_applied,
                on_restored=lambda index: self._changes.append(Restored(index)),
            )
        )
        if node.restored:
            self._changes.append(Restored(node.applied))
        return node

    def _on_applied(self, applied: Applied) -> None:
        self._owner.council.note(self._owner.node_id, applied)
        self._changes.append(applied)

    # Rounds.

    def _wake(self) -> None:
        self.wake()

    def wake(self) -> None:
        """Something is there for the next round."""
        if self.state == "running" and (self._timer is None or self._timer_at() > self._busy_until):
            self._schedule(0.0)

    def _timer_at(self) -> float:
        timer = self._timer
        return timer.when() if isinstance(timer, asyncio.TimerHandle) else 0.0

    def _schedule(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = max(self.loop.time() + seconds, self._busy_until)
        self._timer = self.loop.call_at(at, self._round, context=self._owner.process.context)

    def _round(self) -> None:
        node, wires = self._node, self._wires
        assert node is not None
        assert wires is not None
        self._timer = None
        self._beat = self.loop.time()
        disk = self._owner.disk
        self._operations, self._disk_s = disk.operations, self._rng.uniform(0, self._owner.sync_s)
        try:
            wires.take_events()
            busy = node.step()
        except Exception as error:
            self.state = "failed"
            self._end(error)
            return
        if disk.operations != self._operations:
            self._busy_until = self.loop.time() + self._disk_s
        self._hand_over()
        self._schedule(0.0 if busy or node.inbox else node.wait_s())

    def after_the_disk(self, call: Callable[[bytes], None], data: bytes) -> None:
        """What was written in this round before a message is durable before it leaves."""
        if self._owner.disk.operations == self._operations or not self._disk_s:
            call(data)
            return
        self._busy_until = max(self._busy_until, self.loop.time() + self._disk_s) + ORDER_S
        self.loop.call_at(self._busy_until, call, data, context=self._owner.process.context)

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        """In the order in which it happened, each a while later."""
        at = max(self.loop.time(), self._busy_until) + self._owner.lag()
        self._handed_at = at = max(at, self._handed_at + ORDER_S)
        self.loop.call_at(at, call, *args, context=self._owner.process.context)

    def _end(self, failure: Exception | None) -> None:
        node = self._node
        assert node is not None
        if self._timer is not None:
            self._timer.cancel()
        reason = "this node stops" if failure is None else f"this node has failed: {failure}"
        while node.inbox:
            node.proposals.add(node.inbox.popleft())
        node.proposals.stop(ConsensusStopped(reason))
        self._hand_over()
        node.destroy()
        self._held.release()
        if failure is not None:
            self._in_loop(self._failed, failure)


class RaftMetadata(VoterMetadata):
    """A MetadataLog on the real Raft."""

    def __init__(
        self,
        council: Council,
        config: ConsensusConfig,
        process: Process,
        disk: SimDisk,
        rng: Random,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        super().__init__(config, config.cluster, on_fatal=on_fatal, disk=disk)
        self.council = council
        self.config = config
        self.process = process
        self.disk = disk
        self.lag_s = 0.0
        self.sync_s = 0.0
        self._chance = rng
        self.consensus = LoopConsensus(
            self,
            Random(rng.getrandbits(64)),
            on_change=self._on_change,
            on_leader=self._on_leader,
            on_fatal=on_fatal,
            disk=disk,
        )
        council.members[self.node_id] = self

    @property
    def node_id(self) -> int:
        return self._node_id

    @property
    def machine(self) -> Any:
        return self._machine

    @property
    def raft(self) -> RaftNode | None:
        return self.consensus._node

    def lag(self) -> float:
        """How late the event loop hears what was handed to it now."""
        return self.lag_s + self.council.slow_s.get(self.node_id, 0.0) + self._chance.random() / 500

    async def propose(
        self, command: Command, timeout_s: float = PROPOSE_S, command_id: bytes | None = None
    ) -> Any:
        if self.council.on_proposed is not None:
            self.council.on_proposed(self.node_id, command)
        return await super().propose(command, timeout_s, command_id)
