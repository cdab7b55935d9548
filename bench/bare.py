"""Shell: the baselines of the disk figures: bare system calls on files that are treated as the
log's.

The files roll at the same size, the kernel is asked to write behind in the same steps, and pages
leave the cache at the same distance. So the comparison shows the work of the engine, not two ways
to use memory. Nothing is checksummed, indexed or recoverable.
"""

import os
from collections import deque
from pathlib import Path

from raftq.client.common.disk import File, RealDisk
from raftq.node.storage.config import LogConfig

KEEP_BYTES = 512 * 1024 * 1024
"""Files beyond this are deleted between slices, for the engine and the baseline alike."""


class BareFiles:
    """Appends by os.writev into rolling files."""

    def __init__(self, directory: Path, sync_when_full: bool = False) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._sync_when_full = sync_when_full
        self._config = LogConfig()
        self._disk = RealDisk()
        self._number = 0
        self._size = 0
        self._due_at = self._config.write_behind_bytes
        self._cached: deque[tuple[int, File, int, int]] = deque()
        self._cached_bytes = 0
        self._files: deque[tuple[Path, int, File]] = deque()
        self._start_file()

    def append(self, data: bytes | bytearray) -> None:
        size = self._size + len(data)
        if size > self._config.segment_bytes:
            self._roll()
            size = len(data)
        written = os.writev(self._fd, (data,))
        assert written == len(data), "short write"
        self._size = size
        if size >= self._due_at:
            self._write_behind()

    def rest(self) -> None:
        """Writes everything to the disk before the next side starts; deletes old files."""
        for _, fd, _ in self._files:
            os.fdatasync(fd)
        keep = KEEP_BYTES // self._config.segment_bytes
        while len(self._files) > keep:
            path, fd, hints = self._files.popleft()
            while self._cached and self._cached[0][0] == fd:
                _, _, start, end = self._cached.popleft()
                self._cached_bytes -= end - start
            os.close(fd)
            hints.close()
            path.unlink()

    def close(self) -> None:
        for _, fd, hints in self._files:
            os.close(fd)
            hints.close()
        self._files.clear()

    def _start_file(self) -> None:
        path = self._directory / f"{self._number:06}.bare"
        self._number += 1
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
        self._hints = self._disk.open(str(path))
        self._files.append((path, self._fd, self._hints))
        self._size = self._from = 0
        self._due_at = self._config.write_behind_bytes

    def _roll(self) -> None:
        if self._sync_when_full:
            os.fdatasync(self._fd)
        self._remember()
        self._start_file()

    def _write_behind(self) -> None:
        self._hints.write_behind(self._from, self._size)
        self._remember()
        self._due_at = self._size + self._config.write_behind_bytes

    def _remember(self) -> None:
        bound = self._config.page_cache_bytes
        assert bound is not None
        if self._size > self._from:
            self._cached.append((self._fd, self._hints, self._from, self._size))
            self._cached_bytes += self._size - self._from
            self._from = self._size
        while self._cached_bytes > bound:
            _, hints, start, end = self._cached.popleft()
            self._cached_bytes -= end - start
            hints.drop_cache(start, end)


def read_all(paths: list[Path], chunk_bytes: int) -> int:
    """Reads files from end to end; returns the bytes read."""
    seen = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            while data := os.read(fd, chunk_bytes):
                seen += len(data)
        finally:
            os.close(fd)
    return seen
