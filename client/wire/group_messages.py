"""What members of a group and tools say to the group's coordinator. (Pure.)

    kind  request           reply
    101   FindCoordinator   FindCoordinatorReply      any node
    103   GroupHeartbeat    GroupHeartbeatReply       joins, stays, and learns what it may own
    105   LeaveGroup        LeaveGroupReply
    107   ListGroups        ListGroupsReply           any node, about the groups it coordinates
    109   DescribeGroup     DescribeGroupReply
    111   DeleteGroup       DeleteGroupReply

The coordinator of a group leads the partition of `__groups` that the group's name hashes to. A node
that does not answers NotLeader with the leader in its details.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from raftq.client.wire.messages import (
    I64,
    U16,
    U31,
    Name,
    NodeId,
    Offset,
    Request,
    WaitMs,
    WireMessage,
    register,
)
from raftq.client.wire.schema import ITEMS_MAX, Most

Mode = Literal["stream", "queue"]
GROUPS_TOPIC = "__groups"


@register
@dataclass(frozen=True, slots=True)
class FindCoordinatorReply(WireMessage):
    """None: nobody at the moment, ask again."""

    kind: ClassVar[int] = 102

    node_id: NodeId | None
    host: Name = ""
    port: U16 = 0


@register
@dataclass(frozen=True, slots=True)
class FindCoordinator(Request[FindCoordinatorReply]):
    kind: ClassVar[int] = 101

    group: Name


@dataclass(frozen=True, slots=True)
class Owned:
    topic: Name
    partition: U31


@dataclass(frozen=True, slots=True)
class GivenPartition:
    """A partition that the member may own, since the generation `owner_epoch`."""

    topic: Name
    partition: U31
    owner_epoch: Offset


@register
@dataclass(frozen=True, slots=True)
class GroupHeartbeatReply(WireMessage):
    """`assigned` is what the member may own now: all else it has to revoke and then leave out of
    `owned`. `pending`: more will come once others have let go, so ask again soon. Fenced members
    get FencedGeneration and have to join anew."""

    kind: ClassVar[int] = 104

    member_id: Name
    member_epoch: Offset
    generation: Offset
    assigned: Annotated[tuple[GivenPartition, ...], Most(ITEMS_MAX)] = ()
    pending: bool = False
    heartbeat_ms: WaitMs = 3_000


@register
@dataclass(frozen=True, slots=True)
class GroupHeartbeat(Request[GroupHeartbeatReply]):
    """An empty `member_id` or a `member_epoch` of 0 joins. A member that chose its id, at random,
    may ask again when the answer was lost, and is the same member; the coordinator chooses the id
    of one that did not, and an `instance_id` that is known keeps the id it has.

    `topics` and `pattern` (a regular expression that a whole topic name has to match) say what the
    member wants; `owned` what it has now; `generation` the one of the last answer that it took in.
    `fenced_by` is an owner epoch by which a partition refused this member, if it is above that
    generation: then the group has forgotten generations, and goes on above it.
    `wait_ms`: the coordinator may keep the request for so long while there is no news for this
    member."""

    kind: ClassVar[int] = 103

    group: Name
    member_id: Name = ""
    member_epoch: Offset = 0
    generation: Offset = 0
    mode: Mode = "stream"
    topics: Annotated[tuple[Name, ...], Most(1000)] = ()
    pattern: Annotated[str, Most(1024)] = ""
    owned: Annotated[tuple[Owned, ...], Most(ITEMS_MAX)] = ()
    session_ms: WaitMs = 30_000
    instance_id: Name = ""
    client_id: Name = ""
    wait_ms: WaitMs = 0
    fenced_by: Offset = 0


@register
@dataclass(frozen=True, slots=True)
class LeaveGroupReply(WireMessage):
    kind: ClassVar[int] = 106

    left: bool


@register
@dataclass(frozen=True, slots=True)
class LeaveGroup(Request[LeaveGroupReply]):
    kind: ClassVar[int] = 105

    group: Name
    member_id: Name
    member_epoch: Offset = 0
    """0: whichever process is the member now."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    group: Name
    state: Literal["empty", "rebalancing", "stable"]
    mode: Mode
    members: U31
    generation: Offset


@register
@dataclass(frozen=True, slots=True)
class ListGroupsReply(WireMessage):
    kind: ClassVar[int] = 108

    groups: Annotated[tuple[GroupSummary, ...], Most(ITEMS_MAX)]


@register
@dataclass(frozen=True, slots=True)
class ListGroups(Request[ListGroupsReply]):
    kind: ClassVar[int] = 107


@dataclass(frozen=True, slots=True)
class MemberInfo:
    member_id: Name
    client_id: Name
    instance_id: Name
    host: Name
    topics: Annotated[tuple[Name, ...], Most(1000)]
    assigned: Annotated[tuple[GivenPartition, ...], Most(ITEMS_MAX)]
    heartbeat_age_ms: I64 = 0
    session_ms: WaitMs = 0


@register
@dataclass(frozen=True, slots=True)
class DescribeGroupReply(WireMessage):
    kind: ClassVar[int] = 110

    group: Name
    state: Literal["empty", "rebalancing", "stable"]
    mode: Mode
    generation: Offset
    members: Annotated[tuple[MemberInfo, ...], Most(ITEMS_MAX)] = ()
    coordinator: NodeId | None = None
    topics: Annotated[tuple[Name, ...], Most(ITEMS_MAX)] = ()


@register
@dataclass(frozen=True, slots=True)
class DescribeGroup(Request[DescribeGroupReply]):
    """UnknownGroup when nobody ever joined it, or it was deleted."""

    kind: ClassVar[int] = 109

    group: Name


@register
@dataclass(frozen=True, slots=True)
class DeleteGroupReply(WireMessage):
    kind: ClassVar[int] = 112


@register
@dataclass(frozen=True, slots=True)
class DeleteGroup(Request[DeleteGroupReply]):
    """Forgets an empty group; one with members is refused. What partitions know of it is deleted
    by the caller, partition by partition."""

    kind: ClassVar[int] = 111

    group: Name
