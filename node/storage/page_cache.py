"""Keeps the pages of a log's tail moving to the disk and out of memory. (Shell.)

Every `write_behind_bytes` the kernel is asked to start writing that stretch, so a later sync finds
little to do. Once more than `page_cache_bytes` lie behind the head, the oldest stretch is given
back. A reader further behind than that gives its pages back as it goes. These are only hints: they
affect speed and nothing else. Without `page_cache_bytes` nothing is done.
"""

from collections import deque

from raftq.node.storage.config import LogConfig
from raftq.node.storage.segment import Segment, Segments

_NEVER = 1 << 62


class PageCache:
    """Stretches of the log that were written and are still in memory."""

    __slots__ = (
        "_bytes",
        "_bytes_max",
        "_from",
        "_read_from",
        "_read_segment",
        "_read_to",
        "_segments",
        "_step",
        "_stretches",
        "due_at",
    )

    def __init__(self, config: LogConfig, segments: Segments) -> None:
        self._segments = segments
        self._step = config.write_behind_bytes
        self._bytes_max = config.page_cache_bytes
        self._stretches: deque[tuple[Segment, int, int]] = deque()
        self._bytes = 0
        self._from = 0
        self._read_segment: Segment | None = None
        self._read_from = self._read_to = 0
        self.due_at = _NEVER
        """Position in the active segment from which `advance` should be called."""

    def start_at(self, position: int) -> None:
        """Follow the active segment from here on."""
        if self._bytes_max is not None:
            self._from = position
            self.due_at = position + self._step

    def advance(self, position: int) -> None:
        """Note that the active segment ends at `position` now."""
        segment = self._segments.active
        self._segments.file_of(segment).write_behind(self._from, position)
        self._add(segment, position)
        self.due_at = position + self._step

    def seal(self, position: int) -> None:
        """Note that the active segment ended at `position` and is synced."""
        if self._bytes_max is not None:
            self._add(self._segments.items[-2], position)

    def note_read(self, segment: Segment, position: int, length: int) -> None:
        """Give back pages that a reader far behind the head has passed.

        Without this, reading a long backlog fills all memory with pages that are not needed again.
        """
        if self._bytes_max is None or not self._is_cold(segment):
            return
        if segment is not self._read_segment:
            self._drop_read(self._read_to)
            self._read_segment, self._read_from = segment, position
        elif position - self._read_from >= self._step:
            self._drop_read(position)
        self._read_to = position + length

    def _is_cold(self, segment: Segment) -> bool:
        if segment is self._segments.active:
            return False
        return not self._stretches or segment.base_offset < self._stretches[0][0].base_offset

    def _drop_read(self, position: int) -> None:
        segment = self._read_segment
        if segment is not None and not segment.removed and position > self._read_from:
            self._segments.file_of(segment).drop_cache(self._read_from, position)
        self._read_from = position

    def _add(self, segment: Segment, position: int) -> None:
        assert self._bytes_max is not None
        if position <= self._from:
            return
        self._stretches.append((segment, self._from, position))
        self._bytes += position - self._from
        self._from = position
        while self._bytes > self._bytes_max and self._stretches:
            oldest, start, end = self._stretches.popleft()
            self._bytes -= end - start
            if not oldest.removed:
                self._segments.file_of(oldest).drop_cache(start, end)
