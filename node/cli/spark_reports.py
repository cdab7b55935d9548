"""Shell: `raftq spark dlq-report` and `latency-report`: their tables and their JSON."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from raftq.client.common.errors import InvalidArgument
from raftq.client.common.names import DLQ_SUFFIX
from raftq.node.cli.bootstrap import ANY, Bootstrap
from raftq.node.cli.moments import duration_s, time_ms
from raftq.node.cli.output import (
    Format,
    Output,
    add_row,
    make_table,
    moment,
    open_console,
    print_json,
)
from raftq.node.cli.spark_checks import job, names, need_place, need_spark, need_topics
from raftq.node.cli.spark_options import (
    Bucket,
    Master,
    Path,
    Pattern,
    Picture,
    Since,
    Topics,
    Until,
)

if TYPE_CHECKING:
    from raftq.client.spark.pipelines import LatencyReport, LetterReport


def dlq_report(  # noqa: PLR0913 - the options of a command
    path: Path,
    topics: Topics = "",
    pattern: Pattern = "",
    since: Since = None,
    until: Until = None,
    bucket: Bucket = "1h",
    picture: Picture = "",
    master: Master = "",
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """Dead letters by topic, group, reason and time: a Parquet table and a picture below PATH.

    Topics are the sources of the letters, as in `raftq dlq`; without any, all topics."""
    which = _selection(bootstrap, topics, pattern, since, until, bucket)
    need_spark()
    need_topics(bootstrap, which["topics"], pattern, DLQ_SUFFIX)
    need_place(path, master)
    from raftq.client.spark import pipelines  # noqa: PLC0415 - loads PySpark

    with job(master) as spark:
        report = pipelines.dead_letter_report(spark, pipelines.Selection(**which), path, picture)
    if output is Format.json:
        print_json(_letters_json(report))
        return
    console = open_console()
    console.print(_letters_table(report))
    _tell_files(report)


def latency_report(  # noqa: PLR0913
    path: Path,
    origin: Annotated[str, typer.Option("--origin", help="header:NAME, json:FIELD or topic:NAME.")],
    topics: Topics = "",
    pattern: Pattern = "",
    match: Annotated[
        str, typer.Option("--match", help="With topic:NAME: key, or header:NAME.")
    ] = "key",
    since: Since = None,
    until: Until = None,
    bucket: Bucket = "1m",
    picture: Picture = "",
    master: Master = "",
    bootstrap: Bootstrap = ANY,
    output: Output = Format.table,
) -> None:
    """How long records took from their origin: a Parquet table and a picture below PATH.

    Latency is a record's timestamp minus its origin: a time in a header or in a field of its JSON
    value, or the time of the last record upstream with the same key or header."""
    which = _selection(bootstrap, topics, pattern, since, until, bucket)
    if not topics and not pattern:
        raise InvalidArgument("a latency report needs --topics or --pattern")
    need_spark()
    from raftq.client.spark import pipelines  # noqa: PLC0415

    begun = pipelines.parse_origin(origin, match)
    upstream = (begun.name,) if begun.kind == "topic" else ()
    need_topics(bootstrap, (*which["topics"], *upstream), pattern)
    need_place(path, master)
    with job(master) as spark:
        chosen = pipelines.Selection(**which)
        report = pipelines.latency_report(spark, chosen, begun, path, picture)
    if output is Format.json:
        print_json(_latency_json(report))
        return
    open_console().print(_latency_table(report))
    _tell_files(report)


def _selection(
    bootstrap: str,
    topics: str,
    pattern: str,
    since: str | None,
    until: str | None,
    bucket: str,
) -> dict[str, Any]:
    if topics and pattern:
        raise InvalidArgument("--topics and --pattern exclude each other")
    width_s = duration_s("--bucket", bucket) or 0.0
    if width_s < 1:
        raise InvalidArgument(f"--bucket {bucket!r:.40} is less than a second")
    return {
        "bootstrap": bootstrap,
        "topics": names(topics),
        "pattern": pattern,
        "since_ms": time_ms("--since", since),
        "until_ms": time_ms("--until", until),
        "bucket_ms": round(width_s * 1000),
    }


def _letters_table(report: "LetterReport") -> Table:
    title = f"{report.letters:,} dead letters"
    if report.kinds > len(report.rows):
        title += f"; the {len(report.rows)} most frequent of {report.kinds:,} kinds"
    columns = ("topic", "group", "reason", "letters", "share", "attempts", "first", "last")
    table = make_table(title, *columns, "last error")
    for name in ("letters", "share", "attempts"):
        table.columns[columns.index(name)].justify = "right"
    for row in report.rows:
        share = f"{row['letters'] / report.letters:.1%}"
        attempts = "" if row["attempts_max"] is None else str(row["attempts_max"])
        times = (_second(row["first"]), _second(row["last"]))
        where = (row["topic"], row["group"], row["reason"], f"{row['letters']:,}")
        add_row(table, *where, share, attempts, *times, row["last_error"] or "")
    return table


def _letters_json(report: "LetterReport") -> dict[str, Any]:
    rows = [{**row, "first": _ms(row["first"]), "last": _ms(row["last"])} for row in report.rows]
    return {"letters": report.letters, "kinds": report.kinds, "rows": rows, **_files_json(report)}


def _latency_table(report: "LatencyReport") -> Table:
    from raftq.client.spark.pipelines.drawing import duration  # noqa: PLC0415

    title = "Latency by topic"
    if report.topics > len(report.rows):
        title += f"; the {len(report.rows)} largest of {report.topics:,}"
    numbers = ("records", "without origin", "early", "p50", "p90", "p99", "max")
    table = make_table(title, "topic", *numbers)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        counts = [f"{row[name]:,}" for name in ("records", "without_origin", "early")]
        times = [row[name] for name in ("p50_ms", "p90_ms", "p99_ms", "max_ms")]
        add_row(table, row["topic"], *counts, *["" if t is None else duration(t) for t in times])
    return table


def _latency_json(report: "LatencyReport") -> dict[str, Any]:
    return {"topics": report.topics, "rows": report.rows, **_files_json(report)}


def _tell_files(report: "LetterReport | LatencyReport") -> None:
    picture = report.picture
    typer.echo(f"table:   {report.table}")
    typer.echo(f"picture: {picture.path}" if picture.path else picture.why_not)


def _files_json(report: "LetterReport | LatencyReport") -> dict[str, str]:
    picture = report.picture
    files = {"table": report.table, "picture": picture.path}
    return {**files, "note": picture.why_not} if picture.why_not else files


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def _second(at: datetime) -> str:
    return moment(at.timestamp())[:19]
