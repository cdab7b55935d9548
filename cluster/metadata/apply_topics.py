"""How commands about topics, partitions and producers change the state. (Core.)

A move goes through three states, and only the isr moves it on:

    replicas = old --MoveReplicas--> replicas = old + new, target = new
                   --isr has all of new--> replicas = isr = new, target = None

Another MoveReplicas replaces the target, so moving back cancels. Each function refuses, by raising
a RaftqError, before it changes anything.
"""

from dataclasses import replace

from raftq.client.common.errors import (
    FencedEpoch,
    InvalidArgument,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.common.names import is_internal
from raftq.cluster.metadata.changes import (
    Change,
    LeaderResigned,
    PartitionChanged,
    TopicChanged,
    TopicDeleted,
)
from raftq.cluster.metadata.commands import (
    REPLICAS_MAX,
    AddPartitions,
    AllocateProducerIds,
    AlterTopic,
    ChangeIsr,
    CreateTopic,
    DeleteTopic,
    ElectPreferred,
    EnableQueues,
    InitNamedProducer,
    MoveReplicas,
    Resign,
)
from raftq.cluster.metadata.elections import (
    electable,
    elected,
    store_partition,
    with_copies,
    with_partitions,
)
from raftq.cluster.metadata.placement import place
from raftq.cluster.metadata.recovery import waiting
from raftq.cluster.metadata.state import (
    PARTITIONS_MAX,
    PARTITIONS_TOTAL_MAX,
    TOPICS_MAX,
    ClusterState,
    PartitionState,
    TopicState,
)
from raftq.cluster.metadata.topic_config import (
    REPLICATION_MAX,
    check_topic_name,
    topic_config,
)

PARTITIONS_DEFAULT = 3
REPLICATION_DEFAULT = 3
PRODUCERS_MAX = 100_000
PRODUCER_ID_LAST = (1 << 62) - 1
PRODUCER_EPOCH_LAST = (1 << 32) - 1

Answer = tuple[object, list[Change]]


def create_topic(state: ClusterState, command: CreateTopic) -> Answer:
    name = command.topic
    check_topic_name(name)
    if name in state.topics:
        raise TopicExists(f"there is a topic {name!r} already")
    if len(state.topics) >= TOPICS_MAX:
        raise InvalidArgument(f"there are {TOPICS_MAX} topics already")
    alive = sum(node.alive for node in state.nodes.values())
    partitions = command.partitions or PARTITIONS_DEFAULT
    replication = command.replication or min(REPLICATION_DEFAULT, alive)
    _check_partitions(state, 0, partitions)
    _check_replication(state, replication)
    config = topic_config(command.config, replication)
    topic_id = state.topic_id_next
    created = _created(state, partitions, replication)
    state.topic_id_next += 1
    state.partition_count += partitions
    synced_since = 0 if config.fsync == "always" else None
    state.topics[name] = TopicState(
        name, topic_id, config, tuple(created), synced_since=synced_since
    )
    state.topic_names[topic_id] = name
    result = {"topic_id": topic_id, "partitions": partitions, "replication": replication}
    return result, [TopicChanged(name, topic_id)]


def alter_topic(state: ClusterState, command: AlterTopic) -> Answer:
    topic = _topic(state, command.topic)
    overrides = {**topic.config.overrides, **command.config}
    min_insync = 0 if "min_insync" in command.config else topic.config.min_insync
    config = topic_config(overrides, topic.replication, min_insync)
    if config == topic.config:
        return None, []
    synced_since = None
    if config.fsync == "always":
        synced_since = state.index if topic.synced_since is None else topic.synced_since
    state.topics[topic.name] = replace(topic, config=config, synced_since=synced_since)
    return None, [TopicChanged(topic.name, topic.topic_id)]


def delete_topic(state: ClusterState, command: DeleteTopic) -> Answer:
    topic = _topic(state, command.topic)
    del state.topics[topic.name]
    del state.topic_names[topic.topic_id]
    state.memo.pop(topic.topic_id, None)
    state.partition_count -= len(topic.partitions)
    return None, [TopicDeleted(topic.name, topic.topic_id)]


def add_partitions(state: ClusterState, command: AddPartitions) -> Answer:
    topic = _topic(state, command.topic)
    total, have = command.partitions, len(topic.partitions)
    if total <= have:
        raise InvalidArgument(f"topic {topic.name!r} has {have} partitions, which is no less")
    _check_partitions(state, have, total)
    _check_replication(state, topic.replication)
    created = _created(state, total - have, topic.replication)
    state.partition_count += total - have
    state.topics[topic.name] = with_partitions(topic, [*topic.partitions, *created])
    return total, [TopicChanged(topic.name, topic.topic_id)]


def enable_queues(state: ClusterState, command: EnableQueues) -> Answer:
    topic = state.topic_by_id(command.topic_id)
    if topic is None:
        raise UnknownTopic(f"there is no topic with the id {command.topic_id}")
    if is_internal(topic.name):
        raise InvalidArgument(f"topic {topic.name!r} is the cluster's own and no queue")
    if topic.queued:
        return None, []
    state.topics[topic.name] = replace(topic, queued=True)
    return None, [TopicChanged(topic.name, topic.topic_id)]


def change_isr(state: ClusterState, command: ChangeIsr) -> Answer:
    topic, old = _partition(state, command.topic_id, command.partition)
    if (command.leader, command.epoch, command.version) != (old.leader, old.epoch, old.version):
        raise FencedEpoch(
            f"{topic.name}/{command.partition} has leader {old.leader}, epoch {old.epoch} and "
            f"version {old.version}; {command.leader} spoke for epoch {command.epoch} and version "
            f"{command.version}"
        ).with_details(epoch=old.epoch, version=old.version)
    members = dict(command.isr)
    isr = tuple(node for node in old.replicas if node in members)
    if len(isr) != len(command.isr):
        raise InvalidArgument(f"isr {sorted(members)} is not made of the replicas {old.replicas}")
    if command.leader not in members:
        raise InvalidArgument(f"leader {command.leader} takes itself out of the isr")
    for node in isr:
        if node not in old.isr and not state.is_alive(node, members[node]):
            raise FencedEpoch(f"node {node} is not alive as incarnation {members[node]}")
    least = topic.isr_size_min(old)
    if len(isr) < least and any(node not in members for node in old.isr):
        raise InvalidArgument(
            f"{topic.name}/{command.partition}: an isr of {len(isr)} is below min_insync {least}"
        )
    new = elected(old, with_copies(old, old.replicas, isr, old.leader, old.target), state.nodes)
    return [new.epoch, new.version], store_partition(state, topic, command.partition, new)


def resign(state: ClusterState, command: Resign) -> Answer:
    topic, old = _partition(state, command.topic_id, command.partition)
    if (command.leader, command.epoch) != (old.leader, old.epoch):
        raise FencedEpoch(
            f"{topic.name}/{command.partition} has leader {old.leader} and epoch {old.epoch}; "
            f"{command.leader} spoke for epoch {command.epoch}"
        ).with_details(epoch=old.epoch, version=old.version)
    others = [
        node
        for node in electable(old.replicas, old.isr, state.nodes)
        if node != old.leader and not state.nodes[node].draining
    ]
    if not others:
        return False, []
    new = replace(old, leader=others[0], epoch=old.epoch + 1, version=old.version + 1)
    changes = store_partition(state, topic, command.partition, new)
    return True, [LeaderResigned(command.leader), *changes]


def elect_preferred(state: ClusterState, command: ElectPreferred) -> Answer:
    edits: dict[int, dict[int, PartitionState]] = {}
    for topic_id, number in command.partitions:
        topic = state.topic_by_id(topic_id)
        if topic is None or number >= len(topic.partitions):
            continue
        old = topic.partitions[number]
        preferred = old.replicas[0]
        if preferred == old.leader or state.nodes[preferred].draining:
            continue
        if preferred in electable(old.replicas, old.isr, state.nodes):
            new = replace(old, leader=preferred, epoch=old.epoch + 1, version=old.version + 1)
            edits.setdefault(topic_id, {})[number] = new
    changes: list[Change] = []
    for topic_id, edited in edits.items():
        name = state.topic_names[topic_id]
        topic = state.topics[name]
        partitions = list(topic.partitions)
        for number, new in edited.items():
            partitions[number] = new
            changes.append(PartitionChanged(name, topic_id, number))
        state.topics[name] = with_partitions(topic, partitions)
    return len(changes), changes


def move_replicas(state: ClusterState, command: MoveReplicas) -> Answer:
    topic = _topic(state, command.topic)
    topic, old = _partition(state, topic.topic_id, command.partition)
    wanted = command.replicas
    _check_target(state, topic, old, wanted)
    if old.recovery is not None:
        # The move might drop the longest copy.
        raise InvalidArgument(waiting(topic, command.partition, old.recovery))
    if wanted == old.wanted:
        return old.target is None, []
    # Replicas that an earlier move only began to add are dropped, unless they are in sync.
    dropped = old.adding
    kept = [node for node in old.replicas if node in wanted or node not in dropped]
    replicas = (*kept, *(node for node in wanted if node not in kept))
    if len(replicas) > REPLICAS_MAX:
        raise InvalidArgument(f"{len(replicas)} replicas at once: let an earlier move finish first")
    isr = tuple(node for node in replicas if node in old.isr)
    new = elected(old, with_copies(old, replicas, isr, old.leader, wanted), state.nodes)
    return new.target is None, store_partition(state, topic, command.partition, new)


def allocate_producer_ids(state: ClusterState, command: AllocateProducerIds) -> Answer:
    return _take_producer_ids(state, command.count), []


def init_named_producer(state: ClusterState, command: InitNamedProducer) -> Answer:
    name = command.name
    if not name:
        raise InvalidArgument("a named producer needs a name")
    known = state.producers.get(name)
    if known is None and len(state.producers) >= PRODUCERS_MAX:
        raise InvalidArgument(f"there are {PRODUCERS_MAX} named producers already")
    if known is None or known[1] >= PRODUCER_EPOCH_LAST:
        known = (_take_producer_ids(state, 1), 0)
    else:
        known = (known[0], known[1] + 1)
    state.producers[name] = known
    return list(known), []


def _take_producer_ids(state: ClusterState, count: int) -> int:
    first = state.producer_id_next
    if first + count > PRODUCER_ID_LAST:
        raise InvalidArgument("no producer ids are left")
    state.producer_id_next += count
    return first


def _topic(state: ClusterState, name: str) -> TopicState:
    topic = state.topics.get(name)
    if topic is None:
        raise UnknownTopic(f"there is no topic {name!r}")
    return topic


def _partition(
    state: ClusterState, topic_id: int, number: int
) -> tuple[TopicState, PartitionState]:
    topic = state.topic_by_id(topic_id)
    if topic is None:
        raise UnknownTopic(f"there is no topic with the id {topic_id}")
    if number >= len(topic.partitions):
        raise UnknownPartition(
            f"topic {topic.name!r} has {len(topic.partitions)} partitions, none is number {number}"
        )
    return topic, topic.partitions[number]


def _check_partitions(state: ClusterState, have: int, total: int) -> None:
    if total > PARTITIONS_MAX:
        raise InvalidArgument(f"{total} partitions; a topic has at most {PARTITIONS_MAX}")
    if state.partition_count + total - have > PARTITIONS_TOTAL_MAX:
        raise InvalidArgument(
            f"there are {state.partition_count} partitions already, and {PARTITIONS_TOTAL_MAX} "
            "are the most that a cluster can have"
        )


def _check_replication(state: ClusterState, replication: int) -> None:
    if not replication:
        raise InvalidArgument("no node is alive")
    if replication > REPLICATION_MAX:
        raise InvalidArgument(f"replication {replication} is above {REPLICATION_MAX}")
    if replication > len(state.nodes):
        raise InvalidArgument(
            f"replication {replication} needs as many nodes; {len(state.nodes)} are registered"
        )


def _check_target(
    state: ClusterState, topic: TopicState, old: PartitionState, wanted: tuple[int, ...]
) -> None:
    if not wanted or len(dict.fromkeys(wanted)) != len(wanted):
        raise InvalidArgument(f"replicas {wanted} must be different nodes, at least one")
    if len(wanted) > REPLICATION_MAX:
        raise InvalidArgument(f"{len(wanted)} replicas are above {REPLICATION_MAX}")
    if len(wanted) < topic.config.min_insync:
        raise InvalidArgument(
            f"{len(wanted)} replicas are fewer than min_insync {topic.config.min_insync}"
        )
    for node_id in wanted:
        node = state.nodes.get(node_id)
        if node is None:
            raise InvalidArgument(f"there is no node {node_id}")
        if node_id not in old.replicas and (node.decommissioning or not node.alive):
            why = "is being decommissioned" if node.decommissioning else "is down"
            raise InvalidArgument(f"node {node_id} {why} and cannot take a replica")


def _created(state: ClusterState, partitions: int, replication: int) -> list[PartitionState]:
    """Make new partitions. They are empty, so every live replica is in sync."""
    nodes = state.nodes
    created = []
    for replicas in place(state, partitions, replication):
        isr = tuple(node for node in replicas if nodes[node].alive) or replicas
        candidates = electable(replicas, isr, nodes)
        leader = candidates[0] if candidates else None
        created.append(PartitionState(replicas, isr, leader, 1, 1, (1,) * len(replicas)))
    return created
