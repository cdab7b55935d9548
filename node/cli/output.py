"""Shell: what the commands print, and how errors end them.

Results go to stdout, as tables or as JSON. Every error is one line on stderr, with exit code 2 for
a wrong call and 1 otherwise. Foreign bytes are shown without markup and control characters; JSON
keeps every byte.
"""

import base64
import errno
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from raftq.client.common.errors import ConfigError, InvalidArgument, RaftqError, TooLarge
from raftq.client.wire.record import VALUE_BYTES_MAX, Headers

STDIN_BYTES = 1024 * 1024
CELL_CHARS_MAX = 200
PIPE_COLUMNS = 160
INTERRUPTED = 130
TRACEBACK = "RAFTQ_TRACEBACK"

# typer carries its own copy of click from some version on; both have the same classes.
UsageError: Any = typer.BadParameter.__base__


class Format(StrEnum):
    """How results are written."""

    table = "table"
    json = "json"


class Commands(TyperGroup):
    """A group of commands. It turns errors into a line on stderr and an exit code."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().make_context(*arguments, **options)
        except UsageError as error:
            _wrong_call(error)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            _wrong_call(error)
        except RaftqError as error:
            fail(str(error), 2 if isinstance(error, InvalidArgument | ConfigError) else 1)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of a pipe is gone; typer ends quietly
            fail(str(error), 1)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if os.environ.get(TRACEBACK):
                raise
            fail(f"this should not happen ({TRACEBACK}=1 shows where): {error!r}", 1)


Output = Annotated[Format, typer.Option("--format", "-f", help="How results are written.")]


def whole_writes(stream: TextIO) -> TextIO:
    """Returns the stream, or a wrapper of it that never writes only a part.

    An unbuffered stdout (python -u, PYTHONUNBUFFERED) drops what a pipe did not accept at once, and
    `dequeue` acks what it has printed."""
    raw = getattr(stream, "buffer", None)
    if not isinstance(raw, io.RawIOBase):
        return stream
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=True)


def fail(reason: str, code: int) -> NoReturn:
    typer.echo(f"error: {printable(reason)}", err=True)
    raise typer.Exit(code)


def _wrong_call(error: Any) -> NoReturn:
    if type(error).__name__ == "NoArgsIsHelpError":
        raise error
    fail(error.format_message(), 2)


def print_json(document: object) -> None:
    typer.echo(json.dumps(document, ensure_ascii=False))


def report(output: Format, name: str, count: int, what: str) -> None:
    if output is Format.json:
        print_json({name: count})
    else:
        typer.echo(f"{count} {what}")


def parse_headers(pairs: Sequence[str]) -> Headers:
    headers: Headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise InvalidArgument(f"header {pair!r} is not NAME=VALUE")
        headers[name] = os.fsencode(value)
    return headers


def stdin_lines() -> Iterator[list[bytes]]:
    return read_lines(typer.get_binary_stream("stdin"), "stdin")


def read_lines(stream: Any, name: str) -> Iterator[list[bytes]]:
    """Yields lines as they arrive, without their newline. A line does not wait for the next one."""
    rest = b""
    while chunk := stream.read1(STDIN_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > VALUE_BYTES_MAX:
            raise TooLarge(f"a line of {name} is over the limit of {VALUE_BYTES_MAX} bytes")
        if lines:
            yield lines
    if rest:
        yield [rest]


def as_text(data: bytes) -> tuple[str, str]:
    """Bytes as text, and the encoding: UTF-8 if they are, otherwise base64."""
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode("ascii"), "base64"


def content_json(value: bytes, key: bytes | None, headers: Mapping[str, bytes]) -> dict[str, Any]:
    """The fields of a message that its sender wrote. `encoding` is that of the value."""
    content: dict[str, Any] = {}
    content["value"], content["encoding"] = as_text(value)
    content["key"] = None
    if key is not None:
        content["key"], content["key_encoding"] = as_text(key)
    texts = {name: as_text(item) for name, item in headers.items()}
    content["headers"] = {name: text for name, (text, _) in texts.items()}
    binary = [name for name, (_, encoding) in texts.items() if encoding == "base64"]
    if binary:
        content["base64_headers"] = binary
    return content


def pairs_table(title: str, pairs: Iterable[tuple[str, int]]) -> Table:
    table = make_table(title, "what", "count")
    for name, number in pairs:
        add_row(table, name, str(number))
    return table


def make_table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="ellipsis")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Adds a row of foreign text, without markup and control characters, and shortened."""
    table.add_row(*(Text(printable(cell[:CELL_CHARS_MAX])) for cell in cells))


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def moment(timestamp: float) -> str:
    try:
        moment = datetime.fromtimestamp(timestamp, UTC)
    except (ValueError, OverflowError, OSError):
        return str(timestamp)  # the clock was far off when the message was enqueued
    return moment.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def open_console() -> Console:
    """In a pipe there are no colours and no terminal width."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
