"""An in-memory consensus behind the MetadataLog protocol. (Test fake.)

`SimConsensus` is the cluster's one metadata log; each node has a `SimMetadata`, its view of it.
What Raft promises is modelled, not Raft: that has its own tests (test_consensus_schedules.py).

    leader      a node that runs and exchanges bytes with a majority, over the links of the same
                simulated network; when it no longer does, another one takes over after an election
                delay, with a new term
    commit      what the leader takes is committed after a delay; when the leader falls meanwhile,
                chance decides whether the command survives it
    apply       each node applies in order, each after its own delay, and only while it hears the
                leader; a node that is cut off stays behind. Either all that was decided at once,
                or (`lag_s`) entry by entry, each so long after it was decided; a node that could
                not listen for a while then gets several at once, or one by one in no time
    propose     a node that does not reach the leader gets NoLeader; one whose answer is lost gets
                OutcomeUnknown, whether or not the command was applied; a command id applies once
    controller  an old leader believes in itself until it has not heard from a majority for a while
    abdicate    the leader falls, and is not elected again for a while
    watch       what observers ask for: commands, and now and then the whole state instead
    restart     a node begins with the state of some earlier index and catches up
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from simloop import Machine, Process, VirtualTimeLoop
from simnet import SimNetwork

from raftq.client.common.errors import NoLeader, OutcomeUnknown, RaftqError
from raftq.client.wire.messages import ErrorReply
from raftq.cluster.metadata.apply import apply, dump, load
from raftq.cluster.metadata.changes import Change, differences
from raftq.cluster.metadata.commands import Command, decode_command, encode_command
from raftq.cluster.metadata.log import PROPOSE_S, ControllerSubscriber, Subscriber, Watched
from raftq.cluster.metadata.state import ClusterState

TICK_S = 0.05
ELECTION_S = (0.15, 0.6)
FALLBACK_S = (0.3, 0.8)
RETRY_S = 0.05
ABDICATE_S = 5.0
DUMP_SHARE = 0.05
"""How many answers to observers are the whole state: the voter has forgotten the commands."""
MERGE_SHARE = 0.5
"""How often a node that is behind applies at once all that it should have by now."""


@dataclass(slots=True)
class Entry:
    """One decided command, and what came of it."""

    data: bytes
    command: Command
    command_id: bytes
    result: Any = None
    error: RaftqError | None = None
    changes: list[Change] = field(default_factory=list)


@dataclass(slots=True)
class _Seat:
    """A voter's place: who sits there now, and how far it had come."""

    machine: Machine
    member: "SimMetadata | None" = None
    durable_index: int = 0


class SimConsensus:
    """The log and its leader. `state` is what everybody will have applied in the end."""

    def __init__(
        self, network: SimNetwork, rng: Random, cluster_id: str, voters: dict[int, Machine]
    ) -> None:
        self.loop: VirtualTimeLoop = network.loop
        self.network = network
        self.rng = rng
        self.cluster_id = cluster_id
        self.entries: list[Entry] = []
        self.decided_at: list[float] = []
        """When each entry was decided."""
        self.state = ClusterState(cluster_id)
        self.leader: int | None = None
        self.term = 0
        self.decide_s = 0.005
        """From taking a command to deciding it, at most."""
        self.churn = 0.0
        """Chance per tick that leadership moves for no reason."""
        self.on_decided: Callable[[], None] | None = None
        """Called when a command has changed the state."""
        self.on_proposed: Callable[[int, Command], None] | None = None
        """Called with whoever proposes, and what."""
        self.seats = {node_id: _Seat(machine) for node_id, machine in voters.items()}
        self._index_of: dict[bytes, int] = {}
        self._election_at: float | None = None
        self._stands_at: dict[int, float] = {}
        self._tick()

    def forget(self, node_id: int) -> None:
        """The node's disk is gone."""
        if node_id in self.seats:
            self.seats[node_id].durable_index = 0

    def slow_down(self, node_id: int, slow_s: float) -> bool:
        """Make a node hear so much later; whether there is a node to slow down."""
        member = self.seats[node_id].member if node_id in self.seats else None
        if member is not None:
            member.slow_s = slow_s
        return member is not None

    @property
    def commit_index(self) -> int:
        return len(self.entries)

    # Who reaches whom.

    def runs(self, node_id: int) -> bool:
        member = self.seats[node_id].member
        return member is not None and not member.process.dead and not member.process.paused

    def connected(self, one: int, other: int) -> bool:
        """Whether both run and bytes get from each to the other."""
        if not (self.runs(one) and self.runs(other)):
            return False
        a, b = self.seats[one].machine, self.seats[other].machine
        return one == other or (self.network.reaches(a, b) and self.network.reaches(b, a))

    def viable(self, node_id: int) -> bool:
        reached = sum(self.connected(node_id, other) for other in self.seats)
        return reached > len(self.seats) // 2

    def hears(self, node_id: int) -> bool:
        """Whether the node is in touch with a leader that can decide something."""
        leader = self.leader
        return leader is not None and self.connected(node_id, leader) and self.viable(leader)

    def _tick(self) -> None:
        now = self.loop.time()
        if self.leader is not None and self.viable(self.leader):
            self._election_at = None
            if self.churn and self.rng.random() < self.churn:
                self._elect()
        elif self._election_at is None:
            self._election_at = now + self.rng.uniform(*ELECTION_S)
        elif now >= self._election_at:
            self._elect()
        for seat in self.seats.values():
            if seat.member is not None:
                seat.member.hear()
        self.loop.call_later(TICK_S, self._tick, context=self.loop.neutral)

    def _elect(self) -> None:
        now = self.loop.time()
        able = [
            node_id
            for node_id in self.seats
            if self.viable(node_id) and self._stands_at.get(node_id, 0.0) <= now
        ]
        if able:
            self.leader = self.rng.choice(able)
            self.term += 1
            self._election_at = None
            self.loop.trace(f"raft leader {self.leader} term {self.term}")

    def abdicate(self, node_id: int) -> None:
        if self.leader == node_id:
            self.leader = None
            self._stands_at[node_id] = self.loop.time() + ABDICATE_S
            self.loop.trace(f"raft {node_id} abdicates")

    # Commands.

    def take(self, node_id: int, data: bytes, command_id: bytes) -> "asyncio.Future[int]":
        """The leader has it. The future is the index, and is never done if the answer is lost."""
        future: asyncio.Future[int] = self.loop.create_future()
        rng = self.rng
        delay = rng.uniform(0.000_5, self.decide_s)
        if rng.random() < 0.03:
            delay += rng.uniform(0, 0.3)
        answered = rng.random() >= 0.02
        term = self.term

        def commit(first: bool) -> None:
            index = self._index_of.get(command_id)
            if index is None:
                leader = self.leader
                same = first and self.term == term
                if leader is None or not self.viable(leader) or not same:
                    if first and rng.random() < 0.5:
                        return  # the next leader does not have it
                    if leader is None or not self.viable(leader):
                        self.loop.call_later(TICK_S, commit, False, context=self.loop.neutral)
                        return
                index = self._append(data, command_id)
            if answered and self.hears(node_id) and not future.done():
                future.set_result(index)

        self.loop.call_later(delay, commit, True, context=self.loop.neutral)
        return future

    def _append(self, data: bytes, command_id: bytes) -> int:
        entry = Entry(data, decode_command(data), command_id)
        index = len(self.entries) + 1
        try:
            entry.result, entry.changes = apply(self.state, entry.command, index)
        except RaftqError as error:
            entry.error = error
        self.entries.append(entry)
        self.decided_at.append(self.loop.time())
        self._index_of[command_id] = index
        self.loop.trace(f"raft {index} {entry.command!r} {entry.error!r}")
        for seat in self.seats.values():
            if seat.member is not None:
                seat.member.catch_up_soon()
        if self.on_decided is not None:
            self.on_decided()
        return index

    def last_entry(self) -> str:
        last = self.entries[-1]
        return f"{last.command!r} {last.error!r}"

    def state_at(self, index: int) -> ClusterState:
        """The state after so many entries, as a node would restore it from its own dump."""
        state = ClusterState(self.cluster_id)
        for at, entry in enumerate(self.entries[:index], 1):
            if entry.error is None:
                apply(state, entry.command, at)
        return load(dump(state))


class SimMetadata:
    """One run of a node's metadata: a MetadataLog."""

    def __init__(
        self,
        consensus: SimConsensus,
        node_id: int,
        process: Process,
        start_index: int | None = None,
    ) -> None:
        seat = consensus.seats[node_id]
        if start_index is None:
            start_index = consensus.rng.randint(0, seat.durable_index)
        self.process = process
        self.node_id = node_id
        self.index = start_index
        self.state = consensus.state_at(start_index)
        self.controller: int | None = None
        self.term = 0
        self.slow_s = 0.0
        """Added to the delay of applying; at random, where all is applied at once."""
        self.lag_s: float | None = None
        """How late each entry is; None: all that was decided is applied at once."""
        self._consensus = consensus
        self._loop = consensus.loop
        self._subscribers: list[Subscriber] = []
        self._on_controller: list[ControllerSubscriber] = []
        self._moved = asyncio.Event()
        self._commands = 0
        self._catching_up = False
        self._silent_since: float | None = None
        self._fallback_s = consensus.rng.uniform(*FALLBACK_S)
        self._started = False

    @property
    def is_controller(self) -> bool:
        return self.controller == self.node_id

    @property
    def voters(self) -> tuple[int, ...]:
        return tuple(self._consensus.seats)

    # The protocol.

    async def start(self) -> None:
        self._consensus.seats[self.node_id].member = self
        self._started = True
        self._publish(differences(ClusterState(self._consensus.cluster_id), self.state))
        self.catch_up_soon()

    async def stop(self) -> None:
        seat = self._consensus.seats[self.node_id]
        if seat.member is self:
            seat.member = None
        self._started = False

    def subscribe(self, callback: Subscriber) -> None:
        self._subscribers.append(callback)

    def on_controller(self, callback: ControllerSubscriber) -> None:
        self._on_controller.append(callback)

    def new_command_id(self) -> bytes:
        self._commands += 1
        return f"{self.process.name} {self._commands}".encode()

    async def propose(
        self, command: Command, timeout_s: float = PROPOSE_S, command_id: bytes | None = None
    ) -> Any:
        data = encode_command(command)
        command_id = command_id or self.new_command_id()
        if self._consensus.on_proposed is not None:
            self._consensus.on_proposed(self.node_id, command)
        error: RaftqError = NoLeader("no leader took the command in time")
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self._try(data, command_id)
                    except (NoLeader, OutcomeUnknown) as failed:
                        if isinstance(failed, OutcomeUnknown) or isinstance(error, NoLeader):
                            error = failed
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise error from None

    async def _try(self, data: bytes, command_id: bytes) -> Any:
        consensus = self._consensus
        leader = consensus.leader
        if leader is None or not consensus.connected(self.node_id, leader):
            raise NoLeader("the leader cannot be reached")
        await asyncio.sleep(consensus.rng.uniform(0, 0.002))
        if leader != consensus.leader or not consensus.connected(self.node_id, leader):
            raise NoLeader("the leader cannot be reached any more")
        try:
            async with asyncio.timeout(consensus.rng.uniform(0.5, 1.5)):
                index = await consensus.take(self.node_id, data, command_id)
                while self.index < index:
                    await self._moved.wait()
        except TimeoutError:
            raise OutcomeUnknown("no answer about the command") from None
        entry = consensus.entries[index - 1]
        if entry.error is not None:
            raise ErrorReply.from_error(entry.error).to_error()
        return entry.result

    def abdicate(self) -> None:
        self._consensus.abdicate(self.node_id)
        self._believe(None, self.term)

    async def watch(self, index: int | None, wait_s: float) -> Watched:
        if index is not None and index >= self.index:
            try:
                async with asyncio.timeout(wait_s):
                    await self._moved.wait()
            except TimeoutError:
                return Watched(index)
        if index is None or self._consensus.rng.random() < DUMP_SHARE:
            return Watched(self.index, dump=dump(self.state))
        entries = self._consensus.entries[index : self.index]
        commands = tuple(
            (at, one.data) for at, one in enumerate(entries, index + 1) if one.error is None
        )
        return Watched(max(index, self.index), commands)

    # What the consensus tells.

    def hear(self) -> None:
        """A tick: let the node notice, in its own time, who leads and whether it lags."""
        if self.process.dead:
            self._consensus.seats[self.node_id].member = None
        elif not self.process.paused:
            news = (self._consensus.leader, self._consensus.term) != (self.controller, self.term)
            if news or self._silent_since is not None or not self._consensus.hears(self.node_id):
                self._loop.call_soon(self._notice, context=self.process.context)
            self.catch_up_soon()

    def _notice(self) -> None:
        consensus, now = self._consensus, self._loop.time()
        if consensus.hears(self.node_id):
            self._silent_since = None
            self._believe(consensus.leader, consensus.term)
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= self._fallback_s:
            self._believe(None, self.term)

    def _believe(self, controller: int | None, term: int) -> None:
        if (controller, term) != (self.controller, self.term):
            self.controller, self.term = controller, term
            for callback in self._on_controller:
                callback(controller, term)
            self._moved.set()
            self._moved = asyncio.Event()

    def catch_up_soon(self) -> None:
        if self._catching_up or self.index >= self._consensus.commit_index or not self._started:
            return
        self._catching_up = True
        rng = self._consensus.rng
        if self.lag_s is not None:
            jitter = rng.uniform(0, 0.2 if rng.random() < 0.02 else 0.003)
            at = self._consensus.decided_at[self.index] + self.lag_s + self.slow_s + jitter
            at = max(at, self._loop.time())
            self._loop.call_at(at, self._catch_up, context=self.process.context)
            return
        delay = rng.uniform(0, 0.003) + (rng.uniform(0, self.slow_s) if self.slow_s else 0.0)
        if rng.random() < 0.02:
            delay += rng.uniform(0, 0.2)
        self._loop.call_later(delay, self._catch_up, context=self.process.context)

    def _catch_up(self) -> None:
        self._catching_up = False
        consensus = self._consensus
        if not self._started or not consensus.hears(self.node_id):
            return
        changes: list[Change] = []
        for entry in consensus.entries[self.index : self._due()]:
            self.index += 1
            if entry.error is None:
                changes += apply(self.state, entry.command, self.index)[1]
        seat = consensus.seats[self.node_id]
        seat.durable_index = max(seat.durable_index, self.index)
        self._publish(changes)
        self.catch_up_soon()

    def _due(self) -> int:
        """Up to which index to apply now."""
        consensus = self._consensus
        if self.lag_s is None:
            return consensus.commit_index
        due = self.index + 1
        late = self._loop.time() - self.lag_s - self.slow_s
        if late > consensus.decided_at[self.index] + 0.05 and consensus.rng.random() < MERGE_SHARE:
            while due < consensus.commit_index and consensus.decided_at[due] <= late:
                due += 1
        return due

    def _publish(self, changes: Sequence[Change]) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
        if changes:
            for callback in self._subscribers:
                callback(changes)
