"""A wall clock that does not jump. (Shell.)

Due times, leases and expiries are wall-clock times, because they must survive a restart and mean
the same on every node. But an operator or a time service may set the wall clock of the machine: an
hour ahead would deliver every delayed record at once and end every lease. So a node reads the wall
clock once, at its start, and goes on by elapsed time. When the two differ, it approaches the wall
clock by at most `SLEW` of the time that passes.

A node that was started with a wrong clock therefore keeps it long after the clock of the machine is
right: restart it. The log reports when the two differ.
"""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

SLEW = 0.01
"""A second of difference is gone after 100."""
APART_MS = 1_000
TELL_S = 60.0


class SteadyClock:
    """Milliseconds since 1970, never going back. May be called from any thread."""

    def __init__(self, wall_ms: Callable[[], int], elapsed_s: Callable[[], float]) -> None:
        self._wall_ms = wall_ms
        self._elapsed_s = elapsed_s
        self._lock = threading.Lock()
        self._at = elapsed_s()
        self._ms = float(wall_ms())
        self._told_at = self._at - TELL_S

    def __call__(self) -> int:
        with self._lock:
            now = self._elapsed_s()
            passed_ms = max(0.0, now - self._at) * 1000
            self._at = now
            self._ms += passed_ms
            apart_ms = self._wall_ms() - self._ms
            most_ms = SLEW * passed_ms
            self._ms += min(most_ms, max(-most_ms, apart_ms))
            if abs(apart_ms) > APART_MS and now - self._told_at >= TELL_S:
                self._told_at = now
                logger.warning(
                    "event=clock_jumped the machine's clock is %+d ms from the node's, which "
                    "follows slowly; restart the node to take it over", round(apart_ms),
                )  # fmt: skip
            return int(self._ms)


def elapsed_s() -> float:
    """Return elapsed seconds, with those that the machine slept where the system reports them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
