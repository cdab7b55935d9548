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
from collections.abc import Sequence
from functools import cache, lru_cache
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


TABLE_SCHEMA: Any = pa.schema(
    [
        pa.field("topic", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        *SCHEMA,
    ]
)
_BINARY, _INT8, _INT32, _INT64 = pa.binary(), pa.int8(), pa.int32(), pa.int64()
_MS = pa.timestamp("ms", tz="UTC")
_OFFSET_AT = TABLE_SCHEMA.get_field_index("offset")
CONSTANT_ROWS = 4096


def to_arrow(batch: Batch) -> Any:
    """A `pyarrow.RecordBatch` with the columns of SCHEMA."""
    body, base = batch.body()
    whole = pa.py_buffer(body)
    arrays = [
        _keys(batch, whole, base),
        _binary(batch, "values", whole, base, None),
        _numbers(batch.offsets()),
        _timestamps(batch, whole, base),
        _repeated(_INT8, batch.lane, batch.count),
        _headers(batch, whole, base),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def column(batch: Batch, name: str) -> Any:
    """One column of SCHEMA; the others are not looked at."""
    body, base = batch.body()
    if name == "offset":
        return _numbers(batch.offsets())
    if name == "priority":
        return _repeated(_INT8, batch.lane, batch.count)
    whole = pa.py_buffer(body)
    if name == "value":
        return _binary(batch, "values", whole, base, None)
    makers = {"key": _keys, "timestamp": _timestamps, "headers": _headers}
    return makers[name](batch, whole, base)


class ArrowRows:
    """Records of one partition, put together from batches to the chunks of one table.

    A column that is the same for all records of a run of batches gets one chunk for the run: to
    make an array costs more than to fill it.
    """

    __slots__ = ("_chunks", "_count", "_end", "_first", "_lane", "_partition", "_topic")

    def __init__(self) -> None:
        self._chunks: list[list[Any]] = [[] for _ in TABLE_SCHEMA]
        self._topic, self._partition, self._lane = "", -1, -1
        self._count = 0  # rows of the run, whose constant columns are still to be made
        self._first = self._end = 0  # offsets without a gap that are still to be made

    def add(self, topic: str, partition: int, batch: Batch, skip: int) -> None:
        """The records of a batch, without the first `skip`."""
        if (batch.lane, partition, topic) != (self._lane, self._partition, self._topic):
            self._end_run()
            self._topic, self._partition, self._lane = topic, partition, batch.lane
        body, base = batch.body()
        whole = pa.py_buffer(body)
        columns = (
            _keys(batch, whole, base),
            _binary(batch, "values", whole, base, None),
            self._offsets(batch, skip),
            _timestamps(batch, whole, base),
            None,
            _headers(batch, whole, base),
        )
        for chunks, column in zip(self._chunks[2:], columns, strict=True):
            if column is not None:
                chunks.append(column.slice(skip) if skip else column)
        self._count += batch.count - skip

    def _offsets(self, batch: Batch, skip: int) -> Any:
        """None when they go on where those before ended, as they nearly always do."""
        offsets = batch.offsets()
        if not isinstance(offsets, range):
            self._end_offsets()
            return _numbers(offsets)
        if offsets.start + skip != self._end:
            self._end_offsets()
            self._first = offsets.start + skip
        self._end = offsets.stop
        return None

    def _end_offsets(self) -> None:
        chunks = self._chunks[_OFFSET_AT]
        while self._first < self._end:
            count = min(self._end - self._first, CONSTANT_ROWS)
            chunks.append(pc.add(_counting().slice(0, count), pa.scalar(self._first, _INT64)))
            self._first += count

    def _end_run(self) -> None:
        self._end_offsets()
        count, self._count = self._count, 0
        if count:
            topics, partitions, *_, lanes, _ = self._chunks
            zeros = _repeated(_INT8, 0, count)
            topics.append(pa.DictionaryArray.from_arrays(zeros, _names(self._topic)))
            partitions.append(_repeated(_INT32, self._partition, count))
            lanes.append(_repeated(_INT8, self._lane, count))

    def table(self) -> Any:
        self._end_run()
        columns = [
            pa.chunked_array(chunks, field.type)
            for chunks, field in zip(self._chunks, TABLE_SCHEMA, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=TABLE_SCHEMA)


@lru_cache(maxsize=256)
def _names(topic: str) -> Any:
    """A column of one name; `pa.array` looks for pandas each time, which takes longer than all the
    rest where there is none."""
    return pa.array([topic], pa.string())


def _repeated(kind: Any, value: int, count: int) -> Any:
    if count <= CONSTANT_ROWS:
        return _constant(kind, value).slice(0, count)
    return _filled(kind, value, count)


@lru_cache(maxsize=1024)
def _constant(kind: Any, value: int) -> Any:
    return _filled(kind, value, CONSTANT_ROWS)


def _filled(kind: Any, value: int, count: int) -> Any:
    number = value.to_bytes(kind.bit_width // 8, "little") * count
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(number)])


@cache
def _no_bytes() -> Any:
    return pa.nulls(CONSTANT_ROWS, _BINARY)


def _nulls(count: int) -> Any:
    return _no_bytes().slice(0, count) if count <= CONSTANT_ROWS else pa.nulls(count, _BINARY)


@cache
def _counting() -> Any:
    return _numbers(range(CONSTANT_ROWS))


def _numbers(numbers: Sequence[int]) -> Any:
    return pa.Array.from_buffers(_INT64, len(numbers), [None, pa.py_buffer(array("q", numbers))])


def _keys(batch: Batch, whole: Any, base: int) -> Any:
    if not batch.flags & FLAG_KEYS:
        return _nulls(batch.count)
    validity = None
    if batch.flags & FLAG_KEY_NULLS:
        bitmap = batch.key_validity()
        columns.check_validity(bitmap, batch.count)
        start = base + batch.section("keys")[0] - len(bitmap)
        validity = whole.slice(start, len(bitmap))
    return _binary(batch, "keys", whole, base, validity)


def _headers(batch: Batch, whole: Any, base: int) -> Any:
    if not batch.flags & FLAG_HEADERS:
        return _nulls(batch.count)
    plain = _binary(batch, "headers", whole, base, None)
    present = pc.greater(pc.binary_length(plain), 0)
    return pa.Array.from_buffers(
        pa.binary(), batch.count, [present.buffers()[1], *plain.buffers()[1:]]
    )


def _timestamps(batch: Batch, whole: Any, base: int) -> Any:
    if batch.flags & FLAG_TIMESTAMPS:
        numbers = _aligned(whole, base + batch.wide_at(FLAG_TIMESTAMPS), 8 * batch.count, 8)
    else:
        numbers = pa.py_buffer(array("q", [batch.base_timestamp]) * batch.count)
    return pa.Array.from_buffers(_MS, batch.count, [None, numbers])


def _binary(batch: Batch, name: str, whole: Any, base: int, validity: Any) -> Any:
    batch.check_ends(name)
    ends = _aligned(whole, base + batch.column_at(name), 4 * (batch.count + 1), 4)
    start, length = batch.section(name)
    data = whole.slice(base + start, length)
    return pa.Array.from_buffers(_BINARY, batch.count, [validity, ends, data])


def _aligned(whole: Any, start: int, length: int, width: int) -> Any:
    part = whole.slice(start, length)
    return part if part.address % width == 0 else pa.py_buffer(part.to_pybytes())
