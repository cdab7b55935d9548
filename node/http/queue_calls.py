"""Groups, queues, delays and dead letters over the client library. (Shell.)"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from heapq import merge
from itertools import islice

from raftq.client.admin.admin import Admin
from raftq.client.admin.results import GroupDescription
from raftq.client.common.errors import (
    FencedGeneration,
    NotLeader,
    RaftqError,
)
from raftq.client.common.tasks import sleep
from raftq.client.options import Bootstrap, ClientOptions
from raftq.client.wire.queue_messages import (
    CancelDelayed,
    DelayStats,
    DescribeQueue,
    ListDelayed,
    ListDelayedReply,
    StoredOffset,
    StoreOffset,
    StoreOffsets,
    StoreOffsetsReply,
)
from raftq.cluster.metadata.state import ClusterState, TopicState
from raftq.node.http.cluster_calls import ClusterCalls
from raftq.node.http.leasing import Leases
from raftq.node.http.members import Known, Members
from raftq.node.http.queue_gateway import (
    Ask,
    Cursor,
    DelaySums,
    Delivered,
    Filter,
    Letters,
    MemberAnswer,
    Offsets,
    PartitionName,
    QueueTotals,
    Reset,
    SettleCall,
    Settled,
    Swept,
    Waiting,
    Wish,
)
from raftq.node.http.reader import PageReader
from raftq.node.http.settlements import Settlements
from raftq.node.http.streaming import Streams
from raftq.node.http.sweeps import Sweeps
from raftq.node.metrics.node_status import NodeFacts

CALL_S = 12.0
SLICE_MS = 10_000
"""A poll that waits looks at its membership so often, at least three times a session."""
ROUND_S = 0.1
"""Rounds of a poll that waits follow each other no faster."""
STATS_S = 3.0
"""For one partition; without an answer it is counted as missing."""
EMPTY_S = 0.5
"""Before a member to which nothing is assigned is looked at again."""
INTERNAL_PREFIX = "__"
DEAD_LETTER_SUFFIX = ".dlq"
LETTERS_GROUP = "__dlq"


class QueueCalls:
    """A Queues. Belongs to one event loop."""

    def __init__(
        self,
        facts: NodeFacts,
        bootstrap: Bootstrap,
        options: ClientOptions,
        reader: PageReader,
        admin: Callable[[], Admin],
    ) -> None:
        self._facts = facts
        self._admin = admin
        self._calls = ClusterCalls(bootstrap, options, CALL_S)
        self._members = Members(self._calls)
        self._leases = Leases(self._calls)
        self._streams = Streams(self._calls, reader)
        self._settlements = Settlements(self._calls)
        self._sweeps = Sweeps(self._calls)

    async def close(self) -> None:
        await self._calls.close()

    @property
    def _state(self) -> ClusterState:
        return self._facts.metadata.state

    # Groups and their members.

    async def list_groups(self) -> list[str]:
        return [one.group for one in await self._admin().list_groups()]

    async def describe_group(self, group: str) -> GroupDescription:
        return await self._admin().describe_group(group)

    async def delete_group(self, group: str) -> None:
        await self._admin().delete_group(group)

    async def join(self, group: str, wish: Wish) -> MemberAnswer:
        return await self._told(group, await self._members.join(group, wish))

    async def heartbeat(self, group: str, member_id: str, generation: int | None) -> MemberAnswer:
        return await self._told(group, await self._members.heartbeat(group, member_id, generation))

    async def _told(self, group: str, membership: MemberAnswer) -> MemberAnswer:
        """Nobody owns anything of a queue: all its members may lease from all partitions."""
        member = await self._members.get(group, membership.member_id)
        if member.mode == "queue":
            membership.assigned = self._names(member)
        return membership

    async def leave(self, group: str, member_id: str) -> bool:
        return await self._members.leave(group, member_id)

    # Polls.

    async def poll(self, group: str, member_id: str, ask: Ask) -> list[Delivered]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ask.wait_ms / 1000
        member = await self._members.get(group, member_id)
        while True:
            began = loop.time()
            await self._members.refresh(group, member)
            left_ms = max(0, int((deadline - loop.time()) * 1000))
            wait_ms = min(left_ms, SLICE_MS, member.session_ms // 3)
            try:
                found = await self._poll(group, member, ask, wait_ms)
            except NotLeader:
                if loop.time() >= deadline:
                    raise
                found = []
            now = loop.time()
            if found or now >= deadline:
                return found
            # Whatever ended the wait early (a leader that moved) takes a moment to get well.
            await sleep(min(max(began + ROUND_S - now, 0.0), deadline - now))

    async def _poll(self, group: str, member: Known, ask: Ask, wait_ms: int) -> list[Delivered]:
        part = Ask(
            records_max=ask.records_max,
            bytes_max=ask.bytes_max,
            wait_ms=wait_ms,
            lease_ms=ask.lease_ms,
        )
        names = self._names(member)
        if not names:
            await sleep(min(wait_ms / 1000, EMPTY_S))
            return []
        member.turn += 1
        first = member.turn % len(names)
        names = names[first:] + names[:first]
        if member.mode == "queue":
            return await self._leases.poll(group, member.member_id, names, part)
        owned = {name: member.assigned[name] for name in names}
        try:
            return await self._streams.poll(group, member.member_id, owned, part)
        except FencedGeneration as error:
            known = error.details.get("owner_epoch")
            if isinstance(known, int):
                member.fenced_by = max(member.fenced_by, known)
            raise

    def _names(self, member: Known) -> list[PartitionName]:
        """What the member may read: what it owns of a stream, everything of a queue."""
        if member.mode == "stream":
            return sorted(member.assigned)
        topics = [self._state.topics.get(name) for name in member.topics]
        return [
            (topic.name, at)
            for topic in topics
            if topic is not None
            for at in range(len(topic.partitions))
        ]

    async def give_back(self, group: str, delivered: Sequence[Delivered]) -> None:
        await self._leases.give_back(group, delivered)

    async def settle(self, settlement: SettleCall) -> list[Settled | RaftqError]:
        return await self._settlements.settle(settlement)

    # Offsets.

    async def stored_offsets(self, group: str, topics: Sequence[str] | None) -> Offsets:
        if topics is None:
            wanted = self._queued()
        else:
            wanted = [self._state.topics[name] for name in topics if name in self._state.topics]
        found = await self._calls.each_partition(
            [one for one in wanted if one.queued], lambda name: DescribeQueue(*name, group)
        )
        offsets: Offsets = {}
        for (topic, number), reply in found.items():
            if isinstance(reply, RaftqError):
                raise reply
            for one in reply.message.groups:
                if one.group == group:
                    # A queue's offset is how far everything is settled.
                    at = one.settled_offset if one.stored_offset < 0 else one.stored_offset
                    offsets.setdefault(topic, {})[number] = at
        return offsets

    async def store_offsets(self, group: str, member_id: str, offsets: Offsets) -> None:
        flat = {(topic, at): to for topic, parts in offsets.items() for at, to in parts.items()}
        for fresh in (False, True):
            epochs = dict.fromkeys(flat, -1)
            if member_id:
                owned = await self._members.owner_epochs(group, member_id, fresh)
                lost = [name for name in flat if name not in owned]
                if lost and not fresh:
                    continue
                if lost:
                    topic, at = lost[0]
                    raise FencedGeneration(
                        f"offsets.{topic}.{at}: member {member_id!r} does not own the partition"
                    )
                epochs = {name: owned[name] for name in flat}
            errors = await self._store(group, member_id, flat, epochs)
            fenced = any(isinstance(one, FencedGeneration) for one in errors)
            if not errors:
                return
            if fresh or not member_id or not fenced:
                raise errors[0]

    async def _store(
        self,
        group: str,
        member_id: str,
        flat: Mapping[PartitionName, int],
        epochs: Mapping[PartitionName, int],
    ) -> list[RaftqError]:
        def build(names: list[PartitionName]) -> StoreOffsets:
            rows = tuple(StoreOffset(*name, flat[name], epochs[name]) for name in names)
            return StoreOffsets(group, member_id, rows)

        found = await self._calls.ask_each(list(flat), build, _stored)
        return [one for one in found.values() if isinstance(one, RaftqError)]

    async def reset(
        self, group: str, topic: TopicState, partition: int | None, to: Reset
    ) -> Mapping[int, int]:
        return await self._admin().reset_group(group, topic.name, to, partition)

    # Delayed records.

    async def delayed(self, topic: TopicState, skip: int, limit: int) -> tuple[list[Waiting], int]:
        if not topic.queued:
            return [], 0
        found = await self._calls.each_partition(
            [topic], lambda name: ListDelayed(*name, 0, skip + limit)
        )
        lists: list[list[Waiting]] = []
        pending = 0
        for (_, number), reply in found.items():
            if isinstance(reply, RaftqError):
                raise reply
            pending += reply.message.pending
            lists.append(_waiting(number, reply.message))
        return list(islice(merge(*lists), skip, skip + limit)), pending

    async def find_delayed(
        self, topic: TopicState, partition: int | None, offset: int
    ) -> Waiting | None:
        if not topic.queued:
            return None
        if partition is not None:
            request = ListDelayed(topic.name, partition, 0, 1, offset)
            one = await self._calls.lead((topic.name, partition), request)
            return next(iter(_waiting(partition, one.message)), None)
        found = await self._calls.each_partition(
            [topic], lambda name: ListDelayed(*name, 0, 1, offset)
        )
        problem: RaftqError | None = None
        for (_, number), reply in found.items():
            if isinstance(reply, RaftqError):
                problem = reply
            elif here := _waiting(number, reply.message):
                return here[0]
        if problem is not None:
            raise problem
        return None

    async def cancel_delayed(self, topic: TopicState, partition: int, offset: int) -> bool:
        if not topic.queued:
            return False
        request = CancelDelayed(topic.name, partition, (offset,))
        reply = await self._calls.lead((topic.name, partition), request)
        return offset in reply.message.cancelled

    async def delay_totals(self, topics: Sequence[TopicState]) -> DelaySums:
        totals = DelaySums()
        found = await self._calls.each_partition(topics, lambda name: DelayStats(*name), STATS_S)
        for reply in found.values():
            if isinstance(reply, RaftqError):
                totals.missing += 1
                continue
            one = reply.message
            totals.pending += one.pending
            totals.fired += one.fired
            totals.cancelled += one.cancelled
            totals.delay_ms_sum += one.delay_ms_sum
        return totals

    # Dead letters.

    async def letters(
        self, topic: TopicState, which: Filter, cursor: Cursor, limit: int
    ) -> Letters:
        return await self._sweeps.browse(topic, which, cursor, limit)

    async def redrive(
        self, topic: TopicState, which: Filter, limit: int, rate: float | None
    ) -> Swept:
        return await self._sweeps.redrive(topic, which, limit, rate)

    async def purge(self, topic: TopicState, which: Filter, limit: int) -> Swept:
        return await self._sweeps.purge(topic, which, limit)

    # Figures.

    async def queue_totals(self, topics: Sequence[TopicState]) -> QueueTotals:
        totals = QueueTotals()
        found = await self._calls.each_partition(topics, lambda name: DescribeQueue(*name), STATS_S)
        for reply in found.values():
            if isinstance(reply, RaftqError):
                totals.missing += 1
                continue
            for group in reply.message.groups:
                totals.in_flight += group.in_flight
                for name, count in group.counters.items():
                    if type(count) is int:
                        totals.counters[name] = totals.counters.get(name, 0) + count
                _add(totals.lanes, group.lanes)
                _add(totals.lane_wait_ms, group.lane_wait_ms)
        totals.letters = await self._count_letters()
        return totals

    async def _count_letters(self) -> int:
        """Dead letters that are neither sent back nor forgotten."""
        topics = [one for one in self._queued() if one.name.endswith(DEAD_LETTER_SUFFIX)]
        found = await self._calls.each_partition(
            topics, lambda name: DescribeQueue(*name, LETTERS_GROUP), STATS_S
        )
        count = 0
        for reply in found.values():
            if isinstance(reply, RaftqError):
                continue
            one = reply.message
            gone = [group for group in one.groups if group.group == LETTERS_GROUP]
            kept = one.high_watermark - one.start_offset
            count += gone[0].unsettled if gone else kept
        return count

    def _queued(self) -> list[TopicState]:
        topics = self._state.topics.values()
        return [one for one in topics if one.queued and not one.name.startswith(INTERNAL_PREFIX)]


def _add(sums: list[int], more: Sequence[int]) -> None:
    for at, count in enumerate(more[: len(sums)]):
        sums[at] += count


def _waiting(partition: int, reply: ListDelayedReply) -> list[Waiting]:
    return [Waiting(one.deliver_at, partition, one.offset, one.priority) for one in reply.records]


def _stored(reply: StoreOffsetsReply) -> list[tuple[PartitionName, str, StoredOffset]]:
    return [((one.topic, one.partition), one.error, one) for one in reply.offsets]
