"""What the HTTP side reads of the node. (Shell.)"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from raftq.cluster.metadata.log import MetadataLog
from raftq.node.metrics.node_status import CoordinatedGroup, DelayedStats, GroupStats, ReplicaStats
from raftq.node.queue.leader.delay_line import DelayLine
from raftq.node.queue.leader.group_admin import describe
from raftq.node.queue.leader.partition_queue import PartitionQueue
from raftq.node.replication.partition import Partition

if TYPE_CHECKING:
    from raftq.node.app import Node

LOW_SPACE_BYTES = 64 * 1024 * 1024


class Facts:
    """A NodeFacts over a running node."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._began = node.loop.time()

    @property
    def node_id(self) -> int:
        return self._node.node_id

    @property
    def cluster_id(self) -> str:
        return self._node.config.cluster_id

    @property
    def started_at(self) -> int:
        return self._node.started_at

    @property
    def native_address(self) -> tuple[str, int]:
        return self._node.config.host, self._node.native_port

    @property
    def metadata(self) -> MetadataLog:
        return self._node.metadata

    def uptime_s(self) -> float:
        return self._node.loop.time() - self._began

    def connections(self) -> int:
        return self._node.server.connections

    def replicas(self) -> Iterator[ReplicaStats]:
        return map(_stats, self._node.partitions)

    def groups(self) -> Iterator[GroupStats]:
        for queue in self._node.services.queues:
            if queue.is_ready:
                yield from _groups(queue)

    def delayed(self) -> Iterator[DelayedStats]:
        for queue in self._node.services.queues:
            line = queue.delay_line
            if isinstance(line, DelayLine):
                ref, counts = queue.leadership.ref, line.counts
                yield DelayedStats(
                    ref.topic, ref.number, line.pending_count, counts.fired, counts.cancelled,
                    counts.late_ms_max,
                )  # fmt: skip

    def coordinated(self) -> Iterator[CoordinatedGroup]:
        for coordinator in self._node.coordinators:
            for name, group in coordinator.core.groups.items():
                yield CoordinatedGroup(name, len(group.members), group.generation)

    def checks(self) -> Mapping[str, tuple[bool, str]]:
        node = self._node
        state = node.metadata.state
        me = state.nodes.get(node.node_id)
        registered = me is not None and me.alive and me.incarnation == node.incarnation
        controller = node.metadata.controller
        free = node.disk.free_bytes(node.config.data_dir)
        waiting = [partition for partition in node.partitions if partition.replica.role == "idle"]
        return {
            "registered": (registered, "the cluster counts on this node" if registered
                           else "the cluster does not count on this node (yet)"),
            "controller": (controller is not None, f"node {controller} is the controller"
                           if controller is not None else "no controller is known"),
            "disk": (free > LOW_SPACE_BYTES, f"{free} bytes are free"),
            "leaders": (not waiting, f"{len(waiting)} partitions here have no leader"),
        }  # fmt: skip


def _groups(queue: PartitionQueue) -> Iterator[GroupStats]:
    ref, end = queue.leadership.ref, queue.leadership.data.high_watermark
    for group in describe(queue.engine, ""):
        lag = group.unsettled
        if not group.counters and group.stored_offset < 0:
            # Readers that have stored nothing yet.
            lag = end - queue.leadership.data.log.start_offset
        counters = {name: count for name, count in group.counters.items() if isinstance(count, int)}
        yield GroupStats(
            ref.topic, ref.number, group.group, max(lag, 0), group.in_flight, group.waiting,
            group.paused, counters,
        )  # fmt: skip


def _stats(partition: Partition) -> ReplicaStats:
    log, replica, ref = partition.log, partition.replica, partition.ref
    counts = partition.data.counts
    return ReplicaStats(
        topic=ref.topic,
        topic_id=ref.topic_id,
        partition=ref.number,
        role="none" if replica.role == "idle" else replica.role,
        epoch=replica.epoch,
        start_offset=log.start_offset,
        end_offset=log.end_offset,
        high_watermark=replica.high_watermark,
        flushed_offset=log.flushed_offset,
        isr=replica.decided.isr,
        size_bytes=log.size_bytes,
        segments=log.segment_count,
        appended_records=counts.appended_records,
        appended_bytes=counts.appended_bytes,
        append_count=counts.appends,
        append_seconds=counts.append_s,
        duplicates=counts.duplicates,
        fetched_bytes=counts.read_bytes,
        truncations=counts.truncations,
        follower_ends={node: follower.end_offset for node, follower in replica.followers.items()},
    )
