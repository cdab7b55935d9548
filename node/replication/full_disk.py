"""A node with a full disk gives up every leadership that another node can take. (Shell.)

    room ──a log cannot be written──> full: drained ──there is plenty of room again──> room

The node drains itself as an operator would, so leaders move to nodes that can write, and come back
by themselves when there is room. What only this node can lead stays: it can be read and settled
there. A node that an operator has drained stays drained.
"""

import logging
from collections.abc import Callable

from raftq.client.common.disk import Disk
from raftq.client.common.errors import RaftqError, StorageError
from raftq.client.common.tasks import sleep
from raftq.cluster.metadata.commands import SetDraining
from raftq.cluster.metadata.log import MetadataLog
from raftq.node.config import NodeConfig
from raftq.node.replication.follower import Spawn
from raftq.node.storage.reserve import PLENTY

logger = logging.getLogger(__name__)

LOOK_S = 1.0


class FullDisk:
    """Drains this node while its disk is full. `found` is called for every write that found no
    room."""

    def __init__(self, config: NodeConfig, metadata: MetadataLog, disk: Disk, spawn: Spawn) -> None:
        self._node_id = config.node_id
        self._metadata = metadata
        self._disk = disk
        self._data_dir = config.data_dir
        self._room_bytes = PLENTY * config.storage.reserve_bytes
        self._spawn = spawn
        self.is_full = False

    def found(self) -> None:
        if not self.is_full:
            self.is_full = True
            self._spawn(self._hand_on())

    async def _hand_on(self) -> None:
        logger.warning("node=%d disk=full: other nodes take over its leaderships", self._node_id)
        drained = await self._set_draining(True, self._has_room)
        while not self._has_room():
            await sleep(LOOK_S)
            if not drained:
                drained = await self._set_draining(True, self._has_room)
        # From here on the disk may be found full again, which starts this over.
        self.is_full = False
        logger.info("node=%d disk=room: it may lead again", self._node_id)
        if drained:
            await self._set_draining(False, lambda: self.is_full)

    async def _set_draining(self, draining: bool, is_over: Callable[[], bool]) -> bool:
        """Set the flag, and report whether this changed it. Retries until it is decided, or
        `is_over`."""
        while not is_over():
            node = self._metadata.state.nodes.get(self._node_id)
            if node is None or node.draining == draining:
                return False
            try:
                await self._metadata.propose(SetDraining(self._node_id, draining, force=True))
            except RaftqError as error:
                logger.info("node=%d draining=%s waits: %s", self._node_id, draining, error)
                if not error.retriable:
                    return False
                await sleep(LOOK_S)
            else:
                return True
        return False

    def _has_room(self) -> bool:
        try:
            return self._disk.free_bytes(self._data_dir) > self._room_bytes
        except StorageError:
            return False
