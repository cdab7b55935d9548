"""All replicas on a node: opens, leads, follows and closes them as the metadata says. (Shell.)

    metadata change ──> for each partition that changed: open or close the replica, apply the
                        decision to it, follow its leader
    time            ──> for each active partition: end requests whose time is over, propose
                        changes of the in-sync set

A partition of a queue has two more logs, which are opened when the topic becomes a queue. `serve`
makes the service that interprets them while this node leads. It is called for every epoch of a
queue, and of the internal topics of the cluster.

Nothing is led or followed before the metadata knows this incarnation of the node (`start`): until
then the metadata may still count on data that this node has lost.

Only active partitions (`mark_active`) are looked at regularly, so an idle partition costs nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from raftq.client.common.disk import Disk
from raftq.client.common.errors import (
    DiskFull,
    InvalidArgument,
    NotLeader,
    StorageError,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.common.names import is_internal
from raftq.cluster.metadata.changes import (
    Change,
    NodeChanged,
    PartitionChanged,
    TopicChanged,
    TopicDeleted,
)
from raftq.cluster.metadata.commands import EnableQueues
from raftq.cluster.metadata.log import MetadataLog
from raftq.cluster.metadata.state import PartitionState, TopicState
from raftq.node.config import NodeConfig
from raftq.node.metrics.counters import NodeMetrics
from raftq.node.replication.end_reports import EndReporter
from raftq.node.replication.follower import LeaderFetchers, Net, Spawn
from raftq.node.replication.full_disk import FullDisk
from raftq.node.replication.isr_proposals import IsrProposals
from raftq.node.replication.leader_log import LeaderService, Leadership
from raftq.node.replication.leadership import PartitionLeadership
from raftq.node.replication.liveness import FollowerLiveness
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import NAMES, PartitionLog
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.replication.removals import Removals
from raftq.node.replication.replica import Decided, Replica
from raftq.node.replication.replica_files import (
    directory_of,
    make_directory,
    open_logs,
    remove_deleted,
    remove_replica,
)
from raftq.node.storage.log import Log
from raftq.node.storage.producers import Producers
from raftq.node.storage.reserve import Reserve
from raftq.node.storage.syncer import Syncer

logger = logging.getLogger(__name__)

Key = tuple[int, int]
TICK_S = 0.1
OPEN_S = 0.01
DISK_FULL_S = 1.0

Serve = Callable[[Leadership], LeaderService]


class Partitions:
    """The replicas on this node. `spawn` gives its tasks to their owner."""

    def __init__(
        self,
        config: NodeConfig,
        disk: Disk,
        metadata: MetadataLog,
        syncer: Syncer,
        spawn: Spawn,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.syncer = syncer
        self.by_name: dict[tuple[str, int], Partition] = {}
        self.by_id: dict[Key, Partition] = {}
        self.on_damage: Callable[[PartitionLog, BaseException], None] | None = None
        self.serve: Serve | None = None
        """Makes the service of a partition that this node leads. Set before `start`."""
        self.metrics = NodeMetrics()
        self._config = config
        self._me = config.node_id
        self._disk = disk
        self._reserve = Reserve(disk, config.data_dir, config.storage.reserve_bytes)
        self._metadata = metadata
        self.disk_full = FullDisk(config, metadata, disk, spawn).found
        self._spawn = spawn
        self._fetchers: LeaderFetchers
        self._on_fatal: Callable[[BaseException], None]
        self._wall_ms: Callable[[], int]
        self.is_started = False
        self._active: dict[Partition, None] = {}
        self._to_open: dict[Key, None] = {}
        self._opening = False
        self.opened = asyncio.Event()
        """Set while every replica that belongs here is open."""
        self.opened.set()
        self._tick_timer: asyncio.TimerHandle | None = None
        self._proposals = IsrProposals(self._me, metadata, self)
        self._removals = Removals(self._me, metadata, disk, spawn)
        self._incarnation = 0
        self._end_reports = EndReporter(self._me, metadata, self.find, spawn)
        self._alive: dict[int, int] = {}  # node -> incarnation
        times = config.replication
        # A follower without news asks again when its last request was answered with nothing.
        self.liveness = FollowerLiveness(self._me, max(times.lag_ms, 3 * times.wait_ms) / 1000)
        self.cut_off = False
        """Whether the controller has received no heartbeat of this node for a whole lease.

        The node goes on leading as long as its followers fetch. But another node may lead by now,
        so no reader should wait here for news.
        """
        self._enabling: dict[int, asyncio.Lock] = {}

    def start(
        self,
        net: Net,
        wall_ms: Callable[[], int],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Open everything and take up the roles. The metadata knows this incarnation now."""
        self._wall_ms = wall_ms
        self._on_fatal = on_fatal
        self._incarnation = net.incarnation
        self._fetchers = LeaderFetchers(net, self._spawn, on_fatal)
        self.syncer.on_failure = self._not_synced
        self._removals.start(on_fatal)
        self._end_reports.incarnation = net.incarnation
        self._refresh_alive()
        remove_deleted(self._disk, self._config.data_dir, self._metadata.state, self._me)
        self.is_started = True
        for topic in list(self._metadata.state.topics.values()):
            self._reconcile_topic(topic)
        self._metadata.subscribe(self._changed)
        self._tick_timer = self.loop.call_later(TICK_S, self._tick)

    def stop(self, clean: bool = True) -> bool:
        """Close everything for good. Returns whether all of it is synced and safe."""
        if not self.is_started:
            return clean
        self.is_started = False
        self._to_open.clear()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        self._fetchers.stop()
        self._removals.stop()
        self._end_reports.stop()
        for partition in list(self.by_id.values()):
            try:
                partition.close(clean)
            except StorageError as error:
                logger.error("partition=%s not closed cleanly: %s", partition.ref, error)
                clean = False
        self.by_id.clear()
        self.by_name.clear()
        self._active.clear()
        return clean

    def set_cut_off(self, cut_off: bool) -> None:
        self.cut_off = cut_off
        if cut_off:
            for partition in self.by_id.values():
                partition.data.wake_readers()

    # Look-ups

    def of(self, topic: str, number: int) -> Partition:
        """Return the replica on this node. The error says where to look otherwise."""
        found = self.by_name.get((topic, number))
        if found is not None:
            return found
        known = self._known(topic)
        if not 0 <= number < len(known.partitions):
            raise UnknownPartition(
                f"topic {topic!r} has partitions 0 to {len(known.partitions) - 1}, not {number}"
            )
        # The partition exists, on another node or not opened here yet.
        state = known.partitions[number]
        raise NotLeader(f"node {self._me} holds no copy of {topic}/{number}").with_details(
            leader=state.leader if state.leader != self._me else None, epoch=state.epoch
        )

    def find(self, key: Key) -> Partition | None:
        return self.by_id.get(key)

    def __iter__(self) -> Iterator[Partition]:
        return iter(list(self.by_id.values()))

    def incarnation_of(self, node: int) -> int | None:
        """Return the incarnation of a node that is alive, else None."""
        return self._alive.get(node)

    # Queues

    async def enable_queues(self, topic: str) -> None:
        """Make the topic a queue. Returns when the replicas here have all their logs open."""
        known = self._known(topic)
        topic_id = known.topic_id
        if is_internal(topic):
            raise InvalidArgument(
                f"topic {topic!r} is internal to the cluster and cannot be a queue"
            )
        if not known.queued:
            # One proposal for all callers that find this out at the same time.
            async with self._enabling.setdefault(topic_id, asyncio.Lock()):
                try:
                    if not self._known(topic).queued:
                        await self._metadata.propose(EnableQueues(topic_id))
                finally:
                    self._enabling.pop(topic_id, None)
        if self._has_logs(topic_id):
            return
        # The decision may not have arrived here as a change yet.
        self._reconcile_topic(self._known(topic))
        await self.opened.wait()
        if not self._has_logs(topic_id):
            raise DiskFull(f"no room on the disk for the logs that make topic {topic!r} a queue")

    def _has_logs(self, topic_id: int) -> bool:
        """Report whether all replicas of the topic that belong here have all their logs open."""
        topic = self._metadata.state.topic_by_id(topic_id)
        if topic is None:
            raise UnknownTopic(f"there is no topic with the id {topic_id} any more")
        by_id = self.by_id
        return all(
            (partition := by_id.get((topic_id, number))) is not None and partition.is_queue
            for number, state in enumerate(topic.partitions)
            if self._me in state.replicas
        )

    def _known(self, topic: str) -> TopicState:
        known = self._metadata.state.topics.get(topic)
        if known is None:
            raise UnknownTopic(f"no topic {topic!r}")
        return known

    # Metadata

    def _refresh_alive(self) -> None:
        nodes = self._metadata.state.nodes
        self._alive = {node.node_id: node.incarnation for node in nodes.values() if node.alive}

    def _changed(self, changes: Sequence[Change]) -> None:
        if not self.is_started:
            return
        try:
            nodes_changed = any(isinstance(change, NodeChanged) for change in changes)
            if nodes_changed:
                self._refresh_alive()
            for change in changes:
                self._apply_change(change)
            if nodes_changed:
                now = self.loop.time()
                for partition in self.by_id.values():
                    if partition.replica.role == "leader" and self._tick_partition(partition, now):
                        self.mark_active(partition)
        except Exception as error:
            self._on_fatal(error)

    def _apply_change(self, change: Change) -> None:
        state = self._metadata.state
        if isinstance(change, TopicDeleted):
            self.metrics.forget_topic(change.name)
            for key in [key for key in self.by_id if key[0] == change.topic_id]:
                ref = self._close(key)
                logger.info("partition=%s deleted", ref)
                remove_replica(self._disk, ref.directory)
        elif isinstance(change, TopicChanged | PartitionChanged):
            topic = state.topic_by_id(change.topic_id)
            if topic is None:
                return
            if isinstance(change, TopicChanged):
                self._reconcile_topic(topic)
            else:
                self._reconcile(topic, change.partition)

    def _reconcile_topic(self, topic: TopicState) -> None:
        for number in range(len(topic.partitions)):
            partition = self.by_id.get((topic.topic_id, number))
            if partition is not None and partition.config != topic.config:
                partition.configure(topic.config)
            self._reconcile(topic, number)

    def _reconcile(self, topic: TopicState, number: int) -> None:
        """Make the replica on this node match the metadata."""
        state = topic.partitions[number]
        key = (topic.topic_id, number)
        partition = self.by_id.get(key)
        if self._me not in state.replicas:
            if partition is not None:
                self._close(key)
                self._removals.add(partition.ref)
            return
        if partition is not None:
            self._apply_decision(partition, topic, state)
        if partition is None or (topic.queued and not partition.is_queue):
            self._to_open[key] = None
            if not self._opening:
                self._opening = True
                self.opened.clear()
                self.loop.call_soon(self._open_some)

    def _open_some(self) -> None:
        """Open replicas for a moment, then yield to the loop: there may be thousands."""
        until = self.loop.time() + OPEN_S
        try:
            while self._to_open and self.is_started:
                self._open_next()
                if self._to_open and self.loop.time() >= until:
                    self.loop.call_later(0, self._open_some)
                    return
        except Exception as error:
            self._on_fatal(error)
            return
        self._opening = False
        self.opened.set()

    def _open_next(self) -> None:
        key = next(iter(self._to_open))
        del self._to_open[key]
        topic = self._metadata.state.topic_by_id(key[0])
        if topic is None or self._me not in topic.partitions[key[1]].replicas:
            return
        have = len(known.logs) if (known := self.by_id.get(key)) is not None else 0
        try:
            partition = self._open(topic, key[1])
        except DiskFull as error:
            logger.error("partition=%s/%d cannot be opened: %s", topic.name, key[1], error)
            self.loop.call_later(DISK_FULL_S, self._reconcile_again, key)
            return
        if have:
            self._follow(partition, partition.logs[have:])
        self._apply_decision(partition, topic, topic.partitions[key[1]])

    def _reconcile_again(self, key: Key) -> None:
        topic = self._metadata.state.topic_by_id(key[0])
        if topic is not None and self.is_started:
            self._reconcile(topic, key[1])

    def _apply_decision(
        self, partition: Partition, topic: TopicState, state: PartitionState
    ) -> None:
        before = partition.replica.decided
        decided = self._decided(topic, state)
        partition.decide(decided, self._me)
        if decided.epoch > before.epoch:
            self.metrics.elections += decided.leader == self._me
            self._follow(partition, partition.logs)
        elif decided.assignment_of(self._me) != before.assignment_of(self._me):
            # It was moved away and back: the leader does not know the new replica yet.
            self._follow(partition, partition.logs)
        self._begin_service(partition, topic)
        self._end_reports.check(partition, state)

    def _follow(self, partition: Partition, logs: Sequence[PartitionLog]) -> None:
        """Follow the leader of the partition, if that is another node."""
        leader = partition.replica.decided.leader
        for partition_log in logs:
            self._fetchers.follow(partition_log, leader if leader != self._me else None)

    def _begin_service(self, partition: Partition, topic: TopicState) -> None:
        """Start the service of a partition that this node leads; of a queue, once all logs are
        open."""
        if (
            self.serve is None
            or partition.leadership is not None
            or partition.replica.role != "leader"
        ):
            return
        if partition.is_queue if topic.queued else is_internal(topic.name):
            partition.leadership = leadership = PartitionLeadership(partition, self.loop)
            try:
                partition.service = self.serve(leadership)
            except Exception as error:
                self._on_fatal(error)

    def _decided(self, topic: TopicState, state: PartitionState) -> Decided:
        leader = state.leader
        if leader == self._me and self._alive.get(leader) != self._incarnation:
            leader = None  # another process with the id of this node leads
        return Decided(
            state.epoch,
            state.version,
            leader,
            state.replicas,
            state.isr,
            state.assignments,
            topic.isr_size_min(state),
            state.target is not None,
        )

    # Files

    def _open(self, topic: TopicState, number: int) -> Partition:
        """Open the replica, or the logs that it does not have yet."""
        partition = self.by_id.get((topic.topic_id, number))
        if partition is None:
            directory = directory_of(self._config.data_dir, topic.name, topic.topic_id)
            ref = PartitionRef(topic.name, topic.topic_id, number, f"{directory}/{number}")
            make_directory(self._disk, ref.directory)
        else:
            ref = partition.ref
        have = 0 if partition is None else len(partition.logs)
        numbers = range(have, len(NAMES) if topic.queued else 1)
        opened = open_logs(
            self._disk, ref, numbers, topic.config, self._config.storage, self._wall_ms()
        )
        if partition is None:
            partition = self._new_partition(topic, ref, *opened.pop(0))
        for log, producers in opened:
            partition.open_log(log, producers)
            self.syncer.add(log)
        if topic.queued:
            self._reserve.hold()
        for partition_log in partition.logs:
            partition_log.reserve = self._reserve
        return partition

    def _new_partition(
        self, topic: TopicState, ref: PartitionRef, log: Log, producers: Producers
    ) -> Partition:
        replica = Replica(
            self._me, self._config.replication.lag_ms / 1000, lambda node: node in self._alive
        )
        partition = Partition(ref, log, producers, replica, self)
        partition.configure(topic.config)
        self.by_id[topic.topic_id, ref.number] = partition
        self.by_name[topic.name, ref.number] = partition
        # Added before the other logs: within a round of syncs, the data is durable before the logs
        # that refer to it.
        self.syncer.add(log)
        return partition

    def _close(self, key: Key) -> PartitionRef:
        partition = self.by_id.pop(key)
        ref = partition.ref
        if self.by_name.get((ref.topic, ref.number)) is partition:
            del self.by_name[ref.topic, ref.number]
        self._active.pop(partition, None)
        for partition_log in partition.logs:
            self._fetchers.follow(partition_log, None)
        partition.close(clean=False)
        return ref

    # Calls from partitions

    def mark_active(self, partition: Partition) -> None:
        if not partition.closed:
            self._active[partition] = None

    def damaged(self, partition_log: PartitionLog, error: BaseException) -> None:
        if self.on_damage is not None:
            self.on_damage(partition_log, error)

    def failed(self, partition: Partition, error: BaseException) -> None:
        """End this node: a disk that fails to write or sync cannot be trusted with the rest
        either."""
        self._on_fatal(error)

    def resign(self, partition: Partition, reason: str) -> None:
        """Ask for another leader of a partition that cannot go on under this one."""
        self._spawn(self._proposals.resign(partition, reason))

    def _not_synced(self, log: Log, error: Exception) -> None:
        """Handle a failed sync; called from the syncer's thread. Perhaps nobody waits for this
        sync, and the node would go on leading with a log that accepts nothing."""
        self.loop.call_soon_threadsafe(self._fail_for, log, error)

    def _fail_for(self, log: Log, error: Exception) -> None:
        for partition in self.by_id.values():
            if any(partition_log.log is log for partition_log in partition.logs):
                self.failed(partition, error)

    # Time

    def _tick(self) -> None:
        if not self.is_started:
            return
        now = self.loop.time()
        try:
            self._check_liveness(now)
            for partition in list(self._active):
                if not self._tick_partition(partition, now):
                    del self._active[partition]
        except Exception as error:
            self._on_fatal(error)
            return
        self._tick_timer = self.loop.call_later(TICK_S, self._tick)

    def _check_liveness(self, now: float) -> None:
        """Mark partitions active whose followers have become unreachable, though nothing may wait
        for them."""
        if self.liveness.update(self._alive, now):
            for partition in self.by_id.values():
                if partition.replica.role == "leader" and self._has_unreachable_follower(partition):
                    self.mark_active(partition)

    def _has_unreachable_follower(self, partition: Partition) -> bool:
        return not self.liveness.unreachable.isdisjoint(partition.replica.followers)

    def _tick_partition(self, partition: Partition, now: float) -> bool:
        """Handle what time changes in a partition, and report whether it stays active."""
        waits = partition.expire(now)
        replica = partition.replica
        if replica.role != "leader":
            return waits
        if replica.should_resign(self._alive, now, self.liveness.unreachable):
            self.resign(partition, "no follower fetches here")
        elif (change := replica.next_change(self._alive, now)) is not None:
            self._spawn(self._proposals.change(partition, change))
        return waits or replica.is_behind() or self._has_unreachable_follower(partition)
