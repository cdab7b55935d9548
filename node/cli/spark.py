"""Shell: `raftq spark`, ready-made Spark jobs on topics.

spark-submit starts the same commands through a file, see spark_submitted.py.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from raftq.client.common.errors import InvalidArgument
from raftq.node.cli import spark_submitted
from raftq.node.cli.bootstrap import ANY, Bootstrap
from raftq.node.cli.moments import time_ms
from raftq.node.cli.output import Format, Output, open_console, print_json
from raftq.node.cli.spark_checks import (
    job,
    names,
    need_archive,
    need_place,
    need_spark,
    need_topics,
)
from raftq.node.cli.spark_options import Master, Path, Pattern, Since, Topic, Topics, Until
from raftq.node.cli.spark_reports import dlq_report, latency_report

if TYPE_CHECKING:
    from raftq.client.spark.pipelines import ArchiveProgress, Done

spark_app = typer.Typer(no_args_is_help=True, help="Spark jobs: archive, replay, compact, reports.")
spark_app.command(name="dlq-report")(dlq_report)
spark_app.command(name="latency-report")(latency_report)


def _tell(done: "Done", what: str, output: Format) -> None:
    if output is Format.json:
        seconds = round(done.seconds, 3)
        print_json({"records": done.rows, "batches": done.batches, "seconds": seconds})
    else:
        took = f"in {done.seconds:.1f} s ({done.rate:,.0f}/s)"
        open_console().print(f"{done.rows:,} records {what} {took}", highlight=False)


def _tell_progress(progress: "ArchiveProgress") -> None:
    """Shows progress on stderr, so that the output of a job can be piped."""
    typer.echo(
        f"batch {progress.batch}: {progress.rows:,} records, {progress.rows_total:,} in "
        f"{progress.seconds:.1f} s ({progress.rate:,.0f}/s)",
        err=True,
    )


@spark_app.command()
def archive(  # noqa: PLR0913 - the options of a command
    path: Path,
    topics: Topics = "",
    pattern: Pattern = "",
    per_batch: Annotated[
        int, typer.Option("--batch", min=1, help="Records per micro-batch.")
    ] = 2_000_000,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Continue if retention has removed unread records.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    master: Master = "",
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Append what is new in topics to Parquet below PATH, by topic and date, exactly once."""
    if bool(topics) == bool(pattern):
        raise InvalidArgument("an archive needs --topics or --pattern, and not both")
    need_spark()
    need_topics(bootstrap, names(topics), pattern)
    need_place(path, master)
    from raftq.client.spark import pipelines  # noqa: PLC0415 - loads PySpark

    with job(master) as spark:
        told = None if quiet else _tell_progress
        done = pipelines.archive(
            spark, bootstrap, path, topics, pattern, per_batch, told, skip_lost
        )
    _tell(done, f"archived in {path}, {done.batches} batches,", output)


@spark_app.command()
def replay(  # noqa: PLR0913
    path: Path,
    topic: Topic,
    to: Annotated[str, typer.Option("--to", help="Another topic to write to.")] = "",
    since: Since = None,
    until: Until = None,
    rate: Annotated[
        int, typer.Option("--rate", min=0, help="Records a second; 0 means no limit.")
    ] = 0,
    write_id: Annotated[
        str, typer.Option("--id", help="A name for this write: a repetition writes nothing twice.")
    ] = "",
    master: Master = "",
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Write archived records of TOPIC back to a topic, in order."""
    since_ms, until_ms = time_ms("--since", since), time_ms("--until", until)
    need_spark()
    need_archive(path, master)
    need_topics(bootstrap, (to or topic,))
    from raftq.client.spark import pipelines  # noqa: PLC0415

    wanted = pipelines.Replay(
        topic=topic, to=to, since_ms=since_ms, until_ms=until_ms, rate=rate, write_id=write_id
    )
    with job(master) as spark:
        done = pipelines.replay(spark, bootstrap, path, wanted)
    _tell(done, f"replayed to {to or topic}", output)


@spark_app.command()
def compact(
    topic: Topic,
    path: Path,
    master: Master = "",
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Write the last record of each key of TOPIC as a Parquet table to PATH."""
    need_spark()
    need_topics(bootstrap, (topic,))
    need_place(path, master)
    from raftq.client.spark import pipelines  # noqa: PLC0415

    with job(master) as spark:
        done = pipelines.compact(spark, bootstrap, topic, path)
    _tell(done, f"kept in {path}", output)


@spark_app.command(name="file")
def job_file() -> None:
    """Print the file for spark-submit: spark-submit $(raftq spark file) archive ..."""
    typer.echo(spark_submitted.__file__)
