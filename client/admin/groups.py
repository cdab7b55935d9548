"""Shell: the admin client's verbs about groups.

A group is known in two places: its coordinator has its members, and the leaders of the partitions
have its positions, leases and settled records. Groups that never had a member (of REST callers, or
of stored offsets alone) are known to the partitions only. Where the coordinator does not say which
topics a group reads, all are asked.
"""

import asyncio
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal, TypeVar

from raftq.client.admin.base import AdminBase, topic_info
from raftq.client.admin.results import GroupDescription, GroupPartition
from raftq.client.common.errors import (
    GroupNotEmpty,
    InvalidArgument,
    RaftqError,
    UnknownGroup,
    UnknownTopic,
)
from raftq.client.common.types import PartitionKey
from raftq.client.wire.group_messages import (
    DeleteGroup,
    DescribeGroup,
    DescribeGroupReply,
    GroupSummary,
    ListGroups,
    Mode,
)
from raftq.client.wire.messages import MetadataReply, NodeInfo, Request, WireMessage
from raftq.client.wire.queue_messages import DescribeQueue, DescribeQueueReply, SteerGroup

INTERNAL_PREFIX = "__"
ASK_S = 5.0

R = TypeVar("R", bound=WireMessage)
Steering = Literal["reset", "pause", "resume", "purge", "delete"]
ResetTo = Literal["earliest", "latest"] | int | datetime


class GroupAdmin(AdminBase):
    """Groups: list, describe, reset, pause, purge, delete."""

    async def list_groups(self) -> list[GroupSummary]:
        """The groups that have, or had, members; each node knows those it coordinates."""
        attempts = self._attempts("ListGroups")
        while True:
            nodes = [node for node in (await self.metadata(())).nodes if node.alive]
            found = await asyncio.gather(*[self._groups_of(node) for node in nodes])
            errors = [one for one in found if isinstance(one, RaftqError)]
            if not errors:
                break
            await attempts.failed(errors[0])
        groups = {one.group: one for some in found if isinstance(some, list) for one in some}
        return [groups[name] for name in sorted(groups)]

    async def _groups_of(self, node: NodeInfo) -> list[GroupSummary] | RaftqError:
        try:
            connection = await self._pool.get((node.host, node.port))
            reply = await connection.request(ListGroups(), timeout_s=ASK_S)
        except RaftqError as error:
            return error
        return list(reply.message.groups)

    async def describe_group(self, group: str) -> GroupDescription:
        """Members, and for each partition the position and the lag. UnknownGroup when nobody knows
        it."""
        told = await self._told(group)
        if told is None:
            parts = await self._partitions_of(group, None)
            if not parts:
                raise UnknownGroup(f"no group is named {group!r}")
            mode: Mode = "queue" if any(one.counters for one in parts) else "stream"
            return GroupDescription(group, "empty", mode, 0, None, (), tuple(parts))
        parts = await self._partitions_of(group, told.topics, told.mode)
        if told.mode == "stream":
            owners = {
                (given.topic, given.partition): member.member_id
                for member in told.members
                for given in member.assigned
            }
            parts = [_owned_by(one, owners.get((one.topic, one.partition), "")) for one in parts]
        return GroupDescription(
            group,
            told.state,
            told.mode,
            told.generation,
            told.coordinator,
            told.members,
            tuple(parts),
        )

    async def reset_group(
        self,
        group: str,
        topic: str,
        to: ResetTo = "earliest",
        partition: int | None = None,
        force: bool = False,
    ) -> dict[int, int]:
        """Let the group go on elsewhere: at an end, an offset, or a time (a datetime); where, by
        partition. Refused while the group has readers, who would store their positions over it,
        unless `force`."""
        told = await self._told(group)
        if told is not None and told.members and told.mode == "stream" and not force:
            raise GroupNotEmpty(f"group {group!r} has {len(told.members)} members that read")
        partition_key, at = _reset_to(to)
        requests = {
            key: SteerGroup(group, *key, "reset", partition_key, at)
            for key in await self._keys_in(topic, partition)
        }
        answers = await self._ask_all(requests)
        return {key[1]: reply.offset for key, reply in answers.items()}

    async def delete_group(self, group: str) -> None:
        """Forget a group, its positions and everything it settled. GroupNotEmpty while it has
        members."""
        parts = await self._partitions_of(group, None)
        known = True
        try:
            await self._coordinator(group).ask(DeleteGroup(group), self._timeout_s)
        except UnknownGroup:
            known = False
        if not known and not parts:
            raise UnknownGroup(f"no group is named {group!r}")
        keys = [(one.topic, one.partition) for one in parts]
        await self._steer(group, keys, "delete", UnknownGroup)

    async def pause_group(self, group: str, topic: str | None = None) -> None:
        """Lease nothing to this group until `resume_group`, in one topic or all that it has."""
        await self._steer(group, await self._keys_of(group, topic), "pause")

    async def resume_group(self, group: str, topic: str | None = None) -> None:
        await self._steer(group, await self._keys_of(group, topic), "resume")

    async def purge_group(self, group: str, topic: str | None = None) -> int:
        """Everything that is there now counts as settled for this group; how many records it was,
        as far as the group had not settled them."""
        return await self._steer(group, await self._keys_of(group, topic), "purge")

    # How.

    async def _told(self, group: str) -> DescribeGroupReply | None:
        """What the coordinator knows; None when nothing."""
        try:
            return await self._coordinator(group).ask(DescribeGroup(group), self._timeout_s)
        except UnknownGroup:
            return None

    async def _keys_of(self, group: str, topic: str | None) -> list[PartitionKey]:
        if topic is not None:
            return await self._keys_in(topic, None)
        found = [(one.topic, one.partition) for one in await self._partitions_of(group, None)]
        told = await self._told(group)
        if told is not None and told.topics:
            found += await self._keys(told.topics, None)
        if not found:
            raise UnknownGroup(f"no group is named {group!r}")
        return list(dict.fromkeys(found))

    async def _keys_in(self, topic: str, partition: int | None) -> list[PartitionKey]:
        topic_info(await self.metadata((topic,)), topic)
        return await self._keys((topic,), partition)

    async def _keys(
        self, topics: Iterable[str] | None, partition: int | None
    ) -> list[PartitionKey]:
        """All partitions of these topics, or of all; one number only if it is given."""
        wanted = None if topics is None else tuple(topics)
        reply: MetadataReply = await self.metadata(wanted)
        if partition is not None and wanted is not None:
            info = topic_info(reply, wanted[0])
            if partition >= len(info.partitions):
                raise InvalidArgument(
                    f"topic {info.topic!r} has {len(info.partitions)} partitions, so no partition "
                    f"{partition}"
                )
        return [
            (info.topic, part.partition)
            for info in reply.topics
            if not info.error and not info.topic.startswith(INTERNAL_PREFIX)
            for part in info.partitions
            if partition is None or part.partition == partition
        ]

    async def _partitions_of(
        self, group: str, topics: Iterable[str] | None, mode: Mode | None = None
    ) -> list[GroupPartition]:
        """The partitions that know a group; of its own topics also those that do not yet."""
        own = tuple(topics or ())
        keys = await self._keys(own or None, None)
        requests = {key: DescribeQueue(*key, group) for key in keys}
        answers = await self._ask_all(requests, UnknownTopic)
        return [
            _described(key, reply, mode)
            for key, reply in sorted(answers.items())
            if reply.groups or key[0] in own
        ]

    async def _steer(
        self,
        group: str,
        keys: Iterable[PartitionKey],
        verb: Steering,
        done: type[RaftqError] | None = None,
    ) -> int:
        requests = {key: SteerGroup(group, *key, verb) for key in keys}
        answers = await self._ask_all(requests, done)
        return sum([reply.count for reply in answers.values()])

    async def _ask_all(
        self, requests: Mapping[PartitionKey, Request[R]], nothing: type[RaftqError] | None = None
    ) -> dict[PartitionKey, R]:
        """Ask the leader of each partition; those that answer with `nothing` are left out."""
        found: dict[PartitionKey, R] = {}
        for key, answer in (await self._ask_partitions(requests, self._timeout_s)).items():
            if not isinstance(answer, RaftqError):
                found[key] = answer
            elif nothing is None or not isinstance(answer, nothing):
                raise answer
        return found


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


def _owned_by(one: GroupPartition, member: str) -> GroupPartition:
    return GroupPartition(
        one.topic, one.partition, one.position, one.high_watermark, one.lag, member,
        one.in_flight, one.waiting, one.paused, one.counters,
    )  # fmt: skip


def _reset_to(to: ResetTo) -> tuple[Literal["earliest", "latest", "offset", "time"], int]:
    if to == "earliest":
        return "earliest", 0
    if to == "latest":
        return "latest", 0
    if isinstance(to, datetime):
        return "time", int(to.timestamp() * 1000)
    if type(to) is int and to >= 0:
        return "offset", to
    raise InvalidArgument(f"to is 'earliest', 'latest', an offset or a datetime, not {to!r}")
