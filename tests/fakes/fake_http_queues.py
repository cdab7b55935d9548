"""Groups, leases, delays and dead letters in memory, for the clients of the HTTP server."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.admin.results import (
    DelayedPage,
    DelayedRecord,
    DelaySums,
    GroupDescription,
    GroupPartition,
    LetterPage,
    LetterPlace,
    QueueSums,
    Swept,
)
from raftq.client.common.errors import (
    AlreadySettled,
    FencedGeneration,
    GroupNotEmpty,
    LeaseExpired,
    LeaseForeign,
    RaftqError,
    UnknownGroup,
)
from raftq.client.queue.leased import LeasedRecord, LeaseInfo, Receipt
from raftq.client.queue.one_shot import Settled
from raftq.client.queue.settling import Settlement
from raftq.client.queue.stateless import MemberState
from raftq.client.results import Record
from raftq.client.wire.group_messages import GivenPartition, GroupSummary, MemberInfo
from raftq.client.wire.queue_messages import LeasedRange
from raftq.client.wire.record import BatchRecord
from raftq.node.queue.core.leases import TAG_SHIFT, group_tag

Key = tuple[str, int]


class Asked(NamedTuple):
    """A poll."""

    records_max: int
    wait_s: float
    lease_s: float | None


@dataclass
class Wish:
    """What a member that joined wants."""

    client_id: str
    topics: tuple[str, ...]
    session_ms: int
    mode: Any


@dataclass
class FakeGroup:
    generation: int = 1
    members: dict[str, Wish] = field(default_factory=dict)
    offsets: dict[str, dict[int, int]] = field(default_factory=dict)
    leased: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    settled: dict[int, None] = field(default_factory=dict)


class FakeQueues:
    """One queue per topic, of what `deliver` puts there. `error` is raised by the next calls."""

    def __init__(self) -> None:
        self.groups: dict[str, FakeGroup] = {}
        self.ready: list[tuple[str, int, BatchRecord]] = []
        self.arrived = asyncio.Event()
        self.asked: list[Asked] = []
        self.polled = asyncio.Condition()
        self.gave_back = asyncio.Event()
        self.settlements: list[tuple[str, Settlement]] = []
        self.returned: list[Record | LeasedRecord] = []
        self.revoked: list[tuple[str, int]] = []
        self.waiting: dict[str, list[DelayedRecord]] = {}
        self.dead: dict[str, list[Record]] = {}
        self.filters: list[LetterFilter] = []
        self.resets: list[Any] = []
        self.delays = DelaySums()
        self.totals = QueueSums()
        self.error: BaseException | None = None
        self.settle_errors: dict[int, RaftqError] = {}
        self.complete = True
        self._nonce = 0

    def _enter(self) -> None:
        if self.error is not None:
            raise self.error

    def _group(self, name: str) -> FakeGroup:
        self._enter()
        if name not in self.groups:
            raise UnknownGroup(f"no group {name!r}")
        return self.groups[name]

    def _member(self, group: str, member_id: str) -> FakeGroup:
        found = self._group(group)
        if member_id not in found.members:
            raise FencedGeneration(f"no member {member_id!r}")
        return found

    def deliver(self, topic: str, partition: int, record: BatchRecord) -> None:
        self.ready.append((topic, partition, record))
        self.arrived.set()

    async def list_groups(self) -> list[GroupSummary]:
        self._enter()
        return [GroupSummary(name, "stable", "queue", 0, 1) for name in sorted(self.groups)]

    async def describe_group(self, group: str) -> GroupDescription:
        found = self._group(group)
        members = tuple(
            MemberInfo(
                name, wish.client_id, "", "h", wish.topics, (GivenPartition(wish.topics[0], 0, 1),)
            )
            for name, wish in found.members.items()
        )
        mode = "queue" if not members else next(iter(found.members.values())).mode
        topics = {one: None for wish in found.members.values() for one in wish.topics}
        parts = tuple(GroupPartition(topic, 0, 3, 10, 7) for topic in topics)
        return GroupDescription(group, "stable", mode, found.generation, 1, members, parts)

    async def delete_group(self, group: str) -> None:
        if self._group(group).members:
            raise GroupNotEmpty(f"group {group!r} has members")
        del self.groups[group]

    async def join(
        self, group: str, topics: Sequence[str], *, mode: Any, session_ms: int, client_id: str
    ) -> MemberState:
        self._enter()
        found = self.groups.setdefault(group, FakeGroup())
        member_id = f"{client_id or 'http'}-{len(found.members)}"
        found.members[member_id] = Wish(client_id, tuple(topics), session_ms, mode)
        return MemberState(member_id, found.generation, [(topics[0], 0)])

    async def heartbeat(self, group: str, member_id: str, generation: int | None) -> MemberState:
        found = self._member(group, member_id)
        topic = found.members[member_id].topics[0]
        return MemberState(member_id, found.generation, [(topic, 0)], self.revoked)

    async def leave(self, group: str, member_id: str) -> bool:
        return self._group(group).members.pop(member_id, None) is not None

    async def poll(
        self,
        group: str,
        member_id: str,
        records_max: int,
        wait_s: float,
        lease_s: float | None,
    ) -> list[Record | LeasedRecord]:
        found = self._member(group, member_id)
        async with self.polled:
            self.asked.append(Asked(records_max, wait_s, lease_s))
            self.polled.notify_all()
        if not self.ready and wait_s:
            try:
                async with asyncio.timeout(wait_s):
                    await self.arrived.wait()
            except TimeoutError:
                return []
        delivered: list[Record | LeasedRecord] = []
        while self.ready and len(delivered) < records_max:
            topic, partition, one = self.ready.pop(0)
            if found.members[member_id].mode == "stream":
                delivered.append(as_record(topic, partition, one))
                continue
            self._nonce += 1
            nonce = (group_tag(group) << TAG_SHIFT) + self._nonce
            found.leased[nonce] = (topic, partition, one.offset)
            leased = LeasedRange(nonce, one.offset, one.offset + 1, 1, 0)
            lease = LeaseInfo(topic, partition, one.priority, leased)
            delivered.append(
                LeasedRecord(one.offset, one.key, one.value, one.timestamp, one.headers, lease, 0)
            )
        return delivered

    async def give_back(self, group: str, records: Sequence[Record | LeasedRecord]) -> None:
        self.returned += records
        self.gave_back.set()

    async def until_polled(self, count: int) -> None:
        async with self.polled:
            await self.polled.wait_for(lambda: len(self.asked) >= count)

    async def stored_offsets(self, group: str, topics: Iterable[str]) -> Any:
        offsets = self._group(group).offsets
        return {one: offsets[one] for one in topics if one in offsets}

    async def commit(self, group: str, member_id: str, offsets: Mapping[Key, int]) -> None:
        self._enter()
        found = self.groups.setdefault(group, FakeGroup())
        if member_id and member_id not in found.members:
            raise FencedGeneration(f"no member {member_id!r}")
        for (topic, number), offset in offsets.items():
            found.offsets.setdefault(topic, {})[number] = offset

    async def reset_group(
        self, group: str, topic: str, to: Any, partition: int | None
    ) -> Mapping[int, int]:
        self._enter()
        self.resets.append(to)
        every = range(2) if partition is None else [partition]
        return dict.fromkeys(every, to if isinstance(to, int) else 0)

    async def queue_groups(self, topic: str, partition: int) -> list[str]:
        self._enter()
        return list(self.groups)

    async def settle(
        self, group: str, receipts: Sequence[Receipt], said: Settlement
    ) -> list[Settled | RaftqError]:
        self._enter()
        self.settlements.append((group, said))
        return [self._settle(group, said, one) for one in receipts]

    def _settle(self, group: str, said: Settlement, receipt: Receipt) -> Settled | RaftqError:
        if receipt.offset in self.settle_errors:
            return self.settle_errors[receipt.offset]
        found = self.groups.get(group)
        if found is None or receipt.nonce >> TAG_SHIFT != group_tag(group):
            return LeaseForeign("of another group")
        if receipt.nonce in found.settled:
            return AlreadySettled("settled before")
        if receipt.nonce not in found.leased:
            return LeaseExpired("its time ran out")
        next_visible = 1_700_000_005_000 if said.verb in ("nack", "extend") else 0
        if said.verb != "extend":
            del found.leased[receipt.nonce]
            found.settled[receipt.nonce] = None
        dead = said.verb == "reject"
        return Settled(receipt.offset + 1, len(found.leased), dead, next_visible)

    async def delayed_page(self, topic: str, skip: int, limit: int) -> DelayedPage:
        self._enter()
        found = sorted(self.waiting.get(topic, []), key=lambda one: one.deliver_at)
        return DelayedPage(found[skip : skip + limit], len(found))

    async def find_delayed(
        self, topic: str, offset: int, partition: int | None
    ) -> DelayedRecord | None:
        self._enter()
        for one in self.waiting.get(topic, []):
            if one.offset == offset and partition in (None, one.partition):
                return one
        return None

    async def cancel_delayed(self, topic: str, partition: int, offset: int) -> list[int]:
        found = await self.find_delayed(topic, offset, partition)
        if found is not None:
            self.waiting[topic].remove(found)
        return [] if found is None else [offset]

    async def delay_sums(self, topics: Iterable[str]) -> DelaySums:
        self._enter()
        return self.delays

    async def letter_page(
        self, topic: str, which: LetterFilter, place: LetterPlace | None, limit: int
    ) -> LetterPage:
        self._enter()
        self.filters.append(which)
        start = place or LetterPlace()
        found = [one for one in self.dead.get(topic, []) if (one.partition, one.offset) >= start]
        more = found[limit] if len(found) > limit else None
        following = None if more is None else LetterPlace(more.partition, more.offset)
        return LetterPage(found[:limit], following)

    async def sweep_letters(
        self, topic: str, verb: str, which: LetterFilter, limit: int, rate: float | None
    ) -> Swept:
        self._enter()
        self.filters.append(which)
        return Swept(min(limit, len(self.dead.get(topic, []))), self.complete)

    async def queue_sums(self, topics: Iterable[str]) -> QueueSums:
        self._enter()
        return self.totals


def as_record(topic: str, partition: int, one: BatchRecord) -> Record:
    return Record(
        topic, partition, one.offset, one.key, one.value, one.timestamp, one.headers, one.priority
    )
