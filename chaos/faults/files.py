"""Faults of files at rest: flipped bits, lost ends, lost files, old copies. (Shell.)

What a node keeps, below its directory:

    logs/TOPIC/N/data/*.log         segments; all but the last of a folder are sealed
    logs/TOPIC/N/data/*.index       found again by reading the segment
    logs/TOPIC/N/producers-*        snapshots of who wrote what; the newest counts
    raft/journal, raft/snapshot     the metadata
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from raftq.chaos.faults.processes import NOTHING
from raftq.chaos.faults.targets import Who, choose
from raftq.chaos.world import World
from raftq.client.common.errors import RaftqError

Kind = Literal["old segment", "segment", "index", "snapshot", "metadata"]
SPARED_BYTES = 64
"""At the start of a segment: damage goes to records, not to where they begin."""


def find(directory: Path, kind: Kind, topic: str = "") -> list[Path]:
    """Files of a node of one kind, none of them empty, in a fixed order."""
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
class _Damage:
    """Files of one node are damaged, of a running one if `live`, else while it is down.

    Healed, the node runs again. Where damage of its metadata keeps it from that, it does as it says
    and its operator replaces it: it comes back empty."""

    kind: Kind = "old segment"
    who: Who = "follower"
    topic: str = ""
    live: bool = False
    count: int = 3
    """Of files, at most."""
    needs: ClassVar[frozenset[str]] = NOTHING
    _node: int | None = field(default=None, init=False)

    def inject(self, world: World) -> str:
        self._node = node_id = choose(world, self.who, self.topic)
        if not self.live:
            world.kill(node_id)
        found = find(world.directory(node_id), self.kind, self.topic)
        chosen = sorted(world.rng.sample(found, min(self.count, len(found))))
        done = [self._damage(world, path) for path in chosen]
        base = f"{world.directory(node_id)}{os.sep}"
        if not self.live and self.kind != "metadata":
            world.restart(node_id)
        told = "; ".join(done).replace(base, "") or f"has no {self.kind} to damage"
        return f"node {node_id}: {told}"

    def _damage(self, world: World, path: Path) -> str:
        raise NotImplementedError

    def heal(self, world: World) -> None:
        if self._node is None:
            return
        node_id, self._node = self._node, None
        try:
            world.restart(node_id)
        except RaftqError:
            if self.kind != "metadata":
                raise
            world.wipe(node_id)
            world.restart(node_id)


@dataclass(slots=True)
class BitFlip(_Damage):
    """One bit of each file is another."""

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
    """Each file loses its end."""

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
    """Each file is gone."""

    @property
    def name(self) -> str:
        return f"missing {self.kind} of {self.who}"

    def _damage(self, world: World, path: Path) -> str:
        size = path.stat().st_size
        path.unlink()
        return f"{path} with its {size} bytes is gone"


@dataclass(slots=True)
class OldCopy:
    """The logs of one node go back in time: a copy is taken when this is injected, and put in
    their place when it is healed. The node is killed for both, and started again."""

    who: Who = "follower"
    topic: str = ""
    needs: ClassVar[frozenset[str]] = NOTHING
    _node: int | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"old copy on {self.who}"

    def inject(self, world: World) -> str:
        self._node = node_id = choose(world, self.who, self.topic)
        world.kill(node_id)
        shutil.rmtree(_kept(world, node_id), ignore_errors=True)
        logs = world.directory(node_id) / "logs"
        shutil.copytree(logs, _kept(world, node_id))
        world.restart(node_id)
        return f"logs of node {node_id} are copied, to be put back later"

    def heal(self, world: World) -> None:
        if self._node is None:
            return
        node_id, self._node = self._node, None
        world.kill(node_id)
        kept = _kept(world, node_id)
        logs = world.directory(node_id) / "logs"
        shutil.rmtree(logs)
        kept.rename(logs)
        world.restart(node_id)


def _kept(world: World, node_id: int) -> Path:
    directory = world.directory(node_id)
    return directory.with_name(f"{directory.name}.old-copy")
