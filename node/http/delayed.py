"""Handlers of records that are not yet due. (Shell.)"""

from typing import Any

from raftq.client.admin.results import DelayedPage, DelayedRecord
from raftq.client.common.errors import OffsetOutOfRange
from raftq.client.common.names import LANE_NAMES
from raftq.node.http.context import Context
from raftq.node.http.fields import (
    BOOLEAN,
    INTEGER,
    STRING,
    TIME,
    Field,
    Query,
    answer,
    array_of,
)
from raftq.node.http.kinds import Whole
from raftq.node.http.messages import PRIORITY_NAME
from raftq.node.http.paths import PARTITION
from raftq.node.http.routes import Call, HttpReply, Route
from raftq.node.http.values import format_duration, format_time

LIMIT_MAX = 1000
SKIP_MAX = 7_000
"""So far can be looked ahead: every partition is asked for that much, as only all of them together
know what is due next."""

LIST = Query((
    Field("limit", Whole(1, LIMIT_MAX), default=100),
    Field("skip", Whole(0, SKIP_MAX), "how many of the first messages are left out", default=0),
))  # fmt: skip
FIND = Query((Field("partition", PARTITION, "without it, the first partition that has one"),))


class DelayedHandlers:
    """Lists, finds and cancels records that are not yet due."""

    def __init__(self, context: Context) -> None:
        self._clients = context.clients
        self._topics = context.topics

    async def list_all(self, call: Call) -> HttpReply:
        topic = await self._topics.by_name(call.path["topic"])
        skip, limit = call.query["skip"], call.query["limit"]
        page = DelayedPage([], 0)
        if topic.queued:
            page = await self._clients.admin.delayed_page(topic.name, skip, limit)
        return HttpReply({"messages": [_write(one) for one in page.records], "count": page.pending})

    async def find(self, call: Call) -> HttpReply:
        topic = await self._topics.by_name(call.path["topic"])
        partition, offset = call.query["partition"], call.path["offset"]
        if partition is not None:
            await self._topics.with_partition(topic, partition, "partition")
        found = None
        if topic.queued:
            found = await self._clients.admin.find_delayed(topic.name, offset, partition)
        if found is None:
            raise _nothing(offset)
        return HttpReply(_write(found))

    async def cancel(self, call: Call) -> HttpReply:
        topic, partition = await self._topics.get_partition(call)
        offset = call.path["offset"]
        admin = self._clients.admin
        if not topic.queued or not await admin.cancel_delayed(topic.name, partition, offset):
            raise _nothing(offset)
        return HttpReply({"cancelled": True})

    async def stats(self, call: Call) -> HttpReply:
        totals = await self._clients.admin.delay_sums(self._topics.queued())
        average_s = totals.delay_ms_sum / totals.fired / 1000 if totals.fired else 0.0
        return HttpReply(
            {
                "pending_count": totals.pending,
                "delivered_count": totals.fired,
                "cancelled_count": totals.cancelled,
                "avg_delay": format_duration(average_s),
                "missing_partitions": totals.missing,
            }
        )


def _nothing(offset: int) -> OffsetOutOfRange:
    return OffsetOutOfRange(f"offset: no message waits at {offset}; it may have become due")


def _write(one: DelayedRecord) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "partition": one.partition,
        "offset": one.offset,
        "deliver_at": format_time(one.deliver_at),
        "priority": LANE_NAMES[one.priority],
    }


def delayed_routes(delayed: DelayedHandlers) -> tuple[Route, ...]:
    one = answer(
        {
            "topic": STRING,
            "partition": INTEGER,
            "offset": {**INTEGER, "description": "among the delayed messages of the partition"},
            "deliver_at": TIME,
            "priority": PRIORITY_NAME,
        }
    )
    waiting = {**INTEGER, "description": "messages of the topic that wait, in all"}
    stats = answer(
        {
            "pending_count": INTEGER,
            "delivered_count": INTEGER,
            "cancelled_count": INTEGER,
            "avg_delay": STRING,
            "missing_partitions": {**INTEGER, "description": "whose leader did not answer"},
        }
    )
    return (
        Route(
            method="GET", path="/topics/{topic}/delayed", name="list_delayed",
            summary="Messages that are not yet due, the next one first",
            handler=delayed.list_all, answer=answer({"messages": array_of(one), "count": waiting}),
            query=LIST, errors=(404, 503),
        ),
        Route(
            method="GET", path="/topics/{topic}/delayed/{offset}", name="find_delayed",
            summary="One message that is not yet due", handler=delayed.find, answer=one,
            query=FIND, errors=(404, 503),
        ),
        Route(
            method="DELETE", path="/topics/{topic}/delayed/{partition}/{offset}",
            name="cancel_delayed", summary="Make sure that a delayed message is never seen",
            handler=delayed.cancel, answer=answer({"cancelled": BOOLEAN}), errors=(404, 503),
        ),
        Route(
            method="GET", path="/delay/stats", name="delay_stats", errors=(503,),
            summary="Delayed messages of all topics", handler=delayed.stats, answer=stats,
        ),
    )  # fmt: skip
