"""Shell: how a figure is measured: settings, payload, and slices that alternate between sides.

A machine that other programs share is faster in one second than in the next. So a subject and its
baseline take turns in short slices, in an order that reverses every round. The work between slices
is not timed: writing dirty pages to the disk, deleting old files, filling a queue again. The first
slice of each side is dropped: it pays for memory that is touched for the first time.
"""

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SECONDS_MIN = 10.0
"""No figure is measured for less, except in a smoke run that only shows that it works."""
SLICE_S = 1.0
VALUE_BYTES = 1024
VALUES = 16_000
BATCH_RECORDS = 1000
GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for on the command line."""

    directory: Path
    seconds: float = SECONDS_MIN
    """Time measured for each side of each figure."""
    quick: bool = False
    """A smoke run: small data, any duration; its numbers mean nothing."""

    def __post_init__(self) -> None:
        if self.seconds < SECONDS_MIN and not self.quick:
            raise ValueError(
                f"{self.seconds:g} s is too short to measure anything: at least {SECONDS_MIN:g} s, "
                "or --quick for a run that only shows that it works"
            )
        if not self.seconds > 0:
            raise ValueError("seconds must be more than 0")

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @property
    def slice_s(self) -> float:
        return min(SLICE_S, self.seconds / 4)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new directory that is removed afterwards in any case."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=self.directory, prefix="run-"))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def make_values(count: int = VALUES, size: int = VALUE_BYTES) -> list[bytes]:
    """Values that do not compress, the same in every run."""
    rng = random.Random(20)
    return [rng.randbytes(size) for _ in range(count)]


def make_batches(values: list[bytes]) -> list[list[bytes]]:
    return [values[at : at + BATCH_RECORDS] for at in range(0, len(values), BATCH_RECORDS)]


def endless(items: Sequence[list[bytes]]) -> Callable[[], list[bytes]]:
    """One item after the other, repeatedly."""
    at = -1

    def following() -> list[bytes]:
        nonlocal at
        at = (at + 1) % len(items)
        return items[at]

    return following


@dataclass(slots=True)
class Timing:
    """What one side did in all its slices."""

    count: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    """Processor time of the whole process, with its background threads."""
    rates: list[float] = field(default_factory=list)

    def add(self, count: int, seconds: float, cpu_s: float) -> None:
        self.count += count
        self.seconds += seconds
        self.cpu_s += cpu_s
        self.rates.append(count / seconds)

    @property
    def rate(self) -> float:
        """Operations per second over the whole time, with stalls."""
        return self.count / self.seconds

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def cpu_us(self) -> float:
        """Processor time per operation: on a busy machine it says more than the rate."""
        return self.cpu_s / self.count * 1e6

    def facts(self) -> dict[str, float]:
        return {
            "rate": round(self.rate, 3),
            "rate_median": round(self.median, 3),
            "rate_min": round(min(self.rates), 3),
            "rate_max": round(max(self.rates), 3),
            "count": self.count,
            "seconds": round(self.seconds, 3),
            "cpu_us": round(self.cpu_us, 6),
        }


class Side:
    """Something to measure: `step` does a small piece of work and returns its number of operations.

    A step that returns 0 ends its slice early; `rest` runs untimed after every slice."""

    def __init__(self, step: Callable[[], int], rest: Callable[[], object] = lambda: None) -> None:
        self._step = step
        self.rest = rest

    def slice(self, seconds: float) -> tuple[int, float]:
        step, clock = self._step, time.perf_counter
        count = 0
        start = last = clock()
        until = start + seconds
        while last < until:
            done = step()
            if not done:
                break
            count += done
            last = clock()
        return count, last - start


def interleave(settings: Settings, sides: dict[str, Side]) -> dict[str, Timing]:
    """Gives every side at least `settings.seconds` of measured time, in turns."""
    for side in sides.values():
        side.slice(settings.slice_s)
        side.rest()
    timings = {name: Timing() for name in sides}
    order = list(sides)
    while min(timing.seconds for timing in timings.values()) < settings.seconds:
        for name in order:
            cpu = time.process_time()
            count, seconds = sides[name].slice(settings.slice_s)
            cpu = time.process_time() - cpu
            assert count, f"side {name!r} had nothing to do in its slice"
            timings[name].add(count, seconds, cpu)
            sides[name].rest()
        order.reverse()
    return timings
