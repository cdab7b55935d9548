"""Reports where this node's copies end, for partitions whose recovery waits for it. (Shell.)

When no replica is known to have everything, a partition has no leader until its copies are compared
(cluster/metadata/recovery.py). Without a leader nothing is written, so a report stays true while
this process is a member. It is repeated as long as the state asks for it: only the state shows
whether a report counted.
"""

import logging
from collections.abc import Callable

from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep
from raftq.cluster.metadata.commands import TELLINGS_MAX, TellEnds
from raftq.cluster.metadata.log import MetadataLog
from raftq.cluster.metadata.state import PartitionState
from raftq.node.replication.follower import Spawn
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import NAMES, PartitionLog

logger = logging.getLogger(__name__)

RETRY_S = 0.2

Key = tuple[int, int]


class EndReporter:
    """Reports the ends of copies. `find` returns the copies that are open here."""

    def __init__(
        self,
        node_id: int,
        metadata: MetadataLog,
        find: Callable[[Key], Partition | None],
        spawn: Spawn,
    ) -> None:
        self._node_id = node_id
        self._metadata = metadata
        self._find = find
        self._spawn = spawn
        self._requested: dict[Key, None] = {}
        self._running = False
        self.incarnation = -1
        """The incarnation of this process. Nothing is reported before it is known."""

    def check(self, partition: Partition, state: PartitionState) -> None:
        """Report the ends of this partition if its `state`, which was just applied, asks for
        them."""
        if state.recovery is not None and self._node_id in state.recovery.waits_for:
            self._requested[partition.ref.topic_id, partition.ref.number] = None
            if not self._running:
                self._running = True
                self._spawn(self._report())

    def stop(self) -> None:
        self._requested.clear()

    async def _report(self) -> None:
        """Report until nothing more is requested, one command at a time, so that partitions share
        it."""
        try:
            while rows := self._rows():
                logger.warning(
                    "node=%d reports where its copies of %d partitions end",
                    self._node_id,
                    len(rows),
                )
                command = TellEnds(self._node_id, self.incarnation, tuple(rows[:TELLINGS_MAX]))
                try:
                    await self._metadata.propose(command)
                except RaftqError as error:
                    logger.info("node=%d report not accepted: %s", self._node_id, error)
                    await sleep(RETRY_S)
        finally:
            self._running = False

    def _rows(self) -> list[tuple[int, ...]]:
        """Return what is still requested, of logs that are open. Others are checked again when they
        open."""
        rows = []
        state = self._metadata.state
        for key in list(self._requested):
            row = None
            topic, partition = state.topic_by_id(key[0]), self._find(key)
            if topic is not None and partition is not None and key[1] < len(topic.partitions):
                wanted = len(NAMES) if topic.queued else 1
                row = self._row(key, topic.partitions[key[1]], partition, wanted)
            if row is None:
                del self._requested[key]
            else:
                rows.append(row)
        return rows

    def _row(
        self, key: Key, state: PartitionState, partition: Partition, logs: int
    ) -> tuple[int, ...] | None:
        recovery = state.recovery
        if recovery is None or self._node_id not in recovery.waits_for or partition.closed:
            return None
        if partition.replica.decided.version < recovery.since or len(partition.logs) < logs:
            return None
        assert partition.replica.role == "idle", partition.replica.describe()
        numbers = [*key, recovery.since]
        for partition_log in partition.logs:
            if partition_log.own_end < partition_log.log.end_offset:
                # Who has told may be in sync next: the same holds as for a subscription.
                partition_log.log.sync()
            numbers += ends_of(partition_log)
        return tuple(numbers)


def ends_of(partition_log: PartitionLog) -> tuple[int, int]:
    """Return the epoch of the last batch (0 without one) and the end offset."""
    return max(partition_log.log.last_epoch, 0), partition_log.log.end_offset
