"""Pure: the options of the data source, checked.

Names and meanings are those of Spark's Kafka source where it has them. Spark passes options as
text, with names in any case. All errors are reported at once, as a ConfigError. An unknown name is
an error, too: a misspelt option that is ignored costs more.
"""

import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from raftq.client.common.errors import ConfigError, InvalidArgument, RaftqError
from raftq.client.common.types import PartitionKey
from raftq.client.spark.ranges import Offsets, from_json
from raftq.client.wire.layout import BATCH_BYTES_MAX

Where = Literal["earliest", "latest", "time", "offset"]
Point = tuple[Where, int]

COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "priority")
HEADERS = "headers"
EARLIEST, LATEST = -2, -1  # in JSON, as in Kafka
MIB = 1024 * 1024

BOOTSTRAP = ("bootstrap", "bootstrap.servers", "kafka.bootstrap.servers")
# Options that Spark passes on, or that users give to Spark.
IGNORED = ("path", "checkpointlocation", "queryname", "outputmode")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bound:
    """Where reading begins or ends: by partition where it is given, otherwise `common`."""

    common: Point
    exact: Mapping[PartitionKey, Point] = field(default_factory=dict)

    def at(self, key: PartitionKey) -> Point:
        return self.exact.get(key, self.common)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of batch and streaming reads."""

    bootstrap: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    assigned: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    partitions: tuple[int, ...] = ()
    """Only these partitions of every topic; () means all."""
    starting: Bound
    ending: Bound
    no_time: Literal["error", "latest"] = "error"
    """What to do if a partition has no record at or after the time to start at."""
    columns: tuple[str, ...] = COLUMNS
    min_partitions: int = 0
    max_records_per_partition: int = 0
    max_offsets_per_trigger: int = 0
    min_offsets_per_trigger: int = 0
    max_trigger_delay_ms: int = 15 * 60_000
    fail_on_data_loss: bool = True
    commit_group: str = ""
    fetch_bytes: int = 4 * MIB
    batch_bytes: int = 4 * MIB
    """The approximate size of the Arrow batches that Spark gets."""
    poll_timeout_ms: int = 120_000
    """How long a task waits for the next record of its range, and the driver for offsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of batch and streaming sinks."""

    bootstrap: str
    topic: str = ""
    acks: Literal["leader", "all"] = "all"
    compression: str = "none"
    batch_bytes: int = MIB
    batch_records: int = 4_000
    delivery_timeout_ms: int = 120_000
    records_per_second: int = 0
    """Of each task; 0 means without a limit."""
    write_id: str = ""
    """A name for a batch write: rows that are written again under it are not appended again."""


class _Given:
    """Options as they were given; notes errors and the names that were read."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        self.known: list[str] = []
        self.wrong: list[str] = []

    def text(self, name: str, default: str = "") -> str:
        self.known.append(name)
        return str(self._given.get(name.lower(), default)).strip()

    def has(self, name: str) -> bool:
        return name.lower() in self._given

    def whole(self, name: str, default: int, least: int = 1, most: int = 1 << 62) -> int:
        text = self.text(name, str(default))
        if not re.fullmatch(r"-?\d+", text) or not least <= int(text) <= most:
            if self.has(name):
                self.wrong.append(f"{name} is a whole number from {least} on, not {text!r}")
            return default
        return int(text)

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name, str(default)).lower()
        if text not in ("true", "false"):
            self.wrong.append(f"{name} is true or false, not {text!r}")
        return text == "true"

    def one_of(self, name: str, choices: Collection[str], default: str) -> str:
        text = self.text(name, default).lower()
        if text not in choices:
            self.wrong.append(f"{name} is one of {', '.join(choices)}, not {text!r}")
            return default
        return text

    def names(self, name: str) -> tuple[str, ...]:
        parts = [part.strip() for part in self.text(name).split(",")]
        return tuple(dict.fromkeys(part for part in parts if part))

    def bootstrap(self) -> str:
        found = [text for text in map(self.text, BOOTSTRAP) if text]
        if not found:
            self.wrong.append("bootstrap is missing: an address like '127.0.0.1:7070'")
        return found[0] if found else ""

    def check_names(self) -> None:
        known = {name.lower(): name for name in self.known}
        for name in self._given:
            if name not in known and name not in IGNORED:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {known[close[0]]}?" if close else ""
                self.wrong.append(f"there is no option {name!r}{hint}")

    def raise_wrong(self) -> None:
        if self.wrong:
            raise ConfigError("; ".join(self.wrong))


def read_options(given: Mapping[str, str], streaming: bool) -> ReadOptions:
    """The options of a read. `streaming` decides about defaults and about options that do not
    apply."""
    raw = _Given(given)
    selection = _selection(raw)
    starting = _starting(raw, streaming)
    ending = _ending(raw, streaming)
    options = ReadOptions(
        bootstrap=raw.bootstrap(),
        topics=selection[0],
        pattern=selection[1],
        assigned=selection[2],
        partitions=_numbers(raw, "partitions"),
        starting=starting,
        ending=ending,
        no_time="error"
        if raw.one_of("startingOffsetsByTimestampStrategy", ("error", "latest"), "error") == "error"
        else "latest",
        columns=_columns(raw),
        min_partitions=raw.whole("minPartitions", 0, 0, 1_000_000),
        max_records_per_partition=raw.whole("maxRecordsPerPartition", 0, 0),
        max_offsets_per_trigger=raw.whole("maxOffsetsPerTrigger", 0, 0),
        min_offsets_per_trigger=raw.whole("minOffsetsPerTrigger", 0, 0),
        max_trigger_delay_ms=_duration_ms(raw, "maxTriggerDelay", 15 * 60_000),
        fail_on_data_loss=raw.flag("failOnDataLoss", True),
        commit_group=raw.text("commitGroup"),
        fetch_bytes=raw.whole("fetchBytes", 4 * MIB, 1024, BATCH_BYTES_MAX),
        batch_bytes=raw.whole("batchBytes", 4 * MIB, 1024, BATCH_BYTES_MAX),
        poll_timeout_ms=raw.whole("pollTimeoutMs", 120_000),
    )
    _check_together(raw, options, streaming)
    raw.check_names()
    raw.raise_wrong()
    return options


def write_options(given: Mapping[str, str], streaming: bool) -> WriteOptions:
    """The options of a write."""
    raw = _Given(given)
    options = WriteOptions(
        bootstrap=raw.bootstrap(),
        topic=raw.text("topic"),
        acks="all" if raw.one_of("acks", ("all", "leader"), "all") == "all" else "leader",
        compression=raw.one_of("compression", ("none", "lz4", "zstd"), "none"),
        batch_bytes=raw.whole("batchBytes", MIB, 1024, BATCH_BYTES_MAX // 2),
        batch_records=raw.whole("batchRecords", 4_000, 1, 100_000),
        delivery_timeout_ms=raw.whole("deliveryTimeoutMs", 120_000),
        records_per_second=raw.whole("recordsPerSecond", 0, 0),
        write_id=raw.text("writeId"),
    )
    if streaming and options.write_id:
        raw.wrong.append("writeId is for batch writes; a stream has its query id")
    raw.check_names()
    raw.raise_wrong()
    return options


def _selection(
    raw: _Given,
) -> tuple[tuple[str, ...], str, dict[str, tuple[int, ...]]]:
    topics, pattern = raw.names("subscribe"), raw.text("subscribePattern")
    assigned: dict[str, tuple[int, ...]] = {}
    text = raw.text("assign")
    if text:
        assigned = _parsed(raw, "assign", text, _assigned) or {}
    given = [name for name in ("subscribe", "subscribePattern", "assign") if raw.has(name)]
    if len(given) != 1:
        what = "together: " + ", ".join(given) if given else "none of them"
        raw.wrong.append(f"one of subscribe, subscribePattern and assign is needed, not {what}")
    elif not (topics or pattern or assigned):
        raw.wrong.append(f"{given[0]} names nothing")
    try:
        re.compile(pattern)
    except re.error as error:
        raw.wrong.append(f"subscribePattern is no regular expression: {error}")
    return topics, pattern, assigned


def _assigned(parsed: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(parsed, dict):
        raise InvalidArgument('it is like {"topic": [0, 1]}')
    found = {}
    for topic, numbers in parsed.items():
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise InvalidArgument(f'the partitions of "{topic}" are a list of numbers')
        found[topic] = tuple(sorted(set(numbers)))
    return found


def _starting(raw: _Given, streaming: bool) -> Bound:
    default = "latest" if streaming else "earliest"
    bound = _bound(raw, "starting", default)
    if not streaming and ("latest", 0) in (bound.common, *bound.exact.values()):
        raw.wrong.append("startingOffsets of a batch read cannot be latest: nothing comes after")
    return bound


def _ending(raw: _Given, streaming: bool) -> Bound:
    bound = _bound(raw, "ending", "latest")
    if ("earliest", 0) in (bound.common, *bound.exact.values()):
        raw.wrong.append("endingOffsets cannot be earliest: nothing is before")
    names = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
    if streaming:
        raw.wrong += [f"{name} is for batch reads" for name in names if raw.has(name)]
    return bound


def _bound(raw: _Given, edge: str, default: str) -> Bound:
    """The time for all, otherwise times by partition, otherwise offsets, as in Kafka."""
    common = _common(raw, f"{edge}Offsets", default)
    times = raw.text(f"{edge}OffsetsByTimestamp")
    if raw.has(f"{edge}Timestamp"):
        return Bound(("time", raw.whole(f"{edge}Timestamp", 0, -(1 << 62))))
    raw.known.append(f"{edge}Timestamp")
    if times:
        exact = _parsed(raw, f"{edge}OffsetsByTimestamp", times, from_json) or {}
        return Bound(common.common, {key: ("time", at) for key, at in exact.items()})
    return common


def _common(raw: _Given, name: str, default: str) -> Bound:
    text = raw.text(name, default)
    fallback: Point = ("earliest", 0) if default == "earliest" else ("latest", 0)
    if text.lower() in ("earliest", "latest"):
        return Bound(("earliest", 0) if text.lower() == "earliest" else ("latest", 0))
    offsets: Offsets = _parsed(raw, name, text, from_json) or {}
    exact: dict[PartitionKey, Point] = {}
    for key, offset in offsets.items():
        if offset < EARLIEST:
            raw.wrong.append(f"{name}: {offset} is no offset; -2 is earliest and -1 latest")
        special: dict[int, Point] = {EARLIEST: ("earliest", 0), LATEST: ("latest", 0)}
        exact[key] = special.get(offset, ("offset", offset))
    return Bound(fallback, exact)


def _parsed(raw: _Given, name: str, text: str, read: Callable[[object], T]) -> T | None:
    try:
        return read(json.loads(text))
    except ValueError:
        raw.wrong.append(f"{name} is no JSON: {text!r:.80}")
    except RaftqError as error:
        raw.wrong.append(f"{name}: {error}")
    return None


def columns_option(given: Mapping[str, str]) -> tuple[str, ...]:
    """The columns of a read, which must be known before the kind of read is known."""
    raw = _Given(given)
    found = _columns(raw)
    raw.raise_wrong()
    return found


def _columns(raw: _Given) -> tuple[str, ...]:
    include = raw.flag("includeHeaders", False)
    every = (*COLUMNS, HEADERS)
    named = raw.names("columns")
    for name in named:
        if name not in every:
            raw.wrong.append(f"columns: {name!r} is none of {', '.join(every)}")
    if named:
        return tuple(name for name in named if name in every)
    return every if include else COLUMNS


def _numbers(raw: _Given, name: str) -> tuple[int, ...]:
    found = raw.names(name)
    if not all(number.isdecimal() for number in found):
        raw.wrong.append(f"{name} are numbers like '0,2,5', not {','.join(found)!r}")
        return ()
    return tuple(sorted({int(number) for number in found}))


_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000}


def _duration_ms(raw: _Given, name: str, default: int) -> int:
    text = raw.text(name, f"{default}ms")
    match = re.fullmatch(r"(\d+)\s*(ms|s|m|min|h)", text.lower())
    if match is None:
        raw.wrong.append(f"{name} is like 500ms, 30s or 15m, not {text!r}")
        return default
    return int(match[1]) * _UNITS[match[2]]


def _check_together(raw: _Given, options: ReadOptions, streaming: bool) -> None:
    if options.commit_group and not streaming:
        raw.wrong.append("commitGroup is for streams: a batch read has no moment to store it in")
    most, least = options.max_offsets_per_trigger, options.min_offsets_per_trigger
    if most and least > most:
        raw.wrong.append("minOffsetsPerTrigger is over maxOffsetsPerTrigger")
    if options.partitions and options.assigned:
        raw.wrong.append("partitions and assign say the same thing: give one of them")
