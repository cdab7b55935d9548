"""Shell: `raftq dlq`: show dead letters, send them back, delete them."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.common.errors import InvalidArgument, UnknownTopic
from raftq.client.common.names import LANE_NAMES
from raftq.node.cli.bootstrap import ANY, Bootstrap, open_admin
from raftq.node.cli.moments import time_ms
from raftq.node.cli.output import (
    Format,
    Output,
    add_row,
    as_text,
    content_json,
    make_table,
    moment,
    open_console,
    print_json,
    report,
)

if TYPE_CHECKING:
    from raftq.client.admin.results import DeadLetter
    from raftq.client.sync.admin import Admin

dlq_app = typer.Typer(no_args_is_help=True, help="Dead letters: show, send back, delete.")

Topic = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="The source topic, not the topic of the dead letters."),
]
Group = Annotated[str | None, typer.Option("-g", "--group", help="Only letters of this group.")]
Reason = Annotated[str | None, typer.Option(help="Only letters with this reason.")]
Key = Annotated[str | None, typer.Option(help="Only letters with this key.")]
Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="Only letters that died since this time.")
]
Until = Annotated[
    str | None, typer.Option(metavar="TIME", help="Only letters that died before this time.")
]
Partition = Annotated[
    int | None, typer.Option("-p", "--partition", min=0, help="Only this partition.")
]


def _which(
    group: str | None,
    reason: str | None,
    key: str | None,
    since: str | None,
    until: str | None,
    partition: int | None,
) -> LetterFilter:
    return LetterFilter(
        group or "",
        reason or "",
        None if key is None else os.fsencode(key),
        time_ms("--since", since),
        time_ms("--until", until),
        partition,
    )


@dlq_app.command(name="list")
def list_letters(  # noqa: PLR0913 - what letters can be found by
    topic: Topic,
    most: Annotated[int, typer.Option("-n", "--max", min=1, help="At most this many.")] = 100,
    group: Group = None,
    reason: Reason = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    partition: Partition = None,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Show dead letters and why they died."""
    which = _which(group, reason, key, since, until, partition)
    with open_admin(bootstrap) as admin:
        found = admin.dead_letters(topic, most, which)
        parked = _parked(admin, topic)
    if parked:
        text = f"{parked} more records were given up, but {topic}.dlq refuses them: see the log"
        typer.echo(text, err=True)
    if output is Format.json:
        for letter in found:
            print_json(letter_json(letter))
        return
    table = make_table("", "partition", "offset", "group", "attempts", "reason", "died", "value")
    table.title = None
    for letter in found:
        place = (str(letter.partition), str(letter.offset), letter.group, str(letter.attempts))
        add_row(table, *place, letter.reason, _when(letter.last_delivery), as_text(letter.value)[0])
    open_console().print(table)


@dlq_app.command()
def redrive(  # noqa: PLR0913
    topic: Topic,
    most: Annotated[
        int | None, typer.Option("-n", "--max", min=1, help="At most this many.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="At most this many records a second.")
    ] = None,
    group: Group = None,
    reason: Reason = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    partition: Partition = None,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Send dead letters back to their topics. None is sent twice."""
    which = _which(group, reason, key, since, until, partition)
    with open_admin(bootstrap) as admin:
        count = admin.redrive(topic, most, rate, which)
    report(output, "redriven", count, "dead letters sent back")


@dlq_app.command()
def purge(  # noqa: PLR0913
    topic: Topic,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    most: Annotated[
        int | None, typer.Option("-n", "--max", min=1, help="At most this many.")
    ] = None,
    group: Group = None,
    reason: Reason = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    partition: Partition = None,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Delete dead letters for good."""
    which = _which(group, reason, key, since, until, partition)
    if not yes:
        raise InvalidArgument("this deletes dead letters for good; confirm it with --yes")
    with open_admin(bootstrap) as admin:
        count = admin.purge(topic, most, which)
    report(output, "purged", count, "dead letters forgotten")


def _parked(admin: "Admin", topic: str) -> int:
    """A topic whose own records are gone has no parked letters."""
    try:
        return admin.parked_letters(topic)
    except UnknownTopic:
        return 0


def _when(at_ms: int) -> str:
    return "" if at_ms < 0 else moment(at_ms / 1000)


def letter_json(one: "DeadLetter") -> dict[str, Any]:
    return {
        "topic": one.topic,
        "partition": one.partition,
        "offset": one.offset,
        "dead_topic": one.dead_topic,
        "dead_partition": one.dead_partition,
        "dead_offset": one.dead_offset,
        "group": one.group,
        "reason": one.reason,
        "error": one.error,
        "attempts": one.attempts,
        "first_delivery": one.first_delivery,
        "last_delivery": one.last_delivery,
        "timestamp": one.timestamp,
        "priority": LANE_NAMES[one.priority],
        **content_json(one.value, one.key, one.headers),
    }
