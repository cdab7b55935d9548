"""Shell: `python -m raftq.node`, a node without the rest of the command line.

It starts faster than `raftq node` and takes the same settings. Exit codes: 0 after a clean stop, 2
when the settings are wrong, 1 for every other reason.
"""

import argparse
import logging
import sys
from collections.abc import Callable

from raftq.client.common.errors import ConfigError, RaftqError
from raftq.node.config import NodeConfig
from raftq.node.config_source import load_config
from raftq.node.launch import launch
from raftq.node.process import die_with

logger = logging.getLogger(__name__)


Launch = Callable[[NodeConfig, str | None], None]


def main(argv: list[str] | None = None, launch: Launch = launch) -> int:
    options = _parser().parse_args(argv)
    try:
        if options.die_with is not None:
            die_with(options.die_with)
        pairs = [pair.partition("=") for pair in options.set]
        wrong = [name for name, equals, _ in pairs if not name or not equals]
        if wrong:
            raise ConfigError(f"--set {wrong[0]}: not NAME=VALUE")
        config = load_config(options.config, arguments={name: text for name, _, text in pairs})
        launch(config, options.ready_file)
    except ConfigError as error:
        return _failed(str(error), 2)
    except (RaftqError, OSError) as error:
        return _failed(str(error), 1)
    except Exception:
        logger.critical("event=node_died", exc_info=True)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m raftq.node", description="Run one node.")
    parser.add_argument("--config", metavar="FILE", help="its settings, as TOML")
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[])
    parser.add_argument("--ready-file", metavar="FILE", help="written once the node serves")
    parser.add_argument("--die-with", metavar="PID", type=int, help="end when this parent ends")
    return parser


def _failed(reason: str, code: int) -> int:
    sys.stderr.write(f"error: {reason}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
