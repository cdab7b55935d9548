"""Interface: what a fault is, and what it may do to a cluster.

Faults use `World`, never processes or proxies. So the same fault works on a cluster of real
processes behind toxiproxy (`raftq.chaos.harness.world`) and on any other implementation.

Links are pairs `(source, target)` of node ids; `CLIENTS` stands for all clients. A link carries the
connections that its source opens to its target: the requests of the source and their answers. So
after cutting `(1, 2)` but not `(2, 1)`, node 2 can still ask node 1.

Calls block. Only one thread at a time may call.
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
"""Ability: a node's disk can be filled for real, without filling the machine's disk."""

Pair = tuple[int, int]


class Links(Protocol):
    """All links between nodes and from clients to nodes. Disturbances add up until `heal`."""

    def cut(self, pairs: Iterable[Pair]) -> None:
        """Makes black holes: connections stay open and new ones can be opened, but nothing
        arrives."""

    def refuse(self, pairs: Iterable[Pair]) -> None:
        """Ends open connections and refuses new ones."""

    def toxic(
        self, pairs: Iterable[Pair], kind: str, upstream: bool = False, **attributes: int
    ) -> None:
        """Adds a toxic of toxiproxy: latency(latency, jitter), bandwidth(rate), slow_close(delay),
        timeout(timeout), reset_peer(timeout), slicer(average_size, size_variation, delay) or
        limit_data(bytes). `upstream` disturbs what the source sends, otherwise what it receives."""

    def heal(self, pairs: Iterable[Pair] | None = None) -> None:
        """Removes all disturbances of these links; None means of all links."""


class DisturbedDisk(Protocol):
    """The disk of one node. Calls take effect at once in the running process and after its
    restart."""

    def slow_sync(self, seconds: float) -> None:
        """Every sync takes this much longer."""

    def fail_writes(self) -> None:
        """Writes end with EIO."""

    def fail_syncs(self) -> None:
        """Syncs end with EIO."""

    def fill(self) -> None:
        """Operations that need more space end with ENOSPC."""

    def free(self) -> None:
        """There is space again."""

    def lose_unsynced(self) -> None:
        """Restores files to what was synced, as after a power cut. The node must be down."""

    def tear_unsynced(self) -> None:
        """As `lose_unsynced`, but a part of the appended bytes stays, and ends in garbage."""

    def heal(self) -> None:
        """Ends every disturbance. Lost data stays lost."""


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A partition as the controller knows it."""

    leader: int | None
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    moves: bool = False
    """Whether its copies are moving to other nodes."""


class Operator(Protocol):
    """Looks at topics and changes them, past the proxies, by asking the controller.

    The controller knows every change when the call returns. Raises RaftqError."""

    def partitions(self) -> Mapping[tuple[str, int], PartitionView]:
        """The state of each partition, by topic and number, without internal topics."""

    def settings(self, topic: str) -> Mapping[str, Detail]: ...

    def metadata_index(self) -> int:
        """The number of entries that the metadata log has had."""

    def move(self, topic: str, partition: int, replicas: Iterable[int]) -> None:
        """Begins a move to these nodes, the preferred leader first."""

    def alter(self, topic: str, settings: Mapping[str, Detail]) -> None: ...

    def grow(self, topic: str, total: int) -> None:
        """Grows the topic to `total` partitions."""

    def create(self, topic: str, partitions: int, copies: int) -> None: ...

    def delete(self, topic: str) -> None: ...


class World(Protocol):
    """A running cluster that can be disturbed."""

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def rng(self) -> Random:
        """Faults choose with it, so that a seed repeats a run."""

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
        """Sends SIGKILL. Does nothing if the node is down."""

    def pause(self, node_id: int) -> None:
        """Sends SIGSTOP: the process stops, and its connections stay open."""

    def resume(self, node_id: int) -> None:
        """Sends SIGCONT."""

    def stop(self, node_id: int) -> None:
        """Sends SIGTERM and waits until the process has ended. Does nothing if the node is down."""

    def restart(self, node_id: int) -> None:
        """Starts a node that is down. Does nothing if it runs.

        Returns when the node serves, or after a while: it may have to wait for others."""

    def wipe(self, node_id: int) -> None:
        """Deletes all data of a node that is down."""

    def is_running(self, node_id: int) -> bool: ...

    def directory(self, node_id: int) -> Path:
        """The directory with the node's data."""

    def disk(self, node_id: int) -> DisturbedDisk: ...

    def shift_clock(self, node_id: int, seconds: float) -> None:
        """Shifts the wall clock of a node by `seconds`; 0 undoes it. The monotonic clock is not
        changed."""

    def leader(self, topic: str, partition: int) -> int | None:
        """The leader as most nodes know it, asked past the proxies; None if there is none or no
        answer."""

    def leaders(self) -> Mapping[tuple[str, int], int]:
        """The leader of each partition that has one, by topic and number, without internal
        topics."""

    def copies(self) -> Mapping[tuple[str, int], tuple[int, ...]]:
        """The nodes with a copy of each partition, by topic and number."""

    def controller(self) -> int | None:
        """The node that leads the metadata's consensus, asked past the proxies."""


@runtime_checkable
class Parting(Protocol):
    """A fault that splits the cluster while it is injected."""

    apart: tuple[int, ...]
    """The nodes that do not see the controller. A partition with most of its copies there cannot be
    written, though a majority of the nodes is healthy."""


@runtime_checkable
class Fault(Protocol):
    """One disturbance. It chooses its target when it is injected. Healing undoes it."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[str]:
        """Abilities that the world must have for this fault."""

    def inject(self, world: World) -> str:
        """Disturbs the world and says in one line what it did."""

    def heal(self, world: World) -> None:
        """Undoes the disturbance. Does nothing if nothing was injected, or on a second call."""
