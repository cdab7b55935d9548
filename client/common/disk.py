"""The only file access of the package: what storage asks of a disk, and the real one. (Shell.)

`Disk` and `File` are protocols because two implementations exist: `RealDisk` here and the simulated
disk of the tests. Operating-system errors become the errors of the package here and nowhere else:

    ENOSPC, EDQUOT   DiskFull            nothing of the refused append stays in the file
    EROFS, EACCES    DirectoryReadOnly   names the path
    anything else    StorageFailed       names the path and the errno text

A `File` belongs to one writer; `sync`, `write_behind` and `drop_cache` may run in another thread at
the same time, and a `close` that meets them lets them finish first.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from raftq.client.common.errors import (
    DirectoryLocked,
    DirectoryReadOnly,
    DiskFull,
    StorageError,
    StorageFailed,
)
from raftq.client.common.types import Buffer

_BUFFERS_PER_WRITE = 1024  # IOV_MAX of Linux
_LOCK_BYTES_MAX = 64
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # flags of sync_file_range


class FileClosed(StorageFailed):
    """A sync came after the file's owner had closed it: nothing was tried, so nothing failed."""

    code = "file_closed"


class File(Protocol):
    """One open file; `size` is its length in bytes as this object knows it."""

    size: int

    def append(self, buffers: Sequence[Buffer]) -> None:
        """Write the buffers at the end: all of them, or (DiskFull, StorageFailed) none."""

    def write_at(self, position: int, data: Buffer) -> None:
        """Overwrite in place: the slots of a checkpoint, and bytes that are damaged anyway."""

    def read(self, position: int, length: int) -> bytes:
        """Up to `length` bytes from `position`; fewer only at the end of the file."""

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Return when everything written so far is durable, or raise StorageFailed.

        FileClosed when the file is closed.
        """

    def write_behind(self, start: int, end: int) -> None:
        """Hint: start writing these bytes to the disk now; does not wait."""

    def drop_cache(self, start: int, end: int) -> None:
        """Hint: these bytes need not stay in memory; waits until they are on their way."""

    def close(self) -> None: ...


class Lock(Protocol):
    """The right of this process to a directory."""

    def release(self) -> None: ...


class Disk(Protocol):
    """Files by path. Opening or reading a file that is not there raises StorageFailed."""

    def open(self, path: str, create: bool = False) -> File: ...

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def list(self, directory: str) -> Sequence[str]:
        """Names in the directory, sorted."""

    def make_directory(self, path: str) -> None:
        """Create it and its parents, durably; it may exist."""

    def rename(self, source: str, target: str) -> None:
        """Replace `target` atomically; durable after `sync_directory`."""

    def remove(self, path: str) -> None: ...

    def remove_directory(self, path: str) -> None:
        """Remove it with everything in it, in any order and step by step; it may be missing."""

    def sync_directory(self, path: str) -> None: ...

    def free_bytes(self, directory: str) -> int: ...

    def lock(self, path: str) -> Lock:
        """Take the lock file for this process, or raise DirectoryLocked naming its owner."""

    def read_file(self, path: str, bytes_max: int) -> bytes:
        """The whole file; StorageFailed when it is larger than `bytes_max`."""

    def write_file_atomic(self, path: str, data: Buffer) -> None:
        """The file has the old or the new content after a crash, the new one after return."""


def storage_error(error: OSError, doing: str, path: str) -> StorageError:
    """The package's error for one of the operating system."""
    text = f"cannot {doing} {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(text)
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return DirectoryReadOnly(text)
    return StorageFailed(f"{text} (errno {error.errno})")


def _load_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function: Any = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None  # not Linux: write-behind is only a hint
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


_sync_file_range = _load_sync_file_range()


class RealFile:
    """A file descriptor with its path and length."""

    __slots__ = ("_closing", "_fd", "_guard", "_path", "_users", "size")

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._guard = threading.Lock()
        self._users = 0
        self._closing = False
        self.size = os.fstat(fd).st_size

    def append(self, buffers: Sequence[Buffer]) -> None:
        start = self.size
        total = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        try:
            if len(buffers) <= _BUFFERS_PER_WRITE:
                written = os.pwritev(self._fd, buffers, start)
            else:
                written = 0
            if written != total:
                self._append_rest(buffers, start, written)
        except OSError as error:
            self._undo_append(start)
            raise storage_error(error, "append to", self._path) from error
        self.size = start + total

    def _append_rest(self, buffers: Sequence[Buffer], start: int, written: int) -> None:
        """Go on after a short write: the next write either works or says what is wrong."""
        position = start
        for buffer in buffers:
            with memoryview(buffer) as view:
                skip = min(max(start + written - position, 0), len(view))
                position += skip
                while skip < len(view):
                    count = os.pwrite(self._fd, view[skip:], position)
                    if count == 0:
                        raise OSError(errno.ENOSPC, "nothing could be written")
                    skip += count
                    position += count

    def _undo_append(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            # The file now ends in unaccounted bytes: only recovery may go on from here.
            raise StorageFailed(f"cannot undo a failed append to {self._path}: {error}") from error

    def write_at(self, position: int, data: Buffer) -> None:
        try:
            if os.pwrite(self._fd, data, position) != len(data):
                raise OSError(errno.ENOSPC, "short write")
        except OSError as error:
            raise storage_error(error, "write to", self._path) from error
        self.size = max(self.size, position + len(data))

    def read(self, position: int, length: int) -> bytes:
        try:
            data = os.pread(self._fd, length, position)
            if len(data) == length or not data:
                return data
            # One call reads at most 2 GiB and may stop at a signal.
            parts = [data]
            done = len(data)
            while done < length and (data := os.pread(self._fd, length - done, position + done)):
                parts.append(data)
                done += len(data)
        except OSError as error:
            raise storage_error(error, "read", self._path) from error
        return b"".join(parts)

    def truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise storage_error(error, "truncate", self._path) from error
        self.size = size

    def sync(self) -> None:
        if not self._enter():
            raise FileClosed(f"cannot sync {self._path}: it is closed")
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            # Whatever the errno: the kernel may have dropped the pages it could not write.
            raise StorageFailed(f"cannot sync {self._path}: {error}") from error
        finally:
            self._leave()

    def write_behind(self, start: int, end: int) -> None:
        if _sync_file_range is not None and self._enter():
            try:
                _sync_file_range(self._fd, start, end - start, _WRITE)
            finally:
                self._leave()

    def drop_cache(self, start: int, end: int) -> None:
        if self._enter():
            try:
                if _sync_file_range is not None:
                    flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
                    _sync_file_range(self._fd, start, end - start, flags)
                os.posix_fadvise(self._fd, start, end - start, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                raise storage_error(error, "advise on", self._path) from error
            finally:
                self._leave()

    def close(self) -> None:
        with self._guard:
            if self._closing:
                return
            self._closing = True
            if self._users:
                return  # the last user closes it: a reused descriptor would sync another file
        os.close(self._fd)

    def _enter(self) -> bool:
        with self._guard:
            if self._closing:
                return False
            self._users += 1
            return True

    def _leave(self) -> None:
        with self._guard:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            os.close(self._fd)


class RealLock:
    """An flock: the kernel lets go of it when the process ends, however it ends."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _write_owner(fd: int) -> None:
    """Write the holder into the lock file. On a full disk that fails, and the lock holds anyway."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


class RealDisk:
    """The file system of this machine."""

    def open(self, path: str, create: bool = False) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            return RealFile(os.open(path, flags, 0o644), path)
        except OSError as error:
            raise storage_error(error, "open", path) from error

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def size(self, path: str) -> int:
        try:
            return os.stat(path).st_size
        except OSError as error:
            raise storage_error(error, "look at", path) from error

    def list(self, directory: str) -> Sequence[str]:
        try:
            return sorted(os.listdir(directory))
        except OSError as error:
            raise storage_error(error, "list", directory) from error

    def make_directory(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(os.path.abspath(path))
        self.make_directory(parent)
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise StorageFailed(f"cannot create {path}: a file has that name") from None
        except OSError as error:
            raise storage_error(error, "create", path) from error
        self.sync_directory(parent)

    def rename(self, source: str, target: str) -> None:
        try:
            os.replace(source, target)
        except OSError as error:
            raise storage_error(error, "rename", source) from error

    def remove(self, path: str) -> None:
        try:
            os.remove(path)
        except OSError as error:
            raise storage_error(error, "remove", path) from error

    def remove_directory(self, path: str) -> None:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, "remove", path) from error

    def sync_directory(self, path: str) -> None:
        try:
            fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageFailed(f"cannot sync directory {path}: {error}") from error

    def free_bytes(self, directory: str) -> int:
        try:
            stats = os.statvfs(directory)
        except OSError as error:
            raise storage_error(error, "look at", directory) from error
        return stats.f_bavail * stats.f_frsize

    def lock(self, path: str) -> Lock:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, "lock", path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_owner(fd)
        except BlockingIOError:
            owner = os.pread(fd, _LOCK_BYTES_MAX, 0).decode("ascii", "replace").strip()
            os.close(fd)
            who = "this process" if owner == str(os.getpid()) else f"process {owner or 'unknown'}"
            raise DirectoryLocked(f"{path} is held by {who}; close it there first") from None
        except OSError as error:
            os.close(fd)
            raise storage_error(error, "lock", path) from error
        return RealLock(fd)

    def read_file(self, path: str, bytes_max: int) -> bytes:
        file = self.open(path)
        try:
            if file.size > bytes_max:
                raise StorageFailed(f"{path} has {file.size} bytes, over the limit of {bytes_max}")
            return file.read(0, file.size)
        finally:
            file.close()

    def write_file_atomic(self, path: str, data: Buffer) -> None:
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
