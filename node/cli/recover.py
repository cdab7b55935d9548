"""Shell: `raftq cluster recover`, for partitions whose isr never comes back."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftq.client.common.errors import InvalidArgument, RaftqError
from raftq.node.cli.bootstrap import ANY, Bootstrap, open_admin
from raftq.node.cli.output import Format, Output, print_json, printable
from raftq.node.cli.topic import waits

if TYPE_CHECKING:
    from raftq.client.admin.recovery import Leaderless, ReplicaCopy
    from raftq.client.sync.admin import Admin

SHOWN_MAX = 20
STRANDS = ("data", "ledger", "delays")


def recover(
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Only this topic.")] = None,
    partition: Annotated[
        int | None, typer.Argument(metavar="PARTITION", min=0, help="Only this partition.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be done.")
    ] = False,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Give partitions without a leader the longest copy that is alive: a last resort.

    Use it if the nodes that were in sync never come back. Records that only they had are lost. If
    one can still be brought back with its disk, do that instead: it leads again, and nothing is
    lost."""
    with open_admin(bootstrap) as admin:
        found = _found(admin, topic, partition)
        able = [partition for partition in found if partition.copies]
        if dry_run or not able:
            _show(found, output)
            raise typer.Exit(1 if len(able) < len(found) else 0)
        if output is not Format.json:
            _show(found, output)
        if not yes:
            _confirm(able, output)
        results = [_recovered(admin, partition) for partition in able]
    if output is Format.json:
        print_json(results)
    else:
        for result in results:
            typer.echo(f"{printable(result['topic'])}/{result['partition']}: {_outcome(result)}")
    if len(able) < len(found) or any(result["error"] for result in results):
        raise typer.Exit(1)


def _found(admin: "Admin", topic: str | None, partition: int | None) -> "list[Leaderless]":
    found = admin.leaderless(topic, partition)
    if not found and topic is not None and partition is not None:
        parts = admin.describe_topic(topic).partitions
        if partition >= len(parts):
            raise InvalidArgument(f"topic {topic!r} has {len(parts)} partitions")
        raise InvalidArgument(
            f"{topic}/{partition} needs no recovery: node {parts[partition].leader} of its isr is "
            "alive, and leads it"
        )
    return found


def _confirm(able: "Sequence[Leaderless]", output: Format) -> None:
    if output is Format.json or not typer.get_text_stream("stdin").isatty():
        raise InvalidArgument("recovering without a terminal needs --yes")
    question = f"Give up what only nodes that are gone had, of {len(able)} partitions?"
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def _recovered(admin: "Admin", one: "Leaderless") -> dict[str, Any]:
    result: dict[str, Any] = {"topic": one.topic, "partition": one.partition, "leader": None}
    try:
        return result | {
            "leader": admin.recover(one.topic, one.partition, one.version),
            "error": "",
        }
    except RaftqError as error:
        return result | {"error": str(error)}


def _outcome(result: dict[str, Any]) -> str:
    return result["error"] or f"node {result['leader']} leads"


def _show(found: "Sequence[Leaderless]", output: Format) -> None:
    if output is Format.json:
        print_json([asdict(partition) | {"lost_min": partition.lost_min} for partition in found])
    elif not found:
        typer.echo("every partition has a leader")
    for partition in found if output is not Format.json else ():
        _show_one(partition)


def _show_one(one: "Leaderless") -> None:
    typer.echo(f"{printable(one.topic)}/{one.partition} has no leader: {_why(one)}")
    for at, copy in enumerate(one.copies):
        would = "; it would lead" if at == 0 else ""
        typer.echo(
            f"  node {copy.node_id}: {_ends(copy)}, readable to {copy.high_watermark}{would}"
        )
    if one.silent:
        typer.echo(f"  not known: the copies on nodes {_ids(one.silent)}")
    if not one.copies:
        typer.echo("  nothing can be done: no copy is on a node that is alive")
        return
    gone = f"nodes {_ids(one.silent)}" if one.silent else "nodes that lost their disks"
    typer.echo(
        f"  lost then: what only {gone} had from offset {one.copies[0].end_offset} on; at least "
        f"{one.lost_min} records, how many at most is not known here"
    )


def _why(one: "Leaderless") -> str:
    if one.waits_for:
        return f"it {waits(one.waits_for)}"
    return f"no node of its isr ({_ids(one.isr)}) is alive"


def _ends(copy: "ReplicaCopy") -> str:
    parts = [
        f"{name} epoch {epoch}, ends at {end}"
        for name, (epoch, end) in zip(STRANDS, copy.ends, strict=False)
    ]
    return "; ".join(parts)


def _ids(nodes: Sequence[int]) -> str:
    return ",".join(map(str, nodes))


def tell(leaderless: "Sequence[Leaderless]") -> None:
    """Says why partitions have no leader, for `raftq cluster status`."""
    for partition in leaderless[:SHOWN_MAX]:
        typer.echo(
            f"{printable(partition.topic)}/{partition.partition} has no leader: {_why(partition)}"
        )
    if len(leaderless) > SHOWN_MAX:
        typer.echo(f"... and {len(leaderless) - SHOWN_MAX} more")
    if leaderless:
        typer.echo("if those nodes never come back: raftq cluster recover --dry-run")
