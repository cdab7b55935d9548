"""The records that a coordinator writes about its groups, and their bytes. (Pure.)

    msgpack [kind, field, field, ...]      the fields in the order of the class

    1  MemberPut      a member joined, changed its subscription, or continues as another process
    2  MemberGone     a member left, or its session ended
    3  Retargeted     a new generation: the partitions that should change their owner
    4  Released       a member let go of partitions
    5  GroupDeleted
    6  Beat           empty; a coordinator that sees its own beat replicated was still the leader
    7  SnapshotBegun  everything up to SnapshotEnded is a snapshot
    8  GroupKept      one group of a snapshot
    9  SnapshotEnded
    10 Raised         the generations had gone back: a new one, above all that partitions know

Partitions are written as {topic: [numbers]}. A kind never changes its fields: a change is a new
kind. The number of a kind is the `tag` of its class.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec import Struct

from raftq.client.common.errors import CorruptBatch, UnknownFormat
from raftq.cluster.groups.assignment import Slot

Numbers = Mapping[str, tuple[int, ...]]
MemberFields = tuple[str, int, str, str, str, str, int, tuple[str, ...], str]
"""The fields of a MemberPut from `member_id` on."""


class GroupRecord(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all records."""


class MemberPut(GroupRecord, tag=1, frozen=True):
    group: str
    mode: str
    generation: int
    """The group's generation after this; a process that replaces another begins a new one."""
    member_id: str
    epoch: int
    instance_id: str
    process: str
    client_id: str
    host: str
    session_ms: int
    topics: tuple[str, ...]
    pattern: str


class MemberGone(GroupRecord, tag=2, frozen=True):
    group: str
    member_id: str
    reason: str


class Retargeted(GroupRecord, tag=3, frozen=True):
    group: str
    generation: int
    changes: Mapping[str, Numbers]
    """By member; under "" are partitions that no member should have."""


class Released(GroupRecord, tag=4, frozen=True):
    group: str
    member_id: str
    slots: Numbers


class GroupDeleted(GroupRecord, tag=5, frozen=True):
    group: str
    generation: int
    """A later group never begins below it, because old owner epochs would fence its members."""


class Beat(GroupRecord, tag=6, frozen=True):
    """Empty."""


class SnapshotBegun(GroupRecord, tag=7, frozen=True):
    floor: int
    """The highest generation of a deleted group."""


class GroupKept(GroupRecord, tag=8, frozen=True):
    group: str
    mode: str
    generation: int
    members: tuple[MemberFields, ...]
    slots: Mapping[str, tuple[tuple[int, int, int, int, int], ...]]
    """By topic: number, the next owner and the owner (indexes of `members`, -1: none), the owner
    epoch, and the generation that revoked it (0: not revoked)."""


class SnapshotEnded(GroupRecord, tag=9, frozen=True):
    """Empty."""


class Raised(GroupRecord, tag=10, frozen=True):
    group: str
    generation: int
    """Members get all their partitions anew, with this as the owner epoch."""


_KINDS = (
    MemberPut
    | MemberGone
    | Retargeted
    | Released
    | GroupDeleted
    | Beat
    | SnapshotBegun
    | GroupKept
    | SnapshotEnded
    | Raised
)
_KIND_MAX = 10

pack: Callable[[GroupRecord], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], GroupRecord] = msgspec.msgpack.Decoder(_KINDS).decode


def unpack(data: bytes) -> GroupRecord:
    """The record. A kind that this version does not know is an UnknownFormat."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        kind = _kind_of(data)
        if kind is not None and not 1 <= kind <= _KIND_MAX:
            raise UnknownFormat(f"record kind {kind} of groups is not known here") from error
        raise CorruptBatch(f"a record of groups cannot be read: {error}") from error


def _kind_of(data: bytes) -> int | None:
    try:
        record = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
    kind = record[0] if isinstance(record, list) and record else None
    return kind if type(kind) is int else None


def by_topic(slots: Iterable[Slot]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for topic, number in sorted(slots):
        found.setdefault(topic, []).append(number)
    return {topic: tuple(numbers) for topic, numbers in found.items()}


def slots_of(numbers: Numbers) -> list[Slot]:
    return [(topic, number) for topic, found in numbers.items() for number in found]
