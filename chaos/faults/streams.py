"""Shell: faults of links that still pass bytes: late, slowly, in pieces, or with sudden ends."""

from dataclasses import dataclass
from threading import Event

from raftq.chaos.faults.base import LinkFault, NodeLinkFault
from raftq.chaos.faults.targets import Where, Who, choose, from_clients, links, others
from raftq.chaos.world import World


@dataclass(slots=True)
class Latency(LinkFault):
    """Every message takes longer, there and back."""

    where: Where = "peers"
    latency_ms: int = 100
    jitter_ms: int = 50

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


@dataclass(slots=True)
class Bandwidth(NodeLinkFault):
    """One node receives data from its peers slowly. 375 kB/s are 3 Mbit/s."""

    who: Who = "follower"
    kilobytes_s: int = 375

    @property
    def name(self) -> str:
        return f"slow link to {self.who}"

    def inject(self, world: World) -> str:
        node_id = choose(world, self.who, self.topic)
        outgoing = [(node_id, peer) for peer in others(world, node_id)]
        incoming = [(peer, node_id) for peer in others(world, node_id)]
        self._pairs = outgoing + incoming
        world.links.toxic(outgoing, "bandwidth", upstream=False, rate=self.kilobytes_s)
        world.links.toxic(incoming, "bandwidth", upstream=True, rate=self.kilobytes_s)
        return f"node {node_id} receives {self.kilobytes_s} kB/s from each peer"


@dataclass(slots=True)
class ResetStorm(LinkFault):
    """Resets connections many times. All links work again when `inject` returns."""

    where: Where = "clients"
    rounds: int = 10
    gap_s: float = 0.3

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


@dataclass(slots=True)
class Slicer(LinkFault):
    """Bytes arrive in tiny pieces."""

    where: Where = "everywhere"
    piece_bytes: int = 1
    delay_us: int = 0

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


@dataclass(slots=True)
class LimitData(LinkFault):
    """Every connection ends after at most `bytes_max` bytes, in the middle of a frame."""

    where: Where = "clients"
    bytes_max: int = 20_000

    @property
    def name(self) -> str:
        return f"limited data on {self.where}"

    def inject(self, world: World) -> str:
        self._pairs = links(world, self.where)
        for pair in self._pairs:
            count = world.rng.randint(self.bytes_max // 10, self.bytes_max)
            world.links.toxic([pair], "limit_data", upstream=True, bytes=count)
        return f"connections end after at most {self.bytes_max} bytes"


@dataclass(slots=True)
class BlackHole(LinkFault):
    """Clients can connect to a node, or to every node if `who` is None, but get no answer."""

    who: Who | None = "leader"
    topic: str = ""

    @property
    def name(self) -> str:
        return "black hole before " + ("all" if self.who is None else str(self.who))

    def inject(self, world: World) -> str:
        nodes = world.ids if self.who is None else (choose(world, self.who, self.topic),)
        self._pairs = from_clients(nodes)
        world.links.cut(self._pairs)
        return f"clients receive nothing from {', '.join(map(str, nodes))}"


@dataclass(slots=True)
class Refuse(NodeLinkFault):
    """A node resets and refuses connections from peers and, if `clients`, from clients.

    With `silent` they get no answer, as behind a firewall. In both cases the node itself can
    still open connections."""

    clients: bool = True
    silent: bool = False

    @property
    def name(self) -> str:
        return f"{'ignore' if self.silent else 'refuse'} {self.who}"

    def inject(self, world: World) -> str:
        node_id = choose(world, self.who, self.topic)
        self._pairs = [(peer, node_id) for peer in others(world, node_id)]
        if self.clients:
            self._pairs += from_clients([node_id])
        if self.silent:
            world.links.cut(self._pairs)
        else:
            world.links.refuse(self._pairs)
        return f"nobody can connect to node {node_id}"
