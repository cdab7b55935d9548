"""Shell: the command line, `raftq`. Each module beside this one holds one group of commands.

Results go to stdout, as tables or as JSON (`--format json`). Every error is one line on stderr,
with exit code 2 for a wrong call and 1 otherwise; see output.py.
"""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from raftq.node.cli import bench
from raftq.node.cli.bootstrap import DEFAULT, VARIABLE
from raftq.node.cli.chaos import chaos_app
from raftq.node.cli.cluster import cluster_app
from raftq.node.cli.consume import consume
from raftq.node.cli.delay import delay_app
from raftq.node.cli.dlq import dlq_app
from raftq.node.cli.group import group_app
from raftq.node.cli.node import node
from raftq.node.cli.output import Commands, whole_writes
from raftq.node.cli.produce import produce
from raftq.node.cli.queue import queue_app
from raftq.node.cli.spark import spark_app
from raftq.node.cli.topic import topic_app
from raftq.node.cli.work import work

__all__ = ["app", "main"]

app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(node)
app.add_typer(cluster_app, name="cluster")
app.add_typer(topic_app, name="topic")
app.command()(produce)
app.command()(consume)
app.command()(work)
app.add_typer(group_app, name="group")
app.add_typer(dlq_app, name="dlq")
app.add_typer(delay_app, name="delay")
app.add_typer(queue_app, name="queue")
app.add_typer(spark_app, name="spark")
app.command(context_settings=bench.SETTINGS)(bench.bench)
app.add_typer(chaos_app, name="chaos")


@app.callback(invoke_without_command=True)
def raftq(
    bootstrap: Annotated[
        str,
        typer.Option(
            "--bootstrap",
            "-b",
            metavar="HOST:PORT",
            envvar=VARIABLE,
            help="Any node of the cluster, or several with commas.",
        ),
    ] = DEFAULT,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """RaftQ: a durable message queue and log."""
    if show_version:
        typer.echo(f"raftq {version('raftq')}")
        raise typer.Exit


def main() -> None:
    if sys.stdout is not None:
        sys.stdout = whole_writes(sys.stdout)
    app(prog_name="raftq")
