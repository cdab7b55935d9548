"""The controller: who is alive, who should lead, what has to move. (Core.)

It acts on the node that leads the metadata's Raft group, and only by proposing commands, so a
controller that was replaced without knowing it changes nothing.

    Promoted(state)                     begin: every alive node is probed; who answers, or has a
                                        connection, gets a fresh lease, others half of one
    Demoted                             forget everything
    HeartbeatCame(node, incarnation)    renews the lease of that incarnation
    ConnectionEnded(node)               suspicion: probe at once, again until a sign of life
    ProbeEnded(node, incarnation, ..)   refused or answered by another process: fence; no answer:
                                        wait for the lease
    Changed(changes, state)             what was decided
    ProposalEnded(command, error)       the answer to a ProposeCommand
    Tick                                time has passed; send one at `next_deadline()`

At most one proposal is in flight per node to be fenced, one for elections and one for moves. After
a refusal the next try waits, twice as long each time. A step costs O(nodes); only when elections or
moves are due, O(partitions). After a step, `next_deadline()` is later than its `now`.

When a step comes much later than its deadline, this process was stopped and heard nobody since the
step before: that time does not count against the leases, or a pause of the controller would fence
everybody else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from raftq.client.wire.errors import ConfigError, RaftqError
from raftq.cluster.changes import Change, LeaderResigned, NodeChanged
from raftq.cluster.commands import Command, ElectPreferred, FenceNode, MoveReplicas
from raftq.cluster.moves import next_move, unbalanced
from raftq.cluster.state import ClusterState


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    lease_ms: int = 3000
    """A node that is not heard for this long is fenced. Too short: pauses of a busy node cost it
    its leadership; too long: partitions of a node that hangs stay without a leader."""
    balance_ms: int = 10_000
    """Between two rounds of giving partitions back to their preferred leaders."""
    balance_settle_ms: int = 5000
    """A node must be alive for this long before it gets leadership back."""
    resigned_ms: int = 60_000
    """A node that gave up a partition, because nobody fetched from it, must wait this long."""
    balance_max: int = 500
    """Partitions that change their leader in one round."""
    moves_max: int = 4
    """Moves under way at which no further one is begun."""
    move_patience_ms: int = 30_000
    """A move to a node that is down for this long is planned anew."""
    probe_ms: int = 100
    """Between two probes of a node that is suspected."""
    probe_timeout_ms: int = 2000
    """A probe without a result is forgotten after this time; the shell's own limit is shorter."""
    probes_max: int = 32
    """Probes at the same time."""
    proposal_ms: int = 10_000
    """A proposal without an answer is forgotten after this time."""
    retry_ms: int = 500
    """Before a refused proposal is made again; doubles up to `balance_ms`."""
    stall_ms: int = 500
    """A step that comes later than this after its deadline means that this process was stopped."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, not {value}"
            for name in self.__slots__
            if (value := getattr(self, name)) < 1
        ]
        if self.balance_max > 8192:
            problems.append(f"balance_max must be at most 8192, not {self.balance_max}")
        if self.retry_ms > self.balance_ms:
            problems.append("retry_ms must not be above balance_ms")
        if self.probe_ms >= self.lease_ms:
            problems.append("probe_ms must be below lease_ms")
        if problems:
            raise ConfigError("controller: " + "; ".join(problems))


@dataclass(frozen=True, slots=True)
class Promoted:
    state: ClusterState
    connected: tuple[int, ...] = ()
    """Nodes that hold a connection to this one, and need no probe."""


@dataclass(frozen=True, slots=True)
class Demoted:
    pass


@dataclass(frozen=True, slots=True)
class HeartbeatCame:
    node_id: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ConnectionEnded:
    node_id: int


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    node_id: int
    incarnation: int | None
    """Who answered: that of the ProbeNode where the answer does not tell; None: nobody."""
    refused: bool
    """The host says that nobody listens there, so the process is gone."""
    probed: int | None = None
    """The incarnation of the ProbeNode; a result about an older one is then ignored."""


@dataclass(frozen=True, slots=True)
class Changed:
    changes: Sequence[Change]
    state: ClusterState


@dataclass(frozen=True, slots=True)
class ProposalEnded:
    command: Command
    error: RaftqError | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Promoted
    | Demoted
    | HeartbeatCame
    | ConnectionEnded
    | ProbeEnded
    | Changed
    | ProposalEnded
    | Tick
)


@dataclass(slots=True)
class ProposeCommand:
    command: Command
    reason: str


@dataclass(slots=True)
class ProbeNode:
    node_id: int
    incarnation: int


Effect = ProposeCommand | ProbeNode
_Key = tuple[str, int]
_ELECTIONS: _Key = ("elections", 0)
_MOVES: _Key = ("moves", 0)


@dataclass(slots=True)
class _Watch:
    """What is known about one alive node."""

    node_id: int
    incarnation: int
    alive_since: float
    expires_at: float
    suspected: bool = False
    probe_at: float = 0.0
    """When a suspected node may be probed (again)."""
    probing_until: float | None = None
    gone: str = ""
    """Why its process is known to be gone."""
    settled_at: float = 0.0
    """When it may get leadership back at the earliest, however long it is alive."""


class Controller:
    """See the module's docstring."""

    def __init__(self, config: ControllerConfig, rng: Random) -> None:
        self.config = config
        self._rng = rng
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Promoted: self._on_promoted,
            Demoted: self._on_demoted,
            HeartbeatCame: self._on_heartbeat,
            ConnectionEnded: self._on_connection_ended,
            ProbeEnded: self._on_probe_ended,
            Changed: self._on_changed,
            ProposalEnded: self._on_proposal_ended,
            Tick: lambda event, now: None,
        }
        self._wake_at: float | None = None
        self._stepped_at = 0.0
        self._forget()

    def _forget(self) -> None:
        self._state: ClusterState | None = None
        self._watches: dict[int, _Watch] = {}
        self._down_since: dict[int, float] = {}
        self._open: dict[_Key, float] = {}  # proposals in flight, and when to forget them
        self._held: dict[_Key, float] = {}  # what may not be proposed before
        self._refusals: dict[_Key, int] = {}
        self._balance_at = 0.0
        self._moves_due = False
        self._lost_at: float | None = None

    # The one door, and what it needs from the clock.

    def step(self, event: Event, now: float) -> list[Effect]:
        self._forgive_stall(now)
        self._handlers[type(event)](event, now)
        effects: list[Effect] = []
        if self._state is not None:
            self._expire(now)
            self._fence(now, effects)
            self._probe(now, effects)
            self._balance(self._state, now, effects)
            self._move(self._state, now, effects)
        self._wake_at = self._deadline(now)
        return effects

    def next_deadline(self) -> float | None:
        """When to step with a Tick if nothing else happens; None while not in control."""
        return self._wake_at

    def describe(self) -> str:
        if self._state is None:
            return "controller: not in control"
        suspects = [one.node_id for one in self._watches.values() if one.suspected]
        return (
            f"controller: alive {sorted(self._watches)}, suspected {sorted(suspects)}, "
            f"in flight {sorted(self._open)}, next {self._wake_at}"
        )

    # Events.

    def _on_promoted(self, event: Promoted, now: float) -> None:
        self._forget()
        self._state = event.state
        self._moves_due = True
        self._balance_at = now + self._balance_gap()
        for node_id in sorted(event.state.nodes):
            self._look_at(node_id, now)
        for watch in self._watches.values():
            watch.suspected = watch.node_id not in event.connected
            watch.probe_at = now
            if watch.suspected:
                # The one before may have waited for it already; and who can, beats at once.
                watch.expires_at = now + self.config.lease_ms / 2000

    def _on_demoted(self, event: Demoted, now: float) -> None:
        self._forget()

    def _on_heartbeat(self, event: HeartbeatCame, now: float) -> None:
        watch = self._watches.get(event.node_id)
        if watch is not None and watch.incarnation == event.incarnation:
            watch.expires_at = now + self.config.lease_ms / 1000
            watch.suspected = False
            watch.gone = ""

    def _on_connection_ended(self, event: ConnectionEnded, now: float) -> None:
        watch = self._watches.get(event.node_id)
        if watch is not None:
            watch.suspected = True

    def _on_probe_ended(self, event: ProbeEnded, now: float) -> None:
        watch = self._watches.get(event.node_id)
        if watch is None or watch.probing_until is None:
            return
        if event.probed is not None and event.probed != watch.incarnation:
            return
        watch.probing_until = None
        watch.probe_at = now + self.config.probe_ms / 1000
        if not watch.suspected:
            return  # it was heard in the meantime
        if event.refused:
            watch.gone = "nobody listens at its address"
        elif event.incarnation is not None:
            watch.suspected = False
            watch.expires_at = max(
                watch.expires_at, watch.alive_since + self.config.lease_ms / 1000
            )
            if event.incarnation != watch.incarnation:
                watch.gone = "another process answers at its address"

    def _on_changed(self, event: Changed, now: float) -> None:
        if self._state is None:
            return
        self._state = event.state
        for change in event.changes:
            if isinstance(change, NodeChanged):
                self._look_at(change.node_id, now)
            elif isinstance(change, LeaderResigned) and change.node_id in self._watches:
                watch = self._watches[change.node_id]
                watch.settled_at = now + self.config.resigned_ms / 1000
        self._moves_due = True
        if not self._refusals.get(_MOVES):
            self._held.pop(_MOVES, None)  # it was held only until its change is known

    def _on_proposal_ended(self, event: ProposalEnded, now: float) -> None:
        key = _key(event.command)
        if self._open.pop(key, None) is None:
            return
        refusals = 0 if event.error is None else self._refusals.get(key, 0) + 1
        self._refusals[key] = refusals
        # Also after a success: its change may not have been heard of yet.
        wait_ms = min(self.config.retry_ms << min(refusals, 16), self.config.balance_ms)
        self._held[key] = now + wait_ms / 1000
        if key == _MOVES:
            self._moves_due = True

    def _look_at(self, node_id: int, now: float) -> None:
        """Take over what the state says about a node."""
        assert self._state is not None
        node = self._state.nodes.get(node_id)
        if node is None or not node.alive:
            self._watches.pop(node_id, None)
            key = ("fence", node_id)
            for known in (self._held, self._open, self._refusals):
                known.pop(key, None)
            if node is None:
                self._down_since.pop(node_id, None)
            else:
                self._down_since.setdefault(node_id, now)
            return
        self._down_since.pop(node_id, None)
        watch = self._watches.get(node_id)
        if watch is None or watch.incarnation != node.incarnation:
            expires_at = now + self.config.lease_ms / 1000
            self._watches[node_id] = _Watch(node_id, node.incarnation, now, expires_at)

    # What to do.

    def _forgive_stall(self, now: float) -> None:
        since, self._stepped_at = self._stepped_at, now
        if self._wake_at is None or now - self._wake_at <= self.config.stall_ms / 1000:
            return
        for watch in self._watches.values():
            watch.expires_at += now - since

    def _expire(self, now: float) -> None:
        for key in [key for key, until in self._open.items() if until <= now]:
            del self._open[key]
        for key in [key for key, until in self._held.items() if until <= now]:
            del self._held[key]
        for watch in self._watches.values():
            if watch.probing_until is not None and watch.probing_until <= now:
                watch.probing_until = None
                watch.probe_at = now + self.config.probe_ms / 1000

    def _may(self, key: _Key) -> bool:
        return key not in self._open and key not in self._held

    def _propose(self, command: Command, reason: str, now: float) -> ProposeCommand:
        self._open[_key(command)] = now + self.config.proposal_ms / 1000
        return ProposeCommand(command, reason)

    def _fence(self, now: float, effects: list[Effect]) -> None:
        for watch in self._watches.values():
            expired = watch.expires_at <= now
            if (watch.gone or expired) and self._may(("fence", watch.node_id)):
                command = FenceNode(watch.node_id, watch.incarnation)
                reason = watch.gone or "its lease expired"
                effects.append(self._propose(command, reason, now))

    def _probe(self, now: float, effects: list[Effect]) -> None:
        watches = self._watches.values()
        room = self.config.probes_max - sum(one.probing_until is not None for one in watches)
        for watch in watches:
            if room > 0 and _to_probe(watch) and watch.probe_at <= now:
                room -= 1
                watch.probing_until = now + self.config.probe_timeout_ms / 1000
                effects.append(ProbeNode(watch.node_id, watch.incarnation))

    def _balance(self, state: ClusterState, now: float, effects: list[Effect]) -> None:
        if now < self._balance_at:
            return
        self._balance_at = now + self._balance_gap()
        if not self._may(_ELECTIONS):
            return
        settle = self.config.balance_settle_ms / 1000
        ready = {
            one.node_id
            for one in self._watches.values()
            if max(one.alive_since + settle, one.settled_at) <= now
            and not (one.suspected or one.gone)
            and not state.nodes[one.node_id].draining
        }
        found = unbalanced(state, ready, self.config.balance_max)
        if found:
            reason = f"{len(found)} partitions go back to their preferred leaders"
            effects.append(self._propose(ElectPreferred(found), reason, now))

    def _balance_gap(self) -> float:
        """With jitter, so that rounds do not keep step with anything else that is periodic."""
        return self.config.balance_ms / 1000 * self._rng.uniform(0.9, 1.1)

    def _move(self, state: ClusterState, now: float, effects: list[Effect]) -> None:
        if self._lost_at is not None and self._lost_at <= now:
            self._moves_due = True
        if not self._moves_due or not self._may(_MOVES):
            return
        self._moves_due = False
        patience = self.config.move_patience_ms / 1000
        lost = {node for node, since in self._down_since.items() if since + patience <= now}
        soon = [since + patience for node, since in self._down_since.items() if node not in lost]
        self._lost_at = min(soon, default=None)
        planned = next_move(state, self.config.moves_max, lost)
        if planned is not None:
            command, reason = planned
            effects.append(self._propose(command, reason, now))

    def _deadline(self, now: float) -> float | None:
        if self._state is None:
            return None
        times = [self._balance_at, *self._open.values(), *self._held.values()]
        if self._lost_at is not None and self._may(_MOVES):
            times.append(self._lost_at)
        room = self.config.probes_max - sum(
            one.probing_until is not None for one in self._watches.values()
        )
        for watch in self._watches.values():
            if self._may(("fence", watch.node_id)):
                times.append(watch.expires_at)
            if watch.probing_until is not None:
                times.append(watch.probing_until)
            elif room > 0 and _to_probe(watch):
                times.append(watch.probe_at)
        return min(times)


def _to_probe(watch: _Watch) -> bool:
    return watch.suspected and not watch.gone and watch.probing_until is None


def _key(command: Command) -> _Key:
    if isinstance(command, FenceNode):
        return ("fence", command.node_id)
    if isinstance(command, ElectPreferred):
        return _ELECTIONS
    assert isinstance(command, MoveReplicas), command
    return _MOVES
