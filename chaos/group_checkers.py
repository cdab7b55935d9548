"""Pure: checkers of stream groups: they find the anomalies of a history.

check_stores    went back      a read returned a position that a newer one had replaced
                never stored   a read returned a position that no client had stored
                not fenced     an older owner stored after a newer one had claimed
check_owners    two owners     two members had a partition in one generation, or the next
                               member had it before the first gave it up
                old owner      a partition was assigned under an older epoch than before
check_receives  skipped        a group passed a record, or stored a position after it
                unread         a record was not read though the group read to the end
                went back      a member got a record again without a new start
                not told       a member got a record of a partition that it had not been told of,
                               or after it had been told that it lost it
"""

from collections.abc import Iterator
from math import inf

from raftq.chaos.history import Final, History, OwnedSpan, Recall, Receive, Store
from raftq.chaos.verdict import Anomaly
from raftq.client.common.types import PartitionKey

Key = tuple[str, PartitionKey]


def check_stores(history: History) -> Iterator[Anomaly]:
    """A stored position is a register: a read returns the newest value that is certainly stored."""
    stores: dict[Key, list[Store]] = {}
    for store in history.of(Store):
        if store.may_have_happened:
            stores.setdefault((store.group, store.partition_key), []).append(store)
    claims: dict[Key, list[Recall]] = {}
    for read in history.of(Recall):
        if read.status == "ok":
            claims.setdefault((read.group, read.partition_key), []).append(read)
            yield from _check_recall(read, stores.get((read.group, read.partition_key), []))
    for key, made in stores.items():
        for one in made:
            for claim in claims.get(key, []):
                newer = 0 <= one.owner_epoch < claim.owner_epoch
                if newer and one.status == "ok" and one.at > claim.over:
                    yield Anomaly("not fenced", f"{one} after {claim}")


def _check_recall(read: Recall, stores: list[Store]) -> Iterator[Anomaly]:
    # Everything that had certainly happened when the read began, newest first.
    done = [store for store in stores if store.over <= read.at]
    newest_began = max((one.at for one in done), default=-inf)
    # A member claims before it stores, so positions stored by older owners are older, too.
    newest_epoch = max((one.owner_epoch for one in done), default=-1)
    legal = {
        store.offset
        for store in stores
        if store.at <= (read.ended or inf)
        and store.over >= newest_began
        and not 0 <= store.owner_epoch < newest_epoch
    }
    if not done:
        legal.add(-1)
    if read.offset in legal:
        return
    if read.offset == -1 or any(store.offset == read.offset for store in stores):
        yield Anomaly("went back", f"{read}, though {max(done, key=lambda one: one.at)}")
    else:
        yield Anomaly("never stored", f"{read} of {[one.offset for one in stores]}")


def check_owners(history: History, skew_s: float = 0.0) -> Iterator[Anomaly]:
    """Each partition has one owner per generation, and is revoked before it is assigned again."""
    owners: dict[Key, list[OwnedSpan]] = {}
    for span in history.of(OwnedSpan):
        owners.setdefault((span.group, span.partition_key), []).append(span)
    for held in owners.values():
        held.sort(key=lambda one: (one.at, one.owner_epoch))
        epochs: dict[int, OwnedSpan] = {}
        for at, one in enumerate(held):
            other = epochs.setdefault(one.owner_epoch, one)
            if other.client != one.client:
                yield Anomaly("two owners", f"{one} and {other}")
            for before in held[:at]:
                if before.client == one.client:
                    continue
                # A member that lost the partition or died may not know it for a while: it is fenced
                # instead.
                kept = before.how == "revoked" and before.ended is not None
                if kept and one.at + skew_s < (before.ended or 0.0):
                    yield Anomaly("two owners", f"{one} before the end of {before}")
                if one.owner_epoch < before.owner_epoch and one.at > before.at + skew_s:
                    yield Anomaly("old owner", f"{one} after {before}")


def check_receives(history: History, final: Final) -> Iterator[Anomaly]:
    """A group gets every record of its partitions, and stores no position after a missing one."""
    kept = {partition_key: dict(rows) for partition_key, rows in final.logs.items()}
    spans: dict[tuple[Key, str], list[OwnedSpan]] = {}
    for span in history.of(OwnedSpan):
        spans.setdefault(((span.group, span.partition_key), span.client), []).append(span)
    groups = {group for (group, _), _ in spans}  # other readers are told of nothing
    seen: dict[Key, set[int]] = {}
    position: dict[tuple[Key, str], int] = {}
    for operation in history.operations:
        if isinstance(operation, Receive):
            key = (operation.group, operation.partition_key)
            if operation.offset <= position.get((key, operation.client), -1):
                yield Anomaly("went back", f"{operation} after {position[key, operation.client]}")
            position[key, operation.client] = operation.offset
            if operation.group in groups:
                owned = spans.get((key, operation.client), [])
                if not any(_has(span, operation.at) for span in owned):
                    yield Anomaly("not told", str(operation))
            yield from _missing(
                operation, kept.get(operation.partition_key, {}), seen.setdefault(key, set())
            )
            seen[key].add(operation.offset)
        elif isinstance(operation, Store):
            key = (operation.group, operation.partition_key)
            yield from _missing(
                operation, kept.get(operation.partition_key, {}), seen.setdefault(key, set())
            )
        elif isinstance(operation, OwnedSpan):
            position.pop(
                ((operation.group, operation.partition_key), operation.client), None
            )  # the member starts again
    yield from _unread(final, seen)


def _has(span: OwnedSpan, at: float) -> bool:
    return span.at <= at <= (inf if span.ended is None else span.ended)


def _unread(final: Final, seen: dict[Key, set[int]]) -> Iterator[Anomaly]:
    for group, topics in final.read.items():
        for partition_key, rows in final.logs.items():
            if partition_key[0] in topics:
                unread = [row for row in rows if row[0] not in seen.get((group, partition_key), ())]
                if unread:
                    yield Anomaly("unread", f"{group} did not read {unread[:5]} of {partition_key}")


def _missing(one: Receive | Store, log: dict[int, str], seen: set[int]) -> Iterator[Anomaly]:
    """The earlier records that the group has not got. Each is reported once, at the first gap."""
    for offset in range(one.offset - 1, -1, -1):
        if offset in seen:
            break
        if offset in log:
            yield Anomaly("skipped", f"{one} without {log[offset]!r} at {offset}")
            break
    # Reported records count as seen. Otherwise every later record would report them again.
    seen.update(range(max(0, one.offset - 1), one.offset))
