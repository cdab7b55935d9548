"""Runs one node as this process, from its settings to its exit code. (Shell.)

`python -m raftq.node` and `raftq node` both use it. Once the node serves, the ready file has its
addresses; before that the file does not exist.
"""

import asyncio
import contextlib
import json
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from raftq.client.common.errors import ConfigError
from raftq.node.config import Address, NodeConfig
from raftq.node.logs import set_up_logs
from raftq.node.process import write_atomically

if TYPE_CHECKING:
    from raftq.node.app import Surroundings


def launch(
    config: NodeConfig, ready_file: str | None = None, surroundings: "Surroundings | None" = None
) -> None:
    """Run the node until it gets SIGTERM or SIGINT. Raises the error that prevents it."""
    if sys.flags.optimize:
        raise ConfigError("a node does not run without its assertions: leave out python -O")
    set_up_logs(config.log_level, config.log_format, node_id=config.node_id)
    if ready_file is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(ready_file)
    run_node = import_module("raftq.node.app").run_node

    def ready(node: Any) -> None:
        if ready_file is not None:
            write_atomically(ready_file, json.dumps(ready_facts(config, node)) + "\n")

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run_node(config, ready, surroundings))


def ready_facts(config: NodeConfig, node: Any) -> dict[str, Any]:
    """Return the addresses of the node; ports that the kernel chose are known now."""
    http = None
    if config.http is not None:
        host = config.host if config.http.wildcard else config.http.host
        http = str(Address(host, node.http_port))
    return {
        "node_id": config.node_id,
        "pid": os.getpid(),
        "native": str(Address(config.host, config.advertised_port or node.native_port)),
        "http": http,
        "raft": config.raft_address if config.is_voter else None,
    }


def _loop_factory() -> Any:
    try:
        return import_module("uvloop").new_event_loop
    except ImportError:
        return asyncio.new_event_loop
