"""Core: the delivery state of one group on one partition, as the sum of its ledger entries.

Each offset at or above the settled prefix is in exactly one state:

    fresh    at or above its lane's cursor and not settled
    leased   in a lease, under a nonce; or dying, which is leased as far as the ledger knows
    waiting  to be delivered again from some time on
    settled

    fresh -> leased              GRANTED, fresh
    waiting -> leased            GRANTED, not fresh
    leased -> settled            SETTLED
    leased -> waiting            RETURNED
    any -> settled               SETTLED with nonce 0
    any -> fresh or settled      RESET, CREATED
    any -> fresh                 CLIPPED, at or above the new end
    none                         EXTENDED, PAUSED, CLOCK

apply() is deterministic and the only door for change, except that a lease is taken at once and
its GRANTED entry is stored afterwards. What an entry says of a lease that is gone is ignored.
It decides nothing: see group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raftq.client.common.errors import CorruptFile
from raftq.node.queue.core.entries import (
    ACKED,
    CLIPPED,
    CLOCK,
    CREATED,
    DEAD,
    DELETED,
    EXPIRED,
    EXTENDED,
    FOR_ALL_GROUPS,
    GRANTED,
    LEASE_EXPIRED,
    NACKED,
    OFFSET_MAX,
    PAUSED,
    POSTPONED,
    RELEASED,
    RESET,
    RETURNED,
    SETTLED,
    SKIPPED,
    SNAPSHOT,
    Entry,
)
from raftq.node.queue.core.lanes import LANES, LaneIndex
from raftq.node.queue.core.leases import DeliveryLease, LeaseTable
from raftq.node.queue.core.settled_offsets import SettledOffsets
from raftq.node.queue.core.waiting_records import Wait, WaitingRecords


@dataclass(slots=True)
class Counters:
    """How many records met which fate since the group was created."""

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

    def __init__(self, group: str, lanes: LaneIndex, start_offset: int) -> None:
        self.group = group
        self.lanes = lanes
        self.settled = SettledOffsets(start_offset)
        self.leases = LeaseTable()
        self.waiting = WaitingRecords()
        self.cursors = [start_offset] * LANES
        self.paused = False
        self.deleted = False
        self.counters = Counters()
        self._apply_by_kind: dict[int, Callable[[Entry], None]] = {
            GRANTED: self._apply_granted,
            SETTLED: self._apply_settled,
            RETURNED: self._apply_returned,
            EXTENDED: self._apply_extended,
            RESET: self._apply_reset,
            PAUSED: self._apply_paused,
            CREATED: self._apply_created,
            DELETED: self._apply_deleted,
            CLIPPED: self._apply_clipped,
            SNAPSHOT: self._apply_snapshot,
            CLOCK: self._apply_clock,
        }

    def apply(self, entry: Entry) -> None:
        """Make the change that the entry says. CorruptFile when it cannot follow this state."""
        group = entry[1]
        assert group == self.group or (group is None and entry[0] in FOR_ALL_GROUPS), entry
        self._apply_by_kind[entry[0]](entry)

    @property
    def in_flight(self) -> int:
        """Records leased and not dying."""
        return self.leases.records - self.leases.dying

    @property
    def dying_count(self) -> int:
        return self.leases.dying

    @property
    def waiting_count(self) -> int:
        return self.waiting.count

    def describe(self) -> str:
        """The state in one line."""
        flags = (" paused" if self.paused else "") + (" deleted" if self.deleted else "")
        return (
            f"group={self.group} prefix={self.settled.prefix} above={self.settled.count_above} "
            f"cursors={','.join(map(str, self.cursors))} in_flight={self.in_flight} "
            f"dying={self.leases.dying} leases={len(self.leases)} waiting={self.waiting.count} "
            f"counters={','.join(map(str, self.counters.to_row()))}{flags}"
        )

    def snapshot(self) -> Entry:
        """The whole state as one entry; equal states have equal snapshots.

        Dying records are in it as leased: whether their dead letter got safe, the ledger says.
        """
        leases = sorted(self.leases, key=lambda lease: lease.nonce)
        state = (
            _tuples(self.settled.dump()),
            tuple(self.cursors),
            self.paused,
            self.counters.to_row(),
            tuple(self.waiting.rows()),
            tuple(_lease_row(lease) for lease in leases),
        )
        return (SNAPSHOT, self.group, state)

    def _apply_granted(self, entry: Entry) -> None:
        _, _, now, holder, rows = entry
        for lane, start, end, attempt, nonce, deadline, first, fresh in rows:
            if nonce in self.leases:
                raise CorruptFile(f"{self.group}: nonce of [{start}, {end}) was granted twice")
            if fresh:
                if start < self.cursors[lane]:
                    raise CorruptFile(f"{self.group}: [{start}, {end}) was granted as fresh twice")
                self.cursors[lane] = end
            elif self.waiting.take(lane, start, end):
                self.counters.redelivered += end - start
            else:
                raise CorruptFile(f"{self.group}: [{start}, {end}) was granted but did not wait")
            self.leases.add(
                DeliveryLease(nonce, holder, lane, start, end, attempt, first, now, deadline)
            )

    def _apply_settled(self, entry: Entry) -> None:
        _, _, how, rows = entry
        count = 0
        leases = self.leases
        for nonce, start, end in rows:
            if nonce == 0:
                count += self._settle_anyway(start, end)
                continue
            lease = leases.get(nonce)
            if lease is None:
                continue
            for run_start, run_end in leases.remove(lease, start, end):
                self.settled.add(run_start, run_end)
                count += run_end - run_start
        name = _SETTLED_COUNTER[how]
        setattr(self.counters, name, getattr(self.counters, name) + count)

    def _settle_anyway(self, start: int, end: int) -> int:
        count = sum(e - s for s, e in self.settled.holes(start, end))
        for lease in [each for each in self.leases if each.start < end and start < each.end]:
            self.leases.remove(lease, start, end)
        self.waiting.cut(start, end)
        self.settled.add(start, end)
        # Lanes without records down there would otherwise be searched from there for ever.
        self.cursors = [max(cursor, self.settled.prefix) for cursor in self.cursors]
        return count

    def _apply_returned(self, entry: Entry) -> None:
        _, _, how, rows = entry
        count = 0
        for nonce, start, end, attempt, due in rows:
            lease = self.leases.get(nonce)
            if lease is None:
                continue
            for run_start, run_end in self.leases.remove(lease, start, end):
                self.waiting.add(Wait(lease.lane, run_start, run_end, attempt, due, lease.first))
                count += run_end - run_start
        name = _RETURNED_COUNTER[how]
        setattr(self.counters, name, getattr(self.counters, name) + count)

    def _apply_extended(self, entry: Entry) -> None:
        for nonce, start, end, deadline in entry[2]:
            lease = self.leases.get(nonce)
            if lease is not None:
                self.leases.extend(lease, start, end, deadline)

    def _apply_reset(self, entry: Entry) -> None:
        start_offset = entry[2]
        self.settled = SettledOffsets(start_offset)
        self.leases = LeaseTable()
        self.waiting = WaitingRecords()
        self.cursors = [start_offset] * LANES

    def _apply_paused(self, entry: Entry) -> None:
        self.paused = entry[2]

    def _apply_created(self, entry: Entry) -> None:
        self._apply_reset(entry)
        self.counters = Counters()
        self.paused = self.deleted = False

    def _apply_deleted(self, entry: Entry) -> None:
        self._apply_reset((RESET, self.group, self.settled.prefix))
        self.deleted = True

    def _apply_clipped(self, entry: Entry) -> None:
        end_offset = entry[2]
        self.settled.truncate(end_offset)
        for lease in [each for each in self.leases if each.end > end_offset]:
            self.leases.remove(lease, end_offset, lease.end)
        self.waiting.cut(end_offset, OFFSET_MAX)
        self.cursors = [min(cursor, end_offset) for cursor in self.cursors]

    def _apply_clock(self, entry: Entry) -> None:
        shift = entry[3]
        if shift:
            self.leases.shift(shift)
            self.waiting.shift(shift)

    def _apply_snapshot(self, entry: Entry) -> None:
        dumped, cursors, paused, counters, waiting_rows, lease_rows = entry[2]
        # Everything is built and checked before anything is replaced.
        settled = SettledOffsets.load(dumped)
        waiting = WaitingRecords()
        leases = LeaseTable()
        ranges: list[tuple[int, int, int]] = []
        for row in lease_rows:
            ranges += [(start, end, row[2]) for start, end in _load_lease(leases, row)]
        ranges += [(start, end, lane) for lane, start, end, *_ in waiting_rows]
        ranges.sort()
        at = 0
        for start, end, lane in ranges:
            if start < at or settled.holes(start, end) != [(start, end)]:
                raise CorruptFile(f"snapshot of {self.group}: [{start}, {end}) is there twice")
            if end > cursors[lane]:
                raise CorruptFile(f"snapshot of {self.group}: [{start}, {end}) is also fresh")
            at = end
        for row in waiting_rows:
            waiting.add(Wait(*row))
        self.settled = settled
        self.waiting = waiting
        self.leases = leases
        self.cursors = list(cursors)
        self.paused = paused
        self.deleted = False
        self.counters = Counters(*counters)

    def check_invariants(self) -> None:
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
        self._check_no_record_is_lost(seen)

    def _check_no_record_is_lost(self, seen: dict[int, int]) -> None:
        for lane, cursor in enumerate(self.cursors):
            at = self.settled.prefix
            while at < cursor and (run := self.lanes.next_run(lane, at)) is not None:
                for offset in range(run[0], min(run[1], cursor)):
                    known = offset in self.settled or seen.get(offset) == lane
                    assert known, f"{offset} of lane {lane} is lost: {self.describe()}"
                at = run[1]


def _note(seen: dict[int, int], lane: int, runs: list[tuple[int, int]]) -> None:
    for start, end in runs:
        for offset in range(start, end):
            assert offset not in seen, f"{offset} is in two places"
            seen[offset] = lane


def _tuples(value: Any) -> Any:
    """Lists as tuples, all the way down, as unpack() gives them."""
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _lease_row(lease: DeliveryLease) -> tuple[Any, ...]:
    runs = lease.runs(lease.start, lease.end, dying_too=True)
    deadline, deadline_rows = lease.deadline_rows()
    return (
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


def _load_lease(leases: LeaseTable, row: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Add the lease of a snapshot row; gives the runs of records it still has."""
    lease = DeliveryLease(*row[:9])
    if lease.nonce in leases:
        raise CorruptFile(f"snapshot: lease of [{lease.start}, {lease.end}) is there twice")
    leases.add(lease)
    at = lease.start
    runs = list(row[9])
    for start, end in runs:
        if not at <= start < end <= lease.end:
            raise CorruptFile(f"snapshot: lease of [{lease.start}, {lease.end}) has {start}")
        leases.remove(lease, at, start)
        at = end
    if not runs:
        raise CorruptFile(f"snapshot: lease of [{lease.start}, {lease.end}) is empty")
    leases.remove(lease, at, lease.end)
    for start, end, deadline in row[10]:
        leases.extend(lease, start, end, deadline)
    return runs
