"""Applies commands to the state of the cluster. (Core.)

`apply` is deterministic: the same commands in the same order give the same state, results and
changes everywhere, and `dump` gives the same bytes. A command that is refused raises a RaftqError
and has changed nothing. Any other exception is a broken invariant and stops the replica.

Elections are part of the command that makes them necessary: the state never names a leader that is
not alive or not in sync.
"""

from collections.abc import Callable
from typing import Any

from raftq.client.common.errors import RaftqError
from raftq.cluster.metadata.apply_nodes import fence_node, register_node, remove_node, set_draining
from raftq.cluster.metadata.apply_recovery import recover, tell_ends
from raftq.cluster.metadata.apply_topics import (
    add_partitions,
    allocate_producer_ids,
    alter_topic,
    change_isr,
    create_topic,
    delete_topic,
    elect_preferred,
    enable_queues,
    init_named_producer,
    move_replicas,
    resign,
)
from raftq.cluster.metadata.changes import (
    Change,
    NodeChanged,
    PartitionChanged,
    TopicChanged,
    TopicDeleted,
    differences,
)
from raftq.cluster.metadata.commands import (
    AddPartitions,
    AllocateProducerIds,
    AlterTopic,
    ChangeIsr,
    Command,
    Confirm,
    CreateTopic,
    DeleteTopic,
    ElectPreferred,
    EnableQueues,
    FenceNode,
    InitNamedProducer,
    MoveReplicas,
    Recover,
    RegisterNode,
    RemoveNode,
    Resign,
    SetDraining,
    TellEnds,
)
from raftq.cluster.metadata.dump import dump, load
from raftq.cluster.metadata.state import ClusterState

__all__ = [
    "Change",
    "NodeChanged",
    "PartitionChanged",
    "TopicChanged",
    "TopicDeleted",
    "apply",
    "differences",
    "dump",
    "load",
]

_handlers: dict[type[Command], Callable[[ClusterState, Any], tuple[object, list[Change]]]] = {
    RegisterNode: register_node,
    FenceNode: fence_node,
    SetDraining: set_draining,
    RemoveNode: remove_node,
    CreateTopic: create_topic,
    AlterTopic: alter_topic,
    DeleteTopic: delete_topic,
    AddPartitions: add_partitions,
    ChangeIsr: change_isr,
    Resign: resign,
    ElectPreferred: elect_preferred,
    MoveReplicas: move_replicas,
    AllocateProducerIds: allocate_producer_ids,
    InitNamedProducer: init_named_producer,
    EnableQueues: enable_queues,
    Confirm: lambda state, command: (None, []),
    TellEnds: tell_ends,
    Recover: recover,
}


def apply(state: ClusterState, command: Command, index: int) -> tuple[Any, list[Change]]:
    """Apply the command, and return its result (see commands.py) and what changed. A RaftqError
    means that it was refused and nothing changed."""
    before, state.index = state.index, index
    try:
        return _handlers[type(command)](state, command)
    except RaftqError:
        state.index = before
        raise
