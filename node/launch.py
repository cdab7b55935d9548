"""Runs one node as this process, from its settings to its exit code. (Shell.)

The one way in for `python -m raftq.node` and `raftq node`. Once the node serves, the ready file
tells its addresses; before, it does not exist.
"""

import asyncio
import contextlib
import json
import os
import sys
from importlib import import_module
from typing import Any

from raftq.client.wire.errors import ConfigError
from raftq.node.config import Address, NodeConfig
from raftq.node.logs import set_up_logs
from raftq.node.process import write_atomically


def launch(config: NodeConfig, ready_file: str | None = None) -> None:
    """Runs the node until it is told to stop (SIGTERM, SIGINT); raises why it could not."""
    if sys.flags.optimize:
        raise ConfigError("a node does not run without its assertions: leave out python -O")
    set_up_logs(config.log_level, config.log_format, node_id=config.node_id)
    if ready_file is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(ready_file)
    run_node = import_module("raftq.node.app").run_node
    if broken := os.environ.get("RAFTQ_SABOTAGE"):
        import_module("raftq.node.sabotage").break_promises(broken)

    def ready(node: Any) -> None:
        if ready_file is not None:
            write_atomically(ready_file, json.dumps(ready_facts(config, node)) + "\n")

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run_node(config, ready))


def ready_facts(config: NodeConfig, node: Any) -> dict[str, Any]:
    """Where the node is reached; ports that were free ones are now known."""
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
