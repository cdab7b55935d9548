"""Core: the pending records of a replicated delays log: which are due, and where they are. No I/O.

The id of a delayed record is the offset at which it was first stored; it never changes. A record
may be stored again at a later offset, so that the beginning of the log can be dropped. The states
of a record:

    scheduled ──> pending ──fired──> out ──released──> done
                   │  ^ └─moved─┐
                   │  │         └──> pending, at another offset
                   └──cancelled──> done

`due` hands a record out once: the caller fires it (`fired`) or gives it back (`again`) before
anything else happens. An offset is held until its record is cancelled, moved or released. No record
below `first_held` is needed any more.

Until `load` has run there is no wheel: a log is read first, and only what is still pending then
gets a timer. All methods do little work at once; what may be much is a generator or says `more`.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice

from raftq.node.queue.core.incremental_wheel import IncrementalTimerWheel

# Held offsets are counted in blocks of 2**8.
_BLOCK_BITS = 8
_LOAD_TIMERS = 4_096
_MOVES_MAX = 2_000
_WHEEL_SLACK = 4_096
_PAGE_TIMERS = 4_096
_NO_TIME_MS = 1 << 62

Pending = tuple[int, int]
"""(id, deliver_at_ms)"""


class _Block:
    """How many records are held of those stored, and the bytes of all of them."""

    __slots__ = ("held", "size", "stored")

    def __init__(self) -> None:
        self.held = self.stored = self.size = 0


class PendingDelays:
    """The pending records, by id."""

    __slots__ = ("_due", "_earliest_ms", "_moved", "_moved_to", "_shelves", "_sweeping", "_wheel")

    def __init__(self) -> None:
        self._due: dict[int, int] = {}  # id -> deliver_at
        self._moved: dict[int, int] = {}  # id -> offset, of records that were stored again
        self._moved_to: dict[int, int] = {}  # and back
        self._shelves: dict[int, _Block] = {}
        self._wheel: IncrementalTimerWheel | None = None
        self._earliest_ms = _NO_TIME_MS
        self._sweeping = False

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, delay_id: int) -> bool:
        return delay_id in self._due

    def deliver_at(self, delay_id: int) -> int | None:
        return self._due.get(delay_id)

    def offset_of(self, delay_id: int) -> int:
        """The offset in the delays log at which the record is stored."""
        return self._moved.get(delay_id, delay_id)

    # What the log says

    def scheduled(self, base: int, deliver_at_ms: Sequence[int], size: int) -> None:
        """Records were stored at `base`, in a batch of `size` bytes."""
        ids = range(base, base + len(deliver_at_ms))
        self._hold(ids, size)
        self._add(ids, deliver_at_ms)

    def moved(self, ids: Sequence[int], deliver_at_ms: Sequence[int], base: int, size: int) -> None:
        """These pending records are stored again at `base`, and are read from there from now on.

        A record that is not pending becomes pending again: its mark turned out to be void, or was
        in a part of the log that is gone.
        """
        self._hold(range(base, base + len(ids)), size)
        fresh: list[Pending] = []
        for delay_id, at, offset in zip(
            ids, deliver_at_ms, range(base, base + len(ids)), strict=True
        ):
            if delay_id in self._due:
                self._let_go(delay_id)
            else:
                fresh.append((delay_id, at))
            self._moved[delay_id] = offset
            self._moved_to[offset] = delay_id
        self._add([one for one, _ in fresh], [at for _, at in fresh])

    def cancelled(self, ids: Iterable[int]) -> None:
        """These records are done. Ids that are not pending are ignored."""
        due = self._due
        for delay_id in ids:
            if due.pop(delay_id, None) is not None:
                self._let_go(delay_id)

    def fired(self, ids: Iterable[int]) -> list[int]:
        """These records are in the data log. Returns the ids that were pending.

        Their offsets in the delays log stay held until `released`.
        """
        pop = self._due.pop
        return [one for one in ids if pop(one, None) is not None]

    def released(self, ids: Iterable[int]) -> None:
        """The bytes of these fired records are not needed any more."""
        for delay_id in ids:
            self._let_go(delay_id)

    # What is due

    def load(self, now_ms: int) -> Iterator[None]:
        """Make the wheel, in portions. Nothing else may happen until it is done."""
        earliest = min(self._earliest_ms, now_ms)
        wheel = IncrementalTimerWheel(max(earliest, 0))
        ids = list(self._due)
        for start in range(0, len(ids), _LOAD_TIMERS):
            part = ids[start : start + _LOAD_TIMERS]
            wheel.add_many(part, [self._due[one] for one in part])
            yield
        self._wheel = wheel

    def due(self, now_ms: int, records_max: int) -> tuple[list[int], bool]:
        """The next due records, at most about twice `records_max`, and whether to ask again."""
        wheel, pending = self._loaded(), self._due
        timers, more = wheel.take(now_ms, records_max, _MOVES_MAX)
        early = [timer for timer in timers if timer[0] > now_ms]
        if early:  # the clock went back
            wheel.add_many([timer[1] for timer in early], [timer[0] for timer in early])
            timers = [timer for timer in timers if timer[0] <= now_ms]
        found = [delay_id for _, delay_id in timers if delay_id in pending]
        return found, more or len(timers) >= records_max

    def again(self, ids: Sequence[int], at_ms: int) -> None:
        """Hand these out again, not before `at_ms`."""
        due = [max(self._due[delay_id], at_ms) for delay_id in ids]
        self._loaded().add_many(ids, due)

    def next_due_ms(self) -> int | None:
        """Next time to ask `due`; never later than the first at which it finds something."""
        return self._loaded().next_due_ms()

    def work(self) -> None:
        """Do a little of what would otherwise be much later. For every tick."""
        wheel = self._loaded()
        wheel.work(_MOVES_MAX)
        if self._sweeping or len(wheel) > 2 * len(self._due) + _WHEEL_SLACK:
            self._sweeping = wheel.sweep(self._due.__contains__)

    # What is where

    def first_held(self, end: int) -> int:
        """No offset below this one is needed; `end` if no offset is needed."""
        return min(min(self._shelves, default=end) << _BLOCK_BITS if self._shelves else end, end)

    def held_below(self, end: int, records_max: int) -> list[int]:
        """The first pending records that are stored below `end`."""
        found: list[int] = []
        due = self._due
        for shelf in sorted(one for one in self._shelves if one << _BLOCK_BITS < end):
            start = shelf << _BLOCK_BITS
            for offset in range(start, min(start + (1 << _BLOCK_BITS), end)):
                delay_id = self._moved_to.get(offset, offset)
                if delay_id in due and self.offset_of(delay_id) == offset:
                    found.append(delay_id)
            if len(found) >= records_max:
                break
        return found[:records_max]

    def pending_bytes(self) -> int:
        """About how many bytes of the log are needed."""
        return sum(one.size * one.held // max(one.stored, 1) for one in self._shelves.values())

    def page(self, skip: int, limit: int) -> Iterator[list[Pending] | None]:
        """Pending records in the order they are due; None while it is still working."""
        wheel, due = self._loaded(), self._due
        # Enough timers that `skip + limit` of them are wanted, copied: others go on meanwhile.
        enough = skip + limit + max(len(wheel) - len(due), 0)
        parts: list[array[int]] = []
        for part in wheel.in_order():
            parts.append(part)
            enough -= len(part) // 2
            if enough <= 0:
                break
        found: list[Pending] = []
        worked = 0
        for part in parts:
            runs: list[list[tuple[int, int]]] = []
            for start in range(0, len(part), 2 * _PAGE_TIMERS):
                end = start + 2 * _PAGE_TIMERS
                timers = zip(part[start:end:2], part[start + 1 : end : 2], strict=True)
                runs.append(sorted(timer for timer in timers if timer[1] in due))
                worked += min(len(part), 2 * _PAGE_TIMERS)
                if worked >= 2 * _PAGE_TIMERS:
                    worked = 0
                    yield None
            ordered = merge(*runs) if len(runs) > 1 else iter(runs[0] if runs else [])
            while some := list(islice(ordered, _PAGE_TIMERS)):
                kept = some[skip:]
                skip = max(skip - len(some), 0)
                found += [(one, due[one]) for _, one in kept if one in due]
                if len(found) >= limit:
                    yield found[:limit]
                    return
                if len(some) == _PAGE_TIMERS:
                    yield None
        yield found

    def describe(self) -> str:
        wheel = "none" if self._wheel is None else self._wheel.describe()
        return (
            f"pending={len(self._due)} moved={len(self._moved)} shelves={len(self._shelves)} "
            f"wheel[{wheel}]"
        )

    def _loaded(self) -> IncrementalTimerWheel:
        assert self._wheel is not None, "not loaded"
        return self._wheel

    def _add(self, ids: Sequence[int], deliver_at_ms: Sequence[int]) -> None:
        if not ids:
            return
        earliest = min(deliver_at_ms)
        if earliest < 0:
            deliver_at_ms = [max(at, 0) for at in deliver_at_ms]
            earliest = 0
        self._due.update(zip(ids, deliver_at_ms, strict=True))
        if self._wheel is not None:
            self._wheel.add_many(ids, deliver_at_ms)
        elif earliest < self._earliest_ms:
            self._earliest_ms = earliest

    def _hold(self, offsets: range, size: int) -> None:
        if not offsets:
            return
        each = size // len(offsets)
        start = offsets.start
        while start < offsets.stop:
            number = start >> _BLOCK_BITS
            end = min((number + 1) << _BLOCK_BITS, offsets.stop)
            shelf = self._shelves.get(number)
            if shelf is None:
                shelf = self._shelves[number] = _Block()
            shelf.held += end - start
            shelf.stored += end - start
            shelf.size += each * (end - start)
            start = end

    def _let_go(self, delay_id: int) -> None:
        offset = delay_id
        if self._moved:
            offset = self._moved.pop(delay_id, delay_id)
            self._moved_to.pop(offset, None)
        number = offset >> _BLOCK_BITS
        shelf = self._shelves[number]
        shelf.held -= 1
        if not shelf.held:
            # Places are given out in order: a shelf that comes back counts only what is new on it.
            del self._shelves[number]
