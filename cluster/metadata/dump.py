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

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from raftq.client.common.errors import CorruptFile, Detail, InvalidArgument, UnknownFormat
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

_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, Meta(max_length=255)]
_Ids = tuple[int, ...]
_Node = tuple[int, str, int, int, str, str, int, bool, bool, bool, int]
_Ends = tuple[_Number, tuple[tuple[_Number, _Number], ...]]
_Recovery = tuple[_Number, _Ids, tuple[_Ends, ...]]
_Partition = tuple[
    _Ids, _Ids, int | None, _Number, _Number, tuple[_Number, ...], _Ids | None, _Recovery | None
]
_Partitions = Annotated[list[_Partition], Meta(min_length=1, max_length=PARTITIONS_MAX)]
_Topic = tuple[_Text, _Number, dict[str, Detail], _Number, _Partitions, bool, _Number | None]
_Dump = tuple[
    int,
    _Text,
    _Number,
    _Number,
    _Number,
    Annotated[list[_Node], Meta(max_length=NODES_MAX)],
    Annotated[list[_Topic], Meta(max_length=TOPICS_MAX)],
    list[tuple[_Text, _Number, _Number]],
]
_read_head = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=64)]
)
_read = msgspec.msgpack.Decoder(_Dump)


def dump(state: ClusterState) -> bytes:
    nodes = [
        [
            node.node_id,
            node.host,
            node.port,
            node.http_port,
            node.raft_address,
            node.rack,
            node.incarnation,
            node.alive,
            node.draining,
            node.decommissioning,
            node.unsynced_since,
        ]
        for node in state.nodes.values()
    ]
    topics = [_dumped_topic(topic) for topic in state.topics.values()]
    producers = [[name, *known] for name, known in state.producers.items()]
    return msgspec.msgpack.encode(
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


def _dumped_topic(topic: TopicState) -> list[Any]:
    partitions = [
        (
            partition.replicas,
            partition.isr,
            partition.leader,
            partition.epoch,
            partition.version,
            partition.assignments,
            partition.target,
            _dumped_recovery(partition.recovery),
        )
        for partition in topic.partitions
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
    told = [(report.node_id, report.ends) for report in recovery.told]
    return [recovery.since, recovery.asked, told]


def load(data: bytes) -> ClusterState:
    if len(data) > DUMP_BYTES_MAX:
        raise CorruptFile(f"a dump of {len(data)} bytes is over the limit of {DUMP_BYTES_MAX}")
    try:
        found = msgspec.msgpack.decode(_read_head.decode(data)[0], type=int)
        if found != DUMP_FORMAT:
            raise UnknownFormat(f"dump of format {found}; this is {DUMP_FORMAT}")
        return _loaded(*_read.decode(data)[1:])
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"the dump cannot be read: {str(error)[:200]}") from error


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _loaded(  # noqa: PLR0913 - the parts of a dump
    cluster_id: str,
    index: int,
    topic_id_next: int,
    producer_id_next: int,
    nodes: list[_Node],
    topics: list[_Topic],
    producers: list[tuple[str, int, int]],
) -> ClusterState:
    state = ClusterState(cluster_id)
    state.index = index
    state.topic_id_next = topic_id_next
    state.producer_id_next = producer_id_next
    for fields in nodes:
        node = NodeState(*fields)
        _require(node.node_id not in state.nodes, f"node {node.node_id} twice")
        state.nodes[node.node_id] = node
    for row in topics:
        topic = _loaded_topic(state, row)
        state.topics[topic.name] = topic
        state.topic_names[topic.topic_id] = topic.name
        state.partition_count += len(topic.partitions)
    state.producers.update((name, (producer_id, epoch)) for name, producer_id, epoch in producers)
    return state


def _loaded_topic(state: ClusterState, row: _Topic) -> TopicState:
    name, topic_id, overrides, min_insync, partitions, queued, synced_since = row
    try:
        _require(is_topic_name(name), f"no topic can be called {name!r:.60}")
        config = topic_config(overrides, REPLICATION_MAX, min_insync)
    except InvalidArgument as error:
        raise ValueError(str(error)) from error
    _require(0 < topic_id < state.topic_id_next, f"topic id {topic_id} is not given yet")
    _require(name not in state.topics and topic_id not in state.topic_names, f"topic {name} twice")
    loaded = tuple(_loaded_partition(state, name, partition) for partition in partitions)
    _require((synced_since is not None) == (config.fsync == "always"), f"fsync of {name}")
    return TopicState(name, topic_id, config, loaded, queued, synced_since)


def _loaded_partition(state: ClusterState, name: str, row: _Partition) -> PartitionState:
    recovery = None if row[7] is None else _loaded_recovery(*row[7])
    partition = PartitionState(*row[:7], recovery)
    leader = partition.leader
    nodes = state.nodes
    asked = () if partition.recovery is None else partition.recovery.asked
    sound = (
        bool(partition.isr or asked)
        and (partition.recovery is None or (leader is None and bool(asked)))
        and len(set(partition.replicas)) == len(partition.replicas) <= REPLICAS_MAX
        and all(node in nodes for node in partition.replicas)
        and all(
            node in partition.replicas
            for node in (*partition.isr, *asked, *(partition.target or ()))
        )
        and (leader is None or (leader in partition.isr and nodes[leader].alive))
        and partition.target != ()
        and len(partition.assignments) == len(partition.replicas)
        and all(since <= partition.version for since in partition.assignments)
    )
    _require(sound, f"partition {partition} of {name} contradicts itself")
    return partition


def _loaded_recovery(since: int, asked: _Ids, told: tuple[_Ends, ...]) -> Recovery:
    return Recovery(since, asked, tuple(EndReport(node_id, ends) for node_id, ends in told))
