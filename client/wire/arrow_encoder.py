"""Arrow columns as a record batch: the way back of arrow.py. (Pure.) Needs `raftq[arrow]`.

The buffers of keys and values are joined as they are: no Python object is made per record. Limits
on single records are the node's to check, what would break the format is refused here.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raftq.client.common.errors import InvalidArgument
from raftq.client.wire.codecs import CODEC_NONE
from raftq.client.wire.encoder import assemble
from raftq.client.wire.layout import (
    FLAG_DELIVER_AT,
    FLAG_HEADERS,
    FLAG_KEY_NULLS,
    FLAG_KEYS,
    FLAG_TIMESTAMPS,
    LANE_COUNT,
    LANE_NORMAL,
    NO_PRODUCER,
    RECORDS_MAX,
    BatchProducer,
)

Parts = list[Any]  # things with a buffer


@dataclass(slots=True)
class ArrowColumns:
    """The columns of a batch, each a `pyarrow.Array` of the same length or None."""

    values: Any
    """binary, no nulls"""
    keys: Any = None
    """binary; null for a record without key"""
    headers: Any = None
    """binary, no nulls: a msgpack map for each record, or nothing"""
    timestamps: Any = None
    """int64, no nulls: ms"""
    deliver_at: Any = None
    """int64, no nulls: ms"""


def encode_columns(
    columns: ArrowColumns,
    timestamp: int = 0,
    lane: int = LANE_NORMAL,
    codec: int = CODEC_NONE,
    producer: BatchProducer = NO_PRODUCER,
) -> bytearray:
    """The batch; `timestamp` is for records that bring none."""
    count = len(columns.values)
    if not 0 < count <= RECORDS_MAX or not 0 <= lane < LANE_COUNT:
        raise InvalidArgument(f"a batch of {count} records in lane {lane} cannot be")
    flags = 0
    parts: Parts = []
    bounds = (timestamp, timestamp)
    if columns.timestamps is not None:
        flags |= FLAG_TIMESTAMPS
        parts.append(_numbers(columns.timestamps, 8))
        bounds = (columns.timestamps[0].as_py(), pc.max(columns.timestamps).as_py())
    if columns.deliver_at is not None:
        flags |= FLAG_DELIVER_AT
        parts.append(_numbers(columns.deliver_at, 8))
    value_ends, values = _binary(columns.values)
    parts.append(value_ends)
    keys: Any = b""
    headers: Any = b""
    validity = b""
    if columns.keys is not None:
        flags |= FLAG_KEYS
        if columns.keys.null_count:
            flags |= FLAG_KEY_NULLS
            validity = _bitmap(columns.keys)
        key_ends, keys = _binary(columns.keys)
        parts.append(key_ends)
    if columns.headers is not None:
        flags |= FLAG_HEADERS
        header_ends, headers = _binary(columns.headers)
        parts.append(header_ends)
    parts += [validity, keys, values, headers]
    lengths = len(keys), len(values), len(headers)
    origin = (producer.id, producer.epoch, producer.base_sequence)
    shape = (flags, lane, 0, count, count)
    size = sum(map(len, parts))
    return assemble(codec, (*shape, *origin, *bounds, *lengths, size), parts)


def content(columns: ArrowColumns) -> Parts:
    """Everything that the columns hold, as buffers: what two equal batches have in common."""
    parts: Parts = []
    for column in (columns.values, columns.keys, columns.headers):
        if column is not None:
            parts += [*_binary(column), _bitmap(column) if column.null_count else b""]
        parts.append(b"|")
    for column in (columns.timestamps, columns.deliver_at):
        parts.append(b"|" if column is None else _numbers(column, 8))
    return parts


def ends_of(column: Any) -> memoryview:
    """The offsets of a binary array, as numbers; the first need not be 0."""
    raw = memoryview(column.buffers()[1])
    return raw.cast("B")[4 * column.offset : 4 * (column.offset + len(column) + 1)].cast("i")


def _binary(column: Any) -> tuple[Any, Any]:
    """Offsets from 0 on, and the bytes between the first and the last."""
    if column.null_count:
        column = pc.fill_null(column, b"")
    ends = ends_of(column)
    first, last = ends[0], ends[-1]
    data = column.buffers()[2]
    held = b"" if data is None else memoryview(data)[first:last]
    if not first:
        return ends.cast("B"), held
    shifted = pa.Array.from_buffers(pa.int32(), len(ends), [None, pa.py_buffer(ends)])
    return _numbers(pc.subtract(shifted, pa.scalar(first, pa.int32())), 4), held


def _numbers(column: Any, width: int) -> memoryview:
    raw = memoryview(column.buffers()[1]).cast("B")
    return raw[width * column.offset : width * (column.offset + len(column))]


def _bitmap(column: Any) -> bytes:
    """Bit i is set when row i is there, and none past the last row is."""
    count = len(column)
    bits = bytearray(memoryview(pc.is_valid(column).buffers()[1])[: (count + 7) >> 3])
    if count & 7:
        bits[-1] &= (1 << (count & 7)) - 1
    return bytes(bits)
