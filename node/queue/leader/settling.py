"""What the holder of leased records decides about them. (Shell.)

Rows are ranges under receipts, and each row has its own answer. A range may be held only in part,
after a lost answer or because some of it was settled otherwise: the verb then applies to the part
that is still held. A row of which nothing is held is refused. `ack` also refuses a row that is held
in part, and says what became of the rest: `already_settled` then means that everything in the row
is settled now. So a client that repeats an ack because its answer was lost can take
`already_settled` for success.

Errors, too, are answered only when the state they rest on is replicated: otherwise a new leader
could deliver a record again after a client was told that it is settled.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from raftq.client.common.errors import (
    AlreadySettled,
    InvalidArgument,
    LeaseExpired,
    LeaseForeign,
    LeaseLost,
    RaftqError,
)
from raftq.client.common.names import DLQ_SUFFIX
from raftq.client.wire.queue_messages import Settle
from raftq.node.queue.core.entries import ACKED, ExtendedEntry, ReturnedEntry, Row, SettledEntry
from raftq.node.queue.core.group_delivery import DyingRecords, GroupDelivery
from raftq.node.queue.core.leases import TAG_SHIFT, group_tag
from raftq.node.queue.leader.engine import LedgerEngine
from raftq.node.queue.leader.leased_batches import without

DELAY_MS_MAX = 366 * 24 * 3_600_000


@dataclass(slots=True)
class SettleResult:
    """A code per row. The answer goes out when the ledger is replicated."""

    errors: tuple[str, ...]
    dead: int = 0
    next_visible: float = 0.0


@dataclass(slots=True)
class _Decided:
    """The decisions about all rows of one request."""

    errors: list[str] = field(default_factory=list)
    entry: SettledEntry | ReturnedEntry | ExtendedEntry | None = None
    dying: list[DyingRecords] = field(default_factory=list)
    due: float = 0.0


def settle(engine: LedgerEngine, message: Settle) -> SettleResult:
    """Apply the verb to each row."""
    _check(message)
    engine.check_writable()
    group = engine.deliveries.groups.get(message.group)
    rows = [(row.nonce, row.start, row.end) for row in message.rows]
    if group is None:
        return SettleResult(tuple(_unknown(message.group, rows)))
    engine.deliveries.refresh_config()
    now = engine.now()
    if message.verb == "ack":
        decided = _ack(group.core, rows, now)
    else:
        is_dead_letter = engine.leadership.ref.topic.endswith(DLQ_SUFFIX)
        decided = _decide(group.core, rows, now, message, is_dead_letter)
    if decided.entry is not None:
        engine.deliveries.write([decided.entry], patient=True)
    engine.dead_letter(group, decided.dying, message.error)
    dead = sum(dying.end - dying.start for dying in decided.dying)
    if message.verb == "reject":
        group.rejected += dead
    elif message.verb == "extend":
        group.extended += decided.errors.count("")
    return SettleResult(tuple(decided.errors), dead, decided.due)


def _check(message: Settle) -> None:
    if message.verb in ("postpone", "extend") and message.delay_ms is None:
        raise InvalidArgument(f"{message.verb} needs a delay_ms")
    if message.delay_ms is not None and message.delay_ms > DELAY_MS_MAX:
        raise InvalidArgument(f"delay_ms {message.delay_ms}: the most is {DELAY_MS_MAX}")
    for row in message.rows:
        if row.start >= row.end:
            raise InvalidArgument(f"no such range of offsets: [{row.start}, {row.end})")


def _unknown(name: str, rows: list[Row]) -> list[str]:
    """The receipts of a group that is not here (any more)."""
    tag = group_tag(name)
    return [
        LeaseExpired.code if nonce >> TAG_SHIFT == tag else LeaseForeign.code
        for nonce, _, _ in rows
    ]


def _ack(core: GroupDelivery, rows: list[Row], now: float) -> _Decided:
    if not rows:
        return _Decided()
    try:
        return _Decided([""] * len(rows), core.ack(rows, now))
    except LeaseLost:
        return _ack_some(core, rows, now)


def _ack_some(core: GroupDelivery, rows: list[Row], now: float) -> _Decided:
    """Row by row, because not all of them are held."""
    errors: list[str] = []
    held: list[Row] = []
    for row in rows:
        try:
            core.ack([row], now)
        except LeaseLost:
            runs, code = _held_of(core, row, now)
            held += runs
            errors.append(code)
        else:
            held.append(row)
            errors.append("")
    return _Decided(errors, SettledEntry(core.group, ACKED, tuple(held)) if held else None)


def _held_of(core: GroupDelivery, row: Row, now: float) -> tuple[list[Row], str]:
    """What is still held of a row, and what is wrong with the rest."""
    nonce, start, end = row
    lease = core.leases.get(nonce)
    runs = [] if lease is None else lease.held_runs(start, end, now)
    code = AlreadySettled.code
    for missing_start, missing_end in without([(start, end)], runs):
        holes = core.settled.holes(missing_start, missing_end)
        if holes or not runs:
            # The first record that is neither held nor settled says it; or, with a receipt that is
            # not even this group's, any.
            first = holes[0][0] if holes else missing_start
            try:
                core.ack([(nonce, first, first + 1)], now)
            except RaftqError as error:
                code = error.code
            break
    return [(nonce, *run) for run in runs], code


def _decide(
    core: GroupDelivery, rows: list[Row], now: float, message: Settle, is_dead_letter: bool
) -> _Decided:
    """Apply any verb but ack, row by row; one entry holds all of it."""
    decided = _Decided()
    entries: list[ReturnedEntry | ExtendedEntry] = []
    for row in rows:
        try:
            entry, dying = _decide_row(core, row, now, message, is_dead_letter)
        except LeaseLost as error:
            decided.errors.append(error.code)
            continue
        decided.errors.append("")
        decided.dying += dying
        if entry is not None:
            entries.append(entry)
            decided.due = max(decided.due, _due(entry))
    if entries:
        all_rows = [row for entry in entries for row in entry.rows]
        decided.entry = replace(entries[0], rows=tuple(all_rows))
    return decided


def _decide_row(
    core: GroupDelivery, row: Row, now: float, message: Settle, is_dead_letter: bool
) -> tuple[ReturnedEntry | ExtendedEntry | None, list[DyingRecords]]:
    delay = None if message.delay_ms is None else message.delay_ms / 1000
    if message.verb == "postpone":
        return core.postpone(*row, now, delay or 0.0), []
    if message.verb == "extend":
        return core.extend(*row, now, delay or 0.0), []
    if message.verb == "release":
        return core.release([row], now), []
    if message.verb == "nack":
        return core.nack(*row, now, delay)
    assert message.verb == "reject", message
    if is_dead_letter:
        # A rejected dead letter has nowhere to go, so it waits.
        return core.nack(*row, now, core.config.backoff_cap_s)
    return None, core.reject(*row, now, message.reason or "rejected")


def _due(entry: ReturnedEntry | ExtendedEntry) -> float:
    return entry.rows[0].deadline if isinstance(entry, ExtendedEntry) else entry.rows[0].due
