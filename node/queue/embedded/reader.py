"""Shell: turns leased ranges of the data log into messages.

Consumers read forward, so each lane keeps the chunk of raw batches it is in and the batch it is
decoding: a batch of 1,000 messages that is dequeued one by one is decoded once. Memory is bounded
by one chunk and one decoded batch per lane.
"""

import bisect
from collections.abc import Sequence
from itertools import repeat

from raftq.client.common.errors import CorruptBatch
from raftq.client.wire.batch import (
    FLAG_DELAY_OFFSETS,
    FLAG_HEADERS,
    FLAG_KEYS,
    HEADER_BYTES,
    Batch,
    decode,
)
from raftq.client.wire.headers import BOUNDS
from raftq.client.wire.record import Headers
from raftq.node.queue.embedded.message import Held, Message
from raftq.node.storage.log import Log

CHUNK_BYTES = 256 * 1024


class BatchColumns:
    """One decoded batch; columns that the batch does not have are None."""

    __slots__ = ("base", "delay_offsets", "end", "expiries", "headers", "keys", "offsets",
                 "timestamps", "values")  # fmt: skip

    def __init__(self, batch: Batch) -> None:
        flags = batch.flags
        self.base: int = batch.base_offset
        self.end: int = batch.end_offset
        self.offsets: Sequence[int] = batch.offsets()
        self.values = batch.values()
        self.keys = batch.keys() if flags & FLAG_KEYS else None
        self.headers = batch.headers() if flags & FLAG_HEADERS else None
        self.timestamps = batch.timestamps()
        self.expiries = batch.expiries()
        self.delay_offsets = batch.delay_offsets() if flags & FLAG_DELAY_OFFSETS else None

    def messages(self, start: int, end: int, held: Held) -> list[Message]:
        """The messages of [start, end); offsets that compaction removed are left out."""
        offsets = self.offsets
        if isinstance(offsets, range):
            a, b = start - self.base, end - self.base
        else:
            a, b = bisect.bisect_left(offsets, start), bisect.bisect_left(offsets, end)
        keys: Sequence[bytes | None] | repeat[None]
        headers: Sequence[Headers] | repeat[None]
        keys = repeat(None) if self.keys is None else self.keys[a:b]
        headers = repeat(None) if self.headers is None else self.headers[a:b]
        expiries = repeat(0) if self.expiries is None else self.expiries[a:b]
        delays = repeat(-1) if self.delay_offsets is None else self.delay_offsets[a:b]
        return list(
            map(
                Message,
                offsets[a:b],
                self.values[a:b],
                keys,
                headers,
                self.timestamps[a:b],
                expiries,
                delays,
                repeat(held),
            )
        )


class LaneReader:
    """Reads one log forward, for consumers of one lane."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._columns: BatchColumns | None = None
        self._chunk = b""
        self._position = 0
        self._next_offset = -1
        self.has_expiries = False
        """Whether any message of the last read can expire."""

    def read(self, start: int, end: int, held: Held) -> list[Message]:
        """Messages of [start, end) that can be read; the log knows of the others afterwards."""
        columns = self._columns
        if columns is not None and columns.base <= start and end <= columns.end:
            self.has_expiries = columns.expiries is not None
            return columns.messages(start, end, held)
        messages: list[Message] = []
        self.has_expiries = False
        while start < end:
            try:
                columns = self._columns_at(start)
            except CorruptBatch:
                start = max(self._log.next_readable(start), start + 1)
                continue
            stop = min(end, columns.end)
            messages += columns.messages(start, stop, held)
            self.has_expiries = self.has_expiries or columns.expiries is not None
            start = stop
        return messages

    def forget(self) -> None:
        """Drop what was read: the log was cut or rewritten."""
        self._columns = None
        self._chunk, self._position, self._next_offset = b"", 0, -1

    def _columns_at(self, offset: int) -> BatchColumns:
        columns = self._columns
        if columns is not None and columns.base <= offset < columns.end:
            return columns
        try:
            batch = self._next_batch(offset)
        except CorruptBatch:
            # Bad bytes, here or on the way here: the log finds out where, and remembers it.
            self.forget()
            batch = self._log.batch_at(offset)
        self._columns = columns = BatchColumns(batch)
        self._position = batch.position + batch.length
        self._next_offset = columns.end
        return columns

    def _next_batch(self, offset: int) -> Batch:
        """From the chunk in hand when the batch is further on in it, else from the log."""
        if 0 <= self._next_offset <= offset:
            position = self._position
            while position + HEADER_BYTES <= len(self._chunk):
                _, _, length, base, _, span = BOUNDS.unpack_from(self._chunk, position)
                if base + span > offset or length < HEADER_BYTES:
                    return _holding(decode(self._chunk, position), offset)
                position += length
        self._next_offset = -1
        self._chunk = self._log.read(offset, CHUNK_BYTES)
        return _holding(decode(self._chunk, 0), offset)


def _holding(batch: Batch, offset: int) -> Batch:
    """The batch, if it is the one with the offset: what was passed over was not checked."""
    if not batch.base_offset <= offset < batch.end_offset:
        raise CorruptBatch(f"{batch.describe()} stands where offset {offset} is due")
    return batch
