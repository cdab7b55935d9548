"""Pure: fetched batches as records or as Arrow tables.

A batch may begin before the wanted offset, because batches are stored and sent whole: earlier
records are cut off here. Control batches and fillers have no records. Checksums are compared here,
once per batch, when its content is needed.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

from raftq.client.common.errors import ConfigError
from raftq.client.results import Record
from raftq.client.wire.batch import FLAG_CONTROL, FLAG_HEADERS, Batch

_new_tuple: Any = tuple.__new__
# Shared by all records without headers, so it must not be changed.
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
    """The number of records of the batch that are before a position."""
    if batch.base_offset >= position:
        return 0
    offsets: Sequence[int] = batch.offsets()
    if isinstance(offsets, range):
        return min(position - batch.base_offset, len(offsets))
    return bisect_left(offsets, position)


def to_records(fetched: Fetched) -> list[Record]:
    """The records from the position on. Raises CorruptBatch for a damaged batch."""
    topic, partition, position, batch = fetched
    batch.check_crc()
    if is_empty(batch):
        return []
    # tuple.__new__ over zipped columns is the cheapest way to make an object of each row: the loop
    # over rows, and the calls, stay in C.
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
def _arrow() -> Any:
    try:
        return import_module("raftq.client.wire.arrow")
    except ImportError as error:
        raise ConfigError("Arrow tables need the extra raftq[arrow] (pyarrow)") from error


def to_table(batches: list[Fetched]) -> Any:
    """One `pyarrow.Table` of all of them: topic, partition, then the columns of wire/arrow.py."""
    rows = _arrow().ArrowRows()
    for topic, partition, position, batch in batches:
        batch.check_crc()
        if not is_empty(batch):
            rows.add(topic, partition, batch, cut(batch, position))
    return rows.table()
