"""Shell: faults of files at rest: flipped bits, truncated files, deleted files, old copies.

The files of a node, below its directory:

    logs/TOPIC/N/data/*.log         segments; all but the last of a folder are sealed
    logs/TOPIC/N/data/*.index       can be rebuilt from the segment
    logs/TOPIC/N/producers-*        snapshots of producer state; the newest counts
    raft/journal, raft/snapshot     the metadata
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raftq.chaos.faults.base import NodeFault
from raftq.chaos.faults.targets import Who
from raftq.chaos.world import World
from raftq.client.common.errors import RaftqError

Kind = Literal["old segment", "segment", "index", "snapshot", "metadata"]
SPARED_BYTES = 64
"""At the start of a segment: damage hits records, not the header of the file."""


def find(directory: Path, kind: Kind, topic: str = "") -> list[Path]:
    """Lists the non-empty files of one kind, in a fixed order."""
    logs = sorted(directory.glob(f"logs/{topic}*/*/data/*.log"))
    if kind == "metadata":
        found = [directory / "raft" / "journal", directory / "raft" / "snapshot"]
    elif kind == "index":
        found = sorted(directory.glob(f"logs/{topic}*/*/data/*.index"))
    elif kind == "snapshot":
        found = sorted(directory.glob(f"logs/{topic}*/*/producers-*.snapshot"))
    elif kind == "segment":
        found = logs
    else:
        newest = {path.parent: path for path in logs}
        found = [path for path in logs if path != newest[path.parent]]
    return [path for path in found if path.is_file() and path.stat().st_size > 0]


@dataclass(slots=True)
class _Damage(NodeFault):
    """Damages files of one node, while it runs if `live`, otherwise while it is down.

    Healing starts the node. If damaged metadata prevents that, its data is deleted and it starts
    empty, as an operator would do it."""

    who: Who = "follower"
    kind: Kind = "old segment"
    live: bool = False
    count: int = 3
    """The number of files, at most."""

    def _disturb(self, world: World, node_id: int) -> str:
        if not self.live:
            world.kill(node_id)
        found = find(world.directory(node_id), self.kind, self.topic)
        chosen = sorted(world.rng.sample(found, min(self.count, len(found))))
        done = [self._damage(world, path) for path in chosen]
        base = f"{world.directory(node_id)}{os.sep}"
        if not self.live and self.kind != "metadata":
            world.restart(node_id)
        text = "; ".join(done).replace(base, "") or f"has no {self.kind} to damage"
        return f"node {node_id}: {text}"

    def _damage(self, world: World, path: Path) -> str:
        raise NotImplementedError

    def _undo(self, world: World, node_id: int) -> None:
        self._node = None
        try:
            world.restart(node_id)
        except RaftqError:
            if self.kind != "metadata":
                raise
            world.wipe(node_id)
            world.restart(node_id)


@dataclass(slots=True)
class BitFlip(_Damage):
    """Flips one bit of each file."""

    @property
    def name(self) -> str:
        return f"bit flip in {self.kind} of {self.who}"

    def _damage(self, world: World, path: Path) -> str:
        size = path.stat().st_size
        first = SPARED_BYTES if size > 2 * SPARED_BYTES else 0
        position, bit = world.rng.randrange(first, size), world.rng.randrange(8)
        with path.open("r+b") as file:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1 << bit]))
        return f"bit {bit} of byte {position} in {path}"


@dataclass(slots=True)
class Truncate(_Damage):
    """Truncates each file."""

    @property
    def name(self) -> str:
        return f"truncated {self.kind} of {self.who}"

    def _damage(self, world: World, path: Path) -> str:
        size = path.stat().st_size
        left = world.rng.randrange(size)
        os.truncate(path, left)
        return f"{path} has {left} of {size} bytes"


@dataclass(slots=True)
class Remove(_Damage):
    """Deletes each file."""

    @property
    def name(self) -> str:
        return f"missing {self.kind} of {self.who}"

    def _damage(self, world: World, path: Path) -> str:
        size = path.stat().st_size
        path.unlink()
        return f"{path} with its {size} bytes is gone"


@dataclass(slots=True)
class OldCopy(NodeFault):
    """The logs of one node go back in time.

    `inject` copies the logs, `heal` puts that copy in their place. Both kill the node first and
    start it again afterwards."""

    who: Who = "follower"

    @property
    def name(self) -> str:
        return f"old copy on {self.who}"

    def _disturb(self, world: World, node_id: int) -> str:
        world.kill(node_id)
        shutil.rmtree(_kept(world, node_id), ignore_errors=True)
        logs = world.directory(node_id) / "logs"
        shutil.copytree(logs, _kept(world, node_id))
        world.restart(node_id)
        return f"logs of node {node_id} are copied, to be put back later"

    def _undo(self, world: World, node_id: int) -> None:
        self._node = None
        world.kill(node_id)
        kept = _kept(world, node_id)
        logs = world.directory(node_id) / "logs"
        shutil.rmtree(logs)
        kept.rename(logs)
        world.restart(node_id)


def _kept(world: World, node_id: int) -> Path:
    directory = world.directory(node_id)
    return directory.with_name(f"{directory.name}.old-copy")
