"""The whole state as bytes and back. (Pure.)

    msgpack [format, cluster id, index, next topic id, next producer id, nodes, topics, producers]
    node       the fields of NodeState
    topic      [name, id, overrides, min_insync, partitions, queued, synced since]
    partition  [replicas, isr, leader, epoch, version, assignments, target, recovery]
    recovery   [since, asked, [[node id, [[last epoch, end offset], ...]], ...]]; None: it has none
    producer   [name, id, epoch]

Equal states give equal bytes. What comes from a disk or another node is checked before it is
believed: a CorruptFile names what is wrong, an UnknownFormat a version that is not known here.
"""

from typing import Any

import msgpack

from raftq.client.common.errors import CorruptFile, InvalidArgument, UnknownFormat
from raftq.cluster.metadata.commands import REPLICAS_MAX
from raftq.cluster.metadata.state import (
    NODES_MAX,
    PARTITIONS_MAX,
    TOPICS_MAX,
    ClusterState,
    EndReport,
    NodeState,
    PartitionState,
    Recovery,
    TopicState,
)
from raftq.cluster.metadata.topic_config import REPLICATION_MAX, is_topic_name, topic_config

DUMP_FORMAT = 3
DUMP_BYTES_MAX = 64 * 1024 * 1024
_ITEMS_MAX = 200_000
_NODE_FIELDS = (int, str, int, int, str, str, int, bool, bool, bool, int)
_NUMBER_MAX = (1 << 63) - 1


def dump(state: ClusterState) -> bytes:
    nodes = [
        [
            one.node_id,
            one.host,
            one.port,
            one.http_port,
            one.raft_address,
            one.rack,
            one.incarnation,
            one.alive,
            one.draining,
            one.decommissioning,
            one.unsynced_since,
        ]
        for one in state.nodes.values()
    ]
    topics = [_dumped_topic(one) for one in state.topics.values()]
    producers = [[name, *known] for name, known in state.producers.items()]
    packed: bytes = msgpack.packb(
        [
            DUMP_FORMAT,
            state.cluster_id,
            state.index,
            state.topic_id_next,
            state.producer_id_next,
            nodes,
            topics,
            producers,
        ]
    )
    return packed


def _dumped_topic(topic: TopicState) -> list[Any]:
    partitions = [
        (
            one.replicas,
            one.isr,
            one.leader,
            one.epoch,
            one.version,
            one.assignments,
            one.target,
            _dumped_recovery(one.recovery),
        )
        for one in topic.partitions
    ]
    config = topic.config
    return [
        topic.name,
        topic.topic_id,
        dict(config.overrides),
        config.min_insync,
        partitions,
        topic.queued,
        topic.synced_since,
    ]


def _dumped_recovery(recovery: Recovery | None) -> list[Any] | None:
    if recovery is None:
        return None
    told = [(one.node_id, one.ends) for one in recovery.told]
    return [recovery.since, recovery.asked, told]


def load(data: bytes) -> ClusterState:
    if len(data) > DUMP_BYTES_MAX:
        raise CorruptFile(f"a dump of {len(data)} bytes is over the limit of {DUMP_BYTES_MAX}")
    limit = min(len(data), _ITEMS_MAX)
    try:
        value = msgpack.unpackb(data, max_array_len=limit, max_ext_len=0)
        _require(type(value) is list and len(value) > 1, "it is not a list")
        if value[0] != DUMP_FORMAT:
            raise UnknownFormat(f"dump of format {value[0]!r:.40}; this is {DUMP_FORMAT}")
        return _loaded(value[1:])
    except (ValueError, TypeError, OverflowError, IndexError, KeyError, AttributeError) as error:
        # msgpack, unpacking and the checks below; all mean that this is no dump.
        raise CorruptFile(f"the dump cannot be read: {str(error)[:200]}") from error
    except msgpack.UnpackException as error:
        raise CorruptFile(f"the dump is not msgpack: {type(error).__name__}") from error


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _number(value: Any, low: int = 0) -> int:
    _require(type(value) is int and low <= value <= _NUMBER_MAX, f"{value!r:.40} is no number")
    return int(value)


def _text(value: Any) -> str:
    _require(type(value) is str and len(value) <= 255, f"{value!r:.40} is no text")
    return str(value)


def _loaded(parts: list[Any]) -> ClusterState:
    cluster_id, index, topic_id_next, producer_id_next, nodes, topics, producers = parts
    _require(len(nodes) <= NODES_MAX, f"{len(nodes)} nodes")
    _require(len(topics) <= TOPICS_MAX, f"{len(topics)} topics")
    state = ClusterState(_text(cluster_id))
    state.index = _number(index)
    state.topic_id_next = _number(topic_id_next)
    state.producer_id_next = _number(producer_id_next)
    for fields in nodes:
        _require(tuple(map(type, fields)) == _NODE_FIELDS, f"node {fields!r:.80}")
        node = NodeState(*fields)
        _require(node.node_id not in state.nodes, f"node {node.node_id} twice")
        state.nodes[node.node_id] = node
    for fields in topics:
        topic = _loaded_topic(state, fields)
        state.topics[topic.name] = topic
        state.topic_names[topic.topic_id] = topic.name
        state.partition_count += len(topic.partitions)
    for name, producer_id, epoch in producers:
        state.producers[_text(name)] = (_number(producer_id), _number(epoch))
    return state


def _loaded_topic(state: ClusterState, fields: list[Any]) -> TopicState:
    name, topic_id, overrides, min_insync, partitions, queued, synced_since = fields
    try:
        _require(is_topic_name(_text(name)), f"no topic can be called {name!r:.60}")
        config = topic_config(overrides, REPLICATION_MAX, _number(min_insync))
    except InvalidArgument as error:
        raise ValueError(str(error)) from error
    _require(0 < _number(topic_id) < state.topic_id_next, f"topic id {topic_id} is not given yet")
    _require(name not in state.topics and topic_id not in state.topic_names, f"topic {name} twice")
    _require(0 < len(partitions) <= PARTITIONS_MAX, f"{len(partitions)} partitions of {name}")
    loaded = tuple(_loaded_partition(state, name, one) for one in partitions)
    _require(type(queued) is bool, f"{queued!r:.40} is no bool")
    _require((synced_since is not None) == (config.fsync == "always"), f"fsync of {name}")
    if synced_since is not None:
        _number(synced_since)
    return TopicState(name, topic_id, config, loaded, queued, synced_since)


def _loaded_partition(state: ClusterState, name: str, fields: list[Any]) -> PartitionState:
    replicas, isr, leader, epoch, version, assignments, target, recovery = fields
    one = PartitionState(
        replicas=tuple(replicas),
        isr=tuple(isr),
        leader=leader,
        epoch=_number(epoch),
        version=_number(version),
        assignments=tuple(_number(one) for one in assignments),
        target=None if target is None else tuple(target),
        recovery=None if recovery is None else _loaded_recovery(*recovery),
    )
    nodes = state.nodes
    asked = () if one.recovery is None else one.recovery.asked
    sound = (
        bool(one.isr or asked)
        and (one.recovery is None or (leader is None and bool(asked)))
        and len(set(one.replicas)) == len(one.replicas) <= REPLICAS_MAX
        and all(type(node) is int and node in nodes for node in one.replicas)
        and all(node in one.replicas for node in (*one.isr, *asked, *(one.target or ())))
        and (leader is None or (leader in one.isr and nodes[leader].alive))
        and one.target != ()
        and len(one.assignments) == len(one.replicas)
        and all(since <= one.version for since in one.assignments)
    )
    _require(sound, f"partition {one} of {name} contradicts itself")
    return one


def _loaded_recovery(since: Any, asked: list[Any], told: list[Any]) -> Recovery:
    tellings = tuple(
        EndReport(_number(node_id), tuple((_number(epoch), _number(end)) for epoch, end in ends))
        for node_id, ends in told
    )
    return Recovery(_number(since), tuple(asked), tellings)
