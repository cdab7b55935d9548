"""Shell: `python -m raftq.chaos.harness`, a node under fault injection.

It takes the arguments of `python -m raftq.node`. RAFTQ_CHAOS_CONTROL names the directory whose
files disturb its disk and its clock, RAFTQ_SABOTAGE the promises that it breaks. A production node
reads neither.
"""

import os
import sys

from raftq.chaos.harness import sabotage
from raftq.chaos.harness.node import surroundings
from raftq.node.__main__ import main
from raftq.node.app import wall_ms
from raftq.node.config import NodeConfig
from raftq.node.launch import launch
from raftq.node.logs import set_up_logs


def launch_disturbed(config: NodeConfig, ready_file: str | None) -> None:
    set_up_logs(config.log_level, config.log_format, node_id=config.node_id)
    sabotage.break_promises(os.environ.get(sabotage.VARIABLE, ""))
    launch(config, ready_file, surroundings(os.environ, config.node_id, wall_ms))


if __name__ == "__main__":
    sys.exit(main(launch=launch_disturbed))
