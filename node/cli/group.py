"""Shell: `raftq group`, what an operator does with groups of consumers and workers."""

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftq.client.common.errors import InvalidArgument
from raftq.node.cli.bootstrap import ANY, Bootstrap, open_admin
from raftq.node.cli.consume import parse_place
from raftq.node.cli.output import (
    Format,
    Output,
    add_row,
    make_table,
    open_console,
    print_json,
    printable,
)

if TYPE_CHECKING:
    from raftq.client.admin.results import GroupDescription

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

group_app = typer.Typer(
    no_args_is_help=True, help="Show groups, reset their positions, delete them."
)

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The name of the group.")]


@group_app.command(name="list")
def list_groups(bootstrap: Bootstrap = ANY, output: Output = Format.table) -> None:
    """List the groups that have, or had, members."""
    with open_admin(bootstrap) as admin:
        found = admin.list_groups()
    if output is Format.json:
        print_json(
            [
                {
                    "group": group.group,
                    "state": group.state,
                    "mode": group.mode,
                    "members": group.members,
                    "generation": group.generation,
                }
                for group in found
            ]
        )
        return
    table = make_table("", "group", "state", "mode", "members", "generation")
    table.title = None
    for group in found:
        add_row(
            table, group.group, group.state, group.mode, str(group.members), str(group.generation)
        )
    open_console().print(table)


@group_app.command()
def describe(group: Group, bootstrap: Bootstrap = ANY, output: Output = Format.table) -> None:
    """Show a group's members, its position in each partition, and what is left to do."""
    with open_admin(bootstrap) as admin:
        found = admin.describe_group(group)
    if output is Format.json:
        print_json(group_json(found))
        return
    console = open_console()
    facts = f"{found.mode}, {found.state}, generation {found.generation}, lag {found.lag}"
    members = make_table(f"Group {group}: {facts}", "member", "client", "host", "partitions")
    for member in found.members:
        owned = ", ".join(
            f"{partition.topic}/{partition.partition}" for partition in member.assigned
        )
        add_row(members, member.member_id, member.client_id, member.host, owned)
    console.print(members)
    columns = ("topic", "partition", "position", "end", "lag", "in flight", "waiting", "member")
    places = make_table("", *columns)
    places.title = None
    for partition in found.partitions:
        position = "" if partition.position is None else str(partition.position)
        counts = (partition.high_watermark, partition.lag, partition.in_flight, partition.waiting)
        paused = " (paused)" if partition.paused else ""
        place = (partition.topic, str(partition.partition), position + paused)
        add_row(places, *place, *map(str, counts), partition.member)
    console.print(places)


@group_app.command()
def reset(  # noqa: PLR0913 - what can be said about it
    group: Group,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The name of the topic.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="earliest, latest, an offset, a time (2026-01-31T12:00:00Z) or an age (15m).",
        ),
    ],
    partition: Annotated[
        int | None, typer.Option("-p", "--partition", min=0, help="Only this partition.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Even while the group has members.")] = False,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Set the positions of a group."""
    place = parse_place(to, time.time_ns() // 1_000_000, "--to")
    where: Any = place.to
    if place.offset is not None:
        where = place.offset
    elif place.time_ms is not None:
        where = EPOCH + timedelta(milliseconds=place.time_ms)
    with open_admin(bootstrap) as admin:
        found = admin.reset_group(group, topic, where, partition, force)
    if output is Format.json:
        print_json({"group": group, "topic": topic, "offsets": found})
        return
    table = make_table("", "topic", "partition", "offset")
    table.title = None
    for number, offset in sorted(found.items()):
        add_row(table, topic, str(number), str(offset))
    open_console().print(table)


@group_app.command()
def delete(
    group: Group,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    bootstrap: Bootstrap = ANY,
) -> None:
    """Delete a group without members: its positions and its settlements."""
    if not yes:
        raise InvalidArgument(f"this forgets where group {group!r} is; say --yes if it should")
    with open_admin(bootstrap) as admin:
        admin.delete_group(group)
    typer.echo(f"group {printable(group)} deleted")


def group_json(found: "GroupDescription") -> dict[str, Any]:
    return {
        "group": found.group,
        "state": found.state,
        "mode": found.mode,
        "generation": found.generation,
        "coordinator": found.coordinator,
        "lag": found.lag,
        "members": [
            {
                "member_id": member.member_id,
                "client_id": member.client_id,
                "instance_id": member.instance_id,
                "host": member.host,
                "topics": list(member.topics),
                "assigned": [
                    {"topic": at.topic, "partition": at.partition} for at in member.assigned
                ],
                "heartbeat_age_ms": member.heartbeat_age_ms,
            }
            for member in found.members
        ],
        "partitions": [
            {
                "topic": partition.topic,
                "partition": partition.partition,
                "position": partition.position,
                "high_watermark": partition.high_watermark,
                "lag": partition.lag,
                "member": partition.member,
                "in_flight": partition.in_flight,
                "waiting": partition.waiting,
                "paused": partition.paused,
                "counters": dict(partition.counters or {}),
            }
            for partition in found.partitions
        ],
    }
