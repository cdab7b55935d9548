"""The controller: who is alive, who should lead, what has to move. (Core.)

It runs on the node that leads the Raft group of the metadata, and only proposes commands. So a
controller that was replaced without knowing it changes nothing.

    Promoted(state)                     begin: every alive node is probed. A node that answers, or
                                        has a connection, gets a fresh lease, others half a lease
    Demoted                             forget everything
    HeartbeatCame(node, incarnation)    renew the lease of that incarnation
    ConnectionEnded(node)               suspect it: probe at once, repeat until a sign of life
    ProbeEnded(node, incarnation, ..)   refused or answered by another process: fence; no answer:
                                        wait for the lease
    Changed(changes, state)             a command was applied
    ProposalEnded(command, error)       the answer to a ProposeCommand
    Tick                                time has passed; send it at `next_deadline()`

When nodes send no heartbeats but answer probes, they cannot connect to this controller. It would
fence all of them for a fault of its own. So a voter without a heartbeat for half a lease is probed,
and when more voters answer without heartbeats than send them, the controller abdicates: all may
reach another one. If no other voter can lead, this node leads again after a while.

A node that accepts no connection may still send heartbeats. So leadership is given back only to a
node that has just answered a probe: a round of balance probes the nodes that it would give
something to, and each answer begins another round.

At most one proposal is in flight per node to be fenced, one for elections and one for moves. After
a refusal the next try waits, twice as long each time. A step costs O(nodes), or O(partitions) when
elections or moves are due. After a step, `next_deadline()` is later than its `now`.

When a step comes much later than its deadline, this process was stopped and received nothing since
the step before. That time does not count against the leases: otherwise a pause of the controller
would fence all other nodes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from raftq.client.common.backoff import doubled_ms
from raftq.cluster.controller.events import (
    Abdicate,
    Changed,
    ConnectionEnded,
    ControllerConfig,
    Demoted,
    Effect,
    Event,
    HeartbeatCame,
    ProbeEnded,
    ProbeNode,
    Promoted,
    ProposalEnded,
    ProposeCommand,
    Tick,
)
from raftq.cluster.controller.moves import next_move, unbalanced
from raftq.cluster.metadata.changes import LeaderResigned, NodeChanged
from raftq.cluster.metadata.commands import Command, ElectPreferred, FenceNode, MoveReplicas
from raftq.cluster.metadata.state import ClusterState

_Key = tuple[str, int]
_ELECTIONS: _Key = ("elections", 0)
_MOVES: _Key = ("moves", 0)
_ABDICATION: _Key = ("abdication", 0)


@dataclass(slots=True)
class _Watch:
    """What is known about one alive node."""

    node_id: int
    incarnation: int
    alive_since: float
    expires_at: float
    suspected: bool = False
    probe_at: float = 0.0
    """When a suspected node may be probed next."""
    probing_until: float | None = None
    gone: str = ""
    """Why its process is known to be gone, or ""."""
    may_lead_at: float = 0.0
    """When it may get leadership back at the earliest, however long it has been alive."""
    heard_at: float = 0.0
    """When its last heartbeat came; before the first one, when the watch began."""
    silent: bool = False
    """A rival without a heartbeat for half a lease. Since then it is suspected and probed."""
    answers: bool = False
    """It has answered probes since it became silent: it is well, but does not reach this node."""
    checked: bool = False
    """Its next probe decides whether it gets leadership back."""
    reached_at: float = float("-inf")
    """When it last answered a probe."""


class Controller:
    """The state machine of the controller."""

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
        self._rivals: frozenset[int] = frozenset()
        self._watches: dict[int, _Watch] = {}
        self._down_since: dict[int, float] = {}
        self._open: dict[_Key, float] = {}  # requests under way, and when to forget them
        self._held: dict[_Key, float] = {}  # what must wait, and until when
        self._refusals: dict[_Key, int] = {}
        self._balance_at = 0.0
        self._moves_due = False
        self._lost_at: float | None = None

    # The one entry, and what it needs from the clock.

    def step(self, event: Event, now: float) -> list[Effect]:
        self._forgive_stall(now)
        self._handlers[type(event)](event, now)
        effects: list[Effect] = []
        if self._state is not None:
            self._expire(now)
            self._abdicate(now, effects)
            if _ABDICATION not in self._open:
                self._fence(now, effects)
                self._balance(self._state, now, effects)
                self._probe(now, effects)
                self._move(self._state, now, effects)
        self._wake_at = self._deadline(now)
        return effects

    def next_deadline(self) -> float | None:
        """When to step with a Tick if nothing else happens; None while not in control."""
        return self._wake_at

    def describe(self) -> str:
        if self._state is None:
            return "controller: not in control"
        suspects = [watch.node_id for watch in self._watches.values() if watch.suspected]
        return (
            f"controller: alive {sorted(self._watches)}, suspected {sorted(suspects)}, "
            f"in flight {sorted(self._open)}, next {self._wake_at}"
        )

    # Events.

    def _on_promoted(self, event: Promoted, now: float) -> None:
        self._forget()
        self._state = event.state
        self._rivals = frozenset(event.rivals)
        self._moves_due = True
        self._balance_at = now + self._balance_gap()
        for node_id in sorted(event.state.nodes):
            self._reconcile(node_id, now)
        for watch in self._watches.values():
            watch.suspected = watch.node_id not in event.connected
            watch.probe_at = now
            if watch.suspected:
                # The controller before may have waited for it already, and a node that can sends a
                # heartbeat at once.
                watch.expires_at = now + self.config.lease_ms / 2000

    def _on_demoted(self, event: Demoted, now: float) -> None:
        self._forget()

    def _on_heartbeat(self, event: HeartbeatCame, now: float) -> None:
        watch = self._watches.get(event.node_id)
        if watch is not None and watch.incarnation == event.incarnation:
            watch.expires_at = now + self.config.lease_ms / 1000
            watch.heard_at = now
            watch.suspected = watch.silent = watch.answers = False
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
        if event.incarnation != watch.incarnation:
            self._not_reached(watch, now)
        else:
            watch.reached_at = now
            if watch.checked:
                watch.checked = False
                self._balance_at = now
        if not watch.suspected:
            return  # a heartbeat came in the meantime
        if event.refused:
            watch.gone = "nobody listens at its address"
        elif event.incarnation is not None:
            watch.suspected = False
            watch.answers = watch.silent and event.incarnation == watch.incarnation
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
                self._reconcile(change.node_id, now)
            elif isinstance(change, LeaderResigned) and change.node_id in self._watches:
                watch = self._watches[change.node_id]
                watch.may_lead_at = now + self.config.resigned_ms / 1000
        self._moves_due = True
        if not self._refusals.get(_MOVES):
            self._held.pop(_MOVES, None)  # it was held only until its change became known

    def _on_proposal_ended(self, event: ProposalEnded, now: float) -> None:
        key = _key(event.command)
        if self._open.pop(key, None) is None:
            return
        refusals = 0 if event.error is None else self._refusals.get(key, 0) + 1
        self._refusals[key] = refusals
        # Also after a success: its change may not have arrived here yet.
        wait_ms = doubled_ms(self.config.retry_ms, refusals, self.config.balance_ms)
        self._held[key] = now + wait_ms / 1000
        if key == _MOVES:
            self._moves_due = True

    def _reconcile(self, node_id: int, now: float) -> None:
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
            self._watches[node_id] = _Watch(
                node_id, node.incarnation, now, expires_at, heard_at=now
            )

    # What to do.

    def _forgive_stall(self, now: float) -> None:
        since, self._stepped_at = self._stepped_at, now
        if self._wake_at is None or now - self._wake_at <= self.config.stall_ms / 1000:
            return
        for watch in self._watches.values():
            watch.expires_at += now - since
            watch.heard_at += now - since

    def _expire(self, now: float) -> None:
        for key in [key for key, until in self._open.items() if until <= now]:
            del self._open[key]
        for key in [key for key, until in self._held.items() if until <= now]:
            del self._held[key]
        for watch in self._watches.values():
            if watch.probing_until is not None and watch.probing_until <= now:
                watch.probing_until = None
                watch.probe_at = now + self.config.probe_ms / 1000
                self._not_reached(watch, now)

    def _may(self, key: _Key) -> bool:
        return key not in self._open and key not in self._held

    def _propose(self, command: Command, reason: str, now: float) -> ProposeCommand:
        self._open[_key(command)] = now + self.config.proposal_ms / 1000
        return ProposeCommand(command, reason)

    def _abdicate(self, now: float, effects: list[Effect]) -> None:
        """Abdicate when too many voters cannot reach this node. Until that is done, no node is
        judged."""
        rivals = [watch for watch in self._watches.values() if watch.node_id in self._rivals]
        for watch in rivals:
            if not watch.silent and self._silent_at(watch) <= now:
                watch.silent = watch.suspected = True
                watch.probe_at = now
        one_sided = [watch.node_id for watch in rivals if watch.answers]
        audible = sum(not watch.silent for watch in rivals)
        if len(one_sided) > audible and self._may(_ABDICATION):
            self._open[_ABDICATION] = now + self.config.lease_ms / 1000
            effects.append(
                Abdicate(f"nodes {sorted(one_sided)} answer probes but cannot reach this node")
            )

    def _silent_at(self, watch: _Watch) -> float:
        return watch.heard_at + self.config.lease_ms / 2000

    def _fence(self, now: float, effects: list[Effect]) -> None:
        for watch in self._watches.values():
            expired = watch.expires_at <= now
            if (watch.gone or expired) and self._may(("fence", watch.node_id)):
                command = FenceNode(watch.node_id, watch.incarnation)
                reason = watch.gone or "its lease expired"
                effects.append(self._propose(command, reason, now))

    def _probe(self, now: float, effects: list[Effect]) -> None:
        watches = self._watches.values()
        room = self.config.probes_max - sum(watch.probing_until is not None for watch in watches)
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
            watch.node_id
            for watch in self._watches.values()
            if max(watch.alive_since + settle, watch.may_lead_at) <= now
            and not (watch.suspected or watch.gone)
            and not state.nodes[watch.node_id].draining
        }
        wanted = unbalanced(state, ready, self.config.balance_max)
        lately = now - self.config.balance_ms / 2000
        for node_id in wanted.values():
            watch = self._watches[node_id]
            watch.checked = watch.reached_at <= lately
        found = tuple(key for key, node in wanted.items() if not self._watches[node].checked)
        if found:
            reason = f"{len(found)} partitions go back to their preferred leaders"
            effects.append(self._propose(ElectPreferred(found), reason, now))

    def _not_reached(self, watch: _Watch, now: float) -> None:
        """Make a node that did not answer wait for more than a round, so that others get their
        leaderships."""
        if watch.checked:
            watch.checked = False
            wait_s = 1.5 * self.config.balance_ms / 1000
            watch.may_lead_at = max(watch.may_lead_at, now + wait_s)

    def _balance_gap(self) -> float:
        """Return the time to the next round, with jitter: rounds must not keep step with other
        periods."""
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
        if _ABDICATION in self._open:
            return min(self._open.values())
        times = [self._balance_at, *self._open.values(), *self._held.values()]
        if self._lost_at is not None and self._may(_MOVES):
            times.append(self._lost_at)
        room = self.config.probes_max - sum(
            watch.probing_until is not None for watch in self._watches.values()
        )
        for watch in self._watches.values():
            if watch.node_id in self._rivals and not watch.silent:
                times.append(self._silent_at(watch))
            if self._may(("fence", watch.node_id)):
                times.append(watch.expires_at)
            if watch.probing_until is not None:
                times.append(watch.probing_until)
            elif room > 0 and _to_probe(watch):
                times.append(watch.probe_at)
        return min(times)


def _to_probe(watch: _Watch) -> bool:
    asked = watch.suspected or watch.checked
    return asked and not watch.gone and watch.probing_until is None


def _key(command: Command) -> _Key:
    if isinstance(command, FenceNode):
        return ("fence", command.node_id)
    if isinstance(command, ElectPreferred):
        return _ELECTIONS
    assert isinstance(command, MoveReplicas), command
    return _MOVES
