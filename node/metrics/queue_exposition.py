"""The figures of groups, leases and delays for Prometheus. (Pure.)

Each comes from the leader of a partition, or from the coordinator of a group, so a sum over all
nodes counts nothing twice. Beyond SERIES_MAX rows the rest is left out, and counted.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeVar

from raftq.node.metrics.lines import Lines, braced, family, single
from raftq.node.metrics.node_status import DelayedStats, GroupStats, NodeFacts

SERIES_MAX = 5_000
OUTCOMES = {
    "acked": "acked",
    "nacked": "nacked",
    "postponed": "postponed",
    "released": "released",
    "dead": "dead_lettered",
    "ttl_expired": "expired",
    "skipped": "skipped",
}

T = TypeVar("T")


def queue_lines(facts: NodeFacts) -> Lines:
    groups, left_out = _first(facts.groups())
    delayed, more = _first(facts.delayed())
    coordinated, still_more = _first(facts.coordinated())
    text = "Groups, partitions with delays and coordinated groups left out of these figures."
    yield from single("metrics_groups_omitted", "gauge", text, left_out + more + still_more)
    yield from _by_partition(groups)
    yield from _by_topic(groups)
    yield from _delays(delayed)
    members = ((braced(group=each.group), each.members) for each in coordinated)
    yield from family("group_members", "gauge", "Members of a group.", members)
    generations = ((braced(group=each.group), each.generation) for each in coordinated)
    yield from family("group_generation", "gauge", "Assignments made so far.", generations)


def _first(found: Iterable[T]) -> tuple[list[T], int]:
    rows = iter(found)
    shown = list(islice(rows, SERIES_MAX))
    return shown, sum(1 for _ in rows)


def _by_partition(groups: Sequence[GroupStats]) -> Lines:
    named = [
        (braced(group=each.group, topic=each.topic, partition=str(each.partition)), each)
        for each in groups
    ]
    gauges: tuple[tuple[str, str, Callable[[GroupStats], int]], ...] = (
        ("consumer_lag", "Records not read, or not settled, by the group.", lambda each: each.lag),
        ("group_in_flight", "Records that are leased.", lambda each: each.in_flight),
        ("group_waiting", "Records that wait for their retry.", lambda each: each.waiting),
        ("group_paused", "Whether leases are paused.", lambda each: int(each.paused)),
    )
    for name, text, value in gauges:
        yield from family(name, "gauge", text, ((at, value(each)) for at, each in named))


def _by_topic(groups: Sequence[GroupStats]) -> Lines:
    sums: dict[tuple[str, str], dict[str, int]] = {}
    for each in groups:
        if each.counters:
            found = sums.setdefault((each.group, each.topic), {})
            for name, count in each.counters.items():
                found[name] = found.get(name, 0) + count
    settled = (
        (braced(group=group, topic=topic, outcome=word), counters.get(name, 0))
        for (group, topic), counters in sums.items()
        for name, word in OUTCOMES.items()
    )
    text = "What became of leased records."
    yield from family("settlements_total", "counter", text, settled)
    for family_name, counter, text in (
        ("visibility_timeout_total", "lease_expired", "Leases that ran out."),
        ("redelivered_total", "redelivered", "Records that were given out again."),
    ):
        rows = (
            (braced(group=group, topic=topic), counters.get(counter, 0))
            for (group, topic), counters in sums.items()
        )
        yield from family(family_name, "counter", text, rows)
    for family_name, kind, counter, text in (
        ("dlq_total", "counter", "dead", "Records that became dead letters."),
        ("dlq_parked", "gauge", "parked", "Records whose dead letters are refused."),
        ("dlq_lost_total", "counter", "lost", "Records gone before their dead letter was made."),
    ):
        by_topic: dict[str, int] = {}
        for (_, topic), counters in sums.items():
            by_topic[topic] = by_topic.get(topic, 0) + counters.get(counter, 0)
        rows = ((braced(topic=topic), count) for topic, count in by_topic.items())
        yield from family(family_name, kind, text, rows)


def _delays(delayed: Sequence[DelayedStats]) -> Lines:
    named = [(braced(topic=each.topic, partition=str(each.partition)), each) for each in delayed]
    figures: tuple[tuple[str, str, str, Callable[[DelayedStats], float]], ...] = (
        ("delayed_pending", "gauge", "Records that are not due yet.", lambda each: each.pending),
        ("delayed_fired_total", "counter", "Records that became due.", lambda each: each.fired),
        ("delayed_cancelled_total", "counter", "Cancelled before they were due.",
         lambda each: each.cancelled),
        ("delayed_late_seconds_max", "gauge", "How late a record was at worst.",
         lambda each: each.late_ms_max / 1000),
    )  # fmt: skip
    for name, kind, text, value in figures:
        yield from family(name, kind, text, ((at, value(each)) for at, each in named))
