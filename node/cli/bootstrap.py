"""Shell: how commands reach a cluster.

`--bootstrap` may stand before or after the command; the one after it wins. Next is RAFTQ_BOOTSTRAP,
then the port of a node on this machine. Only commands that need the client library import it, so
that help and local commands stay fast.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from raftq.client.sync.admin import Admin
    from raftq.client.sync.consumer import Consumer
    from raftq.client.sync.producer import Producer
    from raftq.client.sync.worker import Worker

DEFAULT = "127.0.0.1:7070"
VARIABLE = "RAFTQ_BOOTSTRAP"
NAME = "raftq command line"


def _nearest(context: typer.Context, value: str | None) -> str | None:
    """The command's own option, otherwise that of `raftq` itself, which includes the
    environment."""
    if context.parent is None or value is not None:
        return value
    return str(context.find_root().params.get("bootstrap") or DEFAULT)


Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap",
        "-b",
        metavar="HOST:PORT",
        callback=_nearest,
        show_default=False,
        help=f"Any node of the cluster, or several with commas. [{VARIABLE}, {DEFAULT}]",
    ),
]
ANY: Any = None  # the option's callback replaces it with the address


def open_admin(bootstrap: str) -> "Admin":
    from raftq.client.sync.admin import Admin  # noqa: PLC0415 - only what a command needs

    return Admin(bootstrap, name=NAME)


def open_producer(bootstrap: str, **options: Any) -> "Producer":
    from raftq.client.sync.producer import Producer  # noqa: PLC0415

    return Producer(bootstrap, name=NAME, **options)


def make_worker(bootstrap: str, **options: Any) -> "Worker":
    from raftq.client.sync.worker import Worker  # noqa: PLC0415

    return Worker(bootstrap, name=NAME, **options)


def open_consumer(bootstrap: str, **options: Any) -> "Consumer":
    from raftq.client.sync.consumer import Consumer  # noqa: PLC0415

    return Consumer(bootstrap, name=NAME, **options)
