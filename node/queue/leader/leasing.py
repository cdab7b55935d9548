"""Leasing records of one partition to one holder. (Shell.)

Decide, read, write: the core takes records; their batches are read once; expired or missing records
are settled; records that are too much for one answer are taken back; one ledger record has all of
it. The holder gets the answer when that is replicated, so a change of leaders never gives a record
to two holders at once or forgets an attempt.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from raftq.client.common.types import Buffer
from raftq.client.wire.queue_messages import LeasedRange
from raftq.client.wire.schema import ITEMS_MAX
from raftq.node.queue.core.entries import POSTPONED, Entry, ReturnedEntry, ReturnRow, Row
from raftq.node.queue.core.group_delivery import Grant
from raftq.node.queue.leader.deliveries import GroupState
from raftq.node.queue.leader.engine import LedgerEngine
from raftq.node.queue.leader.leased_batches import LeasedBatches, Ranges, without
from raftq.node.replication.partition_log import DATA

logger = logging.getLogger(__name__)

# Rounds of one lease: a round can come out empty when everything in it had expired.
ROUNDS_MAX = 20
# Leases of one group at a time. Each is a row of the next snapshot, which stops the loop.
LEASES_MAX = 500_000
UNREADABLE_S = 5.0
"""How long an unreadable record waits; another replica may repair it."""


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """What a holder asks for. `lease_s` None: the topic's visibility timeout."""

    holder: str
    records_max: int
    bytes_max: int
    lease_s: float | None = None


@dataclass(slots=True)
class Leased:
    """The answer for a holder, valid when `replicated` is done."""

    group: str
    ranges: tuple[LeasedRange, ...]
    records: int
    buffers: list[Buffer]
    size: int
    replicated: "asyncio.Future[None]"


def lease(engine: LedgerEngine, group: GroupState, ask: LeaseAsk) -> Leased | None:
    """Lease records to this holder; None if there are none."""
    if group.idle_at == engine.leadership.data.high_watermark:
        return None
    now = engine.now()
    _prepare(engine, group, now)
    core = group.core
    if len(core.leases) >= LEASES_MAX:
        return None
    records_max = max(1, int(ask.bytes_max / engine.batch_reader.bytes_per_record))
    records_max = min(ask.records_max, records_max)
    for _ in range(ROUNDS_MAX):
        grants = core.lease(records_max, now, ask.holder, ask.lease_s)
        if not grants:
            held = core.leases.held.get(ask.holder, 0)
            if core.state.paused or held < core.config.in_flight_max:
                group.idle_at = engine.leadership.data.high_watermark
            return None
        found = _deliver(engine, group, ask, grants, now)
        if found is not None:
            return found
    return None


def _prepare(engine: LedgerEngine, group: GroupState, now: float) -> None:
    """Bring the group up to date with the time, the topic's settings and retention."""
    engine.deliveries.refresh_config()
    deadline = group.core.next_deadline()
    if deadline is not None and deadline <= now:
        engine.expire(group, now)
    start = engine.leadership.data.log.start_offset
    if group.core.settled.prefix < start:
        engine.deliveries.write([group.core.advance(start)])


def _deliver(
    engine: LedgerEngine, group: GroupState, ask: LeaseAsk, grants: list[Grant], now: float
) -> Leased | None:
    core = group.core
    now_ms = round(now * 1000)
    try:
        ordered = sorted(grants, key=_start) if len(grants) > 1 else grants
        ranges = [(grant.start, grant.end) for grant in ordered]
        covered = engine.batch_reader.cover(ranges, ask.bytes_max, now_ms)
    except BaseException:
        core.take_back(grants)
        raise
    if covered.cut_at is not None:
        grants = _cut(group, grants, covered.cut_at, now, ask.holder)
    granted = core.granted_entry(grants, now, ask.holder)
    lost = _settle_lost(engine, group, grants, covered, now)
    for entry in lost:
        core.apply(entry)
    replicated = engine.deliveries.record([granted, *lost])
    if covered.expired:
        _dead_letter_expired(engine, group, grants, covered, now)
    if covered.error is not None:
        logger.error("partition=%s event=unreadable error=%s", engine.leadership.ref, covered.error)
        engine.tools.report_damage(engine.leadership.ref, DATA, covered.error)
    engine.deliveries.on_change(group)
    held = _held_ranges(grants, covered)
    if len(held) > ITEMS_MAX:
        rest = [(one.nonce, one.start, one.end) for one in held[ITEMS_MAX:]]
        engine.deliveries.write([core.release(rest, now)])
        held = held[:ITEMS_MAX]
    if not held:
        return None
    records = sum([one.end - one.start for one in held])
    for lane, count, timestamp in covered.times:
        group.given[lane] += count
        if 0 < timestamp < now_ms:
            group.waited_ms[lane] += count * (now_ms - timestamp)
    return Leased(core.group, held, records, covered.buffers, covered.size, replicated)


def _start(grant: Grant) -> int:
    return grant.start


def _cut(
    group: GroupState, grants: list[Grant], cut_at: int, now: float, holder: str
) -> list[Grant]:
    """Take back the records from an offset on: they are too much for one answer."""
    core = group.core
    core.take_back([grant for grant in grants if grant.end > cut_at])
    kept = []
    for grant in grants:
        if grant.end > cut_at:
            if grant.start >= cut_at:
                continue
            grant.end = cut_at
            core.apply(core.granted_entry([grant], now, holder))
        kept.append(grant)
    return kept


def _settle_lost(
    engine: LedgerEngine, group: GroupState, grants: list[Grant], covered: LeasedBatches, now: float
) -> list[Entry]:
    """Entries for granted records that cannot be handed out."""
    core = group.core
    entries: list[Entry] = []
    if covered.gone:
        entries.append(core.skip(_rows(grants, covered.gone)))
    if covered.expired and engine.leadership.config.dead_letter_expired != "true":
        entries.append(core.expired_entry(_rows(grants, covered.expired)))
    if covered.unreadable:
        due = now + UNREADABLE_S
        attempts = {grant.nonce: grant.attempt - 1 for grant in grants}
        rows = [
            ReturnRow(nonce, start, end, attempts[nonce], due)
            for nonce, start, end in _rows(grants, covered.unreadable)
        ]
        entries.append(ReturnedEntry(core.group, POSTPONED, tuple(rows)))
    return entries


def _dead_letter_expired(
    engine: LedgerEngine, group: GroupState, grants: list[Grant], covered: LeasedBatches, now: float
) -> None:
    if engine.leadership.config.dead_letter_expired == "true":
        letters = [
            letter
            for row in _rows(grants, covered.expired)
            for letter in group.core.reject(*row, now, "expired")
        ]
        engine.dead_letter(group, letters)


def _rows(grants: list[Grant], ranges: Ranges) -> list[Row]:
    """Ranges of just granted records with the nonces they were granted under."""
    rows: list[Row] = []
    ordered = sorted(grants, key=_start)
    at = 0
    for start, end in sorted(ranges):
        while at < len(ordered) and ordered[at].end <= start:
            at += 1
        index = at
        while index < len(ordered) and ordered[index].start < end:
            grant = ordered[index]
            rows.append((grant.nonce, max(start, grant.start), min(end, grant.end)))
            index += 1
    return rows


def _held_ranges(grants: list[Grant], covered: LeasedBatches) -> tuple[LeasedRange, ...]:
    """What is left of the grants for their holder."""
    lost = covered.gone + covered.expired + covered.unreadable
    lost.sort()
    return tuple(
        LeasedRange(
            grant.nonce,
            start,
            end,
            grant.attempt,
            round(grant.deadline * 1000),
            round(grant.first * 1000),
        )
        for grant in grants
        for start, end in _left(grant, lost)
    )


def _left(grant: Grant, lost: Ranges) -> Iterator[tuple[int, int]]:
    if not lost:
        yield grant.start, grant.end
    else:
        yield from without([(grant.start, grant.end)], lost)


def give_back(engine: LedgerEngine, leased: Leased) -> None:
    """The holder is gone: the next one gets the records, and no attempt is spent."""
    group = engine.deliveries.groups.get(leased.group)
    if group is None:
        return
    rows = [(one.nonce, one.start, one.end) for one in leased.ranges]
    now = engine.now()
    held = [
        row
        for row in rows
        if (found := group.core.leases.get(row[0])) is not None
        and found.held_runs(row[1], row[2], now)
    ]
    if held:
        engine.deliveries.write([group.core.release(held, now)])
