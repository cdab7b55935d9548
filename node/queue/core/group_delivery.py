"""Core: queue delivery to one consumer group from one partition.

Decide, then do: an operation checks everything, builds its ledger entry and changes nothing; the
caller stores the entry and then gives it to apply(). So if the entry cannot be stored, nothing has
happened. The exceptions:

    lease()       takes the records at once; store granted_entry() next, before the next lease(),
                  or call take_back() (for several calls: in reverse order).
    DyingRecords  its records are dying from then on: they are not leased again, do not expire, and
                  their receipt is refused. Write the copy, then store settle_dead(); or call
                  unmark_dying().

Dying is soft: after a crash the record is leased, its lease ends, and it is decided again.

The error for a refused receipt has the reason: the receipt is of another group (LeaseForeign), the
record was settled before (AlreadySettled), was delivered again under another receipt
(LeaseReplaced), or its lease is over (LeaseExpired: it waits, is dying, or is past its deadline).

This core reads no clock and keeps no record contents; the lane index has the records that exist.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NoReturn

from msgspec import Struct

from raftq.client.common.errors import (
    AlreadySettled,
    InvalidArgument,
    LeaseExpired,
    LeaseForeign,
    LeaseReplaced,
)
from raftq.node.queue.core.config import DeliveryConfig
from raftq.node.queue.core.delivery_state import DeliveryState
from raftq.node.queue.core.entries import (
    ACKED,
    DEAD,
    EXPIRED,
    LEASE_EXPIRED,
    LEASE_MAX,
    NACKED,
    POSTPONED,
    RANGE_MAX,
    RELEASED,
    SKIPPED,
    ClippedEntry,
    Entry,
    ExtendedEntry,
    ExtendRow,
    GrantedEntry,
    GrantRow,
    PausedEntry,
    ResetEntry,
    ReturnedEntry,
    ReturnRow,
    Row,
    SettledEntry,
)
from raftq.node.queue.core.lanes import LANES, DeficitRoundRobin, LaneIndex
from raftq.node.queue.core.leases import TAG_SHIFT, DeliveryLease, LeaseTable, Runs, group_tag
from raftq.node.queue.core.settled_offsets import OFFSET_MAX, SettledOffsets
from raftq.node.queue.core.waiting_records import Wait

__all__ = ["DeliveryConfig", "DyingRecords", "Grant", "GroupDelivery"]

# How many leases one expire() looks at, so that a mass expiry does not stop the world.
EXPIRE_LEASES_MAX = 4096


class Grant(Struct, gc=False):
    """[start, end) of one lane, leased under one nonce, delivered for the `attempt`-th time."""

    lane: int
    start: int
    end: int
    attempt: int
    nonce: int
    deadline: float
    first: float
    fresh: bool
    undo: float
    """What take_back() restores: the lane's cursor if fresh, else the time when it was due."""

    def to_row(self) -> GrantRow:
        return GrantRow(
            self.lane,
            self.start,
            self.end,
            self.attempt,
            self.nonce,
            self.deadline,
            self.first,
            self.fresh,
        )


@dataclass(slots=True)
class DyingRecords:
    """[start, end) shall be copied to the dead letters and then settled."""

    nonce: int
    start: int
    end: int
    attempt: int
    first: float
    last: float
    reason: str


class GroupDelivery:
    """Decides which records of a group are leased, returned, settled and delivered next."""

    def __init__(
        self,
        group: str,
        config: DeliveryConfig,
        lanes: LaneIndex,
        rng: random.Random,
        start_offset: int,
        now: float,
    ) -> None:
        self.group = group
        self.config = config
        self.lanes = lanes
        self.state = DeliveryState(group, start_offset)
        self._rng = rng
        self._tag = group_tag(group)
        self._turns = DeficitRoundRobin(now, config.weights, config.starvation_s)
        # Fresh ranges found per lane while one lease() call counts what is available.
        self._found: list[Runs] = [[] for _ in range(LANES)]

    # The state

    def apply(self, entry: Entry) -> None:
        """Make the change that the entry describes. CorruptFile if it cannot follow this state."""
        self.state.apply(entry)

    @property
    def settled(self) -> SettledOffsets:
        return self.state.settled

    @property
    def leases(self) -> LeaseTable:
        return self.state.leases

    @property
    def in_flight(self) -> int:
        """Records leased and not dying."""
        return self.state.in_flight

    def check_invariants(self) -> None:
        """Compare the state with the lane index, record by record; for tests."""
        self.state.check_invariants(self.lanes)

    # Leasing

    def lease(
        self, records_max: int, now: float, holder: str = "", lease_s: float | None = None
    ) -> list[Grant]:
        """Lease up to `records_max` records: due ones before fresh ones in each lane."""
        config = self.config
        if lease_s is None:
            lease_s = config.lease_s
        elif not (isfinite(lease_s) and lease_s > 0):
            raise InvalidArgument(f"{self.group}: a lease of {lease_s} s")
        state = self.state
        if state.paused or state.deleted:
            return []
        held = state.leases.held.get(holder, 0)
        budget = min(records_max, config.in_flight_max - held, LEASE_MAX)
        if config.in_flight_total_max is not None:
            budget = min(budget, config.in_flight_total_max - state.in_flight)
        if budget <= 0:
            return []
        waiting = state.waiting
        waiting.move_due(now)
        grants: list[Grant] = []
        deadline = now + lease_s
        for lane, count in self._turns.plan(self._available, budget, now):
            while count and waiting.ready[lane]:
                wait = waiting.pop_ready(lane, count)
                count -= wait.end - wait.start
                grants.append(self._grant_again(wait, now, deadline, holder))
            if count:
                self._grant_fresh(lane, count, now, deadline, holder, grants)
        return grants

    def _available(self, lane: int, bound: int) -> int:
        """How many records the lane could give now, at most about `bound`."""
        state = self.state
        count = state.waiting.ready[lane]
        if count >= bound:
            self._found[lane] = []
            return count
        bound -= count
        run = self.lanes.next_run(lane, state.cursors[lane])
        if run is None:
            self._found[lane] = []
            return count
        start, end = run
        if end - start >= bound and state.settled.clear_from(start):
            self._found[lane] = [(start, start + bound)]
            return count + bound
        found = self._found[lane] = self._fresh_runs(lane, bound)
        for start, end in found:
            count += end - start
        return count

    def _fresh_runs(self, lane: int, bound: int) -> Runs:
        """The first `bound` fresh records of the lane, as ranges."""
        found: Runs = []
        at = self.state.cursors[lane]
        next_run = self.lanes.next_run
        settled = self.state.settled
        while bound > 0 and (run := next_run(lane, at)) is not None:
            start, at = run
            holes = [run] if settled.clear_from(start) else settled.holes(start, at)
            for start, end in holes:
                if end - start > bound:
                    end = start + bound
                found.append((start, end))
                bound -= end - start
                if not bound:
                    break
        return found

    def _grant_fresh(
        self,
        lane: int,
        count: int,
        now: float,
        deadline: float,
        holder: str,
        grants: list[Grant],
    ) -> None:
        leases, cursors = self.state.leases, self.state.cursors
        for start, end in self._found[lane]:
            end = min(end, start + count)
            nonce = leases.draw_nonce(self._tag, self._rng)
            cursor = cursors[lane]
            cursors[lane] = end
            leases.add(DeliveryLease(nonce, holder, lane, start, end, 1, now, now, deadline))
            grants.append(Grant(lane, start, end, 1, nonce, deadline, now, True, cursor))
            count -= end - start
            if not count:
                break

    def _grant_again(self, wait: Wait, now: float, deadline: float, holder: str) -> Grant:
        leases = self.state.leases
        nonce = leases.draw_nonce(self._tag, self._rng)
        lane, start, end, attempt = wait.lane, wait.start, wait.end, wait.attempt + 1
        leases.add(
            DeliveryLease(nonce, holder, lane, start, end, attempt, wait.first, now, deadline)
        )
        self.state.counters.redelivered += end - start
        return Grant(lane, start, end, attempt, nonce, deadline, wait.first, False, wait.due)

    def granted_entry(self, grants: Iterable[Grant], now: float, holder: str) -> GrantedEntry:
        """What to store after lease(), with the same `now` and `holder`."""
        return GrantedEntry(self.group, now, holder, tuple([g.to_row() for g in grants]))

    def take_back(self, grants: Sequence[Grant]) -> None:
        """Undo lease(): its entry could not be stored. No attempt is spent."""
        state = self.state
        for grant in reversed(grants):
            lease = state.leases.get(grant.nonce)
            assert lease is not None, f"{grant} is gone"
            assert lease.states is None, f"{grant} was used: {lease}"
            state.leases.remove(lease, grant.start, grant.end)
            lane = grant.lane
            if grant.fresh:
                # Putting the cursor back would make a later grant of the lane fresh again.
                assert state.cursors[lane] == grant.end, f"{grant} is not the lane's last"
                state.cursors[lane] = int(grant.undo)
                continue
            wait = Wait(lane, grant.start, grant.end, grant.attempt - 1, grant.undo, grant.first)
            state.waiting.add(wait)
            state.counters.redelivered -= grant.end - grant.start

    # Decisions of a holder

    def ack(self, rows: Iterable[Row], now: float) -> SettledEntry:
        """Settle all of these records, or raise and settle none."""
        checked = []
        get = self.state.leases.get
        for nonce, start, end in rows:
            lease = get(nonce)
            if lease is None or not lease.holds_all(start, end, now):
                self._refuse(nonce, start, end, now)
            checked.append((nonce, start, end))
        return SettledEntry(self.group, ACKED, tuple(checked))

    def nack(
        self, nonce: int, start: int, end: int, now: float, delay: float | None = None
    ) -> tuple[ReturnedEntry | None, list[DyingRecords]]:
        """Deliver again after a wait, or give up when the attempts are spent."""
        if delay is not None:
            self._check_duration(delay, "delay")
        lease, runs = self._held(nonce, start, end, now)
        if lease.attempt >= self.config.max_deliveries:
            return None, self._give_up(lease, runs, "max_deliveries")
        due = now + (self._backoff(lease.attempt) if delay is None else delay)
        rows = tuple(ReturnRow(nonce, s, e, lease.attempt, due) for s, e in runs)
        return ReturnedEntry(self.group, NACKED, rows), []

    def postpone(self, nonce: int, start: int, end: int, now: float, delay: float) -> ReturnedEntry:
        """Deliver again after `delay`, without spending an attempt."""
        self._check_duration(delay, "delay")
        lease, runs = self._held(nonce, start, end, now)
        rows = tuple(ReturnRow(nonce, s, e, lease.attempt - 1, now + delay) for s, e in runs)
        return ReturnedEntry(self.group, POSTPONED, rows)

    def release(self, rows: Iterable[Row], now: float) -> ReturnedEntry:
        """Give back what is still held of these, for delivery at once; no attempt is spent.

        Raises only when nothing of it is held any more.
        """
        returned: list[ReturnRow] = []
        refused: Row | None = None
        for nonce, start, end in rows:
            lease = self.state.leases.get(nonce)
            runs = [] if lease is None else lease.held_runs(start, end, now)
            if lease is None or not runs:
                refused = refused or (nonce, start, end)
                continue
            returned += [ReturnRow(nonce, s, e, lease.attempt - 1, now) for s, e in runs]
        if refused and not returned:
            self._refuse(*refused, now)
        return ReturnedEntry(self.group, RELEASED, tuple(returned))

    def reject(
        self, nonce: int, start: int, end: int, now: float, reason: str
    ) -> list[DyingRecords]:
        """Give up now: one dead letter for each run still held."""
        lease, runs = self._held(nonce, start, end, now)
        return self._give_up(lease, runs, reason)

    def extend(
        self, nonce: int, start: int, end: int, now: float, extension_s: float
    ) -> ExtendedEntry:
        """The records still held get until now + extension_s."""
        self._check_duration(extension_s, "extension")
        lease, runs = self._held(nonce, start, end, now)
        deadline = now + extension_s
        if lease.deadlines is None and sum(e - s for s, e in runs) == lease.left:
            # All that is left of the lease: one row for the whole keeps it one deadline.
            runs = [(lease.start, lease.end)]
        rows = tuple(ExtendRow(nonce, s, e, deadline) for s, e in runs)
        return ExtendedEntry(self.group, rows)

    def _held(self, nonce: int, start: int, end: int, now: float) -> tuple[DeliveryLease, Runs]:
        lease = self.state.leases.get(nonce)
        runs = [] if lease is None else lease.held_runs(start, end, now)
        if lease is None or not runs:
            self._refuse(nonce, start, end, now)
        return lease, runs

    def _give_up(self, lease: DeliveryLease, runs: Runs, reason: str) -> list[DyingRecords]:
        letters = []
        for start, end in runs:
            self.state.leases.mark_dying(lease, start, end)
            letters.append(
                DyingRecords(
                    lease.nonce, start, end, lease.attempt, lease.first, lease.granted, reason
                )
            )
        return letters

    def _backoff(self, attempt: int) -> float:
        config = self.config
        try:
            delay = config.backoff_s * config.backoff_factor ** (attempt - 1)
        except OverflowError:
            delay = config.backoff_cap_s
        if config.jitter:
            delay = min(delay, config.backoff_cap_s)
            delay *= 1 + config.jitter * (2 * self._rng.random() - 1)
        return min(delay, config.backoff_cap_s)

    def _check_duration(self, seconds: float, what: str) -> None:
        if not (isfinite(seconds) and seconds >= 0):
            raise InvalidArgument(f"{self.group}: {what} of {seconds} s")

    def _refuse(self, nonce: int, start: int, end: int, now: float) -> NoReturn:
        """Raise what is wrong with the first record of [start, end) that is not held."""
        if not 0 <= start < end:
            raise InvalidArgument(f"{self.group}: no such range of offsets: [{start}, {end})")
        if nonce >> TAG_SHIFT != self._tag:
            raise LeaseForeign(f"receipt of offset {start} is not of group {self.group}")
        lease = self.state.leases.get(nonce)
        offset = start
        if lease is not None:
            runs = lease.held_runs(start, end, now)
            if runs and runs[0][0] == start:
                offset = runs[0][1]
        if offset in self.state.settled:
            raise AlreadySettled(f"offset {offset} was settled before by group {self.group}")
        other = self.state.leases.at(offset)
        if other is not None and other is not lease:
            raise LeaseReplaced(f"offset {offset} was delivered again in group {self.group}")
        raise LeaseExpired(f"lease of offset {offset} ran out in group {self.group}")

    # Time

    def expire(self, now: float) -> tuple[list[ReturnedEntry], list[DyingRecords]]:
        """Return or give up what is past its deadline; call again while it finds something."""
        self.state.waiting.move_due(now)
        return self._end_leases(self.state.leases.expired(now, EXPIRE_LEASES_MAX), now)

    def abandon(self, now: float) -> tuple[list[ReturnedEntry], list[DyingRecords]]:
        """At open: no holder has survived, so every lease ends now, its attempt spent."""
        found = [(lease, lease.runs(lease.start, lease.end)) for lease in self.state.leases]
        return self._end_leases(found, now)

    def _end_leases(
        self, found: list[tuple[DeliveryLease, Runs]], now: float
    ) -> tuple[list[ReturnedEntry], list[DyingRecords]]:
        rows: list[ReturnRow] = []
        letters: list[DyingRecords] = []
        for lease, runs in found:
            if lease.attempt >= self.config.max_deliveries:
                letters += self._give_up(lease, runs, "max_deliveries")
            else:
                rows += [ReturnRow(lease.nonce, s, e, lease.attempt, now) for s, e in runs]
        if not rows:
            return [], letters
        return [ReturnedEntry(self.group, LEASE_EXPIRED, tuple(rows))], letters

    def next_deadline(self) -> float | None:
        """When expire() has something to do: a lease ends or a waiting record is due."""
        lease = self.state.leases.next_deadline()
        due = self.state.waiting.next_due()
        if lease is None or due is None:
            return due if lease is None else lease
        return min(lease, due)

    # Decisions of the caller

    def settle_dead(self, letters: Iterable[DyingRecords]) -> SettledEntry:
        """The copies of these dead letters are safe."""
        rows = tuple((each.nonce, each.start, each.end) for each in letters)
        return SettledEntry(self.group, DEAD, rows)

    def unmark_dying(self, letters: Iterable[DyingRecords], retry_at: float) -> None:
        """The copies could not be written: hold the records again until `retry_at`."""
        for each in letters:
            lease = self.state.leases.get(each.nonce)
            if lease is not None:
                self.state.leases.unmark_dying(lease, each.start, each.end, retry_at)

    def expired_entry(self, rows: Iterable[Row]) -> SettledEntry:
        """The time to live of these just leased records had ended."""
        return SettledEntry(self.group, EXPIRED, tuple(rows))

    def skip(self, rows: Iterable[Row]) -> SettledEntry:
        """These records do not exist (any more). Nonce 0 settles them in any state."""
        return SettledEntry(self.group, SKIPPED, tuple(rows))

    def advance(self, start_offset: int) -> SettledEntry:
        """Skip everything below: retention dropped it."""
        step = RANGE_MAX
        starts = range(self.state.settled.prefix, start_offset, step)
        return self.skip((0, start, min(start + step, start_offset)) for start in starts)

    def reset(self, start_offset: int) -> ResetEntry:
        """Replay from there, or purge what is below."""
        if not 0 <= start_offset <= OFFSET_MAX:
            raise InvalidArgument(f"{self.group}: no such offset: {start_offset}")
        return ResetEntry(self.group, start_offset)

    def pause(self, paused: bool) -> PausedEntry:
        return PausedEntry(self.group, paused)

    def clip(self, end_offset: int) -> ClippedEntry:
        """The data log lost its tail: forget what this group knew of it. Holds for all groups."""
        return ClippedEntry(None, end_offset)

    # Questions

    def has_work(self, now: float) -> bool:
        """Whether lease() could give a record, limits aside."""
        state = self.state
        if state.paused or state.deleted:
            return False
        state.waiting.move_due(now)
        return any(state.waiting.ready) or any(self._fresh_runs(lane, 1) for lane in range(LANES))

    def pending_by_lane(self, now: float | None = None) -> list[int]:
        """Records per lane that are neither settled nor leased; with `now`, only those due.

        Counts fresh records that skip() settled above the cursor as pending until it passes them.
        """
        state = self.state
        waiting = state.waiting.counts
        if now is not None:
            state.waiting.move_due(now)
            waiting = state.waiting.ready
        count_from = self.lanes.count_from
        return [waiting[lane] + count_from(lane, at) for lane, at in enumerate(state.cursors)]

    def pending(self, now: float | None = None) -> int:
        return sum(self.pending_by_lane(now))
