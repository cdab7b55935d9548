"""Pure: checkers of logs, leaders and copies: they find the anomalies of a history.

    check_order     reordered     a client's records of one lane are not in the order of sending
    check_offsets   two values    clients saw different records at one offset
    check_leaders   two leaders   two nodes answered as the leader of one epoch
                    went back     a leader's high watermark decreased within its epoch
                    beyond        a leader returned records above its high watermark
    check_copies    copies differ the nodes' logs are not the same, byte for byte
    check_changes   topic lost    created, never deleted, and missing
                    topic revived deleted, and there again
                    too few       fewer partitions than acknowledged, or fewer copies than
                                  requested
    check_progress  no progress   too few successful operations in a time without an excuse
                    no recovery   no success for too long after a fault

Only what is certain counts: an operation of unknown outcome excuses everything it could explain.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

from raftq.chaos.history import (
    Change,
    Final,
    History,
    HistoryCall,
    LeasedDelivery,
    Publish,
    Receive,
    Sighting,
)
from raftq.chaos.verdict import Anomaly, Rules
from raftq.client.common.types import PartitionKey


def check_order(history: History, final: Final) -> Iterator[Anomaly]:
    """In every partition and lane, the records of a client are in the order of sending."""
    sent = {
        (sent.topic, sent.value): sent
        for sent in history.of(Publish)
        # A record of unknown outcome may be appended after records that its client sent later.
        if sent.number >= 0 and sent.status == "ok" and not sent.deliver_at
    }
    for partition_key, rows in final.logs.items():
        newest: dict[tuple[str, int], Publish] = {}
        for offset, value in rows:
            one = sent.get((partition_key[0], value))
            if one is None:
                continue
            before = newest.get((one.client, one.priority))
            if before is not None and one.number < before.number:
                yield Anomaly(
                    "reordered", f"{value!r} at {offset} of {partition_key} after {before}"
                )
                continue
            newest[one.client, one.priority] = one


def check_offsets(history: History, final: Final) -> Iterator[Anomaly]:
    """An offset has one value, whichever node is asked, and whenever."""
    kept = {
        (partition_key, offset): value
        for partition_key, rows in final.logs.items()
        for offset, value in rows
    }
    seen: dict[tuple[PartitionKey, int], tuple[str, object]] = {}
    for operation in history.operations:
        if isinstance(operation, Publish):
            if (
                operation.status != "ok"
                or operation.offset is None
                or operation.offset < 0
                or operation.deliver_at
            ):
                continue
        elif not isinstance(operation, Receive | LeasedDelivery):
            continue
        key = (operation.partition_key, operation.offset or 0)
        value, who = seen.setdefault(key, (operation.value, operation))
        if value != operation.value:
            yield Anomaly("two values", f"{operation} and {who}")
        # check_records checks the offsets of acknowledged records.
        elif not isinstance(operation, Publish) and kept.get(key, value) != value:
            yield Anomaly("two values", f"{operation}, the log has {kept[key]!r}")


def check_leaders(history: History) -> Iterator[Anomaly]:
    """An epoch has one leader, and its high watermark never decreases."""
    leaders: dict[tuple[PartitionKey, int], Sighting] = {}
    highest: dict[tuple[PartitionKey, int], list[Sighting]] = {}
    for sighting in history.of(Sighting):
        if sighting.status != "ok":
            continue
        key = (sighting.partition_key, sighting.epoch)
        other = leaders.setdefault(key, sighting)
        if other.node != sighting.node:
            yield Anomaly("two leaders", f"{sighting} and {other}")
            continue
        if sighting.end_offset > sighting.high_watermark:
            yield Anomaly("beyond", str(sighting))
        seen = highest.setdefault(key, [])
        # Answers may overtake each other: only answers from before the request count.
        before = [two for two in seen if two.over <= sighting.at]
        if before and sighting.high_watermark < before[-1].high_watermark:
            yield Anomaly("went back", f"{sighting} after {before[-1]}")
        elif not seen or sighting.high_watermark > seen[-1].high_watermark:
            seen.append(sighting)


def check_copies(final: Final) -> Iterator[Anomaly]:
    """All copies of a log are the same, from the largest start offset on."""
    for partition_key, nodes in final.copies.items():
        copies = {node: dict(rows) for node, rows in nodes.items()}
        start = max((min(rows, default=0) for rows in copies.values()), default=0)
        offsets = sorted({offset for rows in copies.values() for offset in rows if offset >= start})
        for offset in offsets:
            found = {node: rows.get(offset, "nothing") for node, rows in copies.items()}
            if len({*found.values()}) > 1:
                yield Anomaly("copies differ", f"{partition_key} from offset {offset} on: {found}")
                break


def check_changes(history: History, final: Final) -> Iterator[Anomaly]:
    """Topics are as the last acknowledged change left them."""
    changes: dict[str, list[Change]] = {}
    for change in history.of(Change):
        changes.setdefault(change.topic, []).append(change)
    if not final.topics:
        return  # the final state was not read
    for topic, made in changes.items():
        there = topic in final.topics
        deleted = [one for one in made if one.verb == "delete" and one.may_have_happened]
        created = [one for one in made if one.verb == "create" and one.may_have_happened]
        if there and any(one.status == "ok" for one in deleted):
            yield Anomaly("topic revived", str(deleted[-1]))
        if not there and not deleted and any(one.status == "ok" for one in created):
            yield Anomaly("topic lost", str(created[0]))
        if there:
            yield from _check_size(made, final.topics[topic])


def _check_size(made: list[Change], partitions: list[list[int]]) -> Iterator[Anomaly]:
    for one in made:
        if one.status == "ok" and len(partitions) < one.total:
            yield Anomaly("too few", f"{one}, there are {len(partitions)} partitions")
    wanted = max((one.copies for one in made if one.status == "ok"), default=0)
    for number, nodes in enumerate(partitions):
        if len(nodes) < wanted:
            yield Anomaly("too few", f"{made[0].topic}/{number} has copies on {nodes} only")


def check_progress(history: History, rules: Rules) -> Iterator[Anomaly]:
    """There is progress while a majority is healthy, and again soon after a fault."""
    done = well_ended(history)
    if rules.progress_min > 0:
        for start, end in rules.healthy:
            yield from _slow_windows(done, start, end, rules)
    for fault in rules.faults:
        found = recovery(history, fault)
        if found is None or found > rules.recovery_s:
            took = "never" if found is None else f"after {found:.3f} s"
            if rules.recovery_s < inf:
                yield Anomaly("no recovery", f"from the fault at {fault:.3f}: {took}")


def _slow_windows(
    done: Sequence[float], start: float, end: float, rules: Rules
) -> Iterator[Anomaly]:
    """Finds the times that are too slow. They do not overlap."""
    least = rules.progress_min * rules.window_s
    at = start
    while at + rules.window_s <= end:
        count = bisect_left(done, at + rules.window_s) - bisect_left(done, at)
        if count < least:
            text = f"{count} operations in {rules.window_s:g} s from {at:.3f} on, not {least:g}"
            yield Anomaly("no progress", text)
            at += rules.window_s
            continue
        # The next window with fewer operations begins after the next operation that leaves it.
        following = bisect_right(done, at)
        at = done[following] if following < len(done) else end


def well_ended(history: History) -> list[float]:
    """The times at which operations succeeded, sorted."""
    calls = (one for one in history.of(HistoryCall) if not isinstance(one, Sighting))
    return sorted(call.ended for call in calls if call.status == "ok" and call.ended is not None)


def recovery(history: History, fault: float) -> float | None:
    """The time from a fault to the first acknowledgement of a record that was sent after it."""
    ends = (
        sent.ended
        for sent in history.of(Publish)
        if sent.status == "ok" and sent.at >= fault and sent.ended is not None
    )
    first = min(ends, default=None)
    return None if first is None else first - fault


def worst_gap(history: History, start: float, end: float) -> float:
    """The longest time within [start, end) without a successful operation."""
    done = [at for at in well_ended(history) if start <= at < end]
    edges = [start, *done, end]
    return max((two - one for one, two in pairwise(edges)), default=0.0)
