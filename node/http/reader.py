"""Reads a page of one partition, whoever leads it. (Shell.)

A consumer keeps a position and fetches ahead; a page is asked for once, at any position. So this
asks the leader directly, with the client library's routes and connections, and tries again like
every client while the leadership moves.
"""

from raftq.client.common.backoff import Backoff
from raftq.client.common.errors import (
    InternalError,
    NotLeader,
    OffsetOutOfRange,
    RaftqError,
    UnknownCode,
    UnknownPartition,
)
from raftq.client.common.tasks import sleep
from raftq.client.consumer.records import Fetched, to_records
from raftq.client.net.client import Client
from raftq.client.net.connection import Connection, Reply
from raftq.client.options import Bootstrap, ClientOptions
from raftq.client.results import Record
from raftq.client.wire.batch import Batch
from raftq.client.wire.messages import (
    Fetch,
    FetchedPartition,
    FetchPartition,
    FetchReply,
    ListOffsets,
    OffsetQuery,
)
from raftq.node.http.gateway import Page, Position

FETCH_BYTES_MAX = 1024 * 1024
FETCHES_MAX = 64


class PageReader(Client):
    """See the module's docstring."""

    def __init__(self, bootstrap: Bootstrap, options: ClientOptions, timeout_s: float) -> None:
        super().__init__(bootstrap, options, "page reader")
        self._options = options
        self._timeout_s = timeout_s

    async def read(
        self, topic: str, partition: int, position: Position, limit: int, bytes_max: int
    ) -> Page:
        self._ensure_started()
        options = self._options
        backoff = Backoff(options.retry_backoff_ms, options.retry_backoff_ms_max, options.rng)
        deadline = self._loop.time() + self._timeout_s
        while True:
            try:
                connection = await self._leader(topic, partition)
                asked = _Asked(connection, topic, partition, limit, bytes_max)
                return await asked.read(position)
            except RaftqError as error:
                wait_s = backoff.next_s()
                if not error.retriable or self._loop.time() + wait_s >= deadline:
                    raise
                self._routes.hint(topic, partition, error)
            self._routes.request_refresh()
            await sleep(wait_s)

    async def _leader(self, topic: str, partition: int) -> Connection:
        info = await self._routes.topic(topic)
        if partition >= len(info.partitions):
            raise UnknownPartition(f"topic {topic!r} has {len(info.partitions)} partitions")
        found = self._routes.leader(topic, partition)
        if found is None:
            raise NotLeader(f"nobody leads partition {partition} of {topic!r} at the moment")
        return await self._pool.get(found[1])


class _Asked:
    """One attempt to read a page from one node."""

    __slots__ = ("_bytes_max", "_connection", "_limit", "_partition", "_topic")

    def __init__(
        self, connection: Connection, topic: str, partition: int, limit: int, bytes_max: int
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._partition = partition
        self._limit = limit
        self._bytes_max = bytes_max

    async def read(self, position: Position) -> Page:
        offset = position.offset
        if offset is None:
            offset = await self._find(position.time_ms)
        taken = _Taken(offset, self._limit, self._bytes_max)
        for _ in range(FETCHES_MAX):
            before = taken.next_offset
            bytes_max = max(1, min(taken.room, FETCH_BYTES_MAX))
            fetched, reply = await self._fetch(before, bytes_max)
            taken.add_all(self._topic, self._partition, bytes(reply.raw))
            end = taken.next_offset
            if taken.full or end == before or end >= fetched.high_watermark:
                break
        return Page(taken.records, taken.next_offset)

    async def _find(self, time_ms: int | None) -> int:
        topic, partition = self._topic, self._partition
        if time_ms is None:
            query = OffsetQuery(topic, partition, "earliest")
        else:
            query = OffsetQuery(topic, partition, "time", time_ms)
        reply = await self._connection.request(ListOffsets((query,)))
        answers = reply.message.answers
        if len(answers) != 1:
            raise InternalError("the leader's answer is not about the partition asked for")
        _raise(answers[0].error, topic, partition)
        return answers[0].offset

    async def _fetch(
        self, offset: int, bytes_max: int
    ) -> tuple[FetchedPartition, Reply[FetchReply]]:
        wanted = FetchPartition(self._topic, self._partition, offset, bytes_max)
        reply = await self._connection.request(Fetch((wanted,)))
        answers = reply.message.partitions
        if len(answers) != 1:
            raise InternalError("the leader's answer is not about the partition asked for")
        found = answers[0]
        if found.error == OffsetOutOfRange.code:
            kept = f"[{found.start_offset}, {found.high_watermark})"
            raise OffsetOutOfRange(f"offset {offset} is not kept; the partition has {kept}")
        _raise(found.error, self._topic, self._partition)
        return found, reply


class _Taken:
    """The records of a page, as far as they are there."""

    __slots__ = ("_limit", "full", "next_offset", "records", "room")

    def __init__(self, offset: int, limit: int, bytes_max: int) -> None:
        self.records: list[Record] = []
        self.next_offset = offset
        self.room = bytes_max
        self.full = False
        self._limit = limit

    def add_all(self, topic: str, partition: int, raw: bytes) -> None:
        """Add batches that lie back to back, as long as there is room."""
        at = 0
        while at < len(raw) and not self.full:
            batch = Batch(raw, at)
            at += batch.length
            if batch.end_offset <= self.next_offset:
                continue
            records = to_records(Fetched(topic, partition, self.next_offset, batch))
            if batch.body_length <= self.room and len(self.records) + len(records) <= self._limit:
                self.records += records
                self.room -= batch.body_length
            else:
                self._add_some(records)
            if not self.full:
                self.next_offset = batch.end_offset
                self.full = len(self.records) >= self._limit

    def _add_some(self, records: list[Record]) -> None:
        """Add what fits, but one record whatever its size."""
        for record in records:
            size = _size(record)
            if len(self.records) >= self._limit or (size > self.room and self.records):
                self.full = True
                return
            self.records.append(record)
            self.next_offset = record.offset + 1
            self.room -= size


def _size(record: Record) -> int:
    size = len(record.value) + (0 if record.key is None else len(record.key))
    return size + sum(len(name) + len(value) for name, value in record.headers.items())


def _raise(code: str, topic: str, partition: int) -> None:
    if not code:
        return
    known = RaftqError.registry.get(code, UnknownCode)
    raise known(f"partition {partition} of {topic!r}: {code.replace('_', ' ')}")
