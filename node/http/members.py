"""Members of groups that speak HTTP: each request on its own, at whichever node. (Shell.)

The coordinator knows the members; this node keeps only what spares asking it (`_Known`), and asks
again when it has nothing. Members without an instance have the epoch 1 for all their life, and a
heartbeat with the generation that the member was told says that it has let go of everything that
was to be revoked then: so a heartbeat needs nothing that only another node would know.

A poll counts as a heartbeat, also while it waits, and asking for more means having let go, too.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from raftq.client.common.errors import FencedGeneration
from raftq.client.wire.group_messages import (
    DescribeGroup,
    DescribeGroupReply,
    GivenPartition,
    GroupHeartbeat,
    GroupHeartbeatReply,
    LeaveGroup,
    MemberInfo,
    Mode,
)
from raftq.node.http.cluster_calls import ClusterCalls
from raftq.node.http.queue_gateway import MemberAnswer, PartitionName, Wish

MEMBERS_MAX = 10_000
"""Of whom something is kept; those not heard of for longest are forgotten first."""
MEMBER_EPOCH = 1
FIRST_WAIT_MS = 1_500
"""For how long a member that joins a stream is kept until something is assigned to it."""


@dataclass(slots=True)
class Known:
    """What this node remembers of a member."""

    member_id: str
    mode: Mode
    topics: tuple[str, ...]
    session_ms: int
    generation: int = 0
    assigned: dict[PartitionName, int] = field(default_factory=dict)
    """With the owner epoch of each."""
    pending: bool = False
    fenced_by: int = 0
    """The highest owner epoch by which a partition refused it."""
    turn: int = 0
    """Counts polls, so that each begins at another partition."""


class Members:
    """See the module's docstring."""

    def __init__(self, client: ClusterCalls) -> None:
        self._client = client
        self._known: OrderedDict[tuple[str, str], Known] = OrderedDict()

    async def describe(self, group: str) -> DescribeGroupReply:
        return await self._client.coordinate(group, DescribeGroup(group))

    async def join(self, group: str, wish: Wish) -> MemberAnswer:
        request = GroupHeartbeat(
            group,
            self._client.new_member_id(wish.client_id),
            mode=wish.mode,
            topics=wish.topics,
            session_ms=wish.session_ms,
            client_id=wish.client_id,
        )
        reply = await self._client.coordinate(group, request)
        member = Known(reply.member_id, wish.mode, wish.topics, wish.session_ms)
        self._keep(group, member)
        self._learn(member, reply)
        if wish.mode == "stream" and not reply.assigned:
            await self._beat(group, member, 0, FIRST_WAIT_MS)
        return _membership(member, [])

    async def heartbeat(self, group: str, member_id: str, generation: int | None) -> MemberAnswer:
        member = await self.get(group, member_id)
        before = list(member.assigned)
        told = member.generation if generation is None else generation
        await self._beat(group, member, told)
        revoked = [name for name in before if name not in member.assigned]
        return _membership(member, revoked)

    async def leave(self, group: str, member_id: str) -> bool:
        self._known.pop((group, member_id), None)
        return (await self._client.coordinate(group, LeaveGroup(group, member_id))).left

    async def get(self, group: str, member_id: str) -> Known:
        """What is known of a member; the coordinator is asked if nothing is."""
        member = self._known.get((group, member_id))
        if member is None:
            member = await self._ask(group, member_id)
            self._keep(group, member)
        else:
            self._known.move_to_end((group, member_id))
        return member

    async def refresh(self, group: str, member: Known) -> None:
        """A heartbeat on the member's behalf, by which it has let go of what it was to."""
        await self._beat(group, member, member.generation)

    async def owner_epochs(
        self, group: str, member_id: str, fresh: bool
    ) -> dict[PartitionName, int]:
        """What the member owns; `fresh` asks the coordinator in any case."""
        member = await self.get(group, member_id)
        if fresh or not member.assigned:
            found = await self._ask(group, member_id)
            member.assigned = found.assigned
        return member.assigned

    async def _ask(self, group: str, member_id: str) -> Known:
        found = await self.describe(group)
        info = _find(found, member_id)
        topics, session_ms = info.topics, info.session_ms
        assigned = _assigned(info.assigned)
        return Known(member_id, found.mode, topics, session_ms, 0, assigned)

    async def _beat(self, group: str, member: Known, generation: int, wait_ms: int = 0) -> None:
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
            reply = await self._client.coordinate(group, request)
        except FencedGeneration:
            self._known.pop((group, member.member_id), None)
            raise
        self._learn(member, reply)

    def _learn(self, member: Known, reply: GroupHeartbeatReply) -> None:
        if reply.generation >= member.generation:
            member.generation = reply.generation
            member.assigned = _assigned(reply.assigned)
            member.pending = reply.pending

    def _keep(self, group: str, member: Known) -> None:
        self._known[group, member.member_id] = member
        self._known.move_to_end((group, member.member_id))
        if len(self._known) > MEMBERS_MAX:
            self._known.popitem(last=False)


def _find(found: DescribeGroupReply, member_id: str) -> MemberInfo:
    for one in found.members:
        if one.member_id == member_id:
            return one
    raise FencedGeneration(
        f"group {found.group!r} has no member {member_id!r}: its session ended, or it never joined"
    )


def _assigned(given: tuple[GivenPartition, ...]) -> dict[PartitionName, int]:
    return {(one.topic, one.partition): one.owner_epoch for one in given}


def _membership(member: Known, revoked: list[PartitionName]) -> MemberAnswer:
    return MemberAnswer(
        member.member_id, member.generation, list(member.assigned), revoked, member.pending
    )
