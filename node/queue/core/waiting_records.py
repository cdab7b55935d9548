"""Core: records that wait for their next delivery, as ranges of offsets.

A range waits in the heap of due times until it is due, then in the heap of its lane, ordered by
offset: the oldest due record of a lane goes first, and a record that is not due blocks no other.

Invariants: ranges do not overlap; `count` is the number of records, `ready[lane]` the number of
those known to be due. A heap entry whose range is not `alive` any more is dropped late.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from msgspec import Struct

from raftq.node.queue.core.entries import WaitRow
from raftq.node.queue.core.lanes import LANES

_HEAP_SLACK = 1024


class Wait(Struct, eq=False):
    """[start, end) of one lane, delivered `attempt` times, to be delivered again from `due` on."""

    lane: int
    start: int
    end: int
    attempt: int
    due: float
    first: float
    alive: bool = True
    is_ready: bool = False

    def part(self, start: int, end: int) -> "Wait":
        return Wait(self.lane, start, end, self.attempt, self.due, self.first)

    def to_row(self) -> WaitRow:
        return WaitRow(self.lane, self.start, self.end, self.attempt, self.due, self.first)


class WaitingRecords:
    """All waiting records of one group."""

    __slots__ = ("_by_start", "_due", "_ready", "_sequence", "count", "counts", "ready")

    def __init__(self) -> None:
        self._by_start: dict[int, Wait] = {}
        # The sequence number keeps ties from comparing ranges.
        self._due: list[tuple[float, int, Wait]] = []
        self._ready: list[list[tuple[int, int, Wait]]] = [[] for _ in range(LANES)]
        self._sequence = 0
        self.count = 0
        self.counts = [0] * LANES
        self.ready = [0] * LANES

    def __len__(self) -> int:
        return len(self._by_start)

    def __iter__(self) -> Iterator[Wait]:
        return iter(self._by_start.values())

    def add(self, wait: Wait) -> None:
        assert wait.start not in self._by_start
        self._by_start[wait.start] = wait
        count = wait.end - wait.start
        self.count += count
        self.counts[wait.lane] += count
        self._sequence += 1
        heappush(self._due, (wait.due, self._sequence, wait))
        if len(self._due) > 2 * len(self._by_start) + _HEAP_SLACK:
            self._due = [each for each in self._due if each[2].alive and not each[2].is_ready]
            heapify(self._due)

    def _kill(self, wait: Wait) -> None:
        wait.alive = False
        del self._by_start[wait.start]
        count = wait.end - wait.start
        self.count -= count
        self.counts[wait.lane] -= count
        if wait.is_ready:
            self.ready[wait.lane] -= count

    def _make_ready(self, wait: Wait) -> None:
        wait.is_ready = True
        self._sequence += 1
        heappush(self._ready[wait.lane], (wait.start, self._sequence, wait))
        self.ready[wait.lane] += wait.end - wait.start

    def move_due(self, now: float) -> None:
        """Ranges whose time has come become ready."""
        due = self._due
        while due and due[0][0] <= now:
            wait = heappop(due)[2]
            if wait.alive and not wait.is_ready:
                self._make_ready(wait)

    def shift(self, seconds: float) -> None:
        """All ranges are due so much later; those known to be due stay so."""
        waits = [each for each in self if not each.is_ready]
        for wait in waits:
            wait.due += seconds
        first = self._sequence + 1
        self._sequence += len(waits)
        self._due = [(wait.due, first + at, wait) for at, wait in enumerate(waits)]
        heapify(self._due)

    def next_due(self) -> float | None:
        """When the next range becomes due that move_due() has not seen as due."""
        due = self._due
        while due:
            wait = due[0][2]
            if wait.alive and not wait.is_ready:
                return due[0][0]
            heappop(due)
        return None

    def pop_ready(self, lane: int, records_max: int) -> Wait:
        """Take the oldest ready range of the lane, or the first `records_max` records of it."""
        heap = self._ready[lane]
        wait = heap[0][2]
        while not wait.alive:
            heappop(heap)
            wait = heap[0][2]
        heappop(heap)
        self._kill(wait)
        cut = wait.start + records_max
        if cut >= wait.end:
            return wait
        rest = wait.part(cut, wait.end)
        self.add(rest)
        self._make_ready(rest)
        return wait.part(wait.start, cut)

    def take(self, lane: int, start: int, end: int) -> bool:
        """Take exactly [start, end); False, and nothing is taken, when it is not all waiting."""
        wait = self._by_start.get(start)
        found = self._overlapping(start, end) if wait is None or wait.end < end else [wait]
        covered = sum(min(each.end, end) - max(each.start, start) for each in found)
        if covered != end - start or any(each.lane != lane for each in found):
            return False
        self._cut_out(found, start, end)
        return True

    def cut(self, start: int, end: int) -> None:
        """Forget whatever waits in [start, end)."""
        self._cut_out(self._overlapping(start, end), start, end)

    def _overlapping(self, start: int, end: int) -> list[Wait]:
        return [each for each in self if each.start < end and start < each.end]

    def _cut_out(self, found: list[Wait], start: int, end: int) -> None:
        for wait in found:
            self._kill(wait)
            if wait.start < start:
                self.add(wait.part(wait.start, start))
            if end < wait.end:
                self.add(wait.part(end, wait.end))

    def rows(self) -> list[WaitRow]:
        """All ranges by offset, adjacent ones of the same kind joined."""
        joined: list[Wait] = []
        for start in sorted(self._by_start):
            wait = self._by_start[start]
            last = joined[-1] if joined else None
            if last is not None and last.end == start and _same_kind(last, wait):
                joined[-1] = last.part(last.start, wait.end)
            else:
                joined.append(wait)
        return [wait.to_row() for wait in joined]


def _same_kind(one: Wait, other: Wait) -> bool:
    return (one.lane, one.attempt, one.due, one.first) == (
        other.lane,
        other.attempt,
        other.due,
        other.first,
    )
