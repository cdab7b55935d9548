"""What a command changed, for those who react to it. (Pure.)

A change names an entry of the state, and the entry itself shows its present value. So several
changes may be handled together, and a change may be handled twice.
"""

from dataclasses import dataclass

from raftq.cluster.metadata.state import ClusterState, TopicState


@dataclass(frozen=True, slots=True)
class NodeChanged:
    """The node registered, lost its lease, drains or not, or was removed."""

    node_id: int


@dataclass(frozen=True, slots=True)
class TopicChanged:
    """The topic was created, altered, got more partitions or became a queue: look at all of it."""

    name: str
    topic_id: int


@dataclass(frozen=True, slots=True)
class TopicDeleted:
    """A topic that is created under this name later has another id."""

    name: str
    topic_id: int


@dataclass(frozen=True, slots=True)
class PartitionChanged:
    name: str
    topic_id: int
    partition: int


@dataclass(frozen=True, slots=True)
class LeaderResigned:
    """The node gave up a partition that its followers could not fetch from it."""

    node_id: int


Change = NodeChanged | TopicChanged | TopicDeleted | PartitionChanged | LeaderResigned


def differences(old: ClusterState, new: ClusterState) -> list[Change]:
    """Return the changes from one state to another, whatever led there (after a restored dump)."""
    found: list[Change] = [
        NodeChanged(node_id)
        for node_id in sorted({*old.nodes, *new.nodes})
        if old.nodes.get(node_id) != new.nodes.get(node_id)
    ]
    found += [
        TopicDeleted(topic.name, topic.topic_id)
        for topic in old.topics.values()
        if topic.topic_id not in new.topic_names
    ]
    for topic in new.topics.values():
        before = old.topic_by_id(topic.topic_id)
        if before is None or not _alike(before, topic):
            found.append(TopicChanged(topic.name, topic.topic_id))
        else:
            pairs = zip(before.partitions, topic.partitions, strict=True)
            found += [
                PartitionChanged(topic.name, topic.topic_id, number)
                for number, (old, other) in enumerate(pairs)
                if old != other
            ]
    return found


def _alike(old: TopicState, other: TopicState) -> bool:
    return (
        old.config == other.config
        and old.queued == other.queued
        and len(old.partitions) == len(other.partitions)
    )
