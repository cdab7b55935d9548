"""From who should have a partition to who may have it now: revoke before assign. (Core.)

Each partition of a group is in one of these states:

    free      no member has it, and none should
    owned     its owner is the member that should have it
    revoking  its owner should release it: another member should have it, or none

    free     ──retarget──> owned         given at once
    owned    ──retarget to another──> revoking, since this generation
    revoking ──retarget back──> owned    its owner never released it
    revoking ──its owner releases it, or is gone──> owned by its target, or free

So no member gets a partition before the previous owner has released it or has no session any more.
A partition that stays where it is is not affected.

A new target is a new generation. A partition gets the generation in which it was given as its owner
epoch, so the epoch of each owner is above that of the owner before. A member releases a partition
with a heartbeat that no longer names it and knows the generation since which it should: an older
heartbeat may have been sent before the member took over what it was given.
"""

from collections.abc import Collection, Iterable, Mapping

from raftq.cluster.groups.assignment import Slot


class Ownership:
    """The partitions of one group. Only its methods change it, the same way on every replay."""

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.target: dict[Slot, str] = {}
        self.owner: dict[Slot, tuple[str, int]] = {}
        """Who may have it now, and its owner epoch; also while it is being revoked."""
        self.revoked: dict[Slot, int] = {}
        """The generation since which the owner should release it."""
        self._owned: dict[str, dict[Slot, int]] = {}
        self._promised: dict[str, dict[Slot, None]] = {}
        """What a member should have and another still has."""

    # What holds now.

    def may_own(self, member: str) -> dict[Slot, int]:
        """Return what the member may have, with the owner epochs."""
        revoked = self.revoked
        owned = self._owned.get(member, {})
        return {slot: epoch for slot, epoch in owned.items() if slot not in revoked}

    def is_promised(self, member: str) -> bool:
        """Report whether the member gets more once others have released it."""
        return bool(self._promised.get(member))

    @property
    def is_settled(self) -> bool:
        """Whether every member has what it should have."""
        return not self.revoked

    def let_go(self, member: str, generation: int, named: Collection[Slot]) -> list[Slot]:
        """Return what this heartbeat releases: the member names what it has."""
        revoked = self.revoked
        return [
            slot
            for slot in self._owned.get(member, ())
            if slot not in named and generation >= revoked.get(slot, generation + 1)
        ]

    # What changes it.

    def retarget(self, generation: int, changes: Mapping[Slot, str | None]) -> None:
        """Begin a new generation, with new targets for these partitions."""
        assert generation > self.generation, (generation, self.generation)
        self.generation = generation
        for slot, member in changes.items():
            self._aim(slot, member)

    def release(self, member: str, slots: Iterable[Slot]) -> None:
        """Release these partitions of the member."""
        for slot in slots:
            owner, _ = self.owner[slot]
            assert owner == member, (slot, owner, member)
            assert slot in self.revoked, (slot, member)
            self._free(slot)

    def drop(self, member: str) -> None:
        """Remove the member and free everything it had."""
        for slot in [slot for slot, aim in self.target.items() if aim == member]:
            self._aim(slot, None)
        for slot in list(self._owned.get(member, ())):
            self._free(slot)
        self._owned.pop(member, None)
        self._promised.pop(member, None)

    def renew(self, member: str, generation: int) -> None:
        """Let another process go on as this member. It has what the member should keep, with
        epochs that fence the process before, and never had the rest."""
        assert generation > self.generation, (generation, self.generation)
        self.generation = generation
        for slot in list(self._owned.get(member, ())):
            if slot in self.revoked:
                self._free(slot)
            else:
                self._give(slot, member)

    def raise_to(self, generation: int) -> None:
        """Give everything again, above these epochs: partitions know higher ones than this
        group."""
        assert generation > self.generation, (generation, self.generation)
        self.generation = generation
        for slot, (member, _) in list(self.owner.items()):
            if slot not in self.revoked:
                self._give(slot, member)

    def restore(self, slot: Slot, target: str | None, owned: tuple[str, int, int] | None) -> None:
        """Restore one partition of a snapshot: its target, its owner and epoch, and the
        generation since which it is revoked (0: not)."""
        if owned is not None:
            member, epoch, revoked = owned
            self.owner[slot] = (member, epoch)
            self._owned.setdefault(member, {})[slot] = epoch
            if revoked:
                self.revoked[slot] = revoked
        if target is not None:
            self.target[slot] = target
            if owned is not None and owned[0] != target:
                self._promised.setdefault(target, {})[slot] = None

    def _aim(self, slot: Slot, member: str | None) -> None:
        before = self.target.pop(slot, None)
        if before is not None:
            self._promised.get(before, {}).pop(slot, None)
        if member is not None:
            self.target[slot] = member
        if slot not in self.owner:
            if member is not None:
                self._give(slot, member)
        elif self.owner[slot][0] == member:
            self.revoked.pop(slot, None)
        else:
            self.revoked.setdefault(slot, self.generation)
            if member is not None:
                self._promised.setdefault(member, {})[slot] = None

    def _free(self, slot: Slot) -> None:
        owner, _ = self.owner.pop(slot)
        del self._owned[owner][slot]
        self.revoked.pop(slot, None)
        member = self.target.get(slot)
        if member is not None:
            self._promised.get(member, {}).pop(slot, None)
            self._give(slot, member)

    def _give(self, slot: Slot, member: str) -> None:
        self.owner[slot] = (member, self.generation)
        self._owned.setdefault(member, {})[slot] = self.generation

    def check(self) -> None:
        """Assert that the parts of this state agree."""
        for slot, (member, epoch) in self.owner.items():
            assert self._owned[member][slot] == epoch <= self.generation, slot
            assert (slot in self.revoked) == (self.target.get(slot) != member), slot
            if slot in self.revoked:
                assert epoch < self.revoked[slot] <= self.generation, slot
        assert sum(map(len, self._owned.values())) == len(self.owner)
        promised = [(slot, member) for member, slots in self._promised.items() for slot in slots]
        assert dict(promised) == {
            slot: member for slot, member in self.target.items() if slot in self.revoked
        }
        assert all(slot in self.owner for slot in [*self.target, *self.revoked])
