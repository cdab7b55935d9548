"""Shell: faults of disks: unsynced data is lost, writes and syncs fail or are slow."""

from dataclasses import dataclass
from typing import Literal

from raftq.chaos.faults.base import NodesFault
from raftq.chaos.world import DisturbedDisk, World


@dataclass(slots=True)
class PowerCut(NodesFault):
    """Kills a node, or all nodes at once, and takes away the data that was not synced.

    With `torn` a part of the last writes stays, and ends in garbage. Healing starts the nodes."""

    torn: bool = False

    @property
    def name(self) -> str:
        return f"{'torn tail of' if self.torn else 'power cut of'} {self._whom}"

    def _disturb(self, world: World) -> str:
        for node_id in self._nodes:
            world.kill(node_id)
        for node_id in self._nodes:
            if self.torn:
                world.disk(node_id).tear_unsynced()
            else:
                world.disk(node_id).lose_unsynced()
        left = "part of it" if self.torn else "nothing of it"
        return f"nodes {list(self._nodes)}: unsynced data is gone, {left} is left"


Trouble = Literal["full", "failing writes", "failing syncs", "slow syncs"]


@dataclass(slots=True)
class BadDisk(NodesFault):
    """The disk of a running node, or of all nodes, is full, fails or is slow.

    A node may end itself because of that. Healing starts it again."""

    trouble: Trouble = "full"
    seconds: float = 0.5
    """How much longer a slow sync takes."""

    @property
    def name(self) -> str:
        return f"{self.trouble} on {self._whom}"

    def _disturb(self, world: World) -> str:
        for node_id in self._nodes:
            self._disturb_disk(world.disk(node_id))
        return f"the disk of node {', '.join(map(str, self._nodes))}: {self.trouble}"

    def _disturb_disk(self, disk: DisturbedDisk) -> None:
        if self.trouble == "full":
            disk.fill()
        elif self.trouble == "failing writes":
            disk.fail_writes()
        elif self.trouble == "failing syncs":
            disk.fail_syncs()
        else:
            disk.slow_sync(self.seconds)

    def _undo(self, world: World, node_id: int) -> None:
        world.disk(node_id).heal()
        world.restart(node_id)
