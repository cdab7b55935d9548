"""Requests of operators and tools: topics, moves of replicas, nodes. (Pure.)

    kind  request           reply
    21    CreateTopic       CreateTopicReply
    23    DeleteTopic       DeleteTopicReply
    25    AlterTopic        AlterTopicReply
    27    AddPartitions     AddPartitionsReply
    29    MoveReplicas      MoveReplicasReply
    31    DrainNode         DrainNodeReply
    33    RemoveNode        RemoveNodeReply
    35    ClusterStatus     ClusterStatusReply
    37    RecoverPartition  RecoverPartitionReply
    39    DescribeCopies    DescribeCopiesReply      about the copies on the node that is asked

Any node takes them: it proposes the change and answers when it is decided and known to itself. A
request that is a Command is proposed as it is (cluster/metadata/commands.py has the other commands
and their bytes in the Raft log, where a field is known by its place and not by its name).
"""

from typing import Annotated, ClassVar

from msgspec import Meta, field

from raftq.client.wire.messages import (
    U8,
    U31,
    Name,
    NodeId,
    Nodes,
    Offset,
    Request,
    Settings,
    WireMessage,
    register,
)
from raftq.client.wire.schema import Items, WireStruct, no_details


class Command(WireStruct, frozen=True):
    """Base of everything that the metadata can be asked for."""

    command_kind: ClassVar[int] = -1

    def check_fields(self) -> None:
        """Raise Bad when the fields contradict each other."""


@register
class CreateTopicReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 22

    topic_id: Offset
    partitions: U31
    replication: U8


@register
class CreateTopic(Request[CreateTopicReply], Command, frozen=True):
    """0 partitions or replicas: the cluster's default."""

    kind: ClassVar[int] = 21
    command_kind: ClassVar[int] = 5

    topic: Name
    partitions: U31 = 0
    replication: U31 = 0
    config: Settings = field(default_factory=no_details)


@register
class DeleteTopicReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 24


@register
class DeleteTopic(Request[DeleteTopicReply], Command, frozen=True):
    kind: ClassVar[int] = 23
    command_kind: ClassVar[int] = 7

    topic: Name


@register
class AlterTopicReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 26


@register
class AlterTopic(Request[AlterTopicReply], Command, frozen=True):
    """Changes these settings and leaves the others; None takes a setting back to its default."""

    kind: ClassVar[int] = 25
    command_kind: ClassVar[int] = 6

    topic: Name
    config: Settings


@register
class AddPartitionsReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 28

    partitions: U31


@register
class AddPartitions(Request[AddPartitionsReply], Command, frozen=True):
    """`partitions` is the total after the call."""

    kind: ClassVar[int] = 27
    command_kind: ClassVar[int] = 8

    topic: Name
    partitions: U31


@register
class MoveReplicasReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 30


@register
class MoveReplicas(Request[MoveReplicasReply], Command, frozen=True):
    """Starts a move of one partition to these nodes, the preferred leader first."""

    kind: ClassVar[int] = 29
    command_kind: ClassVar[int] = 11

    topic: Name
    partition: U31
    replicas: Nodes


@register
class DrainNodeReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 32

    leading: U31  # partitions that the node still leads, because no other node can


@register
class DrainNode(Request[DrainNodeReply], frozen=True):
    """Moves leadership away from a node and keeps it away, or (not `drain`) lets it come back.

    With `decommission` its replicas are moved away too, after which the node can be removed. A
    drain after which some partition could not be written is refused unless `force` is set.
    """

    kind: ClassVar[int] = 31

    node_id: NodeId
    drain: bool = True
    decommission: bool = False
    force: bool = False


@register
class RemoveNodeReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 34


@register
class RemoveNode(Request[RemoveNodeReply], Command, frozen=True):
    """Forgets a node that is down and holds no replica."""

    kind: ClassVar[int] = 33
    command_kind: ClassVar[int] = 4

    node_id: NodeId


@register
class ClusterStatusReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 36

    cluster_id: Name
    node_id: NodeId
    controller: NodeId | None
    term: Offset
    applied_index: Offset
    voters: Nodes
    topics: U31
    partitions: U31
    leaderless: U31
    under_replicated: U31
    under_min_insync: U31
    moves: U31
    version: Name = ""
    recovering: U31 = 0  # leaderless partitions whose copies are being compared


@register
class ClusterStatus(Request[ClusterStatusReply], frozen=True):
    """How the cluster looks from the node that is asked."""

    kind: ClassVar[int] = 35


@register
class RecoverPartitionReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 38

    asked: Nodes  # they tell where their copies end; the longest leads when all have


@register
class RecoverPartition(Request[RecoverPartitionReply], frozen=True):
    """Gives up the members of an isr that are not alive: the longest of the copies that are is to
    lead. Refused when one of the isr is alive, or the partition has another version."""

    kind: ClassVar[int] = 37

    topic_id: Offset
    partition: U31
    version: Offset


class CopyInfo(WireStruct, frozen=True):
    """One copy. Each of its logs has its last epoch, its end offset, and the offset up to which the
    node knows that it was readable."""

    topic_id: Offset
    partition: U31
    logs: Annotated[tuple[tuple[Offset, Offset, Offset], ...], Meta(min_length=1, max_length=8)] = (
        field(name="strands")
    )


@register
class DescribeCopiesReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 40

    copies: Items[CopyInfo] = ()


@register
class DescribeCopies(Request[DescribeCopiesReply], frozen=True):
    """Of these partitions, pairs of topic id and number; what is not here is left out."""

    kind: ClassVar[int] = 39

    partitions: Items[tuple[Offset, Offset]]
