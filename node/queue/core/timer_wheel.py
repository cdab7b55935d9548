"""Core: a hierarchical timer wheel that says which timers are due. No I/O, no clock of its own.

Time is cut into ticks of 10 ms. A timer ripens at the first tick at or after its due time (ceil),
and `advance(now)` reaches the last tick at or before now (floor). Hence the whole contract:

    advance(now) hands out exactly the timers with ceil(due / 10) <= floor(now / 10)

so a timer is never early, and late by less than one tick when advance runs on time.

The levels have 256, 64, 64 and 64 slots (7.76 days); the overflow beyond is six more levels of 64
slots, which covers every 64-bit due time. A timer lives on the level of the highest bit in which
its tick differs from the wheel's tick, in the slot its own tick names:

    level 0   tick bits  0..8    one slot = one tick
    level 1   tick bits  8..14   one slot = a revolution of level 0
    level n   ...                one slot = a revolution of level n - 1

Invariants, with T the wheel's tick:
- A timer on level n shares with T every bit above that level, and its slot there is above T's slot.
  A slot therefore never holds two revolutions, and all of a level is due before the next level.
- When T enters a slot, its timers move down (each at most once per level) or become ripe.
- `_ripe` holds the timers whose tick is at or below T and that were not handed out: added in the
  past, or just reached. Only a clock that went back leaves some there after an advance.
- Occupancy bitmaps mark the slots in use: a jump costs what it passes over, not the ticks it spans.

Timers are pairs of 64-bit integers in one array per slot. An unwanted timer cannot be taken out
alone: the caller ignores it when it comes out, and calls `rebuild` when too many are waiting.
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate

TICK_MS = 10

_BITS = (8, 6, 6, 6) + (6,) * 6
_SHIFT = tuple(accumulate(_BITS[:-1], initial=0))
_SLOTS = tuple(1 << bits for bits in _BITS)
_BASE = tuple(accumulate(_SLOTS[:-1], initial=0))
# By number of differing bits: the hot loop looks up instead of comparing level by level.
_LEVEL_OF = tuple(
    next(level for level in range(len(_BITS)) if width <= _SHIFT[level] + _BITS[level])
    for width in range(sum(_BITS) + 1)
)
_SHIFT_OF = tuple(_SHIFT[level] for level in _LEVEL_OF)
_BASE_OF = tuple(_BASE[level] for level in _LEVEL_OF)
_MASK_OF = tuple(_SLOTS[level] - 1 for level in _LEVEL_OF)

# Up to this many ripe timers are looked through at every advance while the clock is behind.
_RIPE_SCAN_MAX = 4096
# Beyond that, the wheel is set back when the ripe ones are at least this share of all timers.
_RIPE_SHARE = 16

_TIME_MS_MAX = (1 << 63) - 1
_NEVER_MS = 1 << 64


class TimerWheel:
    """Timers (id, due_ms), both 64-bit integers; ids need not be distinct."""

    __slots__ = ("_buckets", "_count", "_occupied", "_ripe", "_ripe_min_ms", "_tick")

    def __init__(self, now_ms: int) -> None:
        assert 0 <= now_ms <= _TIME_MS_MAX, f"not a 64-bit time: {now_ms}"
        self._tick = now_ms // TICK_MS
        self._count = 0
        self._buckets: list[array[int] | None] = [None] * sum(_SLOTS)
        self._occupied = [0] * len(_BITS)
        self._ripe = array("q")
        self._ripe_min_ms = _NEVER_MS

    def __len__(self) -> int:
        """Timers not handed out yet, the unwanted ones included."""
        return self._count

    def add(self, timer_id: int, due_ms: int) -> None:
        """Add one timer; one whose tick has passed comes out at the next advance."""
        self.add_many((timer_id,), (due_ms,))

    def add_many(self, timer_ids: Sequence[int], due_ms: Sequence[int]) -> None:
        """Add timers pairwise."""
        assert len(timer_ids) == len(due_ms), f"{len(timer_ids)} ids, {len(due_ms)} due times"
        # Locals and table look-ups: this loop is the cost of scheduling, restoring and cascading.
        current, buckets, round_up = self._tick, self._buckets, TICK_MS - 1
        shift_of, base_of, mask_of = _SHIFT_OF, _BASE_OF, _MASK_OF
        for timer_id, due in zip(timer_ids, due_ms, strict=True):
            tick = (due + round_up) // TICK_MS
            if tick > current:
                width = (tick ^ current).bit_length()
                index = base_of[width] + (tick >> shift_of[width] & mask_of[width])
                bucket = buckets[index] or self._open(width, index)
            else:
                bucket = self._ripe
                if due < self._ripe_min_ms:
                    self._ripe_min_ms = due
            bucket.append(due)
            bucket.append(timer_id)
        self._count += len(timer_ids)

    def advance(self, now_ms: int, limit: int | None = None) -> list[tuple[int, int]]:
        """Hand out what is due as (due_ms, id), in that order.

        With a limit, stop after the first tick that reaches it: the result is then the earliest
        part of what is due, and calling again gives the next part. Timers that were added in the
        past all come at once. A `now_ms` below an earlier one is harmless: only timers added since
        then can be due.
        """
        assert 0 <= now_ms <= _TIME_MS_MAX, f"not a 64-bit time: {now_ms}"
        target = now_ms // TICK_MS
        if target < self._tick and self._is_crowded(target):
            self._set_back(target)
        elif target > self._tick and limit is None:
            self._move(target)
        elif target > self._tick:
            self._creep(target, limit or 0)
        return self._take_ripe(target)

    def next_due_ms(self) -> int | None:
        """Next time to call advance: it hands something out or moves timers down a level.

        Never later than the first time at which advance would hand something out.
        """
        first = self._first_slot()
        wheel_ms = _NEVER_MS if first is None else first[1] * TICK_MS
        ripe_ms = -(-self._ripe_min_ms // TICK_MS) * TICK_MS if self._ripe else _NEVER_MS
        due_ms = min(wheel_ms, ripe_ms)
        return None if due_ms == _NEVER_MS else due_ms

    def rebuild(self, keep: Callable[[int], bool]) -> None:
        """Drop every timer whose id the caller no longer keeps; slots stay as they are."""
        for level, occupied in enumerate(self._occupied):
            for slot in _set_bits(occupied):
                kept = self._kept(self._take(level, slot), keep)
                if kept:
                    self._buckets[_BASE[level] + slot] = kept
                    self._occupied[level] |= 1 << slot
        self._ripe = self._kept(self._ripe, keep)
        self._ripe_min_ms = min(self._ripe[0::2], default=_NEVER_MS)

    def describe(self) -> str:
        used = [f"L{level}:{bits.bit_count()}" for level, bits in enumerate(self._occupied) if bits]
        return (
            f"tick={self._tick} timers={self._count} ripe={len(self._ripe) // 2} "
            f"slots={','.join(used) or '-'}"
        )

    def _open(self, width: int, index: int) -> "array[int]":
        level = _LEVEL_OF[width]
        self._occupied[level] |= 1 << (index - _BASE[level])
        bucket = self._buckets[index] = array("q")
        return bucket

    def _take(self, level: int, slot: int) -> "array[int]":
        """Empty a slot. The bucket leaves whole before anyone looks at its timers."""
        index = _BASE[level] + slot
        bucket = self._buckets[index]
        assert bucket is not None, f"bit set for an empty slot: level {level} slot {slot}"
        self._buckets[index] = None
        self._occupied[level] &= ~(1 << slot)
        return bucket

    def _kept(self, bucket: "array[int]", keep: Callable[[int], bool]) -> "array[int]":
        kept = array("q")
        for due, timer_id in zip(bucket[0::2], bucket[1::2], strict=True):
            if keep(timer_id):
                kept.append(due)
                kept.append(timer_id)
        self._count -= (len(bucket) - len(kept)) // 2
        return kept

    def _first_slot(self) -> tuple[int, int, int] | None:
        """(level, first tick, timers) of the earliest slot in use."""
        for level, occupied in enumerate(self._occupied):
            if occupied:
                slot = (occupied & -occupied).bit_length() - 1
                bucket = self._buckets[_BASE[level] + slot]
                assert bucket is not None
                return level, self._start_of(level, slot), len(bucket) // 2
        return None

    def _start_of(self, level: int, slot: int) -> int:
        """The first tick of a slot."""
        above = _SHIFT[level] + _BITS[level]
        return (self._tick >> above << above) | (slot << _SHIFT[level])

    def _move(self, target: int) -> None:
        """Set the tick to target; what it passes becomes ripe, what it enters moves down."""
        assert target > self._tick, f"{target} is not after {self._tick}"
        top = _LEVEL_OF[(target ^ self._tick).bit_length()]
        self._tick = target
        ripe = self._ripe
        for level in range(top):
            for slot in _set_bits(self._occupied[level]):
                ripe.extend(self._take(level, slot))
        entered = (target >> _SHIFT[top]) & (_SLOTS[top] - 1)
        for slot in _set_bits(self._occupied[top] & ((1 << entered) - 1)):
            ripe.extend(self._take(top, slot))
        if self._occupied[top] >> entered & 1:
            self._enter(top, entered)

    def _enter(self, level: int, slot: int) -> None:
        """The tick is inside this slot now: its timers move down."""
        bucket = self._take(level, slot)
        self._count -= len(bucket) // 2
        self.add_many(bucket[1::2], bucket[0::2])

    def _creep(self, target: int, limit: int) -> None:
        """Move towards target, slot by slot, until the limit is reached."""
        while self._tick < target and len(self._ripe) // 2 < limit:
            first = self._first_slot()
            if first is None or first[1] > target:
                self._move(target)
                return
            level, start, count = first
            end = start | ((1 << _SHIFT[level]) - 1)
            # A slot that fits into what is asked for need not be spread over the levels below.
            fits = end <= target and count <= limit - len(self._ripe) // 2
            self._move(end if fits else start)

    def _take_ripe(self, target: int) -> list[tuple[int, int]]:
        due_max_ms = target * TICK_MS
        ripe = self._ripe
        if not ripe or (target < self._tick and self._ripe_min_ms > due_max_ms):
            return []
        timers = sorted(zip(ripe[0::2], ripe[1::2], strict=True))
        self._ripe = array("q")
        self._ripe_min_ms = _NEVER_MS
        self._count -= len(timers)
        if target < self._tick:
            later = [timer for timer in timers if timer[0] > due_max_ms]
            timers = timers[: len(timers) - len(later)]
            self.add_many([timer[1] for timer in later], [timer[0] for timer in later])
        return timers

    def _is_crowded(self, target: int) -> bool:
        """Whether the clock went back so far that looking through the ripe ones costs too much."""
        count = len(self._ripe) // 2
        return (
            count > _RIPE_SCAN_MAX
            and count * _RIPE_SHARE > self._count
            and self._ripe_min_ms <= target * TICK_MS
        )

    def _set_back(self, target: int) -> None:
        """Start again from an earlier tick, so that ripe timers get slots to wait in."""
        timers = self._ripe
        for level, occupied in enumerate(self._occupied):
            for slot in _set_bits(occupied):
                timers.extend(self._take(level, slot))
        self._ripe = array("q")
        self._ripe_min_ms = _NEVER_MS
        self._tick = target
        self._count = 0
        self.add_many(timers[1::2], timers[0::2])


def _set_bits(bitmap: int) -> list[int]:
    bits = []
    while bitmap:
        lowest = bitmap & -bitmap
        bits.append(lowest.bit_length() - 1)
        bitmap ^= lowest
    return bits
