"""Shell: the admin client's verbs about dead letters and delayed records.

Letters are browsed, sent back and forgotten partition by partition, in portions; a letter that was
sent back is gone, so a redrive that is asked for again goes on where it was. A topic that has no
letters has no topic for them either: then there are none.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from raftq.client.admin.base import AdminBase, topic_info
from raftq.client.admin.results import (
    DLQ_SUFFIX,
    DeadLetter,
    DelayedRecord,
    DelayTotals,
    dead_letter,
)
from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import InvalidArgument, UnknownTopic
from raftq.client.common.tasks import sleep
from raftq.client.consumer.fetcher import read_batches
from raftq.client.consumer.records import Fetched, to_records
from raftq.client.net.connection import Reply
from raftq.client.results import Record
from raftq.client.wire.queue_messages import (
    CancelDelayed,
    DeadLetters,
    DeadLettersReply,
    DelayStats,
    DescribeQueue,
    ListDelayed,
)

PORTION = 500
PORTIONS_A_SECOND = 5  # when there is a rate
TIME_MAX = (1 << 63) - 1

Moment = int | datetime  # ms since 1970


@dataclass(frozen=True, slots=True)
class Which:
    """Which letters; what is empty matches everything."""

    group: str = ""
    reason: str = ""
    key: bytes | None = None
    since: int = 0
    until: int = TIME_MAX
    partition: int | None = None


class LetterAdmin(AdminBase):
    """Dead letters: browse, redrive, purge. Delayed records: list, cancel, count."""

    async def dead_letters(  # noqa: PLR0913 - what they can be found by
        self,
        topic: str,
        limit: int = 100,
        *,
        group: str = "",
        reason: str = "",
        key: bytes | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        partition: int | None = None,
    ) -> list[DeadLetter]:
        """The dead letters of a topic (of "orders" or of "orders.dlq", as you like) that are still
        there, at most `limit`."""
        which = _which(group, reason, key, since, until, partition)
        found: list[DeadLetter] = []
        async for reply, partition_key in self._letters(topic, "browse", which, limit):
            wanted = set(reply.message.offsets)
            letters = _records(partition_key, reply.raw)
            found += [dead_letter(one) for one in letters if one.offset in wanted]
        return found

    async def parked_letters(self, topic: str) -> int:
        """Records of a topic that were given up, but whose dead letters are refused: they are not
        settled, and are tried again now and then. The log of the node that leads says why."""
        name = topic.removesuffix(DLQ_SUFFIX)
        numbers = await self._partitions(name, None)
        replies = await asyncio.gather(
            *[
                self._leaders.ask((name, number), DescribeQueue(name, number), self._timeout_s)
                for number in numbers
            ]
        )
        counts = [one.counters.get("parked", 0) for each in replies for one in each.message.groups]
        return sum([count for count in counts if isinstance(count, int)])

    async def redrive(  # noqa: PLR0913
        self,
        topic: str,
        limit: int | None = None,
        rate: float | None = None,
        *,
        group: str = "",
        reason: str = "",
        key: bytes | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        partition: int | None = None,
    ) -> int:
        """Send dead letters back to where they came from, at most `rate` a second; how many."""
        which = _which(group, reason, key, since, until, partition)
        return await self._sweep(topic, "redrive", which, limit, rate)

    async def purge(  # noqa: PLR0913
        self,
        topic: str,
        limit: int | None = None,
        *,
        group: str = "",
        reason: str = "",
        key: bytes | None = None,
        since: Moment | None = None,
        until: Moment | None = None,
        partition: int | None = None,
    ) -> int:
        """Forget dead letters for good; how many."""
        which = _which(group, reason, key, since, until, partition)
        return await self._sweep(topic, "purge", which, limit, None)

    async def _sweep(
        self,
        topic: str,
        verb: Literal["redrive", "purge"],
        which: Which,
        limit: int | None,
        rate: float | None,
    ) -> int:
        if rate is not None and not rate > 0:
            raise InvalidArgument(f"rate must be above 0, not {rate!r}")
        self._ensure_started()
        portion = PORTION
        if rate is not None:
            portion = max(1, min(PORTION, int(rate / PORTIONS_A_SECOND)))
        began = self._loop.time()
        count = 0
        async for reply, _ in self._letters(topic, verb, which, limit, portion):
            count += reply.message.count
            if rate is not None:
                await sleep(max(began + count / rate - self._loop.time(), 0.0))
        return count

    async def _letters(
        self,
        topic: str,
        verb: Literal["browse", "redrive", "purge"],
        which: Which,
        limit: int | None,
        portion: int = PORTION,
    ) -> AsyncIterator[tuple[Reply[DeadLettersReply], tuple[str, int]]]:
        """Answers of all partitions, portion by portion, until `limit` letters were found."""
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidArgument(f"limit must be at least 1 or None, not {limit!r}")
        name = topic if topic.endswith(DLQ_SUFFIX) else topic + DLQ_SUFFIX
        left = limit
        for number in await self._numbers(topic, name, which.partition):
            at = 0
            while left is None or left > 0:
                count = portion if left is None else min(portion, left)
                request = DeadLetters(
                    name, number, verb, at, count, which.group, which.reason, which.key,
                    which.since, which.until,
                )  # fmt: skip
                reply = await self._leaders.ask((name, number), request, self._timeout_s)
                yield reply, (name, number)
                if left is not None:
                    left -= reply.message.count
                if reply.message.next_offset <= at:
                    break
                at = reply.message.next_offset

    async def _numbers(self, topic: str, name: str, partition: int | None) -> Iterable[int]:
        try:
            info = topic_info(await self.metadata((name,)), name)
        except UnknownTopic:
            topic_info(await self.metadata((topic,)), topic)  # there is such a topic, is there?
            return ()
        numbers = range(len(info.partitions))
        if partition is None:
            return numbers
        if partition not in numbers:
            raise InvalidArgument(f"topic {name!r} has no partition {partition}")
        return (partition,)

    # Delayed records.

    async def delayed(
        self,
        topic: str,
        limit: int = 100,
        partition: int | None = None,
        values: bool = False,
    ) -> list[DelayedRecord]:
        """Records that are not yet due, the next one first; with `values` also what is in them."""
        if type(limit) is not int or limit < 1:
            raise InvalidArgument(f"limit must be at least 1, not {limit!r}")
        numbers = await self._partitions(topic, partition)
        found = await asyncio.gather(
            *[self._delayed(topic, number, limit, values) for number in numbers]
        )
        rows = [one for some in found for one in some]
        return sorted(rows, key=lambda one: (one.deliver_at, one.partition, one.offset))[:limit]

    async def _delayed(
        self, topic: str, number: int, limit: int, values: bool
    ) -> list[DelayedRecord]:
        found: list[DelayedRecord] = []
        while len(found) < limit:
            request = ListDelayed(
                topic, number, len(found), min(limit - len(found), PORTION), values=values
            )
            reply = await self._leaders.ask((topic, number), request, self._timeout_s)
            records = {one.offset: one for one in _records((topic, number), reply.raw)}
            for one in reply.message.records:
                record = records.get(one.offset)
                more = () if record is None else (record.key, record.value, record.headers)
                found.append(
                    DelayedRecord(topic, number, one.offset, one.deliver_at, one.priority, *more)
                )
            if not reply.message.records or len(found) >= reply.message.pending:
                break
        return found

    async def cancel_delayed(
        self, topic: str, partition: int, offsets: int | Iterable[int]
    ) -> list[int]:
        """Cancel delayed records by their places, as `send` has told them: those that were pending,
        and will never be seen now."""
        self._ensure_started()
        wanted = (offsets,) if isinstance(offsets, int) else tuple(offsets)
        found: list[int] = []
        where = topic, partition
        for at in range(0, len(wanted), PORTION):
            part = wanted[at : at + PORTION]
            attempts = self._attempts(f"CancelDelayed for {topic}/{partition}")
            request = CancelDelayed(topic, partition, part)
            reply = await self._leaders.ask(where, request, self._timeout_s, attempts)
            if attempts.unknown and attempts.last and len(reply.message.cancelled) < len(part):
                # An earlier attempt may have cancelled the others, or they were due before it.
                raise copy_error(attempts.last).with_outcome("unknown")
            found += reply.message.cancelled
        return found

    async def delay_totals(self, topic: str) -> DelayTotals:
        numbers = await self._partitions(topic, None)
        replies = await asyncio.gather(
            *[
                self._leaders.ask((topic, number), DelayStats(topic, number), self._timeout_s)
                for number in numbers
            ]
        )
        told = [reply.message for reply in replies]
        return DelayTotals(
            sum([one.pending for one in told]),
            sum([one.scheduled for one in told]),
            sum([one.fired for one in told]),
            sum([one.cancelled for one in told]),
            max([one.late_ms_max for one in told], default=0),
        )

    async def _partitions(self, topic: str, partition: int | None) -> list[int]:
        count = len(topic_info(await self.metadata((topic,)), topic).partitions)
        if partition is not None and not 0 <= partition < count:
            raise InvalidArgument(f"topic {topic!r} has no partition {partition}")
        return list(range(count)) if partition is None else [partition]


def _which(
    group: str,
    reason: str,
    key: bytes | None,
    since: Moment | None,
    until: Moment | None,
    partition: int | None,
) -> Which:
    start = 0 if since is None else _ms(since)
    end = TIME_MAX if until is None else _ms(until)
    return Which(group, reason, key, start, end, partition)


def _ms(moment: Moment) -> int:
    if isinstance(moment, datetime):
        return int(moment.timestamp() * 1000)
    if type(moment) is not int:
        raise InvalidArgument(f"a time is a datetime or ms since 1970, not {moment!r}")
    return moment


def _records(partition_key: tuple[str, int], raw: memoryview) -> list[Record]:
    return [
        record
        for batch in read_batches(raw)
        for record in to_records(Fetched(*partition_key, 0, batch))
    ]
