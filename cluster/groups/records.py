"""What a coordinator writes down about its groups, and the bytes of it. (Pure.)

    msgpack [kind, field, field, ...]      the fields in the order of the class

    1  MemberPut      a member joined, changed its wishes, or goes on as another process
    2  MemberGone     it left, or its session ended
    3  Retargeted     a new generation: which partitions somebody else should have now
    4  Released       a member let go of partitions
    5  GroupDeleted
    6  Beat           nothing, but who writes it and sees it replicated was the leader
    7  SnapshotBegun  from here to SnapshotEnded: everything there is
    8  GroupKept      one group of a snapshot
    9  SnapshotEnded
    10 Raised         the generations had gone back: a new one, above all that partitions know

Partitions stand as {topic: [numbers]}. A kind never changes its fields: a change is a new kind.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack

from raftq.client.common.errors import CorruptBatch, UnknownFormat
from raftq.cluster.groups.assignment import Slot

Numbers = Mapping[str, tuple[int, ...]]


class GroupRecord:
    """Base of all records."""

    __slots__ = ()
    kind: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class MemberPut(GroupRecord):
    kind: ClassVar[int] = 1

    group: str
    mode: str
    generation: int
    """Of the group after this; a process that takes over from another begins a new one."""
    member_id: str
    epoch: int
    instance_id: str
    process: str
    client_id: str
    host: str
    session_ms: int
    topics: tuple[str, ...]
    pattern: str


@dataclass(frozen=True, slots=True)
class MemberGone(GroupRecord):
    kind: ClassVar[int] = 2

    group: str
    member_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retargeted(GroupRecord):
    kind: ClassVar[int] = 3

    group: str
    generation: int
    changes: Mapping[str, Numbers]
    """By member; "" has those that nobody should have."""


@dataclass(frozen=True, slots=True)
class Released(GroupRecord):
    kind: ClassVar[int] = 4

    group: str
    member_id: str
    slots: Numbers


@dataclass(frozen=True, slots=True)
class GroupDeleted(GroupRecord):
    kind: ClassVar[int] = 5

    group: str
    generation: int
    """No group that comes later begins below it, or old owner epochs would fence its members."""


@dataclass(frozen=True, slots=True)
class Beat(GroupRecord):
    kind: ClassVar[int] = 6


@dataclass(frozen=True, slots=True)
class SnapshotBegun(GroupRecord):
    kind: ClassVar[int] = 7

    floor: int
    """The highest generation of a deleted group."""


@dataclass(frozen=True, slots=True)
class GroupKept(GroupRecord):
    kind: ClassVar[int] = 8

    group: str
    mode: str
    generation: int
    members: tuple[tuple[Any, ...], ...]
    """The fields of a MemberPut from `member_id` on."""
    slots: Mapping[str, tuple[tuple[int, int, int, int, int], ...]]
    """By topic: number, who should have it and who has it (places in `members`, -1: nobody), its
    owner epoch, and since when it is revoked (0: not)."""


@dataclass(frozen=True, slots=True)
class SnapshotEnded(GroupRecord):
    kind: ClassVar[int] = 9


@dataclass(frozen=True, slots=True)
class Raised(GroupRecord):
    kind: ClassVar[int] = 10

    group: str
    generation: int
    """All that members have they get anew, with this as the owner epoch."""


_CLASSES: dict[int, type[GroupRecord]] = {
    one.kind: one
    for one in (
        MemberPut,
        MemberGone,
        Retargeted,
        Released,
        GroupDeleted,
        Beat,
        SnapshotBegun,
        GroupKept,
        SnapshotEnded,
        Raised,
    )
}


def pack(record: GroupRecord) -> bytes:
    names: tuple[str, ...] = record.__slots__
    packed: bytes = msgpack.packb([record.kind, *(getattr(record, name) for name in names)])
    return packed


def unpack(data: bytes) -> GroupRecord:
    """The record; what this version does not know is an UnknownFormat."""
    try:
        kind, *rest = msgpack.unpackb(data, use_list=False)
    except Exception as error:
        # msgpack raises several unrelated types on bad input; all of them mean the same here.
        raise CorruptBatch(f"a record of groups cannot be read: {error}") from error
    cls = _CLASSES.get(kind)
    if cls is None:
        raise UnknownFormat(f"record kind {kind} of groups is not known here")
    if len(rest) != len(cls.__slots__):
        raise CorruptBatch(f"{cls.__name__} has {len(rest)} fields")
    return cls(*rest)


def by_topic(slots: Iterable[Slot]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for topic, number in sorted(slots):
        found.setdefault(topic, []).append(number)
    return {topic: tuple(numbers) for topic, numbers in found.items()}


def slots_of(numbers: Numbers) -> list[Slot]:
    return [(topic, number) for topic, found in numbers.items() for number in found]
