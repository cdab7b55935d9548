"""Handlers that publish and read messages. (Shell.)"""

import asyncio
from typing import Any

from raftq.client.wire.errors import RaftqError, TooLarge
from raftq.client.wire.layout import LANE_NORMAL
from raftq.node.http.context import Context
from raftq.node.http.errors import error_body, invalid, retry_after_s, status_of
from raftq.node.http.fields import Field, Schema, Shape, query_time, query_whole, schema_object
from raftq.node.http.gateway import Outcome, Outgoing, Position
from raftq.node.http.messages import (
    MESSAGE_SCHEMA,
    PRIORITIES,
    RECORD_SCHEMA,
    PublishRules,
    read_messages,
    write_records,
)
from raftq.node.http.routes import Call, Reply, Route

LIMIT_DEFAULT = 100
LIMIT_MAX = 1000
OFFSET_MAX = (1 << 63) - 1

_INTEGER: Schema = {"type": "integer"}
_STRING: Schema = {"type": "string"}

READ = (
    Field(
        "offset", {**_INTEGER, "minimum": 0}, query_whole(0, OFFSET_MAX),
        "the first offset to read; without it and from_time, the first one kept",
    ),
    Field(
        "from_time", {"type": "string", "format": "date-time"}, query_time,
        "instead of an offset: the first message that is not older",
    ),
    Field(
        "limit", {**_INTEGER, "minimum": 1, "maximum": LIMIT_MAX}, query_whole(1, LIMIT_MAX),
        "at most so many messages; fewer when they are large", default=LIMIT_DEFAULT,
    ),
)  # fmt: skip


class RecordHandlers:
    """See the module's docstring."""

    def __init__(self, context: Context) -> None:
        self._gateway = context.gateway
        self._options = context.options
        self._topics = context.topics
        # What is being fetched is not yet counted: so it is bounded by turns.
        self._turns = asyncio.Semaphore(context.options.reads_max)

    async def publish(self, call: Call) -> Reply:
        rules = PublishRules(
            messages_max=self._options.messages_max,
            supports_ttl=self._gateway.supports_ttl,
            supports_delay=self._gateway.supports_delay,
            now_ms=call.now_ms,
        )
        records = read_messages(call.body, rules)
        topic = await self._topics.get(call)
        # Both are checked here because records of many callers share a batch, which the leader
        # takes or refuses as a whole.
        _check_values(records, topic.config.value_bytes_max, call)
        if records.partitions is not None:
            highest = max(one for one in records.partitions if one is not None)
            place = _place(call, records.partitions.index(highest), "partition")
            topic = await self._topics.with_partition(topic, highest, place)
        outcomes = await self._gateway.publish(topic, records)
        assert len(outcomes) == len(records.values)
        return _published(records, outcomes)

    async def read(self, call: Call) -> Reply:
        query = call.query
        position = Position(query["offset"], query["from_time"])
        if position.offset is not None and position.time_ms is not None:
            raise invalid("from_time", "cannot be given together with offset")
        topic, partition = await self._topics.get_partition(call)
        async with self._turns:
            page = await self._gateway.read(
                topic.name, partition, position, query["limit"], self._options.read_bytes_max
            )
            messages = write_records(page.records, call.binary)
        return Reply({"messages": messages, "next_offset": page.next_offset})


def _check_values(records: Outgoing, bytes_max: int, call: Call) -> None:
    sizes = list(map(len, records.values))
    largest = max(sizes)
    if largest > bytes_max:
        place = _place(call, sizes.index(largest), "value")
        raise TooLarge(f"{place}: {largest} bytes, the topic takes at most {bytes_max}")


def _place(call: Call, at: int, name: str) -> str:
    return f"messages[{at}].{name}" if "messages" in call.body else name


def _published(records: Outgoing, outcomes: list[Outcome]) -> Reply:
    """200 as soon as one message was taken; when none was, the status of the first error."""
    lanes = records.priorities or [LANE_NORMAL] * len(outcomes)
    delays = records.delays_ms
    results: list[dict[str, Any]] = []
    failed: list[RaftqError] = []
    for at, outcome in enumerate(outcomes):
        if isinstance(outcome, RaftqError):
            failed.append(outcome)
            results.append(error_body(outcome))
        else:
            partition, offset = outcome
            priority = PRIORITIES[lanes[at]]
            delayed = delays is not None and delays[at] is not None
            results.append(
                {"partition": partition, "offset": offset, "priority": priority, "delayed": delayed}
            )
    if len(failed) < len(outcomes):
        return Reply({"results": results})
    first = failed[0]
    reply = Reply({**error_body(first), "results": results}, status_of(first))
    if (wait_s := retry_after_s(first)) is not None:
        reply.headers["Retry-After"] = str(wait_s)
    return reply


def record_routes(records: RecordHandlers) -> tuple[Route, ...]:
    many = schema_object({"messages": {"type": "array", "items": MESSAGE_SCHEMA}}, ("messages",))
    body = Shape({"oneOf": [{**many, "additionalProperties": False}, MESSAGE_SCHEMA]})
    result = schema_object(
        {
            "partition": _INTEGER,
            "offset": _INTEGER,
            "priority": {"type": "string", "enum": list(PRIORITIES)},
            "delayed": {"type": "boolean"},
            "deliverAt": {"type": "string", "format": "date-time"},
            "error": _STRING,
            "code": _STRING,
            "retriable": {"type": "boolean"},
            "outcome": _STRING,
        }
    )
    published = schema_object({"results": {"type": "array", "items": result}}, ("results",))
    page = schema_object(
        {"messages": {"type": "array", "items": RECORD_SCHEMA}, "next_offset": _INTEGER},
        ("messages", "next_offset"),
    )
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
