"""Shell: `raftq produce`, records from arguments, lines or a generator.

Records given as arguments are acknowledged and printed one by one. Those of stdin, a file or
--count are sent in bulk: at most WINDOW portions wait for their acknowledgement, and one summary is
printed. The first record that is not delivered ends the command with an error.
"""

import base64
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftq.client.common.errors import InvalidArgument
from raftq.client.wire.record import VALUE_BYTES_MAX, Headers
from raftq.node.cli.bootstrap import ANY, Bootstrap, open_producer
from raftq.node.cli.moments import duration_s, time_s
from raftq.node.cli.output import (
    Format,
    Output,
    add_row,
    make_table,
    moment,
    open_console,
    parse_headers,
    print_json,
    read_lines,
    stdin_lines,
)

if TYPE_CHECKING:
    from raftq.client.results import Appended, Deliveries, Delivery
    from raftq.client.sync.producer import Producer

WINDOW = 64
PORTION_BYTES = 1024 * 1024
PORTION_RECORDS_MAX = 4_000
FACES = 1_024  # different values that are generated
DELIVERY_S = 130.0


@dataclass(frozen=True, slots=True)
class Sent:
    """Records in flight: one call of `send_many`, or single records."""

    count: int
    many: "Deliveries | None"
    single: "list[Delivery]"

    def wait(self) -> int:
        """Waits until all are acknowledged. Returns their number."""
        if self.many is not None:
            self.many.wait(DELIVERY_S)
        for delivery in self.single:
            delivery.result(DELIVERY_S)
        return self.count

    def results(self) -> "list[Appended]":
        if self.many is not None:
            return self.many.result(DELIVERY_S)
        return [delivery.result(DELIVERY_S) for delivery in self.single]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """What all records of one call have in common."""

    topic: str
    key: bytes | None
    headers: Headers
    priority: str | int
    partition: int | None
    delay: float | None = None
    deliver_at: float | None = None
    ttl: float | None = None

    @property
    def _plain(self) -> bool:
        """Whether no record needs anything that `send_many` lacks."""
        times = (self.delay, self.deliver_at, self.ttl)
        return not self.headers and all(time is None for time in times)

    def send(self, producer: "Producer", values: list[bytes]) -> "Sent":
        """Sends records without waiting for their acknowledgement."""
        if self._plain:
            keys = None if self.key is None else [self.key] * len(values)
            many = producer.send_many(
                self.topic, values, keys, priority=self.priority, partition=self.partition
            )
            return Sent(len(values), many, [])
        single = [
            producer.send(
                self.topic,
                value,
                key=self.key,
                headers=self.headers,
                priority=self.priority,
                partition=self.partition,
                delay=self.delay,
                deliver_at=self.deliver_at,
                ttl=self.ttl,
            )
            for value in values
        ]
        return Sent(len(values), None, single)


def produce(  # noqa: PLR0913 - what can be said about records
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The name of the topic.")],
    values: Annotated[
        list[str] | None, typer.Argument(metavar="VALUE...", help="Or - for the lines of stdin.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Send the lines of this file.")
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, max=10**12, help="Generate this many records.")
    ] = None,
    size: Annotated[
        int, typer.Option(min=1, max=VALUE_BYTES_MAX, help="Bytes of a generated value.")
    ] = 1024,
    key: Annotated[str | None, typer.Option(help="The key of every record.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may be repeated.")] = None,
    priority: Annotated[
        str, typer.Option(help="critical, high, normal, low, background, or 0-4.")
    ] = "normal",
    partition: Annotated[
        int | None, typer.Option("-p", "--partition", min=0, help="Only this partition.")
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Delay the records by this time, like 1h30m."),
    ] = None,
    deliver_at: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Delay the records until a time, like 2026-01-31T12:00:00Z."
        ),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Queues drop the records after this time."),
    ] = None,
    acks: Annotated[str, typer.Option(help="all, leader or none.")] = "all",
    linger_ms: Annotated[int, typer.Option(min=0, help="Wait for more records.")] = 5,
    compression: Annotated[str | None, typer.Option(help="lz4 or zstd.")] = None,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Send records: the arguments, the lines of stdin or of a file, or generated ones."""
    sending = Sending(
        topic=topic,
        key=None if key is None else os.fsencode(key),
        headers=parse_headers(header or []),
        priority=int(priority) if priority.isdecimal() else priority,
        partition=partition,
        delay=duration_s("--delay", delay),
        deliver_at=time_s("--deliver-at", deliver_at),
        ttl=duration_s("--ttl", ttl),
    )
    source = _source(values or [], file, count, size)
    options: dict[str, Any] = {"acks": acks, "linger_ms": linger_ms, "compression": compression}
    if size > 1024 * 1024:
        options["value_bytes_max"] = size
    with open_producer(bootstrap, **options) as producer:
        if values and values != ["-"]:
            _one_by_one(producer, sending, [os.fsencode(value) for value in values], output)
        else:
            _in_bulk(producer, sending, source, count, output)


def _source(
    values: list[str], file: str | None, count: int | None, size: int
) -> Iterator[list[bytes]]:
    given = [bool(values), file is not None, count is not None]
    if sum(given) > 1:
        raise InvalidArgument("give one of VALUE..., --file and --count, not several")
    if file is not None:
        if not os.path.isfile(file):
            raise InvalidArgument(f"there is no file {file}")
        return _file_lines(file)
    if count is not None:
        return _generated(count, size)
    if not values and sys.stdin is not None and sys.stdin.isatty():
        raise InvalidArgument("nothing to send: give VALUE..., --file, --count, or - for stdin")
    return stdin_lines()


def _file_lines(path: str) -> Iterator[list[bytes]]:
    with open(path, "rb") as stream:
        yield from read_lines(stream, path)


def _generated(count: int, size: int) -> Iterator[list[bytes]]:
    """Values of letters that hardly compress, from a pool: new ones would cost more than
    sending."""
    portion = max(1, min(PORTION_RECORDS_MAX, PORTION_BYTES // size))
    noise = base64.b64encode(os.urandom(size + FACES))
    faces = [noise[at : at + size] for at in range(min(FACES, portion))]
    values = (faces * (portion // len(faces) + 1))[:portion]
    left = count
    while left:
        yield values[:left] if left < portion else values
        left -= min(left, portion)


def _one_by_one(
    producer: "Producer", sending: Sending, values: list[bytes], output: Format
) -> None:
    appended = sending.send(producer, values).results()
    if output is Format.json:
        for record in appended:
            print_json(record._asdict())
        return
    delayed = any(record.delayed for record in appended)
    more = ("delivered at",) if delayed else ()
    table = make_table("", "topic", "partition", "offset", *more)
    table.title = None
    for record in appended:
        place = (
            record.topic,
            str(record.partition),
            "" if record.offset < 0 else str(record.offset),
        )
        due = "" if record.deliver_at is None else moment(record.deliver_at / 1000)
        add_row(table, *place, *((due,) if delayed else ()))
    open_console().print(table)


def _in_bulk(
    producer: "Producer",
    sending: Sending,
    source: Iterator[list[bytes]],
    count: int | None,
    output: Format,
) -> None:
    started = time.perf_counter()
    records = size = 0
    waiting: deque[Sent] = deque()
    with _progress(count, output) as advance:
        for values in source:
            waiting.append(sending.send(producer, values))
            records += len(values)
            size += sum(map(len, values))
            if len(waiting) > WINDOW:
                advance(waiting.popleft().wait())
        while waiting:
            advance(waiting.popleft().wait())
    seconds = max(time.perf_counter() - started, 1e-9)
    facts = {"count": records, "bytes": size, "seconds": round(seconds, 3)}
    rate = round(records / seconds)
    if output is Format.json:
        print_json(facts | {"records_per_s": rate})
    else:
        mib = size / seconds / 1024 / 1024
        typer.echo(f"{records} records in {seconds:.2f} s: {rate}/s, {mib:.1f} MiB/s")


@contextlib.contextmanager
def _progress(total: int | None, output: Format) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr if that is a terminal; otherwise nothing."""
    if output is Format.json or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console  # noqa: PLC0415 - only where there is a bar
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sending", total=total)
        yield lambda count: bar.advance(task, count)
