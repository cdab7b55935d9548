"""What a fault may do to a cluster, and what a fault is. (Interface.)

Faults are written against `World`, never against processes or proxies, so the same fault drives a
cluster of real processes behind toxiproxy (`raftq.chaos.harness.world`) and whatever else can be
told the same things.

Links are pairs `(source, target)` of node ids, and `CLIENTS` stands for all clients. A link carries
what its source opens towards its target: requests of the source go down it and the answers come
back on it. So cutting `(1, 2)` but not `(2, 1)` lets node 2 still ask node 1.

Calls block, and are made from one thread at a time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol, runtime_checkable

from raftq.client.common.errors import Detail

CLIENTS = 0
"""The source of client links."""

TOXIPROXY = "toxiproxy"
"""Ability: links can be disturbed."""
CLOCK = "faketime"
"""Ability: the wall clock of a node can be shifted."""
SMALL_DISK = "small_disk"
"""Ability: a node's disk can be filled for real, without filling that of the machine."""

Pair = tuple[int, int]


class Links(Protocol):
    """All links between nodes and from clients to nodes. Disturbances add up until `heal`."""

    def cut(self, pairs: Iterable[Pair]) -> None:
        """A black hole: connections stay open and can be opened, and nothing arrives."""

    def refuse(self, pairs: Iterable[Pair]) -> None:
        """Open connections end, and new ones are refused."""

    def toxic(
        self, pairs: Iterable[Pair], kind: str, upstream: bool = False, **attributes: int
    ) -> None:
        """Adds a toxic of toxiproxy: latency(latency, jitter), bandwidth(rate), slow_close(delay),
        timeout(timeout), reset_peer(timeout), slicer(average_size, size_variation, delay) or
        limit_data(bytes). `upstream` disturbs what the source sends, else what it hears."""

    def heal(self, pairs: Iterable[Pair] | None = None) -> None:
        """These links are as at the beginning; None means all."""


class DisturbedDisk(Protocol):
    """The disk of one node. Takes effect at once in the running process and after its restart."""

    def slow_sync(self, seconds: float) -> None:
        """Every sync takes this much longer."""

    def fail_writes(self) -> None:
        """Writes end with EIO."""

    def fail_syncs(self) -> None:
        """Syncs end with EIO."""

    def fill(self) -> None:
        """Whatever needs more room ends with ENOSPC."""

    def free(self) -> None:
        """There is room again."""

    def lose_unsynced(self) -> None:
        """Files go back to what was synced, as after a power cut. The node must be down."""

    def tear_unsynced(self) -> None:
        """As `lose_unsynced`, but a part of what was appended stays, and ends in garbage."""

    def heal(self) -> None:
        """Every disturbance ends; what was lost stays lost."""


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A partition as the controller knows it."""

    leader: int | None
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    moves: bool = False
    """Whether its copies are on their way to other nodes."""


class Operator(Protocol):
    """One who looks at topics and changes them, past the proxies: the controller is asked.

    Every change is known to the controller when its call returns. Raises RaftqError."""

    def partitions(self) -> Mapping[tuple[str, int], PartitionView]:
        """Topic and partition -> what is known of it, of all topics but internal ones."""

    def settings(self, topic: str) -> Mapping[str, Detail]: ...

    def metadata_index(self) -> int:
        """How many entries the log of the metadata has had."""

    def move(self, topic: str, partition: int, replicas: Iterable[int]) -> None:
        """Begins a move to these nodes, the preferred leader first."""

    def alter(self, topic: str, settings: Mapping[str, Detail]) -> None: ...

    def grow(self, topic: str, total: int) -> None:
        """To so many partitions."""

    def create(self, topic: str, partitions: int, copies: int) -> None: ...

    def delete(self, topic: str) -> None: ...


class World(Protocol):
    """A running cluster that can be disturbed."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def rng(self) -> Random:
        """Faults choose with it, so that a run can be repeated from its seed."""

    @property
    def links(self) -> Links: ...

    @property
    def operator(self) -> Operator: ...

    @property
    def abilities(self) -> frozenset[str]: ...

    @property
    def bootstrap(self) -> str:
        """Native addresses of all nodes, through the client links."""

    def direct(self, node_id: int) -> str:
        """Native `host:port` of a node, past the proxies, for checks."""

    def http(self, node_id: int) -> str:
        """`host:port` of a node's HTTP listener, past the proxies."""

    def kill(self, node_id: int) -> None:
        """SIGKILL. Without effect on a node that is down."""

    def pause(self, node_id: int) -> None:
        """SIGSTOP: the process stands still, its connections stay open."""

    def resume(self, node_id: int) -> None:
        """SIGCONT."""

    def stop(self, node_id: int) -> None:
        """SIGTERM, and waits until the process has ended. Without effect on a node that is down."""

    def restart(self, node_id: int) -> None:
        """Starts a node that is down, and returns when it serves or after a while: it may wait for
        others. Without effect on a running one."""

    def wipe(self, node_id: int) -> None:
        """Takes all data from a node that is down."""

    def is_running(self, node_id: int) -> bool: ...

    def directory(self, node_id: int) -> Path:
        """Where the node keeps its data."""

    def disk(self, node_id: int) -> DisturbedDisk: ...

    def shift_clock(self, node_id: int, seconds: float) -> None:
        """Sets the wall clock of a node off by so much; the monotonic one goes on. 0 undoes it."""

    def leader(self, topic: str, partition: int) -> int | None:
        """As most nodes know it, asked past the proxies; None when nobody leads or answers."""

    def leaders(self) -> Mapping[tuple[str, int], int]:
        """Topic and partition -> leader, of all topics but internal ones that somebody leads."""

    def copies(self) -> Mapping[tuple[str, int], tuple[int, ...]]:
        """Topic and partition -> the nodes that hold copies of it."""

    def controller(self) -> int | None:
        """The node that leads the metadata's consensus, asked past the proxies."""


@runtime_checkable
class Parting(Protocol):
    """A fault that parts the cluster, while it is injected."""

    apart: tuple[int, ...]
    """The nodes that do not see the controller. A partition with most of its copies there cannot
    be written, though a majority of the nodes is whole."""


@runtime_checkable
class Fault(Protocol):
    """One disturbance. It chooses its target when it is injected, and undoes it when healed."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[str]:
        """Abilities of a world without which it cannot be injected."""

    def inject(self, world: World) -> str:
        """Says in one line what it did."""

    def heal(self, world: World) -> None:
        """Without effect when nothing was injected, or twice."""
