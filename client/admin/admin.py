"""Shell: the asyncio admin client: topics, replicas and nodes; with its bases also groups, dead
letters, delayed records and partitions that nobody leads."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar, Unpack

from raftq.client.admin.base import topic_info
from raftq.client.admin.dead_letters import LetterAdmin
from raftq.client.admin.groups import GroupAdmin
from raftq.client.admin.pages import PageAdmin
from raftq.client.admin.recovery import RecoveryAdmin
from raftq.client.admin.totals import TotalsAdmin
from raftq.client.common.backoff import Backoff, out_of_time
from raftq.client.common.errors import (
    Detail,
    RaftqError,
    TopicExists,
    UnknownTopic,
)
from raftq.client.common.tasks import sleep
from raftq.client.options import AdminOptions, AdminSettings, Bootstrap
from raftq.client.results import PartitionDescription, TopicDescription
from raftq.client.wire.admin_messages import (
    AddPartitions,
    AlterTopic,
    ClusterStatus,
    ClusterStatusReply,
    CreateTopic,
    DeleteTopic,
    DrainNode,
    MoveReplicas,
    RemoveNode,
)
from raftq.client.wire.messages import (
    ListOffsets,
    MetadataReply,
    NodeInfo,
    OffsetQuery,
    TopicInfo,
    WireMessage,
)

R = TypeVar("R", bound=WireMessage)
Offsets = dict[int, tuple[int, int]]  # partition -> start_offset, high_watermark


class Admin(GroupAdmin, LetterAdmin, RecoveryAdmin, PageAdmin, TotalsAdmin):
    """Administrates the cluster. Settings are the fields of AdminOptions."""

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[AdminSettings]) -> None:
        super().__init__(bootstrap, AdminOptions(**settings))

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
        await self._request(request, TopicExists)
        return await self._until_served(name, 1)

    async def delete_topic(self, name: str) -> None:
        await self._request(DeleteTopic(name), UnknownTopic)

    async def alter_topic(self, name: str, config: Mapping[str, Detail]) -> None:
        """Change these settings; None takes one back to its default."""
        await self._request(AlterTopic(name, dict(config)))

    async def add_partitions(self, name: str, total: int) -> TopicDescription:
        """Give a topic `total` partitions and wait until the new ones have leaders."""
        await self._request(AddPartitions(name, total))
        return await self._until_served(name, total)

    async def list_topics(self) -> list[str]:
        return sorted(topic.topic for topic in (await self.metadata(None)).topics)

    async def describe_topic(self, name: str) -> TopicDescription:
        """A topic with its partitions, and their offsets as far as their leaders answer."""
        reply = await self.metadata((name,))
        info = topic_info(reply, name)
        return _description(info, await self._offsets(info, reply))

    async def describe_topics(self) -> list[TopicDescription]:
        """All topics, without offsets."""
        reply = await self.metadata(None)
        topics = [_description(info, {}) for info in reply.topics if not info.error]
        return sorted(topics, key=lambda one: one.name)

    # Replicas and nodes.

    async def move_replica(self, topic: str, partition: int, replicas: Sequence[int]) -> None:
        """Start moving a partition to these nodes, the preferred leader first."""
        await self._request(MoveReplicas(topic, partition, tuple(replicas)))

    async def drain(
        self, node_id: int, drain: bool = True, decommission: bool = False, force: bool = False
    ) -> int:
        """Move leadership away from a node (`drain=False` lets it come back), with `decommission`
        its replicas too; the number of partitions it still leads."""
        return (await self._request(DrainNode(node_id, drain, decommission, force))).leading

    async def remove_node(self, node_id: int) -> None:
        await self._request(RemoveNode(node_id))

    async def nodes(self) -> list[NodeInfo]:
        return sorted((await self.metadata(())).nodes, key=lambda node: node.node_id)

    async def cluster_status(self) -> ClusterStatusReply:
        return await self._request(ClusterStatus())

    # How.

    async def _until_served(self, name: str, partitions: int) -> TopicDescription:
        options = self.options
        backoff = Backoff(options.retry_backoff_ms, options.retry_backoff_ms_max, options.rng)
        missing: list[int] = []
        try:
            async with asyncio.timeout(options.timeout_ms / 1000):
                while True:
                    try:
                        found = await self.describe_topic(name)
                        missing = [
                            one.partition for one in found.partitions if one.start_offset is None
                        ]
                        if not missing and len(found.partitions) >= partitions:
                            return found
                    except UnknownTopic:
                        missing = [0]  # this node has not heard of it yet
                    await sleep(backoff.next_s())
        except TimeoutError:
            raise out_of_time(
                f"topic {name!r} is there, but after {options.timeout_ms} ms no leader answers for "
                f"partitions {missing[:10]}",
                None,
            ) from None

    async def _offsets(self, info: TopicInfo, reply: MetadataReply) -> Offsets:
        """Both ends of each partition whose leader answers."""
        addresses = {node.node_id: (node.host, node.port) for node in reply.nodes}
        by_leader: dict[tuple[str, int], list[int]] = {}
        for part in info.partitions:
            if part.leader is not None and part.leader in addresses:
                by_leader.setdefault(addresses[part.leader], []).append(part.partition)
        found: Offsets = {}
        asked = [
            self._tasks.spawn(self._ask_offsets(address, info.topic, numbers, found))
            for address, numbers in by_leader.items()
        ]
        if asked:
            try:
                await asyncio.wait(asked)
            finally:
                for task in asked:
                    task.cancel()
        return found

    async def _ask_offsets(
        self, address: tuple[str, int], topic: str, numbers: list[int], found: Offsets
    ) -> None:
        queries = []
        for number in numbers:
            queries += [
                OffsetQuery(topic, number, "earliest"),
                OffsetQuery(topic, number, "latest"),
            ]
        try:
            connection = await self._pool.get(address)
            answers = (await connection.request(ListOffsets(tuple(queries)))).message.answers
        except RaftqError:
            return  # its partitions have no offsets then
        starts, ends = answers[::2], answers[1::2]
        for start, end in zip(starts, ends, strict=False):
            if not start.error and not end.error and start.partition == end.partition:
                found[start.partition] = (start.offset, end.offset)


def _description(info: TopicInfo, offsets: Offsets) -> TopicDescription:
    parts = []
    for one in info.partitions:
        start, end = offsets.get(one.partition, (None, None))
        parts.append(
            PartitionDescription(
                *(one.partition, one.leader, one.epoch, one.replicas, one.isr, one.target),
                start_offset=start,
                high_watermark=end,
                waits_for=one.waits_for,
            )
        )
    return TopicDescription(info.topic, info.topic_id, info.config, tuple(parts))
