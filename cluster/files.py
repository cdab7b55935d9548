"""File access of consensus: what it asks of a disk, and the file system of this machine. (Shell.)

A part of what a node's storage asks of its disk, so that disk serves here as well; this package
stands below the node's and cannot import it. `Disk` and `File` are protocols because tests bring a
simulated disk. Nothing is mapped into memory: a full disk is an error of a write, not a signal.
"""

import errno
import fcntl
import os
from collections.abc import Sequence
from typing import Protocol

from raftq.client.wire.errors import (
    DirectoryLocked,
    DirectoryReadOnly,
    DiskFull,
    StorageError,
    StorageFailed,
)

Buffer = bytes | bytearray | memoryview


class File(Protocol):
    size: int

    def append(self, buffers: Sequence[Buffer]) -> None:
        """Write the buffers at the end: all of them, or (DiskFull, StorageFailed) none."""

    def write_at(self, position: int, data: Buffer) -> None: ...

    def read(self, position: int, length: int) -> bytes: ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Lock(Protocol):
    def release(self) -> None: ...


class Disk(Protocol):
    def open(self, path: str, create: bool = False) -> File: ...

    def exists(self, path: str) -> bool: ...

    def make_directory(self, path: str) -> None: ...

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def lock(self, path: str) -> Lock: ...

    def write_file_atomic(self, path: str, data: Buffer) -> None: ...


def _error(error: OSError, doing: str, path: str) -> StorageError:
    text = f"cannot {doing} {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(text)
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return DirectoryReadOnly(text)
    return StorageFailed(f"{text} (errno {error.errno})")


class LocalFile:
    """One open file; used by one thread."""

    __slots__ = ("_fd", "_path", "size")

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self.size = os.fstat(fd).st_size

    def append(self, buffers: Sequence[Buffer]) -> None:
        data = memoryview(buffers[0] if len(buffers) == 1 else b"".join(buffers))
        start = self.size
        done = 0
        try:
            while done < len(data):
                count = os.pwrite(self._fd, data[done:], start + done)
                if count == 0:
                    raise OSError(errno.ENOSPC, "nothing could be written")
                done += count
        except OSError as error:
            self._undo(start)
            raise _error(error, "append to", self._path) from error
        self.size = start + len(data)

    def _undo(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise StorageFailed(f"cannot undo a failed append to {self._path}: {error}") from error

    def write_at(self, position: int, data: Buffer) -> None:
        try:
            if os.pwrite(self._fd, data, position) != len(data):
                raise OSError(errno.ENOSPC, "short write")
        except OSError as error:
            raise _error(error, "write to", self._path) from error
        self.size = max(self.size, position + len(data))

    def read(self, position: int, length: int) -> bytes:
        parts = []
        try:
            while length > 0 and (data := os.pread(self._fd, length, position)):
                parts.append(data)
                position += len(data)
                length -= len(data)
        except OSError as error:
            raise _error(error, "read", self._path) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise _error(error, "truncate", self._path) from error
        self.size = size

    def sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            # Whatever the errno: the kernel may have dropped the pages it could not write.
            raise StorageFailed(f"cannot sync {self._path}: {error}") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalLock:
    """An flock: the kernel lets go of it when the process ends, however it ends."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalDisk:
    """The file system of this machine."""

    def open(self, path: str, create: bool = False) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            return LocalFile(os.open(path, flags, 0o600), path)
        except OSError as error:
            raise _error(error, "open", path) from error

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def make_directory(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        self.make_directory(parent)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise StorageFailed(f"cannot create {path}: a file has that name") from None
        except OSError as error:
            raise _error(error, "create", path) from error
        self.sync_directory(parent)

    def rename(self, source: str, target: str) -> None:
        try:
            os.replace(source, target)
        except OSError as error:
            raise _error(error, "rename", source) from error

    def remove(self, path: str) -> None:
        try:
            os.remove(path)
        except OSError as error:
            raise _error(error, "remove", path) from error

    def sync_directory(self, path: str) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageFailed(f"cannot sync directory {path}: {error}") from error

    def lock(self, path: str) -> Lock:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _error(error, "lock", path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise DirectoryLocked(f"{path} is held by another consensus node") from None
            raise _error(error, "lock", path) from error
        return LocalLock(fd)

    def write_file_atomic(self, path: str, data: Buffer) -> None:
        """The file has the old or the new content after a crash, the new one after return."""
        temporary = path + ".tmp"
        file = self.open(temporary, create=True)
        try:
            try:
                file.truncate(0)
                file.append([data])
                file.sync()
            finally:
                file.close()
        except StorageError:
            self.remove(temporary)  # a full disk gets its bytes back
            raise
        self.rename(temporary, path)
        self.sync_directory(os.path.dirname(path))
