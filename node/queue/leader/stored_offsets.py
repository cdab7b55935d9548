"""The positions that stream groups store in a partition: section O of the ledger. (Shell.)

A position is (offset, owner epoch, member, owned, turn). The coordinator gives a partition to a
member in some generation, the owner epoch. The member claims it here before it reads; from then on
older epochs are fenced: they cannot store any more. A caller without an epoch (an operator, a REST
client) may store while no member owns the partition. `reset`, for operators, ends ownership but not
the fence.

A store may be late: it was sent over a connection that hung, and the next store of its owner, or an
operator, overtook it. So the owner numbers its stores, and the last `turn` is kept: a store with a
lower or equal turn changes nothing. An owner may store a lower offset, with a higher turn.

A record is a msgpack list of rows: the whole position of a group, or its name alone when the
position is forgotten. So the meaning of a record does not depend on the records before it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.msgpack import Decoder

from raftq.client.common.errors import CorruptFile, FencedGeneration, InvalidArgument
from raftq.node.queue.core.codec import encode_stored, stored_decoder
from raftq.node.queue.core.entries import LedgerStruct
from raftq.node.queue.leader.ledger import TAG_OFFSETS, Ledger

NOTHING = -1
GROUPS_MAX = 5_000


@dataclass(slots=True)
class StoredPosition:
    """`offset` -1: nothing is stored. `owner_epoch` -1: no member ever claimed it."""

    offset: int = NOTHING
    owner_epoch: int = NOTHING
    member: str = ""
    owned: bool = False
    turn: int = 0
    """The number of the owner's last store; 0 if it does not number them."""


class StoredOffsets:
    """The stored positions of all groups of a partition."""

    def __init__(self, ledger: Ledger) -> None:
        self.positions: dict[str, StoredPosition] = {}
        self._ledger = ledger

    def of(self, group: str) -> StoredPosition:
        return self.positions.get(group) or StoredPosition()

    def store(
        self, group: str, offset: int, owner_epoch: int, member: str, turn: int = 0
    ) -> "asyncio.Future[None]":
        """Store a position, unless a newer owner or a later turn of this owner is known."""
        known = self._check(group, owner_epoch)
        if owner_epoch == NOTHING:
            return self._write(
                group, StoredPosition(offset, known.owner_epoch, member, False, known.turn)
            )
        if owner_epoch == known.owner_epoch and 0 < turn <= known.turn:
            return self._ledger.barrier()
        return self._write(group, StoredPosition(offset, owner_epoch, member, True, turn))

    def claim(self, group: str, owner_epoch: int, member: str) -> "asyncio.Future[None]":
        """Make the member the owner and fence all older epochs."""
        known = self._check(group, owner_epoch)
        if (known.owner_epoch, known.member, known.owned) == (owner_epoch, member, True):
            return self._ledger.barrier()
        turn = known.turn if owner_epoch == known.owner_epoch else 0
        return self._write(group, StoredPosition(known.offset, owner_epoch, member, True, turn))

    def reset(self, group: str, offset: int) -> "asyncio.Future[None]":
        """Set the position and end any ownership."""
        known = self.of(group)
        return self._write(group, StoredPosition(offset, known.owner_epoch, "", False, known.turn))

    def forget(self, group: str) -> "asyncio.Future[None]":
        self.positions.pop(group, None)
        return self._ledger.write([TAG_OFFSETS + encode_stored([[group]])])

    def _check(self, group: str, owner_epoch: int) -> StoredPosition:
        known = self.of(group)
        if owner_epoch == NOTHING and known.owned:
            raise FencedGeneration(
                f"group {group!r} has an owner for this partition: member {known.member!r} "
                f"since generation {known.owner_epoch}"
            )
        if NOTHING < owner_epoch < known.owner_epoch:
            raise FencedGeneration(
                f"generation {owner_epoch} of group {group!r} has lost this partition "
                f"in generation {known.owner_epoch}"
            ).with_details(owner_epoch=known.owner_epoch)
        if group not in self.positions and len(self.positions) >= GROUPS_MAX:
            raise InvalidArgument(f"a partition keeps the positions of {GROUPS_MAX} groups")
        return known

    def _write(self, group: str, position: StoredPosition) -> "asyncio.Future[None]":
        self.positions[group] = position
        return self._ledger.write([TAG_OFFSETS + encode_stored([_row(group, position)])])

    # The section of the ledger

    def replay(self, content: bytes) -> None:
        for row in _decode(content):
            if row.offset is None:
                self.positions.pop(row.group, None)
            else:
                self.positions[row.group] = row.position()

    def snapshot(self) -> Iterable[bytes]:
        if self.positions:
            yield encode_stored([_row(*each) for each in self.positions.items()])

    def clip(self, end: int) -> None:
        """The data log ends there now."""
        for group, position in list(self.positions.items()):
            if position.offset > end:
                position.offset = end
                self._write(group, position)


class _StoredRow(LedgerStruct, frozen=True):
    """A whole position, or a group alone: its position is forgotten."""

    group: str
    offset: int | None = None
    owner_epoch: int = NOTHING
    member: str = ""
    owned: bool = False
    turn: int | None = None

    def position(self) -> StoredPosition:
        if self.offset is None or self.turn is None:
            raise CorruptFile(f"the stored offset of group {self.group!r:.60} is cut short")
        return StoredPosition(self.offset, self.owner_epoch, self.member, self.owned, self.turn)


_decode = stored_decoder(Decoder(list[_StoredRow]), "stored offsets")


def _row(group: str, position: StoredPosition) -> _StoredRow:
    return _StoredRow(
        *(group, position.offset, position.owner_epoch, position.member),
        *(position.owned, position.turn),
    )
