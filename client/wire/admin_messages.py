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

Any node takes them: it proposes the change and answers when it is decided and known to itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from raftq.client.common.errors import Detail
from raftq.client.wire.messages import (
    U8,
    U31,
    Name,
    NodeId,
    Offset,
    Request,
    WireMessage,
    register,
)
from raftq.client.wire.schema import ITEMS_MAX, Bad, Most

Settings = Annotated[Mapping[str, Detail], Most(64)]
Nodes = Annotated[tuple[NodeId, ...], Most(64)]


@register
@dataclass(frozen=True, slots=True)
class CreateTopicReply(WireMessage):
    kind: ClassVar[int] = 22

    topic_id: Offset
    partitions: U31
    replication: U8


@register
@dataclass(frozen=True, slots=True)
class CreateTopic(Request[CreateTopicReply]):
    """0 partitions or replicas: the cluster's default."""

    kind: ClassVar[int] = 21

    topic: Name
    partitions: U31 = 0
    replication: U8 = 0
    config: Settings = field(default_factory=dict)


@register
@dataclass(frozen=True, slots=True)
class DeleteTopicReply(WireMessage):
    kind: ClassVar[int] = 24


@register
@dataclass(frozen=True, slots=True)
class DeleteTopic(Request[DeleteTopicReply]):
    kind: ClassVar[int] = 23

    topic: Name


@register
@dataclass(frozen=True, slots=True)
class AlterTopicReply(WireMessage):
    kind: ClassVar[int] = 26


@register
@dataclass(frozen=True, slots=True)
class AlterTopic(Request[AlterTopicReply]):
    """Changes these settings and leaves the others; None takes a setting back to its default."""

    kind: ClassVar[int] = 25

    topic: Name
    config: Settings


@register
@dataclass(frozen=True, slots=True)
class AddPartitionsReply(WireMessage):
    kind: ClassVar[int] = 28

    partitions: U31


@register
@dataclass(frozen=True, slots=True)
class AddPartitions(Request[AddPartitionsReply]):
    """`partitions` is the total after the call."""

    kind: ClassVar[int] = 27

    topic: Name
    partitions: U31


@register
@dataclass(frozen=True, slots=True)
class MoveReplicasReply(WireMessage):
    kind: ClassVar[int] = 30


@register
@dataclass(frozen=True, slots=True)
class MoveReplicas(Request[MoveReplicasReply]):
    """Starts a move of one partition to these nodes, the preferred leader first."""

    kind: ClassVar[int] = 29

    topic: Name
    partition: U31
    replicas: Nodes


@register
@dataclass(frozen=True, slots=True)
class DrainNodeReply(WireMessage):
    kind: ClassVar[int] = 32

    leading: U31  # partitions that the node still leads, because nobody else can


@register
@dataclass(frozen=True, slots=True)
class DrainNode(Request[DrainNodeReply]):
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
@dataclass(frozen=True, slots=True)
class RemoveNodeReply(WireMessage):
    kind: ClassVar[int] = 34


@register
@dataclass(frozen=True, slots=True)
class RemoveNode(Request[RemoveNodeReply]):
    """Forgets a node that is down and holds no replica."""

    kind: ClassVar[int] = 33

    node_id: NodeId


@register
@dataclass(frozen=True, slots=True)
class ClusterStatusReply(WireMessage):
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
@dataclass(frozen=True, slots=True)
class ClusterStatus(Request[ClusterStatusReply]):
    """How the cluster looks from the node that is asked."""

    kind: ClassVar[int] = 35


@register
@dataclass(frozen=True, slots=True)
class RecoverPartitionReply(WireMessage):
    kind: ClassVar[int] = 38

    asked: Nodes  # they tell where their copies end; the longest leads when all have


@register
@dataclass(frozen=True, slots=True)
class RecoverPartition(Request[RecoverPartitionReply]):
    """Gives up the members of an isr that are not alive: the longest of the copies that are is to
    lead. Refused when one of the isr is alive, or the partition has another version."""

    kind: ClassVar[int] = 37

    topic_id: Offset
    partition: U31
    version: Offset


@dataclass(frozen=True, slots=True)
class CopyInfo:
    """One copy; of each strand its last epoch, its end offset, and up to where the node knows that
    it was readable."""

    topic_id: Offset
    partition: U31
    strands: Annotated[tuple[tuple[Offset, ...], ...], Most(8)]


@register
@dataclass(frozen=True, slots=True)
class DescribeCopiesReply(WireMessage):
    kind: ClassVar[int] = 40

    copies: Annotated[tuple[CopyInfo, ...], Most(ITEMS_MAX)] = ()

    def check(self, raw_bytes: int) -> None:
        for at, one in enumerate(self.copies):
            if not one.strands or any(len(strand) != 3 for strand in one.strands):
                raise Bad(f".copies[{at}].strands: not triples of epoch, end and high watermark")


@register
@dataclass(frozen=True, slots=True)
class DescribeCopies(Request[DescribeCopiesReply]):
    """Of these partitions, pairs of topic id and number; what is not here is left out."""

    kind: ClassVar[int] = 39

    partitions: Annotated[tuple[tuple[Offset, Offset], ...], Most(ITEMS_MAX)]
