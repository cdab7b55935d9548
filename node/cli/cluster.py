"""Shell: `raftq cluster`, what an operator does with nodes and replicas."""

from typing import Annotated

import typer
from msgspec.structs import asdict

from raftq.client.common.errors import InvalidArgument
from raftq.node.cli import local, recover
from raftq.node.cli.bootstrap import ANY, Bootstrap, open_admin
from raftq.node.cli.output import (
    Format,
    Output,
    add_row,
    make_table,
    open_console,
    print_json,
)
from raftq.node.cli.topic import Topic, partitions_table, topic_json

cluster_app = typer.Typer(no_args_is_help=True, help="Run a local cluster; manage any cluster.")
cluster_app.command()(local.up)
cluster_app.command()(local.kill)
cluster_app.command()(local.restart)
cluster_app.command()(recover.recover)

Node = Annotated[int, typer.Argument(metavar="NODE", min=0, help="The id of the node.")]


@cluster_app.command()
def status(bootstrap: Bootstrap = ANY, output: Output = Format.table) -> None:
    """Show the state of the cluster. The exit code is 1 if a partition cannot be written or is
    in danger."""
    with open_admin(bootstrap) as admin:
        found = admin.cluster_status()
        asked = found.leaderless and output is not Format.json
        leaderless = admin.leaderless() if asked else []
    if output is Format.json:
        print_json(asdict(found))
    else:
        table = make_table(f"Cluster {found.cluster_id}", "what", "value")
        for name, value in asdict(found).items():
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            add_row(table, name.replace("_", " "), shown)
        open_console().print(table)
        recover.tell(leaderless)
    if found.leaderless or found.under_min_insync:
        raise typer.Exit(1)


@cluster_app.command()
def nodes(bootstrap: Bootstrap = ANY, output: Output = Format.table) -> None:
    """List the nodes."""
    with open_admin(bootstrap) as admin:
        found = admin.nodes()
    if output is Format.json:
        print_json([asdict(node) for node in found])
        return
    columns = list(asdict(found[0])) if found else ["node_id"]
    table = make_table("Nodes", *(column.replace("_", " ") for column in columns))
    for node in found:
        add_row(table, *(_cell(value) for value in asdict(node).values()))
    open_console().print(table)


@cluster_app.command()
def partitions(
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Only this topic.")] = None,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Show where partitions are: of one topic with offsets, or of all without."""
    with open_admin(bootstrap) as admin:
        found = admin.describe_topics() if topic is None else [admin.describe_topic(topic)]
    if output is Format.json:
        print_json([topic_json(topic) for topic in found])
    else:
        open_console().print(partitions_table(found))


@cluster_app.command()
def move(
    topic: Topic,
    partition: Annotated[int, typer.Argument(metavar="PARTITION", min=0, help="The partition.")],
    replicas: Annotated[
        str, typer.Argument(metavar="NODE,NODE", help="The nodes, the preferred leader first.")
    ],
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Start to move one partition to these nodes."""
    ids = _parse_ids(replicas)
    with open_admin(bootstrap) as admin:
        admin.move_replica(topic, partition, ids)
    if output is Format.json:
        print_json({"topic": topic, "partition": partition, "target": ids})
    else:
        typer.echo(f"{topic}/{partition} moves to {replicas}; see: raftq topic describe {topic}")


@cluster_app.command()
def drain(
    node_id: Node,
    force: Annotated[
        bool, typer.Option("--force", help="Even if a partition can then not be written.")
    ] = False,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Move leadership away from a node, before it is stopped for a while."""
    with open_admin(bootstrap) as admin:
        leading = admin.drain(node_id, force=force)
    _drained(node_id, leading, "drains", output)


@cluster_app.command()
def undrain(node_id: Node, bootstrap: Bootstrap = ANY, output: Output = Format.table) -> None:
    """Let leadership come back to a node, and cancel a decommission."""
    with open_admin(bootstrap) as admin:
        admin.drain(node_id, drain=False)
    _drained(node_id, None, "takes part again", output)


@cluster_app.command()
def decommission(
    node_id: Node,
    force: Annotated[
        bool, typer.Option("--force", help="Even if a partition can then not be written.")
    ] = False,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Move everything away from a node, before it is removed for good."""
    with open_admin(bootstrap) as admin:
        leading = admin.drain(node_id, decommission=True, force=force)
    _drained(node_id, leading, "gives its replicas away", output)


@cluster_app.command()
def remove(node_id: Node, bootstrap: Bootstrap = ANY, output: Output = Format.table) -> None:
    """Remove a node that is down and holds no replica."""
    with open_admin(bootstrap) as admin:
        admin.remove_node(node_id)
    _drained(node_id, None, "is forgotten", output)


def _drained(node_id: int, leading: int | None, what: str, output: Format) -> None:
    if output is Format.json:
        print_json({"node_id": node_id, "done": True, "leading": leading})
    else:
        still = f"; it still leads {leading} partitions" if leading else ""
        typer.echo(f"node {node_id} {what}{still}")


def _parse_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 11 for part in parts):
        raise InvalidArgument(f"{text!r} is not a list of node ids like 1,2,3")
    ids = [int(part) for part in parts]
    if len(set(ids)) != len(ids):
        raise InvalidArgument(f"{text!r} names a node twice")
    return ids


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
