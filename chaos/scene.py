"""What workloads are given to work with, and what they are. (Shell.)

A run is: `prepare` on a whole cluster, `run` while faults come and go until `stopping` is set, and
`finish` when everything is healed. All three run on one event loop; several workloads share a scene
and never a topic.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from raftq.chaos.history import Final, History

DRAIN_S = 60.0
SETTLE_S = 20.0


class NotDrained(Exception):
    """A healed cluster did not come to rest in time: something is stuck, or still missing."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """One run, as its clients see it."""

    bootstrap: str
    """Through whatever stands between clients and nodes."""
    direct: dict[int, str]
    """The native addresses of the nodes past all that, for checks."""
    history: History
    clock: Callable[[], float]
    """Seconds on the clock that nodes tell deadlines in: the wall clock."""
    rng: Random
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    secret: bytes = b""
    """The cluster's. Only with it can the copies of single nodes be read back and compared."""
    drain_s: float = DRAIN_S
    """For the whole of a workload's `finish`."""
    settle_s: float = SETTLE_S
    """For how long the copies of a log may differ then: one may be behind, or under repair."""


class Workload(Protocol):
    """Clients that do something to a cluster and note what they are told."""

    name: str

    async def prepare(self, scene: Scene) -> None:
        """Create what it needs, under names of its own."""

    async def run(self, scene: Scene) -> None:
        """Until `scene.stopping` is set. Survives every error of the cluster, and notes it."""

    async def finish(self, scene: Scene, final: Final) -> None:
        """Wait for the end of all that is under way, read everything back into `final`.

        Raises NotDrained when that takes longer than `scene.drain_s`.
        """
