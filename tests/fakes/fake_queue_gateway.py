"""Groups, leases, delays and dead letters in memory, for the HTTP server."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raftq.client.admin.results import GroupDescription, GroupPartition
from raftq.client.common.errors import (
    AlreadySettled,
    FencedGeneration,
    GroupNotEmpty,
    LeaseExpired,
    LeaseForeign,
    RaftqError,
    UnknownGroup,
)
from raftq.client.wire.group_messages import GivenPartition, MemberInfo
from raftq.client.wire.record import BatchRecord
from raftq.cluster.metadata.state import TopicState
from raftq.node.http.queue_gateway import (
    Ask,
    Cursor,
    DelaySums,
    Delivered,
    Filter,
    Letters,
    MemberAnswer,
    Offsets,
    QueueTotals,
    Reset,
    SettleCall,
    Settled,
    Swept,
    Waiting,
    Wish,
)
from raftq.node.http.receipts import ReceiptText
from raftq.node.queue.core.leases import TAG_SHIFT, group_tag


@dataclass
class FakeGroup:
    generation: int = 1
    members: dict[str, Wish] = field(default_factory=dict)
    offsets: Offsets = field(default_factory=dict)
    leased: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    settled: dict[int, None] = field(default_factory=dict)


class FakeQueues:
    """One queue per topic, of what `deliver` puts there. `error` is raised by the next calls."""

    def __init__(self) -> None:
        self.groups: dict[str, FakeGroup] = {}
        self.ready: list[tuple[str, int, BatchRecord]] = []
        self.arrived = asyncio.Event()
        self.asked: list[Ask] = []
        self.polled = asyncio.Condition()
        self.gave_back = asyncio.Event()
        self.settlements: list[SettleCall] = []
        self.returned: list[Delivered] = []
        self.revoked: list[tuple[str, int]] = []
        self.waiting: dict[str, list[Waiting]] = {}
        self.dead: dict[str, list[tuple[int, BatchRecord]]] = {}
        self.filters: list[Filter] = []
        self.resets: list[Reset] = []
        self.delays = DelaySums()
        self.totals = QueueTotals()
        self.error: RaftqError | None = None
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

    async def list_groups(self) -> list[str]:
        self._enter()
        return list(self.groups)

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

    async def join(self, group: str, wish: Wish) -> MemberAnswer:
        self._enter()
        found = self.groups.setdefault(group, FakeGroup())
        member_id = f"{wish.client_id or 'http'}-{len(found.members)}"
        found.members[member_id] = wish
        return MemberAnswer(member_id, found.generation, [(wish.topics[0], 0)])

    async def heartbeat(self, group: str, member_id: str, generation: int | None) -> MemberAnswer:
        found = self._member(group, member_id)
        topic = found.members[member_id].topics[0]
        return MemberAnswer(member_id, found.generation, [(topic, 0)], self.revoked)

    async def leave(self, group: str, member_id: str) -> bool:
        return self._group(group).members.pop(member_id, None) is not None

    async def poll(self, group: str, member_id: str, ask: Ask) -> list[Delivered]:
        found = self._member(group, member_id)
        async with self.polled:
            self.asked.append(ask)
            self.polled.notify_all()
        if not self.ready and ask.wait_ms:
            try:
                async with asyncio.timeout(ask.wait_ms / 1000):
                    await self.arrived.wait()
            except TimeoutError:
                return []
        delivered: list[Delivered] = []
        while self.ready and len(delivered) < ask.records_max:
            topic, partition, record = self.ready.pop(0)
            receipt = None
            if found.members[member_id].mode == "queue":
                self._nonce += 1
                nonce = (group_tag(group) << TAG_SHIFT) + self._nonce
                receipt = ReceiptText(topic, partition, record.offset, 1, nonce)
                found.leased[nonce] = (topic, partition, record.offset)
            delivered.append(Delivered(topic, partition, record, receipt))
        return delivered

    async def give_back(self, group: str, delivered: Sequence[Delivered]) -> None:
        self.returned += delivered
        self.gave_back.set()

    async def until_polled(self, count: int) -> None:
        async with self.polled:
            await self.polled.wait_for(lambda: len(self.asked) >= count)

    async def stored_offsets(self, group: str, topics: Sequence[str] | None) -> Offsets:
        offsets = self._group(group).offsets
        return {one: parts for one, parts in offsets.items() if topics is None or one in topics}

    async def store_offsets(self, group: str, member_id: str, offsets: Offsets) -> None:
        self._enter()
        found = self.groups.setdefault(group, FakeGroup())
        if member_id and member_id not in found.members:
            raise FencedGeneration(f"no member {member_id!r}")
        for topic, parts in offsets.items():
            found.offsets.setdefault(topic, {}).update(parts)

    async def reset(
        self, group: str, topic: TopicState, partition: int | None, to: Reset
    ) -> Mapping[int, int]:
        self._enter()
        self.resets.append(to)
        every = range(len(topic.partitions)) if partition is None else [partition]
        return dict.fromkeys(every, to if isinstance(to, int) else 0)

    async def settle(self, settlement: SettleCall) -> list[Settled | RaftqError]:
        self._enter()
        self.settlements.append(settlement)
        return [self._settle(settlement, one) for one in settlement.receipts]

    def _settle(self, settlement: SettleCall, receipt: ReceiptText) -> Settled | RaftqError:
        if receipt.offset in self.settle_errors:
            return self.settle_errors[receipt.offset]
        named = settlement.group
        groups = [name for name in self.groups if receipt.is_of(name) and named in (None, name)]
        if not groups:
            return LeaseForeign("of another group")
        found = self.groups[groups[0]]
        if receipt.nonce in found.settled:
            return AlreadySettled("settled before")
        if receipt.nonce not in found.leased:
            return LeaseExpired("its time ran out")
        next_visible = 1_700_000_005_000 if settlement.verb in ("nack", "extend") else 0
        if settlement.verb != "extend":
            del found.leased[receipt.nonce]
            found.settled[receipt.nonce] = None
        dead = settlement.verb == "reject"
        return Settled(receipt.offset + 1, len(found.leased), dead, next_visible)

    async def delayed(self, topic: TopicState, skip: int, limit: int) -> tuple[list[Waiting], int]:
        self._enter()
        found = sorted(self.waiting.get(topic.name, []))
        return found[skip : skip + limit], len(found)

    async def find_delayed(
        self, topic: TopicState, partition: int | None, offset: int
    ) -> Waiting | None:
        self._enter()
        for one in self.waiting.get(topic.name, []):
            if one.offset == offset and partition in (None, one.partition):
                return one
        return None

    async def cancel_delayed(self, topic: TopicState, partition: int, offset: int) -> bool:
        found = await self.find_delayed(topic, partition, offset)
        if found is not None:
            self.waiting[topic.name].remove(found)
        return found is not None

    async def delay_totals(self, topics: Sequence[TopicState]) -> DelaySums:
        self._enter()
        return self.delays

    async def letters(
        self, topic: TopicState, which: Filter, cursor: Cursor, limit: int
    ) -> Letters:
        self._enter()
        self.filters.append(which)
        found = [one for one in self.dead.get(topic.name, []) if (one[0], one[1].offset) >= cursor]
        more = found[limit] if len(found) > limit else None
        return Letters(found[:limit], None if more is None else Cursor(more[0], more[1].offset))

    async def redrive(
        self, topic: TopicState, which: Filter, limit: int, rate: float | None
    ) -> Swept:
        return await self.purge(topic, which, limit)

    async def purge(self, topic: TopicState, which: Filter, limit: int) -> Swept:
        self._enter()
        self.filters.append(which)
        return Swept(min(limit, len(self.dead.get(topic.name, []))), self.complete)

    async def queue_totals(self, topics: Sequence[TopicState]) -> QueueTotals:
        self._enter()
        return self.totals

    async def close(self) -> None:
        """Nothing to close."""
