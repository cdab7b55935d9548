"""Shell: a disk that fails on demand: the real one, disturbed. For fault injection only.

    slow_sync_s   every sync of a file or directory takes that much longer
    fail_writes   appends, overwrites and truncations end with EIO and change nothing
    fail_syncs    syncs end with EIO; what they should have written is not durable
    full          operations that need more space than was freed since end with ENOSPC

It also notes what is not durable yet, so that a power cut can be simulated (`power_cut`). Only
nodes that `raftq.chaos.harness` starts use it.
"""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from raftq.chaos.harness.power_cut import Name, Unsynced
from raftq.client.common.disk import File, RealDisk, storage_error
from raftq.client.common.errors import StorageFailed
from raftq.client.common.types import Buffer


class Disturbed(Protocol):
    """The disturbances at this moment."""

    @property
    def slow_sync_s(self) -> float: ...
    @property
    def fail_writes(self) -> bool: ...
    @property
    def fail_syncs(self) -> bool: ...
    @property
    def full(self) -> bool: ...


class FaultyDisk(RealDisk):
    """A Disk. It calls `disturbed` before every operation."""

    def __init__(self, disturbed: Callable[[], Disturbed], unsynced: Unsynced) -> None:
        self.disturbed = disturbed
        self.unsynced = unsynced
        self._room_lock = threading.Lock()
        self._room: int | None = None
        """Bytes that were freed since the disk became full; None while it is not full."""
        self._pause = threading.Event()

    def open(self, path: str, create: bool = False) -> File:
        if create and not os.path.exists(path):
            self.check_write("create", path)
            self.unsynced.creates(path)
        return FaultyFile(self, super().open(path, create), self.unsynced.name(path))

    def rename(self, source: str, target: str) -> None:
        freed = self._size(target)
        self.unsynced.renames(source, target)
        super().rename(source, target)
        self.free(freed)

    def remove(self, path: str) -> None:
        freed = self._size(path)
        self.unsynced.removes(path)
        super().remove(path)
        self.free(freed)

    def remove_directory(self, path: str) -> None:
        freed = sum(
            self._size(os.path.join(folder, name))
            for folder, _, names in os.walk(path)
            for name in names
        )
        self.unsynced.forgets(path)
        super().remove_directory(path)
        self.free(freed)

    def sync_directory(self, path: str) -> None:
        numbers = self.unsynced.directory_sync_begins(path)
        self.before_sync(path)
        super().sync_directory(path)
        self.unsynced.durable(numbers)

    def free_bytes(self, directory: str) -> int:
        free = super().free_bytes(directory)
        with self._room_lock:
            room = self._look()
            return free if room is None else min(room, free)

    # Disturbances.

    def check_write(self, doing: str, path: str) -> None:
        if self.disturbed().fail_writes:
            raise storage_error(_error(errno.EIO), doing, path)

    def take(self, count: int, doing: str, path: str) -> None:
        """Takes this many bytes of the free space."""
        with self._room_lock:
            room = self._look()
            if room is None:
                return
            if count > room:
                raise storage_error(_error(errno.ENOSPC), doing, path)
            self._room = room - count

    def free(self, count: int) -> None:
        with self._room_lock:
            room = self._look()
            if room is not None:
                self._room = room + count

    def before_sync(self, path: str) -> None:
        now = self.disturbed()
        if now.slow_sync_s > 0:
            self._pause.wait(now.slow_sync_s)
        if self.disturbed().fail_syncs:
            raise StorageFailed(f"cannot sync {path}: {_error(errno.EIO)}")

    def _look(self) -> int | None:
        if not self.disturbed().full:
            self._room = None
        elif self._room is None:
            self._room = 0
        return self._room

    def _size(self, path: str) -> int:
        try:
            return os.path.getsize(path)
        except OSError:
            return 0  # a missing file frees nothing, and the operation itself raises


class FaultyFile:
    """A File over a real one."""

    __slots__ = ("_disk", "_file", "_name")

    def __init__(self, disk: FaultyDisk, file: File, name: Name) -> None:
        self._disk = disk
        self._file = file
        self._name = name

    @property
    def size(self) -> int:
        return self._file.size

    @size.setter
    def size(self, size: int) -> None:
        self._file.size = size

    def append(self, buffers: Sequence[Buffer]) -> None:
        path, disk = self._name.path, self._disk
        disk.check_write("append to", path)
        disk.take(sum(map(len, buffers)), "append to", path)
        size = self._file.size
        disk.unsynced.appends(self._name, size)
        self._file.append(buffers)
        # A sync may have begun meanwhile; then it need not cover this change.
        disk.unsynced.appends(self._name, size)

    def write_at(self, position: int, data: Buffer) -> None:
        path, disk, size = self._name.path, self._disk, self._file.size
        disk.check_write("write to", path)
        disk.take(max(0, position + len(data) - size), "write to", path)
        if position + len(data) > size:
            disk.unsynced.appends(self._name, size)
        disk.unsynced.overwrites(self._name, position, self._file.read(position, len(data)))
        self._file.write_at(position, data)

    def read(self, position: int, length: int) -> bytes:
        return self._file.read(position, length)

    def truncate(self, size: int) -> None:
        path, disk, before = self._name.path, self._disk, self._file.size
        disk.check_write("truncate", path)
        if size < before:
            cut = self._file.read(size, before - size)
            disk.unsynced.truncates(self._name, size, cut)
        elif size > before:
            disk.unsynced.appends(self._name, before)
        self._file.truncate(size)
        disk.free(max(0, before - size))

    def sync(self) -> None:
        numbers = self._disk.unsynced.sync_begins(self._name)
        self._disk.before_sync(self._name.path)
        self._file.sync()
        self._disk.unsynced.durable(numbers)

    def write_behind(self, start: int, end: int) -> None:
        self._file.write_behind(start, end)

    def drop_cache(self, start: int, end: int) -> None:
        self._file.drop_cache(start, end)

    def close(self) -> None:
        self._file.close()


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
