"""What a holder says about the records it has leased. (Shell.)

Rows are ranges under receipts, and each row has its own answer. A range may be held in part, after
a lost answer or because some of it was settled otherwise: the verb then holds for what is still
held. A row of which nothing is held is refused; for `ack` also one that is held in part, with what
became of the rest: `already_settled` then means that everything in the row is settled now. So an
ack that is repeated because its answer was lost can take `already_settled` for success.

Errors, too, are answered only when what they rest on is replicated: otherwise a new leader could
deliver again what somebody was told is settled.
"""

from dataclasses import dataclass, field

from raftq.client.common.errors import (
    AlreadySettled,
    InvalidArgument,
    LeaseExpired,
    LeaseForeign,
    LeaseLost,
    RaftqError,
)
from raftq.client.wire.queue_messages import Settle
from raftq.cluster.metadata.topic_config import DEAD_LETTER_SUFFIX
from raftq.node.queue.core import entries as kinds
from raftq.node.queue.core.entries import Entry
from raftq.node.queue.core.group_delivery import DyingRecords, GroupDelivery, Row
from raftq.node.queue.core.leases import TAG_SHIFT, group_tag
from raftq.node.queue.leader.deliveries import GroupState
from raftq.node.queue.leader.engine import LedgerEngine, Waits
from raftq.node.queue.leader.leased_batches import without

DELAY_MS_MAX = 366 * 24 * 3_600_000


@dataclass(slots=True)
class SettleResult:
    """A code per row, and what has to be replicated before it is said."""

    errors: tuple[str, ...]
    waits: Waits
    dead: int = 0
    next_visible: float = 0.0


@dataclass(slots=True)
class _Decided:
    """What the rows of one request come to."""

    errors: list[str] = field(default_factory=list)
    rows: list[tuple[float, ...]] = field(default_factory=list)
    letters: list[DyingRecords] = field(default_factory=list)
    due: float = 0.0


def settle(engine: LedgerEngine, message: Settle) -> SettleResult:
    """Do what the verb says to each row."""
    _check(message)
    engine.check_writable()
    group = engine.deliveries.groups.get(message.group)
    rows = [(row.nonce, row.start, row.end) for row in message.rows]
    if group is None:
        return SettleResult(tuple(_unknown(message.group, rows)), [engine.ledger.barrier()])
    engine.deliveries.refresh_config()
    now = engine.now()
    entry: Entry | None
    if message.verb == "ack":
        errors, entry = _ack(group.core, rows, now)
        decided = _Decided(errors)
    else:
        decided = _VERBS[message.verb](engine, group.core, rows, now, message)
        entry = _entry(group, message.verb, decided)
    waits = [
        engine.ledger.barrier() if entry is None else engine.deliveries.write([entry], patient=True)
    ]
    waits += engine.bury(group, decided.letters, message.error)
    dead = sum(letter.end - letter.start for letter in decided.letters)
    if message.verb == "reject":
        group.rejected += dead
    elif message.verb == "extend":
        group.extended += decided.errors.count("")
    return SettleResult(tuple(decided.errors), waits, dead, decided.due)


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


def _ack(core: GroupDelivery, rows: list[Row], now: float) -> tuple[list[str], Entry | None]:
    if not rows:
        return [], None
    try:
        return [""] * len(rows), core.ack(rows, now)
    except LeaseLost:
        return _ack_some(core, rows, now)


def _ack_some(core: GroupDelivery, rows: list[Row], now: float) -> tuple[list[str], Entry | None]:
    """Row by row: not all of them are held."""
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
    return errors, (kinds.SETTLED, core.group, kinds.ACKED, tuple(held)) if held else None


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


def _nack(
    engine: LedgerEngine, core: GroupDelivery, rows: list[Row], now: float, message: Settle
) -> _Decided:
    delay = None if message.delay_ms is None else message.delay_ms / 1000
    if message.verb == "reject":
        # Of a dead letter: it has nowhere to go, so it waits.
        delay = core.config.backoff_cap_s
    decided = _Decided()
    for row in rows:
        try:
            entry, letters = core.nack(*row, now, delay)
        except LeaseLost as error:
            decided.errors.append(error.code)
            continue
        decided.errors.append("")
        decided.letters += letters
        if entry is not None:
            decided.rows += entry[3]
            decided.due = max(decided.due, entry[3][0][4])
    return decided


def _postpone(
    engine: LedgerEngine, core: GroupDelivery, rows: list[Row], now: float, message: Settle
) -> _Decided:
    decided = _Decided()
    delay = (message.delay_ms or 0) / 1000
    for row in rows:
        try:
            entry = core.postpone(*row, now, delay)
        except LeaseLost as error:
            decided.errors.append(error.code)
            continue
        decided.errors.append("")
        decided.rows += entry[3]
        decided.due = now + delay
    return decided


def _reject(
    engine: LedgerEngine, core: GroupDelivery, rows: list[Row], now: float, message: Settle
) -> _Decided:
    if engine.leadership.ref.topic.endswith(DEAD_LETTER_SUFFIX):
        return _nack(engine, core, rows, now, message)
    decided = _Decided()
    for row in rows:
        try:
            decided.letters += core.reject(*row, now, message.reason or "rejected")
        except LeaseLost as error:
            decided.errors.append(error.code)
        else:
            decided.errors.append("")
    return decided


def _extend(
    engine: LedgerEngine, core: GroupDelivery, rows: list[Row], now: float, message: Settle
) -> _Decided:
    decided = _Decided()
    extension = (message.delay_ms or 0) / 1000
    for row in rows:
        try:
            entry = core.extend(*row, now, extension)
        except LeaseLost as error:
            decided.errors.append(error.code)
            continue
        decided.errors.append("")
        decided.rows += entry[2]
        decided.due = now + extension
    return decided


def _release(
    engine: LedgerEngine, core: GroupDelivery, rows: list[Row], now: float, message: Settle
) -> _Decided:
    decided = _Decided()
    for row in rows:
        try:
            entry = core.release([row], now)
        except LeaseLost as error:
            decided.errors.append(error.code)
            continue
        decided.errors.append("")
        decided.rows += entry[3]
        decided.due = now
    return decided


def _entry(group: GroupState, verb: str, decided: _Decided) -> Entry | None:
    """One entry for all rows of a request."""
    if not decided.rows:
        return None
    rows = tuple(decided.rows)
    if verb == "extend":
        return (kinds.EXTENDED, group.core.group, rows)
    return (kinds.RETURNED, group.core.group, _RETURNED_HOW[verb], rows)


_VERBS = {
    "nack": _nack,
    "postpone": _postpone,
    "reject": _reject,
    "extend": _extend,
    "release": _release,
}
_RETURNED_HOW = {
    "nack": kinds.NACKED,
    "reject": kinds.NACKED,
    "postpone": kinds.POSTPONED,
    "release": kinds.RELEASED,
}
