"""Shell: `raftq bench`, the measurements of the folder `bench`, which is not part of the
package.
"""

import sys
from importlib import import_module

import typer

from raftq.client.common.errors import InvalidArgument

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure this machine, from a checkout. Takes the arguments of make bench (try --help)."""
    try:
        main = import_module("raftq_bench.__main__").main
    except ModuleNotFoundError as error:
        if error.name != "raftq_bench":
            raise
        raise InvalidArgument("benchmarks are not installed: run them from a checkout") from None
    sys.exit(main(context.args))
