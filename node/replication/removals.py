"""Removes the files of replicas that were moved away, once that is confirmed. (Shell.)

The metadata that a node has may be old: a node that was moved away may be a replica again by now,
and then its copy is worth keeping. So the files are removed only after the metadata has accepted a
command that was proposed since, and still says so. Until then they are closed and have no meaning.
A node removes what an earlier stop has left of them when it starts again.
"""

import logging
from collections.abc import Callable

from raftq.client.common.disk import Disk
from raftq.client.common.errors import RaftqError, StorageError
from raftq.client.common.tasks import sleep
from raftq.cluster.metadata.commands import Confirm
from raftq.cluster.metadata.log import MetadataLog
from raftq.node.replication.follower import Spawn
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.replication.replica_files import remove_replica

logger = logging.getLogger(__name__)

RETRY_S = 0.2


class Removals:
    """Removes files of closed replicas. `spawn` gives its task to its owner."""

    def __init__(self, me: int, metadata: MetadataLog, disk: Disk, spawn: Spawn) -> None:
        self._me = me
        self._metadata = metadata
        self._disk = disk
        self._spawn = spawn
        self._on_fatal: Callable[[BaseException], None]
        self._waiting: dict[PartitionRef, None] = {}
        self._running = False
        self._stopped = False

    def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        self._on_fatal = on_fatal

    def stop(self) -> None:
        self._stopped = True

    def add(self, ref: PartitionRef) -> None:
        """Remove this closed replica, once it is confirmed that the node is no replica any more."""
        self._waiting[ref] = None
        if not self._running:
            self._running = True
            self._spawn(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting and not self._stopped:
                refs = list(self._waiting)
                try:
                    await self._metadata.propose(Confirm())
                except RaftqError as error:
                    logger.info("removals=%d not confirmed yet: %s", len(refs), error)
                    await sleep(RETRY_S)
                    continue
                self._remove(refs)
        finally:
            self._running = False

    def _remove(self, refs: list[PartitionRef]) -> None:
        for ref in refs:
            del self._waiting[ref]
            if self._stopped or self._is_wanted(ref):
                continue
            logger.info("partition=%s removed", ref)
            try:
                remove_replica(self._disk, ref.directory)
            except StorageError as error:
                self._on_fatal(error)
                return

    def _is_wanted(self, ref: PartitionRef) -> bool:
        """Report whether this node is a replica of the partition again."""
        topic = self._metadata.state.topic_by_id(ref.topic_id)
        return topic is not None and self._me in topic.partitions[ref.number].replicas
