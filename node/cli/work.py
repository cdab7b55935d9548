"""Shell: `raftq work`, a queue worker on the command line.

Every record is leased, handled and settled. Without a command it is printed, and that is all. With
one, the command gets the value on its stdin and the other fields in its environment:

    exit code 0                 the record is acked
    the code of --reject-code   it becomes a dead letter
    any other, or a signal      it is delivered again, until its attempts are used up

    RAFTQ_TOPIC, RAFTQ_PARTITION, RAFTQ_OFFSET, RAFTQ_KEY, RAFTQ_PRIORITY, RAFTQ_ATTEMPT,
    RAFTQ_TIMESTAMP (ms), RAFTQ_RECEIPT, and RAFTQ_HEADER_<NAME> for each header

Commands run in their own sessions: Ctrl-C ends the worker, which lets them finish.
"""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftq.client.common.errors import InvalidArgument
from raftq.client.common.names import LANE_NAMES
from raftq.node.cli.bootstrap import ANY, Bootstrap, make_worker
from raftq.node.cli.consume import RecordFormat, RecordPrinter
from raftq.node.cli.moments import duration_s

if TYPE_CHECKING:
    from raftq.client.queue.leased import LeasedRecord
    from raftq.client.sync.worker import Worker

WATCH_S = 0.2
GRACE_S = 30.0
ERROR_CHARACTERS_MAX = 500

_NAME = re.compile(r"[^A-Za-z0-9]+")


class CommandFailed(Exception):
    """The record is delivered again."""


def work(  # noqa: PLR0913 - what can be said about working
    topics: Annotated[
        str, typer.Argument(metavar="TOPIC", help="A topic, or several with commas.")
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND...", help="Run for every record; without it, print the record."
        ),
    ] = None,
    group: Annotated[str, typer.Option("-g", "--group", help="The name of the group.")] = "",
    concurrency: Annotated[
        int,
        typer.Option(
            "-c", "--concurrency", min=1, max=1024, help="How many commands run at a time."
        ),
    ] = 1,
    visibility: Annotated[
        str, typer.Option(metavar="DURATION", help="How long the records of a dead worker wait.")
    ] = "30s",
    limit: Annotated[
        str | None,
        typer.Option("--timeout", metavar="DURATION", help="End a command after this time."),
    ] = None,
    reject_code: Annotated[
        int | None, typer.Option(min=1, max=255, help="This exit code makes a dead letter.")
    ] = None,
    most: Annotated[
        int | None, typer.Option("-n", "--max", min=1, help="Stop after this many.")
    ] = None,
    idle: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Stop after this time without a record.")
    ] = None,
    bootstrap: Bootstrap = ANY,
    output: Annotated[
        RecordFormat, typer.Option("--format", "-f", help="How records are printed.")
    ] = RecordFormat.table,
) -> None:
    """Work on the records of a queue: print them, or run a command for each."""
    if not group:
        raise InvalidArgument("a worker needs a --group")
    names = [name for name in (each.strip() for each in topics.split(",")) if name]
    if command:
        if shutil.which(command[0]) is None:
            # A wrong call must not spend the attempts of records.
            raise InvalidArgument(f"there is no command {command[0]!r:.80}")
        handler: Handler = HandlerCommand(command, duration_s("--timeout", limit), reject_code)
    else:
        handler, concurrency = Printer(output), 1
    watch = Watch(handler, most, duration_s("--idle", idle))
    watch.worker = make_worker(
        bootstrap,
        group=group,
        topics=names,
        handler=watch.handle,
        concurrency=concurrency if most is None else min(concurrency, most),
        prefetch=None if most is None else 0,
        visibility_timeout=duration_s("--visibility", visibility),
        grace=GRACE_S,
    )
    watch.run()


class Handler:
    """Handles one record; raises if that fails."""

    def handle(self, record: "LeasedRecord") -> None:
        raise NotImplementedError


class Printer(Handler):
    def __init__(self, output: RecordFormat) -> None:
        self._printer = RecordPrinter(output, _delivery)

    def handle(self, record: "LeasedRecord") -> None:
        self._printer.show([record])


def _delivery(record: "LeasedRecord") -> dict[str, Any]:
    return {"attempt": record.attempt, "receipt": record.receipt}


class HandlerCommand(Handler):
    def __init__(
        self, command: list[str], timeout_s: float | None, reject_code: int | None
    ) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._reject_code = reject_code

    def handle(self, record: "LeasedRecord") -> None:
        from raftq.client.queue.handler_ends import Reject  # noqa: PLC0415 - only what a command needs

        try:
            code = self._run(record)
        except OSError as error:
            raise CommandFailed(f"{self._command[0]}: {error.strerror}") from None
        if code == 0:
            return
        shown = f"{self._command[0]} ended with {_code(code)}"[:ERROR_CHARACTERS_MAX]
        if code == self._reject_code:
            raise Reject("rejected", shown)
        raise CommandFailed(shown)

    def _run(self, record: "LeasedRecord") -> int:
        environment = {**os.environb, **_environment(record)}
        child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, env=environment, start_new_session=True
        )
        deadline = None if self._timeout_s is None else time.perf_counter() + self._timeout_s
        given: bytes | None = record.value
        while True:
            try:
                child.communicate(given, WATCH_S)
                return child.returncode
            except subprocess.TimeoutExpired:
                given = None
                late = deadline is not None and time.perf_counter() >= deadline
                if late or record.lost:
                    _end(child)
                    why = "took too long" if late else "lost its lease"
                    raise CommandFailed(f"{self._command[0]} {why}") from None


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ends the process with everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _environment(record: "LeasedRecord") -> dict[bytes, bytes]:
    facts: dict[str, Any] = {
        "TOPIC": record.topic,
        "PARTITION": record.partition,
        "OFFSET": record.offset,
        "PRIORITY": LANE_NAMES[record.priority],
        "ATTEMPT": record.attempt,
        "TIMESTAMP": record.timestamp,
        "RECEIPT": record.receipt,
    }
    found = {f"RAFTQ_{name}".encode(): str(fact).encode() for name, fact in facts.items()}
    if record.key is not None:
        found[b"RAFTQ_KEY"] = record.key
    for name, value in record.headers.items():
        found[b"RAFTQ_HEADER_" + _NAME.sub("_", name).upper().encode()] = value
    # No environment can hold these.
    return {name: value for name, value in found.items() if b"\0" not in value}


class Watch:
    """Counts the results of the handler, and stops the worker when there are enough."""

    worker: "Worker"

    def __init__(self, handler: Handler, most: int | None, idle_s: float | None) -> None:
        self._handler = handler
        self._most = most
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._begun = 0
        self._running = 0
        self._last = time.perf_counter()
        self._over = threading.Event()

    def run(self) -> None:
        if self._idle_s is not None:
            threading.Thread(target=self._watch, args=(self._idle_s,), daemon=True).start()
        try:
            self.worker.run()
        finally:
            self._over.set()
        counts = self.worker.counts
        told = ", ".join(f"{counts[name]} {name}" for name in ("acked", "nacked", "rejected"))
        typer.echo(told, err=True)

    def handle(self, record: "LeasedRecord") -> None:
        with self._lock:
            self._begun += 1
            self._running += 1
            enough = self._most is not None and self._begun >= self._most
        if enough:
            self.worker.stop()
        try:
            self._handler.handle(record)
        except BrokenPipeError:
            self.worker.stop()
            raise
        finally:
            with self._lock:
                self._running -= 1
                self._last = time.perf_counter()

    def _watch(self, idle_s: float) -> None:
        while not self._over.wait(min(idle_s, WATCH_S)):
            with self._lock:
                quiet_s = 0.0 if self._running else time.perf_counter() - self._last
            if quiet_s >= idle_s:
                self.worker.stop()
                return
