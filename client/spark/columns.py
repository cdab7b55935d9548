"""Pure: fetched batches as the Arrow batches that Spark wants.

Only the requested columns are decoded. Log batches are combined to Arrow batches of a few
megabytes, column by column: a Python object is made per log batch, never per record, except for
headers, which have to be unpacked. The types are those that Spark accepts:

    key, value   binary                topic      string
    partition    int32                 offset     int64
    timestamp    timestamp[us, UTC]    priority   int8
    headers      list<struct<key: string, value: binary>>, null for a record without headers
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raftq.client.common.errors import InvalidArgument
from raftq.client.consumer.records import cut
from raftq.client.spark.options import COLUMNS, HEADERS
from raftq.client.wire.arrow import column
from raftq.client.wire.batch import FLAG_HEADERS, FLAG_KEYS, FLAG_OFFSET_DELTAS, Batch
from raftq.client.wire.record import unpack_headers

HEADER_TYPE: Any = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
)
TYPES: dict[str, Any] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "priority": pa.int8(),
    HEADERS: HEADER_TYPE,
}
assert set(TYPES) == {*COLUMNS, HEADERS}
CONTENT = ("key", "value", HEADERS)
"""The content of records; the other columns can be had without it."""
_CONSTANT = ("topic", "partition")


class Gathered:
    """Records of one partition that become one Arrow batch."""

    __slots__ = ("_chunks", "_partition", "_schema", "_topic", "rows", "size")

    def __init__(self, topic: str, partition: int, fields: Sequence[tuple[str, bool]]) -> None:
        """`fields` are names and nullability, in Spark's order."""
        self._topic = topic
        self._partition = partition
        self._schema: Any = pa.schema(
            [pa.field(name, TYPES[name], nullable) for name, nullable in fields]
        )
        self._clear()

    def _clear(self) -> None:
        self._chunks: dict[str, list[Any]] = {
            name: [] for name in self._schema.names if name not in _CONSTANT
        }
        self.rows = 0
        self.size = 0

    def add(self, batch: Batch, start: int, end: int) -> None:
        """Adds the records of a batch with offsets in [start, end). Compares its checksum."""
        batch.check_crc()
        first, stop = cut(batch, start), batch.count
        if batch.end_offset > end:
            stop = cut(batch, end)
        if first >= stop:
            return
        count = stop - first
        for name, chunks in self._chunks.items():
            run = _run(batch, name, first)
            if run is not None:
                _lengthen(chunks, run, count, name == "offset")
            else:
                made = column(batch, name)
                chunks.append(made if count == batch.count else made.slice(first, count))
        self.rows += count
        self.size += batch.length

    def take(self) -> Any:
        """A `pyarrow.RecordBatch` of what was added since the last call."""
        arrays = [self._array(name) for name in self._schema.names]
        if not arrays:
            raise InvalidArgument("a read needs at least one column")
        made = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._clear()
        return made

    def _array(self, name: str) -> Any:
        if name == "topic":
            return pa.repeat(pa.scalar(self._topic, pa.string()), self.rows)
        if name == "partition":
            return pa.repeat(pa.scalar(self._partition, pa.int32()), self.rows)
        chunks = [
            _spread(name, *chunk) if type(chunk) is list else chunk for chunk in self._chunks[name]
        ]
        made = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        if name == "timestamp":
            return made.cast(TYPES["timestamp"])
        return unpacked(made) if name == HEADERS else made


# Most columns of most batches need not be decoded: offsets count up, and there are no keys. A run
# is a list of its first value and its number of rows. The next batches extend it, and it becomes an
# array when the Arrow batch is made.


def _run(batch: Batch, name: str, first: int) -> int | None:
    """The first value of a column that needs no decoding, from row `first` on; None if it needs
    it."""
    if name == "offset" and not batch.flags & FLAG_OFFSET_DELTAS:
        return batch.base_offset + first
    if name == "priority":
        return batch.lane
    absent = {"key": FLAG_KEYS, HEADERS: FLAG_HEADERS}.get(name)
    return 0 if absent is not None and not batch.flags & absent else None


def _lengthen(chunks: list[Any], begin: int, count: int, rises: bool) -> None:
    last = chunks[-1] if chunks else None
    if type(last) is list and last[0] + rises * last[1] == begin:
        last[1] += count
    else:
        chunks.append([begin, count])


def _spread(name: str, begin: int, count: int) -> Any:
    if name == "offset":
        return pc.add(_counting(count).slice(0, count), pa.scalar(begin, pa.int64()))
    if name == "priority":
        return pa.repeat(pa.scalar(begin, pa.int8()), count)
    return pa.nulls(count, pa.binary())


def _counting(count: int) -> Any:
    """The numbers from 0 on, at least this many."""
    return _counted(max((count - 1).bit_length(), 12))


@lru_cache(maxsize=2)
def _counted(bits: int) -> Any:
    return pa.array(range(1 << bits), pa.int64())


def unpacked(packed: Any) -> Any:
    """Stored headers (a msgpack map, or null) as a list of names and values."""
    ends, missing = array("i", [0]), []
    names: list[str] = []
    values: list[bytes] = []
    for stored in packed.to_pylist():
        headers = unpack_headers(stored) if stored else {}
        names += headers
        values += headers.values()
        ends.append(len(names))
        missing.append(not headers)
    pairs = pa.StructArray.from_arrays(
        [pa.array(names, pa.string()), pa.array(values, pa.binary())],
        fields=list(HEADER_TYPE.value_type),
    )
    places = pa.array(ends, pa.int32())
    mask = pa.array(missing, pa.bool_())
    return pa.ListArray.from_arrays(places, pairs, type=HEADER_TYPE, mask=mask)
