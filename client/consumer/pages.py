"""Shell: one page of a partition, read from its leader.

A consumer keeps a position and fetches ahead. A page is asked for once, at any position, and
nothing is kept afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from raftq.client.common.errors import OffsetOutOfRange, RaftqError, RemoteProtocolError
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.fetcher import read_batches
from raftq.client.consumer.records import Fetched, to_records
from raftq.client.net.attempts import Attempts
from raftq.client.net.connection import Connection
from raftq.client.net.leaders import Leaders, error_of_code
from raftq.client.net.pool import Pool
from raftq.client.options import ClientOptions
from raftq.client.results import Record
from raftq.client.wire.messages import Fetch, FetchPartition, ListOffsets, OffsetQuery

FETCH_BYTES_MAX = 1024 * 1024
FETCHES_MAX = 64

A = TypeVar("A")


class Position(NamedTuple):
    """Where a page begins: at an offset, at a time in ms, or (neither) at the first record kept."""

    offset: int | None = None
    time_ms: int | None = None


@dataclass(slots=True)
class Page:
    """Records in the order of their offsets, and the offset at which the next page begins."""

    records: list[Record]
    next_offset: int


class _OpenPage:
    """A page that still has room for records."""

    __slots__ = ("full", "limit", "next_offset", "records", "room")

    def __init__(self, offset: int, limit: int, bytes_max: int) -> None:
        self.records: list[Record] = []
        self.next_offset = offset
        self.limit = limit
        self.room = bytes_max
        self.full = False

    def add_batches(self, key: PartitionKey, raw: memoryview) -> None:
        for batch in read_batches(raw):
            if self.full:
                return
            if batch.end_offset <= self.next_offset:
                continue
            records = to_records(Fetched(*key, self.next_offset, batch))
            if batch.body_length <= self.room and len(self.records) + len(records) <= self.limit:
                self.records += records
                self.room -= batch.body_length
            else:
                self._add_some(records)
            if not self.full:
                self.next_offset = batch.end_offset
                self.full = len(self.records) >= self.limit

    def _add_some(self, records: list[Record]) -> None:
        """Add the records that fit. The first record of a page fits at any size."""
        for record in records:
            size = _size(record)
            if len(self.records) >= self.limit or (size > self.room and self.records):
                self.full = True
                return
            self.records.append(record)
            self.next_offset = record.offset + 1
            self.room -= size


class Pages:
    """Reads pages with the routes and connections of a client."""

    def __init__(self, leaders: Leaders, pool: Pool, options: ClientOptions) -> None:
        self._leaders = leaders
        self._pool = pool
        self._options = options

    async def read(
        self, key: PartitionKey, position: Position, size: tuple[int, int], timeout_s: float
    ) -> Page:
        """Read what is there now: at most `size` = (records, bytes), but one record of any size.

        OffsetOutOfRange when the partition does not have the offset. While the leader moves, it is
        tried again; when time runs out, the last problem is raised.
        """
        attempts = Attempts(f"reading {key[0]}/{key[1]}", self._options, timeout_s)
        while True:
            try:
                connection = await self._pool.get(await self._leaders.find(key, attempts))
                return await _read(connection, key, position, size)
            except RaftqError as error:
                if not error.retriable:
                    raise
                self._leaders.learn(key, error)
                try:
                    await attempts.wait()
                except RaftqError:
                    raise error from None


async def _read(
    connection: Connection, key: PartitionKey, position: Position, size: tuple[int, int]
) -> Page:
    offset = position.offset
    if offset is None:
        offset = await _find(connection, key, position.time_ms)
    page = _OpenPage(offset, *size)
    for _ in range(FETCHES_MAX):
        before = page.next_offset
        wanted = FetchPartition(*key, before, max(1, min(page.room, FETCH_BYTES_MAX)))
        reply = await connection.request(Fetch((wanted,)))
        fetched = _only(reply.message.partitions)
        if fetched.error == OffsetOutOfRange.code:
            kept = f"[{fetched.start_offset}, {fetched.high_watermark})"
            raise OffsetOutOfRange(f"offset {before} is not kept; the partition has {kept}")
        if fetched.error:
            raise error_of_code(fetched.error, key)
        page.add_batches(key, reply.raw)
        end = page.next_offset
        if page.full or end == before or end >= fetched.high_watermark:
            break
    return Page(page.records, page.next_offset)


async def _find(connection: Connection, key: PartitionKey, time_ms: int | None) -> int:
    """The offset of a time, or the first offset kept."""
    query = OffsetQuery(*key, "earliest")
    if time_ms is not None:
        query = OffsetQuery(*key, "time", time_ms)
    answer = _only((await connection.request(ListOffsets((query,)))).message.answers)
    if answer.error:
        raise error_of_code(answer.error, key)
    return answer.offset


def _only(answers: Sequence[A]) -> A:
    if len(answers) != 1:
        raise RemoteProtocolError(f"one partition was asked about, {len(answers)} were answered")
    return answers[0]


def _size(record: Record) -> int:
    size = len(record.value) + (0 if record.key is None else len(record.key))
    return size + sum(len(name) + len(value) for name, value in record.headers.items())
