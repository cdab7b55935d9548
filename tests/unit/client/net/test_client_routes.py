"""Whom a client asks who leads: nobody that knows too little is asked for ever."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raftq.client.common.errors import ConnectFailed
from raftq.client.common.tasks import Tasks
from raftq.client.net import routes as module
from raftq.client.net.routes import Routes
from raftq.client.options import Address, ClientOptions
from raftq.client.wire.messages import MetadataReply, NodeInfo, PartitionInfo, TopicInfo

ADDRESSES: list[Address] = [("host", 1), ("host", 2), ("host", 3)]


def reply(leader: int, epoch: int) -> MetadataReply:
    nodes = tuple(NodeInfo(port, host, port) for host, port in ADDRESSES)
    part = PartitionInfo(0, leader, epoch, (1, 2, 3), (1, 2, 3))
    return MetadataReply("c", nodes, (TopicInfo("t", (part,)),))


class Pool:
    """Nodes that answer at once, or are down; notes who is asked."""

    def __init__(self) -> None:
        self.answers: dict[Address, MetadataReply | None] = dict.fromkeys(ADDRESSES, reply(1, 1))
        self.asked: list[Address] = []

    async def get(self, address: Address) -> Any:
        self.asked.append(address)
        answer = self.answers[address]
        if answer is None:
            raise ConnectFailed("down")

        async def request(message: Any, timeout_s: float) -> Any:
            return SimpleNamespace(message=answer)

        return SimpleNamespace(request=request)


def run(story: Callable[[Routes, Pool], Awaitable[None]]) -> None:
    async def scenario() -> None:
        pool, tasks = Pool(), Tasks("test")
        routes = Routes(ADDRESSES, pool, ClientOptions(refresh_ms_min=1), tasks)  # type: ignore[arg-type]
        routes.want(["t"])
        try:
            await story(routes, pool)
        finally:
            await tasks.close()

    asyncio.run(scenario())


def test_nodes_that_were_down_once_are_asked_again_though_another_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.05)

    async def story(routes: Routes, pool: Pool) -> None:
        for address in ADDRESSES[1:]:
            pool.answers[address] = None
        for _ in range(4):
            await routes.refresh()
        # They are back and know of a new leader; the first is cut off and does not.
        for address in ADDRESSES[1:]:
            pool.answers[address] = reply(2, 2)
        async with asyncio.timeout(5):
            while pool.asked[-1] == ADDRESSES[0]:
                await routes.refresh()
        assert routes.leader("t", 0) == (2, ("host", 2))

    run(story)


def test_an_avoided_node_is_asked_last_for_a_while() -> None:
    async def story(routes: Routes, pool: Pool) -> None:
        await routes.refresh()
        for turn in range(6):
            routes.avoid(ADDRESSES[turn % 3])
            pool.asked.clear()
            await routes.refresh()
            assert pool.asked[0] != ADDRESSES[turn % 3]
            routes._avoided.clear()

    run(story)


def test_an_avoided_node_is_asked_all_the_same_when_no_other_answers() -> None:
    async def story(routes: Routes, pool: Pool) -> None:
        await routes.refresh()
        routes.avoid(ADDRESSES[0])
        for address in ADDRESSES[1:]:
            pool.answers[address] = None
        await routes.refresh()
        assert pool.asked[-1] == ADDRESSES[0]

    run(story)
