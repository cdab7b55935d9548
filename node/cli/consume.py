"""Shell: `raftq consume`, records of a topic on stdout.

Without --follow it ends where the partitions ended when it began, so that a script ends even while
others produce. It stores nothing: every call begins where --from says.

With --group it is a member of that group: it gets its share of the partitions, continues at the
group's positions, and stores the position after what it has printed. It ends when its partitions
have no more records.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.table import Table

from raftq.client.common.errors import InvalidArgument, RequestTimeout
from raftq.client.common.names import LANE_NAMES
from raftq.node.cli.bootstrap import ANY, Bootstrap, open_admin, open_consumer
from raftq.node.cli.output import add_row, as_text, content_json, moment, open_console

if TYPE_CHECKING:
    from raftq.client.results import Record, TopicDescription
    from raftq.client.sync.consumer import Consumer

PORTION = 2_000
POLL_S = 0.5
OFFSET_MAX = 2**63 - 1
UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class RecordFormat(StrEnum):
    """How records are written: a table, JSON lines, or values with a newline after each."""

    table = "table"
    json = "json"
    raw = "raw"


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where to begin: an end of the log, an offset, or a time in ms."""

    to: str | None = None
    offset: int | None = None
    time_ms: int | None = None

    def seek(self, consumer: "Consumer", topic: str, partition: int) -> None:
        if self.to is not None:
            consumer.seek(topic, partition, to=self.to)
        elif self.offset is not None:
            consumer.seek(topic, partition, offset=self.offset)
        else:
            consumer.seek(topic, partition, time=self.time_ms)


def consume(  # noqa: PLR0913 - what can be said about reading
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The name of the topic.")],
    partition: Annotated[
        list[int] | None,
        typer.Option("-p", "--partition", min=0, help="Only this partition; may be repeated."),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="earliest, latest, an offset, a time (2026-01-31T12:00:00Z) or an age (15m).",
        ),
    ] = "earliest",
    most: Annotated[
        int | None, typer.Option("-n", "--max", min=1, help="Stop after this many.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more, until Ctrl-C.")] = False,
    group: Annotated[
        str | None,
        typer.Option("-g", "--group", help="Read as a member of this group, from its positions."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, max=86400, help="Fail after this many seconds without a record."),
    ] = 30.0,
    bootstrap: Bootstrap = ANY,
    output: Annotated[
        RecordFormat, typer.Option("--format", "-f", help="How records are written.")
    ] = RecordFormat.table,
) -> None:
    """Print the records of a topic, from all partitions or some."""
    place = parse_place(start, time.time_ns() // 1_000_000)
    if group is not None:
        if partition or place.to is None:
            raise InvalidArgument(
                "with --group, --from is earliest or latest (if it is new), and "
                "partitions are given by the group"
            )
        settings = {"group": group, "topics": [topic], "reset": place.to, "auto_commit": False}
        with open_consumer(bootstrap, **settings) as consumer:
            _share(consumer, RecordPrinter(output), most, follow, timeout)
        return
    with open_admin(bootstrap) as admin:
        described = admin.describe_topic(topic)
    ends = _ends(described, partition)
    printer = RecordPrinter(output)
    with open_consumer(bootstrap) as consumer:
        consumer.assign([(topic, end) for end in ends])
        for number in ends:
            place.seek(consumer, topic, number)
        reading = Reading(consumer, topic, {} if follow else ends, most)
        while reading.goes_on():
            records = reading.next(None if follow else timeout)
            printer.show(records)


def _share(
    consumer: "Consumer",
    printer: "RecordPrinter",
    most: int | None,
    follow: bool,
    timeout: float,
) -> None:
    """Prints the records of this member's partitions, and stores its positions."""
    left, idle_s = most, 0.0
    while left is None or left > 0:
        started = time.perf_counter()
        portion = PORTION if left is None else min(PORTION, left)
        records = consumer.poll(max_records=portion, timeout=POLL_S)
        if records:
            printer.show(records)
            consumer.commit()
            left = None if left is None else left - len(records)
            idle_s = 0.0
            continue
        if follow:
            continue
        idle_s += time.perf_counter() - started
        # Nothing is assigned at first, and perhaps never: others may have all partitions.
        if consumer.assignment() and not any(consumer.lag().values()):
            return
        if idle_s >= timeout:
            raise RequestTimeout(f"no record came for {timeout:g} s before the end was reached")


class Reading:
    """Polls until every partition has reached its end, or enough records came.

    Without ends it goes on until enough records came. It asks for positions only if nothing comes:
    they show an end without records behind it."""

    def __init__(
        self, consumer: "Consumer", topic: str, ends: dict[int, int], most: int | None
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._ends = ends
        self._open = dict(ends)
        self._follow = not ends
        self._left = most
        self._idle_s = 0.0
        self._ask = True

    def goes_on(self) -> bool:
        if self._left == 0:
            return False
        if self._ask:
            self._ask = False
            for one, end in list(self._open.items()):
                self._reached(one, self._consumer.position(self._topic, one), end)
        return self._follow or bool(self._open)

    def next(self, timeout: float | None) -> "list[Record]":
        """The next wanted records; [] if none came for a moment."""
        most = PORTION if self._left is None else min(PORTION, self._left)
        started = time.perf_counter()
        records = self._consumer.poll(max_records=most, timeout=POLL_S)
        if self._follow:
            wanted = records
        else:
            wanted = [record for record in records if record.offset < self._ends[record.partition]]
            for record in records:
                self._reached(record.partition, record.offset + 1, self._ends[record.partition])
        if self._left is not None:
            self._left -= len(wanted)
        self._ask = not records
        self._idle_s = 0.0 if records else self._idle_s + time.perf_counter() - started
        if timeout is not None and self._idle_s >= timeout and self.goes_on():
            raise RequestTimeout(f"no record came for {timeout:g} s before the end was reached")
        return wanted

    def _reached(self, partition: int, offset: int, end: int) -> None:
        if offset >= end:
            self._open.pop(partition, None)


def _ends(described: "TopicDescription", partitions: list[int] | None) -> dict[int, int]:
    """The present ends of the wanted partitions."""
    known = {partition.partition: partition for partition in described.partitions}
    wanted = list(dict.fromkeys(partitions)) if partitions else list(known)
    missing = [number for number in wanted if number not in known]
    if missing:
        raise InvalidArgument(
            f"topic {described.name!r} has no partition {missing[0]}, only 0 to {len(known) - 1}"
        )
    # Without a leader the end is unknown: then it waits for at least one record.
    ends = {number: known[number].high_watermark for number in wanted}
    return {one: OFFSET_MAX if end is None else end for one, end in ends.items()}


def parse_place(text: str, now_ms: int, option: str = "--from") -> StartPoint:
    """Parses `--from`. Times without a zone are UTC."""
    text = text.strip()
    if text in ("earliest", "latest"):
        return StartPoint(to=text)
    if text.isascii() and text.isdecimal():
        if len(text) > 18:
            raise InvalidArgument(f"{option} {text[:40]}: no offset is that large")
        return StartPoint(offset=int(text))
    age, unit = text[:-1], text[-1:]
    if unit in UNITS_MS and age.isascii() and age.isdecimal() and len(age) < 10:
        return StartPoint(time_ms=max(0, now_ms - int(age) * UNITS_MS[unit]))
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            f"{option} {text!r} is not earliest, latest, an offset, a time or an age like 15m"
        ) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return StartPoint(time_ms=max(0, round(when.timestamp() * 1000)))


class Shown(Protocol):
    """A record to print, from whichever source."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, bytes]: ...
    @property
    def priority(self) -> int: ...


def _nothing(record: Any) -> dict[str, Any]:
    return {}


class RecordPrinter:
    """Prints portions of records, as JSON lines, bare values or the rows of one table.

    `more` has additional fields for JSON."""

    def __init__(
        self, output: RecordFormat, more: Callable[[Any], dict[str, Any]] = _nothing
    ) -> None:
        self._output = output
        self._more = more
        self._started = False

    def show(self, records: Sequence[Shown]) -> None:
        if not records:
            return
        if self._output is RecordFormat.raw:
            stream = typer.get_binary_stream("stdout")
            stream.write(b"".join(record.value + b"\n" for record in records))
            stream.flush()
        elif self._output is RecordFormat.json:
            found = [record_json(record) | self._more(record) for record in records]
            lines = [json.dumps(row, ensure_ascii=False) for row in found]
            typer.echo("".join(f"{line}\n" for line in lines), nl=False)
        else:
            open_console().print(self._table(records))
        self._started = True
        sys.stdout.flush()

    def _table(self, records: Sequence[Shown]) -> Table:
        table = Table(box=None, show_header=not self._started, pad_edge=False, expand=True)
        for name, width in (("partition", 9), ("offset", 12), ("lane", 10), ("time", 23)):
            table.add_column(name, width=width, no_wrap=True)
        table.add_column("key", width=16, no_wrap=True)
        table.add_column("value", ratio=1, no_wrap=True)
        for record in records:
            key = "" if record.key is None else as_text(record.key)[0]
            place = (str(record.partition), str(record.offset), LANE_NAMES[record.priority])
            add_row(table, *place, moment(record.timestamp / 1000), key, as_text(record.value)[0])
        return table


def record_json(record: Shown) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "priority": LANE_NAMES[record.priority],
        **content_json(record.value, record.key, record.headers),
    }
