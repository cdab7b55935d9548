"""The last batches of a log, kept in memory for followers that keep up. (Core.)

A leader has just received what its followers want, so it hands on the same buffers and saves a read
per follower. Batches that every follower was handed are dropped at once. The rest is bounded, so a
follower that lags reads from the file like any other reader.
"""

from collections import deque

from raftq.client.common.types import Buffer


class RecentBatches:
    """Contiguous batches by base offset, oldest first."""

    __slots__ = ("_batches", "_by_base", "_bytes", "_bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._batches: deque[int] = deque()  # base offsets
        self._by_base: dict[int, tuple[int, Buffer]] = {}  # base -> (end, bytes)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def put(self, base: int, end: int, batch: Buffer) -> None:
        self._batches.append(base)
        self._by_base[base] = (end, batch)
        self._bytes += len(batch)
        while self._bytes > self._bytes_max:
            self._drop()

    def take(self, offset: int, bytes_max: int) -> tuple[list[Buffer], int, int] | None:
        """Return batches from `offset` on, at least one, with their size and end; None when not
        here."""
        found = self._by_base.get(offset)
        if found is None:
            return None
        buffers: list[Buffer] = []
        size = 0
        while found is not None and (not buffers or size + len(found[1]) <= bytes_max):
            offset, batch = found
            buffers.append(batch)
            size += len(batch)
            found = self._by_base.get(offset)
        return buffers, size, offset

    def release(self, offset: int) -> None:
        """Drop what every follower was handed: everything below this offset."""
        while self._batches and self._batches[0] < offset:
            self._drop()

    def clear(self) -> None:
        self._batches.clear()
        self._by_base.clear()
        self._bytes = 0

    def _drop(self) -> None:
        _, batch = self._by_base.pop(self._batches.popleft())
        self._bytes -= len(batch)
