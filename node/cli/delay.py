"""Shell: `raftq delay`, records that are not yet due: look at them, cancel them."""

from typing import Annotated, Any

import typer

from raftq.client.common.errors import OffsetOutOfRange
from raftq.client.common.names import LANE_NAMES
from raftq.node.cli.bootstrap import ANY, Bootstrap, open_admin
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
    print_json,
    report,
)

delay_app = typer.Typer(no_args_is_help=True, help="Delayed records: show, cancel, count.")

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The name of the topic.")]


@delay_app.command(name="list")
def list_delayed(
    topic: Topic,
    most: Annotated[int, typer.Option("-n", "--max", min=1, help="At most this many.")] = 100,
    partition: Annotated[
        int | None, typer.Option("-p", "--partition", min=0, help="Only this partition.")
    ] = None,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Show records that are not yet due, the next one first."""
    with open_admin(bootstrap) as admin:
        found = admin.delayed(topic, most, partition, values=True)
    if output is Format.json:
        for record in found:
            row: dict[str, Any] = {
                "topic": record.topic,
                "partition": record.partition,
                "offset": record.offset,
                "deliver_at": record.deliver_at,
                "priority": LANE_NAMES[record.priority],
            }
            print_json(row | content_json(record.value or b"", record.key, record.headers or {}))
        return
    table = make_table("", "partition", "offset", "delivered at", "lane", "value")
    table.title = None
    for record in found:
        place = (str(record.partition), str(record.offset), moment(record.deliver_at / 1000))
        add_row(table, *place, LANE_NAMES[record.priority], as_text(record.value or b"")[0])
    open_console().print(table)


@delay_app.command()
def cancel(
    topic: Topic,
    partition: Annotated[int, typer.Argument(min=0)],
    offsets: Annotated[
        list[int], typer.Argument(help="Offsets, as `list` and `produce` print them.")
    ],
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Make sure that delayed records are never seen."""
    with open_admin(bootstrap) as admin:
        found = admin.cancel_delayed(topic, partition, offsets)
    if not found:
        raise OffsetOutOfRange("none of these waits; what was due has been delivered")
    report(output, "cancelled", len(found), "delayed records cancelled")


@delay_app.command()
def stats(topic: Topic, bootstrap: Bootstrap = ANY, output: Output = Format.table) -> None:
    """Count the delayed records of a topic."""
    with open_admin(bootstrap) as admin:
        found = admin.delay_totals(topic)
    facts = {
        "pending": found.pending,
        "scheduled": found.scheduled,
        "delivered": found.fired,
        "cancelled": found.cancelled,
        "late_ms_max": found.late_ms_max,
    }
    if output is Format.json:
        print_json(facts)
    else:
        open_console().print(pairs_table(f"Delayed records of {topic}", facts.items()))
