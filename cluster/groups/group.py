"""One group: its members, and what they want and have. (Core.)

It changes only by `apply` of a record, so every reader of the records has the same group. The rest
is soft state: when a member last sent a heartbeat, and whether the target is out of date.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raftq.client.wire.group_messages import Mode
from raftq.cluster.groups.assignment import Slot, assign
from raftq.cluster.groups.rebalancer import Ownership
from raftq.cluster.groups.records import (
    GroupKept,
    GroupRecord,
    MemberGone,
    MemberPut,
    Raised,
    Released,
    Retargeted,
    by_topic,
    slots_of,
)
from raftq.cluster.groups.subscriptions import TopicCounts

GroupPhase = Literal["empty", "rebalancing", "stable"]


@dataclass(slots=True)
class Member:
    member_id: str
    epoch: int
    """Grows with every process that goes on as this member."""
    instance_id: str
    process: str
    """The id that its process chose when it joined, if any."""
    client_id: str
    host: str
    session_ms: int
    topics: tuple[str, ...]
    pattern: str
    heard_at: float = 0.0
    expires_at: float = 0.0
    timer: int = 0
    """The entry of this member among the sessions."""

    def note_heartbeat(self, now: float) -> None:
        self.heard_at = now
        self.expires_at = max(self.expires_at, now + self.session_ms / 1000)

    def facts(self) -> tuple[str, int, str, str, str, str, int, tuple[str, ...], str]:
        """Return the member as records store it."""
        return (
            self.member_id, self.epoch, self.instance_id, self.process, self.client_id,
            self.host, self.session_ms, self.topics, self.pattern,
        )  # fmt: skip

    def record(self, group: str, mode: Mode, generation: int) -> MemberPut:
        return MemberPut(group, mode, generation, *self.facts())


@dataclass(frozen=True, slots=True)
class MemberView:
    """What a member may know."""

    member_epoch: int
    generation: int
    assigned: tuple[tuple[str, int, int], ...]
    """(topic, number, owner epoch) of each partition that it may have, in order."""
    pending: bool


class Group:
    """One group, made of records."""

    def __init__(self, name: str, mode: Mode, generation: int) -> None:
        self.name = name
        self.mode: Mode = mode
        self.members: dict[str, Member] = {}
        self.instances: dict[str, str] = {}
        """Static members: instance -> member id."""
        self.ownership = Ownership(generation)
        self.is_dirty = False
        """Members or subscriptions have changed since the target was made."""
        self.held_until = 0.0
        """There is no new target before this time."""

    @property
    def generation(self) -> int:
        return self.ownership.generation

    @property
    def phase(self) -> GroupPhase:
        if not self.members:
            return "empty"
        settled = self.ownership.is_settled and not self.is_dirty
        return "stable" if settled else "rebalancing"

    # Records.

    def apply(self, record: GroupRecord) -> None:
        if isinstance(record, MemberPut):
            self._put(record)
        elif isinstance(record, MemberGone):
            member = self.members.pop(record.member_id)
            self.instances.pop(member.instance_id, None)
            self.ownership.drop(record.member_id)
            self.is_dirty = True
        elif isinstance(record, Retargeted):
            changes: dict[Slot, str | None] = {
                slot: member or None
                for member, numbers in record.changes.items()
                for slot in slots_of(numbers)
            }
            self.ownership.retarget(record.generation, changes)
            self.is_dirty = False
        elif isinstance(record, Raised):
            self.ownership.raise_to(record.generation)
        else:
            assert isinstance(record, Released), record
            self.ownership.release(record.member_id, slots_of(record.slots))

    def _put(self, record: MemberPut) -> None:
        known = self.members.get(record.member_id)
        member = Member(
            record.member_id, record.epoch, record.instance_id, record.process, record.client_id,
            record.host, record.session_ms, record.topics, record.pattern,
        )  # fmt: skip
        if known is not None:
            member.heard_at, member.expires_at = known.heard_at, known.expires_at
            member.timer = known.timer
            if record.epoch != known.epoch:
                self.ownership.renew(record.member_id, record.generation)
        if not self.members and record.mode != self.mode:
            self.mode = "queue" if record.mode == "queue" else "stream"
        wishes = (member.topics, member.pattern)
        if known is None or (known.topics, known.pattern) != wishes:
            self.is_dirty = True
        self.members[record.member_id] = member
        if record.instance_id:
            self.instances[record.instance_id] = record.member_id

    def kept(self) -> GroupKept:
        """Return all of it, for a snapshot."""
        places = {member_id: at for at, member_id in enumerate(self.members)}
        ownership = self.ownership
        slots: dict[str, list[tuple[int, int, int, int, int]]] = {}
        for slot in sorted(ownership.owner):
            owner, epoch = ownership.owner[slot]
            target = ownership.target.get(slot)
            row = (
                slot[1],
                -1 if target is None else places[target],
                places[owner],
                epoch,
                ownership.revoked.get(slot, 0),
            )
            slots.setdefault(slot[0], []).append(row)
        members = tuple(member.facts() for member in self.members.values())
        rows = {topic: tuple(found) for topic, found in slots.items()}
        return GroupKept(self.name, self.mode, self.generation, members, rows)

    @classmethod
    def restored(cls, record: GroupKept) -> "Group":
        mode: Mode = "queue" if record.mode == "queue" else "stream"
        group = cls(record.group, mode, record.generation)
        for facts in record.members:
            member = Member(*facts)
            group.members[member.member_id] = member
            if member.instance_id:
                group.instances[member.instance_id] = member.member_id
        ids = list(group.members)
        for topic, rows in record.slots.items():
            for number, target, owner, epoch, revoked in rows:
                aim = None if target < 0 else ids[target]
                group.ownership.restore((topic, number), aim, (ids[owner], epoch, revoked))
        return group

    # What should be.

    def wanted(self, topics: TopicCounts) -> dict[str, list[str]]:
        """Return the topics of each member that exist."""
        return {
            member.member_id: topics.wanted(member.topics, member.pattern)
            for member in self.in_order()
        }

    def wants_some(self, topics: TopicCounts) -> bool:
        """Report whether a member wants any of these."""
        return any(topics.wanted(member.topics, member.pattern) for member in self.members.values())

    def in_order(self) -> list[Member]:
        return [self.members[member_id] for member_id in sorted(self.members)]

    def changes(self, topics: TopicCounts) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return how the target has to change, as in a Retargeted record."""
        target: Mapping[Slot, str] = {}
        ownership = self.ownership
        if self.mode == "stream" and self.members:
            # A partition without a target stays with its owner, if possible.
            current = {slot: owner for slot, (owner, _) in ownership.owner.items()}
            target = assign(self.wanted(topics), topics.counts, {**current, **ownership.target})
        changed: dict[str, list[Slot]] = {}
        for slot, member in target.items():
            if ownership.target.get(slot) != member:
                changed.setdefault(member, []).append(slot)
        gone = [slot for slot in ownership.target if slot not in target]
        if gone:
            changed[""] = gone
        return {member: by_topic(changed[member]) for member in sorted(changed)}

    def view(self, member: Member, topics: TopicCounts) -> MemberView:
        """Return what the member may have now."""
        if self.mode == "queue":
            wanted = topics.wanted(member.topics, member.pattern)
            assigned = tuple(
                (topic, number, 0) for topic in wanted for number in range(topics.counts[topic])
            )
            return MemberView(member.epoch, self.generation, assigned, False)
        ownership = self.ownership
        owned = ownership.may_own(member.member_id)
        return MemberView(
            member.epoch,
            self.generation,
            tuple((*slot, owned[slot]) for slot in sorted(owned)),
            self.is_dirty or ownership.is_promised(member.member_id),
        )
