"""Core: the delivery leases of one group, as ranges of offsets.

A lease covers [start, end) under one nonce. Its records leave it one by one or all at once
(settled or returned); only when some have left does it get a byte per record. A record whose
dead letter was decided but is not yet safe is *dying*: still in the lease, but neither to be
settled by its receipt nor to expire. Dying is soft state; it is not stored.

Invariants: `records` is the number of records in leases, dying ones included; `dying` is the
number of dying ones; `held[holder]` counts those that are not dying; a lease whose last record
left is gone from the table.

Deadlines sit in a heap whose entries are dropped late: an entry counts only while its lease is
`queued` for exactly that time. A lease extended to later keeps its entry and is queued again
when that comes up.
"""

import random
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

# States of one record inside a lease that was touched.
HELD = 0
LEFT = 1
DYING = 2

# A run of records is found by the regular expression engine, at C speed.
_HELD_RUN = re.compile(b"%c+" % HELD)
_HELD_OR_DYING_RUN = re.compile(b"[%c%c]+" % (HELD, DYING))
_LEFT_BYTE = b"\x01"
_BUCKET_SHIFT = 10
_HEAP_SLACK = 1024
TAG_SHIFT = 48

Runs = list[tuple[int, int]]


def group_tag(group: str) -> int:
    """The upper 15 bits of every nonce of the group, to tell a foreign receipt from an old one."""
    return zlib.crc32(group.encode()) & 0x7FFF


class DeliveryLease:
    """The right of one holder to settle the records [start, end) until `deadline`."""

    __slots__ = (
        "attempt",
        "deadline",
        "deadlines",
        "dying",
        "end",
        "first",
        "granted",
        "holder",
        "lane",
        "left",
        "nonce",
        "queued",
        "start",
        "states",
    )

    def __init__(  # noqa: PLR0913 - one value per field of a stored row
        self,
        nonce: int,
        holder: str,
        lane: int,
        start: int,
        end: int,
        attempt: int,
        first: float,
        granted: float,
        deadline: float,
    ) -> None:
        self.nonce = nonce
        self.holder = holder
        self.lane = lane
        self.start = start
        self.end = end
        self.attempt = attempt
        self.first = first
        self.granted = granted
        self.deadline = deadline
        self.left = end - start
        self.dying = 0
        # The time of the one heap entry that counts, or None.
        self.queued: float | None = None
        # Allocated with the first record that leaves before the others.
        self.states: bytearray | None = None
        # Allocated when an extension covers only some of the records.
        self.deadlines: array[float] | None = None

    def __repr__(self) -> str:
        return (
            f"Lease([{self.start}, {self.end}) lane={self.lane} attempt={self.attempt} "
            f"left={self.left} deadline={self.deadline})"
        )

    def holds_all(self, start: int, end: int, now: float) -> bool:
        """Whether each record of [start, end) is held and not past its deadline."""
        if not self.start <= start < end <= self.end:
            return False
        low = start - self.start
        high = end - self.start
        if self.states is not None and self.states.count(HELD, low, high) != high - low:
            return False
        if self.deadlines is None:
            return now < self.deadline
        return now < min(self.deadlines[low:high])

    def held_runs(self, start: int, end: int, now: float) -> Runs:
        """The runs of [start, end) that are held and not past their deadline."""
        if self.deadlines is None and now >= self.deadline:
            return []
        runs = self.runs(start, end)
        if self.deadlines is None:
            return runs
        return self._runs_by_deadline(runs, lambda deadline: now < deadline)

    def expired_runs(self, now: float) -> Runs:
        """The runs that are held and past their deadline."""
        if self.deadlines is None:
            return self.runs(self.start, self.end) if now >= self.deadline else []
        runs = self.runs(self.start, self.end)
        return self._runs_by_deadline(runs, lambda deadline: now >= deadline)

    def _runs_by_deadline(self, runs: Runs, wanted: Callable[[float], bool]) -> Runs:
        assert self.deadlines is not None
        found: Runs = []
        for start, end in runs:
            for offset in range(start, end):
                if not wanted(self.deadlines[offset - self.start]):
                    continue
                if found and found[-1][1] == offset:
                    found[-1] = (found[-1][0], offset + 1)
                else:
                    found.append((offset, offset + 1))
        return found

    def runs(self, start: int, end: int, *, dying_too: bool = False) -> Runs:
        """The runs of [start, end) that are held (or also dying), whatever the time."""
        start = max(start, self.start)
        end = min(end, self.end)
        if start >= end:
            return []
        states = self.states
        if states is None:
            return [(start, end)]
        base = self.start
        low = start - base
        high = end - base
        if states.count(HELD, low, high) == high - low:
            return [(start, end)]
        wanted = _HELD_OR_DYING_RUN if dying_too else _HELD_RUN
        return [
            (found.start() + base, found.end() + base)
            for found in wanted.finditer(states, low, high)
        ]

    def earliest(self) -> float | None:
        """The earliest deadline of a held record; None when all that is left is dying."""
        if self.left == self.dying:
            return None
        if self.deadlines is None:
            return self.deadline
        runs = self.runs(self.start, self.end)
        return min(min(self.deadlines[s - self.start : e - self.start]) for s, e in runs)

    def extend(self, start: int, end: int, deadline: float) -> None:
        if start <= self.start and end >= self.end:
            self.deadline = deadline
            self.deadlines = None
            return
        if self.deadlines is None:
            self.deadlines = array("d", [self.deadline]) * (self.end - self.start)
        for i in range(max(start, self.start) - self.start, min(end, self.end) - self.start):
            self.deadlines[i] = deadline

    def shift(self, seconds: float) -> None:
        """All of it ends so much later."""
        self.deadline += seconds
        if self.deadlines is not None:
            self.deadlines = array("d", [each + seconds for each in self.deadlines])

    def deadline_rows(self) -> tuple[float, list[tuple[int, int, float]]]:
        """The deadline of the first record left, and runs of records left that have another."""
        rows: list[tuple[int, int, float]] = []
        deadlines = self.deadlines
        if deadlines is None:
            return self.deadline, rows
        runs = self.runs(self.start, self.end, dying_too=True)
        base = deadlines[runs[0][0] - self.start]
        for start, end in runs:
            for offset in range(start, end):
                deadline = deadlines[offset - self.start]
                if deadline == base:
                    continue
                if rows and rows[-1][1] == offset and rows[-1][2] == deadline:
                    rows[-1] = (rows[-1][0], offset + 1, deadline)
                else:
                    rows.append((offset, offset + 1, deadline))
        return base, rows

    def touched(self) -> bytearray:
        if self.states is None:
            self.states = bytearray(self.end - self.start)
        return self.states


class LeaseTable:
    """All leases of one group, by nonce, by deadline and by offset."""

    __slots__ = ("_buckets", "_heap", "_leases", "dying", "held", "records")

    def __init__(self) -> None:
        self._leases: dict[int, DeliveryLease] = {}
        self._heap: list[tuple[float, int]] = []
        # Which leases touch which 1,024 offsets: a refused receipt must not cost a full scan.
        self._buckets: dict[int, dict[int, None]] = {}
        self.held: dict[str, int] = {}
        self.records = 0
        self.dying = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[DeliveryLease]:
        return iter(self._leases.values())

    def __contains__(self, nonce: int) -> bool:
        return nonce in self._leases

    def get(self, nonce: int) -> DeliveryLease | None:
        return self._leases.get(nonce)

    def draw_nonce(self, tag: int, rng: random.Random) -> int:
        """A nonce that no lease of this table has; never 0, which means no lease at all."""
        leases = self._leases
        nonce = 0
        while nonce == 0 or nonce in leases:
            nonce = tag << TAG_SHIFT | rng.getrandbits(TAG_SHIFT)
        return nonce

    def add(self, lease: DeliveryLease) -> None:
        nonce = lease.nonce
        assert nonce not in self._leases
        self._leases[nonce] = lease
        buckets = self._buckets
        for number in range(lease.start >> _BUCKET_SHIFT, (lease.end - 1 >> _BUCKET_SHIFT) + 1):
            bucket = buckets.get(number)
            if bucket is None:
                buckets[number] = {nonce: None}
            else:
                bucket[nonce] = None
        self.records += lease.left
        self.held[lease.holder] = self.held.get(lease.holder, 0) + lease.left
        self._queue(lease, lease.deadline)

    def _queue(self, lease: DeliveryLease, deadline: float) -> None:
        lease.queued = deadline
        heap = self._heap
        heappush(heap, (deadline, lease.nonce))
        if len(heap) > 2 * len(self._leases) + _HEAP_SLACK:
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        self._heap = [
            (each.queued, each.nonce) for each in self._leases.values() if each.queued is not None
        ]
        heapify(self._heap)

    def _drop(self, lease: DeliveryLease) -> None:
        nonce = lease.nonce
        del self._leases[nonce]
        buckets = self._buckets
        for number in range(lease.start >> _BUCKET_SHIFT, (lease.end - 1 >> _BUCKET_SHIFT) + 1):
            bucket = buckets[number]
            del bucket[nonce]
            if not bucket:
                del buckets[number]

    def _release(self, holder: str, count: int) -> None:
        left = self.held[holder] - count
        assert left >= 0
        if left:
            self.held[holder] = left
        else:
            del self.held[holder]

    def at(self, offset: int) -> DeliveryLease | None:
        """The lease that has this record, held or dying."""
        for nonce in self._buckets.get(offset >> _BUCKET_SHIFT, ()):
            lease = self._leases[nonce]
            if lease.start <= offset < lease.end and (
                lease.states is None or lease.states[offset - lease.start] != LEFT
            ):
                return lease
        return None

    def remove(self, lease: DeliveryLease, start: int, end: int) -> Runs:
        """Take the records of [start, end) out of the lease; gives those that were in it."""
        start = max(start, lease.start)
        end = min(end, lease.end)
        if start >= end:
            return []
        count = end - start
        if count == lease.left and lease.states is None:
            self.records -= count
            self._release(lease.holder, count)
            self._drop(lease)
            return [(start, end)]
        states = lease.touched()
        low = start - lease.start
        high = end - lease.start
        gone = states.count(LEFT, low, high)
        runs = lease.runs(start, end, dying_too=True) if gone else [(start, end)]
        dying = states.count(DYING, low, high) if lease.dying else 0
        states[low:high] = _LEFT_BYTE * count
        count -= gone
        lease.left -= count
        lease.dying -= dying
        self.records -= count
        self.dying -= dying
        if count > dying:
            self._release(lease.holder, count - dying)
        if not lease.left:
            self._drop(lease)
        return runs

    def extend(self, lease: DeliveryLease, start: int, end: int, deadline: float) -> None:
        lease.extend(start, end, deadline)
        if lease.queued is not None and deadline < lease.queued:
            self._queue(lease, deadline)

    def shift(self, seconds: float) -> None:
        """All leases end so much later."""
        for lease in self._leases.values():
            lease.shift(seconds)
            if lease.queued is not None:
                lease.queued += seconds
        self._rebuild_heap()

    def mark_dying(self, lease: DeliveryLease, start: int, end: int) -> None:
        """The records of [start, end), all of them held, wait for their dead letter."""
        states = lease.touched()
        low = start - lease.start
        high = end - lease.start
        count = end - start
        assert states.count(HELD, low, high) == count, f"{lease} does not hold [{start}, {end})"
        states[low:high] = bytes((DYING,)) * count
        lease.dying += count
        self.dying += count
        self._release(lease.holder, count)

    def unmark_dying(self, lease: DeliveryLease, start: int, end: int, retry_at: float) -> None:
        """The dying records of [start, end) are held again; expiry looks at the lease later."""
        if lease.states is None:
            return
        low = max(start - lease.start, 0)
        high = min(end, lease.end) - lease.start
        count = lease.states.count(DYING, low, high)
        if not count:
            return
        lease.states[low:high] = lease.states[low:high].replace(bytes((DYING,)), b"\x00")
        lease.dying -= count
        self.dying -= count
        self.held[lease.holder] = self.held.get(lease.holder, 0) + count
        # Even when queued for earlier: what just failed must not be tried again at once.
        self._queue(lease, retry_at)

    def next_deadline(self) -> float | None:
        """When expiry should look next. Early, never late, after an extension of some records."""
        while self._heap:
            deadline, nonce = self._heap[0]
            lease = self._leases.get(nonce)
            if lease is not None and lease.queued == deadline:
                if lease.left > lease.dying and (
                    lease.deadlines is not None or lease.deadline <= deadline
                ):
                    return deadline
                self._requeue(lease, lease.earliest())
            else:
                heappop(self._heap)
        return None

    def _requeue(self, lease: DeliveryLease, deadline: float | None) -> None:
        """Replace the entry on top of the heap, which is this lease's."""
        heappop(self._heap)
        lease.queued = None
        if deadline is not None:
            self._queue(lease, deadline)

    def expired(self, now: float, leases_max: int) -> list[tuple[DeliveryLease, Runs]]:
        """Leases with held records past their deadline, at most `leases_max`.

        They stay queued: until the caller changes them, each call gives the same answer.
        """
        found: list[tuple[DeliveryLease, Runs]] = []
        while self._heap and self._heap[0][0] <= now and len(found) < leases_max:
            deadline, nonce = self._heap[0]
            lease = self._leases.get(nonce)
            if lease is None or lease.queued != deadline:
                heappop(self._heap)
                continue
            runs = lease.expired_runs(now)
            if runs:
                # Off the heap for the rest of the loop, so that no second entry finds it again.
                self._requeue(lease, None)
                found.append((lease, runs))
            else:
                self._requeue(lease, lease.earliest())
        for lease, _ in found:
            self._queue(lease, min(lease.deadline, now))
        return found
