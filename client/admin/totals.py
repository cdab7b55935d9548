"""Shell: the admin client's sums over all partitions of some topics.

A partition whose leader does not answer in time is counted as missing, so that one dead leader does
not hide the sums of all others.
"""

from collections.abc import Iterable, Sequence

from raftq.client.admin.requests import AdminRequests
from raftq.client.admin.results import DelaySums, QueueSums
from raftq.client.common.errors import RaftqError
from raftq.client.common.names import DLQ_GROUP, DLQ_SUFFIX
from raftq.client.common.types import PartitionKey
from raftq.client.wire.queue_messages import DelayStats, DescribeQueue

STATS_S = 3.0  # for one partition


async def delay_sums(requests: AdminRequests, topics: Iterable[str]) -> DelaySums:
    sums = DelaySums()
    asked = {key: DelayStats(*key) for key in await requests.keys(topics)}
    for answer in (await requests.try_leaders(asked, STATS_S)).values():
        if isinstance(answer, RaftqError):
            sums.missing += 1
            continue
        sums.pending += answer.pending
        sums.fired += answer.fired
        sums.cancelled += answer.cancelled
        sums.delay_ms_sum += answer.delay_ms_sum
    return sums


async def queue_sums(requests: AdminRequests, topics: Iterable[str]) -> QueueSums:
    sums = QueueSums()
    keys = await requests.keys(topics)
    asked = {key: DescribeQueue(*key) for key in keys}
    for reply in (await requests.try_leaders(asked, STATS_S)).values():
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
    sums.letters = await _count_letters(requests, keys)
    return sums


async def _count_letters(requests: AdminRequests, keys: Iterable[PartitionKey]) -> int:
    asked = {key: DescribeQueue(*key, DLQ_GROUP) for key in keys if key[0].endswith(DLQ_SUFFIX)}
    count = 0
    for reply in (await requests.try_leaders(asked, STATS_S)).values():
        if isinstance(reply, RaftqError):
            continue
        gone = [group for group in reply.groups if group.group == DLQ_GROUP]
        kept = reply.high_watermark - reply.start_offset
        count += gone[0].unsettled if gone else kept
    return count


def _add(sums: list[int], more: Sequence[int]) -> None:
    for at, count in enumerate(more[: len(sums)]):
        sums[at] += count
