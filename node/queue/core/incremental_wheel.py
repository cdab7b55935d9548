"""Core: a timer wheel that never does much work at once. No I/O, no clock of its own.

A wheel moves the timers of a slot down a level when it enters the slot, and a slot of a higher
level may hold a million of them. Here that is done before, in portions:

    work       prepares the next slot of each level: a wheel of its own, set to the slot's first
               tick, takes over the slot's timers a few at a time; entering the slot then is only
               taking over that wheel's lower levels
    take       hands out what is due, at most about `limit`; when the clock has run far ahead of
               the wheel (a new leader, a stopped process) it prepares in portions, too
    sweep      drops unwanted timers, a few at a time

Whatever is not prepared in time is moved when the slot is entered, as in any wheel. The invariants
are those of the wheel; a slot that is being prepared keeps its bit, and its timers are those in its
bucket and those in the wheel prepared for it. `len` counts all of them.
"""

from array import array
from collections.abc import Callable, Iterator

from raftq.node.queue.core.timer_wheel import _BASE, _SHIFT, _SLOTS, TICK_MS, TimerWheel, _set_bits

# A slot that begins later than this is not prepared yet.
_AHEAD_TICKS = 6_000
# Fewer timers than this are moved when their slot is entered.
_PREPARE_MIN = 256
_SWEEP_TIMERS = 2_048
_NOTHING = -1


class IncrementalTimerWheel(TimerWheel):
    """A timer wheel that moves timers in portions."""

    __slots__ = ("_ahead", "_backlog", "_backlog_at", "_sweeper", "_swept")

    def __init__(self, now_ms: int) -> None:
        super().__init__(now_ms)
        # By level: the slot being prepared, and its wheel.
        self._ahead: dict[int, tuple[int, TimerWheel]] = {}
        # More ripe timers than were asked for, and how many numbers of it are handed out.
        self._backlog: array[int] = array("q")
        self._backlog_at = 0
        self._sweeper: Iterator[int] | None = None
        self._swept = _NOTHING

    def work(self, timers_max: int) -> int:
        """Prepare up to so many timers; how many."""
        left = timers_max
        for level in range(1, len(_SHIFT)):
            if left <= 0:
                break
            left -= self._prepare(level, left, _AHEAD_TICKS)
        return timers_max - left

    def take(self, now_ms: int, limit: int, moves_max: int) -> tuple[list[tuple[int, int]], bool]:
        """What is due as (due_ms, id), and whether there is more to do at once.

        In order, except among the timers of one tick that holds more than `limit`.
        """
        target = now_ms // TICK_MS
        if not self._backlog:
            if target < self._tick:
                return self.advance(now_ms, limit), False
            done = self._creep_gently(target, limit, moves_max)
            if len(self._ripe) <= 4 * limit:
                return self._take_ripe(target), not done
            self._backlog, self._ripe = self._ripe, array("q")
            self._ripe_min_ms = self._never_ms()
        end = self._backlog_at + 2 * limit
        part = self._backlog[self._backlog_at : end]
        self._backlog_at = end
        if end >= len(self._backlog):
            self._backlog, self._backlog_at = array("q"), 0
        self._count -= len(part) // 2
        return sorted(zip(part[0::2], part[1::2], strict=True)), True

    def next_due_ms(self) -> int | None:
        if self._backlog:
            return 0
        return super().next_due_ms()

    def in_order(self) -> Iterator["array[int]"]:
        """Copies of all timers, as pairs of numbers: each array is due before the next one."""
        yield self._backlog[self._backlog_at :] + self._ripe
        for level, occupied in enumerate(self._occupied):
            for slot in _set_bits(occupied):
                bucket = self._buckets[_BASE[level] + slot]
                assert bucket is not None
                ahead = self._ahead_of(level, slot)
                yield bucket[:] if ahead is None else bucket + _all_of(ahead)

    def sweep(self, keep: Callable[[int], bool]) -> bool:
        """Drop some timers that are not kept; whether the sweep goes on."""
        if self._sweeper is None:
            self._sweeper = self._sweeping(keep)
        seen = 0
        while seen < _SWEEP_TIMERS:
            found = next(self._sweeper, _NOTHING)
            if found == _NOTHING:
                self._sweeper, self._swept = None, _NOTHING
                return False
            seen += found
        return True

    def rebuild(self, keep: Callable[[int], bool]) -> None:
        super().rebuild(keep)
        self._backlog = self._kept(self._backlog[self._backlog_at :], keep)
        self._backlog_at = 0

    # Preparing

    def _ahead_of(self, level: int, slot: int) -> TimerWheel | None:
        entry = self._ahead.get(level)
        return entry[1] if entry is not None and entry[0] == slot else None

    def _prepare(self, level: int, timers_max: int, ticks_max: int) -> int:
        """Prepare the level's next slot if it begins within so many ticks; how many timers."""
        occupied = self._occupied[level]
        if not occupied:
            return 0
        slot = (occupied & -occupied).bit_length() - 1
        start = self._start_of(level, slot)
        if start > self._tick + ticks_max:
            return 0
        index = _BASE[level] + slot
        bucket = self._buckets[index]
        assert bucket is not None
        ahead = self._ahead_of(level, slot)
        if index == self._swept or (ahead is None and len(bucket) < 2 * _PREPARE_MIN):
            return 0
        if ahead is None:
            self._put_back(level)
            ahead = TimerWheel(start * TICK_MS)
            self._ahead[level] = (slot, ahead)
        count = min(len(bucket) // 2, timers_max)
        if count:
            part = bucket[-2 * count :]
            del bucket[-2 * count :]
            ahead.add_many(part[1::2], part[0::2])
        return count

    def _put_back(self, level: int) -> None:
        """A slot that comes earlier has got timers: the one prepared so far has to wait."""
        entry = self._ahead.pop(level, None)
        if entry is not None:
            bucket = self._buckets[_BASE[level] + entry[0]]
            assert bucket is not None
            bucket.extend(_all_of(entry[1]))

    def _take(self, level: int, slot: int) -> "array[int]":
        bucket = super()._take(level, slot)
        ahead = self._ahead_of(level, slot)
        if ahead is not None:
            del self._ahead[level]
            bucket.extend(_all_of(ahead))
        return bucket

    def _enter(self, level: int, slot: int) -> None:
        ahead = self._ahead_of(level, slot)
        if ahead is None:
            super()._enter(level, slot)
            return
        del self._ahead[level]
        rest = super()._take(level, slot)
        target, self._tick = self._tick, ahead._tick
        # The levels below are empty: whatever was there has been passed.
        end = _BASE[level - 1] + _SLOTS[level - 1]
        self._buckets[:end] = ahead._buckets[:end]
        self._occupied[:level] = ahead._occupied[:level]
        self._ripe.extend(ahead._ripe)
        if target > self._tick:
            self._move(target)
        self._count -= len(rest) // 2
        self.add_many(rest[1::2], rest[0::2])

    def _first_slot(self) -> tuple[int, int, int] | None:
        first = super()._first_slot()
        if first is not None and first[0] in self._ahead:
            level, start, count = first
            slot = (start >> _SHIFT[level]) & (_SLOTS[level] - 1)
            ahead = self._ahead_of(level, slot)
            if ahead is not None:
                return level, start, count + len(ahead)
        return first

    def _creep_gently(self, target: int, limit: int, moves_max: int) -> bool:
        """Move towards target until the limit is reached; False when more moves were needed."""
        while self._tick < target and len(self._ripe) // 2 < limit:
            first = self._first_slot()
            if first is None or first[1] > target:
                self._move(target)
                return True
            level, start, count = first
            end = start | ((1 << _SHIFT[level]) - 1)
            if end <= target and count <= limit - len(self._ripe) // 2:
                self._move(end)
                continue
            loose = self._loose(level, start)
            if loose > max(moves_max, _PREPARE_MIN):
                if self._swept == _BASE[level] + ((start >> _SHIFT[level]) & (_SLOTS[level] - 1)):
                    self._sweeper, self._swept = None, _NOTHING
                self._prepare(level, moves_max, target - self._tick)
                return False
            moves_max -= loose
            self._move(start)
        return self._tick >= target

    def _loose(self, level: int, start: int) -> int:
        """Timers of a slot that have still to be moved down when it is entered."""
        if not level:
            return 0
        bucket = self._buckets[_BASE[level] + ((start >> _SHIFT[level]) & (_SLOTS[level] - 1))]
        assert bucket is not None
        return len(bucket) // 2

    @staticmethod
    def _never_ms() -> int:
        return 1 << 64

    # Sweeping

    def _sweeping(self, keep: Callable[[int], bool]) -> Iterator[int]:
        for level, occupied in enumerate(self._occupied):
            for slot in _set_bits(occupied):
                index = _BASE[level] + slot
                bucket = self._buckets[index]
                if bucket is None:
                    continue
                self._swept = index
                kept = array("q")
                size = len(bucket)
                for start in range(0, size, 2 * _SWEEP_TIMERS):
                    part = bucket[start : min(start + 2 * _SWEEP_TIMERS, size)]
                    for due, timer_id in zip(part[0::2], part[1::2], strict=True):
                        if keep(timer_id):
                            kept.append(due)
                            kept.append(timer_id)
                    yield len(part) // 2 + 8  # an almost empty slot is work, too
                    if self._buckets[index] is not bucket:
                        break
                else:
                    # It may have grown at its end meanwhile, and nothing else: it is not prepared.
                    self._count -= (size - len(kept)) // 2
                    kept.extend(bucket[size:])
                    self._buckets[index] = kept


def _all_of(wheel: TimerWheel) -> "array[int]":
    timers = wheel._ripe[:]
    for bucket in wheel._buckets:
        if bucket:
            timers.extend(bucket)
    return timers
