"""A loop, a network and processes for tests of the simulator itself."""

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

from simloop import Machine, Process, VirtualTimeLoop
from simnet import NetworkShape, SimNetwork

from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions
from raftq.client.wire.messages import Ping, PingReply
from raftq.node.native.tcp import TcpServer

PORT = 7070


class World:
    """A loop, a network, and machines by name."""

    def __init__(self, seed: int = 0, shape: NetworkShape | None = None) -> None:
        self.loop = VirtualTimeLoop()
        self.network = SimNetwork(self.loop, Random(seed), shape)
        self.machines: dict[str, Machine] = {}
        self.processes: list[Process] = []

    def process(self, name: str) -> Process:
        machine = self.machines.setdefault(name, Machine(name))
        process = Process(self.loop, machine, name)
        process.on_death.append(lambda: self.network.process_died(process))
        self.processes.append(process)
        return process

    def kill(self, process: Process, powered: bool = True) -> None:
        process.machine.powered = powered
        process.kill()

    def run(self, main: Coroutine[Any, Any, Any], seconds_max: float = 600.0) -> Any:
        try:
            return self.loop.run(main, seconds_max=seconds_max, turns_max=1_000_000)
        finally:
            for process in self.processes:
                if not process.dead:
                    self.kill(process)
            self.loop.end()
            assert not [one.failures for one in self.processes if one.failures]


async def serve(port: int = PORT) -> None:
    """A node that answers pings until it is killed."""
    async with TcpServer({}, node_id=1, cluster_id="c") as server:
        await server.start("127.0.0.1", port)
        await asyncio.Event().wait()


async def ping(port: int = PORT, **options: Any) -> PingReply:
    async with await Connection.open("n", port, ConnectionOptions(**options)) as connection:
        return (await connection.request(Ping())).message
