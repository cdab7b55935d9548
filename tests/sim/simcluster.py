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
from random import Random
from typing import Any

from history import History
from simdisk import SimDisk
from simloop import Machine, Process, VirtualTimeLoop
from simmetadata import SimConsensus, SimMetadata
from simnet import SimNetwork
from simplan import PORT, Plan, TopicPlan, make_plan
from simraft import SMALL, Council, RaftMetadata
from simsyncer import OverlappingSyncer

from raftq.client.common.errors import (
    ConfigError,
    ConsensusError,
    DiskFull,
    NodeIdTaken,
    StorageFailed,
    TransportError,
)
from raftq.cluster.controller.events import ControllerConfig
from raftq.cluster.metadata.log import MetadataLog
from raftq.cluster.raft.config import ConsensusConfig
from raftq.node.app import Node
from raftq.node.config import Address, NodeConfig, ReplicationConfig, StorageConfig
from raftq.node.replication.partition import Partition
from raftq.node.replication.partitions import Serve
from raftq.node.steady_clock import SteadyClock
from raftq.node.storage.syncer import LoopSyncer

CLUSTER_ID = "sim"
SECRET = b"simulated secret of the cluster"
DATA_DIR = "/data"
WALL_MS = 1_700_000_000_000

Key = tuple[str, int]
Id = tuple[int, int]
"""Topic id and partition: a topic that was created anew has another one."""

__all__ = ["PORT", "Plan", "SimCluster", "SimNode", "TopicPlan", "make_plan"]


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
        self.suspect = False
        """Its syncs have failed: what it holds may not be on the platter, whatever it says."""
        self.ends: dict[Id, list[int]] = {}
        """Where the logs of its logs ended when it last died."""
        self._boots = 0
        self._runs = 0
        self._lost = (False, False)
        self._copies: dict[Id, Partition] = {}
        skew_ms = cluster.plan.world.skew_ms
        self.skew_ms = self.rng.randint(-skew_ms, skew_ms)

    @property
    def up(self) -> bool:
        return self.process is not None and not self.process.dead

    def wall_ms(self) -> int:
        return WALL_MS + self.skew_ms + int(self.cluster.loop.time() * 1000)

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
            voters={one: f"node-{one}:{9_000 + one}" for one in plan.voters},
            seeds=tuple(plan.bootstrap[: len(plan.voters)]),
            storage=StorageConfig(
                producers_max=plan.world.producers_max,
                producer_idle_ms=plan.world.producer_idle_ms,
            ),
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
            node = Node(
                self.config(),
                disk=self.disk,
                rng=Random(self.rng.getrandbits(64)),
                wall_ms=SteadyClock(self.wall_ms, loop.time),
                metadata=self._metadata(process),
                syncer=self._syncer(),
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

    def _syncer(self) -> LoopSyncer:
        loop, plan = self.cluster.loop, self.cluster.plan
        if plan.world.overlapping_syncs:
            rng = Random(self.rng.getrandbits(64))
            return OverlappingSyncer(loop, rng, plan.sync_s, 0.5)
        return LoopSyncer(loop, plan.sync_s * self.rng.random(), 0.5)

    def _metadata(self, process: Process) -> MetadataLog | None:
        """None: the node watches a voter, as one that is no voter does."""
        plan, consensus = self.cluster.plan, self.cluster.consensus
        if self.node_id not in plan.voters:
            return None
        lag_s = plan.world.lags_s.get(self.node_id)
        if isinstance(consensus, Council):
            config = self.config()
            raft = RaftMetadata(
                consensus,
                ConsensusConfig(
                    node_id=str(config.node_id),
                    voters={str(one): address for one, address in config.voters.items()},
                    directory=f"{config.data_dir}/raft",
                    secret=config.secret,
                    cluster=config.cluster_id,
                    limits=SMALL,
                ),
                process,
                self.disk,
                Random(self.rng.getrandbits(64)),
                lambda error: None if self.node is None else self.node.fail(error),
            )
            raft.lag_s, raft.sync_s = lag_s or 0.0, min(plan.sync_s, 0.05)
            return raft
        metadata = SimMetadata(consensus, self.node_id, process)
        metadata.lag_s = lag_s
        return metadata

    def kill(self, *, power: bool = False, wipe: bool = False) -> None:
        """End the process, and what the fault takes with it."""
        if not self.up:
            return
        assert self.process is not None
        self._note_copies()
        self.ends.update({one: _ends_of(copy) for one, copy in self._copies.items()})
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
            self.cluster.consensus.forget(self.node_id)

    def _note_copies(self) -> None:
        """Remember the logs of this run: a node that stops forgets them."""
        if self.node is not None:
            for one in self.node.partitions:
                self._copies[one.ref.topic_id, one.ref.number] = one

    def copy_of(self, key: Key) -> Partition | None:
        """The replica that is open here."""
        return None if self.node is None else self.node.partitions.by_name.get(key)

    def _open(self, one: Id) -> Partition | None:
        return None if self.node is None else self.node.partitions.by_id.get(one)

    def end_of(self, key: Key, partition_log: int = 0) -> int | None:
        """Where a log ends, or ended when it was last open; None when the replica never was."""
        topic = self.cluster.consensus.state.topics.get(key[0])
        if topic is None:
            return None
        one = (topic.topic_id, key[1])
        copy = self._open(one) or self._copies.get(one)
        ends = self.ends.get(one) if copy is None else _ends_of(copy)
        if ends is None:
            return None
        return ends[partition_log] if partition_log < len(ends) else 0

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
    "another process, at ",  # a registration of the run before this one, decided late
    "cannot be opened",  # on a full disk a replica waits for room
    "not closed cleanly",  # nor can it be closed so
    "simulated I/O error",  # the node ends and is started again
    "damaged",  # what rotted is found, and repaired
    " stalled: ",  # nor does its Raft hear or speak
    "groups cannot be written: ",  # nor is anybody's membership, until there is room
)

_OF_ROT = " refused the batches from offset "
"""A follower could not use what its leader has, and the leader looks at it: its active segment
rotted, which no scrub reads. Nothing else may make a leader hand over such bytes."""


class _Complaints(logging.Handler):
    """Keeps what nodes and clients log as errors."""

    def __init__(self, rotten: "dict[Id, int]") -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self._rotten = rotten

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(one in text for one in _EXPECTED) or (self._rotten and _OF_ROT in text):
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
        chance = Random(f"raft {plan.seed}")
        voters = {one: self.nodes[one].machine for one in plan.voters}
        self.consensus: SimConsensus | Council = (
            Council(self.loop, chance, CLUSTER_ID)
            if plan.world.raft
            else SimConsensus(self.network, chance, CLUSTER_ID, voters)
        )
        self.consensus.decide_s = plan.decide_s
        self.history = History()
        self.acknowledged = asyncio.Event()
        """Set when some producer is told that all have its record; whoever waits clears it."""
        self.hot: Key | None = None
        """A partition that somebody should write to all the time."""
        self.rotten: dict[Id, int] = {}
        """Partitions of which a bit flipped, and on which node."""
        self.healed = False
        self.deleted: dict[str, None] = {}
        """Topics that an operator has deleted, or tried to."""
        self.forgotten = 0
        """How many producers the copies that were open in the end have forgotten."""
        self.bugs: list[str] = []
        self.exits: list[str] = []
        self.clients: list[Process] = []
        self.supervised = True
        self.serve: Callable[[Node], Serve] | None = None
        """Makes the owner of the logs that a node leads, in place of its own."""
        self.complaints = _Complaints(self.rotten)

    def client(self, name: str) -> Process:
        process = Process(self.loop, Machine(name), name)
        process.on_death.append(lambda: self.network.process_died(process))
        self.clients.append(process)
        return process

    def note_exit(self, node: SimNode, error: Exception, starting: bool) -> None:
        """A node's process ended on its own."""
        self.exits.append(f"{self.loop.time():.3f} {node.machine.name} {error!r}")
        self.loop.trace(f"exit {node.machine.name} {type(error).__name__}")
        expected: tuple[type[Exception], ...] = (DiskFull, StorageFailed, NodeIdTaken)
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
            self.loop.run(main, seconds_max=900, turns_max=1_000_000, after_turn=after_turn)
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
        self.healed = True
        self.network.heal_all()
        self.consensus.churn = 0.0
        for node in self.nodes.values():
            node.disk.capacity = None
            node.disk.fail_sync = node.disk.fail_read = node.disk.copies_on_write = False
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
                        for one in partition.logs
                    )
                    lines.append(f"  {partition.ref} {logs} {partition.replica.describe()}")
        return "\n".join([*lines, *self.exits[-5:]])


def _ends_of(copy: Partition) -> list[int]:
    return [partition_log.log.end_offset for partition_log in copy.logs]


def _failures(process: Process | None) -> list[BaseException]:
    return [] if process is None else process.failures
