"""One node: all its parts, put together, started and stopped in order. (Shell.)

    start   lock the directory, join the metadata, listen, register, then lead and follow
    drain   give up the lease (other leaders are elected at once), finish requests in flight
    stop    close the logs, synced; record that nothing can be lost

An error that a part cannot handle ends the node (`fatal`): another replica can take over, and a
node in an unknown state cannot be trusted.
"""

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from random import Random, SystemRandom
from typing import Any

from raftq.client.common.disk import Disk, Lock, RealDisk
from raftq.client.common.errors import (
    AccessDenied,
    ConfigError,
    ConnectFailed,
    NodeIdTaken,
    NodeStopping,
    RaftqError,
    StorageError,
)
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions
from raftq.client.wire.messages import (
    Fetch,
    Hello,
    InitProducer,
    ListOffsets,
    Produce,
    WireMessage,
)
from raftq.client.wire.node_messages import (
    Heartbeat,
    HeartbeatReply,
    Identify,
    IdentifyReply,
    Propose,
    ReadReplica,
    Replicate,
    WatchMetadata,
)
from raftq.client.wire.proof import check_proof, cluster_proof
from raftq.cluster.controller.driver import ControllerDriver
from raftq.cluster.controller.membership import Membership
from raftq.cluster.metadata.commands import FenceNode, Lost, RegisterNode
from raftq.cluster.metadata.handlers import MetadataHandlers
from raftq.cluster.metadata.log import MetadataLog
from raftq.cluster.metadata.observer import ObserverMetadata
from raftq.cluster.metadata.state import NodeState
from raftq.cluster.metadata.voter import VoterMetadata
from raftq.cluster.raft.config import ConsensusConfig
from raftq.cluster.raft.voters_file import refuse_former_voter
from raftq.node.config import Address, NodeConfig
from raftq.node.groups.coordinators import Coordinators
from raftq.node.http.clients import HttpClients
from raftq.node.http.server import HttpServer
from raftq.node.identity import Identity, Loss, boot_id, remember, what_was_lost
from raftq.node.native.admin_handlers import AdminHandlers
from raftq.node.native.data_handlers import DataHandlers
from raftq.node.native.metering import meter
from raftq.node.native.recovery_handlers import RecoveryHandlers
from raftq.node.native.session import Handler, Session
from raftq.node.native.tcp import TcpServer
from raftq.node.queue.leader.copy_sender import NodeCopySender
from raftq.node.replication.leader import FollowerSessions
from raftq.node.replication.partitions import Partitions
from raftq.node.replication.replica import ABSENT_LAG_SHARE
from raftq.node.replication.replica_files import truncated_logs
from raftq.node.replication.upkeep import Upkeep
from raftq.node.services import Services
from raftq.node.status import Facts
from raftq.node.steady_clock import SteadyClock, elapsed_s
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.syncer import Syncer

logger = logging.getLogger(__name__)

FENCE_S = 2.0
SYNCS = 4
"""The most partitions that are synced at a time."""
GC_THRESHOLDS = (50_000, 20, 100)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The machine as a node sees it. The chaos harness passes one that it can disturb."""

    disk: Disk
    wall_ms: Callable[[], int]
    boot: str


class Node:
    """One node. Simulations pass `metadata`, `syncer` and `boot`."""

    def __init__(  # noqa: PLR0913 - what a node is made of
        self,
        config: NodeConfig,
        *,
        disk: Disk,
        rng: Random,
        wall_ms: Callable[[], int],
        metadata: MetadataLog | None = None,
        syncer: Syncer | None = None,
        boot: str | None = None,
    ) -> None:
        self.config = config
        self.disk = disk
        self.loop = asyncio.get_running_loop()
        self.node_id = config.node_id
        self.incarnation = rng.getrandbits(62)
        self.fetch_bytes_max = config.replication.fetch_bytes_max
        self.wait_ms = config.replication.wait_ms
        self.join_timeout_s = config.replication.lag_ms / 1000 * ABSENT_LAG_SHARE
        self.fatal: asyncio.Future[None] = self.loop.create_future()
        self._rng = rng
        self.metadata = metadata if metadata is not None else self._join()
        self.syncer: Syncer = syncer or Flusher(config.storage.fsync_interval_ms / 1000, SYNCS)
        self.started_at = wall_ms()
        self._wall_ms = wall_ms
        self._boot = boot
        self._lock: Lock | None = None
        self._serving = False
        self._identity: Identity
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._listening = False
        self._beating: dict[Session, int] = {}
        self.partitions = Partitions(config, disk, self.metadata, self.syncer, self.spawn)
        self.follower_sessions = FollowerSessions(
            self.loop,
            self.partitions.find,
            self.partitions.incarnation_of,
            self.partitions.liveness.note_request,
            config.replication.move_bytes_s,
        )
        self.coordinators = Coordinators(self.node_id, self.metadata, rng, wall_ms)
        self.copy_sender = NodeCopySender(
            self.node_id, self.partitions.of, self.metadata, self.connect
        )
        self.services = Services(self.partitions, rng, wall_ms, self.coordinators, self.copy_sender)
        self.upkeep = Upkeep(self.partitions, self, wall_ms, self.spawn, config.storage)
        self.driver = ControllerDriver(
            self.metadata,
            config.controller,
            rng,
            self._peer_options(),
            incarnation=self.incarnation,
            address_of=self._address_of,
        )
        self.membership: Membership | None = None
        self.metrics = self.partitions.metrics
        self.http: HttpServer | None = None
        if config.http is not None:
            facts = Facts(self)
            self.http = HttpServer(facts, HttpClients(facts), self.metrics, wall_ms)
        self.server = TcpServer(
            self._handlers(),
            node_id=config.node_id,
            cluster_id=config.cluster_id,
            incarnation=self.incarnation,
            options=config.server,
            admit=self._admit,
            on_leave=self._left,
            observe=meter(self.metrics, asyncio.get_running_loop().time),
        )

    # Parts

    def _join(self) -> MetadataLog:
        config = self.config
        if not config.is_voter:
            return ObserverMetadata(
                config.cluster_id,
                config.seeds,
                self._peer_options(),
                voters=tuple(config.voters),
                rng=self._rng,
                on_fatal=self.fail,
                address_of=self._address_of,
            )
        raft = ConsensusConfig(
            node_id=str(config.node_id),
            voters={str(voter): address for voter, address in config.voters.items()},
            directory=f"{config.data_dir}/raft",
            secret=config.secret,
            cluster=config.cluster_id,
            bind_address=str(config.raft),
            times=config.raft_times,
        )
        return VoterMetadata(raft, config.cluster_id, disk=self.disk, on_fatal=self.fail)

    def _peer_options(self) -> ConnectionOptions:
        """Return the options of connections to other nodes."""
        return ConnectionOptions(
            name=f"node-{self.config.node_id}",
            role="node",
            cluster_proof=cluster_proof(self.config.secret, self.config.cluster_id),
            connect_ms=2_000,
        )

    def _handlers(self) -> dict[type[WireMessage], Handler]:
        data = DataHandlers(self.node_id, self.partitions, self.metadata)
        shared = MetadataHandlers(self.metadata, self.node_id)
        node_only: dict[type[WireMessage], Handler] = {
            Replicate: self.follower_sessions.handle,
            Heartbeat: self._heartbeat,
            Identify: self._identify,
            Propose: shared.propose,
            WatchMetadata: shared.watch,
            ReadReplica: self.upkeep.read_replica,
        }
        for_all: dict[type[WireMessage], Handler] = {
            Produce: data.produce,
            Fetch: data.fetch,
            ListOffsets: data.list_offsets,
            InitProducer: data.init_producer,
            **self.services.table(),
            **AdminHandlers(self.node_id, self.config.cluster_id, self.metadata).table(),
            **RecoveryHandlers(self.partitions, self.metadata).table(),
        }
        return {
            **{kind: self._when_serving(handler) for kind, handler in for_all.items()},
            **{kind: _only_nodes(handler) for kind, handler in node_only.items()},
        }

    def _when_serving(self, handler: Handler) -> Handler:
        """Refuse requests until the node is registered: it may know nothing yet, not even the
        topics."""

        def guarded(message: Any, raw: memoryview, session: Session) -> Any:
            if not self._serving:
                raise NodeStopping("the node is still starting")
            return handler(message, raw, session)

        return guarded

    # Life

    async def start(self) -> None:
        """Start the node. Raises the error that prevents it."""
        config, disk = self.config, self.disk
        disk.make_directory(config.data_dir)
        self._lock = disk.lock(f"{config.data_dir}/lock")
        boot = boot_id() if self._boot is None else self._boot
        self._identity = Identity(config.node_id, config.cluster_id, boot, self.incarnation)
        loss = what_was_lost(disk, config.data_dir, self._identity)
        if shorter := truncated_logs(disk, config.data_dir):
            # If such a log were elected, all other copies would be cut to its length.
            logger.error("node=%d logs_without_their_end=%s", self.node_id, shorter)
            lost: Lost = "everything" if loss.lost == "everything" else "past"
            loss = replace(loss, lost=lost, synced=False)
        if not config.is_voter:
            refuse_former_voter(disk, f"{config.data_dir}/raft", config.voters)
        await self.metadata.start()
        await self.server.__aenter__()
        self._listening = True
        await self.server.start(config.native.host, config.native.port)
        if self.http is not None and config.http is not None:
            await self.http.start(config.http.host, config.http.port)
        self.spawn(self.driver.run())
        self.membership = Membership(
            self.metadata,
            self._registration(loss),
            config.heartbeat_ms,
            self._peer_options(),
            self.driver,
            on_fatal=self.fail,
            address_of=self._address_of,
            lease_ms=config.controller.lease_ms,
            on_cut_off=self._cut_off,
        )
        await self.membership.start()
        remember(disk, config.data_dir, self._identity, clean=False)
        self.partitions.start(self, self._wall_ms, self.fail)
        opened = self.loop.create_task(self.partitions.opened.wait())
        await asyncio.wait((opened, self.fatal), return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        self.upkeep.start()
        self.metadata.subscribe(lambda changes: self.follower_sessions.fence())
        self._serving = True
        logger.info(
            "node=%d serves native=%s:%d incarnation=%d lost=%s",
            self.node_id, config.host, self.native_port, self.incarnation, loss.lost,
        )  # fmt: skip

    def _cut_off(self, cut_off: bool) -> None:
        self.partitions.set_cut_off(cut_off)
        if cut_off:
            self.services.queue_handlers.end_waiting()

    async def drain(self) -> None:
        """Let other nodes take over the leaderships, and finish the requests in flight."""
        if self.membership is not None:
            await self.membership.stop()
        try:
            await self.metadata.propose(FenceNode(self.node_id, self.incarnation), FENCE_S)
        except RaftqError as error:
            logger.warning("node=%d could not give up its lease: %s", self.node_id, error)
        if self.http is not None:
            await self.http.stop()
        finished = await self.server.drain(self.config.drain_ms / 1000)
        logger.info("node=%d drained finished=%s", self.node_id, finished)

    async def stop(self) -> None:
        """Close everything. After a failure the files are not marked as clean."""
        failed = self.fatal.done()
        if self.membership is not None:
            await self.membership.stop()
        if self.http is not None:
            await self.http.stop()
        if self._listening:
            await self.server.__aexit__(None, None, None)
        self.upkeep.stop()
        clean = self.partitions.stop(clean=not failed)
        await self.copy_sender.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self.metadata.stop()
        self.syncer.close()
        if self._lock is not None:
            # A start that never reported its losses must not confirm that nothing is lost.
            if self._serving and clean:
                self._mark_clean()
            self._lock.release()
            self._lock = None

    def _mark_clean(self) -> None:
        try:
            remember(self.disk, self.config.data_dir, self._identity, clean=True)
        except StorageError as error:
            logger.warning("node=%d cannot record a clean stop: %s", self.node_id, error)

    def fail(self, error: BaseException) -> None:
        """End the node because of an error that cannot be handled."""
        if not self.fatal.done():
            trace = None if isinstance(error, NodeIdTaken) else error  # a mistake of the operator
            logger.critical("node=%d fails: %s", self.node_id, error, exc_info=trace)
            self.fatal.set_exception(error)
            self.fatal.exception()  # those who wait for it get the error; nobody has to

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task of the node. Its failure ends the node."""
        task = self.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    @property
    def native_port(self) -> int:
        return self.server.port

    @property
    def http_port(self) -> int:
        return 0 if self.http is None else self.http.port

    # Peers

    async def connect(self, node_id: int) -> Connection:
        """Connect to another node, at the address that the metadata has.

        The process there must be the incarnation that the metadata knows: the words of another
        process are not those of that node.
        """
        node = self.metadata.state.nodes.get(node_id)
        if node is None:
            raise ConnectFailed(f"node {node_id} is not known")
        host, port = self._address_of(node)
        connection = await Connection.open(host, port, self._peer_options())
        hello = connection.hello
        if hello is None or hello.node_id != node_id:
            await connection.close()
            raise ConnectFailed(f"{host}:{port} is not node {node_id}")
        if hello.incarnation != node.incarnation:
            await connection.close()
            raise ConnectFailed(
                f"{host}:{port} is node {node_id} as incarnation {hello.incarnation}; "
                f"{node.incarnation} is registered as far as is known here"
            )
        return connection

    def _address_of(self, node: NodeState) -> tuple[str, int]:
        """Return the address at which this node reaches another one: its own, unless the
        settings name another."""
        given = self.config.peers.get(node.node_id)
        if given is None:
            return node.host, node.port
        address = Address.parse(given)
        return address.host, address.port

    def _admit(self, hello: Hello) -> None:
        if hello.role == "node" and not check_proof(
            hello.cluster_proof, self.config.secret, self.config.cluster_id
        ):
            self.metrics.connections_refused += 1
            raise AccessDenied(
                f"{hello.name or 'the caller'} has not proved that it is a node of cluster "
                f"{self.config.cluster_id!r}: wrong secret or cluster"
            )
        self.metrics.connections_total += 1

    def _left(self, session: Session) -> None:
        self.follower_sessions.session_ended(session)
        node_id = self._beating.pop(session, None)
        if node_id is not None:
            self.driver.session_lost(node_id)

    def _heartbeat(self, message: Heartbeat, raw: memoryview, session: Session) -> HeartbeatReply:
        self._beating[session] = message.node_id
        return self.driver.heartbeat(message.node_id, message.incarnation)

    def _identify(self, message: Identify, raw: memoryview, session: Session) -> IdentifyReply:
        return IdentifyReply(self.node_id, self.incarnation)

    def _registration(self, loss: Loss) -> RegisterNode:
        config = self.config
        return RegisterNode(
            node_id=config.node_id,
            host=config.host,
            port=config.advertised_port or self.native_port,
            http_port=self.http_port,
            raft_address=config.raft_address if config.is_voter else "",
            rack=config.rack,
            incarnation=self.incarnation,
            lost=loss.lost,
            before=loss.before,
            synced=loss.synced,
        )


def _only_nodes(handler: Handler) -> Handler:
    def guarded(message: Any, raw: memoryview, session: Session) -> Any:
        if session.hello is None or session.hello.role != "node":
            raise AccessDenied(f"{type(message).__name__} is for nodes only")
        return handler(message, raw, session)

    return guarded


async def run_node(
    config: NodeConfig,
    ready: Callable[[Node], None] | None = None,
    surroundings: Surroundings | None = None,
) -> None:
    """Run a node until SIGTERM or SIGINT, then drain and stop it."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    around = surroundings or Surroundings(RealDisk(), wall_ms, boot_id())
    clock = SteadyClock(around.wall_ms, elapsed_s)
    node = Node(config, disk=around.disk, rng=SystemRandom(), wall_ms=clock, boot=around.boot)
    stopping = loop.create_task(stop.wait())
    starting = loop.create_task(node.start())
    try:
        await _first(starting, stopping, node.fatal)
        if starting.done():
            starting.result()
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            if ready is not None:
                ready(node)
            await _first(stopping, node.fatal)
        if node.fatal.done():
            node.fatal.result()
        if starting.done():
            await node.drain()
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.wait((starting, stopping))
        await node.stop()


async def _first(*ends: "asyncio.Future[Any]") -> None:
    """Wait until one of these is done."""
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


__all__ = ["ConfigError", "Node", "run_node"]
