"""Shell: `raftq cluster up|kill|restart`, a cluster of processes on this machine.

`up` stays in the foreground and ends its nodes when it ends. It restarts nothing by itself: it
reports a node that died, with the command that starts it again. Without --data it makes a new
directory below the system's temporary one, prints it, and keeps it.
"""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from raftq.client.common.errors import InvalidArgument
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
    from raftq.chaos.harness.local_cluster import LocalCluster
    from raftq.chaos.harness.local_files import LocalNode, Setting

CLUSTER_FILE = "cluster.json"
WATCH_S = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Data = Annotated[str, typer.Option("--data", metavar="DIR", help="The cluster's directory.")]
NodeId = Annotated[int, typer.Argument(metavar="NODE", min=1, help="The number of the node.")]
Wait = Annotated[
    float,
    typer.Option("--wait", min=0.1, max=3600, help="Fail if it takes more seconds than this."),
]


def up(  # noqa: PLR0913 - what can be said about a cluster
    nodes: Annotated[int, typer.Option(min=1, max=32, help="The number of nodes.")] = 3,
    data: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The directory; without it, a new temporary one."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="The first native port; HTTP is 100 and Raft 200 above. Free ones otherwise.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting for every node."),
    ] = None,
    wait: Wait = 60.0,
    output: Output = Format.table,
) -> None:
    """Start a cluster on this machine and keep it until Ctrl-C."""
    from raftq.chaos.harness.local_cluster import LocalCluster  # noqa: PLC0415 - help stays fast

    parsed = _parse_settings(settings or [])
    directory = _directory(data)
    cluster = LocalCluster(directory, nodes, port=port, host=host, settings=parsed)
    with _stop_signal() as stop:
        try:
            cluster.start()
            cluster.wait_ready(wait)
            stop.serving = True
            _announce(cluster, output)
            _watch(cluster, stop.asked, output)
        finally:
            _close(cluster, output)
    _say(output, f"stopped; the data is kept in {directory}")


def kill(node_id: NodeId, data: Data, output: Output = Format.table) -> None:
    """Kill one node of a local cluster with SIGKILL, as a crash would."""
    from raftq.chaos.harness.local_cluster import kill_node  # noqa: PLC0415 - help stays fast

    pid = kill_node(data, node_id)
    if output is Format.json:
        print_json({"id": node_id, "pid": pid, "killed": True})
    else:
        typer.echo(f"node {node_id} killed (process {pid})")


def restart(node_id: NodeId, data: Data, wait: Wait = 60.0, output: Output = Format.table) -> None:
    """Start a node of a local cluster again after it was killed or died."""
    from raftq.chaos.harness.local_cluster import restart_node  # noqa: PLC0415 - help stays fast

    node = restart_node(data, node_id, wait)
    if output is Format.json:
        print_json(_row(node))
    else:
        typer.echo(f"node {node_id} serves on {node.native} (process {node.pid})")


def _directory(data: str | None) -> str:
    if data is None:
        return tempfile.mkdtemp(prefix="raftq-")
    path = os.path.abspath(data)
    if os.path.exists(path) and not os.path.isdir(path):
        raise InvalidArgument(f"{path} is not a directory")
    known = os.path.exists(os.path.join(path, CLUSTER_FILE))
    if not known and os.path.isdir(path) and os.listdir(path):
        raise InvalidArgument(f"{path} is not empty and holds no cluster")
    return path


def _parse_settings(pairs: list[str]) -> "dict[str, Setting]":
    """Gives numbers and flags their TOML type. The node checks names and bounds."""
    found: dict[str, Setting] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not all(part.isidentifier() for part in name.split(".")):
            raise InvalidArgument(f"--set {pair}: not NAME=VALUE")
        if text in ("true", "false"):
            found[name] = text == "true"
        elif text.lstrip("-").isdecimal():
            found[name] = int(text)
        else:
            found[name] = text
    return found


@dataclass(slots=True)
class _Stop:
    """Handles Ctrl-C, SIGTERM and a closed terminal.

    It asks a running cluster to stop, and interrupts one that is still starting or already
    stopping."""

    asked: threading.Event = field(default_factory=threading.Event)
    serving: bool = False

    def take(self, number: int, frame: FrameType | None) -> None:
        if not self.serving or self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()


@contextmanager
def _stop_signal() -> Iterator[_Stop]:
    stop = _Stop()
    before = {number: signal.signal(number, stop.take) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _close(cluster: "LocalCluster", output: Format) -> None:
    if cluster.nodes:
        _say(output, "stopping the nodes (Ctrl-C again: at once)")
    try:
        cluster.close()
    except KeyboardInterrupt:
        cluster.close(timeout=0.0)


def _watch(cluster: "LocalCluster", stopped: threading.Event, output: Format) -> None:
    directory = cluster.files.directory
    while not stopped.wait(WATCH_S):
        for node_id in cluster.adopt():
            node = cluster.addresses(node_id)
            _say(output, f"node {node_id} is back (process {node.pid})")
        for node_id, how in cluster.died():
            again = f"raftq cluster restart {node_id} --data {directory}"
            _say(output, f"node {node_id} died ({how}); to start it again: {again}")


def _announce(cluster: "LocalCluster", output: Format) -> None:
    directory = cluster.files.directory
    rows = [cluster.addresses(node_id) for node_id in cluster.ids]
    if output is Format.json:
        facts = {"data": directory, "bootstrap": cluster.bootstrap}
        print_json(facts | {"nodes": [_row(row) for row in rows]})
        return
    table = make_table(f"Cluster in {directory}", "node", "pid", "native", "http", "raft")
    for row in rows:
        add_row(table, str(row.id), str(row.pid), row.native, row.http, row.raft)
    open_console().print(table)
    typer.echo(f"connect:  export RAFTQ_BOOTSTRAP={cluster.bootstrap}")
    typer.echo("try:      raftq topic create orders && raftq produce orders hello")
    typer.echo(f"break:    raftq cluster kill 1 --data {directory}")
    typer.echo("stop:     Ctrl-C")


def _row(node: "LocalNode") -> dict[str, str | int | None]:
    names = ("id", "pid", "host", "native", "http", "raft")
    return {name: getattr(node, name) for name in names}


def _say(output: Format, text: str) -> None:
    """Shows progress on stderr; stdout keeps the one document of --format json."""
    typer.echo(printable(text), err=output is Format.json)
