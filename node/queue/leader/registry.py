"""The queues of all partitions that this node leads. (Shell.)"""

from collections.abc import Iterator

from raftq.client.common.errors import InvalidArgument, NotLeader
from raftq.client.common.names import is_internal
from raftq.node.queue.leader.engine import QueueTools
from raftq.node.queue.leader.partition_queue import PartitionQueue
from raftq.node.replication.leader_log import Leadership
from raftq.node.replication.partition_ref import PartitionRef


class QueueRegistry:
    """Makes the service of a led partition, and finds it again while it leads."""

    def __init__(self, tools: QueueTools) -> None:
        self._tools = tools
        self._queues: dict[tuple[int, int], PartitionQueue] = {}

    def serve(self, leadership: Leadership) -> PartitionQueue:
        ref = leadership.ref
        queue = PartitionQueue(leadership, self._tools, self._stopped)
        self._queues[ref.topic_id, ref.number] = queue
        return queue

    def _stopped(self, queue: PartitionQueue) -> None:
        key = queue.leadership.ref.topic_id, queue.leadership.ref.number
        if self._queues.get(key) is queue:
            del self._queues[key]

    def __iter__(self) -> Iterator[PartitionQueue]:
        return iter(list(self._queues.values()))

    def find(self, ref: PartitionRef) -> PartitionQueue | None:
        return self._queues.get((ref.topic_id, ref.number))

    def of(self, ref: PartitionRef) -> PartitionQueue:
        """The queue of a partition that is led here."""
        found = self.find(ref)
        if found is None:
            raise NotLeader(f"the queue of {ref} is not served here at the moment")
        return found


def check_topic(topic: str) -> None:
    if is_internal(topic):
        raise InvalidArgument(f"topic {topic!r} is the cluster's own, not a queue")


def check_group(group: str) -> None:
    if not group or is_internal(group):
        raise InvalidArgument(f"group {group!r}: use a name that does not begin with __")
