"""Shell: how the admin client describes topics."""

import asyncio

from raftq.client.admin.requests import AdminRequests
from raftq.client.common.errors import RaftqError
from raftq.client.options import Address
from raftq.client.results import PartitionDescription, TopicDescription
from raftq.client.wire.messages import ListOffsets, MetadataReply, OffsetQuery, TopicInfo

Offsets = dict[int, tuple[int, int]]  # partition -> start_offset, high_watermark


async def offsets_of(requests: AdminRequests, info: TopicInfo, reply: MetadataReply) -> Offsets:
    """Both ends of each partition whose leader answers."""
    addresses = {node.node_id: (node.host, node.port) for node in reply.nodes}
    by_leader: dict[Address, list[int]] = {}
    for part in info.partitions:
        if part.leader is not None and part.leader in addresses:
            by_leader.setdefault(addresses[part.leader], []).append(part.partition)
    found: Offsets = {}

    async def ask(address: Address, numbers: list[int]) -> None:
        queries = []
        for number in numbers:
            queries += [
                OffsetQuery(info.topic, number, "earliest"),
                OffsetQuery(info.topic, number, "latest"),
            ]
        try:
            answers = (await requests.ask_node(address, ListOffsets(tuple(queries)))).answers
        except RaftqError:
            return  # its partitions have no offsets then
        for start, end in zip(answers[::2], answers[1::2], strict=False):
            if not start.error and not end.error and start.partition == end.partition:
                found[start.partition] = (start.offset, end.offset)

    await asyncio.gather(*[ask(*item) for item in by_leader.items()])
    return found


def describe(info: TopicInfo, offsets: Offsets) -> TopicDescription:
    parts = []
    for partition in info.partitions:
        start, end = offsets.get(partition.partition, (None, None))
        parts.append(
            PartitionDescription(
                *(
                    partition.partition,
                    partition.leader,
                    partition.epoch,
                    partition.replicas,
                    partition.isr,
                    partition.target,
                ),
                start_offset=start,
                high_watermark=end,
                waits_for=partition.waits_for,
            )
        )
    return TopicDescription(info.topic, info.topic_id, info.config, tuple(parts))
