"""Shell: `raftq spark`, ready-made Spark jobs on topics."""

from typing import TYPE_CHECKING, Annotated

import typer

from raftq.node.cli.bootstrap import ANY, Bootstrap
from raftq.node.cli.output import Format, Output, open_console, print_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from raftq.client.spark.pipelines import Done

spark_app = typer.Typer(no_args_is_help=True, help="Spark jobs: archive, replay, compact.")

Path = Annotated[str, typer.Argument(metavar="PATH", help="A directory Spark can reach.")]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The name of the topic.")]
Master = Annotated[str, typer.Option("--master", help="Where Spark runs.")]
LOCAL = "local[*]"


def _session(master: str) -> "SparkSession":
    from raftq.client.spark import local_session  # noqa: PLC0415 - loads PySpark

    return local_session(master)


def _tell(done: "Done", what: str, output: Format) -> None:
    if output is Format.json:
        print_json({"records": done.rows, "batches": done.batches})
    else:
        open_console().print(f"{done.rows:,} records {what}", highlight=False)


@spark_app.command()
def archive(
    path: Path,
    topics: Annotated[str, typer.Option("--topics", "-t", help="Names, by comma.")] = "",
    pattern: Annotated[str, typer.Option("--pattern", help="Or a regular expression.")] = "",
    master: Master = LOCAL,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Append what is new in topics to Parquet below PATH, by topic and date, exactly once."""
    from raftq.client.spark import pipelines  # noqa: PLC0415

    done = pipelines.archive(_session(master), bootstrap, path, topics, pattern)
    _tell(done, f"archived in {path} ({done.batches} batches)", output)


@spark_app.command()
def replay(  # noqa: PLR0913 - the options of a command
    path: Path,
    topic: Topic,
    to: Annotated[str, typer.Option("--to", help="Another topic to write to.")] = "",
    since: Annotated[str, typer.Option("--since", help="Like 2026-01-31 12:00:00, in UTC.")] = "",
    until: Annotated[str, typer.Option("--until", help="The end, not included.")] = "",
    rate: Annotated[int, typer.Option("--rate", min=0, help="Records a second; 0: any.")] = 0,
    write_id: Annotated[str, typer.Option("--id", help="A repetition writes nothing twice.")] = "",
    master: Master = LOCAL,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Write archived records of TOPIC back to a topic, in order."""
    from raftq.client.spark import pipelines  # noqa: PLC0415

    done = pipelines.replay(
        _session(master), bootstrap, path, topic, to, since, until, rate, write_id
    )
    _tell(done, f"replayed to {to or topic}", output)


@spark_app.command()
def compact(
    topic: Topic,
    path: Path,
    master: Master = LOCAL,
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Write the last record of each key of TOPIC as a Parquet table to PATH."""
    from raftq.client.spark import pipelines  # noqa: PLC0415

    _tell(pipelines.compact(_session(master), bootstrap, topic, path), f"kept in {path}", output)
