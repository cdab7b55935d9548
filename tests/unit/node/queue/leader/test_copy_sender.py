"""How copies leave a node: to itself, to whoever leads, and to dead letters that are made first."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from raftq.client.common.errors import (
    ConnectionLost,
    NotLeader,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.wire.messages import Produce, ProduceReply
from raftq.cluster.metadata.commands import AddPartitions, AllocateProducerIds, CreateTopic
from raftq.cluster.metadata.state import PartitionState, TopicState
from raftq.cluster.metadata.topic_config import topic_config
from raftq.node.queue.leader.copy_sender import NodeCopySender


def topic(name: str, partitions: int, leader: int | None = 1) -> TopicState:
    one = PartitionState((1, 2, 3), (1, 2, 3), leader, 1, 1, (1, 1, 1))
    config = topic_config({"value_bytes_max": 5_000, "min_insync": 3}, 3)
    return TopicState(name, 5, config, (one,) * partitions)


@dataclass
class State:
    topics: dict[str, TopicState] = field(default_factory=dict)


@dataclass
class Metadata:
    """Decides at once; an error that is set is raised instead."""

    state: State = field(default_factory=State)
    proposed: list[Any] = field(default_factory=list)
    error: Exception | None = None

    async def propose(self, command: Any) -> Any:
        self.proposed.append(command)
        if self.error is not None:
            raise self.error
        if isinstance(command, CreateTopic):
            self.state.topics[command.topic] = topic(command.topic, command.partitions)
        if isinstance(command, AddPartitions):
            self.state.topics[command.topic] = topic(command.topic, command.partitions)
        return 77


class Here:
    """The node's own partitions, and one of them."""

    def __init__(self) -> None:
        self.produced: list[tuple[Produce, bytes]] = []

    def of(self, name: str, number: int) -> "Here":
        return self

    def produce(self, message: Produce, raw: memoryview) -> Any:
        self.produced.append((message, bytes(raw)))
        future = asyncio.get_running_loop().create_future()
        future.set_result(ProduceReply((0,)))
        return future


class Link:
    """A connection to another node."""

    def __init__(self) -> None:
        self.closed = False
        self.requests: list[Any] = []
        self.error: Exception | None = None

    async def request(self, message: Any, raw: Any = (), timeout_s: float | None = None) -> None:
        self.requests.append((message, bytes(raw[0])))
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        self.closed = True

    async def close(self) -> None:
        self.closed = True


def made() -> tuple[NodeCopySender, Metadata, Here, list[tuple[int, Link]]]:
    metadata, here = Metadata(), Here()
    links: list[tuple[int, Link]] = []

    async def connect(node_id: int) -> Link:
        links.append((node_id, Link()))
        return links[-1][1]

    copy_sender = NodeCopySender(1, here.of, metadata, connect)  # type: ignore[arg-type]
    return copy_sender, metadata, here, links


def test_dead_letters_are_like_their_topic_and_grow_with_it() -> None:
    async def scenario() -> None:
        copy_sender, metadata, _, _ = made()
        metadata.state.topics["t"] = topic("t", 4)
        await asyncio.gather(*(copy_sender.make_dead_letters("t") for _ in range(5)))
        (command,) = metadata.proposed
        assert (command.topic, command.partitions, command.replication) == ("t.dlq", 4, 3)
        assert command.config["retention_ms"] == 336 * 3_600_000
        assert (command.config["min_insync"], command.config["value_bytes_max"]) == (3, 5_000)
        metadata.state.topics["t"] = topic("t", 6)
        await copy_sender.make_dead_letters("t")
        assert metadata.proposed[1:] == [AddPartitions("t.dlq", 6)]
        await copy_sender.make_dead_letters("t")
        await copy_sender.make_dead_letters("unknown")
        assert len(metadata.proposed) == 2

    asyncio.run(scenario())


def test_dead_letters_that_another_node_made_meanwhile_are_no_error() -> None:
    async def scenario() -> None:
        copy_sender, metadata, _, _ = made()
        metadata.state.topics["t"] = topic("t", 4)
        metadata.error = TopicExists("t.dlq")
        await copy_sender.make_dead_letters("t")

    asyncio.run(scenario())


def test_copies_go_to_the_leader_here_or_elsewhere() -> None:
    async def scenario() -> None:
        copy_sender, metadata, here, links = made()
        metadata.state.topics["t"] = topic("t", 1)
        await copy_sender.send(("t", 0), bytearray(b"batch"))
        assert (here.produced[0][0].acks, here.produced[0][1]) == ("all", b"batch")
        metadata.state.topics["t"] = topic("t", 1, leader=3)
        await asyncio.gather(*(copy_sender.send(("t", 0), bytearray(b"batch")) for _ in range(3)))
        ((node_id, link),) = links
        assert (node_id, len(link.requests)) == (3, 3)
        link.error = ConnectionLost("gone")
        with pytest.raises(ConnectionLost):
            await copy_sender.send(("t", 0), bytearray(b"batch"))
        assert link.closed
        await copy_sender.send(("t", 0), bytearray(b"batch"))
        assert len(links) == 2
        await copy_sender.close()
        assert links[1][1].closed

    asyncio.run(scenario())


def test_copies_without_a_place_to_go_are_refused() -> None:
    async def scenario() -> None:
        copy_sender, metadata, _, _ = made()
        metadata.state.topics["t"] = topic("t", 1, leader=None)
        for target, error in (
            (("t", 0), NotLeader),
            (("t", 1), UnknownPartition),
            (("u", 0), UnknownTopic),
        ):
            with pytest.raises(error):
                await copy_sender.send(target, bytearray())
        assert copy_sender.exists(("t", 0))
        assert not copy_sender.exists(("t", 1))
        assert not copy_sender.exists(("u", 0))
        assert await copy_sender.producer_id() == 77
        assert metadata.proposed == [AllocateProducerIds(1, 1)]

    asyncio.run(scenario())
