"""Pure: what happened in a run, by the second: faults, leaders, throughput, latency.

Times are those of the history. The runner notes marks; everything else is counted from the history
afterwards. A *gap* is a time without any acknowledged record.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Literal

from raftq.chaos.history import History, HistoryCall, LeasedDelivery, Publish, Receive
from raftq.client.common.types import PartitionKey

MarkKind = Literal["phase", "fault", "heal", "leader", "trouble"]


@dataclass(frozen=True, slots=True)
class Mark:
    """An event with a line in the picture."""

    at: float
    kind: MarkKind
    text: str


@dataclass(frozen=True, slots=True)
class Span:
    """A fault from its injection to its end."""

    began: float
    ended: float
    name: str
    text: str
    majority: bool = True
    """Whether a majority stayed healthy and connected."""
    excused: frozenset[PartitionKey] = frozenset()
    """Partitions without enough connected copies."""


@dataclass(slots=True)
class Timeline:
    """Marks and faults of one run, from `began` to `ended`."""

    began: float = 0.0
    ended: float = 0.0
    marks: list[Mark] = field(default_factory=list)
    faults: list[Span] = field(default_factory=list)

    def mark(self, at: float, kind: MarkKind, text: str) -> None:
        self.marks.append(Mark(at, kind, text))

    def of(self, kind: MarkKind) -> list[Mark]:
        return [mark for mark in self.marks if mark.kind == kind]


@dataclass(frozen=True, slots=True)
class Second:
    """The answers in one second of a run."""

    number: int
    done: int
    """Successful calls and received records."""
    acknowledged: int
    """Appended records among them."""
    failed: int
    """Calls that failed or whose outcome is unknown."""
    worst_ms: float
    """The longest time from the sending to the answer of an appended record."""
    median_ms: float


def seconds_of(history: History, began: float, ended: float) -> list[Second]:
    """A run by seconds; the last one may be short."""
    count = max(1, ceil(ended - began))
    done, failed = [0] * count, [0] * count
    waits: list[list[float]] = [[] for _ in range(count)]
    for operation in history.operations:
        at = operation.ended if isinstance(operation, HistoryCall) else operation.at
        if at is None or not began <= at < began + count:
            continue
        number = int(at - began)
        if isinstance(operation, HistoryCall):
            if operation.status != "ok":
                failed[number] += 1
                continue
            done[number] += 1
            if isinstance(operation, Publish):
                waits[number].append((at - operation.at) * 1000)
        elif isinstance(operation, LeasedDelivery | Receive):
            done[number] += 1
    return [
        Second(
            number,
            done[number],
            len(waits[number]),
            failed[number],
            max(waits[number], default=0.0),
            percentile(waits[number], 0.5),
        )
        for number in range(count)
    ]


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that is not below this share of all values; 0 if there are none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, ceil(share * len(ordered)) - 1))]


def gaps(history: History, began: float, ended: float) -> list[tuple[float, float]]:
    """The times between two acknowledged records, before the first one and after the last."""
    moments = sorted(
        sent.ended
        for sent in history.of(Publish)
        if sent.status == "ok" and sent.ended is not None and began < sent.ended < ended
    )
    edges = [began, *moments, ended]
    return list(pairwise(edges))


def worst_gap(history: History, began: float, ended: float) -> float:
    return max((end - start for start, end in gaps(history, began, ended)), default=0.0)


def first_answer_after(history: History, moment: float) -> float | None:
    """Seconds until the first acknowledgement of a record that was sent after this moment."""
    answers = [
        sent.ended
        for sent in history.of(Publish)
        if sent.status == "ok" and sent.at >= moment and sent.ended is not None
    ]
    return min(answers) - moment if answers else None


def slowest_window(seconds: Sequence[Second], width: int = 10) -> float:
    """The lowest rate of operations per second in any window of this many whole seconds."""
    if not seconds:
        return 0.0
    width = min(width, len(seconds))
    counts = [second.done for second in seconds]
    sums = (sum(counts[at : at + width]) for at in range(len(counts) - width + 1))
    return min(sums) / width


def without(
    whole: tuple[float, float], holes: Iterable[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    """Removes the times `others` from a time."""
    left = []
    at, end = whole
    for start, stop in sorted(holes):
        if at < min(start, end):
            left.append((at, min(start, end)))
        at = max(at, stop)
    if at < end:
        left.append((at, end))
    return tuple(left)
