"""Shell: how the admin client reaches groups.

A group is known in two places: its coordinator has its members, and the leaders of the partitions
have its positions, leases and settled records. Groups that never had a member (of REST callers, or
of stored offsets alone) are known to the partitions only. Where the coordinator does not say which
topics a group reads, all topics are asked.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

from raftq.client.admin.requests import AdminRequests
from raftq.client.admin.results import GroupPartition
from raftq.client.common.errors import InvalidArgument, RaftqError, UnknownGroup, UnknownTopic
from raftq.client.common.names import is_internal
from raftq.client.common.types import PartitionKey
from raftq.client.wire.group_messages import (
    DescribeGroup,
    DescribeGroupReply,
    GroupSummary,
    ListGroups,
    Mode,
)
from raftq.client.wire.messages import NodeInfo
from raftq.client.wire.queue_messages import DescribeQueue, DescribeQueueReply, SteerGroup

ASK_S = 5.0

Steering = Literal["reset", "pause", "resume", "purge", "delete"]
ResetTo = Literal["earliest", "latest"] | int | datetime


async def groups_of(requests: AdminRequests, node: NodeInfo) -> list[GroupSummary] | RaftqError:
    """The groups that one node coordinates, or why it does not answer."""
    try:
        reply = await requests.ask_node((node.host, node.port), ListGroups(), ASK_S)
    except RaftqError as error:
        return error
    return list(reply.groups)


async def coordinated(requests: AdminRequests, group: str) -> DescribeGroupReply | None:
    """What the coordinator knows about a group. None when it knows nothing."""
    try:
        return await requests.ask_coordinator(group, DescribeGroup(group))
    except UnknownGroup:
        return None


async def partitions_of(
    requests: AdminRequests, group: str, topics: Iterable[str] = (), mode: Mode | None = None
) -> list[GroupPartition]:
    """The partitions that know a group, and all partitions of `topics`."""
    own = tuple(topics)
    asked = {
        key: DescribeQueue(*key, group)
        for key in await requests.keys(own or None)
        if not is_internal(key[0])
    }
    answers = await requests.ask_leaders(asked, UnknownTopic)
    return [
        _described(key, reply, mode)
        for key, reply in sorted(answers.items())
        if reply.groups or key[0] in own
    ]


async def keys_of(requests: AdminRequests, group: str, topic: str | None) -> list[PartitionKey]:
    """The partitions of one topic, or all partitions that a group has something to do with."""
    if topic is not None:
        return await requests.topic_keys(topic)
    found = [(part.topic, part.partition) for part in await partitions_of(requests, group)]
    known = await coordinated(requests, group)
    if known is not None and known.topics:
        found += await requests.keys(known.topics)
    if not found:
        raise UnknownGroup(f"no group is named {group!r}")
    return list(dict.fromkeys(found))


async def steer(
    requests: AdminRequests,
    group: str,
    keys: Iterable[PartitionKey],
    verb: Steering,
    done: type[RaftqError] | None = None,
) -> int:
    """Do the same to a group on each of these partitions. Returns the number of records."""
    answers = await requests.ask_leaders({key: SteerGroup(group, *key, verb) for key in keys}, done)
    return sum([reply.count for reply in answers.values()])


def _described(key: PartitionKey, reply: DescribeQueueReply, mode: Mode | None) -> GroupPartition:
    end = reply.high_watermark
    if not reply.groups:
        return GroupPartition(*key, None, end, end - reply.start_offset)
    one = reply.groups[0]
    position: int | None = one.settled_offset
    lag = one.unsettled
    if mode == "stream" or not one.counters:  # of readers
        position = one.stored_offset if one.stored_offset >= 0 else None
        lag = end - max(one.stored_offset, reply.start_offset)
    return GroupPartition(
        *key,
        position,
        end,
        max(lag, 0),
        one.member,
        one.in_flight,
        one.waiting,
        one.paused,
        dict(one.counters),
    )


def reset_point(to: ResetTo) -> tuple[Literal["earliest", "latest", "offset", "time"], int]:
    if to == "earliest":
        return "earliest", 0
    if to == "latest":
        return "latest", 0
    if isinstance(to, datetime):
        return "time", int(to.timestamp() * 1000)
    if type(to) is int and to >= 0:
        return "offset", to
    raise InvalidArgument(f"to is 'earliest', 'latest', an offset or a datetime, not {to!r}")
