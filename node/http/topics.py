"""Handlers of topics and of the cluster's shape. (Shell.)"""

from typing import Any

from raftq.client.common.errors import Detail
from raftq.client.common.names import is_internal
from raftq.cluster.metadata.state import ClusterState, PartitionState
from raftq.cluster.metadata.topic_config import CHOICES, NUMBERS, REPLICATION_MAX
from raftq.node.http.context import Context
from raftq.node.http.errors import invalid
from raftq.node.http.fields import (
    BOOLEAN,
    INTEGER,
    STRING,
    Field,
    Fields,
    OneOf,
    answer,
    array_of,
    map_of,
)
from raftq.node.http.kinds import Choice, Limit, Named, Number, Schema, Whole, or_null
from raftq.node.http.paths import NEW_TOPIC
from raftq.node.http.routes import Call, HttpReply, Route

HOUR_MS = 3_600_000
PARTITIONS_DEFAULT = 3
RETENTION_HOURS_DEFAULT = 168
PARTITIONS_MAX = 100_000
HOURS_MAX = 100 * 365 * 24
MOVES_MAX = 1000

_SETTINGS: Schema = {"type": "object", "additionalProperties": True}
_NODES = array_of(INTEGER)

_CONFIG = Named(
    {
        name: Limit(Whole(low, high)) if may_be_unlimited else Whole(low, high)
        for name, (_, low, high, may_be_unlimited) in NUMBERS.items()
    }
    | {name: Choice(words) for name, words in CHOICES.items()}
)
CREATE = Fields((
    Field("name", NEW_TOPIC, required=True),
    Field(
        "num_partitions", Whole(0, PARTITIONS_MAX), "0: the default", default=PARTITIONS_DEFAULT,
    ),
    Field(
        "retention_hours", Number(-1, HOURS_MAX),
        f"0: the default of {RETENTION_HOURS_DEFAULT}, -1: without an end",
    ),
    Field(
        "replication_factor", Whole(0, REPLICATION_MAX),
        "0 or nothing: 3, or as many nodes as there are",
    ),
    Field("min_insync", Whole(1, REPLICATION_MAX)),
    Field("config", _CONFIG, "further settings by name"),
))  # fmt: skip
ADD_PARTITIONS = Fields(
    (
        Field("count", Whole(1, PARTITIONS_MAX), "in total, afterwards"),
        Field("partitions", Whole(1, PARTITIONS_MAX), "the same as count"),
    ),
    (OneOf(("count", "partitions")),),
)


class TopicHandlers:
    """Topics, partitions, and the shape of the cluster."""

    def __init__(self, context: Context) -> None:
        self._facts = context.facts
        self._clients = context.clients
        self._topics = context.topics

    async def create(self, call: Call) -> HttpReply:
        body = call.body
        name = body["name"]
        config = _config(body)
        partitions = body["num_partitions"] or PARTITIONS_DEFAULT
        replication = body["replication_factor"] or 0
        made = await self._clients.admin.create_topic(name, partitions, replication, config)
        return HttpReply({"name": name, "partitions": len(made.partitions), "created": True}, 201)

    async def list_all(self, call: Call) -> HttpReply:
        names = sorted(self._facts.metadata.state.topics)
        return HttpReply({"topics": [one for one in names if not is_internal(one)]})

    async def describe(self, call: Call) -> HttpReply:
        topic = await self._topics.by_name(call.path["topic"])
        described = await self._clients.admin.describe_topic(topic.name)
        parts = {one.partition: one for one in described.partitions}
        sizes = [one.size_bytes for one in self._facts.replicas() if one.topic_id == topic.topic_id]
        return HttpReply(
            {
                "name": topic.name,
                "partitions": len(topic.partitions),
                "total_messages": sum(
                    (one.high_watermark or 0) - (one.start_offset or 0) for one in parts.values()
                ),
                "total_size_bytes": sum(sizes),
                "partition_offsets": {
                    str(at): {
                        "earliest": parts[at].start_offset if at in parts else None,
                        "latest": parts[at].high_watermark if at in parts else None,
                    }
                    for at in range(len(topic.partitions))
                },
                "config": topic.config.settings(),
                "replicas": {str(at): _replicas(one) for at, one in enumerate(topic.partitions)},
            }
        )

    async def delete(self, call: Call) -> HttpReply:
        name = call.path["topic"]
        await self._clients.admin.delete_topic(name)
        return HttpReply({"deleted": True, "name": name})

    async def add_partitions(self, call: Call) -> HttpReply:
        total = call.body["count"] or call.body["partitions"]
        topic = await self._topics.by_name(call.path["topic"])
        before = len(topic.partitions)
        grown = await self._clients.admin.add_partitions(topic.name, total)
        after = len(grown.partitions)
        return HttpReply(
            {
                "success": True,
                "topic_name": topic.name,
                "old_partition_count": before,
                "new_partition_count": after,
                "partitions_added": list(range(before, after)),
            }
        )

    async def reassignment(self, call: Call) -> HttpReply:
        """The partitions that are on their way to other nodes."""
        moves = [
            {"topic": topic.name, "partition": number, **_replicas(one)}
            for topic, number, one in self._facts.metadata.state.all_partitions()
            if one.target is not None
        ]
        return HttpReply({"moves": moves[:MOVES_MAX], "count": len(moves)})

    async def keys(self, call: Call) -> HttpReply:
        return HttpReply({"keys": [], "enabled": False})

    async def acls(self, call: Call) -> HttpReply:
        return HttpReply({"acls": [], "enabled": False})

    async def cluster(self, call: Call) -> HttpReply:
        metadata = self._facts.metadata
        state = metadata.state
        summary = state.summary()
        return HttpReply(
            {
                "cluster_id": self._facts.cluster_id,
                "node_id": self._facts.node_id,
                "controller": metadata.controller,
                "term": metadata.term,
                "applied_index": metadata.index,
                "voters": list(metadata.voters),
                "nodes": _nodes(state),
                "topics": summary.topics,
                "partitions": summary.partitions,
                "leaderless": summary.leaderless,
                "under_replicated": summary.under_replicated,
                "under_min_insync": summary.under_min_insync,
                "moves": summary.moves,
            }
        )


def _config(body: dict[str, Any]) -> dict[str, Detail]:
    config: dict[str, Detail] = dict(body["config"] or {})
    hours = body["retention_hours"]
    if hours:
        if "retention_ms" in config:
            raise invalid("retention_hours", "cannot be given together with config.retention_ms")
        if 0 < hours < 1 / HOUR_MS or -1 < hours < 0:
            raise invalid("retention_hours", "must be a time, 0 or -1")
        config["retention_ms"] = -1 if hours < 0 else int(hours * HOUR_MS)
    if body["min_insync"] is not None:
        if "min_insync" in config:
            raise invalid("min_insync", "cannot be given together with config.min_insync")
        config["min_insync"] = body["min_insync"]
    return config


def _replicas(one: PartitionState) -> dict[str, Any]:
    found: dict[str, Any] = {
        "leader": one.leader,
        "replicas": list(one.replicas),
        "isr": list(one.isr),
        "epoch": one.epoch,
    }
    if one.target is not None:
        found["target"] = list(one.target)
    return found


def _nodes(state: ClusterState) -> list[dict[str, Any]]:
    leading = dict.fromkeys(state.nodes, 0)
    replicas = dict.fromkeys(state.nodes, 0)
    for _, _, one in state.all_partitions():
        if one.leader in leading:
            leading[one.leader] += 1
        for node_id in one.replicas:
            if node_id in replicas:
                replicas[node_id] += 1
    return [
        {
            "node_id": node.node_id,
            "host": node.host,
            "port": node.port,
            "http_port": node.http_port,
            "rack": node.rack,
            "status": "dead" if not node.alive else "draining" if node.draining else "alive",
            "decommissioning": node.decommissioning,
            "leading": leading[node.node_id],
            "replicas": replicas[node.node_id],
        }
        for node in sorted(state.nodes.values(), key=lambda one: one.node_id)
    ]


_BOUNDS = answer({"earliest": or_null(INTEGER), "latest": or_null(INTEGER)})
_PLACED = {
    "leader": or_null(INTEGER),
    "replicas": _NODES,
    "isr": _NODES,
    "epoch": INTEGER,
    "target": _NODES,
}
_REPLICAS = answer(_PLACED, ("target",))
_DESCRIBED = answer(
    {
        "name": STRING,
        "partitions": INTEGER,
        "total_messages": INTEGER,
        "total_size_bytes": {**INTEGER, "description": "of the replicas on the asked node"},
        "partition_offsets": map_of(_BOUNDS),
        "config": _SETTINGS,
        "replicas": map_of(_REPLICAS),
    }
)
_ADDED = answer(
    {
        "success": BOOLEAN,
        "topic_name": STRING,
        "old_partition_count": INTEGER,
        "new_partition_count": INTEGER,
        "partitions_added": _NODES,
    }
)
_NODE = answer(
    {
        "node_id": INTEGER,
        "host": STRING,
        "port": INTEGER,
        "http_port": INTEGER,
        "rack": STRING,
        "status": {"type": "string", "enum": ["alive", "draining", "dead"]},
        "decommissioning": BOOLEAN,
        "leading": INTEGER,
        "replicas": INTEGER,
    }
)
_CLUSTER = answer(
    {
        "cluster_id": STRING,
        "node_id": INTEGER,
        "controller": or_null(INTEGER),
        "term": INTEGER,
        "applied_index": INTEGER,
        "voters": _NODES,
        "nodes": array_of(_NODE),
        "topics": INTEGER,
        "partitions": INTEGER,
        "leaderless": INTEGER,
        "under_replicated": INTEGER,
        "under_min_insync": INTEGER,
        "moves": INTEGER,
    }
)


def topic_routes(topics: TopicHandlers) -> tuple[Route, ...]:
    created = answer({"name": STRING, "partitions": INTEGER, "created": BOOLEAN})
    names = answer({"topics": array_of(STRING)})
    deleted = answer({"deleted": BOOLEAN, "name": STRING})
    move = answer({"topic": STRING, "partition": INTEGER, **_PLACED})
    moves = answer({"moves": array_of(move), "count": INTEGER})
    return (
        Route(
            method="POST", path="/topics", name="create_topic", summary="Create a topic",
            handler=topics.create, answer=created, body=CREATE, status=201, errors=(409, 503),
        ),
        Route(
            method="GET", path="/topics", name="list_topics", summary="The names of all topics",
            handler=topics.list_all, answer=names,
        ),
        Route(
            method="GET", path="/topics/{topic}", name="describe_topic", summary="One topic",
            handler=topics.describe, answer=_DESCRIBED, errors=(404, 503),
        ),
        Route(
            method="DELETE", path="/topics/{topic}", name="delete_topic",
            summary="Delete a topic and its messages", handler=topics.delete, answer=deleted,
            errors=(404, 503),
        ),
        Route(
            method="POST", path="/admin/topics/{topic}/partitions", name="add_partitions",
            summary="Give a topic more partitions", handler=topics.add_partitions, answer=_ADDED,
            body=ADD_PARTITIONS, errors=(404, 503),
        ),
        Route(
            method="GET", path="/admin/reassignment", name="reassignment",
            summary="Partitions whose replicas are being moved", handler=topics.reassignment,
            answer=moves,
        ),
        Route(
            method="GET", path="/admin/keys", name="keys",
            summary="Keys of callers; this version knows none", handler=topics.keys,
            answer=answer({"keys": array_of(STRING), "enabled": BOOLEAN}),
        ),
        Route(
            method="GET", path="/admin/acls", name="acls",
            summary="Rights of callers; this version knows none", handler=topics.acls,
            answer=answer({"acls": array_of(STRING), "enabled": BOOLEAN}),
        ),
        Route(
            method="GET", path="/admin/cluster", name="cluster",
            summary="The cluster as this node knows it", handler=topics.cluster, answer=_CLUSTER,
        ),
    )  # fmt: skip
