"""Shell: `raftq bench`, the measurements of raftq.node.bench."""

import sys

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure this machine: same arguments as python -m raftq.node.bench (try --help)."""
    from raftq.node.bench.__main__ import main  # noqa: PLC0415 - only what a command needs

    sys.exit(main(context.args))
