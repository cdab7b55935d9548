"""Consensus on loopback for tests: whole nodes, and bare transports that are polled by hand."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
from pysyncobj.poller import createPoller

from raftq.client.common.errors import QueueFull
from raftq.cluster.raft.config import ConsensusConfig, RaftTimes
from raftq.cluster.raft.consensus import Consensus
from raftq.cluster.raft.library import Node
from raftq.cluster.raft.messages import RequestVoteReply
from raftq.cluster.raft.transport import RaftTransport, listen

SECRET = b"a secret of the tests"
ROUNDS_MAX = 2000
FAST = RaftTimes(
    election_ms_min=150, election_ms_max=300, append_ms=40, tick_ms=10, fallback_ms=450,
    reconnect_ms=50, connection_ms=1000, stuck_ms=400,
)  # fmt: skip


class Numbers:
    def __init__(self) -> None:
        self.commands: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()

    def apply(self, command: bytes, index: int) -> Any:
        self.gate.wait(10)
        if command == b"refuse":
            raise QueueFull("the machine refuses")
        if command == b"break":
            raise ZeroDivisionError
        self.commands.append(command)
        return len(self.commands)

    def snapshot(self) -> bytes:
        packed: bytes = msgpack.packb(self.commands)
        return packed

    def restore(self, data: bytes) -> None:
        self.commands = msgpack.unpackb(data)


def ports(count: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return found


def configs(tmp_path: Path, size: int, **settings: Any) -> list[ConsensusConfig]:
    voters = {f"n{place}": f"127.0.0.1:{port}" for place, port in enumerate(ports(size))}
    settings = {"times": FAST, "secret": SECRET, **settings}
    return [
        ConsensusConfig(node_id=one, voters=voters, directory=str(tmp_path / one), **settings)
        for one in voters
    ]


Body = Callable[[list[Consensus]], Awaitable[None]]


def run(nodes: list[Consensus], body: Body) -> None:
    """Start the nodes, run the body, stop them whatever happens."""

    async def main() -> None:
        try:
            for node in nodes:
                await node.start()
            async with asyncio.timeout(20):
                await body(nodes)
        finally:
            for node in nodes:
                await node.stop()

    asyncio.run(main())


class End:
    """One node's transport with a clock, and what it heard."""

    def __init__(self, name: str, voters: dict[str, str], secret: bytes = SECRET) -> None:
        config = ConsensusConfig(node_id=name, voters=voters, directory="unused", secret=secret)
        self.selfNode = Node(name)
        self.otherNodes = {Node(one) for one in voters if one != name}
        self._poller = createPoller("poll")
        self.now = 10.0
        self.events: list[Any] = []
        self.listener = listen(config)
        self.transport = RaftTransport(self, config, self.listener, lambda: self.now)
        self.transport.setOnNodeConnectedCallback(lambda node: self.events.append(("up", node.id)))
        self.transport.setOnNodeDisconnectedCallback(
            lambda node: self.events.append(("down", node.id))
        )
        self.transport.setOnMessageReceivedCallback(
            lambda node, message: self.events.append((node.id, message.term))
        )

    def turn(self) -> None:
        self._poller.poll(0.001)
        self.transport.tick(self.now)

    def say(self, target: str, term: int) -> bool:
        message = RequestVoteReply(term, True)
        return bool(self.transport.send(Node(target), message))


def until(condition: Callable[[], bool], *ends: End) -> None:
    for _ in range(ROUNDS_MAX):
        if condition():
            return
        for end in ends:
            end.now += 0.001
            end.turn()
    raise AssertionError([end.events for end in ends])


@contextlib.contextmanager
def opened(*ends: End) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ends:
            end.transport.destroy()
