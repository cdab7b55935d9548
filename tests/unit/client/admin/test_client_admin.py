"""The admin client: topics come up served, errors say what is wrong, retries do no harm."""

import asyncio
from typing import Any

import pytest
from fake_cluster import fake_cluster, lost, simulate

from raftq.aio import Admin
from raftq.client.common.errors import (
    ConfigError,
    ConnectFailed,
    InvalidArgument,
    RequestTimeout,
    TopicExists,
    UnknownTopic,
)
from raftq.client.options import addresses


def test_topics_are_created_described_grown_and_deleted() -> None:
    async def main() -> None:
        async with fake_cluster(3) as cluster, Admin(cluster.bootstrap) as admin:
            created = await admin.create_topic("orders", partitions=6, replication=3)
            assert len(created.partitions) == 6
            assert all(one.leader is not None for one in created.partitions)
            assert await admin.list_topics() == ["orders"]
            cluster.topics["orders"][2].end = 17
            described = await admin.describe_topic("orders")
            part = described.partitions[2]
            assert (part.leader, part.epoch, part.start_offset, part.high_watermark) == (
                3,
                1,
                0,
                17,
            )
            assert part.replicas == part.isr == (1, 2, 3)
            assert (described.name, described.topic_id, described.replication) == ("orders", 1, 3)
            assert len((await admin.add_partitions("orders", 12)).partitions) == 12
            assert [one.name for one in await admin.describe_topics()] == ["orders"]
            with pytest.raises(TopicExists):
                await admin.create_topic("orders")
            with pytest.raises(InvalidArgument, match="colour"):
                await admin.alter_topic("orders", {"colour": "red"})
            await admin.delete_topic("orders")
            with pytest.raises(UnknownTopic):
                await admin.delete_topic("orders")
            with pytest.raises(UnknownTopic):
                await admin.describe_topic("orders")
            assert [node.node_id for node in await admin.nodes()] == [1, 2, 3]

    simulate(main())


def test_create_topic_waits_until_leaders_answer() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with fake_cluster(2) as cluster, Admin(cluster.bootstrap) as admin:
            add = cluster.add_topic

            def add_slowly(name: str, partitions: int = 1) -> Any:
                parts = add(name, partitions)
                cluster.lead(name, 1, None)
                loop.call_later(2.0, cluster.lead, name, 1, 2)
                return parts

            cluster.add_topic = add_slowly  # type: ignore[method-assign]
            began = loop.time()
            created = await admin.create_topic("t", 3)
            assert loop.time() - began >= 2.0
            assert created.partitions[1].leader == 2

    simulate(main())


def test_a_topic_that_gets_no_leader_is_an_error_that_says_so() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Admin(cluster.bootstrap, timeout_ms=2_000) as admin:
            add = cluster.add_topic

            def add_badly(name: str, partitions: int = 1) -> Any:
                parts = add(name, partitions)
                cluster.lead(name, 0, None)
                return parts

            cluster.add_topic = add_badly  # type: ignore[method-assign]
            with pytest.raises(RequestTimeout, match=r"no leader answers for partitions \[0\]"):
                await admin.create_topic("t", 2)
            described = await admin.describe_topic("t")
            assert described.partitions[0].start_offset is None
            assert described.partitions[1].start_offset == 0

    simulate(main())


def test_a_creation_whose_reply_was_lost_counts_as_done() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Admin(cluster.bootstrap) as admin:
            create = cluster._create_topic
            calls: list[int] = []

            def create_and_lose(request: Any, raw: memoryview, node_id: int) -> Any:
                reply = create(request, raw, node_id)
                calls.append(node_id)
                if len(calls) == 1:
                    raise lost()
                return reply

            await cluster.stop_node(1)
            cluster._create_topic = create_and_lose  # type: ignore[method-assign]
            await cluster.start_node(1)
            assert len((await admin.create_topic("t", 2)).partitions) == 2
            assert len(calls) == 1

    simulate(main())


def test_a_dead_node_is_passed_over() -> None:
    async def main() -> None:
        async with fake_cluster(3) as cluster, Admin(cluster.bootstrap) as admin:
            await admin.nodes()
            for node in (1, 2):
                await cluster.stop_node(node)
            assert len(await admin.nodes()) == 3
            await admin.create_topic("t", 2)

    simulate(main())


def test_nobody_there_is_an_error_that_names_the_addresses() -> None:
    async def main() -> None:
        async with Admin("127.0.0.1:1", bootstrap_ms=500) as admin:
            with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1:1"):
                await admin.list_topics()

    simulate(main())


def test_bootstrap_addresses_are_text_lists_or_both() -> None:
    assert addresses("a:1") == [("a", 1)]
    assert addresses("a:1, b:2,a:1") == [("a", 1), ("b", 2)]
    assert addresses(["a:1", "b"]) == [("a", 1), ("b", 7070)]
    assert addresses("[::1]:5,[::2]") == [("::1", 5), ("::2", 7070)]
    for wrong in ("", "a:", "a:x", "a:70000", [7070]):
        with pytest.raises(ConfigError):
            addresses(wrong)  # type: ignore[arg-type]
