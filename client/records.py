"""Fetched batches as records or as Arrow tables. (Pure.)

A batch may begin before the wanted offset, because batches are stored and sent whole: what is
before it is cut off here. Control batches and fillers have no records. Checksums are compared here,
once per batch, when somebody asks for what is in it.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

from raftq.client.results import Record
from raftq.client.wire.batch import FLAG_CONTROL, FLAG_HEADERS, Batch
from raftq.client.wire.errors import ConfigError

_new_tuple: Any = tuple.__new__
# Shared by all records without headers, so nobody may write to it.
NO_HEADERS: Any = MappingProxyType({})


class Fetched(NamedTuple):
    """One batch of a partition, from `position` on."""

    topic: str
    partition: int
    position: int
    batch: Batch


def is_empty(batch: Batch) -> bool:
    """Whether it has no records for applications."""
    return not batch.count or bool(batch.flags & FLAG_CONTROL)


def cut(batch: Batch, position: int) -> int:
    """How many records of the batch are before a position."""
    if batch.base_offset >= position:
        return 0
    offsets: Sequence[int] = batch.offsets()
    if isinstance(offsets, range):
        return min(position - batch.base_offset, len(offsets))
    return bisect_left(offsets, position)


def to_records(fetched: Fetched) -> list[Record]:
    """The records from the position on; a damaged batch is a CorruptBatch."""
    topic, partition, position, batch = fetched
    batch.check_crc()
    if is_empty(batch):
        return []
    # tuple.__new__ over zipped columns is the cheapest way to make an object of each row: the
    # loop over rows, and the calls, stay in C.
    rows = zip(
        repeat(topic, batch.count),
        repeat(partition),
        batch.offsets(),
        batch.keys(),
        batch.values(),
        batch.timestamps(),
        batch.headers() if batch.flags & FLAG_HEADERS else repeat(NO_HEADERS),
        repeat(batch.lane),
        strict=False,
    )
    records: list[Record] = list(map(_new_tuple, repeat(Record), rows))
    skip = cut(batch, position)
    return records[skip:] if skip else records


@cache
def _arrow() -> tuple[Any, Callable[[Batch], Any], Any]:
    try:
        pa: Any = import_module("pyarrow")
    except ImportError as error:
        raise ConfigError("Arrow tables need the extra raftq[arrow] (pyarrow)") from error
    home: Any = import_module("raftq.client.wire.arrow")
    topic = pa.field("topic", pa.dictionary(pa.int8(), pa.string()), nullable=False)
    partition = pa.field("partition", pa.int32(), nullable=False)
    return pa, home.to_arrow, pa.schema([topic, partition, *home.SCHEMA])


@lru_cache(maxsize=64)
def _name(topic: str) -> Any:
    """A column of one name; `pa.array` looks for pandas each time, which takes longer than all the
    rest where there is none."""
    return _arrow()[0].array([topic])


def to_table(batches: list[Fetched]) -> Any:
    """One `pyarrow.Table` of all of them: topic, partition, then the columns of wire/arrow.py."""
    pa, to_arrow, schema = _arrow()
    parts = []
    for topic, partition, position, batch in batches:
        batch.check_crc()
        if is_empty(batch):
            continue
        columns = to_arrow(batch)
        skip = cut(batch, position)
        columns = columns.slice(skip) if skip else columns
        count = columns.num_rows
        zeros = pa.Array.from_buffers(pa.int8(), count, [None, pa.py_buffer(bytes(count))])
        names = pa.DictionaryArray.from_arrays(zeros, _name(topic))
        number = partition.to_bytes(4, "little") * count
        numbers = pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(number)])
        parts.append(pa.RecordBatch.from_arrays([names, numbers, *columns.columns], schema=schema))
    return pa.Table.from_batches(parts, schema=schema)
