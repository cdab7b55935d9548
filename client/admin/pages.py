"""Shell: the admin client's verbs that answer page by page: records, dead letters, delayed records.

A page says where the next one begins, so a caller keeps nothing but that place.
"""

from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Literal, NamedTuple

from raftq.client.admin.base import AdminBase, topic_info
from raftq.client.admin.dead_letters import PORTION, PORTIONS_A_SECOND, TIME_MAX
from raftq.client.admin.results import DelayedRecord
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.fetcher import read_batches
from raftq.client.consumer.pages import Page, Pages, Position
from raftq.client.consumer.records import Fetched, to_records
from raftq.client.results import Record
from raftq.client.wire.queue_messages import DeadLetters, DeadLettersReply, ListDelayed

PAGE_BYTES = 8 * 1024 * 1024
LOOKS_MAX = 200  # portions that one page of letters looks at


class LetterPlace(NamedTuple):
    """Where a page of dead letters begins."""

    partition: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterQuery:
    """Which dead letters; what is empty matches everything. Times are ms since 1970."""

    group: str = ""
    reason: str = ""
    key: bytes | None = None
    since: int = 0
    until: int = TIME_MAX
    partition: int | None = None


@dataclass(slots=True)
class LetterPage:
    """Dead letters as they are stored. `next` is None when everything was looked at."""

    records: list[Record]
    next: LetterPlace | None = None


@dataclass(slots=True)
class Swept:
    """How many letters were sent back or forgotten; `complete` when no match is left."""

    count: int
    complete: bool


@dataclass(slots=True)
class DelayedPage:
    """Delayed records, the next one first, and how many the topic has in all."""

    records: list[DelayedRecord]
    pending: int


class PageAdmin(AdminBase):
    """Pages of records, dead letters and delayed records."""

    async def read_page(
        self,
        topic: str,
        partition: int,
        position: Position = Position(),  # noqa: B008 - it cannot change
        limit: int = 100,
        bytes_max: int = PAGE_BYTES,
    ) -> Page:
        """Records that can be read now, at most `limit` and about `bytes_max` bytes; one record at
        least if there is one. OffsetOutOfRange when the partition does not have the offset."""
        self._ensure_started()
        pages = Pages(self._leaders, self._pool, self.options)
        return await pages.read((topic, partition), position, (limit, bytes_max), self._timeout_s)

    # Dead letters; the topic is the one that holds them.

    async def letter_page(
        self,
        topic: str,
        which: LetterQuery,
        place: LetterPlace | None = None,
        limit: int = 100,
    ) -> LetterPage:
        """Dead letters of a dead-letter topic from a place on. Where few letters match, a page may
        have less than `limit` letters and still have a next one."""
        count = len(topic_info(await self.metadata((topic,)), topic).partitions)
        found: list[Record] = []
        at = place or LetterPlace(which.partition or 0)
        for _ in range(LOOKS_MAX):
            if at.partition >= count:
                return LetterPage(found)
            key = topic, at.partition
            request = _request(topic, which, "browse", at, min(limit - len(found), PORTION))
            reply = await self._leaders.ask(key, request, self._timeout_s)
            offsets = dict.fromkeys(reply.message.offsets)
            found += [one for one in _records(key, reply.raw) if one.offset in offsets]
            following = _after(which, at, reply.message, count)
            if following is None:
                return LetterPage(found)
            at = following
            if len(found) >= limit:
                break
        return LetterPage(found, at)

    async def sweep_letters(
        self,
        topic: str,
        verb: Literal["redrive", "purge"],
        which: LetterQuery,
        limit: int,
        rate: float | None = None,
        seconds: float = 20.0,
    ) -> Swept:
        """Redrive or purge letters for at most about `seconds`, at most `rate` letters a second.
        Letters that are done do not come up again, so the next call goes on where this one ends."""
        count = len(topic_info(await self.metadata((topic,)), topic).partitions)
        portion = PORTION
        if rate is not None:
            portion = max(1, min(PORTION, int(rate / PORTIONS_A_SECOND)))
        began = self._loop.time()
        done = 0
        at: LetterPlace | None = LetterPlace(which.partition or 0)
        while at is not None and at.partition < count and done < limit:
            request = _request(topic, which, verb, at, min(portion, limit - done))
            reply = await self._leaders.ask((topic, at.partition), request, self._timeout_s)
            done += reply.message.count
            at = _after(which, at, reply.message, count)
            spent_s = self._loop.time() - began
            ahead_s = max(done / rate - spent_s, 0.0) if rate else 0.0
            if spent_s + ahead_s > seconds:
                break
            if at is not None:
                await sleep(ahead_s)
        return Swept(done, at is None or at.partition >= count)

    # Delayed records.

    async def delayed_page(self, topic: str, skip: int = 0, limit: int = 100) -> DelayedPage:
        """Records that are not yet due, without the first `skip` of them."""
        keys = await self._keys_of_topic(topic)
        requests = {key: ListDelayed(*key, 0, skip + limit) for key in keys}
        answers = await self._ask_partitions(requests, self._timeout_s)
        lists: list[list[tuple[int, int, int, int]]] = []
        pending = 0
        for (_, number), reply in answers.items():
            if isinstance(reply, RaftqError):
                raise reply
            pending += reply.pending
            rows = [(one.deliver_at, number, one.offset, one.priority) for one in reply.records]
            lists.append(rows)
        rows = list(islice(merge(*lists), skip, skip + limit))
        records = [DelayedRecord(topic, row[1], row[2], row[0], row[3]) for row in rows]
        return DelayedPage(records, pending)

    async def find_delayed(
        self, topic: str, offset: int, partition: int | None = None
    ) -> DelayedRecord | None:
        """The delayed record with this offset, in one partition or in the first that has one."""
        keys = await self._keys_of_topic(topic)
        requests = {
            key: ListDelayed(*key, 0, 1, offset) for key in keys if partition in (None, key[1])
        }
        answers = await self._ask_partitions(requests, self._timeout_s)
        problem: RaftqError | None = None
        for (_, number), reply in answers.items():
            if isinstance(reply, RaftqError):
                problem = reply
            elif reply.records:
                one = reply.records[0]
                return DelayedRecord(topic, number, one.offset, one.deliver_at, one.priority)
        if problem is not None:
            raise problem
        return None

    async def _keys_of_topic(self, topic: str) -> list[PartitionKey]:
        info = topic_info(await self.metadata((topic,)), topic)
        return [(topic, number) for number in range(len(info.partitions))]


def _request(
    topic: str,
    which: LetterQuery,
    verb: Literal["browse", "redrive", "purge"],
    at: LetterPlace,
    limit: int,
) -> DeadLetters:
    return DeadLetters(
        topic, at.partition, verb, at.offset, limit, which.group, which.reason, which.key,
        which.since, which.until,
    )  # fmt: skip


def _after(
    which: LetterQuery, at: LetterPlace, reply: DeadLettersReply, count: int
) -> LetterPlace | None:
    """Where to go on: in the next partition when nothing is left to look at in this one."""
    if reply.next_offset > at.offset:
        return LetterPlace(at.partition, reply.next_offset)
    if which.partition is not None or at.partition + 1 >= count:
        return None
    return LetterPlace(at.partition + 1)


def _records(key: PartitionKey, raw: memoryview) -> list[Record]:
    return [record for batch in read_batches(raw) for record in to_records(Fetched(*key, 0, batch))]
