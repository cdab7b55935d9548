"""Dead letters of a topic, partition after partition. (Shell.)

A sweep (redrive, purge) goes through the letters in portions for as long as one request may take;
whoever wants more calls again, as letters that are done do not come up any more.
"""

import asyncio

from raftq.client.common.tasks import sleep
from raftq.client.consumer.records import Fetched, to_records
from raftq.client.wire.batch import Batch
from raftq.client.wire.queue_messages import DeadLetters, DeadLettersReply
from raftq.cluster.metadata.state import TopicState
from raftq.node.http.cluster_calls import ClusterCalls
from raftq.node.http.gateway import Readable
from raftq.node.http.queue_gateway import Cursor, Filter, Letters, Swept

PORTION = 500
SWEEP_S = 20.0
PORTIONS_A_SECOND = 5
LOOKS_MAX = 200
"""Portions that one page looks at: where little matches, it ends with a cursor to go on from."""


class Sweeps:
    """See the module's docstring."""

    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls

    async def browse(self, topic: TopicState, which: Filter, cursor: Cursor, limit: int) -> Letters:
        found: list[tuple[int, Readable]] = []
        at: Cursor | None = cursor
        for _ in range(LOOKS_MAX):
            if at is None or len(found) >= limit:
                break
            if at.partition >= len(topic.partitions):
                return Letters(found)
            request = _request(topic, which, "browse", at, limit - len(found))
            reply = await self._calls.lead((topic.name, at.partition), request)
            offsets = dict.fromkeys(reply.message.offsets)
            found += [
                (at.partition, one)
                for one in _records(topic.name, at.partition, bytes(reply.raw))
                if one.offset in offsets
            ]
            at = _after(topic, which, at, reply.message)
        return Letters(found, at)

    async def redrive(
        self, topic: TopicState, which: Filter, limit: int, rate: float | None
    ) -> Swept:
        portion = PORTION
        if rate is not None:
            portion = max(1, min(PORTION, int(rate / PORTIONS_A_SECOND)))
        return await self._sweep(topic, which, "redrive", limit, (portion, rate))

    async def purge(self, topic: TopicState, which: Filter, limit: int) -> Swept:
        return await self._sweep(topic, which, "purge", limit, (PORTION, None))

    async def _sweep(
        self,
        topic: TopicState,
        which: Filter,
        verb: str,
        limit: int,
        pace: tuple[int, float | None],
    ) -> Swept:
        portion, rate = pace
        loop = asyncio.get_running_loop()
        began = loop.time()
        count = 0
        at: Cursor | None = Cursor(which.partition or 0, 0)
        while at is not None and count < limit:
            request = _request(topic, which, verb, at, min(portion, limit - count))
            reply = await self._calls.lead((topic.name, at.partition), request)
            count += reply.message.count
            at = _after(topic, which, at, reply.message)
            ahead_s = count / rate - (loop.time() - began) if rate else 0.0
            if loop.time() - began + max(ahead_s, 0.0) > SWEEP_S:
                break
            if ahead_s > 0 and at is not None:
                await sleep(ahead_s)
        return Swept(count, at is None)


def _request(topic: TopicState, which: Filter, verb: str, at: Cursor, limit: int) -> DeadLetters:
    return DeadLetters(
        topic.name,
        at.partition,
        verb,  # type: ignore[arg-type]
        at.offset,
        min(limit, PORTION),
        which.group,
        which.reason,
        which.key,
        which.since,
        which.until,
    )


def _after(topic: TopicState, which: Filter, at: Cursor, reply: DeadLettersReply) -> Cursor | None:
    """Where to go on; the next partition when nothing was left to look at in this one."""
    if reply.next_offset > at.offset:
        return Cursor(at.partition, reply.next_offset)
    if which.partition is not None or at.partition + 1 >= len(topic.partitions):
        return None
    return Cursor(at.partition + 1, 0)


def _records(topic: str, partition: int, raw: bytes) -> list[Readable]:
    found: list[Readable] = []
    at = 0
    while at < len(raw):
        batch = Batch(raw, at)
        at += batch.length
        found += to_records(Fetched(topic, partition, 0, batch))
    return found
