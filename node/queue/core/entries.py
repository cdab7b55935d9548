"""Core: the entries of a ledger about deliveries, and their bytes.

A group's delivery state is the sum of its entries. An entry is a msgpack list: a number for its
kind (the `tag` of its class), the group's name, and the fields of the class in order. Two kinds
concern all groups and have nil for the name.

Deadlines, due times and `now` are times of the writer's clock. The clock of the next writer may
differ, so it begins with a ClockEntry whose shift moves all times to its own clock.

A row changes only records that are still in the lease it names. So an entry that is decided twice,
or that another entry overtakes, does nothing the second time.

unpack() trusts no byte: it raises CorruptFile for anything that pack() does not write.
"""

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder

from raftq.client.common.errors import CorruptFile
from raftq.node.queue.core.codec import encode_stored, stored_decoder
from raftq.node.queue.core.lanes import LANES
from raftq.node.queue.core.settled_offsets import OFFSET_MAX, SettledDump

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

ATTEMPT_MAX = (1 << 31) - 1
NAME_MAX = 4096
# One row covers at most this many records; a longer range is written as several rows.
RANGE_MAX = 1 << 32
# One lease covers at most this many, because it may need a byte for each.
LEASE_MAX = 1 << 24
COUNTERS = 9

Offset = Annotated[int, Meta(ge=0, le=OFFSET_MAX)]
Nonce = Annotated[int, Meta(ge=1, le=OFFSET_MAX)]
Time = Annotated[float, Meta(ge=-float(OFFSET_MAX), le=float(OFFSET_MAX))]
Attempt = Annotated[int, Meta(ge=0, le=ATTEMPT_MAX)]
AttemptMade = Annotated[int, Meta(ge=1, le=ATTEMPT_MAX)]
Lane = Annotated[int, Meta(ge=0, lt=LANES)]
Name = Annotated[str, Meta(max_length=NAME_MAX)]
Reason = Annotated[int, Meta(ge=0, le=3)]

Row = tuple[Offset, Offset, Offset]
"""(nonce, start, end): records and the receipt that claims them. Nonce 0 stands for any lease."""


class LedgerStruct(
    Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True, tag=None
):
    """Base of entries and rows: a list of fields. They form no cycles, so gc ignores them."""


class LedgerEntry(LedgerStruct, frozen=True):
    """Base of entries."""

    def check(self) -> None:
        """Raise CorruptFile if fields that are valid alone do not fit together."""


class GrantRow(LedgerStruct, frozen=True):
    """[start, end) is leased. Fresh records move the lane's cursor; others stop waiting."""

    lane: Lane
    start: Offset
    end: Offset
    attempt: AttemptMade
    nonce: Nonce
    deadline: Time
    first: Time
    fresh: bool


class GrantedEntry(LedgerEntry, tag=1, frozen=True):
    """A holder leased records at `now`."""

    group: Name
    now: Time
    holder: Name
    rows: tuple[GrantRow, ...]

    def check(self) -> None:
        for row in self.rows:
            _check_range(row.start, row.end, LEASE_MAX)


class SettledEntry(LedgerEntry, tag=2, frozen=True):
    """Records are done: acked, dead, expired or skipped."""

    group: Name
    how: Reason
    rows: tuple[Row, ...]

    def check(self) -> None:
        for _, start, end in self.rows:
            _check_range(start, end)


class ReturnRow(LedgerStruct, frozen=True):
    """Leased records wait until `due`, with `attempt` attempts spent."""

    nonce: Nonce
    start: Offset
    end: Offset
    attempt: Attempt
    due: Time


class ReturnedEntry(LedgerEntry, tag=3, frozen=True):
    """Leased records go back to waiting."""

    group: Name
    how: Reason
    rows: tuple[ReturnRow, ...]

    def check(self) -> None:
        for row in self.rows:
            _check_range(row.start, row.end)


class ExtendRow(LedgerStruct, frozen=True):
    """The lease of these records ends at `deadline`."""

    nonce: Nonce
    start: Offset
    end: Offset
    deadline: Time


class ExtendedEntry(LedgerEntry, tag=4, frozen=True):
    """Leases end later, or earlier."""

    group: Name
    rows: tuple[ExtendRow, ...]

    def check(self) -> None:
        for row in self.rows:
            _check_range(row.start, row.end)


class ResetEntry(LedgerEntry, tag=5, frozen=True):
    """Everything from `start_offset` on is fresh, everything below is settled."""

    group: Name
    start_offset: Offset


class PausedEntry(LedgerEntry, tag=6, frozen=True):
    """The group refuses new leases, or grants them again."""

    group: Name
    paused: bool


class CreatedEntry(LedgerEntry, tag=7, frozen=True):
    """A new group begins at `start_offset`."""

    group: Name
    start_offset: Offset


class DeletedEntry(LedgerEntry, tag=8, frozen=True):
    """The group is gone."""

    group: Name


class ClippedEntry(LedgerEntry, tag=9, frozen=True):
    """The data log now ends at `end_offset`, for every group."""

    group: None
    end_offset: Offset


class WaitRow(LedgerStruct, frozen=True):
    """Records of one lane wait for their next delivery."""

    lane: Lane
    start: Offset
    end: Offset
    attempt: Attempt
    due: Time
    first: Time


class LeaseRow(LedgerStruct, frozen=True):
    """A lease, the runs of records that are left in it, and deadlines that differ from its own."""

    nonce: Nonce
    holder: Name
    lane: Lane
    start: Offset
    end: Offset
    attempt: AttemptMade
    first: Time
    granted: Time
    deadline: Time
    runs: tuple[tuple[Offset, Offset], ...]
    deadlines: tuple[tuple[Offset, Offset, Time], ...]


class GroupSnapshot(LedgerStruct, frozen=True):
    """The whole delivery state of a group."""

    settled: SettledDump
    cursors: Annotated[tuple[Offset, ...], Meta(min_length=LANES, max_length=LANES)]
    paused: bool
    counters: Annotated[tuple[Offset, ...], Meta(min_length=COUNTERS, max_length=COUNTERS)]
    waiting: tuple[WaitRow, ...]
    leases: tuple[LeaseRow, ...]


class SnapshotEntry(LedgerEntry, tag=10, frozen=True):
    """Replaces everything before it."""

    group: Name
    state: GroupSnapshot

    def check(self) -> None:
        for wait in self.state.waiting:
            _check_range(wait.start, wait.end)
        for lease in self.state.leases:
            _check_range(lease.start, lease.end, LEASE_MAX)
            for start, end in lease.runs:
                _check_range(start, end)
            for start, end, _ in lease.deadlines:
                _check_range(start, end)


class ClockEntry(LedgerEntry, tag=11, frozen=True):
    """The writer's clock shows `now`; all deadlines and due times move by `shift` seconds."""

    group: None
    now: Time
    shift: Time


Entry = (
    GrantedEntry
    | SettledEntry
    | ReturnedEntry
    | ExtendedEntry
    | ResetEntry
    | PausedEntry
    | CreatedEntry
    | DeletedEntry
    | ClippedEntry
    | SnapshotEntry
    | ClockEntry
)
# Entries that mean the same whatever came before them.
ABSOLUTE = (ResetEntry, PausedEntry, CreatedEntry)

_decode = stored_decoder(Decoder(list[Entry]), "ledger entries")


def pack(entries: Iterable[Entry]) -> bytes:
    """The bytes of some entries, in order."""
    return encode_stored(entries if isinstance(entries, list) else list(entries))


def unpack(data: bytes) -> list[Entry]:
    """The entries of pack(). Raises CorruptFile for all other bytes."""
    entries = _decode(data)
    for entry in entries:
        entry.check()
    return entries


def _check_range(start: int, end: int, longest: int = RANGE_MAX) -> None:
    if not 0 < end - start <= longest:
        raise CorruptFile(f"bad range in a ledger entry: [{start}, {end})")
