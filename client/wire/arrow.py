"""A batch as Arrow arrays, for readers that want columns. (Pure.) Needs the extra `raftq[arrow]`.

    column     type                    null when
    key        binary                  the record has no key
    value      binary
    offset     int64
    timestamp  timestamp[ms, UTC]
    priority   int8
    headers    binary (msgpack map)    the record has no headers

Keys, values, headers and timestamps are not copied: their buffers are slices of the batch's bytes,
which they keep alive. Two exceptions: a batch over a bytearray or memoryview is copied once, as its
owner could change checked offsets under Arrow; and number columns that do not start at a multiple
of their size in memory (of batches behind the first in a buffer) are copied, as Arrow's loops may
assume that they do. Arrow trusts offsets, so they are checked before it sees them: damage is
a CorruptBatch. Headers are not unpacked and so not checked.
"""

from array import array
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raftq.client.wire import columns
from raftq.client.wire.batch import FLAG_HEADERS, FLAG_KEY_NULLS, FLAG_KEYS, FLAG_TIMESTAMPS, Batch

SCHEMA: Any = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("priority", pa.int8(), nullable=False),
        pa.field("headers", pa.binary()),
    ]
)


def to_arrow(batch: Batch) -> Any:
    """A `pyarrow.RecordBatch` with the columns of SCHEMA."""
    count = batch.count
    body, base = batch.body()
    whole = pa.py_buffer(body)
    offsets = pa.py_buffer(array("q", batch.offsets()))
    arrays = [
        _keys(batch, whole, base),
        _binary(batch, "values", whole, base, None),
        pa.Array.from_buffers(pa.int64(), count, [None, offsets]),
        _timestamps(batch, whole, base),
        pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(bytes([batch.lane]) * count)]),
        _headers(batch, whole, base),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _keys(batch: Batch, whole: Any, base: int) -> Any:
    if not batch.flags & FLAG_KEYS:
        return pa.nulls(batch.count, pa.binary())
    validity = None
    if batch.flags & FLAG_KEY_NULLS:
        bitmap = batch.key_validity()
        columns.check_validity(bitmap, batch.count)
        start = base + batch.section("keys")[0] - len(bitmap)
        validity = whole.slice(start, len(bitmap))
    return _binary(batch, "keys", whole, base, validity)


def _headers(batch: Batch, whole: Any, base: int) -> Any:
    if not batch.flags & FLAG_HEADERS:
        return pa.nulls(batch.count, pa.binary())
    plain = _binary(batch, "headers", whole, base, None)
    present = pc.greater(pc.binary_length(plain), 0)
    return pa.Array.from_buffers(
        pa.binary(), batch.count, [present.buffers()[1], *plain.buffers()[1:]]
    )


def _timestamps(batch: Batch, whole: Any, base: int) -> Any:
    kind = pa.timestamp("ms", tz="UTC")
    if batch.flags & FLAG_TIMESTAMPS:
        numbers = _aligned(whole, base + batch.wide_at(FLAG_TIMESTAMPS), 8 * batch.count, 8)
    else:
        numbers = pa.py_buffer(array("q", [batch.base_timestamp]) * batch.count)
    return pa.Array.from_buffers(kind, batch.count, [None, numbers])


def _binary(batch: Batch, name: str, whole: Any, base: int, validity: Any) -> Any:
    batch.ends(name)  # raises when they do not rise from 0 to the section's length
    ends = _aligned(whole, base + batch.column_at(name), 4 * (batch.count + 1), 4)
    start, length = batch.section(name)
    data = whole.slice(base + start, length)
    return pa.Array.from_buffers(pa.binary(), batch.count, [validity, ends, data])


def _aligned(whole: Any, start: int, length: int, width: int) -> Any:
    part = whole.slice(start, length)
    return part if part.address % width == 0 else pa.py_buffer(part.to_pybytes())
