"""Shell: members of groups without a live object: every call names its group and its member.

    members = StatelessMembers("127.0.0.1:7070")
    member = await members.join("emails", ["orders"])
    for record in await members.poll("emails", member.member_id, timeout=1.0):
        ...

The calls of one member may come through different processes. The coordinator knows the members;
this client only remembers what saves a question (`_Known`), and asks again when it has nothing. A
member without an instance has the epoch 1 for all its life. A heartbeat with a generation says that
the member has let go of everything that was revoked in it, so a heartbeat needs nothing that only
another process knows. A poll counts as a heartbeat, also while it waits.

A stream poll reads from the stored offsets on: without a commit the next poll brings the same
records again. A queue poll leases records (one_shot.py).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from raftq.client.common.errors import (
    FencedGeneration,
    NotLeader,
    OffsetOutOfRange,
    RaftqError,
    UnknownTopic,
)
from raftq.client.common.tasks import sleep
from raftq.client.common.times import milliseconds
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.pages import Pages, Position
from raftq.client.consumer.stored_offsets import OUTSIDE, Offsets, first_error, read_stored
from raftq.client.net.client import Client
from raftq.client.net.coordinator import CoordinatorClient
from raftq.client.net.leaders import Leaders
from raftq.client.options import Address, Bootstrap, ClientOptions
from raftq.client.queue.leased import LeasedRecord, Receipt, receipt_of
from raftq.client.queue.one_shot import LeaseWish, OneShots, Settled
from raftq.client.queue.settling import Settlement
from raftq.client.results import Record
from raftq.client.wire.group_messages import (
    DescribeGroup,
    GivenPartition,
    GroupHeartbeat,
    GroupHeartbeatReply,
    LeaveGroup,
    Mode,
)
from raftq.client.wire.messages import Fetch, FetchPartition, Request, WireMessage
from raftq.client.wire.queue_messages import ReadOffset, ReadOffsets, StoredOffset

MEMBERS_MAX = 10_000  # remembered; the ones that were not used for longest are forgotten first
GROUPS_MAX = 1_000  # whose coordinators are remembered
MEMBER_EPOCH = 1
FIRST_WAIT_MS = 1_500  # for the first assignment of a member that joins a stream
SLICE_MS = 10_000  # a poll that waits sends a heartbeat at least so often
ROUND_S = 0.1  # the rounds of a poll that waits follow each other no faster
EMPTY_S = 0.5  # until a member without partitions is looked at again
ANSWER_S = 5.0  # beyond the wait that a leader was asked for
CLIENT_CHARACTERS_MAX = 200

R = TypeVar("R", bound=WireMessage)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatelessOptions(ClientOptions):
    """Settings of StatelessMembers."""

    timeout_ms: int = 12_000
    """For a call with all its attempts, beyond the time that a poll waits."""
    poll_bytes: int = 8 * 1024 * 1024
    """Of the records of one poll; a single larger record comes alone."""


@dataclass(slots=True)
class MemberState:
    """What a member learns from a join or a heartbeat.

    `pending`: more will be assigned once other members have let go of it.
    """

    member_id: str
    generation: int
    assigned: list[PartitionKey]
    revoked: list[PartitionKey] = field(default_factory=list)
    pending: bool = False


@dataclass(slots=True)
class _Known:
    """What is remembered of a member."""

    member_id: str
    mode: Mode
    topics: tuple[str, ...]
    session_ms: int
    generation: int = 0
    assigned: dict[PartitionKey, int] = field(default_factory=dict)  # with the owner epochs
    pending: bool = False
    fenced_by: int = 0  # the highest owner epoch by which a partition refused it
    turn: int = 0  # counts polls, so that each begins at another partition


class StatelessMembers(Client):
    """Members of any groups, by their ids. Calls may overlap."""

    def __init__(self, bootstrap: Bootstrap, options: StatelessOptions | None = None) -> None:
        self.options = options or StatelessOptions()
        super().__init__(bootstrap, self.options, "stateless member")
        self._timeout_s = self.options.timeout_ms / 1000
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._coordinators: OrderedDict[str, CoordinatorClient] = OrderedDict()
        self._leaders: Leaders
        self._pages: Pages
        self._one_shots: OneShots

    def _on_start(self) -> None:
        self._leaders = Leaders(self._routes, self._pool, self.options)
        self._pages = Pages(self._leaders, self._pool, self.options)
        self._one_shots = OneShots(
            self._leaders, self._pool, self._tasks, self.options, self._timeout_s
        )

    # Membership.

    async def join(
        self,
        group: str,
        topics: Sequence[str],
        *,
        mode: Mode = "queue",
        session_ms: int = 30_000,
        client_id: str = "",
    ) -> MemberState:
        """Become a member. Membership ends after `session_ms` without a heartbeat or a poll."""
        name = client_id[:CLIENT_CHARACTERS_MAX] or "http"
        # Chosen here, so that a join that is repeated does not make two members.
        member_id = f"{name}-{self.options.rng.getrandbits(64):016x}"
        request = GroupHeartbeat(
            group,
            member_id,
            mode=mode,
            topics=tuple(topics),
            session_ms=session_ms,
            client_id=client_id,
        )
        reply = await self._coordinate(group, request)
        member = _Known(reply.member_id, mode, tuple(topics), session_ms)
        self._keep(group, member)
        _learn(member, reply)
        if mode == "stream" and not reply.assigned:
            await self._beat(group, member, 0, FIRST_WAIT_MS)
        return await self._state(member, [])

    async def heartbeat(
        self, group: str, member_id: str, generation: int | None = None
    ) -> MemberState:
        """Stay a member. With a generation the member says that it has let go of everything that
        was revoked in it. FencedGeneration when the group does not have the member any more."""
        member = await self._get(group, member_id)
        before = list(member.assigned)
        await self._beat(group, member, member.generation if generation is None else generation)
        return await self._state(member, [key for key in before if key not in member.assigned])

    async def leave(self, group: str, member_id: str) -> bool:
        """Be a member no longer; whether it was one."""
        self._known.pop((group, member_id), None)
        return (await self._coordinate(group, LeaveGroup(group, member_id))).left

    async def _state(self, member: _Known, revoked: list[PartitionKey]) -> MemberState:
        keys = await self._keys(member)
        return MemberState(member.member_id, member.generation, keys, revoked, member.pending)

    async def _keys(self, member: _Known) -> list[PartitionKey]:
        """What the member may read: its own partitions of a stream, all partitions of a queue."""
        if member.mode == "stream":
            return sorted(member.assigned)
        self._routes.want(member.topics)
        keys: list[PartitionKey] = []
        for topic in member.topics:
            if self._routes.is_missing(topic, self._loop.time()):
                continue
            try:
                info = await self._routes.topic(topic)
            except UnknownTopic:
                continue
            keys += [(topic, number) for number in range(len(info.partitions))]
        return keys

    # Polls.

    async def poll(
        self,
        group: str,
        member_id: str,
        max_records: int = 100,
        timeout: float = 1.0,  # noqa: ASYNC109 - as in the other clients
        visibility_timeout: float | None = None,
    ) -> Sequence[Record | LeasedRecord]:
        """Records for a member: leased ones in a queue group, plain ones in a stream group. It
        waits for the first records; [] when none comes in time."""
        member = await self._get(group, member_id)
        lease_ms = 0
        if visibility_timeout is not None:
            lease_ms = milliseconds(visibility_timeout, "visibility_timeout")
        wish = LeaseWish(group, member_id, max_records, self.options.poll_bytes, lease_ms)
        deadline = self._loop.time() + timeout
        while True:
            began = self._loop.time()
            await self._beat(group, member, member.generation)
            left_ms = max(0, int((deadline - self._loop.time()) * 1000))
            wait_ms = min(left_ms, SLICE_MS, member.session_ms // 3)
            try:
                found = await self._poll(member, wish, wait_ms)
            except NotLeader:
                if self._loop.time() >= deadline:
                    raise
                found = []
            now = self._loop.time()
            if found or now >= deadline:
                return found
            # A leader that moved ended the wait early: it takes a moment until there is another.
            await sleep(min(max(began + ROUND_S - now, 0.0), deadline - now))

    async def _poll(
        self, member: _Known, wish: LeaseWish, wait_ms: int
    ) -> Sequence[Record | LeasedRecord]:
        keys = await self._keys(member)
        if not keys:
            await sleep(min(wait_ms / 1000, EMPTY_S))
            return []
        member.turn += 1
        first = member.turn % len(keys)
        keys = keys[first:] + keys[:first]
        if member.mode == "queue":
            return await self._one_shots.lease(wish, await self._by_leader(keys), wait_ms)
        owned = {key: member.assigned[key] for key in keys}
        try:
            return await self._read(wish, owned, wait_ms)
        except FencedGeneration as error:
            epoch = error.details.get("owner_epoch")
            if isinstance(epoch, int):
                member.fenced_by = max(member.fenced_by, epoch)
            raise

    async def _read(
        self, wish: LeaseWish, owned: Mapping[PartitionKey, int], wait_ms: int
    ) -> list[Record]:
        """Records of a stream, in the order of `owned`."""

        def build(keys: list[PartitionKey]) -> ReadOffsets:
            rows = tuple(ReadOffset(*key, owned[key]) for key in keys)
            return ReadOffsets(wish.group, wish.holder, rows)

        stored = await self._leaders.ask_each(list(owned), build, read_stored, self._timeout_s)
        found: list[Record] = []
        room = wish.bytes_max
        ends: dict[PartitionKey, int] = {}
        for key in owned:
            one = stored[key]
            if isinstance(one, RaftqError):
                if not one.retriable:
                    raise one
                continue
            ends[key] = one.high_watermark
            left = wish.records_max - len(found)
            if _start(one) < one.high_watermark and left > 0 and room > 0:
                part = await self._page(key, _start(one), (left, room))
                found += part
                room -= sum(len(record.value) for record in part)
        if found or not ends or not wait_ms:
            return found
        await self._wait(ends, wait_ms)
        return await self._read(wish, owned, 0)

    async def _page(self, key: PartitionKey, offset: int, size: tuple[int, int]) -> list[Record]:
        try:
            return (await self._pages.read(key, Position(offset), size, self._timeout_s)).records
        except OffsetOutOfRange:
            # Retention was faster than this poll; the next poll begins at what is kept.
            return []

    async def _wait(self, ends: Mapping[PartitionKey, int], wait_ms: int) -> None:
        """Wait until one of these partitions has more, or the time is over."""
        leaders = await self._by_leader(ends)
        parked = [
            self._tasks.spawn(self._park(address, keys, ends, wait_ms))
            for address, keys in leaders.items()
        ]
        try:
            await asyncio.wait(parked, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in parked:
                task.cancel()

    async def _park(
        self,
        address: Address,
        keys: Sequence[PartitionKey],
        ends: Mapping[PartitionKey, int],
        wait_ms: int,
    ) -> None:
        wanted = tuple(FetchPartition(*key, ends[key], 1) for key in keys)
        try:
            connection = await self._pool.get(address)
            timeout_s = wait_ms / 1000 + ANSWER_S
            await connection.request(Fetch(wanted, wait_ms), timeout_s=timeout_s)
        except RaftqError as error:
            for key in keys:
                self._leaders.learn(key, error)

    async def _by_leader(self, keys: Iterable[PartitionKey]) -> dict[Address, list[PartitionKey]]:
        """Partitions by the addresses of their leaders, without those that have none. NotLeader
        when no partition has a leader."""
        found: dict[Address, list[PartitionKey]] = {}
        without: PartitionKey | None = None
        for key in keys:
            await self._routes.topic(key[0])
            leader = self._routes.leader(*key)
            if leader is None:
                without = key
            else:
                found.setdefault(leader[1], []).append(key)
        if without is not None:
            self._routes.request_refresh()
            if not found:
                raise NotLeader(f"no leader is known for {without[0]}/{without[1]}")
        return found

    # Settling and committing.

    async def settle(
        self, group: str, receipts: Sequence[Receipt], said: Settlement
    ) -> list[Settled | RaftqError]:
        """Say the same about each of these receipts: one result per receipt, in order."""
        self._ensure_started()
        return await self._one_shots.settle(group, receipts, said)

    async def give_back(self, group: str, records: Iterable[Record | LeasedRecord]) -> None:
        """Give back leased records that did not reach the caller: they are delivered again at once,
        and no attempt is spent. The rest comes again when its lease ends."""
        receipts = [receipt_of(record) for record in records if isinstance(record, LeasedRecord)]
        await self.settle(group, receipts, Settlement("release"))

    async def commit(self, group: str, member_id: str, offsets: Mapping[PartitionKey, int]) -> None:
        """Store where the group goes on. An empty member id stores from outside, which is refused
        where a member owns the partition. FencedGeneration when this member does not own it."""
        self._ensure_started()
        if not member_id:
            error = await self._store(group, "", offsets, dict.fromkeys(offsets, OUTSIDE))
        else:
            member = await self._get(group, member_id)
            error = await self._store(group, member_id, offsets, member.assigned)
            if isinstance(error, FencedGeneration):
                # What is remembered may be old: the coordinator knows.
                member.assigned = (await self._ask(group, member_id)).assigned
                error = await self._store(group, member_id, offsets, member.assigned)
        if error is not None:
            raise error

    async def _store(
        self,
        group: str,
        member_id: str,
        offsets: Mapping[PartitionKey, int],
        epochs: Mapping[PartitionKey, int],
    ) -> RaftqError | None:
        for topic, number in offsets:
            if (topic, number) not in epochs:
                return FencedGeneration(
                    f"offsets.{topic}.{number}: member {member_id!r} does not own the partition"
                )
        own = Offsets(group, self._leaders)
        return first_error(await own.store(offsets, epochs, member_id, self._timeout_s))

    # What is known of members.

    async def _coordinate(self, group: str, request: Request[R]) -> R:
        self._ensure_started()
        found = self._coordinators.get(group)
        if found is None:
            found = CoordinatorClient(group, self._routes, self._pool, self.options)
            self._coordinators[group] = found
            if len(self._coordinators) > GROUPS_MAX:
                self._coordinators.popitem(last=False)
        self._coordinators.move_to_end(group)
        return await found.ask(request, self._timeout_s)

    async def _get(self, group: str, member_id: str) -> _Known:
        """What is remembered of a member; the coordinator is asked when nothing is."""
        self._ensure_started()
        member = self._known.get((group, member_id))
        if member is None:
            member = await self._ask(group, member_id)
            self._keep(group, member)
        else:
            self._known.move_to_end((group, member_id))
        return member

    async def _ask(self, group: str, member_id: str) -> _Known:
        found = await self._coordinate(group, DescribeGroup(group))
        for member in found.members:
            if member.member_id == member_id:
                assigned = _assigned(member.assigned)
                return _Known(member_id, found.mode, member.topics, member.session_ms, 0, assigned)
        raise FencedGeneration(
            f"group {group!r} has no member {member_id!r}: its session ended, or it never joined"
        )

    async def _beat(self, group: str, member: _Known, generation: int, wait_ms: int = 0) -> None:
        request = GroupHeartbeat(
            group,
            member.member_id,
            MEMBER_EPOCH,
            generation,
            member.mode,
            session_ms=member.session_ms,
            wait_ms=wait_ms,
            fenced_by=member.fenced_by,
        )
        try:
            _learn(member, await self._coordinate(group, request))
        except FencedGeneration:
            self._known.pop((group, member.member_id), None)
            raise

    def _keep(self, group: str, member: _Known) -> None:
        self._known[group, member.member_id] = member
        self._known.move_to_end((group, member.member_id))
        if len(self._known) > MEMBERS_MAX:
            self._known.popitem(last=False)


def _learn(member: _Known, reply: GroupHeartbeatReply) -> None:
    if reply.generation >= member.generation:
        member.generation = reply.generation
        member.assigned = _assigned(reply.assigned)
        member.pending = reply.pending


def _assigned(given: tuple[GivenPartition, ...]) -> dict[PartitionKey, int]:
    return {(partition.topic, partition.partition): partition.owner_epoch for partition in given}


def _start(one: StoredOffset) -> int:
    """Where to read: nothing stored means the first record kept, and so does what is gone."""
    return min(max(one.offset, one.start_offset), max(one.high_watermark, one.start_offset))
