"""Reads a page of one partition, whoever leads it. (Shell.)

A consumer keeps a position and fetches ahead; a page is asked for once, at any position. So this
asks the leader directly, with the client library's routes and connections, and tries again like
every client while the leadership moves.
"""

from raftq.client.base import Client
from raftq.client.connection import Connection, Reply
from raftq.client.options import Bootstrap, ClientOptions
from raftq.client.retry import Backoff
from raftq.client.tasks import pause
from raftq.client.wire.batch import FLAG_CONTROL, decode
from raftq.client.wire.errors import (
    InternalError,
    NotLeader,
    OffsetOutOfRange,
    RaftqError,
    UnknownCode,
    UnknownPartition,
)
from raftq.client.wire.messages import (
    Fetch,
    FetchedPartition,
    FetchPartition,
    FetchReply,
    ListOffsets,
    OffsetQuery,
)
from raftq.client.wire.record import Record
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
            await pause(wait_s)

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
        page = Page([], offset)
        room = self._bytes_max
        for _ in range(FETCHES_MAX):
            fetched, reply = await self._fetch(page.next_offset, min(room, FETCH_BYTES_MAX))
            before = page.next_offset
            room -= self._take(page, reply, room)
            end = page.next_offset
            if end == before or end >= fetched.high_watermark:
                break
            if room <= 0 or len(page.records) >= self._limit:
                break
        return page

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

    def _take(self, page: Page, reply: Reply[FetchReply], room: int) -> int:
        """Add what fits; the bytes of it. The first record is taken whatever its size."""
        raw, at, taken = bytes(reply.raw), 0, 0
        while at < len(raw):
            batch = decode(raw, at)
            at += batch.length
            if batch.end_offset <= page.next_offset:
                continue
            records = [] if batch.flags & FLAG_CONTROL else batch.records()
            for record in records:
                if record.offset < page.next_offset:
                    continue
                size = _size(record)
                full = len(page.records) >= self._limit or taken + size > room
                if full and page.records:
                    return taken if len(page.records) >= self._limit else max(taken, room)
                page.records.append(record)
                page.next_offset = record.offset + 1
                taken += size
            page.next_offset = batch.end_offset
        return taken


def _size(record: Record) -> int:
    size = len(record.value) + (0 if record.key is None else len(record.key))
    return size + sum(len(name) + len(value) for name, value in record.headers.items())


def _raise(code: str, topic: str, partition: int) -> None:
    if not code:
        return
    known = RaftqError.registry.get(code, UnknownCode)
    raise known(f"partition {partition} of {topic!r}: {code.replace('_', ' ')}")
