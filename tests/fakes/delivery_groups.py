"""Groups of the delivery core, and shorthands for what their clients do."""

import bisect
import random
from collections.abc import Iterable

from raftq.node.queue.core.group_delivery import DeliveryConfig, Grant, GroupDelivery

NORMAL = 2


class Lanes:
    """Lanes as lists of runs; append() adds records at the end."""

    def __init__(self) -> None:
        self.runs: list[list[tuple[int, int]]] = [[] for _ in range(5)]
        self.end = 0
        self.looks = 0

    def append(self, lane: int, count: int) -> "Lanes":
        runs = self.runs[lane]
        start, self.end = self.end, self.end + count
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], self.end)
        else:
            runs.append((start, self.end))
        return self

    def next_run(self, lane: int, offset: int) -> tuple[int, int] | None:
        self.looks += 1
        runs = self.runs[lane]
        at = bisect.bisect_right(runs, offset, key=lambda run: run[1])
        return (max(runs[at][0], offset), runs[at][1]) if at < len(runs) else None

    def count_from(self, lane: int, offset: int) -> int:
        return sum(end - max(start, offset) for start, end in self.runs[lane] if end > offset)


def new_group(lanes: Lanes, group: str = "g", seed: int = 1, **options) -> GroupDelivery:
    return GroupDelivery(group, DeliveryConfig(**options), lanes, random.Random(seed), 0, 0.0)


def normal(count: int, **options) -> GroupDelivery:
    return new_group(Lanes().append(NORMAL, count), **options)


def row(grant: Grant) -> tuple[int, int, int]:
    return (grant.nonce, grant.start, grant.end)


def ack(group: GroupDelivery, grants: Iterable[Grant], now: float) -> None:
    group.apply(group.ack([row(grant) for grant in grants], now))
    group.check_invariants()


def nack(group: GroupDelivery, grant: Grant, now: float, delay: float | None = None):
    entry, letters = group.nack(*row(grant), now, delay)
    if entry is not None:
        group.apply(entry)
    group.check_invariants()
    return letters


def expire(group: GroupDelivery, now: float):
    found, letters = group.expire(now)
    for entry in found:
        group.apply(entry)
    group.check_invariants()
    return letters


def offsets(grants: Iterable[Grant]) -> list[int]:
    return [offset for grant in grants for offset in range(grant.start, grant.end)]
