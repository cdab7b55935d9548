"""A poll of a stream group: records of a member's partitions from the stored offsets on. (Shell.)

Positions are nowhere but at the leaders of the partitions, where a commit puts them: a poll that is
repeated without a commit brings the same records, at whichever node.
"""

import asyncio
from collections.abc import Mapping, Sequence

from raftq.client.common.errors import OffsetOutOfRange, RaftqError
from raftq.client.consumer.stored_offsets import read_stored
from raftq.client.options import Address
from raftq.client.wire.messages import Fetch, FetchPartition
from raftq.client.wire.queue_messages import (
    ReadOffset,
    ReadOffsets,
    StoredOffset,
)
from raftq.node.http.cluster_calls import ClusterCalls
from raftq.node.http.gateway import Position
from raftq.node.http.queue_gateway import Ask, Delivered, PartitionName
from raftq.node.http.reader import PageReader

ANSWER_S = 5.0


class Streams:
    """See the module's docstring."""

    def __init__(self, calls: ClusterCalls, reader: PageReader) -> None:
        self._calls = calls
        self._reader = reader

    async def read_offsets(
        self, group: str, member_id: str, owned: Mapping[PartitionName, int]
    ) -> dict[PartitionName, StoredOffset | RaftqError]:
        """What is stored; with an owner epoch of 0 or more the member claims the partition."""

        def build(names: list[PartitionName]) -> ReadOffsets:
            wanted = tuple(ReadOffset(*name, owned[name]) for name in names)
            return ReadOffsets(group, member_id, wanted)

        return await self._calls.ask_each(list(owned), build, read_stored)

    async def poll(
        self, group: str, member_id: str, owned: Mapping[PartitionName, int], ask: Ask
    ) -> list[Delivered]:
        """In the order of `owned`, so that a caller who turns it gives every partition its turn."""
        stored = await self.read_offsets(group, member_id, owned)
        positions: dict[PartitionName, int] = {}
        found: list[Delivered] = []
        room = ask.bytes_max
        for name in owned:
            one = stored[name]
            if isinstance(one, RaftqError):
                if not one.retriable:
                    raise one
                continue
            positions[name] = start_of(one)
            left = ask.records_max - len(found)
            if positions[name] < one.high_watermark and left > 0 and room > 0:
                part = await self._page(name, positions[name], left, room)
                found += part
                room -= sum(len(each.record.value) for each in part)
        if not found and positions and ask.wait_ms:
            await self._wait({name: _end(stored[name]) for name in positions}, ask.wait_ms)
            now = Ask(records_max=ask.records_max, bytes_max=ask.bytes_max, wait_ms=0)
            return await self.poll(group, member_id, owned, now)
        return found

    async def _page(
        self, name: PartitionName, offset: int, limit: int, bytes_max: int
    ) -> list[Delivered]:
        topic, partition = name
        try:
            page = await self._reader.read(topic, partition, Position(offset), limit, bytes_max)
        except OffsetOutOfRange:
            # Retention was faster than this poll; the next one begins at what is kept.
            return []
        return [Delivered(topic, partition, record) for record in page.records]

    async def _wait(self, ends: Mapping[PartitionName, int], wait_ms: int) -> None:
        """Until one of these partitions has more, or the time is over."""
        loop = asyncio.get_running_loop()
        leaders = await self._calls.by_leader(ends)
        parked = [
            loop.create_task(self._park(address, leadership, ends, wait_ms))
            for address, leadership in leaders.items()
        ]
        try:
            await asyncio.wait(parked, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in parked:
                one.cancel()

    async def _park(
        self,
        address: Address,
        leadership: Sequence[PartitionName],
        ends: Mapping[PartitionName, int],
        wait_ms: int,
    ) -> None:
        wanted = tuple(FetchPartition(*name, ends[name], 1) for name in leadership)
        try:
            await self._calls.request(address, Fetch(wanted, wait_ms), wait_ms / 1000 + ANSWER_S)
        except RaftqError as error:
            for name in leadership:
                self._calls.learn(name, error)


def start_of(one: StoredOffset) -> int:
    """Where to read: nothing stored is the beginning, and so is what retention has dropped."""
    return min(max(one.offset, one.start_offset), max(one.high_watermark, one.start_offset))


def _end(one: StoredOffset | RaftqError) -> int:
    assert isinstance(one, StoredOffset)
    return one.high_watermark
