"""All groups of one coordinator: requests and time in, records out. (Core.)

    heartbeat       a member joins, stays, and names what it has
    leave, delete   a member goes; a group without members is forgotten
    set_topics      the topics of the cluster have changed
    tick            time has passed; call it at `next_deadline()`

Each of them changes groups by records, which are applied here at once and wait in `take()` to be
written. No answer may leave before all of them are replicated, nor from a leader that does not know
whether it still leads: the caller ensures both. A new coordinator applies the records and calls
`start`. Every member then has a whole session to send a heartbeat, because the coordinator before
may have received one just now. So no partition changes its owner while that owner, counting from
when it sent the last heartbeat that was answered, may believe that it has a session.

A group gets a new target at once, but not before `target_ms` after the last one: many members that
come within a moment share a target.

Partitions keep the owner epochs that they have seen. When the records of a group are lost, or an
old copy of them comes back, its generations begin again below those epochs, and every claim would
be fenced for ever. A member reports the epoch that fenced it. If the group has not reached that
generation, it goes on above it, and everything is given again.

When a step comes much later than its deadline, this process was stopped and received nothing since
the step before. That time does not count against the sessions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from random import Random

from raftq.client.common.errors import (
    ConfigError,
    FencedGeneration,
    GroupNotEmpty,
    InvalidArgument,
    Throttled,
    UnknownGroup,
)
from raftq.client.wire.group_messages import GroupHeartbeat, Mode
from raftq.cluster.groups.group import Group, Member, MemberView
from raftq.cluster.groups.patterns import Pattern
from raftq.cluster.groups.records import (
    Beat,
    GroupDeleted,
    GroupKept,
    GroupRecord,
    MemberGone,
    MemberPut,
    Raised,
    Released,
    Retargeted,
    SnapshotBegun,
    SnapshotEnded,
    by_topic,
)
from raftq.cluster.groups.subscriptions import TopicCounts

GENERATION_LAST = (1 << 62) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsConfig:
    target_ms: int = 300
    """The time between two targets of a group. Too short: members that come one after the other
    move partitions more often than needed. Too long: the second of them waits."""
    session_ms_min: int = 500
    """The shortest session. A shorter one would end by the delays of a busy network."""
    session_ms_max: int = 600_000
    members_max: int = 5_000
    """The most members of one group."""
    groups_max: int = 100_000
    """The most groups of one coordinator, also those without members."""
    stall_ms: int = 1_000
    """A step that comes later than this after its deadline means that this process was stopped."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, not {value}"
            for name in self.__slots__
            if (value := getattr(self, name)) < 1
        ]
        if self.session_ms_min > self.session_ms_max:
            problems.append("session_ms_min must not be above session_ms_max")
        if problems:
            raise ConfigError("groups: " + "; ".join(problems))


class Groups:
    """The groups of one coordinator."""

    def __init__(self, config: GroupsConfig, rng: Random) -> None:
        self.config = config
        self.groups: dict[str, Group] = {}
        self.topics = TopicCounts({})
        self.rng = rng
        self._floor = 0
        """The highest generation of a deleted group."""
        self._incoming: tuple[int, dict[str, Group]] | None = None
        """The part of a snapshot that has been read."""
        self._records: list[GroupRecord] = []
        self._changed: dict[str, None] = {}
        self._dirty: dict[str, None] = {}
        self._sessions: list[tuple[float, int, str, str]] = []
        """A heap with one entry per member. An entry may be too early but never too late."""
        self._timers = 0
        self._wake_at: float | None = None
        self._stepped_at = 0.0

    # Taking over.

    def restore(self, record: GroupRecord) -> None:
        """Apply the next stored record."""
        if isinstance(record, SnapshotBegun):
            self._incoming = (record.floor, {})
        elif isinstance(record, SnapshotEnded):
            # A snapshot without its beginning, or its end, was written when all of it was known.
            if self._incoming is not None:
                self._floor, self.groups = self._incoming
                self._dirty.clear()
            self._incoming = None
        elif isinstance(record, GroupKept):
            if self._incoming is not None:
                self._incoming[1][record.group] = Group.restored(record)
        elif not isinstance(record, Beat):
            self._incoming = None
            self._apply(record)

    def start(self, counts: Mapping[str, int], now: float) -> None:
        """Begin to coordinate: all records are applied."""
        self._incoming = None
        self._changed.clear()
        self._stepped_at = now
        self.topics = TopicCounts(counts)
        for name, group in self.groups.items():
            for member in group.members.values():
                member.note_heartbeat(now)
                self._watch(group, member)
            if group.changes(self.topics):
                group.is_dirty = True
            if group.is_dirty:
                self._dirty[name] = None
        self._end_step(now)

    def snapshot(self) -> list[GroupRecord]:
        """Return records that make up the whole state."""
        kept = [group.kept() for group in self.groups.values()]
        return [SnapshotBegun(self._floor), *kept, SnapshotEnded()]

    # Requests.

    def heartbeat(self, message: GroupHeartbeat, host: str, now: float) -> str:
        """Note a heartbeat, and return the id of the member. FencedGeneration: it has to join
        again."""
        self._begin_step(now)
        self._check(message)
        known = self.groups.get(message.group)
        if message.member_id and message.member_epoch:
            member = self._stay(known, message)
        else:
            member = self._join(known, message, host)
        group = self.groups[message.group]
        member.note_heartbeat(now)
        if not member.timer:
            self._watch(group, member)
        named = {(slot.topic, slot.partition) for slot in message.owned}
        let_go = group.ownership.let_go(member.member_id, message.generation, named)
        if let_go:
            self._write(Released(group.name, member.member_id, by_topic(let_go)))
        if group.generation < message.fenced_by < GENERATION_LAST:
            self._write(Raised(group.name, message.fenced_by + 1))
        self._end_step(now)
        return member.member_id

    def leave(self, name: str, member_id: str, member_epoch: int, now: float) -> bool:
        """Remove the member, and report whether it was there. The epoch 0 matches any."""
        self._begin_step(now)
        group = self.groups.get(name)
        member = None if group is None else group.members.get(member_id)
        left = member is not None and member_epoch in (0, member.epoch)
        if left:
            self._write(MemberGone(name, member_id, "it left"))
        self._end_step(now)
        return left

    def delete(self, name: str, now: float) -> None:
        group = self.find(name)
        if group.members:
            raise GroupNotEmpty(f"group {name!r} has {len(group.members)} members")
        self._begin_step(now)
        self._write(GroupDeleted(name, group.generation))
        self._end_step(now)

    def set_topics(self, counts: Mapping[str, int], now: float) -> None:
        """Set the topics and their numbers of partitions."""
        self._begin_step(now)
        changed = self.topics.differences(counts)
        if changed.counts:
            self.topics = self.topics.updated(counts)
            for name, group in self.groups.items():
                if group.wants_some(changed):
                    group.is_dirty = True
                    self._dirty[name] = None
        self._end_step(now)

    def tick(self, now: float) -> None:
        self._begin_step(now)
        self._end_step(now)

    # What the caller takes from here.

    def next_deadline(self) -> float | None:
        """Return when to call `tick` if nothing else happens."""
        return self._wake_at

    def take(self) -> tuple[list[GroupRecord], list[str]]:
        """Return the records to write since the last call, and the groups that have changed."""
        records, self._records = self._records, []
        changed, self._changed = list(self._changed), {}
        return records, changed

    def find(self, name: str) -> Group:
        group = self.groups.get(name)
        if group is None:
            raise UnknownGroup(f"no group {name!r}")
        return group

    def view(self, name: str, member_id: str) -> MemberView | None:
        """Return what a member may know, or None when it is not a member."""
        group = self.groups.get(name)
        member = None if group is None else group.members.get(member_id)
        return None if group is None or member is None else group.view(member, self.topics)

    def describe(self) -> str:
        members = sum(len(group.members) for group in self.groups.values())
        return f"groups: {len(self.groups)}, members {members}, next {self._wake_at}"

    # Members.

    def _check(self, message: GroupHeartbeat) -> None:
        low, high = self.config.session_ms_min, self.config.session_ms_max
        if not message.group:
            raise InvalidArgument("a group needs a name")
        if not low <= message.session_ms <= high:
            raise InvalidArgument(f"session_ms must be {low} to {high}, not {message.session_ms}")

    def _stay(self, group: Group | None, message: GroupHeartbeat) -> Member:
        member = None if group is None else group.members.get(message.member_id)
        if group is None or member is None:
            raise FencedGeneration(
                f"group {message.group!r} has no member {message.member_id!r}: its session ended"
            )
        if message.member_epoch != member.epoch:
            raise FencedGeneration(
                f"member {message.member_id!r} of group {message.group!r} is another process now"
            )
        if message.generation > group.generation:
            raise FencedGeneration(
                f"group {message.group!r} is in generation {group.generation}, "
                f"not {message.generation}"
            )
        return self._put(group, member, message)

    def _join(self, group: Group | None, message: GroupHeartbeat, host: str) -> Member:
        if not message.topics and not message.pattern:
            raise InvalidArgument("a member needs topics or a pattern")
        if group is None:
            if len(self.groups) >= self.config.groups_max:
                raise Throttled(f"there are {len(self.groups)} groups already")
            group = Group(message.group, message.mode, self._floor)
        elif group.members and message.mode != group.mode:
            raise InvalidArgument(f"group {group.name!r} is in {group.mode} mode")
        member_id = group.instances.get(message.instance_id, message.member_id)
        known = group.members.get(member_id)
        if known is not None:
            if known.instance_id != message.instance_id:
                raise InvalidArgument(f"group {group.name!r} has another member {member_id!r}")
            # A member that names itself is the same process, whose answer was lost, and asks again.
            is_other = not message.member_id or message.member_id != known.process
            member = replace(
                known, process=message.member_id, client_id=message.client_id, host=host
            )
            member.epoch += is_other
            return self._put(group, member, message, group.generation + is_other)
        if len(group.members) >= self.config.members_max:
            raise Throttled(f"group {group.name!r} has {len(group.members)} members already")
        if not member_id:
            member_id = f"{message.client_id[:200] or 'member'}-{self.rng.getrandbits(64):016x}"
        names = (message.instance_id, message.member_id, message.client_id, host)
        member = Member(member_id, 1, *names, session_ms=0, topics=(), pattern="")
        return self._put(group, member, message, group.generation)

    def _put(
        self, group: Group, member: Member, message: GroupHeartbeat, generation: int = 0
    ) -> Member:
        """Record what the message says of the member, if that is new."""
        known = group.members.get(member.member_id)
        topics, pattern = tuple(sorted(set(message.topics))), message.pattern
        if not topics and not pattern:
            # The heartbeat does not repeat the subscription.
            topics, pattern = member.topics, member.pattern
        if pattern != member.pattern:
            Pattern(pattern)  # InvalidArgument, before it gets into the records
        put = replace(member, session_ms=message.session_ms, topics=topics, pattern=pattern)
        if known is not None and put.facts() == known.facts():
            return known
        mode = group.mode if group.members else message.mode
        self._write(put.record(group.name, mode, generation or group.generation))
        return self.groups[group.name].members[member.member_id]

    # Records.

    def _write(self, record: GroupRecord) -> None:
        self._apply(record)
        self._records.append(record)

    def _apply(self, record: GroupRecord) -> None:
        if isinstance(record, GroupDeleted):
            self._floor = max(self._floor, record.generation)
            self.groups.pop(record.group, None)
            self._dirty.pop(record.group, None)
            self._changed[record.group] = None
            return
        assert isinstance(record, MemberPut | MemberGone | Retargeted | Released | Raised), record
        group = self.groups.get(record.group)
        if group is None:
            assert isinstance(record, MemberPut), record
            mode: Mode = "queue" if record.mode == "queue" else "stream"
            group = self.groups[record.group] = Group(record.group, mode, record.generation)
        group.apply(record)
        self._changed[record.group] = None
        if group.is_dirty:
            self._dirty[record.group] = None
        else:
            self._dirty.pop(record.group, None)

    # Time.

    def _watch(self, group: Group, member: Member) -> None:
        self._timers += 1
        member.timer = self._timers
        heappush(self._sessions, (member.expires_at, member.timer, group.name, member.member_id))

    def _begin_step(self, now: float) -> None:
        since, self._stepped_at = self._stepped_at, now
        if self._wake_at is not None and now - self._wake_at > self.config.stall_ms / 1000:
            for group in self.groups.values():
                for member in group.members.values():
                    member.expires_at += now - since
        self._expire(now)

    def _expire(self, now: float) -> None:
        """End the sessions whose time is over."""
        while self._sessions and self._sessions[0][0] <= now:
            _, timer, name, member_id = heappop(self._sessions)
            group = self.groups.get(name)
            member = None if group is None else group.members.get(member_id)
            if group is None or member is None or member.timer != timer:
                continue
            if member.expires_at <= now:
                self._write(MemberGone(name, member_id, "its session ended"))
            else:
                heappush(self._sessions, (member.expires_at, timer, name, member_id))

    def _end_step(self, now: float) -> None:
        """Make the targets that are due, and set the next deadline."""
        wake_at = self._sessions[0][0] if self._sessions else None
        for name in list(self._dirty):
            group = self.groups[name]
            if group.held_until > now:
                wake_at = group.held_until if wake_at is None else min(wake_at, group.held_until)
                continue
            self._write(Retargeted(name, group.generation + 1, group.changes(self.topics)))
            group.held_until = now + self.config.target_ms / 1000
        self._wake_at = wake_at
