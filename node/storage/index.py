"""What is known about the batches of one segment without reading them. (Pure.)

A sparse table of (offset, position, time) every `interval` bytes, the runs of each lane, the starts
of epochs and the damaged ranges. The active segment's index grows with each append; a sealed one
is written once (index_file.py) and loaded at the first use.

Invariants
- The first batch and the first batch after damage have an entry, so a walk from the entry at or
  below an offset never meets known damage.
- `times[i]` is the highest timestamp of all batches *before* entry i; so it never decreases, and
  the first batch at or above a time lies between the last entry with a smaller time and the next.
- Runs of a lane are sorted, do not touch and contain only offsets that have a record.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import sub

from raftq.client.wire.batch import LANE_COUNT
from raftq.node.storage.damage import DamagedRange

TIME_NONE = -(1 << 63)


class LaneRuns:
    """Runs [start, end) of one lane and how many records lie before each."""

    __slots__ = ("before", "ends", "starts", "total")

    def __init__(self, starts: "array[int]", ends: "array[int]") -> None:
        self.starts = starts
        self.ends = ends
        counts = list(accumulate(map(sub, ends, starts), initial=0))
        self.total: int = counts.pop()
        self.before = array("q", counts)

    def add(self, start: int, end: int) -> None:
        ends = self.ends
        if ends and ends[-1] == start:
            ends[-1] = end
        else:
            self.starts.append(start)
            ends.append(end)
            self.before.append(self.total)
        self.total += end - start

    def next_run(self, offset: int) -> tuple[int, int] | None:
        at = bisect_right(self.ends, offset)
        if at == len(self.ends):
            return None
        return max(self.starts[at], offset), self.ends[at]

    def count_from(self, offset: int) -> int:
        at = bisect_right(self.ends, offset)
        if at == len(self.ends):
            return 0
        left: int = self.total - self.before[at] - max(offset - self.starts[at], 0)
        return left

    def cut(self, offset: int) -> None:
        """Forget everything at or above `offset`."""
        self.total -= self.count_from(offset)
        keep = bisect_left(self.starts, offset)
        del self.starts[keep:], self.ends[keep:], self.before[keep:]
        if keep and self.ends[-1] > offset:
            self.ends[-1] = offset


class SegmentIndex:
    """The index of one segment, in memory."""

    __slots__ = (
        "_interval",
        "_next_entry_at",
        "base_offset",
        "damaged",
        "end_offset",
        "epochs",
        "first_timestamp",
        "lanes",
        "max_timestamp",
        "offsets",
        "positions",
        "size",
        "times",
    )

    def __init__(self, base_offset: int, interval: int, with_lanes: bool) -> None:
        self.base_offset = base_offset
        self.end_offset = base_offset
        self.size = 0
        self.first_timestamp = TIME_NONE
        self.max_timestamp = TIME_NONE
        self.offsets = array("q")
        self.positions = array("q")
        self.times = array("q")
        self.lanes: list[LaneRuns] | None = None
        if with_lanes:
            self.lanes = [LaneRuns(array("q"), array("q")) for _ in range(LANE_COUNT)]
        self.epochs: list[tuple[int, int]] = []
        self.damaged: list[DamagedRange] = []
        self._interval = interval
        self._next_entry_at = 0

    @property
    def lane_records(self) -> list[int]:
        return [0] * LANE_COUNT if self.lanes is None else [runs.total for runs in self.lanes]

    def add(self, length: int, base: int, span: int, lane: int, timestamp: int) -> None:
        """Note the batch just written at the end; `timestamp` is its highest."""
        end = base + span
        if self.lanes is not None:
            self.lanes[lane].add(base, end)
        self.add_entry(length, base, end, timestamp)

    def add_sparse(
        self, length: int, offsets: Sequence[int], bounds: tuple[int, int], lane: int, time: int
    ) -> None:
        """Note a batch covering `bounds` in which only `offsets` have a record."""
        if self.lanes is not None:
            runs = self.lanes[lane]
            for offset in offsets:
                runs.add(offset, offset + 1)
        self.add_entry(length, *bounds, time)

    def add_entry(self, length: int, base: int, end: int, timestamp: int) -> None:
        position = self.size
        if position >= self._next_entry_at:
            self.offsets.append(base)
            self.positions.append(position)
            self.times.append(self.max_timestamp)
            self._next_entry_at = position + self._interval
            if self.first_timestamp == TIME_NONE:
                self.first_timestamp = timestamp
        if timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
        self.end_offset = end
        self.size = position + length

    def add_epoch(self, epoch: int, base: int) -> None:
        if not self.epochs or self.epochs[-1][0] != epoch:
            self.epochs.append((epoch, base))

    def add_damage(self, damage: DamagedRange) -> None:
        """Skip a damaged range at the end; what follows starts a new entry."""
        self.damaged.append(damage)
        self.end_offset = damage.end
        self.size = damage.end_position
        self._next_entry_at = self.size

    def insert_damage(self, damage: DamagedRange) -> None:
        """Note damage found later, inside the segment."""
        start, end = damage.position, damage.end_position
        apart = [
            damage
            for damage in self.damaged
            if damage.end_position <= start or end <= damage.position
        ]
        apart.append(damage)
        self.damaged[:] = sorted(apart, key=lambda damage: damage.position)
        self.ensure_entry(damage)

    def ensure_entry(self, damage: DamagedRange) -> None:
        """Make an entry for the first batch after damage."""
        at = bisect_left(self.positions, damage.end_position)
        if damage.end_position >= self.size:
            return
        if at < len(self.positions) and self.positions[at] == damage.end_position:
            return
        # The highest time before it is not known exactly. A value that is too high only lengthens a
        # walk.
        time = self.times[at] if at < len(self.times) else self.max_timestamp
        self.offsets.insert(at, damage.end)
        self.positions.insert(at, damage.end_position)
        self.times.insert(at, time)

    def entry_for_offset(self, offset: int) -> tuple[int, int]:
        """Return (offset, position) of the last entry at or below `offset`."""
        at = bisect_right(self.offsets, offset) - 1
        return (self.offsets[at], self.positions[at]) if at >= 0 else (self.base_offset, 0)

    def block_end(self, position: int) -> int:
        """Return the position of the first entry after `position`, or the end of the segment."""
        at = bisect_right(self.positions, position)
        return self.positions[at] if at < len(self.positions) else self.size

    def last_entry_until(self, position: int) -> int:
        """Return the position of the last entry at or below `position`."""
        at = bisect_right(self.positions, position) - 1
        return self.positions[at] if at >= 0 else 0

    def entry_for_time(self, timestamp: int) -> int | None:
        """Return the offset from which to look for the first batch at or above a time, or None."""
        if self.max_timestamp < timestamp or not self.offsets:
            return None
        return self.offsets[max(bisect_left(self.times, timestamp) - 1, 0)]

    def damage_at(self, offset: int) -> DamagedRange | None:
        """Return the known damaged range that contains the offset, or None."""
        for damage in self.damaged:
            if damage.start <= offset < damage.end:
                return damage
        return None

    def damage_position_from(self, position: int) -> int:
        """Return where the first known damage at or after `position` starts, or the end."""
        for damage in self.damaged:
            if damage.position >= position:
                return damage.position
        return self.size

    def rewind(self, position: int) -> None:
        """Forget everything from the last entry below `position` on.

        The caller scans the few batches from the new `size` up to `position` again.
        """
        keep = max(bisect_left(self.positions, position) - 1, 0)
        if self.positions:
            self.size = self.positions[keep]
            self.end_offset = self.offsets[keep]
            self.max_timestamp = self.times[keep]
        else:
            self.size, self.end_offset = 0, self.base_offset
            self.max_timestamp = TIME_NONE
        if not keep:
            self.first_timestamp = TIME_NONE
        del self.positions[keep:], self.offsets[keep:], self.times[keep:]
        end = self.end_offset
        if self.lanes is not None:
            for runs in self.lanes:
                runs.cut(end)
        self.epochs = [entry for entry in self.epochs if entry[1] < end]
        self.damaged = [damage for damage in self.damaged if damage.end_position <= self.size]
        self._next_entry_at = self.size
