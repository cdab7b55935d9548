"""Handlers of figures about deliveries, over all partitions of the cluster. (Shell.)"""

from raftq.client.common.names import LANE_NAMES
from raftq.node.http.context import Context
from raftq.node.http.fields import INTEGER, STRING, answer, map_of
from raftq.node.http.routes import Call, HttpReply, Route
from raftq.node.http.values import format_duration


class QueueStatsHandlers:
    """Sums of deliveries."""

    def __init__(self, context: Context) -> None:
        self._clients = context.clients
        self._topics = context.topics

    async def reliability(self, call: Call) -> HttpReply:
        totals = await self._clients.admin.queue_sums(self._topics.queued())
        count = totals.counters.get
        return HttpReply(
            {
                "acks_total": count("acked", 0),
                "nacks_total": count("nacked", 0),
                "rejects_total": count("rejected", 0),
                "dlq_messages": totals.letters,
                "dlq_parked": count("parked", 0),
                "dlq_lost": count("lost", 0),
                "dead_total": count("dead", 0),
                "visibility_extensions": count("extended", 0),
                "redeliveries_total": count("redelivered", 0),
                "expired_leases_total": count("lease_expired", 0),
                "expired_messages_total": count("ttl_expired", 0),
                "in_flight_count": totals.in_flight,
                "missing_partitions": totals.missing,
            }
        )

    async def priority(self, call: Call) -> HttpReply:
        totals = await self._clients.admin.queue_sums(self._topics.queued())
        waits = {
            name: format_duration(wait / count / 1000 if count else 0.0)
            for name, count, wait in zip(LANE_NAMES, totals.lanes, totals.lane_wait_ms, strict=True)
        }
        return HttpReply(
            {
                "messages_by_priority": dict(zip(LANE_NAMES, totals.lanes, strict=True)),
                "avg_wait_time_by_priority": waits,
                "missing_partitions": totals.missing,
            }
        )


def queue_stats_routes(stats: QueueStatsHandlers) -> tuple[Route, ...]:
    missing = {**INTEGER, "description": "whose leader did not answer"}
    names = (
        "acks_total", "nacks_total", "rejects_total", "dlq_messages", "dlq_lost", "dead_total",
        "visibility_extensions", "redeliveries_total", "expired_leases_total",
        "expired_messages_total", "in_flight_count",
    )  # fmt: skip
    recent = {**INTEGER, "description": "since each partition's leader took over"}
    reliability = {**dict.fromkeys(names, INTEGER), "missing_partitions": missing}
    reliability |= {"rejects_total": recent, "visibility_extensions": recent, "dlq_lost": recent}
    parked = {**INTEGER, "description": "records whose dead letters are refused; the log says why"}
    reliability["dlq_parked"] = parked
    priority = {
        "messages_by_priority": {
            **map_of(INTEGER),
            "description": "given out, since each partition's leader took over",
        },
        "avg_wait_time_by_priority": map_of(STRING),
        "missing_partitions": missing,
    }
    return (
        Route(
            method="GET", path="/reliability/stats", name="reliability_stats", errors=(503,),
            summary="What became of deliveries", handler=stats.reliability,
            answer=answer(reliability),
        ),
        Route(
            method="GET", path="/priority/stats", name="priority_stats", errors=(503,),
            summary="Deliveries and waits by priority", handler=stats.priority,
            answer=answer(priority),
        ),
    )  # fmt: skip
