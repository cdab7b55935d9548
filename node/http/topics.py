"""Handlers of topics and of the cluster's shape. (Shell.)"""

from typing import Any

from raftq.client.wire.errors import Detail
from raftq.cluster.state import ClusterState, PartitionState
from raftq.cluster.topic_config import check_topic_name
from raftq.node.http.context import Context, topic_name
from raftq.node.http.errors import invalid
from raftq.node.http.fields import (
    NAME_CHARACTERS_MAX,
    Field,
    Schema,
    number,
    schema_object,
    settings,
    text,
    whole,
)
from raftq.node.http.routes import Call, Reply, Route

HOUR_MS = 3_600_000
PARTITIONS_DEFAULT = 3
RETENTION_HOURS_DEFAULT = 168
PARTITIONS_MAX = 100_000
REPLICATION_MAX = 255
HOURS_MAX = 100 * 365 * 24
INTERNAL_PREFIX = "__"

_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_BOOLEAN: Schema = {"type": "boolean"}
_SETTINGS: Schema = {"type": "object", "additionalProperties": True}
_NODES: Schema = {"type": "array", "items": _INTEGER}

CREATE = (
    Field("name", _STRING, text(NAME_CHARACTERS_MAX), required=True),
    Field(
        "num_partitions", {**_INTEGER, "minimum": 0}, whole(0, PARTITIONS_MAX), "0: the default",
        default=PARTITIONS_DEFAULT,
    ),
    Field(
        "retention_hours", {"type": "number"}, number(-1, HOURS_MAX),
        f"0: the default of {RETENTION_HOURS_DEFAULT}, -1: without an end",
    ),
    Field(
        "replication_factor", {**_INTEGER, "minimum": 0}, whole(0, REPLICATION_MAX),
        "0 or nothing: 3, or as many nodes as there are",
    ),
    Field("min_insync", {**_INTEGER, "minimum": 1}, whole(1, REPLICATION_MAX)),
    Field("config", _SETTINGS, settings, "further settings by name"),
)  # fmt: skip
ADD_PARTITIONS = (
    Field("count", {**_INTEGER, "minimum": 1}, whole(1, PARTITIONS_MAX), "in total, afterwards"),
    Field("partitions", {**_INTEGER, "minimum": 1}, whole(1, PARTITIONS_MAX), "the same as count"),
)


class TopicHandlers:
    """See the module's docstring."""

    def __init__(self, context: Context) -> None:
        self._facts = context.facts
        self._gateway = context.gateway
        self._topics = context.topics

    async def create(self, call: Call) -> Reply:
        body = call.body
        name = body["name"]
        check_topic_name(name)
        config = _config(body)
        partitions = body["num_partitions"] or PARTITIONS_DEFAULT
        replication = body["replication_factor"] or 0
        made = await self._gateway.create_topic(name, partitions, replication, config)
        return Reply({"name": name, "partitions": made, "created": True}, 201)

    async def list_all(self, call: Call) -> Reply:
        names = sorted(self._facts.metadata.state.topics)
        return Reply({"topics": [one for one in names if not one.startswith(INTERNAL_PREFIX)]})

    async def describe(self, call: Call) -> Reply:
        topic = await self._topics.get(call)
        offsets = await self._gateway.offsets(topic.name)
        known = [offsets.get(at) for at in range(len(topic.partitions))]
        sizes = [one.size_bytes for one in self._facts.replicas() if one.topic_id == topic.topic_id]
        return Reply(
            {
                "name": topic.name,
                "partitions": len(topic.partitions),
                "total_messages": sum(one[1] - one[0] for one in known if one is not None),
                "total_size_bytes": sum(sizes),
                "partition_offsets": {
                    str(at): {
                        "earliest": None if one is None else one[0],
                        "latest": None if one is None else one[1],
                    }
                    for at, one in enumerate(known)
                },
                "config": topic.config.settings(),
                "replicas": {str(at): _replicas(one) for at, one in enumerate(topic.partitions)},
            }
        )

    async def delete(self, call: Call) -> Reply:
        name = topic_name(call)
        await self._gateway.delete_topic(name)
        return Reply({"deleted": True, "name": name})

    async def add_partitions(self, call: Call) -> Reply:
        given = [total for total in call.body.values() if total is not None]
        if not given:
            raise invalid("count", "is required")
        if len(set(given)) > 1:
            raise invalid("partitions", "contradicts count")
        topic = await self._topics.get(call)
        before = len(topic.partitions)
        after = await self._gateway.add_partitions(topic.name, given[0])
        return Reply(
            {
                "success": True,
                "topic_name": topic.name,
                "old_partition_count": before,
                "new_partition_count": after,
                "partitions_added": list(range(before, after)),
            }
        )

    async def cluster(self, call: Call) -> Reply:
        metadata = self._facts.metadata
        state = metadata.state
        summary = state.summary()
        return Reply(
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


_BOUNDS = schema_object(
    {"earliest": {**_INTEGER, "nullable": True}, "latest": {**_INTEGER, "nullable": True}}
)
_REPLICAS = schema_object(
    {"leader": {**_INTEGER, "nullable": True}, "replicas": _NODES, "isr": _NODES, "epoch": _INTEGER}
)
_DESCRIBED = schema_object(
    {
        "name": _STRING,
        "partitions": _INTEGER,
        "total_messages": _INTEGER,
        "total_size_bytes": {**_INTEGER, "description": "of the replicas on the asked node"},
        "partition_offsets": {"type": "object", "additionalProperties": _BOUNDS},
        "config": _SETTINGS,
        "replicas": {"type": "object", "additionalProperties": _REPLICAS},
    }
)
_ADDED = schema_object(
    {
        "success": _BOOLEAN,
        "topic_name": _STRING,
        "old_partition_count": _INTEGER,
        "new_partition_count": _INTEGER,
        "partitions_added": _NODES,
    }
)
_NODE = schema_object(
    {
        "node_id": _INTEGER,
        "host": _STRING,
        "port": _INTEGER,
        "http_port": _INTEGER,
        "rack": _STRING,
        "status": {"type": "string", "enum": ["alive", "draining", "dead"]},
        "decommissioning": _BOOLEAN,
        "leading": _INTEGER,
        "replicas": _INTEGER,
    }
)
_CLUSTER = schema_object(
    {
        "cluster_id": _STRING,
        "node_id": _INTEGER,
        "controller": {**_INTEGER, "nullable": True},
        "term": _INTEGER,
        "applied_index": _INTEGER,
        "voters": _NODES,
        "nodes": {"type": "array", "items": _NODE},
        "topics": _INTEGER,
        "partitions": _INTEGER,
        "leaderless": _INTEGER,
        "under_replicated": _INTEGER,
        "under_min_insync": _INTEGER,
        "moves": _INTEGER,
    }
)


def topic_routes(topics: TopicHandlers) -> tuple[Route, ...]:
    created = schema_object({"name": _STRING, "partitions": _INTEGER, "created": _BOOLEAN})
    names = schema_object({"topics": {"type": "array", "items": _STRING}})
    deleted = schema_object({"deleted": _BOOLEAN, "name": _STRING})
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
            method="GET", path="/admin/cluster", name="cluster",
            summary="The cluster as this node knows it", handler=topics.cluster, answer=_CLUSTER,
        ),
    )  # fmt: skip
