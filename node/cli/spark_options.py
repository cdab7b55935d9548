"""Shell: arguments and options that the Spark jobs have in common."""

from typing import Annotated

import typer

Path = Annotated[str, typer.Argument(metavar="PATH", help="A directory Spark can reach.")]
Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The name of the topic.")]
Topics = Annotated[str, typer.Option("--topics", "-t", help="Names, separated by commas.")]
Pattern = Annotated[str, typer.Option("--pattern", help="Or a regular expression.")]
Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="The start, like 2026-01-31T12:00:00Z.")
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="The end, not included.")]
Master = Annotated[
    str, typer.Option("--master", help="Where Spark runs: local[*], or as given to spark-submit.")
]
Bucket = Annotated[str, typer.Option("--bucket", metavar="DURATION", help="Width of the buckets.")]
Picture = Annotated[str, typer.Option("--picture", help="Another file for the picture (PNG).")]
