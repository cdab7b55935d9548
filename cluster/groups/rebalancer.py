"""From who should have a partition to who may have it now: revoke before assign. (Core.)

Each partition of a group is in one of these states:

    free      nobody has it, and nobody should
    owned     its owner is who should have it
    revoking  its owner should let go of it: somebody else should have it, or nobody

    free     ──retarget──> owned         given at once
    owned    ──retarget to another──> revoking, since this generation
    revoking ──retarget back──> owned    its owner never let go
    revoking ──its owner lets go, or is gone──> owned by whom it should have, or free

So nobody gets a partition before the one who had it has said that it let go, or has no session any
more; and a partition that stays where it is notices nothing.

A new target is a new generation, and a partition gets the generation in which it was given as its
owner epoch: each owner's is above that of the one before. A member lets go by a heartbeat that no
longer names the partition and knows the generation since which it should: an older one may have
been sent before the member took what it had been given.
"""

from collections.abc import Collection, Iterable, Mapping

from raftq.cluster.groups.assignment import Slot


class Ownership:
    """The partitions of one group. It changes by its verbs only, the same way on every replay."""

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.target: dict[Slot, str] = {}
        self.owner: dict[Slot, tuple[str, int]] = {}
        """Who may have it now, and its owner epoch; also while it is being revoked."""
        self.revoked: dict[Slot, int] = {}
        """Since which generation the owner should let go."""
        self._owned: dict[str, dict[Slot, int]] = {}
        self._promised: dict[str, dict[Slot, None]] = {}
        """What a member should have and another has still."""

    # What holds now.

    def may_own(self, member: str) -> dict[Slot, int]:
        """What the member may have, and the owner epochs."""
        revoked = self.revoked
        owned = self._owned.get(member, {})
        return {slot: epoch for slot, epoch in owned.items() if slot not in revoked}

    def is_promised(self, member: str) -> bool:
        """Whether the member gets more once others have let go."""
        return bool(self._promised.get(member))

    @property
    def is_settled(self) -> bool:
        """Whether everybody has what it should have."""
        return not self.revoked

    def let_go(self, member: str, generation: int, named: Collection[Slot]) -> list[Slot]:
        """What a heartbeat of this member, which names what it has, says that it let go of."""
        revoked = self.revoked
        return [
            slot
            for slot in self._owned.get(member, ())
            if slot not in named and generation >= revoked.get(slot, generation + 1)
        ]

    # What changes it.

    def retarget(self, generation: int, changes: Mapping[Slot, str | None]) -> None:
        """A new generation, and who should have these partitions in it."""
        assert generation > self.generation, (generation, self.generation)
        self.generation = generation
        for slot, member in changes.items():
            self._aim(slot, member)

    def release(self, member: str, slots: Iterable[Slot]) -> None:
        """The member let go of these."""
        for slot in slots:
            owner, _ = self.owner[slot]
            assert owner == member, (slot, owner, member)
            assert slot in self.revoked, (slot, member)
            self._free(slot)

    def drop(self, member: str) -> None:
        """The member is gone, and everything it had is free."""
        for slot in [slot for slot, aim in self.target.items() if aim == member]:
            self._aim(slot, None)
        for slot in list(self._owned.get(member, ())):
            self._free(slot)
        self._owned.pop(member, None)
        self._promised.pop(member, None)

    def renew(self, member: str, generation: int) -> None:
        """Another process goes on as this member: it has what the member should keep, with epochs
        that fence the process before, and never had the rest."""
        assert generation > self.generation, (generation, self.generation)
        self.generation = generation
        for slot in list(self._owned.get(member, ())):
            if slot in self.revoked:
                self._free(slot)
            else:
                self._give(slot, member)

    def raise_to(self, generation: int) -> None:
        """Partitions know higher owner epochs than this group: give everything anew, above them."""
        assert generation > self.generation, (generation, self.generation)
        self.generation = generation
        for slot, (member, _) in list(self.owner.items()):
            if slot not in self.revoked:
                self._give(slot, member)

    def restore(self, slot: Slot, target: str | None, owned: tuple[str, int, int] | None) -> None:
        """One partition as a snapshot has it: who should have it; and who has it, since which
        epoch, and to be revoked since which generation (0: not)."""
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
        """Assert what the parts of this say about each other."""
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
