"""Tells the metadata where this node's copies end, of partitions that wait for it. (Shell.)

A partition of which nobody is known to have everything has no leader until its copies were compared
(cluster/metadata/recovery.py). While nobody leads, nobody writes to them, so what is told stays
true for as long as this process is a member. It is told again for as long as the state asks for it:
whether a telling counted shows there, and nowhere else.
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
    """See the module's docstring. `find` gives the copies that are open here."""

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
        """Of this process; nothing is told before it is known."""

    def check(self, partition: Partition, state: PartitionState) -> None:
        """The partition has been told what the metadata says now, which is this."""
        if state.recovery is not None and self._node_id in state.recovery.waits_for:
            self._requested[partition.ref.topic_id, partition.ref.number] = None
            if not self._running:
                self._running = True
                self._spawn(self._report())

    def stop(self) -> None:
        self._requested.clear()

    async def _report(self) -> None:
        """Until nothing more is asked. One at a time, so that many partitions share a command."""
        try:
            while rows := self._rows():
                logger.warning(
                    "node=%d tells where its copies of %d partitions end", self._node_id, len(rows)
                )
                command = TellEnds(self._node_id, self.incarnation, tuple(rows[:TELLINGS_MAX]))
                try:
                    await self._metadata.propose(command)
                except RaftqError as error:
                    logger.info("node=%d telling ended: %s", self._node_id, error)
                    await sleep(RETRY_S)
        finally:
            self._running = False

    def _rows(self) -> list[tuple[int, ...]]:
        """What is still asked, of logs that are open; what is not will be looked at when it is."""
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
    """The epoch of its last batch, 0 if it has none, and its end offset."""
    return max(partition_log.log.last_epoch, 0), partition_log.log.end_offset
