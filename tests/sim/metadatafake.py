"""Metadata without consensus: one decided order in memory, and a MetadataLog for each node.

`FakeLog` decides at once, and delivers to every node that is not cut off; `FakeMetadata` is what a
node sees of it. Runs on any event loop, also one with virtual time.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from raftq.client.common.errors import NoLeader, RaftqError
from raftq.cluster.metadata.apply import apply
from raftq.cluster.metadata.commands import Command, decode_command, encode_command
from raftq.cluster.metadata.copy import MetadataCopy
from raftq.cluster.metadata.log import PROPOSE_S, ControllerSubscriber, Subscriber, Watched
from raftq.cluster.metadata.state import ClusterState
from raftq.cluster.raft.applied import ID_BYTES, make_command_id


class FakeLog:
    def __init__(self, cluster_id: str = "test", voters: tuple[int, ...] = (1, 2, 3)) -> None:
        self.cluster_id = cluster_id
        self.voters = voters
        self.leader: int | None = voters[0]
        self.term = 1
        self.state = ClusterState(cluster_id)
        self.entries: list[tuple[bytes, bytes | None]] = []
        """(command id, command, or None for one that was refused); the index begins at 1."""
        self.results: dict[bytes, tuple[Any, RaftqError | None]] = {}
        self.nodes: list[FakeMetadata] = []

    def lead(self, leader: int | None) -> None:
        self.leader = leader
        self.term += 1
        for node in self.nodes:
            node.catch_up()

    def decide(self, command: Command, command_id: bytes) -> Any:
        encoded = encode_command(command)
        if command_id not in self.results:
            result, error = None, None
            try:
                result, _ = apply(self.state, decode_command(encoded), len(self.entries) + 1)
            except RaftqError as refused:
                error = refused
            self.results[command_id] = result, error
            self.entries.append((command_id, None if error else encoded))
            for node in self.nodes:
                node.catch_up()
        result, error = self.results[command_id]
        if error is not None:
            raise error
        return result


class FakeMetadata:
    """A MetadataLog."""

    def __init__(self, log: FakeLog, node_id: int, rng: Random | None = None) -> None:
        self.log = log
        self.node_id = node_id
        self.connected = True
        self.proposals = 0
        self.refuse: Callable[[Command], RaftqError | None] = lambda command: None
        self._rng = rng or Random(node_id)
        self.copy = MetadataCopy(log.cluster_id)
        self.subscribe: Callable[[Subscriber], None] = self.copy.subscribe
        self.on_controller: Callable[[ControllerSubscriber], None] = self.copy.on_controller
        log.nodes.append(self)

    @property
    def state(self) -> ClusterState:
        return self.copy.state

    @property
    def index(self) -> int:
        return self.copy.index

    @property
    def controller(self) -> int | None:
        return self.copy.controller

    @property
    def is_controller(self) -> bool:
        return self.copy.controller == self.node_id

    @property
    def term(self) -> int:
        return self.copy.term

    @property
    def voters(self) -> tuple[int, ...]:
        return self.log.voters

    def new_command_id(self) -> bytes:
        return make_command_id(self._rng.randbytes(ID_BYTES), self.index)

    def cut(self, connected: bool) -> None:
        self.connected = connected
        self.catch_up()

    def catch_up(self) -> None:
        if self.connected:
            for index in range(self.index + 1, len(self.log.entries) + 1):
                self.copy.applied(index, self.log.entries[index - 1][1])
            self.copy.set_controller(self.log.leader, self.log.term)

    async def propose(
        self, command: Command, timeout_s: float = PROPOSE_S, command_id: bytes | None = None
    ) -> Any:
        self.proposals += 1
        name = command_id or self.new_command_id()
        error = self.refuse(command)
        if error is not None:
            raise error
        try:
            async with asyncio.timeout(timeout_s):
                while not self.connected or self.log.leader is None:
                    await self.copy.moved()
        except TimeoutError:
            raise NoLeader("no leader took the command in time") from None
        result = self.log.decide(command, name)
        await self.copy.has_reached(self.index)
        return result

    def abdicate(self) -> None:
        if self.is_controller:
            self.log.lead(next(one for one in self.log.voters if one != self.node_id))

    async def watch(self, index: int | None, wait_s: float) -> Watched:
        return await self.copy.watch(index, wait_s)

    async def start(self) -> None:
        self.catch_up()

    async def stop(self) -> None:
        pass
