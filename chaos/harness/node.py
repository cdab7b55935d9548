"""Shell: a node under fault injection: its disk and its clock can be disturbed from outside.

This needs a directory in RAFTQ_CHAOS_CONTROL, and the log says so loudly. The harness writes
`node-N.json` there, always as a whole. The node reads it before each operation, so a change takes
effect at once and after a restart.

    {"slow_sync_s": 0.0, "fail_writes": false, "fail_syncs": false, "full": false,
     "clock_s": 0.0, "boot": ""}

Changes that are not durable yet are noted in `node-N.unsynced` (see `power_cut`). `boot` replaces
the kernel's boot id if it is set: after a simulated power cut the node must see another boot.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from raftq.chaos.harness.faulty_disk import FaultyDisk
from raftq.chaos.harness.power_cut import Unsynced
from raftq.node.app import Surroundings
from raftq.node.identity import boot_id
from raftq.node.process import write_atomically

logger = logging.getLogger(__name__)

VARIABLE = "RAFTQ_CHAOS_CONTROL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbances:
    """The disturbances of one node."""

    slow_sync_s: float = 0.0
    fail_writes: bool = False
    fail_syncs: bool = False
    full: bool = False
    clock_s: float = 0.0
    boot: str = ""


class Control:
    """The node's view of its file: the newest complete content. Without a file nothing is
    disturbed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._known = Disturbances()

    def __call__(self) -> Disturbances:
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return self._known
        seen = (stat.st_ino, stat.st_mtime_ns)
        if seen != self._seen:
            with open(self._path, encoding="utf-8") as file:
                self._known = Disturbances(**json.load(file))
            self._seen = seen
            logger.warning("event=chaos_disturbed %s", self._known)
        return self._known


def surroundings(
    environment: Mapping[str, str], node_id: int, wall_ms: Callable[[], int]
) -> Surroundings | None:
    """The surroundings of a node under fault injection; None if the environment names no
    directory."""
    directory = environment.get(VARIABLE)
    if not directory:
        return None
    logger.critical(
        "event=chaos node=%d runs under fault injection: its disk and its clock obey files in %s "
        "(%s is set). Never do this with data that matters",
        node_id, directory, VARIABLE,
    )  # fmt: skip
    control = Control(control_path(directory, node_id))
    disk = FaultyDisk(control, Unsynced(unsynced_path(directory, node_id)))
    return Surroundings(
        disk=disk,
        wall_ms=lambda: wall_ms() + int(control().clock_s * 1000),
        boot=control().boot or boot_id(),
    )


def control_path(directory: str, node_id: int) -> str:
    return os.path.join(directory, f"node-{node_id}.json")


def unsynced_path(directory: str, node_id: int) -> str:
    return os.path.join(directory, f"node-{node_id}.unsynced")


def write_control(directory: str, node_id: int, disturbances: Disturbances) -> None:
    """Called by the harness: replaces the disturbances of a node."""
    write_atomically(control_path(directory, node_id), json.dumps(asdict(disturbances)) + "\n")
