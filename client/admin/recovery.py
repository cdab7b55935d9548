"""Shell: the admin client's verbs about partitions that nobody leads.

A partition has no leader while no member of its isr is alive, or while its copies are compared
because nobody is known to have everything. `recover` gives up the isr: the longest of the copies
that are alive leads, and what only the others had is lost.
"""

import asyncio
from dataclasses import dataclass

from raftq.client.admin.base import AdminBase, topic_info
from raftq.client.common.backoff import Backoff, out_of_time
from raftq.client.common.errors import FencedEpoch, InvalidArgument, RaftqError, UnknownPartition
from raftq.client.common.tasks import sleep
from raftq.client.wire.admin_messages import CopyInfo, DescribeCopies, RecoverPartition
from raftq.client.wire.messages import MetadataReply, PartitionInfo, TopicInfo

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy on a node that is alive: (last epoch, end offset) of each log, the data first.

    Up to `high_watermark` the node knows that the data could be read.
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
    """A partition that nobody leads, and what is known of its copies."""

    topic: str
    topic_id: int
    partition: int
    version: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    """None of them is alive. () when the last one lost what it had."""
    waits_for: tuple[int, ...]
    """Nodes that have to tell where their copies end before anybody leads."""
    copies: tuple[Copy, ...]
    """Those that answer, the longest first: it would lead."""
    silent: tuple[int, ...]
    """Nodes with a copy that is not known of."""

    @property
    def lost_min(self) -> int:
        """So many records could be read before and are certainly lost. There may be any number
        more: what only nodes that are gone had."""
        known = max((one.high_watermark for one in self.copies), default=0)
        return max(known - self.copies[0].end_offset, 0) if self.copies else 0


class RecoveryAdmin(AdminBase):
    """Finds partitions without a leader, and gives them one."""

    async def leaderless(
        self, topic: str | None = None, partition: int | None = None
    ) -> list[Leaderless]:
        """The partitions that nobody leads: all, those of a topic, or this one if it is one."""
        reply = await self.metadata(None if topic is None else (topic,))
        infos = list(reply.topics) if topic is None else [topic_info(reply, topic)]
        found = [
            (info, one)
            for info in infos
            for one in info.partitions
            if one.leader is None and partition in (None, one.partition)
        ]
        copies = await self._copies(reply, found) if found else {}
        return [_leaderless(info, one, copies) for info, one in found]

    async def recover(self, topic: str, partition: int, version: int | None = None) -> int:
        """Give up the isr of a partition that nobody leads, and return who leads it then.

        With the `version` of what `leaderless` told, it is refused if anything changed since.
        """
        one = await self._partition(topic, partition)
        if one[1].leader is not None:
            raise InvalidArgument(
                f"node {one[1].leader} of the isr of {topic}/{partition} is alive, and leads it"
            )
        wanted = one[1].version if version is None else version
        await self._request(RecoverPartition(one[0].topic_id, partition, wanted), FencedEpoch)
        options = self.options
        backoff = Backoff(options.retry_backoff_ms, options.retry_backoff_ms_max, options.rng)
        leader: int | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while leader is None:
                    await sleep(backoff.next_s())
                    one = await self._partition(topic, partition)
                    leader = one[1].leader
        except TimeoutError:
            raise out_of_time(
                f"{topic}/{partition} waits for the ends of the copies on nodes "
                f"{list(one[1].waits_for)}, {options.timeout_ms} ms after it was recovered",
                None,
            ) from None
        return leader

    async def _partition(self, topic: str, partition: int) -> tuple[TopicInfo, PartitionInfo]:
        info = topic_info(await self.metadata((topic,)), topic)
        if not 0 <= partition < len(info.partitions):
            raise UnknownPartition(
                f"topic {topic!r} has {len(info.partitions)} partitions, none is {partition}"
            )
        return info, info.partitions[partition]

    async def _copies(
        self, reply: MetadataReply, found: list[tuple[TopicInfo, PartitionInfo]]
    ) -> dict[Key, list[Copy]]:
        """What the nodes that are alive have of these partitions."""
        copies: dict[Key, list[Copy]] = {}
        asked = []
        for node in reply.nodes:
            keys = [
                (info.topic_id, one.partition)
                for info, one in found
                if node.alive and node.node_id in one.replicas
            ]
            if keys:
                where = (node.host, node.port)
                asked.append(self._tasks.spawn(self._ask_copies(node.node_id, where, keys, copies)))
        if asked:
            try:
                await asyncio.wait(asked)
            finally:
                for task in asked:
                    task.cancel()
        return copies

    async def _ask_copies(
        self, node_id: int, where: tuple[str, int], keys: list[Key], copies: dict[Key, list[Copy]]
    ) -> None:
        try:
            connection = await self._pool.get(where)
            answer = (await connection.request(DescribeCopies(tuple(keys)))).message
        except RaftqError:
            return  # its copies are not known of then
        for one in answer.copies:
            copies.setdefault((one.topic_id, one.partition), []).append(_copy(node_id, one))


def _copy(node_id: int, info: CopyInfo) -> Copy:
    ends = tuple((epoch, end) for epoch, end, _ in info.logs)
    return Copy(node_id, ends, info.logs[0][2])


def _leaderless(info: TopicInfo, one: PartitionInfo, copies: dict[Key, list[Copy]]) -> Leaderless:
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
