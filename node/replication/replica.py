"""The role of one replica: who leads, who is in sync, what may be read. (Core.)

    idle ──follow──> follower ──lead──> leader
      ^─────────────────┴──stand_down──────┘        every change comes from the metadata
    any ──close──> idle                             for good: a closed replica proposes nothing

A role belongs to an epoch. Callers of this core refuse everything that belongs to another epoch. A
partition has one role and one in-sync set, and one or more logs. `LogProgress` knows how far each
copy of one log reaches; the set is common to all logs.

Rules of a leader

- The high watermark of a log is the smallest end over the in-sync set. A member that has not
  reported in this epoch holds it where it is. It moves only while the set has `min_insync` members.
- A follower that is to be let in counts from the moment the change is proposed, because it may be
  elected from the moment the change is decided. A follower that is to be put out counts until that
  is decided. So every node that can be elected from the set has everything below the high
  watermarks. A proposal ends when the state machine has answered it or a newer version is known
  here. A missing answer ends nothing, nor does a later try that certainly failed.
- A report of a follower counts for its assignment, the version at which it became a replica. A node
  that was moved away and back is another replica: it may be about to delete what it reported.
- The set is never proposed smaller than `min_insync`. The high watermarks stand still instead.
- A follower is put out when it is known to be dead, or has been behind for `lag_s` in any log.
  While records wait, a follower that has not contacted a new leader at all gets only a part of that
  time: writers may have waited as long under the leader before.
- A follower is let in when it has, of every log, everything readable and everything that was there
  when this epoch began.
- A log that is opened while the partition is led has no record of this epoch, and every member of
  the set has everything readable in it: no node is let in or elected without what earlier leaders
  wrote to it. So a log may be opened at any time, and may be missing until then.

This core knows ends of logs, not logs. Times are seconds of the caller's clock.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["idle", "follower", "leader"]
Standing = Literal["in", "out", "joins", "absent", "late", "dead"]
NEVER = float("-inf")
UNKNOWN = -1
ABSENT_LAG_SHARE = 1 / 3
"""The share of the lag for which a new leader lets records wait for a member that is absent."""


class FollowerProgress:
    """What the leader knows of one follower's copy of a log in this epoch and assignment."""

    __slots__ = (
        "assignment",
        "caught_up_at",
        "end_offset",
        "incarnation",
        "reported_at",
        "target_at",
        "target_end",
    )  # fmt: skip

    def __init__(self, assignment: int, now: float) -> None:
        self.assignment = assignment
        # When it last reported where its log ends.
        self.reported_at = now
        self.end_offset = UNKNOWN
        self.incarnation = UNKNOWN
        # When it last had everything that the leader had. A new leader gives every follower the
        # full time.
        self.caught_up_at = now
        # Once it has reached `target_end`, it has caught up as of `target_at`.
        self.target_end = UNKNOWN
        self.target_at = NEVER


@dataclass(slots=True)
class IsrChange:
    """A new in-sync set to be proposed: (node, incarnation) of each member, sorted by node."""

    epoch: int
    version: int
    members: tuple[tuple[int, int], ...]
    joins: int
    leaves: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decided:
    """What the metadata says about the partition."""

    epoch: int
    version: int
    leader: int | None
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    assignments: tuple[int, ...]
    """In the order of `replicas`."""
    min_insync: int
    moving: bool = False

    def assignment_of(self, node: int) -> int | None:
        """Return the assignment of a node, or None when it is not a replica."""
        replicas = self.replicas
        return self.assignments[replicas.index(node)] if node in replicas else None


NOTHING = Decided(-1, -1, None, (), (), (), 1)


class LogProgress:
    """How far the copies of one log reach, here and at the followers.

    The leader reports every change to it. On a follower only `high_watermark` has a meaning.
    `on_advance` is called each time the high watermark of a leader's log has moved, so no caller
    can forget to pass that on.
    """

    __slots__ = (
        "_counted", "_held", "epoch_start", "followers", "high_watermark", "log_end", "on_advance",
        "own_end",
    )  # fmt: skip

    def __init__(self) -> None:
        self.high_watermark = 0
        self.log_end = 0
        self.own_end = 0
        self.epoch_start = 0
        self.followers: dict[int, FollowerProgress] = {}
        self._counted: tuple[FollowerProgress, ...] = ()
        self._held = True
        self.on_advance: Callable[[], None] | None = None

    def describe(self) -> str:
        ends = {node: follower.end_offset for node, follower in self.followers.items()}
        return f"hw={self.high_watermark} own_end={self.own_end} ends={ends}"

    # For the Replica

    def begin(self, log_end: int, own_end: int) -> None:
        """Begin to lead. Nothing is known of any follower."""
        self.end()
        self.log_end = self.epoch_start = log_end
        self.own_end = own_end

    def end(self) -> None:
        self.followers = {}
        self._counted = ()
        self._held = True

    def replicate_to(self, assignments: Mapping[int, int], now: float) -> None:
        """Set the followers. Nothing is known of a node with a new assignment."""
        known = self.followers
        self.followers = {
            node: follower
            if (follower := known.get(node)) is not None and follower.assignment == assignment
            else FollowerProgress(assignment, now)
            for node, assignment in assignments.items()
        }

    def count(self, members: Iterable[int], held: bool) -> None:
        """Set whose ends count. The high watermark does not move while `held`."""
        self._counted = tuple(self.followers[node] for node in members if node in self.followers)
        self._held = held

    # Facts

    def on_append(self, log_end: int, own_end: int, now: float) -> None:
        """Note that the leader's log has grown."""
        old_end, self.log_end = self.log_end, log_end
        for follower in self.followers.values():
            if follower.end_offset == old_end:
                follower.caught_up_at = now
        self.own_end = own_end
        self.advance()

    def on_own_end(self, own_end: int) -> None:
        """Note that the leader's own copy counts up to here now."""
        self.own_end = own_end
        self.advance()

    def on_progress(self, node: int, incarnation: int, end_offset: int, now: float) -> None:
        """Note where a follower's log ends."""
        follower = self.followers.get(node)
        if follower is None:
            return
        if follower.incarnation != incarnation:
            follower.incarnation = incarnation
            follower.target_end = UNKNOWN
        log_end = self.log_end
        if follower.end_offset >= log_end:
            # It had everything until now, though less may count since the topic asks for syncs.
            follower.caught_up_at = now
        follower.end_offset = end_offset
        follower.reported_at = now
        if end_offset >= log_end:
            follower.caught_up_at = now
        elif follower.target_end != UNKNOWN and end_offset >= follower.target_end:
            # The target may be older than a pause in which it had everything.
            follower.caught_up_at = max(follower.caught_up_at, follower.target_at)
            follower.target_end = UNKNOWN
        if follower.target_end == UNKNOWN:
            follower.target_end, follower.target_at = log_end, now
        self.advance()

    def advance(self) -> None:
        """Move the high watermark as far as the rules allow."""
        if self._held:
            return
        end = self.own_end
        for follower in self._counted:
            if follower.end_offset < end:
                end = follower.end_offset
        if end > self.high_watermark:
            self.high_watermark = end
            if self.on_advance is not None:
                self.on_advance()

    @property
    def old_epochs_replicated(self) -> bool:
        """Whether everything of older epochs is readable. Only asked of a leader."""
        return self.high_watermark >= self.epoch_start

    @property
    def is_behind(self) -> bool:
        """Whether some follower does not have everything."""
        end = self.log_end
        return any(follower.end_offset < end for follower in self.followers.values())

    @property
    def is_waiting(self) -> bool:
        """Whether there are records that are not readable yet."""
        return self.high_watermark < self.log_end

    def is_known(self, node: int) -> bool:
        """Report whether this follower has reported in this epoch."""
        return self.followers[node].end_offset != UNKNOWN

    def is_late(self, node: int, since: float) -> bool:
        """Report whether this follower has been behind since before `since`."""
        follower = self.followers[node]
        return follower.end_offset < self.log_end and follower.caught_up_at < since

    def is_late_and_quiet(self, node: int, since: float) -> bool:
        """Report whether this follower is late and has reported nothing since then."""
        return self.is_late(node, since) and self.is_quiet(node, since)

    def is_quiet(self, node: int, since: float) -> bool:
        """Report whether this follower has reported nothing since then; it may have no reason
        to."""
        return self.followers[node].reported_at < since

    def is_ready(self, node: int, incarnation: int) -> bool:
        """Report whether this follower, as that incarnation, may be let into the set."""
        follower = self.followers[node]
        return (
            follower.incarnation == incarnation
            and follower.end_offset >= self.high_watermark
            and follower.end_offset >= self.epoch_start
        )


class Replica:
    """The role of one replica. `is_alive` answers from the metadata."""

    __slots__ = (
        "_is_alive",
        "_lag_s",
        "_me",
        "_proposed",
        "_resigned_at",
        "data",
        "decided",
        "logs",
        "role",
    )  # fmt: skip

    def __init__(self, me: int, lag_s: float, is_alive: Callable[[int], bool]) -> None:
        self._me = me
        self._lag_s = lag_s
        self._is_alive = is_alive
        self._proposed: IsrChange | None = None
        self._resigned_at = NEVER
        self.role: Role = "idle"
        self.decided = NOTHING
        self.data = LogProgress()
        self.logs = [self.data]

    @property
    def epoch(self) -> int:
        return self.decided.epoch

    @property
    def assignment(self) -> int:
        """The assignment of this node. The replica must know what the metadata says."""
        found = self.decided.assignment_of(self._me)
        assert found is not None, self.describe()
        return found

    @property
    def high_watermark(self) -> int:
        """The high watermark of the data log."""
        return self.data.high_watermark

    @property
    def followers(self) -> Mapping[int, FollowerProgress]:
        """The followers of the data log; the other logs have the same nodes."""
        return self.data.followers

    def describe(self) -> str:
        return (
            f"{self.role} epoch={self.decided.epoch} version={self.decided.version} "
            f"isr={self.decided.isr} proposed={self._proposed} "
            + " | ".join(progress.describe() for progress in self.logs)
        )

    # Roles

    def lead(self, decided: Decided, ends: Sequence[tuple[int, int]], now: float) -> None:
        """Begin an epoch as its leader.

        `ends` has two offsets per log: its end, and the end of what is as durable as the topic
        asks.
        """
        assert decided.leader == self._me, self.describe()
        assert decided.epoch > self.decided.epoch, self.describe()
        self.role = "leader"
        self.decided = decided
        self._proposed = None
        others = self._others()
        for progress, (log_end, own_end) in zip(self.logs, ends, strict=True):
            progress.begin(log_end, own_end)
            progress.replicate_to(others, now)
        self._recount()

    def follow(self, decided: Decided) -> None:
        """Begin an epoch under another leader, or without a leader (None)."""
        assert decided.leader != self._me, self.describe()
        assert decided.epoch > self.decided.epoch, self.describe()
        self.role = "idle" if decided.leader is None else "follower"
        self.decided = decided
        self._end()

    def close(self) -> None:
        """Give up the role for good, whatever the metadata said last."""
        self.role = "idle"
        self._end()

    def _end(self) -> None:
        self._proposed = None
        for progress in self.logs:
            progress.end()

    def open_log(self, log_end: int, own_end: int, now: float) -> LogProgress:
        """Add one more log, in whichever role."""
        progress = LogProgress()
        self.logs.append(progress)
        if self.role == "leader":
            progress.begin(log_end, own_end)
            progress.replicate_to(self._others(), now)
            self._recount()
            progress.advance()
        return progress

    def update(self, decided: Decided, now: float) -> None:
        """Take over another in-sync set, or other replicas, of the same epoch."""
        assert decided.epoch == self.decided.epoch, self.describe()
        if self._proposed is not None and decided.version > self._proposed.version:
            self._proposed = None
        self.decided = decided
        if self.role != "leader":
            return
        others = self._others()
        for progress in self.logs:
            progress.replicate_to(others, now)
        self._recount()
        self.advance()

    # The leader's facts

    def _others(self) -> dict[int, int]:
        """Return the followers and their assignments."""
        decided = self.decided
        found = dict(zip(decided.replicas, decided.assignments, strict=True))
        found.pop(self._me, None)
        return found

    def accepts_reports_of(self, node: int, epoch: int, assignment: int) -> bool:
        """Report whether reports of a follower in this epoch and under this assignment count."""
        follower = self.data.followers.get(node)
        return (
            self.role == "leader"
            and epoch == self.decided.epoch
            and follower is not None
            and follower.assignment == assignment
        )

    def _recount(self) -> None:
        """Set whose ends count: the set, and the nodes that are about to join it."""
        decided = self.decided
        members = dict.fromkeys(decided.isr)
        if self._proposed is not None:
            members.update(dict.fromkeys(node for node, _ in self._proposed.members))
        held = len(decided.isr) < decided.min_insync
        for progress in self.logs:
            progress.count(members, held)

    def advance(self) -> None:
        """Move the high watermarks as far as the rules allow."""
        for progress in self.logs:
            progress.advance()

    @property
    def old_epochs_replicated(self) -> bool:
        """Whether everything of older epochs is readable, so that a reader may learn where the
        data ends."""
        return self.role == "leader" and self.data.old_epochs_replicated

    def may_accept(self) -> bool:
        """Report whether enough of the set is alive for all of it to acknowledge a write."""
        isr, min_insync = self.decided.isr, self.decided.min_insync
        if len(isr) < min_insync:
            return False
        if min_insync <= 1:
            return True
        alive = sum(1 for node in isr if node == self._me or self._is_alive(node))
        return alive >= min_insync

    # The in-sync set

    def is_behind(self) -> bool:
        """Report whether some replica does not have everything, so that time may change the set."""
        decided = self.decided
        return len(decided.isr) < len(decided.replicas) or any(
            progress.is_behind for progress in self.logs
        )

    def next_change(self, incarnations: Mapping[int, int], now: float) -> IsrChange | None:
        """Return the change to propose now, or None. The caller reports how it ended.

        `incarnations` has every node that is alive.
        """
        if self.role != "leader" or self._proposed is not None:
            return None
        decided = self.decided
        found: dict[Standing, list[int]] = {"in": [], "out": [], "joins": []}
        found |= {"absent": [], "late": [], "dead": []}
        for node in self.followers:
            found[self._standing(node, incarnations.get(node), now)].append(node)
        joined = found["joins"]
        members = [self._me, *found["in"], *joined]
        floor = min(decided.min_insync, len(decided.replicas))
        if len(members) < floor:
            members += found["absent"]  # the set would be too small without them
        members += [*found["late"], *found["dead"]][: max(floor - len(members), 0)]
        if sorted(members) == sorted(decided.isr):
            return None
        left = [node for node in decided.isr if node not in members]
        change = IsrChange(
            decided.epoch,
            decided.version,
            tuple((node, incarnations.get(node, 0)) for node in sorted(members)),
            len(joined),
            len(left),
            f"joined={joined} left={left}",
        )
        self._proposed = change
        self._recount()
        return change

    def _standing(self, node: int, incarnation: int | None, now: float) -> Standing:
        """Classify a follower that is alive as this incarnation (None: not alive)."""
        if node not in self.decided.isr:
            ready = incarnation is not None and self._is_ready(node, incarnation)
            return "joins" if ready else "out"
        if incarnation is None:
            return "dead"
        if self._is_late(node, now):
            return "late"
        return "absent" if self._keeps_waiting(node, now) else "in"

    def _is_ready(self, node: int, incarnation: int) -> bool:
        return all(progress.is_ready(node, incarnation) for progress in self.logs)

    def _is_late(self, node: int, now: float) -> bool:
        since = now - self._lag_s
        return any(progress.is_late(node, since) for progress in self.logs)

    def _keeps_waiting(self, node: int, now: float) -> bool:
        """Report whether records wait for this follower, which has not reported in this epoch."""
        data = self.data
        since = now - self._lag_s * ABSENT_LAG_SHARE
        return data.is_waiting and not data.is_known(node) and data.is_late(node, since)

    def should_resign(
        self, incarnations: Mapping[int, int], now: float, unreachable: Collection[int] = ()
    ) -> bool:
        """Report whether the set cannot go on under this leader, but could under another one.

        That is so when enough followers are alive and none of the live members of the set has
        fetched for `lag_s`. A follower that has everything need not report anything about this
        partition. `unreachable` has the nodes that have requested nothing at all from this node
        for that long. When all members are unreachable, clients may not reach this node either,
        and then no record would ever wait.

        True at most once per `lag_s`; the answer is another epoch, or nothing.
        """
        decided = self.decided
        floor = min(decided.min_insync, len(decided.replicas))
        alive = [node for node in self.followers if node in incarnations]
        if self.role != "leader" or floor < 2 or len(alive) < floor:
            return False
        since = now - self._lag_s
        counted = [node for node in alive if node in decided.isr]
        if not counted or self._resigned_at > since:
            return False
        for node in counted:
            late = any(progress.is_late_and_quiet(node, since) for progress in self.logs)
            if not late and not (node in unreachable and self.data.is_quiet(node, since)):
                return False
        self._resigned_at = now
        return True

    def awaits(self, change: IsrChange) -> bool:
        """Report whether the nodes that the change lets in still count, because it may be
        decided."""
        return self._proposed is change

    def end_proposal(self, change: IsrChange, version: int) -> None:
        """Note that the state machine has answered this very proposal.

        `version` is the version that the metadata here has since the answer. When it is newer than
        that of the change, it may be the result of the change: it arrives through `update`, and
        until then the nodes that the change lets in count.
        """
        if self._proposed is not change or version > change.version:
            return
        self._proposed = None
        self._recount()
        self.advance()


def common_end(
    leader: list[tuple[int, int]], leader_end: int, follower: list[tuple[int, int]], end: int
) -> int:
    """Return the offset up to which two logs are the same, from their (epoch, start offset) pairs.

    An epoch has one leader, which gives out each offset once. So two logs with the same epoch at
    the same offset have the same record there, and the same records before it. A follower that
    sends only the latest part of its history gets the start of that part when nothing agrees.
    """
    if not follower:
        return min(end, leader_end)
    at = min(end, leader_end)
    ends = {
        epoch: (leader[ref + 1][1] if ref + 1 < len(leader) else leader_end)
        for ref, (epoch, _) in enumerate(leader)
    }
    for ref in range(len(follower) - 1, -1, -1):
        epoch, start = follower[ref]
        stop = follower[ref + 1][1] if ref + 1 < len(follower) else end
        if epoch in ends:
            return min(stop, ends[epoch], at)
        at = min(at, start)
    return at
