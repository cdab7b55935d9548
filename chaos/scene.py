"""Shell: what a workload is, and what it gets to work with.

A run calls `prepare` on a healthy cluster, `run` while faults come and go until `stopping` is set,
and `finish` when everything is healed. All three run on one event loop. Several workloads share a
scene but never a topic.
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
    """A healed cluster did not come to rest in time: something is stuck or missing."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """One run, as its clients see it."""

    bootstrap: str
    """The addresses for clients, through the proxies if there are any."""
    direct: dict[int, str]
    """The native addresses of the nodes, past the proxies, for checks."""
    history: History
    clock: Callable[[], float]
    """Seconds on the clock that nodes use for deadlines: the wall clock."""
    rng: Random
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    secret: bytes = b""
    """The cluster's secret. Without it the copies of single nodes cannot be read and compared."""
    drain_s: float = DRAIN_S
    """The time for the whole `finish` of a workload."""
    settle_s: float = SETTLE_S
    """How long the copies of a log may differ after that: one may be behind, or under repair."""


class Workload(Protocol):
    """Clients that use a cluster and note its answers."""

    name: str

    async def prepare(self, scene: Scene) -> None:
        """Creates what the workload needs, under unique names."""

    async def run(self, scene: Scene) -> None:
        """Runs until `scene.stopping` is set. Survives every error of the cluster, and notes it."""

    async def finish(self, scene: Scene, final: Final) -> None:
        """Waits until every operation has ended, and reads everything back into `final`.

        Raises NotDrained if that takes longer than `scene.drain_s`."""
