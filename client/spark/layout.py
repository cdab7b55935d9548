"""Pure: the columns of a DataFrame that is written, checked once, and its rows by destination.

    column      type                                             if it is absent or null
    value       binary or string                                 refused
    key         binary or string                                 no key
    topic       string                                           the option `topic`, which also wins
    partition   a whole number                                   by key, else batch by batch
    headers     array<struct<key, value>> or map<string, binary> none
    priority    a whole number (0-4) or a name                   normal
    timestamp   timestamp, or a long in ms                       the time of writing
    deliver_at  timestamp, or a long in ms                       at once

A column `offset` is accepted and ignored, so that a DataFrame that was read can be written.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from raftq.client.common.errors import ConfigError, InvalidArgument
from raftq.client.options import lane_of
from raftq.client.spark.outgoing import Destination, by_key
from raftq.client.wire.arrow_encoder import ArrowColumns
from raftq.client.wire.layout import LANE_NORMAL
from raftq.client.wire.record import pack_headers

_TEXT = (BinaryType, StringType)
_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_TIME = (TimestampType, LongType)
ACCEPTED: dict[str, tuple[type[DataType], ...]] = {
    "value": _TEXT,
    "key": _TEXT,
    "topic": (StringType,),
    "partition": _WHOLE,
    "headers": (ArrayType, MapType),
    "priority": (*_WHOLE, StringType),
    "timestamp": _TIME,
    "deliver_at": _TIME,
    "offset": (LongType,),
}


def check_schema(schema: StructType, topic: str) -> None:
    """Refuses a DataFrame that cannot be written, before any row is written."""
    wrong = []
    names = schema.fieldNames()
    for field in schema.fields:
        accepted = ACCEPTED.get(field.name)
        if accepted is None:
            wrong.append(f"there is no column {field.name!r} in a record")
        elif not isinstance(field.dataType, accepted) or not _is_headers(field.name, field):
            kinds = _HEADERS if field.name == "headers" else _names(accepted)
            wrong.append(f"{field.name} is {field.dataType.simpleString()}, not {kinds}")
    wrong += [f"column {name!r} is there twice" for name in set(names) if names.count(name) > 1]
    if "value" not in names:
        wrong.append("there is no column 'value'")
    if "topic" not in names and not topic:
        wrong.append("there is neither an option nor a column 'topic'")
    if wrong:
        raise ConfigError("this cannot be written to a topic: " + "; ".join(wrong))


_HEADERS = "array<struct<key,value>> or map<string,binary>"


def _names(kinds: tuple[type[DataType], ...]) -> str:
    return " or ".join(kind().simpleString() for kind in kinds)


def _is_headers(name: str, field: Any) -> bool:
    if name != "headers":
        return True
    kind = field.dataType
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, _TEXT)
    pair = kind.elementType
    return (
        isinstance(pair, StructType)
        and pair.fieldNames() == ["key", "value"]
        and isinstance(pair["key"].dataType, StringType)
        and isinstance(pair["value"].dataType, _TEXT)
    )


class DestinationRouter:
    """Splits Spark's Arrow batches by destination."""

    def __init__(self, topic: str, partitions: Callable[[str], int]) -> None:
        self._topic = topic
        self._partitions = partitions

    def route(self, batch: Any) -> Iterator[tuple[Destination, Any]]:
        """Rows by destination, in order; each a RecordBatch of columns as they are encoded."""
        if not len(batch):
            return
        rows = _prepared(batch)
        facts: list[Any] = [
            self._topics(batch),
            _partition_numbers(batch),
            _lanes(batch),
            _delayed(rows),
        ]
        has_keys = "key" in rows.schema.names and rows.column("key").null_count < len(rows)
        if all(not isinstance(fact, list) for fact in facts) and (
            facts[1] is not None or not has_keys
        ):
            yield Destination(*facts), rows
            return
        yield from self._scattered(rows, facts, has_keys)

    def _scattered(
        self, rows: Any, facts: list[Any], has_keys: bool
    ) -> Iterator[tuple[Destination, Any]]:
        count = len(rows)
        topics, numbers, lanes, delayed = (
            fact if isinstance(fact, list) else [fact] * count for fact in facts
        )
        if has_keys:
            keyed = self._by_key(rows.column("key").to_pylist(), topics)
            numbers = [
                chosen if number is None else number
                for number, chosen in zip(numbers, keyed, strict=True)
            ]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for at, to in enumerate(zip(topics, numbers, lanes, delayed, strict=True)):
            if to in groups:
                groups[to].append(at)
            else:
                groups[to] = [at]
        for to, places in groups.items():
            picked = rows if len(places) == count else rows.take(pa.array(places, pa.int32()))
            yield Destination(*to), picked

    def _by_key(self, keys: list[bytes | None], topics: list[str]) -> list[int | None]:
        counts = {topic: self._partitions(topic) for topic in dict.fromkeys(topics)}
        if len(counts) == 1:
            return by_key(keys, next(iter(counts.values())))
        pairs = zip(keys, topics, strict=True)
        return [by_key([key], counts[topic])[0] for key, topic in pairs]

    def _topics(self, batch: Any) -> str | list[str]:
        if self._topic or "topic" not in batch.schema.names:
            return self._topic
        names = batch.column("topic")
        if names.null_count:
            raise InvalidArgument("a row has no topic, and there is no option 'topic'")
        different: list[str] = names.unique().to_pylist()
        return different[0] if len(different) == 1 else list(names.to_pylist())


def _prepared(batch: Any) -> Any:
    """The columns that are encoded, in the types that encoding accepts."""
    names = batch.schema.names
    value = batch.column("value").cast(pa.binary())
    if value.null_count:
        raise InvalidArgument("a row has no value: null cannot be written")
    columns = {"value": value}
    if "key" in names:
        columns["key"] = batch.column("key").cast(pa.binary())
    for name in ("timestamp", "deliver_at"):
        if name in names:
            columns[name] = _ms(batch.column(name), up=name == "deliver_at")
    if "headers" in names and batch.column("headers").null_count < len(batch):
        packed = [_packed(row) for row in batch.column("headers").to_pylist()]
        columns["headers"] = pa.array(packed, pa.binary())
    return pa.RecordBatch.from_pydict(columns)


def _ms(column: Any, up: bool) -> Any:
    """Milliseconds. A due time is never rounded down."""
    if pa.types.is_timestamp(column.type):
        micros = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
        if up:
            micros = pc.add(micros, pa.scalar(999, pa.int64()))
        return pc.floor(pc.divide(micros.cast(pa.float64()), 1000.0)).cast(pa.int64())
    return column.cast(pa.int64())


def _packed(headers: Any) -> bytes:
    pairs = [
        (header["key"], header["value"]) if isinstance(header, dict) else header
        for header in headers or ()
    ]
    return pack_headers({
        name: value.encode() if isinstance(value, str) else value for name, value in pairs
    })  # fmt: skip


def _same(column: Any) -> bool:
    edges = pc.min_max(column)
    return not column.null_count and edges["min"] == edges["max"]


def _partition_numbers(batch: Any) -> int | list[int | None] | None:
    if "partition" not in batch.schema.names:
        return None
    numbers = batch.column("partition")
    if _same(numbers):
        return int(numbers[0].as_py())
    return None if numbers.null_count == len(numbers) else list(numbers.to_pylist())


def _lanes(batch: Any) -> int | list[int]:
    if "priority" not in batch.schema.names:
        return LANE_NORMAL
    column = batch.column("priority")
    if _same(column):
        return lane_of(column[0].as_py())
    return [
        LANE_NORMAL if priority is None else lane_of(priority) for priority in column.to_pylist()
    ]


def _delayed(rows: Any) -> bool | list[bool]:
    if "deliver_at" not in rows.schema.names:
        return False
    column = rows.column("deliver_at")
    later: list[bool] = pc.fill_null(pc.greater(column, 0), False).to_pylist()
    return later[0] if len(set(later)) == 1 else later


def columns_of(rows: Any, to: Destination, now_ms: int) -> tuple[ArrowColumns, ArrowColumns]:
    """Columns to encode, and the same without values that are filled in here."""
    names = rows.schema.names
    keys = rows.column("key") if "key" in names else None
    if keys is not None and keys.null_count == len(keys):
        keys = None
    headers = rows.column("headers") if "headers" in names else None
    given = rows.column("timestamp") if "timestamp" in names else None
    if given is not None and given.null_count == len(given):
        given = None
    due = rows.column("deliver_at") if to.delayed else None
    times = given
    if given is not None and given.null_count:
        times = pc.fill_null(given, now_ms)
        given = pc.fill_null(given, -1)
    value = rows.column("value")
    return ArrowColumns(value, keys, headers, times, due), ArrowColumns(
        value, keys, headers, given, due
    )
