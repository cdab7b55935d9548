"""Voters, membership, controllers and an observer together, over real sockets in one process."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

from raftq.client.common.errors import AccessDenied
from raftq.client.options import ConnectionOptions
from raftq.client.wire.messages import Hello
from raftq.client.wire.node_messages import Heartbeat, HeartbeatReply, Propose, WatchMetadata
from raftq.client.wire.proof import check_proof, cluster_proof
from raftq.cluster.controller.driver import ControllerDriver
from raftq.cluster.controller.events import ControllerConfig
from raftq.cluster.controller.membership import Membership
from raftq.cluster.metadata.apply import dump
from raftq.cluster.metadata.commands import CreateTopic, RegisterNode
from raftq.cluster.metadata.handlers import MetadataHandlers
from raftq.cluster.metadata.observer import ObserverMetadata
from raftq.cluster.metadata.voter import VoterMetadata
from raftq.cluster.raft.config import ConsensusConfig, RaftTimes
from raftq.node.native.session import Session
from raftq.node.native.tcp import TcpServer

SECRET = b"a secret of the tests"
OPTIONS = ConnectionOptions(role="node", cluster_proof=cluster_proof(SECRET, "test"))
TIMES = RaftTimes(
    election_ms_min=300, election_ms_max=600, append_ms=50, fallback_ms=900, reconnect_ms=50
)


def ports(count: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return found


class Node:
    def __init__(
        self, node_id: int, metadata: VoterMetadata | ObserverMetadata, incarnation: int
    ) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.metadata = metadata
        self.driver = ControllerDriver(
            *(metadata, ControllerConfig(lease_ms=60_000), Random(node_id), OPTIONS),
            incarnation=incarnation,
        )
        self.beating: dict[Session, int] = {}
        handlers = MetadataHandlers(metadata, node_id)
        self.server = TcpServer(
            {
                Heartbeat: self.on_heartbeat,
                Propose: handlers.propose,
                WatchMetadata: handlers.watch,
            },
            node_id=node_id,
            cluster_id="test",
            incarnation=incarnation,
            admit=self.admit,
            on_leave=self.on_leave,
        )
        self.membership: Membership | None = None
        self.task: asyncio.Task[None] | None = None

    def admit(self, hello: Hello) -> None:
        if not check_proof(hello.cluster_proof, SECRET, "test"):
            raise AccessDenied("not of this cluster")

    def on_heartbeat(self, message: Heartbeat, raw: memoryview, session: Session) -> HeartbeatReply:
        self.beating[session] = message.node_id
        return self.driver.heartbeat(message.node_id, message.incarnation)

    def on_leave(self, session: Session) -> None:
        if session in self.beating:
            self.driver.session_lost(self.beating.pop(session))

    async def start(self) -> None:
        await self.metadata.start()
        await self.server.__aenter__()
        await self.server.start()
        self.task = asyncio.ensure_future(self.driver.run())

    async def join(self) -> None:
        registration = RegisterNode(
            self.node_id, "127.0.0.1", self.server.port, 0, "", "", self.incarnation
        )
        self.membership = Membership(self.metadata, registration, 100, OPTIONS, self.driver)
        await self.membership.start()

    async def stop(self) -> None:
        """As suddenly as it goes within one process: nobody is told."""
        if self.membership is not None:
            await self.membership.stop()
        await self.server.__aexit__(None, None, None)
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait((self.task,))
            assert self.task.cancelled()
        await self.metadata.stop()


def run(tmp_path: Path, body: Callable[[list[Node]], Awaitable[None]]) -> None:
    voters = {str(one): f"127.0.0.1:{port}" for one, port in enumerate(ports(3), 1)}

    def voter(node_id: int) -> Node:
        config = ConsensusConfig(
            node_id=str(node_id), voters=voters, directory=str(tmp_path / str(node_id)),
            secret=SECRET, times=TIMES,
        )  # fmt: skip
        return Node(node_id, VoterMetadata(config, "test"), node_id)

    async def main() -> None:
        nodes = [voter(one) for one in (1, 2, 3)]
        try:
            async with asyncio.timeout(30):
                await asyncio.gather(*(node.start() for node in nodes))
                await asyncio.gather(*(node.join() for node in nodes))
                seeds = [f"127.0.0.1:{node.server.port}" for node in nodes]
                watching = ObserverMetadata("test", seeds, OPTIONS, voters=(1, 2, 3), rng=Random(4))
                nodes.append(Node(4, watching, 4))
                await nodes[3].start()
                await nodes[3].join()
                await body(nodes)
        finally:
            await asyncio.gather(*(node.stop() for node in nodes))

    asyncio.run(main())


async def until(node: Node, what: Callable[[], bool]) -> None:
    metadata = node.metadata
    while not what():
        await metadata._copy.moved()


def test_dead_nodes_lose_their_leadership_at_once_also_when_one_was_the_controller(
    tmp_path: Path,
) -> None:
    """
    1. three voters and an observer register, and a topic has replicas on all four
    2. the observer dies: the controller fences it long before its lease ends
    3. the controller dies: the next one fences it, and its partitions have leaders among the rest
    """

    async def body(nodes: list[Node]) -> None:
        watching = nodes[3]
        await watching.metadata.propose(CreateTopic("orders", 8, 4))
        state = watching.metadata.state
        assert {one.leader for _, _, one in state.all_partitions()} == {1, 2, 3, 4}
        assert watching.metadata.controller in (1, 2, 3)
        assert watching.membership is not None
        await watching.membership.heartbeats_accepted.wait()
        await nodes.pop().stop()
        await until(nodes[0], lambda: not nodes[0].metadata.state.is_alive(4))

        controller = nodes[0].metadata.controller
        victim = next(node for node in nodes if node.node_id == controller)
        nodes.remove(victim)
        await victim.stop()
        rest = sorted(node.node_id for node in nodes)
        for node in nodes:
            await until(node, lambda n=node: not n.metadata.state.is_alive(victim.node_id))
            assert node.metadata.controller in rest
        found = nodes[0].metadata.state
        assert sorted({one.leader for _, _, one in found.all_partitions()}) == rest
        await nodes[1].metadata._copy.has_reached(nodes[0].metadata.index)
        assert dump(nodes[1].metadata.state) == dump(nodes[0].metadata.state)

    run(tmp_path, body)
