"""Pure: rows of a task as record batches that can be sent twice and are appended once.

    rows ──> by (topic, partition, lane, delayed) ──> cut ──> identity ──> batch

A node remembers a batch by its producer id, epoch and sequence. Here every batch has its own
producer id, made from its position and its content:

    the write (query and micro-batch, or the batch write's id), the task, the partition,
    the number of the batch among those of its destination, and its content

and sequence 0. A task that runs again over the same rows in the same order makes the same batches,
which the nodes recognise and do not append again. If the rows or their order are different, the ids
are different, too: then records may come twice, but no record is ever mistaken for another and left
out.

Where to cut depends on the rows alone, not on how they arrive or how fast they are sent.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import mmh3
import pyarrow as pa

from raftq.client.common.errors import InvalidArgument
from raftq.client.common.types import PartitionKey
from raftq.client.producer.accumulator import partition_of
from raftq.client.wire.arrow_encoder import ArrowColumns, content, encode_columns, ends_of
from raftq.client.wire.layout import LANE_NORMAL, BatchProducer

OURS = 1 << 62  # set in ids made here, so that a node never gives out the same


class Destination(NamedTuple):
    """Where rows go; a partition of None is chosen batch by batch."""

    topic: str
    partition: int | None
    lane: int = LANE_NORMAL
    delayed: bool = False


@dataclass(slots=True)
class _Pending:
    """Rows of one destination that are not sent yet, in pieces, and the number of sent batches."""

    pieces: list[Any] = field(default_factory=list)
    rows: int = 0
    size: int = 0
    sent: int = 0


class Cutter:
    """Collects rows until a batch is full."""

    def __init__(self, rows_max: int, bytes_max: int) -> None:
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._pending: dict[Destination, _Pending] = {}
        self.size = 0

    def add(self, to: Destination, rows: Any) -> Iterator[tuple[Destination, int, Any]]:
        """Adds rows (a RecordBatch with a column `value`). Returns the full batches, each with
        its number and its rows."""
        pending = self._pending.setdefault(to, _Pending())
        pending.pieces.append(rows)
        pending.rows += len(rows)
        size = _value_bytes(rows)
        pending.size += size
        self.size += size
        if pending.rows >= self._rows_max or pending.size >= self._bytes_max:
            yield from self._cut(to, pending)

    def finish(self) -> Iterator[tuple[Destination, int, Any]]:
        """Returns what is left, however little."""
        for to, pending in self._pending.items():
            if pending.rows:
                yield to, pending.sent, _joined(pending.pieces)
                pending.sent += 1
                self.size -= pending.size
                pending.pieces, pending.rows, pending.size = [], 0, 0

    def _cut(self, to: Destination, pending: _Pending) -> Iterator[tuple[Destination, int, Any]]:
        rows = _joined(pending.pieces)
        ends = ends_of(rows.column("value"))
        at, count = 0, len(rows)
        while at < count:
            by_bytes = bisect_right(ends, ends[at] + self._bytes_max, at + 1) - 1
            stop = min(max(by_bytes, at + 1), at + self._rows_max)
            if stop >= count and count - at < self._rows_max:
                break  # it may still grow
            yield to, pending.sent, rows.slice(at, stop - at)
            pending.sent += 1
            at = stop
        left = rows.slice(at)
        size = _value_bytes(left)
        self.size -= pending.size - size
        pending.pieces = [left] if len(left) else []
        pending.rows, pending.size = len(left), size


def _value_bytes(rows: Any) -> int:
    ends = ends_of(rows.column("value"))
    return int(ends[-1] - ends[0])


def _joined(pieces: list[Any]) -> Any:
    return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)


class Encoder:
    """Gives batches their identity and their bytes."""

    def __init__(self, scope: str, task: int, codec: int) -> None:
        self._scope = scope
        self._task = task
        self._codec = codec

    def encode(
        self, to: Destination, number: int, columns: ArrowColumns, known: ArrowColumns, now_ms: int
    ) -> bytearray:
        """Encodes a batch. `known` has the values that the rows contain: a time that is filled
        in here must not change the identity of the same rows."""
        facts = f"{self._scope}\n{self._task}\n{to!r}\n{number}\n{len(columns.values)}".encode()
        identity = blake2b(facts, digest_size=8)
        for part in content(known):
            identity.update(len(part).to_bytes(8, "little"))
            identity.update(mmh3.hash_bytes(bytes(part)))
        producer = BatchProducer(int.from_bytes(identity.digest(), "little") % OURS | OURS, 0, 0)
        return encode_columns(columns, now_ms, to.lane, self._codec, producer)


def place(to: Destination, task: int, number: int, count: int) -> PartitionKey:
    """The partition of a batch. One without keys goes round robin, with another start in each
    task."""
    if to.partition is None:
        return to.topic, (task + number) % count
    if not 0 <= to.partition < count:
        raise InvalidArgument(
            f"topic {to.topic!r} has {count} partitions, so no partition {to.partition}"
        )
    return to.topic, to.partition


def by_key(keys: list[bytes | None], count: int) -> list[int | None]:
    return [None if key is None else partition_of(key, count) for key in keys]
