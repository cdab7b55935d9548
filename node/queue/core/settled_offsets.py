"""Core: a set of settled offsets that stays small while it grows.

Offsets below `prefix` are all settled. Above it, offsets are bits in chunks of 4096, kept in a
dict by chunk number; chunks that are completely settled share one integer.

Invariants: no chunk is zero, no chunk has a bit below the prefix, the bit at the prefix is clear
(otherwise the prefix would be higher), `count_above` is the number of bits. So two equal sets
have equal dumps. Adding one offset is O(1); adding a range is O(chunks it touches).

It knows nothing about why an offset is settled, and does no I/O.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from raftq.client.common.errors import CorruptFile

_SHIFT = 12
CHUNK = 1 << _SHIFT
_LOW = CHUNK - 1
FULL = (1 << CHUNK) - 1
OFFSET_MAX = (1 << 63) - 1

# What load() agrees to allocate: four thousand million offsets above the prefix.
CHUNKS_MAX = 1 << 20

_Number = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
_Bits = Annotated[bytes, Meta(max_length=CHUNK >> 3)]
SettledDump = tuple[_Number, tuple[tuple[_Number, _Number | _Bits], ...]]
"""The prefix, and rows of a chunk number with its bits, or with a count of full chunks."""


class SettledOffsets:
    """Which offsets are settled: everything below `prefix`, and some above it."""

    __slots__ = ("_chunks", "_end", "count_above", "prefix")

    def __init__(self, start: int = 0) -> None:
        assert start >= 0
        self.prefix = start
        self.count_above = 0
        self._chunks: dict[int, int] = {}
        # No offset at or above _end is settled. An upper bound, not always the lowest one.
        self._end = start

    def __contains__(self, offset: int) -> bool:
        if offset < self.prefix:
            return True
        if offset >= self._end:
            return False
        return bool(self._chunks.get(offset >> _SHIFT, 0) >> (offset & _LOW) & 1)

    def __repr__(self) -> str:
        return f"SettledOffsets(prefix={self.prefix}, above={self.count_above})"

    def clear_from(self, offset: int) -> bool:
        """Whether certainly nothing at or above `offset` is settled; cheap, may say False."""
        return offset >= self._end

    def add(self, start: int, end: int) -> None:
        """Settle [start, end). What is settled already stays settled."""
        start = max(start, self.prefix)
        if start >= end:
            return
        if end > self._end:
            self._end = end
        chunks = self._chunks
        if start == self.prefix:
            if chunks:
                self._advance(end)
            else:
                self.prefix = end
            return
        while start < end:
            number = start >> _SHIFT
            low = start & _LOW
            count = min(end - start, CHUNK - low)
            old = chunks.get(number, 0)
            if count == CHUNK:
                self.count_above += CHUNK - old.bit_count()
                chunks[number] = FULL
            else:
                new = old | ((1 << count) - 1) << low
                self.count_above += new.bit_count() - old.bit_count()
                chunks[number] = FULL if new == FULL else new
            start += count

    def _advance(self, end: int) -> None:
        """Move the prefix to `end` and on over the settled offsets that follow it."""
        self._drop_chunks(self.prefix >> _SHIFT, end >> _SHIFT)
        chunks = self._chunks
        while True:
            number = end >> _SHIFT
            bits = chunks.get(number)
            if bits is None:
                break
            low = end & _LOW
            if low:
                self.count_above -= (bits & ((1 << low) - 1)).bit_count()
                bits >>= low
            ones = (bits ^ (bits + 1)).bit_length() - 1
            self.count_above -= ones
            bits >>= ones
            end += ones
            if bits:
                chunks[number] = bits << (low + ones)
                break
            del chunks[number]
            if ones == 0 or end & _LOW:
                break
        self.prefix = end
        self._end = max(self._end, end)

    def _drop_chunks(self, first: int, end: int) -> None:
        chunks = self._chunks
        numbers: Sequence[int] = range(first, end)
        if len(numbers) > len(chunks):
            numbers = [number for number in chunks if first <= number < end]
        for number in numbers:
            bits = chunks.pop(number, 0)
            self.count_above -= bits.bit_count()

    def holes(self, start: int, end: int) -> list[tuple[int, int]]:
        """The sub-ranges of [start, end) that are not settled, in order and not adjacent."""
        start = max(start, self.prefix)
        if start >= end:
            return []
        if not self._chunks or start >= self._end:
            return [(start, end)]
        found: list[tuple[int, int]] = []
        stop = min(end, self._end)
        hole = -1  # where the hole we are inside of began
        while start < stop:
            number = start >> _SHIFT
            low = start & _LOW
            count = min(stop - start, CHUNK - low)
            bits = self._chunks.get(number, 0)
            if bits == 0:
                hole = start if hole < 0 else hole
            elif bits is FULL:
                if hole >= 0:
                    found.append((hole, start))
                hole = -1
            else:
                hole = _scan(bits >> low & ((1 << count) - 1), start, count, hole, found)
            start += count
        if stop < end:
            hole = stop if hole < 0 else hole
        if hole >= 0:
            found.append((hole, end))
        return found

    def truncate(self, end: int) -> None:
        """Forget everything settled at or above `end`."""
        assert end >= 0
        self._end = min(self._end, end)
        if end <= self.prefix:
            self.prefix = self._end = end
            self._chunks.clear()
            self.count_above = 0
            return
        last = end >> _SHIFT
        for number in [number for number in self._chunks if number >= last]:
            bits = self._chunks.pop(number)
            kept = bits & ((1 << (end & _LOW)) - 1) if number == last else 0
            self.count_above -= bits.bit_count() - kept.bit_count()
            if kept:
                self._chunks[number] = kept

    def dump(self) -> SettledDump:
        """The whole set, as load() takes it."""
        rows: list[tuple[int, int | bytes]] = []
        for number in sorted(self._chunks):
            bits = self._chunks[number]
            if bits is not FULL:
                rows.append((number, bits.to_bytes((bits.bit_length() + 7) >> 3, "little")))
                continue
            first, count = rows[-1] if rows else (-1, 0)
            if isinstance(count, int) and first + count == number:
                rows[-1] = (first, count + 1)
            else:
                rows.append((number, 1))
        return self.prefix, tuple(rows)

    @classmethod
    def load(cls, dumped: SettledDump) -> "SettledOffsets":
        """The set that dump() described. Raises CorruptFile if the rows contradict each other."""
        prefix, rows = dumped
        self = cls(prefix)
        next_number = prefix >> _SHIFT
        for number, content in rows:
            next_number = self._load_row(number, content, next_number)
        return self

    def _load_row(self, number: int, content: int | bytes, number_min: int) -> int:
        """Take one dumped row; returns the lowest chunk number that the next row may have."""
        if not number_min <= number <= OFFSET_MAX >> _SHIFT:
            raise CorruptFile(f"settled offsets: chunk {number} is out of order")
        if isinstance(content, int):
            bits, count = FULL, content
        else:
            bits, count = int.from_bytes(content, "little"), 1
            if bits in (0, FULL):
                raise CorruptFile(f"settled offsets: chunk {number} is not a partial one")
        if not 1 <= count <= CHUNKS_MAX - len(self._chunks):
            raise CorruptFile(f"settled offsets: {count} chunks in a row")
        if number + count - 1 > OFFSET_MAX >> _SHIFT:
            raise CorruptFile(f"settled offsets: chunk {number} is past the last offset")
        low = self.prefix & _LOW
        if number == self.prefix >> _SHIFT and bits & ((1 << (low + 1)) - 1):
            raise CorruptFile("settled offsets: a chunk overlaps the prefix")
        for each in range(number, number + count):
            self._chunks[each] = bits
        self.count_above += bits.bit_count() * count
        self._end = (number + count) << _SHIFT
        return number + count


def _scan(bits: int, start: int, count: int, hole: int, found: list[tuple[int, int]]) -> int:
    """Walk `count` bits by runs; append finished holes; give the open hole's start, or -1."""
    end = start + count
    while start < end:
        if bits & 1:
            if hole >= 0:
                found.append((hole, start))
                hole = -1
            run = (bits ^ (bits + 1)).bit_length() - 1
        else:
            hole = start if hole < 0 else hole
            run = (bits & -bits).bit_length() - 1 if bits else end - start
        bits >>= run
        start += run
    return hole
