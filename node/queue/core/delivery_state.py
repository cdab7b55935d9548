"""Core: the delivery state of one group on one partition, as the sum of its ledger entries.

Each offset at or above the settled prefix is in exactly one state:

    fresh    at or above its lane's cursor and not settled
    leased   in a lease, under a nonce; or dying, which is leased as far as the ledger knows
    waiting  to be delivered again from some time on
    settled

    fresh -> leased              GrantedEntry, fresh
    waiting -> leased            GrantedEntry, not fresh
    leased -> settled            SettledEntry
    leased -> waiting            ReturnedEntry
    any -> settled               SettledEntry with nonce 0
    any -> fresh or settled      ResetEntry, CreatedEntry
    any -> fresh                 ClippedEntry, at or above the new end
    none                         ExtendedEntry, PausedEntry, ClockEntry

apply() is deterministic, and ignores what an entry says about a lease that is gone. This module
decides nothing: GroupDelivery decides, and owns the state. It changes the state without an entry in
two cases: lease() takes records at once, and its GrantedEntry is stored afterwards; and the mark of
dying records is in no entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raftq.client.common.errors import CorruptFile
from raftq.node.queue.core.entries import (
    ACKED,
    DEAD,
    EXPIRED,
    LEASE_EXPIRED,
    NACKED,
    POSTPONED,
    RELEASED,
    SKIPPED,
    ClippedEntry,
    ClockEntry,
    CreatedEntry,
    DeletedEntry,
    Entry,
    ExtendedEntry,
    GrantedEntry,
    GroupSnapshot,
    LeaseRow,
    PausedEntry,
    ResetEntry,
    ReturnedEntry,
    SettledEntry,
    SnapshotEntry,
    WaitRow,
)
from raftq.node.queue.core.lanes import LANES, LaneIndex
from raftq.node.queue.core.leases import DeliveryLease, LeaseTable
from raftq.node.queue.core.settled_offsets import OFFSET_MAX, SettledOffsets
from raftq.node.queue.core.waiting_records import Wait, WaitingRecords


@dataclass(slots=True)
class Counters:
    """Counts of records since the group was created."""

    acked: int = 0
    nacked: int = 0
    postponed: int = 0
    released: int = 0
    lease_expired: int = 0
    dead: int = 0
    ttl_expired: int = 0
    skipped: int = 0
    redelivered: int = 0

    def to_row(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)


_SETTLED_COUNTER = {ACKED: "acked", DEAD: "dead", EXPIRED: "ttl_expired", SKIPPED: "skipped"}
_RETURNED_COUNTER = {
    NACKED: "nacked",
    POSTPONED: "postponed",
    LEASE_EXPIRED: "lease_expired",
    RELEASED: "released",
}


class DeliveryState:
    """What the ledger says about one group."""

    __slots__ = (
        "counters", "cursors", "deleted", "group", "leases", "paused", "settled", "waiting",
    )  # fmt: skip

    def __init__(self, group: str, start_offset: int) -> None:
        self.group = group
        self._begin(start_offset)
        self.paused = False
        self.deleted = False
        self.counters = Counters()

    def _begin(self, start_offset: int) -> None:
        """Forget all records: those below are settled, the others are fresh."""
        self.settled = SettledOffsets(start_offset)
        self.leases = LeaseTable()
        self.waiting = WaitingRecords()
        self.cursors = [start_offset] * LANES

    def apply(self, entry: Entry) -> None:
        """Make the change that the entry describes. CorruptFile if it cannot follow this state."""
        assert entry.group is None or entry.group == self.group, entry
        _APPLY[type(entry)](self, entry)

    @property
    def in_flight(self) -> int:
        """Records leased and not dying."""
        return self.leases.records - self.leases.dying

    def describe(self) -> str:
        """The state in one line."""
        flags = (" paused" if self.paused else "") + (" deleted" if self.deleted else "")
        return (
            f"group={self.group} prefix={self.settled.prefix} above={self.settled.count_above} "
            f"cursors={','.join(map(str, self.cursors))} in_flight={self.in_flight} "
            f"dying={self.leases.dying} leases={len(self.leases)} waiting={self.waiting.count} "
            f"counters={','.join(map(str, self.counters.to_row()))}{flags}"
        )

    def snapshot(self) -> SnapshotEntry:
        """The whole state as one entry; equal states have equal snapshots.

        Dying records are in it as leased: a SettledEntry follows when their dead letter is safe.
        """
        leases = sorted(self.leases, key=lambda lease: lease.nonce)
        return self._snapshot(self.cursors, self.waiting.rows(), [_lease_row(x) for x in leases])

    def settled_snapshot(self) -> SnapshotEntry:
        """The state after a damaged ledger: all records that are not settled are fresh again."""
        return self._snapshot([self.settled.prefix] * LANES, (), ())

    def _snapshot(
        self, cursors: Sequence[int], waiting: Sequence[WaitRow], leases: Sequence[LeaseRow]
    ) -> SnapshotEntry:
        state = GroupSnapshot(
            self.settled.dump(),
            tuple(cursors),
            self.paused,
            self.counters.to_row(),
            tuple(waiting),
            tuple(leases),
        )
        return SnapshotEntry(self.group, state)

    def _apply_granted(self, entry: GrantedEntry) -> None:
        for row in entry.rows:
            lane, start, end = row.lane, row.start, row.end
            if row.nonce in self.leases:
                raise CorruptFile(f"{self.group}: nonce of [{start}, {end}) was granted twice")
            if row.fresh:
                if start < self.cursors[lane]:
                    raise CorruptFile(f"{self.group}: [{start}, {end}) was granted as fresh twice")
                self.cursors[lane] = end
            elif self.waiting.take(lane, start, end):
                self.counters.redelivered += end - start
            else:
                raise CorruptFile(f"{self.group}: [{start}, {end}) was granted but did not wait")
            self.leases.add(
                DeliveryLease(
                    *(row.nonce, entry.holder, lane, start, end, row.attempt),
                    *(row.first, entry.now, row.deadline),
                )
            )

    def _apply_settled(self, entry: SettledEntry) -> None:
        count = 0
        leases = self.leases
        for nonce, start, end in entry.rows:
            if nonce == 0:
                count += self._settle_anyway(start, end)
                continue
            lease = leases.get(nonce)
            if lease is None:
                continue
            for run_start, run_end in leases.remove(lease, start, end):
                self.settled.add(run_start, run_end)
                count += run_end - run_start
        name = _SETTLED_COUNTER[entry.how]
        setattr(self.counters, name, getattr(self.counters, name) + count)

    def _settle_anyway(self, start: int, end: int) -> int:
        count = sum(e - s for s, e in self.settled.holes(start, end))
        for lease in [each for each in self.leases if each.start < end and start < each.end]:
            self.leases.remove(lease, start, end)
        self.waiting.cut(start, end)
        self.settled.add(start, end)
        # Otherwise lanes without records down there would be searched from there for ever.
        self.cursors = [max(cursor, self.settled.prefix) for cursor in self.cursors]
        return count

    def _apply_returned(self, entry: ReturnedEntry) -> None:
        count = 0
        for row in entry.rows:
            lease = self.leases.get(row.nonce)
            if lease is None:
                continue
            for start, end in self.leases.remove(lease, row.start, row.end):
                self.waiting.add(Wait(lease.lane, start, end, row.attempt, row.due, lease.first))
                count += end - start
        name = _RETURNED_COUNTER[entry.how]
        setattr(self.counters, name, getattr(self.counters, name) + count)

    def _apply_extended(self, entry: ExtendedEntry) -> None:
        for row in entry.rows:
            lease = self.leases.get(row.nonce)
            if lease is not None:
                self.leases.extend(lease, row.start, row.end, row.deadline)

    def _apply_reset(self, entry: ResetEntry) -> None:
        self._begin(entry.start_offset)

    def _apply_paused(self, entry: PausedEntry) -> None:
        self.paused = entry.paused

    def _apply_created(self, entry: CreatedEntry) -> None:
        self._begin(entry.start_offset)
        self.counters = Counters()
        self.paused = self.deleted = False

    def _apply_deleted(self, entry: DeletedEntry) -> None:
        self._begin(self.settled.prefix)
        self.deleted = True

    def _apply_clipped(self, entry: ClippedEntry) -> None:
        end_offset = entry.end_offset
        self.settled.truncate(end_offset)
        for lease in [each for each in self.leases if each.end > end_offset]:
            self.leases.remove(lease, end_offset, lease.end)
        self.waiting.cut(end_offset, OFFSET_MAX)
        self.cursors = [min(cursor, end_offset) for cursor in self.cursors]

    def _apply_clock(self, entry: ClockEntry) -> None:
        if entry.shift:
            self.leases.shift(entry.shift)
            self.waiting.shift(entry.shift)

    def _apply_snapshot(self, entry: SnapshotEntry) -> None:
        state = entry.state
        # Everything is built and checked before anything is replaced.
        settled = SettledOffsets.load(state.settled)
        waiting = WaitingRecords()
        leases = LeaseTable()
        ranges: list[tuple[int, int, int]] = []
        for row in state.leases:
            _load_lease(leases, row)
            ranges += [(start, end, row.lane) for start, end in row.runs]
        ranges += [(wait.start, wait.end, wait.lane) for wait in state.waiting]
        ranges.sort()
        at = 0
        for start, end, lane in ranges:
            if start < at or settled.holes(start, end) != [(start, end)]:
                raise CorruptFile(f"snapshot of {self.group}: [{start}, {end}) is there twice")
            if end > state.cursors[lane]:
                raise CorruptFile(f"snapshot of {self.group}: [{start}, {end}) is also fresh")
            at = end
        for wait in state.waiting:
            waiting.add(Wait(wait.lane, wait.start, wait.end, wait.attempt, wait.due, wait.first))
        self.settled = settled
        self.waiting = waiting
        self.leases = leases
        self.cursors = list(state.cursors)
        self.paused = state.paused
        self.deleted = False
        self.counters = Counters(*state.counters)

    def check_invariants(self, lanes: LaneIndex) -> None:
        """Compare all counts and states with a walk over every record; for tests."""
        seen: dict[int, int] = {}
        held: dict[str, int] = {}
        records = dying = 0
        for lease in self.leases:
            runs = lease.runs(lease.start, lease.end, dying_too=True)
            alive = lease.runs(lease.start, lease.end)
            count = sum(end - start for start, end in runs)
            alive_count = sum(end - start for start, end in alive)
            assert count == lease.left > 0, lease
            assert count - alive_count == lease.dying, lease
            records += count
            dying += lease.dying
            if alive_count:
                held[lease.holder] = held.get(lease.holder, 0) + alive_count
            _note(seen, lease.lane, runs)
        assert (records, dying, held) == (self.leases.records, self.leases.dying, self.leases.held)
        counts = [0] * LANES
        for wait in self.waiting:
            counts[wait.lane] += wait.end - wait.start
            _note(seen, wait.lane, [(wait.start, wait.end)])
        assert counts == self.waiting.counts
        assert sum(counts) == self.waiting.count
        for offset, lane in seen.items():
            assert offset not in self.settled, f"{offset} is settled and {self.describe()}"
            assert offset < self.cursors[lane], f"{offset} is fresh and {self.describe()}"
        self._check_no_record_is_lost(seen, lanes)

    def _check_no_record_is_lost(self, seen: dict[int, int], lanes: LaneIndex) -> None:
        for lane, cursor in enumerate(self.cursors):
            at = self.settled.prefix
            while at < cursor and (run := lanes.next_run(lane, at)) is not None:
                for offset in range(run[0], min(run[1], cursor)):
                    known = offset in self.settled or seen.get(offset) == lane
                    assert known, f"{offset} of lane {lane} is lost: {self.describe()}"
                at = run[1]


def _note(seen: dict[int, int], lane: int, runs: list[tuple[int, int]]) -> None:
    for start, end in runs:
        for offset in range(start, end):
            assert offset not in seen, f"{offset} is in two places"
            seen[offset] = lane


_APPLY: dict[type[Entry], Callable[[DeliveryState, Any], None]] = {
    GrantedEntry: DeliveryState._apply_granted,
    SettledEntry: DeliveryState._apply_settled,
    ReturnedEntry: DeliveryState._apply_returned,
    ExtendedEntry: DeliveryState._apply_extended,
    ResetEntry: DeliveryState._apply_reset,
    PausedEntry: DeliveryState._apply_paused,
    CreatedEntry: DeliveryState._apply_created,
    DeletedEntry: DeliveryState._apply_deleted,
    ClippedEntry: DeliveryState._apply_clipped,
    SnapshotEntry: DeliveryState._apply_snapshot,
    ClockEntry: DeliveryState._apply_clock,
}


def _lease_row(lease: DeliveryLease) -> LeaseRow:
    runs = lease.runs(lease.start, lease.end, dying_too=True)
    deadline, deadline_rows = lease.deadline_rows()
    return LeaseRow(
        lease.nonce,
        lease.holder,
        lease.lane,
        lease.start,
        lease.end,
        lease.attempt,
        lease.first,
        lease.granted,
        deadline,
        tuple(runs),
        tuple(deadline_rows),
    )


def _load_lease(leases: LeaseTable, row: LeaseRow) -> None:
    """Add the lease of a snapshot row, with the records that are left in it."""
    lease = DeliveryLease(
        *(row.nonce, row.holder, row.lane, row.start, row.end, row.attempt),
        *(row.first, row.granted, row.deadline),
    )
    what = f"snapshot: lease of [{lease.start}, {lease.end})"
    if lease.nonce in leases:
        raise CorruptFile(f"{what} is there twice")
    leases.add(lease)
    at = lease.start
    for start, end in row.runs:
        if not at <= start < end <= lease.end:
            raise CorruptFile(f"{what} has {start}")
        leases.remove(lease, at, start)
        at = end
    if not row.runs:
        raise CorruptFile(f"{what} is empty")
    leases.remove(lease, at, lease.end)
    for start, end, deadline in row.deadlines:
        leases.extend(lease, start, end, deadline)
