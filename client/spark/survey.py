"""Shell: what the driver must know about topics: their partitions, and offsets in them.

Every request is repeated until it is answered or time is over: a leader that moves while a job is
planned, or a trigger fires, must not end the job.
"""

import re
from collections.abc import Iterable, Mapping

from raftq.client.admin.requests import AdminRequests
from raftq.client.common.errors import InvalidArgument, RaftqError, UnknownTopic
from raftq.client.common.names import is_internal
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.stored_offsets import Offsets as GroupOffsets
from raftq.client.consumer.stored_offsets import first_error
from raftq.client.net.client import Client
from raftq.client.net.leaders import Answers
from raftq.client.options import AdminOptions, Bootstrap
from raftq.client.spark.options import Bound, Point, ReadOptions
from raftq.client.spark.ranges import Offsets
from raftq.client.sync.blocking import Blocking
from raftq.client.wire.messages import ListOffsets, ListOffsetsReply, OffsetQuery

Found = dict[PartitionKey, int | RaftqError]


class _Surveyor(Client):
    """Asks nodes and leaders; the asyncio side."""

    def __init__(self, bootstrap: Bootstrap, options: AdminOptions) -> None:
        super().__init__(bootstrap, options, "surveyor")
        self._options = options
        self._requests: AdminRequests

    def _on_start(self) -> None:
        self._requests = AdminRequests(self._routes, self._pool, self._options)

    async def partition_counts(self, topics: tuple[str, ...] | None) -> dict[str, int]:
        """The number of partitions, by topic. Raises UnknownTopic for an unknown topic."""
        self._ensure_started()
        reply = await self._requests.metadata(topics)
        counts = {topic.topic: len(topic.partitions) for topic in reply.topics if not topic.error}
        for topic in topics or ():
            if topic not in counts:
                # A new topic is not known everywhere at once: this waits as long as that may take.
                counts[topic] = len((await self._routes.topic(topic)).partitions)
        return counts

    async def points(self, wanted: Mapping[PartitionKey, Point], timeout_s: float) -> Found:
        """The offset of each point: the first record of a time or later, or an end of the log."""
        self._ensure_started()

        def build(asked: list[PartitionKey]) -> ListOffsets:
            return ListOffsets(tuple(_query(key, wanted[key]) for key in asked))

        return await self._requests.leaders.ask_each(list(wanted), build, _read, timeout_s)

    async def store(
        self, group: str, offsets: Mapping[PartitionKey, int], timeout_s: float
    ) -> None:
        self._ensure_started()
        stored = await GroupOffsets(group, self._requests.leaders).store(offsets, {}, "", timeout_s)
        error = first_error(stored)
        if error is not None:
            raise error


def _query(key: PartitionKey, point: Point) -> OffsetQuery:
    by, at = point
    if by == "offset":
        raise InvalidArgument("an offset needs no question")
    return OffsetQuery(*key, by, at)


def _read(reply: ListOffsetsReply) -> Answers[int]:
    return [
        ((answer.topic, answer.partition), answer.error, answer.offset) for answer in reply.answers
    ]


class Survey(Blocking):
    """Answers the questions of a driver. Close it with `close` or `with`."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._timeout_s = options.poll_timeout_ms / 1000
        admin = AdminOptions(name="spark", timeout_ms=options.poll_timeout_ms)
        self._client = _Surveyor(options.bootstrap, admin)
        super().__init__(self._client)

    def keys(self) -> list[PartitionKey]:
        """The partitions that the options select, as they are now."""
        options = self._options
        if options.assigned:
            counts = self._call(self._client.partition_counts(tuple(options.assigned)))
            keys = [(topic, part) for topic, parts in options.assigned.items() for part in parts]
            missing = [key for key in keys if key[1] >= counts[key[0]]]
            if missing:
                topic, partition = missing[0]
                raise InvalidArgument(
                    f"topic {topic!r} has {counts[topic]} partitions, so no partition {partition}"
                )
            return sorted(keys)
        counts = self._call(self._client.partition_counts(options.topics or None))
        if options.pattern:
            pattern = re.compile(options.pattern)
            counts = {
                topic: count
                for topic, count in counts.items()
                if pattern.fullmatch(topic) and not is_internal(topic)
            }
        only = options.partitions
        return sorted(
            (topic, number)
            for topic, count in counts.items()
            for number in range(count)
            if not only or number in only
        )

    def resolve(self, keys: Iterable[PartitionKey], bound: Bound) -> Offsets:
        """The offset of each partition's bound. Raises if one cannot be had in time."""
        found: Offsets = {}
        wanted: dict[PartitionKey, Point] = {}
        for key in keys:
            point = bound.at(key)
            if point[0] == "offset":
                found[key] = point[1]
            else:
                wanted[key] = point
        answers = self._call(self._client.points(wanted, self._timeout_s))
        for key, answer in answers.items():
            if isinstance(answer, RaftqError):
                raise answer
            found[key] = answer
        return found

    def ask(self, keys: Iterable[PartitionKey], point: Point, timeout_s: float) -> Found:
        """The same point of all of these, or the error."""
        wanted = dict.fromkeys(keys, point)
        return self._call(self._client.points(wanted, timeout_s))

    def all_of(self, keys: Iterable[PartitionKey], point: Point) -> Offsets:
        """The same point of all of these. Raises if one cannot be had in time."""
        return self.resolve(keys, Bound(point))

    def store(self, group: str, offsets: Mapping[PartitionKey, int], timeout_s: float) -> None:
        """Stores positions for a group without being a member of it."""
        self._call(self._client.store(group, offsets, timeout_s))


def is_gone(error: object) -> bool:
    return isinstance(error, UnknownTopic)
