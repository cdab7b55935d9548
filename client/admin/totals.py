"""Shell: the admin client's sums over all partitions of some topics.

A partition whose leader does not answer in time is counted as missing, so that one dead leader does
not hide the sums of all others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raftq.client.admin.base import AdminBase
from raftq.client.admin.results import DLQ_SUFFIX
from raftq.client.common.errors import RaftqError
from raftq.client.common.types import PartitionKey
from raftq.client.wire.layout import LANE_COUNT
from raftq.client.wire.queue_messages import DelayStats, DescribeQueue

LETTERS_GROUP = "__dlq"
STATS_S = 3.0  # for one partition


@dataclass(slots=True)
class DelaySums:
    """Delayed records of some topics; all but `pending` since the leaders took over."""

    pending: int = 0
    fired: int = 0
    cancelled: int = 0
    delay_ms_sum: int = 0
    missing: int = 0
    """Partitions whose leader did not answer."""


@dataclass(slots=True)
class QueueSums:
    """Deliveries of some topics to all groups. `counters` has the nodes' own names."""

    counters: dict[str, int] = field(default_factory=dict)
    lanes: list[int] = field(default_factory=lambda: [0] * LANE_COUNT)
    lane_wait_ms: list[int] = field(default_factory=lambda: [0] * LANE_COUNT)
    in_flight: int = 0
    letters: int = 0
    """Dead letters that are neither sent back nor forgotten."""
    missing: int = 0


class TotalsAdmin(AdminBase):
    """Sums over partitions, and what a partition knows of its groups."""

    async def delay_sums(self, topics: Iterable[str]) -> DelaySums:
        sums = DelaySums()
        requests = {key: DelayStats(*key) for key in await self._keys_of_topics(topics)}
        for one in (await self._ask_partitions(requests, STATS_S)).values():
            if isinstance(one, RaftqError):
                sums.missing += 1
                continue
            sums.pending += one.pending
            sums.fired += one.fired
            sums.cancelled += one.cancelled
            sums.delay_ms_sum += one.delay_ms_sum
        return sums

    async def queue_sums(self, topics: Iterable[str]) -> QueueSums:
        sums = QueueSums()
        keys = await self._keys_of_topics(topics)
        requests = {key: DescribeQueue(*key) for key in keys}
        for reply in (await self._ask_partitions(requests, STATS_S)).values():
            if isinstance(reply, RaftqError):
                sums.missing += 1
                continue
            for group in reply.groups:
                sums.in_flight += group.in_flight
                for name, count in group.counters.items():
                    if type(count) is int:
                        sums.counters[name] = sums.counters.get(name, 0) + count
                _add(sums.lanes, group.lanes)
                _add(sums.lane_wait_ms, group.lane_wait_ms)
        sums.letters = await self._count_letters(keys)
        return sums

    async def _count_letters(self, keys: Iterable[PartitionKey]) -> int:
        requests = {
            key: DescribeQueue(*key, LETTERS_GROUP) for key in keys if key[0].endswith(DLQ_SUFFIX)
        }
        count = 0
        for reply in (await self._ask_partitions(requests, STATS_S)).values():
            if isinstance(reply, RaftqError):
                continue
            gone = [group for group in reply.groups if group.group == LETTERS_GROUP]
            kept = reply.high_watermark - reply.start_offset
            count += gone[0].unsettled if gone else kept
        return count

    async def queue_groups(self, topic: str, partition: int) -> list[str]:
        """The groups that the leader of a partition knows."""
        self._ensure_started()
        request = DescribeQueue(topic, partition)
        reply = await self._leaders.ask((topic, partition), request, self._timeout_s)
        return [one.group for one in reply.message.groups]

    async def stored_offsets(self, group: str, topics: Iterable[str]) -> dict[str, dict[int, int]]:
        """Where a group goes on, by topic and partition. For a queue group it is the offset up to
        which everything is settled."""
        keys = await self._keys_of_topics(topics)
        requests = {key: DescribeQueue(*key, group) for key in keys}
        offsets: dict[str, dict[int, int]] = {}
        for (topic, number), reply in (
            await self._ask_partitions(requests, self._timeout_s)
        ).items():
            if isinstance(reply, RaftqError):
                raise reply
            for one in reply.groups:
                if one.group == group:
                    at = one.settled_offset if one.stored_offset < 0 else one.stored_offset
                    offsets.setdefault(topic, {})[number] = at
        return offsets

    async def _keys_of_topics(self, topics: Iterable[str]) -> list[PartitionKey]:
        """All partitions of these topics; a topic that is gone by now has none."""
        reply = await self.metadata(tuple(topics))
        return [
            (info.topic, part.partition)
            for info in reply.topics
            if not info.error
            for part in info.partitions
        ]


def _add(sums: list[int], more: Sequence[int]) -> None:
    for at, count in enumerate(more[: len(sums)]):
        sums[at] += count
