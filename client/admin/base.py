"""Shell: what the verbs of the admin client have in common: asking any node, or those who lead.

Any node takes most requests. One that cannot be answered goes to the next node until `timeout_ms`
is spent. When an attempt may have taken effect and a later one finds it done ("exists already"), it
counts as done.
"""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

from raftq.client.common.backoff import Backoff, out_of_time
from raftq.client.common.errors import (
    NotLeader,
    Outcome,
    RaftqError,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey
from raftq.client.net.attempts import Attempts
from raftq.client.net.client import Client
from raftq.client.net.coordinator import CoordinatorClient
from raftq.client.net.leaders import Leaders
from raftq.client.options import AdminOptions, Bootstrap
from raftq.client.wire.messages import Metadata, MetadataReply, Request, TopicInfo, WireMessage

AT_ONCE_MAX = 64  # requests to leaders under way

R = TypeVar("R", bound=WireMessage)


class AdminBase(Client):
    """Asks nodes, leaders and coordinators."""

    def __init__(self, bootstrap: Bootstrap, options: AdminOptions) -> None:
        super().__init__(bootstrap, options, "admin client")
        self.options = options
        self._leaders: Leaders

    def _on_start(self) -> None:
        self._leaders = Leaders(self._routes, self._pool, self.options)

    @property
    def _timeout_s(self) -> float:
        return self.options.timeout_ms / 1000

    def _coordinator(self, group: str) -> CoordinatorClient:
        self._ensure_started()
        return CoordinatorClient(group, self._routes, self._pool, self.options)

    def _attempts(self, what: str) -> Attempts:
        self._ensure_started()
        return Attempts(what, self.options, self._timeout_s)

    async def _ask_partitions(
        self, requests: Mapping[PartitionKey, Request[R]], timeout_s: float
    ) -> dict[PartitionKey, R | RaftqError]:
        """Ask the leader of each of these partitions: an answer or an error for each."""
        self._ensure_started()
        room = asyncio.Semaphore(AT_ONCE_MAX)

        async def one(key: PartitionKey, request: Request[R]) -> R | RaftqError:
            async with room:
                try:
                    return (await self._leaders.ask(key, request, timeout_s)).message
                except RaftqError as error:
                    return error

        answers = await asyncio.gather(*[one(*item) for item in requests.items()])
        return dict(zip(requests, answers, strict=True))

    async def metadata(self, topics: tuple[str, ...] | None) -> MetadataReply:
        """What a node knows, unprocessed; None asks for all topics."""
        return await self._request(Metadata(topics))

    async def _request(self, request: Request[R], done: type[RaftqError] | None = None) -> R:
        """Ask one node after the other until one answers. `done` is the error that means success
        when an earlier attempt may have taken effect; the answer is of no use then."""
        self._ensure_started()
        options = self.options
        backoff = Backoff(options.retry_backoff_ms, options.retry_backoff_ms_max, options.rng)
        last: RaftqError | None = None
        unknown = False
        try:
            async with asyncio.timeout(options.timeout_ms / 1000):
                while True:
                    for address in await self._addresses():
                        try:
                            connection = await self._pool.get(address)
                            return (await connection.request(request)).message
                        except RaftqError as error:
                            if unknown and done is not None and isinstance(error, done):
                                return _nothing(request)
                            unknown = unknown or error.outcome == "unknown"
                            last = error
                            if _is_final(error):
                                raise
                    await sleep(backoff.next_s())
        except TimeoutError:
            what = f"{type(request).__name__} was not answered in {options.timeout_ms} ms"
            outcome: Outcome = "unknown" if unknown else "failed"
            raise out_of_time(what, last).with_outcome(outcome) from last

    async def _addresses(self) -> "list[tuple[str, int]]":
        """Whom to ask; the first question of all is who is there."""
        if not self._routes.nodes:
            await self._first_contact()
        return self._routes.addresses()

    async def _first_contact(self) -> None:
        began = self._loop.time()
        while True:
            try:
                await self._routes.refresh()
                return
            except RaftqError:
                if self._ended or self._loop.time() - began >= self.options.bootstrap_ms / 1000:
                    raise
                await sleep(self.options.retry_backoff_ms_max / 1000)


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
