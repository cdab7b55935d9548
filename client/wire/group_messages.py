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

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

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
from raftq.client.wire.schema import Items, WireStruct

Mode = Literal["stream", "queue"]
GROUPS_TOPIC = "__groups"


@register
class FindCoordinatorReply(WireMessage, frozen=True):
    """None: there is none at the moment, ask again."""

    kind: ClassVar[int] = 102

    node_id: NodeId | None
    host: Name = ""
    port: U16 = 0


@register
class FindCoordinator(Request[FindCoordinatorReply], frozen=True):
    kind: ClassVar[int] = 101

    group: Name


class Owned(WireStruct, frozen=True):
    topic: Name
    partition: U31


class GivenPartition(WireStruct, frozen=True):
    """A partition that the member may own, since the generation `owner_epoch`."""

    topic: Name
    partition: U31
    owner_epoch: Offset


@register
class GroupHeartbeatReply(WireMessage, frozen=True):
    """`assigned` is what the member may own now: all else it has to revoke and then leave out of
    `owned`. `pending`: more will come once others have let go, so ask again soon. Fenced members
    get FencedGeneration and have to join anew."""

    kind: ClassVar[int] = 104

    member_id: Name
    member_epoch: Offset
    generation: Offset
    assigned: Items[GivenPartition] = ()
    pending: bool = False
    heartbeat_ms: WaitMs = 3_000


@register
class GroupHeartbeat(Request[GroupHeartbeatReply], frozen=True):
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
    topics: Annotated[tuple[Name, ...], Meta(max_length=1000)] = ()
    pattern: Annotated[str, Meta(max_length=1024)] = ""
    owned: Items[Owned] = ()
    session_ms: WaitMs = 30_000
    instance_id: Name = ""
    client_id: Name = ""
    wait_ms: WaitMs = 0
    fenced_by: Offset = 0


@register
class LeaveGroupReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 106

    left: bool


@register
class LeaveGroup(Request[LeaveGroupReply], frozen=True):
    kind: ClassVar[int] = 105

    group: Name
    member_id: Name
    member_epoch: Offset = 0
    """0: whichever process is the member now."""


class GroupSummary(WireStruct, frozen=True):
    group: Name
    state: Literal["empty", "rebalancing", "stable"]
    mode: Mode
    members: U31
    generation: Offset


@register
class ListGroupsReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 108

    groups: Items[GroupSummary]


@register
class ListGroups(Request[ListGroupsReply], frozen=True):
    kind: ClassVar[int] = 107


class MemberInfo(WireStruct, frozen=True):
    member_id: Name
    client_id: Name
    instance_id: Name
    host: Name
    topics: Annotated[tuple[Name, ...], Meta(max_length=1000)]
    assigned: Items[GivenPartition]
    heartbeat_age_ms: I64 = 0
    session_ms: WaitMs = 0


@register
class DescribeGroupReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 110

    group: Name
    state: Literal["empty", "rebalancing", "stable"]
    mode: Mode
    generation: Offset
    members: Items[MemberInfo] = ()
    coordinator: NodeId | None = None
    topics: Items[Name] = ()


@register
class DescribeGroup(Request[DescribeGroupReply], frozen=True):
    """UnknownGroup when no member ever joined it, or it was deleted."""

    kind: ClassVar[int] = 109

    group: Name


@register
class DeleteGroupReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 112


@register
class DeleteGroup(Request[DeleteGroupReply], frozen=True):
    """Forgets an empty group; one with members is refused. What partitions know of it is deleted
    by the caller, partition by partition."""

    kind: ClassVar[int] = 111

    group: Name
