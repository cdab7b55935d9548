"""Faults of links that still pass bytes: late, few, in pieces, or with sudden ends. (Shell.)"""

from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar

from raftq.chaos.faults.network import LINKS
from raftq.chaos.faults.targets import Where, Who, choose, from_clients, links, others
from raftq.chaos.world import Pair, World


@dataclass(slots=True)
class Latency:
    """Every message takes longer, there and back."""

    where: Where = "peers"
    latency_ms: int = 100
    jitter_ms: int = 50
    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"latency on {self.where}"

    def inject(self, world: World) -> str:
        self._pairs = links(world, self.where)
        for upstream in (True, False):
            world.links.toxic(
                self._pairs, "latency", upstream, latency=self.latency_ms, jitter=self.jitter_ms
            )
        return f"{self.latency_ms} +- {self.jitter_ms} ms each way"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class Bandwidth:
    """What one node hears of its peers comes slowly; 375 kB/s are 3 Mbit/s."""

    who: Who = "follower"
    topic: str = ""
    kilobytes_s: int = 375
    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"slow link to {self.who}"

    def inject(self, world: World) -> str:
        node_id = choose(world, self.who, self.topic)
        asked = [(node_id, one) for one in others(world, node_id)]
        told = [(one, node_id) for one in others(world, node_id)]
        self._pairs = asked + told
        world.links.toxic(asked, "bandwidth", upstream=False, rate=self.kilobytes_s)
        world.links.toxic(told, "bandwidth", upstream=True, rate=self.kilobytes_s)
        return f"node {node_id} hears {self.kilobytes_s} kB/s of each peer"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class ResetStorm:
    """Connections are reset again and again; it is over when `inject` returns."""

    where: Where = "clients"
    rounds: int = 10
    gap_s: float = 0.3
    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"reset storm on {self.where}"

    def inject(self, world: World) -> str:
        self._pairs = links(world, self.where)
        for _ in range(self.rounds):
            some = world.rng.sample(self._pairs, world.rng.randint(1, len(self._pairs)))
            world.links.toxic(some, "reset_peer", world.rng.random() < 0.5, timeout=0)
            Event().wait(self.gap_s * world.rng.uniform(0.2, 1.0))
            world.links.heal(some)
            Event().wait(self.gap_s * world.rng.uniform(0.2, 1.0))
        return f"{self.rounds} rounds of resets"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class Slicer:
    """Bytes arrive in tiny pieces."""

    where: Where = "everywhere"
    piece_bytes: int = 1
    delay_us: int = 0
    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"slicer on {self.where}"

    def inject(self, world: World) -> str:
        self._pairs = links(world, self.where)
        for upstream in (True, False):
            world.links.toxic(
                self._pairs,
                "slicer",
                upstream,
                average_size=self.piece_bytes,
                size_variation=0,
                delay=self.delay_us,
            )
        return f"pieces of {self.piece_bytes} bytes"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class LimitData:
    """Every connection ends after so many bytes, in the middle of a frame, again and again."""

    where: Where = "clients"
    bytes_max: int = 20_000
    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"limited data on {self.where}"

    def inject(self, world: World) -> str:
        self._pairs = links(world, self.where)
        for pair in self._pairs:
            count = world.rng.randint(self.bytes_max // 10, self.bytes_max)
            world.links.toxic([pair], "limit_data", upstream=True, bytes=count)
        return f"connections end after at most {self.bytes_max} bytes"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class BlackHole:
    """Clients can connect to a node, and nothing comes back; `who` None means to every node."""

    who: Who | None = "leader"
    topic: str = ""
    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return "black hole before " + ("all" if self.who is None else str(self.who))

    def inject(self, world: World) -> str:
        nodes = world.ids if self.who is None else (choose(world, self.who, self.topic),)
        self._pairs = from_clients(nodes)
        world.links.cut(self._pairs)
        return f"clients hear nothing of {', '.join(map(str, nodes))}"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []


@dataclass(slots=True)
class Refuse:
    """Connections to a node are reset and refused, from peers and, if `clients`, from clients.

    If `silent` they only get no answer any more, as behind a firewall. What the node itself opens
    works in both cases."""

    who: Who = "leader"
    topic: str = ""
    clients: bool = True
    silent: bool = False
    needs: ClassVar[frozenset[str]] = LINKS
    _pairs: list[Pair] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"{'ignore' if self.silent else 'refuse'} {self.who}"

    def inject(self, world: World) -> str:
        node_id = choose(world, self.who, self.topic)
        self._pairs = [(one, node_id) for one in others(world, node_id)]
        if self.clients:
            self._pairs += from_clients([node_id])
        if self.silent:
            world.links.cut(self._pairs)
        else:
            world.links.refuse(self._pairs)
        return f"nobody can connect to node {node_id}"

    def heal(self, world: World) -> None:
        world.links.heal(self._pairs)
        self._pairs = []
