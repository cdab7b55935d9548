"""The gateway of the HTTP server over the client library, on a cluster in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_cluster import FakeCluster, fake_cluster, simulate
from fake_gateway import FakeFacts, FakeMetadata

from raftq.client.common.errors import (
    NotEnoughReplicas,
    NotLeader,
    OffsetOutOfRange,
    RaftqError,
    RequestTimeout,
    TopicExists,
    UnknownTopic,
)
from raftq.client.wire.batch import decode
from raftq.cluster.metadata.state import TopicState
from raftq.node.http.client_gateway import ClientGateway
from raftq.node.http.gateway import Outgoing, Placed, Position

MIB = 1024 * 1024


class Stage:
    """A cluster, the gateway of its first node, and that node's metadata."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.metadata = FakeMetadata()
        facts = FakeFacts(self.metadata)
        facts.native_address = ("127.0.0.1", cluster.ports[1])
        self.gateway = ClientGateway(facts)

    def topic(self, name: str) -> TopicState:
        """As the node's metadata has it."""
        parts = self.cluster.topics[name]
        known = self.metadata.state.topics.get(name)
        if known is None or len(known.partitions) != len(parts):
            self.metadata.put(name, len(parts), {})
        return self.metadata.state.topics[name]

    async def publish(self, name: str, *values: bytes, **columns: Any) -> list[Any]:
        return await self.gateway.publish(self.topic(name), Outgoing(list(values), **columns))

    async def offsets(self, position: Position, limit: int = 1000, most: int = MIB) -> list[int]:
        page = await self.gateway.read("t", 0, position, limit, most)
        return [record.offset for record in page.records]


@asynccontextmanager
async def stage(nodes: int = 1) -> AsyncIterator[Stage]:
    async with fake_cluster(nodes) as cluster:
        one = Stage(cluster)
        try:
            yield one
        finally:
            await one.gateway.close()


def test_records_arrive_with_everything_they_brought() -> None:
    async def main() -> None:
        async with stage(2) as here:
            logs = here.cluster.add_topic("t", 2)
            outcomes = await here.publish(
                "t", b"a", b"b",
                keys=[b"k", None], headers=[None, {"h": b"1"}], partitions=[1, 0],
                priorities=[0, 4],
            )  # fmt: skip
            assert outcomes == [Placed(1, 0), Placed(0, 0)]
            (first,), (second,) = (decode(log.batches[0]).records() for log in (logs[1], logs[0]))
            assert (first.key, first.value, first.priority) == (b"k", b"a", 0)
            assert (second.headers, second.value, second.priority) == ({"h": b"1"}, b"b", 4)
            page = await here.gateway.read("t", 1, Position(), 10, MIB)
            assert [record.value for record in page.records] == [b"a"]
            assert page.next_offset == 1

    simulate(main())


def test_requests_at_the_same_time_share_batches() -> None:
    async def main() -> None:
        async with stage() as here:
            log = here.cluster.add_topic("t", 1)[0]
            await here.publish("t", b"first")
            outcomes = await asyncio.gather(*[here.publish("t", b"%d" % n) for n in range(200)])
            assert sorted(one.offset for (one,) in outcomes) == list(range(1, 201))
            assert len(log.batches) < 20

    simulate(main())


def test_a_record_that_fails_leaves_the_others_alone() -> None:
    async def main() -> None:
        async with stage() as here:
            here.cluster.add_topic("t", 2)

            def refuse(request: Any, node_id: int) -> None:
                if request.partition == 1:
                    error = NotEnoughReplicas("one is missing")
                    error.retriable = False
                    raise error

            here.cluster.before = refuse
            first, second, third = await here.publish("t", b"a", b"b", b"c", partitions=[0, 1, 0])
            assert (first, third) == (Placed(0, 0), Placed(0, 1))
            assert isinstance(second, NotEnoughReplicas)

    simulate(main())


def test_a_partition_without_a_leader_is_given_up_before_the_request_is() -> None:
    async def main() -> None:
        async with stage() as here:
            here.cluster.add_topic("t", 1)
            here.cluster.lead("t", 0, None)
            began = asyncio.get_running_loop().time()
            (outcome,) = await here.publish("t", b"b")
            assert isinstance(outcome, RequestTimeout)
            assert outcome.retriable
            with pytest.raises(NotLeader):
                await here.offsets(Position())
            assert asyncio.get_running_loop().time() - began < 2 * 30

    simulate(main())


def test_new_partitions_can_be_used_at_once() -> None:
    async def main() -> None:
        async with stage() as here:
            here.cluster.add_topic("t", 1)
            await here.publish("t", b"a")
            assert await here.gateway.add_partitions("t", 3) == 3
            assert await here.publish("t", b"b", partitions=[2]) == [Placed(2, 0)]

    simulate(main())


def test_a_topic_that_was_deleted_and_made_again_is_another_one() -> None:
    async def main() -> None:
        async with stage() as here:
            assert await here.gateway.create_topic("t", 4, 1, {}) == 4
            for _ in range(3):
                await here.publish("t", b"a", b"b", partitions=[0, 3])
            await here.gateway.delete_topic("t")
            here.metadata.drop("t")
            assert await here.gateway.create_topic("t", 1, 1, {}) == 1
            began = asyncio.get_running_loop().time()
            assert await here.publish("t", b"c") == [Placed(0, 0)]
            assert asyncio.get_running_loop().time() - began < 1

    simulate(main())


def test_pages_end_at_their_limits_and_go_on_from_there() -> None:
    async def main() -> None:
        async with stage() as here:
            here.cluster.add_topic("t", 1)
            for _ in range(5):
                await here.publish("t", *[b"x" * 1000] * 10)
            at = here.offsets
            assert await at(Position()) == list(range(50))
            assert await at(Position(13), limit=4) == [13, 14, 15, 16]
            assert await at(Position(8), limit=15) == list(range(8, 23))
            assert await at(Position(50)) == []
            assert await at(Position(3), most=5_500) == [3, 4, 5, 6, 7]
            assert await at(Position(3), most=1) == [3]
            assert await at(Position(time_ms=0), limit=1) == [0]
            assert await at(Position(time_ms=1 << 60)) == []
            seen, offset = 0, 0
            while offset < 50:
                page = await here.gateway.read("t", 0, Position(offset), 7, 4_000)
                assert [one.offset for one in page.records] == list(range(offset, page.next_offset))
                seen, offset = seen + len(page.records), page.next_offset
            assert seen == 50
            with pytest.raises(OffsetOutOfRange, match="51"):
                await at(Position(51))

    simulate(main())


def test_a_page_can_be_larger_than_one_fetch() -> None:
    async def main() -> None:
        async with stage() as here:
            here.cluster.add_topic("t", 1)
            for _ in range(6):
                await here.publish("t", b"x" * 700_000)
            assert await here.offsets(Position(), most=8 * MIB) == list(range(6))
            assert await here.offsets(Position(), most=2 * MIB) == [0, 1]

    simulate(main())


def test_reading_follows_the_leader() -> None:
    async def main() -> None:
        async with stage(2) as here:
            here.cluster.add_topic("t", 1)
            await here.publish("t", b"a")
            assert await here.offsets(Position()) == [0]
            here.cluster.lead("t", 0, 2)
            assert await here.offsets(Position()) == [0]

    simulate(main())


def test_topics_are_made_described_and_deleted() -> None:
    async def main() -> None:
        async with stage(2) as here:
            gateway = here.gateway
            assert await gateway.create_topic("t", 3, 1, {}) == 3
            with pytest.raises(TopicExists):
                await gateway.create_topic("t", 3, 1, {})
            await here.publish("t", b"a", b"b", partitions=[1, 1])
            assert await gateway.offsets("t") == {0: (0, 0), 1: (0, 2), 2: (0, 0)}
            here.cluster.lead("t", 1, None)
            assert await gateway.offsets("t") == {0: (0, 0), 2: (0, 0)}
            await gateway.delete_topic("t")
            with pytest.raises(UnknownTopic):
                await gateway.delete_topic("t")

    simulate(main())


def test_closing_with_records_under_way_ends_in_time_and_tells_who_waits() -> None:
    async def main() -> None:
        async with stage() as here:
            here.cluster.add_topic("t", 1)
            await here.publish("t", b"a")
            here.cluster.lead("t", 0, None)
            waiting = asyncio.ensure_future(here.publish("t", b"b"))
            await asyncio.sleep(0.1)
            began = asyncio.get_running_loop().time()
            await here.gateway.close()
            assert asyncio.get_running_loop().time() - began < 3
            (outcome,) = await waiting
            assert isinstance(outcome, RaftqError)

    simulate(main())
