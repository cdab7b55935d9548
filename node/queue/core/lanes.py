"""Core: how the records of one call are shared between the five lanes.

Deficit round robin over records: each visit of a lane adds its weight to the lane's deficit, and
the lane may give that many records. A lane without records loses its deficit. A call that runs
out of budget stays on its lane with what is left of the deficit, so one call for 500 records and
500 calls for one record give the same shares.

A lane that has records but was not served for `starvation_s` gives one record before all others;
it is charged to its deficit, which may become negative, but not below minus its weight.

The state is soft: it decides only which lane goes first, so it is not stored. Availability is asked
lazily and never for more than one call can take.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

LANES = 5
WEIGHTS = (50, 25, 15, 7, 3)
STARVATION_S = 30.0


class LaneIndex(Protocol):
    """Which offsets belong to which lane."""

    def next_run(self, lane: int, offset: int) -> tuple[int, int] | None:
        """The first run [start, end) of the lane with end > offset, start clipped to offset."""

    def count_from(self, lane: int, offset: int) -> int:
        """How many records of the lane are at or above `offset`."""


class _Call:
    """What one call still may take, and what it took from each lane."""

    __slots__ = ("_available", "_records_max", "budget", "left", "taken")

    def __init__(self, available: Callable[[int, int], int], records_max: int) -> None:
        self._available = available
        self._records_max = records_max
        self.budget = records_max
        # Records each lane can still give to this call; below zero: not asked yet.
        self.left = [-1] * LANES
        self.taken = [0] * LANES

    def ask(self, lane: int) -> int:
        left = self._available(lane, self._records_max)
        if left > self._records_max:
            left = self._records_max
        self.left[lane] = left
        return left

    def take(self, lane: int, count: int) -> None:
        self.left[lane] -= count
        self.taken[lane] += count
        self.budget -= count


class DeficitRoundRobin:
    """Whose turn it is, across calls."""

    __slots__ = ("_deficits", "_lane", "_served", "_starvation_s", "_starve_at", "_weights")

    def __init__(
        self,
        now: float,
        weights: Sequence[int] = WEIGHTS,
        starvation_s: float = STARVATION_S,
    ) -> None:
        assert len(weights) == LANES
        assert min(weights) > 0
        self._weights = tuple(weights)
        self._starvation_s = starvation_s
        self._lane = 0
        self._deficits = [0] * LANES
        self._deficits[0] = weights[0]
        # When each lane was last served or last seen empty.
        self._served = [now] * LANES
        # No lane is starving before this time; checked instead of all five.
        self._starve_at = now + starvation_s

    def plan(
        self, available: Callable[[int, int], int], records_max: int, now: float
    ) -> list[tuple[int, int]]:
        """(lane, count) for this call: starving lanes first, then critical to background.

        `available(lane, bound)` says how many records the lane could give, at most `bound`.
        """
        if records_max <= 0:
            return []
        lane = self._lane
        if (
            now < self._starve_at
            and records_max <= self._deficits[lane]
            and records_max <= available(lane, records_max)
        ):
            # The whole call fits into the current turn, so no other lane has a say in it.
            self._deficits[lane] -= records_max
            self._served[lane] = now
            return [(lane, records_max)]
        call = _Call(available, records_max)
        order = list(range(LANES))
        if now >= self._starve_at:
            first = self._serve_starving(call, now)
            order = first + [lane for lane in order if lane not in first]
        while call.budget and self._serve_cycle(call, now):
            if call.budget:
                self._serve_rounds(call)
        taken = call.taken
        return [(lane, taken[lane]) for lane in order if taken[lane]]

    def _serve_starving(self, call: _Call, now: float) -> list[int]:
        first = []
        for lane in sorted(range(LANES), key=self._served.__getitem__):
            if now - self._served[lane] < self._starvation_s or not call.budget:
                break
            self._served[lane] = now
            if call.ask(lane):
                call.take(lane, 1)
                self._deficits[lane] = max(self._deficits[lane] - 1, -self._weights[lane])
                first.append(lane)
        self._starve_at = min(self._served) + self._starvation_s
        return first

    def _serve_cycle(self, call: _Call, now: float) -> bool:
        """Visit each lane once from the current one on; False when no lane has records."""
        found = False
        lane = self._lane
        deficits = self._deficits
        for _ in range(LANES):
            left = call.left[lane]
            if left < 0:
                left = call.ask(lane)
            if left:
                found = True
                count = min(left, deficits[lane], call.budget)
                if count > 0:
                    call.take(lane, count)
                    deficits[lane] -= count
                    self._served[lane] = now
                    if not call.budget:
                        break
                    left -= count
            else:
                self._served[lane] = now
            if not left:
                deficits[lane] = 0
            lane = (lane + 1) % LANES
            deficits[lane] += self._weights[lane]
        self._lane = lane
        return found

    def _serve_rounds(self, call: _Call) -> None:
        """Serve as many whole rounds at once as no lane runs dry in.

        A whole round gives each busy lane its weight and leaves turn and deficits as they were,
        so this only saves time. Called after a cycle, when every lane's availability is known.
        """
        weights = self._weights
        left = call.left
        while busy := [lane for lane, count in enumerate(left) if count]:
            if len(busy) == 1:
                # Nobody to share with: the rest of the budget, and no debt for it.
                call.take(busy[0], min(left[busy[0]], call.budget))
                return
            rounds = call.budget // sum([weights[lane] for lane in busy])
            rounds = min(rounds, min([left[lane] // weights[lane] for lane in busy]))
            if not rounds:
                return
            for lane in busy:
                call.take(lane, rounds * weights[lane])
