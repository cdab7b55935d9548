"""Space that is reserved on a disk, so that workers can settle when it is full. (Shell.)

A settlement takes a few bytes of a ledger, and without it records are processed again. So a node
that has queues keeps a file of `size` bytes and removes it when a ledger finds the disk full. From
then on nothing else is written, until there is plenty of room and the file is back.
"""

import logging

from raftq.client.common.disk import Disk
from raftq.client.common.errors import DiskFull

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
BLOCK_BYTES = 64 * 1024
PLENTY = 4
"""How many times the size must be free before the space is reserved again."""


class Reserve:
    """The reserved file. `is_used` while its space is given to the ledgers."""

    __slots__ = ("_disk", "_looked_at", "_path", "_size", "is_held", "is_used")

    def __init__(self, disk: Disk, directory: str, size: int) -> None:
        self._disk = disk
        self._path = f"{directory}/reserve"
        self._size = size
        self._looked_at = 0.0
        self.is_held = False
        self.is_used = False

    def hold(self) -> None:
        """Reserve the space, if there is room and it is not reserved yet."""
        if not self.is_held and not self.is_used and self._size:
            self._make()

    def give_up(self) -> bool:
        """Free the space. Returns False when nothing is left to free."""
        if not self.is_held:
            return False
        self._disk.remove(self._path)
        self.is_held, self.is_used = False, True
        logger.warning("event=reserve_used reason=disk_full bytes=%d", self._size)
        return True

    def check(self, now: float) -> None:
        """Raise DiskFull while the rest of the space is for the ledgers alone."""
        if not self.is_used:
            return
        if now - self._looked_at >= AGAIN_S:
            self._looked_at = now
            self._make()
        if self.is_used:
            raise DiskFull("no space left on the node's disk: what is there may be read and acked")

    def _make(self) -> None:
        directory = self._path.rpartition("/")[0]
        if self._disk.free_bytes(directory) < PLENTY * self._size:
            return
        file = self._disk.open(self._path, create=True)
        try:
            file.truncate(0)
            block = bytes(min(self._size, BLOCK_BYTES))
            for start in range(0, self._size, len(block)):
                file.append([block[: self._size - start]])
        except DiskFull as error:
            logger.info("event=reserve_waits error=%s", error)
            file.truncate(0)  # a part of the file only takes room
            return
        finally:
            file.close()
        self.is_held, self.is_used = True, False
