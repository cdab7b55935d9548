"""Handlers about the node itself: is it there, is it ready, what does it hold. (Shell.)"""

from collections.abc import Callable
from typing import Any

from raftq.node.http.context import Context
from raftq.node.http.fields import INTEGER, STRING, TIME, Field, Query, answer, map_of
from raftq.node.http.kinds import Flag, Schema
from raftq.node.http.routes import Call, HttpReply, Route
from raftq.node.http.values import format_duration, format_time
from raftq.node.metrics.exposition import CONTENT_TYPE, Exposition
from raftq.node.metrics.node_status import ReplicaStats

_STATUS: Schema = {"type": "string", "enum": ["pass", "fail"]}
_ALIVE = {"status": _STATUS, "timestamp": TIME, "uptime": STRING}
_CHECK = answer({"status": _STATUS, "message": STRING, "latency": STRING})
_BROKER = answer({"node_id": INTEGER, "topic_count": INTEGER, "total_size": INTEGER})
_READY = {**_ALIVE, "message": STRING, "checks": map_of(_CHECK), "broker": _BROKER}
_TOPIC = answer(
    {
        "partitions": {**INTEGER, "description": "with a replica here"},
        "leading": INTEGER,
        "messages": INTEGER,
        "size_bytes": INTEGER,
    }
)
_STATS = {
    "node_id": INTEGER,
    "uptime": STRING,
    "topics": INTEGER,
    "total_size_bytes": INTEGER,
    "topic_stats": map_of(_TOPIC),
}


class Health:
    """Health, readiness, figures and metrics of this node."""

    def __init__(
        self, context: Context, exposition: Exposition, version: str, clock: Callable[[], float]
    ) -> None:
        self._facts = context.facts
        self._exposition = exposition
        self._version = version
        self._clock = clock

    async def health(self, call: Call) -> HttpReply:
        return HttpReply({"status": "ok", "timestamp": format_time(call.now_ms)})

    async def alive(self, call: Call) -> HttpReply:
        """A process that answers is alive."""
        return HttpReply(self._alive(call, "pass"))

    async def ready(self, call: Call) -> HttpReply:
        began = self._clock()
        checks = self._facts.checks()
        latency = format_duration(self._clock() - began)
        good = all(ok for ok, _ in checks.values())
        body = self._alive(call, "pass" if good else "fail")
        if not good:
            body["message"] = "; ".join(
                f"{name}: {text}" for name, (ok, text) in checks.items() if not ok
            )
        if call.query["verbose"]:
            body["checks"] = {
                name: {"status": "pass" if ok else "fail", "message": text, "latency": latency}
                for name, (ok, text) in checks.items()
            }
            body["broker"] = {
                "node_id": self._facts.node_id,
                "topic_count": len(self._facts.metadata.state.topics),
                "total_size": sum(one.size_bytes for one in self._facts.replicas()),
            }
        return HttpReply(body) if good else HttpReply(body, 503, headers={"Retry-After": "1"})

    def _alive(self, call: Call, status: str) -> dict[str, Any]:
        return {
            "status": status,
            "timestamp": format_time(call.now_ms),
            "uptime": format_duration(self._facts.uptime_s()),
        }

    async def version(self, call: Call) -> HttpReply:
        facts = self._facts
        return HttpReply(
            {
                "version": self._version,
                "node_id": facts.node_id,
                "cluster_id": facts.cluster_id,
                "started_at": format_time(facts.started_at),
            }
        )

    async def stats(self, call: Call) -> HttpReply:
        facts = self._facts
        topics: dict[str, dict[str, int]] = {}
        for one in facts.replicas():
            _count(topics, one)
        return HttpReply(
            {
                "node_id": facts.node_id,
                "uptime": format_duration(facts.uptime_s()),
                "topics": len(facts.metadata.state.topics),
                "total_size_bytes": sum(one["size_bytes"] for one in topics.values()),
                "topic_stats": topics,
            }
        )

    async def metrics(self, call: Call) -> HttpReply:
        return HttpReply(self._exposition.scrape(), content_type=CONTENT_TYPE)


def _count(topics: dict[str, dict[str, int]], one: ReplicaStats) -> None:
    empty = {"partitions": 0, "leading": 0, "messages": 0, "size_bytes": 0}
    found = topics.setdefault(one.topic, empty)
    found["partitions"] += 1
    found["leading"] += one.role == "leader"
    found["messages"] += max(0, one.high_watermark - one.start_offset)
    found["size_bytes"] += one.size_bytes


def health_routes(health: Health) -> tuple[Route, ...]:
    verbose = Field("verbose", Flag(), "also the single checks")
    ready = answer(_READY, ("message", "checks", "broker"))
    version = {"version": STRING, "node_id": INTEGER, "cluster_id": STRING, "started_at": TIME}
    return (
        Route(
            method="GET", path="/health", name="health", summary="A sign of life",
            handler=health.health, answer=answer({"status": STRING, "timestamp": TIME}),
        ),
        Route(
            method="GET", path="/healthz", name="healthz", summary="Whether the process lives",
            handler=health.alive, answer=answer(_ALIVE),
        ),
        Route(
            method="GET", path="/livez", name="livez", summary="Whether the process lives",
            handler=health.alive, answer=answer(_ALIVE),
        ),
        Route(
            method="GET", path="/readyz", name="readyz", summary="Whether the node takes requests",
            handler=health.ready, answer=ready, query=Query((verbose,)),
            other={503: ready},
        ),
        Route(
            method="GET", path="/version", name="version", summary="What runs here",
            handler=health.version, answer=answer(version),
        ),
        Route(
            method="GET", path="/stats", name="stats", summary="What this node holds",
            handler=health.stats, answer=answer(_STATS),
        ),
        Route(
            method="GET", path="/metrics", name="metrics", summary="Figures for Prometheus",
            handler=health.metrics, answer=STRING, content_type=CONTENT_TYPE,
        ),
    )  # fmt: skip
