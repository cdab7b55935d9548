"""Faults of disks: what was not synced is lost, writes and syncs fail or take long. (Shell.)"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from raftq.chaos.faults.processes import NOTHING
from raftq.chaos.faults.targets import Who, choose
from raftq.chaos.world import DisturbedDisk, World


@dataclass(slots=True)
class PowerCut:
    """A node is killed and loses what it had not synced; `who` None means all at once.

    With `torn` a part of the last writes stays, and ends in garbage. Healed, nodes start again."""

    who: Who | None = "leader"
    topic: str = ""
    torn: bool = False
    needs: ClassVar[frozenset[str]] = NOTHING
    _nodes: tuple[int, ...] = field(default=(), init=False)

    @property
    def name(self) -> str:
        what = "torn tail of" if self.torn else "power cut of"
        return f"{what} {'all' if self.who is None else self.who}"

    def inject(self, world: World) -> str:
        whole = self.who is None
        self._nodes = world.ids if whole else (choose(world, self.who or "any", self.topic),)
        for node_id in self._nodes:
            world.kill(node_id)
        for node_id in self._nodes:
            if self.torn:
                world.disk(node_id).tear_unsynced()
            else:
                world.disk(node_id).lose_unsynced()
        left = "part of it" if self.torn else "nothing of it"
        return f"nodes {list(self._nodes)}: what was not synced is gone, {left} is left"

    def heal(self, world: World) -> None:
        for node_id in self._nodes:
            world.restart(node_id)
        self._nodes = ()


Trouble = Literal["full", "failing writes", "failing syncs", "slow syncs"]


@dataclass(slots=True)
class BadDisk:
    """The disk of a running node is full, fails or is slow; `who` None means those of all nodes.
    A node may well end itself over it: healed, it is started again."""

    trouble: Trouble
    who: Who | None = "leader"
    topic: str = ""
    seconds: float = 0.5
    """How much longer a slow sync takes."""
    needs: ClassVar[frozenset[str]] = NOTHING
    _nodes: tuple[int, ...] = field(default=(), init=False)

    @property
    def name(self) -> str:
        return f"{self.trouble} on {'all' if self.who is None else self.who}"

    def inject(self, world: World) -> str:
        whole = self.who is None
        self._nodes = world.ids if whole else (choose(world, self.who or "any", self.topic),)
        for node_id in self._nodes:
            self._disturb(world.disk(node_id))
        return f"the disk of node {', '.join(map(str, self._nodes))}: {self.trouble}"

    def _disturb(self, disk: DisturbedDisk) -> None:
        if self.trouble == "full":
            disk.fill()
        elif self.trouble == "failing writes":
            disk.fail_writes()
        elif self.trouble == "failing syncs":
            disk.fail_syncs()
        else:
            disk.slow_sync(self.seconds)

    def heal(self, world: World) -> None:
        for node_id in self._nodes:
            world.disk(node_id).heal()
            world.restart(node_id)
        self._nodes = ()
