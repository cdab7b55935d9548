"""Pure: how long partitions accepted no records, and which fault caused it.

A partition is *out* while a client waits for an acknowledgement, until any client gets one. So a
partition without traffic is not out, and a working partition does not hide one that is out.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from raftq.chaos.history import History, Publish
from raftq.chaos.timeline import Span
from raftq.client.common.types import PartitionKey

SETTLE_S = 5.0
"""What happens this soon after a fault was healed still counts as its effect."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The outage of one partition."""

    partition_key: PartitionKey
    began: float
    ended: float

    @property
    def lasted_s(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Cost:
    """The worst outage that a fault caused."""

    fault: Span
    outage_s: float
    partition_key: PartitionKey | None = None


def outages(history: History, ended: float) -> list[Outage]:
    """All outages of a run, sorted by their beginnings. One that lasts at the end ends there."""
    sent: dict[PartitionKey, list[Publish]] = {}
    for one in history.of(Publish):
        if one.partition >= 0:  # its key decides, and it was never acknowledged
            sent.setdefault(one.partition_key, []).append(one)
    found = [
        outage
        for partition_key, records in sent.items()
        for outage in _of_place(partition_key, records, ended)
    ]
    return sorted(found, key=lambda one: (one.began, one.partition_key))


def _of_place(
    partition_key: PartitionKey, records: list[Publish], ended: float
) -> Iterable[Outage]:
    acknowledged = sorted(
        record.ended for record in records if record.status == "ok" and record.ended is not None
    )
    acknowledged.append(ended)
    records.sort(key=lambda record: record.at)
    before, first = -inf, 0
    for moment in acknowledged:
        # The acknowledgement ends the wait of the oldest record that was open at the previous one.
        while first < len(records) and _over(records[first]) <= before:
            first += 1
        if first < len(records) and records[first].at < moment:
            began = max(before, records[first].at)
            if began < moment:
                yield Outage(partition_key, began, moment)
        before = moment


def _over(one: Publish) -> float:
    return inf if one.ended is None else one.ended


def costs(faults: Iterable[Span], history: History, ended: float) -> list[Cost]:
    """The cost of each fault that left a majority healthy, unless another fault overlapped it."""
    spans = sorted(faults, key=lambda span: span.began)
    found = outages(history, ended)
    begins = [one.began for one in found]
    rows = []
    for number, span in enumerate(spans):
        until = _alone_until(spans, number)
        if not span.majority or until is None:
            continue
        during = [
            one
            for one in found[bisect_left(begins, span.began) : bisect_left(begins, until)]
            if one.partition_key not in span.excused
        ]
        worst = max(during, key=lambda one: min(one.ended, until) - one.began, default=None)
        if worst is None:
            rows.append(Cost(span, 0.0))
        else:
            rows.append(Cost(span, min(worst.ended, until) - worst.began, worst.partition_key))
    return rows


def _alone_until(spans: Sequence[Span], number: int) -> float | None:
    """The time until which a fault is the only cause; None if another fault overlapped it."""
    span = spans[number]
    if any(one.ended + SETTLE_S > span.began for one in spans[:number] if not one.majority):
        return None
    if any(one.ended > span.began for one in spans[:number]):
        return None
    following = min((span.began for span in spans[number + 1 :]), default=inf)
    return None if following < span.ended else min(span.ended + SETTLE_S, following)


def worst_by_fault(rows: Iterable[Cost]) -> list[tuple[str, int, float]]:
    """Returns (name of the fault, how often, the worst outage in seconds), the worst first."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        by_name.setdefault(row.fault.name, []).append(row.outage_s)
    table = [(name, len(values), max(values)) for name, values in by_name.items()]
    return sorted(table, key=lambda row: (-row[2], row[0]))
