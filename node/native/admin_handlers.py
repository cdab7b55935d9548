"""Handlers of requests by operators and tools: metadata, topics, moves, nodes. (Shell.)

Any node answers. It proposes the change, and when it answers, the change is decided and known here.
Other nodes learn of it a moment later.
"""

from importlib.metadata import version
from typing import Any

from raftq.client.common.errors import InvalidArgument
from raftq.client.common.names import INTERNAL_PREFIX, is_internal
from raftq.client.wire import admin_messages as admin
from raftq.client.wire.messages import Metadata, MetadataReply
from raftq.cluster.metadata.commands import SetDraining
from raftq.cluster.metadata.info import metadata_info
from raftq.cluster.metadata.log import MetadataLog


class AdminHandlers:
    """Answers admin requests with the metadata log of this node."""

    def __init__(self, node_id: int, cluster_id: str, log: MetadataLog) -> None:
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._log = log

    def metadata(self, message: Metadata, raw: memoryview, session: Any) -> MetadataReply:
        nodes, topics = metadata_info(self._log.state, message.topics)
        return MetadataReply(self._cluster_id, nodes, topics, self._log.controller)

    def cluster_status(
        self, message: admin.ClusterStatus, raw: memoryview, session: Any
    ) -> admin.ClusterStatusReply:
        log = self._log
        summary = log.state.summary()
        return admin.ClusterStatusReply(
            cluster_id=self._cluster_id,
            node_id=self._node_id,
            controller=log.controller,
            term=log.term,
            applied_index=log.index,
            voters=log.voters,
            topics=summary.topics,
            partitions=summary.partitions,
            leaderless=summary.leaderless,
            under_replicated=summary.under_replicated,
            under_min_insync=summary.under_min_insync,
            moves=summary.moves,
            version=version("raftq"),
            recovering=summary.recovering,
        )

    async def create_topic(
        self, message: admin.CreateTopic, raw: memoryview, session: Any
    ) -> admin.CreateTopicReply:
        _refuse_internal(message.topic)
        result = await self._log.propose(message)
        return admin.CreateTopicReply(
            result["topic_id"], result["partitions"], result["replication"]
        )

    async def delete_topic(
        self, message: admin.DeleteTopic, raw: memoryview, session: Any
    ) -> admin.DeleteTopicReply:
        _refuse_internal(message.topic)
        await self._log.propose(message)
        return admin.DeleteTopicReply()

    async def alter_topic(
        self, message: admin.AlterTopic, raw: memoryview, session: Any
    ) -> admin.AlterTopicReply:
        _refuse_internal(message.topic)
        await self._log.propose(message)
        return admin.AlterTopicReply()

    async def add_partitions(
        self, message: admin.AddPartitions, raw: memoryview, session: Any
    ) -> admin.AddPartitionsReply:
        _refuse_internal(message.topic)
        count = await self._log.propose(message)
        return admin.AddPartitionsReply(count)

    async def move_replicas(
        self, message: admin.MoveReplicas, raw: memoryview, session: Any
    ) -> admin.MoveReplicasReply:
        await self._log.propose(message)
        return admin.MoveReplicasReply()

    async def drain_node(
        self, message: admin.DrainNode, raw: memoryview, session: Any
    ) -> admin.DrainNodeReply:
        leading = await self._log.propose(
            SetDraining(message.node_id, message.drain, message.decommission, message.force)
        )
        return admin.DrainNodeReply(leading)

    async def remove_node(
        self, message: admin.RemoveNode, raw: memoryview, session: Any
    ) -> admin.RemoveNodeReply:
        await self._log.propose(message)
        return admin.RemoveNodeReply()

    def table(self) -> dict[type, Any]:
        """Return request class -> handler."""
        return {
            Metadata: self.metadata,
            admin.ClusterStatus: self.cluster_status,
            admin.CreateTopic: self.create_topic,
            admin.DeleteTopic: self.delete_topic,
            admin.AlterTopic: self.alter_topic,
            admin.AddPartitions: self.add_partitions,
            admin.MoveReplicas: self.move_replicas,
            admin.DrainNode: self.drain_node,
            admin.RemoveNode: self.remove_node,
        }


def _refuse_internal(topic: str) -> None:
    if is_internal(topic):
        raise InvalidArgument(
            f"topic {topic!r}: names that begin with {INTERNAL_PREFIX} are the cluster's own"
        )
