"""Shell: how the admin client finds partitions without a leader.

A partition has no leader while no member of its isr is alive, or while its copies are compared
because no replica is known to have everything. `recover` gives up the isr: the longest of the
copies that are alive leads, and what only the others had is lost.
"""

import asyncio
from dataclasses import dataclass

from raftq.client.admin.requests import AdminRequests
from raftq.client.common.errors import RaftqError, UnknownPartition
from raftq.client.wire.admin_messages import CopyInfo, DescribeCopies
from raftq.client.wire.messages import MetadataReply, NodeInfo, PartitionInfo, TopicInfo

_Key = tuple[int, int]  # topic id, partition


@dataclass(frozen=True, slots=True)
class ReplicaCopy:
    """A copy on a node that is alive.

    `ends` has (last epoch, end offset) of each log, the data log first. The node knows that data
    before `high_watermark` could be read.
    """

    node_id: int
    ends: tuple[tuple[int, int], ...]
    high_watermark: int

    @property
    def epoch(self) -> int:
        return self.ends[0][0]

    @property
    def end_offset(self) -> int:
        return self.ends[0][1]


@dataclass(frozen=True, slots=True)
class Leaderless:
    """A partition without a leader, and what is known of its copies."""

    topic: str
    topic_id: int
    partition: int
    version: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    """None of them is alive. () when the last one lost what it had."""
    waits_for: tuple[int, ...]
    """Nodes that must say where their copies end before one of them can lead."""
    copies: tuple[ReplicaCopy, ...]
    """The copies on nodes that answer, the longest first: it would lead."""
    silent: tuple[int, ...]
    """Nodes with a copy that do not answer."""

    @property
    def lost_min(self) -> int:
        """The number of records that could be read before and are certainly lost. More may be
        lost: what only nodes that are gone had."""
        known = max((copy.high_watermark for copy in self.copies), default=0)
        return max(known - self.copies[0].end_offset, 0) if self.copies else 0


async def describe_leaderless(
    requests: AdminRequests, reply: MetadataReply, found: list[tuple[TopicInfo, PartitionInfo]]
) -> list[Leaderless]:
    """These partitions, with what the nodes that are alive have of them."""
    copies: dict[_Key, list[ReplicaCopy]] = {}

    async def ask(node: NodeInfo, keys: list[_Key]) -> None:
        try:
            request = DescribeCopies(tuple(keys))
            answer = await requests.ask_node((node.host, node.port), request)
        except RaftqError:
            return  # its copies are not known of then
        for copy in answer.copies:
            copies.setdefault((copy.topic_id, copy.partition), []).append(_copy(node.node_id, copy))

    asked: list[tuple[NodeInfo, list[_Key]]] = []
    for node in reply.nodes:
        keys = [
            (info.topic_id, one.partition)
            for info, one in found
            if node.alive and node.node_id in one.replicas
        ]
        if keys:
            asked.append((node, keys))
    await asyncio.gather(*[ask(*item) for item in asked])
    return [_leaderless(info, one, copies) for info, one in found]


async def find_partition(
    requests: AdminRequests, topic: str, partition: int
) -> tuple[TopicInfo, PartitionInfo]:
    info = await requests.topic(topic)
    if not 0 <= partition < len(info.partitions):
        raise UnknownPartition(
            f"topic {topic!r} has {len(info.partitions)} partitions, none is {partition}"
        )
    return info, info.partitions[partition]


def _copy(node_id: int, info: CopyInfo) -> ReplicaCopy:
    ends = tuple((epoch, end) for epoch, end, _ in info.logs)
    return ReplicaCopy(node_id, ends, info.logs[0][2])


def _leaderless(
    info: TopicInfo, one: PartitionInfo, copies: dict[_Key, list[ReplicaCopy]]
) -> Leaderless:
    found = copies.get((info.topic_id, one.partition), [])
    partition_key = {node: at for at, node in enumerate(one.replicas)}
    found.sort(key=lambda copy: (copy.ends, -partition_key[copy.node_id]), reverse=True)
    known = [copy.node_id for copy in found]
    return Leaderless(
        topic=info.topic,
        topic_id=info.topic_id,
        partition=one.partition,
        version=one.version,
        replicas=one.replicas,
        isr=one.isr,
        waits_for=one.waits_for,
        copies=tuple(found),
        silent=tuple(node for node in one.replicas if node not in known),
    )
