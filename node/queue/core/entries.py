"""Core: the entries of the ledger, and their bytes.

A group's delivery state is what its entries add up to. An entry is a tuple of a kind, the
group's name, and:

    GRANTED   now, holder, rows (lane, start, end, attempt, nonce, deadline, first, fresh)
              records were leased; fresh ones move their lane's cursor, others stop waiting
    SETTLED   how, rows (nonce, start, end)
              records are done; nonce 0 means whoever has them
    RETURNED  how, rows (nonce, start, end, attempt, due)
              leased records wait until `due`, with `attempt` attempts spent
    EXTENDED  rows (nonce, start, end, deadline)
              leases end later (or earlier)
    RESET     start_offset: everything from there on is fresh, everything below is settled
    PAUSED    true or false: whether new leases are refused
    CREATED   start_offset: the group begins there
    DELETED   the group is no more
    CLIPPED   end_offset, with no group name, for every group: the data log ends there now
    SNAPSHOT  state: replaces everything before it
    CLOCK     now, shift, with no group name, for every group: the writer's clock says `now`; what
              ends or is due, is so `shift` seconds later than was said before

Deadlines, due times and `now` are times of the writer's clock. Another writer's clock may say
something else, so it begins with a CLOCK whose shift takes all of them to its own.

A row speaks only of records that are still in the lease it names: an entry decided twice, or
overtaken by another, does nothing the second time. unpack() believes no byte: whatever is not
exactly such a list raises CorruptFile.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgpack

from raftq.client.common.errors import CorruptFile
from raftq.node.queue.core.lanes import LANES

Entry = tuple[Any, ...]

GRANTED = 1
SETTLED = 2
RETURNED = 3
EXTENDED = 4
RESET = 5
PAUSED = 6
CREATED = 7
DELETED = 8
CLIPPED = 9
SNAPSHOT = 10
CLOCK = 11

KIND_NAMES = {
    GRANTED: "granted",
    SETTLED: "settled",
    RETURNED: "returned",
    EXTENDED: "extended",
    RESET: "reset",
    PAUSED: "paused",
    CREATED: "created",
    DELETED: "deleted",
    CLIPPED: "clipped",
    SNAPSHOT: "snapshot",
    CLOCK: "clock",
}
FOR_ALL_GROUPS = (CLIPPED, CLOCK)

# How records were settled.
ACKED = 0
DEAD = 1
EXPIRED = 2
SKIPPED = 3

# Why leased records went back to waiting.
NACKED = 0
POSTPONED = 1
LEASE_EXPIRED = 2
RELEASED = 3

OFFSET_MAX = (1 << 63) - 1
ATTEMPT_MAX = (1 << 31) - 1
NAME_MAX = 4096
# One row speaks of at most this many records; a longer range is written as several rows.
RANGE_MAX = 1 << 32
# One lease covers at most this many, because it may come to need a byte for each.
LEASE_MAX = 1 << 24
COUNTERS = 9


def created(group: str, start_offset: int) -> Entry:
    return (CREATED, group, start_offset)


def deleted(group: str) -> Entry:
    return (DELETED, group)


def clipped(end_offset: int) -> Entry:
    return (CLIPPED, None, end_offset)


def clock(now: float, shift: float = 0.0) -> Entry:
    return (CLOCK, None, now, shift)


def pack(entries: Iterable[Entry]) -> bytes:
    """The bytes of some entries, in order."""
    packed: bytes = msgpack.packb(list(entries), use_bin_type=True)
    return packed


def unpack(data: bytes | memoryview) -> list[Entry]:
    """The entries of pack(); CorruptFile names what is wrong with anything else."""
    try:
        entries = msgpack.unpackb(data, use_list=False, raw=False, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise CorruptFile(f"ledger entries are not msgpack: {error!r:.100}") from error
    if type(entries) is not tuple:
        _bad("ledger entries", entries)
    for entry in entries:
        _check_entry(entry)
    return list(entries)


def _bad(what: str, value: object) -> NoReturn:
    raise CorruptFile(f"bad {what}: {value!r:.60}")


def _check_entry(entry: object) -> None:
    if type(entry) is not tuple or len(entry) < 2:
        _bad("ledger entry", entry)
    kind, group = entry[:2]
    if type(kind) is not int or kind not in _SHAPES:
        _bad("kind of ledger entry", kind)
    if kind in FOR_ALL_GROUPS:
        if group is not None:
            _bad(f"group in a {KIND_NAMES[kind]} entry", group)
    elif type(group) is not str or len(group) > NAME_MAX:
        _bad("group in a ledger entry", group)
    shape = _SHAPES[kind]
    if len(entry) != 2 + len(shape):
        _bad(f"length of a {KIND_NAMES[kind]} entry", len(entry))
    for check, value in zip(shape, entry[2:], strict=True):
        check(value)


def _offset(value: object) -> None:
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        _bad("offset or nonce", value)


def _nonce(value: object) -> None:
    if type(value) is not int or not 0 < value <= OFFSET_MAX:
        _bad("nonce of a lease", value)


def _number(value: object) -> None:
    # The comparison is false for a NaN as well.
    if type(value) not in (float, int) or not abs(value) <= OFFSET_MAX:  # type: ignore[arg-type]
        _bad("time", value)


def _attempt(value: object) -> None:
    if type(value) is not int or not 0 <= value <= ATTEMPT_MAX:
        _bad("attempt", value)


def _attempt_made(value: object) -> None:
    if type(value) is not int or not 1 <= value <= ATTEMPT_MAX:
        _bad("attempt of a lease", value)


def _lane(value: object) -> None:
    if type(value) is not int or not 0 <= value < LANES:
        _bad("lane", value)


def _flag(value: object) -> None:
    if type(value) is not bool:
        _bad("flag", value)


def _name(value: object) -> None:
    if type(value) is not str or len(value) > NAME_MAX:
        _bad("holder", value)


def _how(value: object) -> None:
    if type(value) is not int or not 0 <= value <= 3:
        _bad("reason code", value)


Check = Callable[[object], None]


def _rows(start_at: int, *fields: Check, longest: int = RANGE_MAX) -> Check:
    """A check for rows of these fields, where [start_at] and the field after it are a range."""
    width = len(fields)

    def check(value: object) -> None:
        if type(value) is not tuple:
            _bad("rows", value)
        for row in value:
            if type(row) is not tuple or len(row) != width:
                _bad("row", row)
            for field, cell in zip(fields, row, strict=True):
                field(cell)
            if not 0 < row[start_at + 1] - row[start_at] <= longest:
                _bad("range in a row", row)

    return check


def _fixed(count: int, field: Check) -> Check:
    def check(value: object) -> None:
        if type(value) is not tuple or len(value) != count:
            _bad("list", value)
        for cell in value:
            field(cell)

    return check


def _settled(value: object) -> None:
    # SettledOffsets.load() checks the rest, and is needed anyway to use it.
    if type(value) is not tuple:
        _bad("settled offsets", value)


def _snapshot(value: object) -> None:
    if type(value) is not tuple or len(value) != len(_SNAPSHOT):
        _bad("snapshot", value)
    for check, part in zip(_SNAPSHOT, value, strict=True):
        check(part)


_SHAPES: dict[int, tuple[Check, ...]] = {
    GRANTED: (
        _number,
        _name,
        _rows(
            1,
            _lane,
            _offset,
            _offset,
            _attempt_made,
            _nonce,
            _number,
            _number,
            _flag,
            longest=LEASE_MAX,
        ),
    ),
    SETTLED: (_how, _rows(1, _offset, _offset, _offset)),
    RETURNED: (_how, _rows(1, _nonce, _offset, _offset, _attempt, _number)),
    EXTENDED: (_rows(1, _nonce, _offset, _offset, _number),),
    RESET: (_offset,),
    PAUSED: (_flag,),
    CREATED: (_offset,),
    DELETED: (),
    CLIPPED: (_offset,),
    SNAPSHOT: (_snapshot,),
    CLOCK: (_number, _number),
}

# settled offsets, cursors, paused, counters, waiting, leases
_SNAPSHOT: tuple[Check, ...] = (
    _settled,
    _fixed(LANES, _offset),
    _flag,
    _fixed(COUNTERS, _offset),
    # lane, start, end, attempt, due, first
    _rows(1, _lane, _offset, _offset, _attempt, _number, _number),
    # nonce, holder, lane, start, end, attempt, first, granted, deadline, runs left, deadlines
    _rows(
        3,
        _nonce,
        _name,
        _lane,
        _offset,
        _offset,
        _attempt_made,
        _number,
        _number,
        _number,
        _rows(0, _offset, _offset),
        _rows(0, _offset, _offset, _number),
        longest=LEASE_MAX,
    ),
)
