"""Shell: the asyncio admin client.

    async with Admin("127.0.0.1:7070") as admin:
        await admin.create_topic("orders", partitions=6)

The other modules of this package say how each kind of verb reaches the cluster; requests.py sends
what they ask.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import merge
from itertools import islice
from typing import Literal, Unpack

from raftq.client.admin import delays, groups, letters, recovery, totals
from raftq.client.admin.groups import ResetTo
from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.admin.recovery import Leaderless
from raftq.client.admin.requests import AdminRequests, topic_info
from raftq.client.admin.results import (
    DeadLetter,
    DelayedPage,
    DelayedRecord,
    DelaySums,
    DelayTotals,
    GroupDescription,
    LetterPage,
    LetterPlace,
    LetterVerb,
    QueueSums,
    Swept,
    dead_letter,
)
from raftq.client.admin.topics import describe, offsets_of
from raftq.client.common.errors import (
    Detail,
    FencedEpoch,
    GroupNotEmpty,
    InvalidArgument,
    RaftqError,
    TopicExists,
    UnknownGroup,
    UnknownTopic,
)
from raftq.client.common.names import DLQ_SUFFIX
from raftq.client.consumer.pages import Page, Position
from raftq.client.net.client import Client
from raftq.client.options import AdminOptions, AdminSettings, Bootstrap
from raftq.client.results import TopicDescription
from raftq.client.wire.admin_messages import (
    AddPartitions,
    AlterTopic,
    ClusterStatus,
    ClusterStatusReply,
    CreateTopic,
    DeleteTopic,
    DrainNode,
    MoveReplicas,
    RecoverPartition,
    RemoveNode,
)
from raftq.client.wire.group_messages import DeleteGroup, GroupSummary, Mode
from raftq.client.wire.messages import NodeInfo
from raftq.client.wire.queue_messages import DelayStats, DescribeQueue, ListDelayed, SteerGroup

ALL_LETTERS = LetterFilter()
START = Position()
PAGE_BYTES = 8 * 1024 * 1024


class Admin(Client):
    """Administrates the cluster: topics, nodes, groups, dead letters, delayed records.

        async with Admin("127.0.0.1:7070") as admin:
            ...

    Settings are the fields of AdminOptions.
    """

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[AdminSettings]) -> None:
        self.options = AdminOptions(**settings)
        super().__init__(bootstrap, self.options, "admin client")
        self._started_requests: AdminRequests

    def _on_start(self) -> None:
        self._started_requests = AdminRequests(self._routes, self._pool, self.options)

    @property
    def _requests(self) -> AdminRequests:
        self._ensure_started()
        return self._started_requests

    # Topics.

    async def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        replication: int | None = None,
        config: Mapping[str, Detail] | None = None,
    ) -> TopicDescription:
        """Create a topic and wait until all its partitions have leaders that answer."""
        request = CreateTopic(name, partitions or 0, replication or 0, dict(config or {}))
        await self._requests.send(request, TopicExists)
        return await self._until_served(name, 1)

    async def delete_topic(self, name: str) -> None:
        """Delete a topic and all its records."""
        await self._requests.send(DeleteTopic(name), UnknownTopic)

    async def alter_topic(self, name: str, config: Mapping[str, Detail]) -> None:
        """Change these settings of a topic. The value None restores the default."""
        await self._requests.send(AlterTopic(name, dict(config)))

    async def add_partitions(self, name: str, total: int) -> TopicDescription:
        """Give a topic `total` partitions and wait until the new ones have leaders."""
        await self._requests.send(AddPartitions(name, total))
        return await self._until_served(name, total)

    async def list_topics(self) -> list[str]:
        """The names of all topics."""
        return sorted(topic.topic for topic in (await self._requests.metadata(None)).topics)

    async def describe_topic(self, name: str) -> TopicDescription:
        """A topic with its partitions, and their offsets where the leader answers."""
        requests = self._requests
        reply = await requests.metadata((name,))
        info = topic_info(reply, name)
        return describe(info, await offsets_of(requests, info, reply))

    async def describe_topics(self) -> list[TopicDescription]:
        """All topics, without offsets."""
        reply = await self._requests.metadata(None)
        found = [describe(info, {}) for info in reply.topics if not info.error]
        return sorted(found, key=lambda one: one.name)

    async def _until_served(self, name: str, partitions: int) -> TopicDescription:
        missing: list[int] = []

        async def look() -> TopicDescription | None:
            nonlocal missing
            try:
                found = await self.describe_topic(name)
            except UnknownTopic:
                missing = [0]  # this node does not know the topic yet
                return None
            missing = [
                partition.partition
                for partition in found.partitions
                if partition.start_offset is None
            ]
            return found if not missing and len(found.partitions) >= partitions else None

        return await self._requests.until(
            look,
            lambda time: (
                f"topic {name!r} is there, but after {time} no leader answers for partitions "
                f"{missing[:10]}"
            ),
        )

    # Replicas and nodes.

    async def move_replica(self, topic: str, partition: int, replicas: Sequence[int]) -> None:
        """Start moving a partition to these nodes, the preferred leader first."""
        await self._requests.send(MoveReplicas(topic, partition, tuple(replicas)))

    async def drain(
        self, node_id: int, drain: bool = True, decommission: bool = False, force: bool = False
    ) -> int:
        """Move leadership away from a node, with `decommission` its replicas too.

        `drain=False` lets leadership come back. Returns the number of partitions that the node
        still leads.
        """
        request = DrainNode(node_id, drain, decommission, force)
        return (await self._requests.send(request)).leading

    async def remove_node(self, node_id: int) -> None:
        """Forget a node that has no replicas."""
        await self._requests.send(RemoveNode(node_id))

    async def nodes(self) -> list[NodeInfo]:
        """The nodes of the cluster."""
        return sorted((await self._requests.metadata(())).nodes, key=lambda node: node.node_id)

    async def cluster_status(self) -> ClusterStatusReply:
        """The state of the metadata quorum and its controller, as one node knows it."""
        return await self._requests.send(ClusterStatus())

    async def leaderless(
        self, topic: str | None = None, partition: int | None = None
    ) -> list[Leaderless]:
        """Partitions that have no leader, with what is known of their copies."""
        requests = self._requests
        reply = await requests.metadata(None if topic is None else (topic,))
        infos = list(reply.topics) if topic is None else [topic_info(reply, topic)]
        found = [
            (info, part)
            for info in infos
            for part in info.partitions
            if part.leader is None and partition in (None, part.partition)
        ]
        return await recovery.describe_leaderless(requests, reply, found)

    async def recover(self, topic: str, partition: int, version: int | None = None) -> int:
        """Give up the isr of a partition that has no leader. Returns the new leader.

        The longest of the copies that are alive leads; what only the others had is lost. With the
        `version` of a result of `leaderless`, it is refused if anything changed since then.
        """
        requests = self._requests
        info, one = await recovery.find_partition(requests, topic, partition)
        if one.leader is not None:
            raise InvalidArgument(
                f"node {one.leader} of the isr of {topic}/{partition} is alive, and leads it"
            )
        wanted = one.version if version is None else version
        await requests.send(RecoverPartition(info.topic_id, partition, wanted), FencedEpoch)

        async def look() -> int | None:
            nonlocal one
            _, one = await recovery.find_partition(requests, topic, partition)
            return one.leader

        return await requests.until(
            look,
            lambda time: (
                f"{topic}/{partition} waits for the ends of the copies on nodes "
                f"{list(one.waits_for)}, {time} after it was recovered"
            ),
        )

    # Groups.

    async def list_groups(self) -> list[GroupSummary]:
        """The groups that have, or had, members."""
        requests = self._requests
        attempts = requests.attempts("ListGroups")
        while True:
            nodes = [node for node in (await requests.metadata(())).nodes if node.alive]
            found = await asyncio.gather(*[groups.groups_of(requests, node) for node in nodes])
            errors = [answer for answer in found if isinstance(answer, RaftqError)]
            if not errors:
                break
            await attempts.failed(errors[0])
        by_name = {
            listed.group: listed for some in found if isinstance(some, list) for listed in some
        }
        return [by_name[name] for name in sorted(by_name)]

    async def describe_group(self, group: str) -> GroupDescription:
        """Members, and for each partition the position and the lag. UnknownGroup when the cluster
        does not know the group."""
        requests = self._requests
        known = await groups.coordinated(requests, group)
        if known is None:
            parts = await groups.partitions_of(requests, group)
            if not parts:
                raise UnknownGroup(f"no group is named {group!r}")
            mode: Mode = "queue" if any(part.counters for part in parts) else "stream"
            return GroupDescription(group, "empty", mode, 0, None, (), tuple(parts))
        parts = await groups.partitions_of(requests, group, known.topics, known.mode)
        if known.mode == "stream":
            owners = {
                (given.topic, given.partition): member.member_id
                for member in known.members
                for given in member.assigned
            }
            parts = [
                replace(part, member=owners.get((part.topic, part.partition), "")) for part in parts
            ]
        return GroupDescription(
            group,
            known.state,
            known.mode,
            known.generation,
            known.coordinator,
            known.members,
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
        """Move the group to an end of the log, an offset, or a time (a datetime).

        Returns the new offset of each partition. GroupNotEmpty while the group has readers, which
        would store their own positions over it, unless `force`.
        """
        requests = self._requests
        known = await groups.coordinated(requests, group)
        if known is not None and known.members and known.mode == "stream" and not force:
            raise GroupNotEmpty(f"group {group!r} has {len(known.members)} members that read")
        point = groups.reset_point(to)
        answers = await requests.ask_leaders(
            {
                key: SteerGroup(group, *key, "reset", *point)
                for key in await requests.topic_keys(topic, partition)
            }
        )
        return {key[1]: reply.offset for key, reply in answers.items()}

    async def delete_group(self, group: str) -> None:
        """Forget a group, its positions and everything it settled. GroupNotEmpty while it has
        members."""
        requests = self._requests
        parts = await groups.partitions_of(requests, group)
        known = True
        try:
            await requests.ask_coordinator(group, DeleteGroup(group))
        except UnknownGroup:
            known = False
        if not known and not parts:
            raise UnknownGroup(f"no group is named {group!r}")
        keys = [(part.topic, part.partition) for part in parts]
        await groups.steer(requests, group, keys, "delete", UnknownGroup)

    async def pause_group(self, group: str, topic: str | None = None) -> None:
        """Lease nothing to this group until `resume_group`, in one topic or in all its topics."""
        requests = self._requests
        await groups.steer(requests, group, await groups.keys_of(requests, group, topic), "pause")

    async def resume_group(self, group: str, topic: str | None = None) -> None:
        """End a pause, in one topic or in all topics of the group."""
        requests = self._requests
        await groups.steer(requests, group, await groups.keys_of(requests, group, topic), "resume")

    async def purge_group(self, group: str, topic: str | None = None) -> int:
        """Settle all records that are there now for this group. Returns the number of records that
        the group had not settled before."""
        requests = self._requests
        keys = await groups.keys_of(requests, group, topic)
        return await groups.steer(requests, group, keys, "purge")

    async def queue_groups(self, topic: str, partition: int) -> list[str]:
        """The groups that the leader of a partition knows."""
        key = topic, partition
        reply = await self._requests.ask_leader(key, DescribeQueue(*key))
        return [listed.group for listed in reply.message.groups]

    async def stored_offsets(self, group: str, topics: Iterable[str]) -> dict[str, dict[int, int]]:
        """Where a group goes on, by topic and partition. For a queue group it is the offset up to
        which everything is settled."""
        requests = self._requests
        asked = {key: DescribeQueue(*key, group) for key in await requests.keys(topics)}
        offsets: dict[str, dict[int, int]] = {}
        for (topic, number), reply in (await requests.ask_leaders(asked)).items():
            for stats in reply.groups:
                if stats.group == group:
                    at = stats.settled_offset if stats.stored_offset < 0 else stats.stored_offset
                    offsets.setdefault(topic, {})[number] = at
        return offsets

    async def queue_sums(self, topics: Iterable[str]) -> QueueSums:
        """Deliveries of these topics to all groups, in one sum."""
        return await totals.queue_sums(self._requests, topics)

    # Records.

    async def read_page(
        self,
        topic: str,
        partition: int,
        position: Position = START,
        limit: int = 100,
        bytes_max: int = PAGE_BYTES,
    ) -> Page:
        """Records that can be read now, at most `limit` and about `bytes_max` bytes.

        At least one record, if there is one. OffsetOutOfRange when the partition does not have the
        offset.
        """
        requests = self._requests
        size = limit, bytes_max
        return await requests.pages.read((topic, partition), position, size, requests.timeout_s)

    # Dead letters. `topic` is "orders" or "orders.dlq".

    async def dead_letters(
        self, topic: str, limit: int = 100, which: LetterFilter = ALL_LETTERS
    ) -> list[DeadLetter]:
        """The dead letters of a topic that `which` selects, at most `limit`."""
        requests = self._requests
        name = await letters.letters_topic_of(requests, topic)
        found = [] if name is None else await letters.browse(requests, name, which, limit)
        return [dead_letter(letter) for letter in found]

    async def redrive(
        self,
        topic: str,
        limit: int | None = None,
        rate: float | None = None,
        which: LetterFilter = ALL_LETTERS,
    ) -> int:
        """Send dead letters back to where they came from, at most `rate` a second. Returns the
        number of letters."""
        return await self._sweep(topic, "redrive", which, limit, rate)

    async def purge(
        self, topic: str, limit: int | None = None, which: LetterFilter = ALL_LETTERS
    ) -> int:
        """Forget dead letters for good. Returns the number of letters."""
        return await self._sweep(topic, "purge", which, limit, None)

    async def _sweep(
        self,
        topic: str,
        verb: LetterVerb,
        which: LetterFilter,
        limit: int | None,
        rate: float | None,
    ) -> int:
        requests = self._requests
        name = await letters.letters_topic_of(requests, topic)
        if name is None:
            return 0
        return (await letters.sweep(requests, name, verb, which, limit, letters.Pace(rate))).count

    async def letter_page(
        self,
        topic: str,
        which: LetterFilter = ALL_LETTERS,
        place: LetterPlace | None = None,
        limit: int = 100,
    ) -> LetterPage:
        """Dead letters of a dead-letter topic ("orders.dlq") from a place on, as they are stored.

        Where few letters match, a page may have less than `limit` letters and still have a next
        one.
        """
        return await letters.page(self._requests, topic, which, place, limit)

    async def sweep_letters(
        self,
        topic: str,
        verb: Literal["redrive", "purge"],
        which: LetterFilter,
        limit: int,
        rate: float | None = None,
        seconds: float = 20.0,
    ) -> Swept:
        """Redrive or purge letters of a dead-letter topic for at most about `seconds`.

        At most `rate` letters a second. Letters that are done do not come up again, so the next
        call goes on where this one ends.
        """
        pace = letters.Pace(rate, seconds)
        return await letters.sweep(self._requests, topic, verb, which, limit, pace)

    async def parked_letters(self, topic: str) -> int:
        """The number of records that were given up but whose dead letters are refused.

        They are not settled and are tried again now and then. The log of the leading node says why.
        """
        keys = await self._requests.topic_keys(topic.removesuffix(DLQ_SUFFIX))
        answers = await self._requests.ask_leaders({key: DescribeQueue(*key) for key in keys})
        counts = [
            stats.counters.get("parked", 0) for each in answers.values() for stats in each.groups
        ]
        return sum([count for count in counts if isinstance(count, int)])

    # Delayed records.

    async def delayed(
        self, topic: str, limit: int = 100, partition: int | None = None, values: bool = False
    ) -> list[DelayedRecord]:
        """Records that are not yet due, in the order they are due. With `values` they have key,
        value and headers."""
        if type(limit) is not int or limit < 1:
            raise InvalidArgument(f"limit must be at least 1, not {limit!r}")
        requests = self._requests
        numbers = await requests.partitions(topic, partition)
        found = await asyncio.gather(
            *[delays.delayed(requests, topic, number, limit, values) for number in numbers]
        )
        rows = [row for some in found for row in some]
        return sorted(rows, key=lambda one: (one.deliver_at, one.partition, one.offset))[:limit]

    async def delayed_page(self, topic: str, skip: int = 0, limit: int = 100) -> DelayedPage:
        """Records that are not yet due, in the order they are due, without the first `skip`."""
        requests = self._requests
        keys = await requests.topic_keys(topic)
        answers = await requests.ask_leaders(
            {key: ListDelayed(*key, 0, skip + limit) for key in keys}
        )
        rows = [
            [
                (record.deliver_at, key[1], record.offset, record.priority)
                for record in reply.records
            ]
            for key, reply in answers.items()
        ]
        records = [
            DelayedRecord(topic, number, offset, due, priority)
            for due, number, offset, priority in islice(merge(*rows), skip, skip + limit)
        ]
        return DelayedPage(records, sum([reply.pending for reply in answers.values()]))

    async def find_delayed(
        self, topic: str, offset: int, partition: int | None = None
    ) -> DelayedRecord | None:
        """The delayed record with this offset, in one partition or in the first that has one."""
        requests = self._requests
        keys = [key for key in await requests.topic_keys(topic) if partition in (None, key[1])]
        answers = await requests.try_leaders({key: ListDelayed(*key, 0, 1, offset) for key in keys})
        problem: RaftqError | None = None
        for key, reply in answers.items():
            if isinstance(reply, RaftqError):
                problem = reply
            elif reply.records:
                one = reply.records[0]
                return DelayedRecord(*key, one.offset, one.deliver_at, one.priority)
        if problem is not None:
            raise problem
        return None

    async def delay_sums(self, topics: Iterable[str]) -> DelaySums:
        """Delayed records of these topics, in one sum."""
        return await totals.delay_sums(self._requests, topics)

    async def cancel_delayed(
        self, topic: str, partition: int, offsets: int | Iterable[int]
    ) -> list[int]:
        """Cancel delayed records by the offsets that `send` or `delayed` gave them.

        Returns the offsets of the records that were pending; no consumer will see these records.
        """
        wanted = (offsets,) if isinstance(offsets, int) else tuple(offsets)
        return await delays.cancel(self._requests, topic, partition, wanted)

    async def delay_totals(self, topic: str) -> DelayTotals:
        """How many records of a topic are delayed, and what became of earlier ones."""
        keys = await self._requests.topic_keys(topic)
        answers = await self._requests.ask_leaders({key: DelayStats(*key) for key in keys})
        parts = list(answers.values())
        return DelayTotals(
            sum([part.pending for part in parts]),
            sum([part.scheduled for part in parts]),
            sum([part.fired for part in parts]),
            sum([part.cancelled for part in parts]),
            max([part.late_ms_max for part in parts], default=0),
        )
