"""Counters that the node increments while it works. (Core.)

They are plain numbers on one event loop: an increment costs a fraction of a microsecond and takes
no lock, and nothing here is called per record. What can be read from the replicas is not counted
here. exposition.py writes the text that Prometheus reads.

Labels are bounded: after KEYS_MAX different ones, new ones are counted together as OTHER, so no
caller can fill the memory with names.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeVar

LATENCY_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
KEYS_MAX = 1_000
OTHER = "_other"

K = TypeVar("K")
V = TypeVar("V")


class Timings:
    """A histogram of seconds. The last count is for values above every bound."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)


class NodeMetrics:
    """The counters of one node. The fields are public: other modules add to them."""

    __slots__ = (
        "connections_refused", "connections_total", "elections", "fsync", "http", "http_in_flight",
        "http_statuses", "isr_expansions", "isr_shrinks", "produce", "produce_errors",
        "request_errors", "requests",
    )  # fmt: skip

    def __init__(self) -> None:
        self.connections_total = 0
        self.connections_refused = 0
        self.isr_shrinks = 0
        self.isr_expansions = 0
        self.elections = 0
        """How often this node began to lead a partition."""
        self.fsync = Timings()
        self.requests: dict[str, Timings] = {}
        """Native requests by kind."""
        self.request_errors: dict[tuple[str, str], int] = {}
        """By kind and error code."""
        self.produce: dict[str, Timings] = {}
        """By topic: from a produce request to its answer."""
        self.produce_errors: dict[tuple[str, str], int] = {}
        """By topic and error code."""
        self.http: dict[str, Timings] = {}
        """By route."""
        self.http_statuses: dict[tuple[str, int], int] = {}
        """By route and status."""
        self.http_in_flight = 0

    def request(self, kind: str, seconds: float, error: str = "") -> None:
        """Note an answered native request. `error` is its code if it was refused."""
        _entry(self.requests, kind, OTHER, Timings).observe(seconds)
        if error:
            _add(self.request_errors, (kind, error), (OTHER, OTHER))

    def produced(self, topic: str, seconds: float) -> None:
        """Note a produce request that succeeded."""
        _entry(self.produce, topic, OTHER, Timings).observe(seconds)

    def refused(self, topic: str, error: str) -> None:
        """Note a produce request that failed. `topic` is OTHER for unknown topics."""
        _add(self.produce_errors, (topic, error), (OTHER, error))

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Note an answered HTTP request."""
        _entry(self.http, route, OTHER, Timings).observe(seconds)
        _add(self.http_statuses, (route, status), (OTHER, status))

    def forget_topic(self, topic: str) -> None:
        """End the series of a deleted topic."""
        self.produce.pop(topic, None)
        for key in [key for key in self.produce_errors if key[0] == topic]:
            del self.produce_errors[key]


def _entry(entries: dict[K, V], key: K, other: K, make: Callable[[], V]) -> V:
    found = entries.get(key)
    if found is None:
        if len(entries) >= KEYS_MAX:
            key = other
        found = entries.setdefault(key, make())
    return found


def _add(entries: dict[K, int], key: K, other: K) -> None:
    if key not in entries and len(entries) >= KEYS_MAX:
        key = other
    entries[key] = entries.get(key, 0) + 1
