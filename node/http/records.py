"""Handlers that publish and read messages. (Shell.)"""

import asyncio
from typing import Any

from raftq.client.common.errors import RaftqError, TooLarge
from raftq.client.common.names import LANE_NAMES
from raftq.client.consumer.pages import Position
from raftq.client.results import Appended
from raftq.client.wire.layout import LANE_NORMAL
from raftq.node.http.context import Context
from raftq.node.http.errors import error_body
from raftq.node.http.fields import (
    BOOLEAN,
    INTEGER,
    STRING,
    TIME,
    Field,
    NotBoth,
    Query,
    answer,
    array_of,
)
from raftq.node.http.kinds import Time, Whole
from raftq.node.http.messages import (
    PRIORITY_NAME,
    RECORD_SCHEMA,
    Messages,
    Outgoing,
    write_records,
)
from raftq.node.http.paths import OFFSET
from raftq.node.http.routes import Call, HttpReply, Route, reply_with_results
from raftq.node.http.values import format_time

LIMIT_DEFAULT = 100
LIMIT_MAX = 1000

READ = Query(
    (
        Field(
            "offset", OFFSET,
            "the first offset to read; without it and from_time, the first one kept",
        ),
        Field(
            "from_time", Time(), "instead of an offset: the first message that is not older",
        ),
        Field(
            "limit", Whole(1, LIMIT_MAX), "the most messages; fewer when they are large",
            default=LIMIT_DEFAULT,
        ),
    ),
    (NotBoth("offset", "from_time"),),
)  # fmt: skip


class RecordHandlers:
    """Publishes messages and reads them by page."""

    def __init__(self, context: Context) -> None:
        self._clients = context.clients
        self._options = context.options
        self._topics = context.topics
        # What is being fetched is not yet counted: so it is bounded by turns.
        self._turns = asyncio.Semaphore(context.options.reads_max)

    @property
    def messages_max(self) -> int:
        return self._options.messages_max

    async def publish(self, call: Call) -> HttpReply:
        records: Outgoing = call.body
        times = records.times(call.now_ms)
        topic = await self._topics.by_name(call.path["topic"])
        # Both are checked here because records of many callers share a batch, which the leader
        # takes or refuses as a whole.
        _check_values(records, topic.config.value_bytes_max)
        if records.partitions is not None:
            highest = max(one for one in records.partitions if one is not None)
            path = records.path(records.partitions.index(highest), "partition")
            topic = await self._topics.with_partition(topic, highest, path)
        producer = self._clients.producer
        outcomes: list[Appended | RaftqError]
        try:
            await producer.expect(topic.name, len(topic.partitions))
            deliveries = await producer.send_many(
                topic.name,
                records.values,
                records.keys,
                headers=records.headers,
                priorities=records.priorities,
                partitions=records.partitions,
                times=times,
                partial=True,
            )
            outcomes = await deliveries.outcomes()
        except RaftqError as error:
            outcomes = [error] * len(records.values)
        return _published(records, outcomes)

    async def read(self, call: Call) -> HttpReply:
        query = call.query
        position = Position(query["offset"], query["from_time"])
        topic, partition = await self._topics.get_partition(call)
        async with self._turns:
            page = await self._clients.admin.read_page(
                topic.name, partition, position, query["limit"], self._options.read_bytes_max
            )
            messages = write_records(page.records, call.binary)
        return HttpReply({"messages": messages, "next_offset": page.next_offset})


def _check_values(records: Outgoing, bytes_max: int) -> None:
    sizes = list(map(len, records.values))
    largest = max(sizes)
    if largest > bytes_max:
        path = records.path(sizes.index(largest), "value")
        raise TooLarge(f"{path}: {largest} bytes, the topic takes at most {bytes_max}")


def _published(records: Outgoing, outcomes: list[Appended | RaftqError]) -> HttpReply:
    lanes = records.priorities or [LANE_NORMAL] * len(outcomes)
    results: list[dict[str, Any]] = []
    failed: list[RaftqError] = []
    for at, outcome in enumerate(outcomes):
        if isinstance(outcome, RaftqError):
            failed.append(outcome)
            results.append(error_body(outcome))
        else:
            result: dict[str, Any] = {
                "partition": outcome.partition,
                "offset": outcome.offset,
                "priority": LANE_NAMES[lanes[at]],
                "delayed": outcome.delayed,
            }
            if outcome.deliver_at is not None:
                result["deliverAt"] = format_time(outcome.deliver_at)
            results.append(result)
    return reply_with_results(results, failed)


def record_routes(records: RecordHandlers) -> tuple[Route, ...]:
    facts = {"partition": INTEGER, "offset": INTEGER, "priority": PRIORITY_NAME}
    facts |= {"delayed": BOOLEAN, "deliverAt": TIME}
    error = {"error": STRING, "code": STRING, "retriable": BOOLEAN, "outcome": STRING}
    result = answer(facts | error, (*facts, *error))
    published = answer({"results": array_of(result)})
    page = answer({"messages": array_of(RECORD_SCHEMA), "next_offset": INTEGER})
    body = Messages(records.messages_max)
    errors = (404, 409, 503, 507)
    publishing = tuple(
        Route(
            method="POST", path=f"/topics/{{topic}}/{word}", name=name, summary=summary,
            handler=records.publish, answer=published, body=body, errors=errors,
        )
        for word, name, summary in (
            ("messages", "publish", "Publish one message or many"),
            ("publish", "publish_one", "The same, usually for one message"),
            ("batch", "publish_batch", "The same, usually for many messages"),
        )
    )  # fmt: skip
    return (
        *publishing,
        Route(
            method="GET", path="/topics/{topic}/partitions/{partition}/messages", name="read",
            summary="Messages of a partition in order of their offsets", handler=records.read,
            answer=page, query=READ, errors=(404, 503),
        ),
    )  # fmt: skip
