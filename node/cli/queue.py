"""Shell: `raftq queue VERB DIRECTORY`, an embedded queue from outside.

Every command opens the directory, does one thing and closes it. The settings of a queue belong to
its application and are not stored. So a command opens the queue with settings that drop nothing (no
retention, no limit on deliveries) and runs no housekeeping: looking at a queue leaves its messages,
groups and dead letters as they are. Messages that a dead process had leased come back, as at every
open.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from raftq.client.common.errors import InvalidArgument
from raftq.node.cli.output import (
    Format,
    Output,
    add_row,
    as_text,
    content_json,
    make_table,
    moment,
    open_console,
    pairs_table,
    parse_headers,
    print_json,
    printable,
    report,
    stdin_lines,
)

if TYPE_CHECKING:
    from raftq.node.queue.embedded.message import DeadMessage, Message, QueueStats
    from raftq.node.queue.embedded.options import EmbeddedOptions
    from raftq.node.queue.embedded.queue import Queue

PORTION = 500
LIST_MAX = 100
FORMAT_FILE = "queue.format"
DEFAULT_GROUP = "default"

queue_app = typer.Typer(no_args_is_help=True, help="Look at and use a queue in a directory.")

Directory = Annotated[str, typer.Argument(metavar="DIR", help="The directory of the queue.")]
Group = Annotated[str, typer.Option("--group", "-g", help="The group of consumers.")]
Count = Annotated[int, typer.Option("-n", "--count", min=1, help="How many messages at most.")]


@queue_app.command()
def stats(directory: Directory, output: Output = Format.table) -> None:
    """Count what the queue holds: by lane, by group, on disk."""
    with _open(directory) as queue:
        found = queue.stats()
    if output is Format.json:
        print_json(asdict(found))
    else:
        _print_stats(directory, found)


@queue_app.command()
def peek(
    directory: Directory,
    count: Count = 10,
    group: Group = DEFAULT_GROUP,
    output: Output = Format.table,
) -> None:
    """Show what would come next, highest priority first, without taking it."""
    with _open(directory) as queue:
        MessagePrinter(output).show(queue.peek(count, group=group))


@queue_app.command()
def tail(
    directory: Directory,
    count: Count = 10,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Keep the queue open and show delayed messages when they are due."
        ),
    ] = False,
    output: Output = Format.table,
) -> None:
    """Show the newest messages in the order of their offsets, settled ones included."""
    with _open(directory, keeper=follow) as queue:
        printer = MessagePrinter(output)
        end = queue.stats().end_offset
        offset = max(0, end - count)
        while follow or offset < end:
            timeout = None if follow and offset >= end else 0.0
            messages, offset = queue.browse(offset, PORTION, timeout=timeout)
            printer.show(messages)


@queue_app.command()
def enqueue(  # noqa: PLR0913 - what can be said about a message
    directory: Directory,
    values: Annotated[
        list[str], typer.Argument(metavar="VALUE...", help="Values, or - for the lines of stdin.")
    ],
    key: Annotated[str | None, typer.Option(help="The key of every message.")] = None,
    priority: Annotated[
        str, typer.Option(help="critical, high, normal, low, background, or 0-4.")
    ] = "normal",
    delay: Annotated[float | None, typer.Option(help="Seconds until it is due.")] = None,
    ttl: Annotated[float | None, typer.Option(help="Seconds it lives once it is due.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may be repeated.")] = None,
    dedup_id: Annotated[
        str | None, typer.Option(help="Add nothing if this id was used lately.")
    ] = None,
    output: Output = Format.table,
) -> None:
    """Add messages and print their ids. Creates the queue if there is none."""
    headers = parse_headers(header or [])
    key_bytes = None if key is None else os.fsencode(key)
    lane = int(priority) if priority.isdecimal() else priority
    if dedup_id is not None and (len(values) != 1 or values == ["-"]):
        raise InvalidArgument("a dedup id belongs to one message: give exactly one VALUE")
    portions = stdin_lines() if values == ["-"] else iter([[os.fsencode(v) for v in values]])
    ids: list[str] = []
    with _open(directory, create=True) as queue:
        for portion in portions:
            if dedup_id is not None:
                added = [
                    queue.enqueue(
                        portion[0], key=key_bytes, priority=lane, delay=delay, ttl=ttl,
                        headers=headers, dedup_id=dedup_id,
                    )
                ]  # fmt: skip
            else:
                added = queue.enqueue_batch(
                    portion,
                    keys=None if key_bytes is None else [key_bytes] * len(portion),
                    priority=lane,
                    delay=delay,
                    ttl=ttl,
                    headers=[headers] * len(portion) if headers else None,
                )
            ids += added
            if output is Format.table:
                typer.echo("".join(f"{each}\n" for each in added), nl=False)
    if output is Format.json:
        print_json({"count": len(ids), "ids": ids})


@queue_app.command()
def dequeue(
    directory: Directory,
    count: Count = 1,
    group: Group = DEFAULT_GROUP,
    ack: Annotated[
        bool, typer.Option(help="Ack the messages after printing, or give them back.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the next message.")] = 0.0,
    output: Output = Format.table,
) -> None:
    """Take messages and print them. They are acked when they are printed."""
    with _open(directory) as queue:
        printer = MessagePrinter(output)
        left = count
        while left and (messages := queue.dequeue_batch(min(left, PORTION), timeout, group=group)):
            printer.show(messages)
            left -= len(messages)
            if ack:
                queue.ack_batch(messages)
        # Messages that were not acked go back when the queue is closed, without spending an
        # attempt.


@queue_app.command()
def dlq(
    directory: Directory,
    redrive: Annotated[bool, typer.Option("--redrive", help="Put the dead letters back.")] = False,
    purge: Annotated[bool, typer.Option("--purge", help="Delete all dead letters.")] = False,
    reason: Annotated[str | None, typer.Option(help="Only letters with this reason.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many; the default for a list is 100.")
    ] = None,
    output: Output = Format.table,
) -> None:
    """List the dead letters, put them back, or delete them."""
    if purge and (redrive or reason is not None or limit is not None):
        raise InvalidArgument("--purge deletes all dead letters and takes no other option")
    with _open(directory) as queue:
        if purge:
            report(output, "purged", queue.purge_dead_letters(), "dead letters purged")
        elif redrive:
            report(output, "redriven", queue.redrive(reason, limit), "dead letters redriven")
        else:
            letters = queue.dead_letters(reason=reason, limit=limit or LIST_MAX)
            if output is Format.json:
                print_json([_letter_json(letter) for letter in letters])
            else:
                _print_letters(letters)


@queue_app.command()
def compact(directory: Directory, output: Output = Format.table) -> None:
    """Drop at once what every group has settled, and print the bytes freed."""
    with _open(directory) as queue:
        report(output, "freed_bytes", queue.compact(), "bytes freed")


@queue_app.command()
def verify(directory: Directory, output: Output = Format.table) -> None:
    """Read everything again. Prints one line per problem; the exit code is 1 if there is one."""
    with _open(directory) as queue:
        problems = queue.verify()
        found = queue.stats()
    if output is Format.json:
        print_json({"clean": not problems, "problems": problems, "disk_bytes": found.disk_bytes})
    elif problems:
        for problem in problems:
            typer.echo(printable(problem))
    else:
        typer.echo(f"clean: {found.total} messages, {found.disk_bytes} bytes")
    if problems:
        raise typer.Exit(1)


@contextlib.contextmanager
def _open(directory: str, *, create: bool = False, keeper: bool = False) -> "Iterator[Queue]":
    """The queue in a directory. If there is none, only `create` makes one."""
    known = os.path.exists(os.path.join(directory, FORMAT_FILE))
    if not known and not create:
        if not os.path.isdir(directory):
            raise InvalidArgument(f"there is no directory {directory}")
        raise InvalidArgument(f"{directory} is not a RaftQ queue: it has no {FORMAT_FILE}")
    from raftq.node.queue.embedded.options import EmbeddedOptions  # noqa: PLC0415 - help stays fast
    from raftq.node.queue.embedded.queue import Queue  # noqa: PLC0415

    options = _borrowed_options(directory) if known else EmbeddedOptions()
    with Queue(directory, options, keeper=keeper) as queue:
        yield queue


def _borrowed_options(directory: str) -> "EmbeddedOptions":
    """Settings with which opening a queue changes nothing that its application would miss."""
    from raftq.node.queue.embedded.options import EmbeddedOptions  # noqa: PLC0415 - help stays fast

    try:
        reserve_bytes = os.path.getsize(os.path.join(directory, "reserve"))
    except FileNotFoundError:
        reserve_bytes = 0
    return EmbeddedOptions(
        retention=None,
        dead_letter_retention=None,
        max_deliveries=1_000_000,
        visibility_timeout=86400.0,
        reserve_bytes=min(reserve_bytes, 1 << 30),
    )


class MessagePrinter:
    """Prints portions of messages, as JSON lines or as the rows of one table."""

    def __init__(self, output: Format) -> None:
        self._output = output
        self._started = False

    def show(self, messages: "Sequence[Message]") -> None:
        if self._output is Format.json:
            lines = [json.dumps(_message_json(each), ensure_ascii=False) for each in messages]
            typer.echo("".join(f"{line}\n" for line in lines), nl=False)
        elif messages:
            table = Table(box=None, show_header=not self._started, pad_edge=False, expand=True)
            for name, width in (("id", 10), ("lane", 10), ("attempt", 7), ("enqueued", 23)):
                table.add_column(name, width=width, no_wrap=True)
            table.add_column("key", width=16, no_wrap=True)
            table.add_column("value", ratio=1, no_wrap=True)
            for each in messages:
                key = "" if each.key is None else as_text(each.key)[0]
                attempt = str(each.attempt) if each.attempt else ""
                when = moment(each.timestamp)
                add_row(table, each.id, each.priority, attempt, when, key, as_text(each.value)[0])
            open_console().print(table)
        self._started = True
        # dequeue acks only messages that have left this process.
        sys.stdout.flush()


def _message_json(message: "Message") -> dict[str, Any]:
    return {
        "id": message.id,
        "offset": message.offset,
        "priority": message.priority,
        "attempt": message.attempt,
        "timestamp": message.timestamp,
        "expires_at": message.expires_at,
        **content_json(message.value, message.key, message.headers),
    }


def _letter_json(letter: "DeadMessage") -> dict[str, Any]:
    facts = {name: getattr(letter, name) for name in letter.__slots__}
    return facts | content_json(letter.value, letter.key, letter.headers)


def _print_stats(directory: str, found: "QueueStats") -> None:
    console = open_console()
    numbers = {
        "messages": found.total, "pending": found.pending, "waiting for a retry": found.waiting,
        "in flight": found.in_flight, "delayed": found.delayed, "dead letters": found.dead,
        "settled": found.settled, "damaged": found.damaged,
    }  # fmt: skip
    disk = {
        "bytes": found.disk_bytes, "segments": found.segments, "start offset": found.start_offset,
        "end offset": found.end_offset, "settled offset": found.settled_offset,
    }  # fmt: skip
    console.print(pairs_table(f"Queue {directory}", numbers.items()))
    lanes = make_table("Lanes", "lane", "pending", "total")
    for name, lane in found.lanes.items():
        add_row(lanes, name, str(lane.pending), str(lane.total))
    console.print(lanes)
    columns = list(next(iter(found.groups.values()), {}))
    groups = make_table("Groups", "group", *(column.replace("_", " ") for column in columns))
    for name, row in found.groups.items():
        add_row(groups, name, *(str(row[column]) for column in columns))
    console.print(groups)
    console.print(pairs_table("Counters of the default group", found.counters.items()))
    console.print(pairs_table("Disk", disk.items()))


def _print_letters(letters: "Sequence[DeadMessage]") -> None:
    table = make_table(
        "Dead letters", "offset", "died", "reason", "attempts", "group", "error", "value"
    )
    for each in letters:
        facts = (str(each.offset), moment(each.timestamp), each.reason, str(each.attempts))
        add_row(table, *facts, each.group, each.error, as_text(each.value)[0])
    open_console().print(table)
