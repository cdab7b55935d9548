"""A whole cluster in one thread: real nodes on simulated machines, disks, links and metadata.

Everything random comes from the seed, by one generator per concern, so that one more draw in one of
them does not change the others. A `SimNode` is a machine with a disk on which node processes run
one after the other:

    kill       the process is gone, what it wrote is there
    power cut  the process is gone, what it did not sync may be gone too, the last write torn
    wipe       as a kill, and the data directory is gone

A process that fails on its own (a full disk) is started again after a while, as a supervisor would.
What it may not fail with is kept in `bugs`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from history import History
from simdisk import SimDisk
from simloop import Machine, Process, VirtualTimeLoop
from simmetadata import SimConsensus, SimMetadata
from simnet import NetworkShape, SimNetwork

from raftq.client.wire.errors import (
    ConfigError,
    ConsensusError,
    DiskFull,
    StorageFailed,
    TransportError,
)
from raftq.cluster.controller_events import ControllerConfig
from raftq.node.app import Node
from raftq.node.config import Address, NodeConfig, ReplicationConfig
from raftq.node.partition import Partition
from raftq.node.partitions import Serve
from raftq.node.storage.syncer import LoopSyncer

CLUSTER_ID = "sim"
SECRET = b"simulated secret of the cluster"
DATA_DIR = "/data"
PORT = 7_000
WALL_MS = 1_700_000_000_000

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class TopicPlan:
    name: str
    partitions: int
    fsync: str
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one seed does, apart from when."""

    seed: int
    nodes: int
    topics: tuple[TopicPlan, ...]
    producers: int
    records: int
    """Per producer."""
    faults_s: float
    """For how long faults happen."""
    fault_every_s: float
    always: bool
    """Every topic syncs before it acknowledges, so machines may lose power at will."""
    churn: float
    sync_s: float
    """How long a sync takes at most."""
    decide_s: float
    """How long the metadata takes to decide something at most."""
    shape: NetworkShape

    @property
    def bootstrap(self) -> list[str]:
        return [f"node-{node}:{PORT + node}" for node in range(1, self.nodes + 1)]


def make_plan(seed: int) -> Plan:
    rng = Random(f"plan {seed}")
    always = rng.random() < 0.3
    topics = tuple(
        TopicPlan(
            f"t{at}",
            rng.randint(1, 3),
            "always" if always else rng.choice(("interval", "interval", "always", "none")),
            rng.choice((4096, 1 << 26)),
        )
        for at in range(rng.randint(1, 2))
    )
    return Plan(
        seed=seed,
        nodes=rng.choice((3, 3, 3, 5)),
        topics=topics,
        producers=rng.randint(1, 3),
        records=rng.randint(20, 60),
        faults_s=rng.uniform(2, 9),
        fault_every_s=rng.choice((0.15, 0.3, 0.8, 1.5)),
        always=always,
        churn=rng.choice((0.0, 0.0, 0.01)),
        sync_s=rng.choice((0.001, 0.01, 0.2)),
        decide_s=rng.choice((0.005, 0.05, 0.5)),
        shape=NetworkShape(
            latency_max_s=rng.choice((0.000_5, 0.002, 0.02)),
            jitter_share=rng.choice((0.0, 0.05, 0.2)),
            split_share=rng.choice((0.0, 0.1, 0.3)),
        ),
    )


class SimNode:
    """A machine that runs a node, through all its restarts."""

    def __init__(self, cluster: "SimCluster", node_id: int) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.machine = Machine(f"node-{node_id}")
        self.rng = Random(f"node {cluster.plan.seed} {node_id}")
        self.disk = SimDisk(self.rng.getrandbits(32))
        self.process: Process | None = None
        self.node: Node | None = None
        self.ready = False
        self.tainted = False
        """It lost data, or may have, and is not known to have caught up since."""
        self.tainted_at = 0.0
        self.wiped = False
        """The same, of a node that lost everything."""
        self.ends: dict[Key, list[int]] = {}
        """Where the strands of its logs ended when it last died."""
        self._boots = 0
        self._runs = 0
        self._lost = (False, False)
        self._copies: dict[Key, Partition] = {}
        self._skew_ms = self.rng.randint(-2_000, 2_000)

    @property
    def up(self) -> bool:
        return self.process is not None and not self.process.dead

    def wall_ms(self) -> int:
        return WALL_MS + self._skew_ms + int(self.cluster.loop.time() * 1000)

    def config(self) -> NodeConfig:
        plan = self.cluster.plan
        return NodeConfig(
            node_id=self.node_id,
            secret=SECRET,
            data_dir=DATA_DIR,
            cluster_id=CLUSTER_ID,
            native=Address(self.machine.name, PORT + self.node_id),
            http=None,
            raft=Address(self.machine.name, 9_000 + self.node_id),
            voters={one: f"node-{one}:{9_000 + one}" for one in range(1, plan.nodes + 1)},
            replication=ReplicationConfig(lag_ms=1_000, wait_ms=300),
            controller=ControllerConfig(
                lease_ms=1_500, balance_ms=4_000, balance_settle_ms=1_000, retry_ms=200
            ),
            heartbeat_ms=300,
        )

    def start(self) -> None:
        """Switch the machine on and run the node on it; nothing happens when it runs."""
        if self.up:
            return
        cluster = self.cluster
        self.machine.powered = True
        cluster.network.wake()
        self._runs += 1
        process = Process(cluster.loop, self.machine, f"node-{self.node_id}.{self._runs}")
        process.on_death.append(lambda: cluster.network.process_died(process))
        process.on_death.append(self._die)
        self.process = process
        self.ready = False
        cluster.loop.trace(f"start {process.name}")
        process.spawn(self._main(process))

    async def _main(self, process: Process) -> None:
        loop = self.cluster.loop
        starting = True
        try:
            metadata = SimMetadata(self.cluster.consensus, self.node_id, process)
            node = Node(
                self.config(),
                disk=self.disk,
                rng=Random(self.rng.getrandbits(64)),
                wall_ms=self.wall_ms,
                metadata=metadata,
                syncer=LoopSyncer(loop, self.cluster.plan.sync_s * self.rng.random(), 0.5),
                boot=f"boot {self._boots}",
            )
            self.node = node
            if self.cluster.serve is not None:
                node.partitions.serve = self.cluster.serve(node)
            await node.start()
            self.ready = True
            starting = False
            await node.fatal
        except Exception as error:
            self.cluster.note_exit(self, error, starting)

    def kill(self, *, power: bool = False, wipe: bool = False) -> None:
        """End the process, and what the fault takes with it."""
        if not self.up:
            return
        assert self.process is not None
        self._note_copies()
        self.ends.update({key: _ends_of(copy) for key, copy in self._copies.items()})
        self._copies.clear()
        self.cluster.loop.trace(f"kill {self.process.name} power={power} wipe={wipe}")
        self.machine.powered = not power
        if power:
            self._boots += 1
        self._lost = (power, wipe)
        if wipe or power:
            self.tainted = True
            self.tainted_at = self.cluster.loop.time()
        self.wiped = self.wiped or wipe
        self.process.kill()
        if wipe:
            self.ends.clear()
            self.cluster.consensus.seats[self.node_id].durable_index = 0

    def _note_copies(self) -> None:
        """Remember the logs of this run: a node that stops forgets them."""
        if self.node is not None:
            for one in self.node.partitions:
                self._copies[one.place.topic, one.place.number] = one

    def copy_of(self, key: Key) -> Partition | None:
        """The replica that is open here."""
        return None if self.node is None else self.node.partitions.by_name.get(key)

    def end_of(self, key: Key, strand: int = 0) -> int | None:
        """Where a log ends, or ended when it was last open; None when the replica never was."""
        copy = self.copy_of(key) or self._copies.get(key)
        ends = self.ends.get(key) if copy is None else _ends_of(copy)
        if ends is None:
            return None
        return ends[strand] if strand < len(ends) else 0

    async def leave(self) -> None:
        """What SIGTERM does. The process runs on, empty, until it is killed."""
        node = self.node
        assert node is not None
        self.cluster.loop.trace(f"stop {self.machine.name}")
        try:
            await node.drain()
        finally:
            self._note_copies()
            with suppress(DiskFull):
                await node.stop()

    def _die(self) -> None:
        """The disk as the next process finds it; the old one answers to nobody any more."""
        power, wipe = self._lost
        old = self.disk
        if wipe:
            self.disk = SimDisk(self.rng.getrandbits(32))
        elif power:
            self.disk = old.crash(self.rng)
        else:
            self.disk = old.kill()
        old.crashed = True
        self.node = None
        self.ready = False


_EXPECTED = (
    "another process registered as",  # a registration of the run before this one, decided late
    "cannot be opened",  # on a full disk a replica waits for room
    "not closed cleanly",  # nor can it be closed so
    "groups cannot be written: ",  # nor is anybody's membership, until there is room
)


class _Complaints(logging.Handler):
    """Keeps what nodes and clients log as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(one in text for one in _EXPECTED):
            return
        if record.exc_info and record.exc_info[1] is not None:
            text += f" {record.exc_info[1]!r}"
        self.found.append(text)


class SimCluster:
    """Machines, network, metadata and the history of what clients saw."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = VirtualTimeLoop()
        self.network = SimNetwork(self.loop, Random(f"network {plan.seed}"), plan.shape)
        self.nodes = {one: SimNode(self, one) for one in range(1, plan.nodes + 1)}
        self.consensus = SimConsensus(
            self.network,
            Random(f"raft {plan.seed}"),
            CLUSTER_ID,
            {one: node.machine for one, node in self.nodes.items()},
        )
        self.consensus.decide_s = plan.decide_s
        self.history = History()
        self.acknowledged = asyncio.Event()
        """Set when some producer is told that all have its record; whoever waits clears it."""
        self.bugs: list[str] = []
        self.exits: list[str] = []
        self.clients: list[Process] = []
        self.supervised = True
        self.serve: Callable[[Node], Serve] | None = None
        """Makes the owner of the strands that a node leads, in place of its own."""
        self.complaints = _Complaints()

    def client(self, name: str) -> Process:
        process = Process(self.loop, Machine(name), name)
        process.on_death.append(lambda: self.network.process_died(process))
        self.clients.append(process)
        return process

    def note_exit(self, node: SimNode, error: Exception, starting: bool) -> None:
        """A node's process ended on its own."""
        self.exits.append(f"{self.loop.time():.3f} {node.machine.name} {error!r}")
        self.loop.trace(f"exit {node.machine.name} {type(error).__name__}")
        expected: tuple[type[Exception], ...] = (DiskFull, StorageFailed)
        if starting:
            expected += (ConsensusError, TransportError)
        if not isinstance(error, expected) or isinstance(error, ConfigError):
            self.bugs.append(f"{node.machine.name} ended with {error!r}")
        run = node.process

        def bury() -> None:
            if run is node.process:
                node.kill()
                delay = self.loop.time() + 0.3
                self.loop.call_at(delay, restart, context=self.loop.neutral)

        def restart() -> None:
            if run is node.process and self.supervised:
                node.start()

        self.loop.call_soon(bury, context=self.loop.neutral)

    # Running.

    def run(self, main: Coroutine[Any, Any, None], after_turn: Callable[[], None]) -> None:
        """Run the simulation and clear up, whatever comes of it."""
        logger = logging.getLogger("raftq")
        level, propagate = logger.level, logger.propagate
        logger.addHandler(self.complaints)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        try:
            self.loop.run(main, seconds_max=400, turns_max=400_000, after_turn=after_turn)
        finally:
            self.supervised = False
            for node in self.nodes.values():
                self.bugs += [f"{node.machine.name}: {one!r}" for one in _failures(node.process)]
                node.kill()
            for process in self.clients:
                self.bugs += [f"{process.name}: {one!r}" for one in _failures(process)]
                process.kill()
            self.loop.end()
            logger.removeHandler(self.complaints)
            logger.setLevel(level)
            logger.propagate = propagate

    def heal(self) -> None:
        """End every fault."""
        self.loop.trace("heal")
        self.network.heal_all()
        self.consensus.churn = 0.0
        for node in self.nodes.values():
            node.disk.capacity = None
            if node.process is not None and node.process.paused:
                node.process.resume()
            node.start()

    async def until(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        """Wait for something to become true, or say that it did not."""
        end = self.loop.time() + seconds
        while not holds():
            if self.loop.time() > end:
                raise AssertionError(f"not in {seconds} s: {what}\n{self.describe()}")
            await asyncio.sleep(0.05)
            await asyncio.sleep(0)

    def is_whole(self) -> bool:
        """Whether every partition has a leader and all its replicas in sync, known to everybody."""
        index = self.consensus.commit_index
        for node in self.nodes.values():
            if not node.ready or node.node is None or node.node.metadata.index != index:
                return False
        return all(
            one.leader is not None and sorted(one.isr) == sorted(one.replicas)
            for _, _, one in self.consensus.state.all_partitions()
        )

    def describe(self) -> str:
        lines = [f"{self.loop.time():.3f} leader={self.consensus.leader} cuts={self.network.cuts}"]
        for topic, number, one in self.consensus.state.all_partitions():
            lines.append(f"{topic.name}/{number} {one}")
        for node in self.nodes.values():
            state = "ready" if node.ready else "up" if node.up else "down"
            lines.append(f"{node.machine.name} {state} tainted={node.tainted}")
            if node.node is not None:
                for partition in node.node.partitions:
                    logs = " ".join(
                        f"[{one.log.start_offset},{one.log.end_offset}) "
                        f"flushed={one.log.flushed_offset}"
                        for one in partition.strands
                    )
                    lines.append(f"  {partition.place} {logs} {partition.replica.describe()}")
        return "\n".join([*lines, *self.exits[-5:]])


def _ends_of(copy: Partition) -> list[int]:
    return [strand.log.end_offset for strand in copy.strands]


def _failures(process: Process | None) -> list[BaseException]:
    return [] if process is None else process.failures
