"""Shell: sends the requests of an admin client to nodes, leaders and coordinators.

Any node takes most requests. When a node does not answer, the request goes to the next node until
`timeout_ms` is spent. When an attempt may have taken effect and a later one finds it done ("exists
already"), it counts as done.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from raftq.client.common.backoff import out_of_time
from raftq.client.common.errors import (
    InvalidArgument,
    NotLeader,
    Outcome,
    RaftqError,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.fetcher import read_batches
from raftq.client.consumer.pages import Pages
from raftq.client.consumer.records import Fetched, to_records
from raftq.client.net.attempts import Attempts
from raftq.client.net.connection import Reply
from raftq.client.net.coordinator import CoordinatorClient
from raftq.client.net.leaders import Leaders
from raftq.client.net.pool import Pool
from raftq.client.net.routes import Routes
from raftq.client.options import Address, AdminOptions
from raftq.client.results import Record
from raftq.client.wire.messages import Metadata, MetadataReply, Request, TopicInfo, WireMessage

AT_ONCE_MAX = 64  # requests to leaders under way

R = TypeVar("R", bound=WireMessage)
T = TypeVar("T")


class AdminRequests:
    """Sends requests until they are answered or `timeout_ms` is spent."""

    def __init__(self, routes: Routes, pool: Pool, options: AdminOptions) -> None:
        self.leaders = Leaders(routes, pool, options)
        self.pages = Pages(self.leaders, pool, options)
        self._routes = routes
        self._pool = pool
        self._options = options
        self.timeout_s = options.timeout_ms / 1000

    # Any node.

    async def send(self, request: Request[R], done: type[RaftqError] | None = None) -> R:
        """Ask one node after the other until one answers. `done` is the error that means success
        when an earlier attempt may have taken effect; the answer is of no use then."""
        last: RaftqError | None = None
        unknown = False
        backoff = self._options.backoff()
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    for address in await self._addresses():
                        try:
                            return await self.ask_node(address, request)
                        except RaftqError as error:
                            if unknown and done is not None and isinstance(error, done):
                                return _nothing(request)
                            unknown = unknown or error.outcome == "unknown"
                            last = error
                            if _is_final(error):
                                raise
                    await sleep(backoff.next_s())
        except TimeoutError:
            what = f"{type(request).__name__} was not answered in {self._options.timeout_ms} ms"
            outcome: Outcome = "unknown" if unknown else "failed"
            raise out_of_time(what, last).with_outcome(outcome) from last

    async def ask_node(
        self, address: Address, request: Request[R], timeout_s: float | None = None
    ) -> R:
        """Ask one node once."""
        connection = await self._pool.get(address)
        return (await connection.request(request, timeout_s=timeout_s)).message

    async def metadata(self, topics: tuple[str, ...] | None) -> MetadataReply:
        """What a node knows about these topics; None asks for all topics."""
        return await self.send(Metadata(topics))

    async def topic(self, name: str) -> TopicInfo:
        """What a node knows about one topic. UnknownTopic when there is none."""
        return topic_info(await self.metadata((name,)), name)

    async def partitions(self, topic: str, partition: int | None = None) -> list[int]:
        """The numbers of a topic's partitions, or only `partition`, which must exist."""
        count = len((await self.topic(topic)).partitions)
        if partition is not None and not 0 <= partition < count:
            raise InvalidArgument(
                f"topic {topic!r} has {count} partitions, so no partition {partition}"
            )
        return list(range(count)) if partition is None else [partition]

    async def topic_keys(self, topic: str, partition: int | None = None) -> list[PartitionKey]:
        """The partitions of a topic, or only `partition`, which must exist."""
        return [(topic, number) for number in await self.partitions(topic, partition)]

    async def keys(self, topics: Iterable[str] | None) -> list[PartitionKey]:
        """All partitions of these topics, or of all topics; none of a topic that does not exist."""
        reply = await self.metadata(None if topics is None else tuple(topics))
        return [
            (info.topic, part.partition)
            for info in reply.topics
            if not info.error
            for part in info.partitions
        ]

    async def _addresses(self) -> list[Address]:
        """The nodes to ask. The first request of a client learns them."""
        if not self._routes.nodes:
            await self._routes.refresh_patiently(asyncio.get_running_loop().time())
        return self._routes.addresses()

    # Leaders and coordinators.

    async def ask_leader(
        self, key: PartitionKey, request: Request[R], attempts: Attempts | None = None
    ) -> Reply[R]:
        """Ask the leader of one partition."""
        return await self.leaders.ask(key, request, self.timeout_s, attempts)

    async def ask_leaders(
        self, requests: Mapping[PartitionKey, Request[R]], nothing: type[RaftqError] | None = None
    ) -> dict[PartitionKey, R]:
        """Ask the leader of each partition. Partitions that answer with `nothing` are left out."""
        found: dict[PartitionKey, R] = {}
        for key, answer in (await self.try_leaders(requests)).items():
            if not isinstance(answer, RaftqError):
                found[key] = answer
            elif nothing is None or not isinstance(answer, nothing):
                raise answer
        return found

    async def try_leaders(
        self, requests: Mapping[PartitionKey, Request[R]], timeout_s: float | None = None
    ) -> dict[PartitionKey, R | RaftqError]:
        """Ask the leader of each partition. Returns an answer or an error for each."""
        room = asyncio.Semaphore(AT_ONCE_MAX)
        limit_s = self.timeout_s if timeout_s is None else timeout_s

        async def one(key: PartitionKey, request: Request[R]) -> R | RaftqError:
            async with room:
                try:
                    return (await self.leaders.ask(key, request, limit_s)).message
                except RaftqError as error:
                    return error

        answers = await asyncio.gather(*[one(*item) for item in requests.items()])
        return dict(zip(requests, answers, strict=True))

    async def ask_coordinator(self, group: str, request: Request[R]) -> R:
        """Ask the coordinator of one group."""
        coordinator = CoordinatorClient(group, self._routes, self._pool, self._options)
        return await coordinator.ask(request, self.timeout_s)

    # Time.

    def attempts(self, what: str) -> Attempts:
        return Attempts(what, self._options, self.timeout_s)

    async def until(
        self, look: Callable[[], Awaitable[T | None]], problem: Callable[[str], str]
    ) -> T:
        """Look again and again until something is found. `problem` is the text of the error when
        the given time is spent."""
        backoff = self._options.backoff()
        try:
            async with asyncio.timeout(self.timeout_s):
                while (found := await look()) is None:
                    await sleep(backoff.next_s())
                return found
        except TimeoutError:
            raise out_of_time(problem(f"{self._options.timeout_ms} ms"), None) from None


def _is_final(error: RaftqError) -> bool:
    return not error.retriable or isinstance(error, UnknownTopic | UnknownPartition | NotLeader)


def _nothing(request: Request[R]) -> R:
    """For callers that do not use the answer."""
    return None  # type: ignore[return-value]


def topic_info(reply: MetadataReply, name: str) -> TopicInfo:
    for info in reply.topics:
        if info.topic == name and not info.error:
            return info
    raise UnknownTopic(f"no topic is named {name!r}")


def records_of(key: PartitionKey, raw: memoryview) -> list[Record]:
    """The records in the batches of a reply."""
    batches = read_batches(raw)
    return [record for batch in batches for record in to_records(Fetched(*key, 0, batch))]
