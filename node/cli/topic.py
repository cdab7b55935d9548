"""Shell: `raftq topic`, what an operator does with topics."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raftq.client.common.errors import Detail, InvalidArgument
from raftq.node.cli.bootstrap import ANY, Bootstrap, open_admin
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
    from raftq.client.results import TopicDescription

topic_app = typer.Typer(no_args_is_help=True, help="Create, look at and change topics.")

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The name of the topic.")]
NewTopic = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="Its name: 1 to 245 of the characters A-Z a-z 0-9 . _ -"),
]
Config = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="NAME=VALUE", help="A setting; may be repeated."),
]


@topic_app.command()
def create(
    topic: NewTopic,
    partitions: Annotated[int, typer.Option("-p", "--partitions", min=1, max=4096)] = 3,
    replication: Annotated[
        int,
        typer.Option(
            "-r", "--replication", min=0, max=16, help="Copies; 0 means a sensible number."
        ),
    ] = 0,
    config: Config = None,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Create a topic."""
    settings = parse_config(config or [])
    with open_admin(bootstrap) as admin:
        found = admin.create_topic(topic, partitions, replication, settings)
    if output is Format.json:
        print_json(topic_json(found))
    else:
        count = f"{len(found.partitions)} partitions, replication {found.replication}"
        typer.echo(f"topic {printable(topic)} created: {count}")


@topic_app.command(name="list")
def list_topics(bootstrap: Bootstrap = ANY, output: Output = Format.table) -> None:
    """List the topics."""
    with open_admin(bootstrap) as admin:
        names = admin.list_topics()
    if output is Format.json:
        print_json(names)
    else:
        typer.echo("".join(f"{printable(name)}\n" for name in names), nl=False)


@topic_app.command()
def describe(topic: Topic, bootstrap: Bootstrap = ANY, output: Output = Format.table) -> None:
    """Show a topic's settings and where its partitions are."""
    with open_admin(bootstrap) as admin:
        found = admin.describe_topic(topic)
    if output is Format.json:
        print_json(topic_json(found))
        return
    console = open_console()
    settings = make_table(f"Topic {found.name} (id {found.topic_id})", "setting", "value")
    for name, value in found.config.items():
        add_row(settings, name, str(value))
    if found.config:
        console.print(settings)
    console.print(partitions_table([found]))
    for partition in found.partitions:
        if partition.waits_for:
            typer.echo(f"{printable(topic)}/{partition.partition} {waits(partition.waits_for)}")


@topic_app.command()
def delete(
    topic: Topic,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Delete a topic and all of its records."""
    if not yes:
        if output is Format.json or not typer.get_text_stream("stdin").isatty():
            raise InvalidArgument("deleting a topic without a terminal needs --yes")
        if not typer.confirm(f"Delete {topic!r} and all of its records?", err=True):
            raise typer.Exit(1)
    with open_admin(bootstrap) as admin:
        admin.delete_topic(topic)
    _done(output, topic, "deleted")


@topic_app.command()
def alter(
    topic: Topic, config: Config = None, bootstrap: Bootstrap = ANY, output: Output = Format.table
) -> None:
    """Change settings of a topic. NAME= resets one to its default."""
    settings = parse_config(config or [])
    if not settings:
        raise InvalidArgument("nothing to change: give --config NAME=VALUE")
    with open_admin(bootstrap) as admin:
        admin.alter_topic(topic, settings)
    _done(output, topic, "altered")


@topic_app.command()
def add_partitions(
    topic: Topic,
    total: Annotated[
        int, typer.Argument(metavar="TOTAL", min=1, max=4096, help="The new number of partitions.")
    ],
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Give a topic more partitions."""
    with open_admin(bootstrap) as admin:
        admin.add_partitions(topic, total)
    _done(output, topic, f"has {total} partitions", partitions=total)


def parse_config(pairs: Sequence[str]) -> dict[str, Detail]:
    """Converts numbers; an empty value means the default. The cluster checks names and bounds."""
    found: dict[str, Detail] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise InvalidArgument(f"--config {pair}: not NAME=VALUE")
        if name in found:
            raise InvalidArgument(f"--config {name} is given twice")
        number = text.removeprefix("-")
        whole = number.isascii() and number.isdecimal() and len(number) < 19
        found[name] = int(text) if whole else text or None
    return found


def topic_json(found: "TopicDescription") -> dict[str, Any]:
    names = (
        *("leader", "epoch", "replicas", "isr", "target", "start_offset", "high_watermark"),
        "waits_for",
    )
    return {
        "name": found.name,
        "topic_id": found.topic_id,
        "replication": found.replication,
        "config": dict(found.config),
        "partitions": [
            {"partition": partition.partition} | {name: getattr(partition, name) for name in names}
            for partition in found.partitions
        ],
    }


def partitions_table(topics: "Sequence[TopicDescription]") -> Any:
    columns = ("topic", "partition", "leader", "epoch", "replicas", "isr", "moves to", "offsets")
    table = make_table("Partitions", *columns)
    for topic in topics:
        for partition in topic.partitions:
            known = partition.start_offset is not None
            add_row(
                table,
                topic.name,
                str(partition.partition),
                "none" if partition.leader is None else str(partition.leader),
                str(partition.epoch),
                _ids(partition.replicas),
                _ids(partition.isr),
                _ids(partition.target),
                f"{partition.start_offset}..{partition.high_watermark}" if known else "",
            )
    return table


def waits(nodes: Sequence[int]) -> str:
    """Why a partition whose copies are being compared has no leader."""
    return f"waits for the ends of nodes {_ids(nodes)}: the longest copy is to lead"


def _ids(nodes: Sequence[int]) -> str:
    return ",".join(str(node) for node in nodes)


def _done(output: Format, topic: str, what: str, **facts: int) -> None:
    if output is Format.json:
        print_json({"topic": topic, "done": True} | facts)
    else:
        typer.echo(f"topic {printable(topic)} {what}")
