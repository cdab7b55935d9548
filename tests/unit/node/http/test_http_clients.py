"""Publishing handlers over the real client, on a cluster in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fake_cluster import FakeCluster, fake_cluster, simulate
from fake_http import NOW_MS, FakeFacts, FakeMetadata

from raftq.client.common.errors import NotEnoughReplicas
from raftq.client.wire.batch import decode
from raftq.node.http.clients import HttpClients
from raftq.node.http.context import Context
from raftq.node.http.messages import Outgoing
from raftq.node.http.options import HttpOptions
from raftq.node.http.records import RecordHandlers
from raftq.node.http.routes import Call, HttpReply


class Stage:
    """A cluster, the HTTP clients of its first node, and that node's metadata."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.metadata = FakeMetadata()
        facts = FakeFacts(self.metadata)
        facts.native_address = ("127.0.0.1", cluster.ports[1])
        self.clients = HttpClients(facts)
        self._handlers = RecordHandlers(Context(facts, self.clients, HttpOptions()))

    async def publish(self, name: str, *values: bytes, **columns: Any) -> HttpReply:
        parts = self.cluster.topics[name]
        known = self.metadata.state.topics.get(name)
        if known is None or len(known.partitions) != len(parts):
            self.metadata.put(name, len(parts), {})
        body = Outgoing(list(values), **columns, many=True)
        return await self._handlers.publish(Call({"topic": name}, {}, body, False, NOW_MS))

    async def places(self, *given: Any, **columns: Any) -> list[tuple[int, int]]:
        results = (await self.publish(*given, **columns)).payload["results"]
        return [(one["partition"], one["offset"]) for one in results]


@asynccontextmanager
async def stage(nodes: int = 1) -> AsyncIterator[Stage]:
    async with fake_cluster(nodes) as cluster:
        one = Stage(cluster)
        try:
            yield one
        finally:
            await one.clients.close()


def test_records_arrive_with_everything_they_brought() -> None:
    async def main() -> None:
        async with stage(2) as here:
            logs = here.cluster.add_topic("t", 2)
            places = await here.places(
                "t", b"a", b"b",
                keys=[b"k", None], headers=[None, {"h": b"1"}], partitions=[1, 0],
                priorities=[0, 4],
            )  # fmt: skip
            assert places == [(1, 0), (0, 0)]
            (first,), (second,) = (decode(log.batches[0]).records() for log in (logs[1], logs[0]))
            assert (first.key, first.value, first.priority) == (b"k", b"a", 0)
            assert (second.headers, second.value, second.priority) == ({"h": b"1"}, b"b", 4)

    simulate(main())


def test_requests_at_the_same_time_share_batches() -> None:
    async def main() -> None:
        async with stage() as here:
            log = here.cluster.add_topic("t", 1)[0]
            await here.publish("t", b"first")
            found = await asyncio.gather(*[here.places("t", b"%d" % n) for n in range(200)])
            assert sorted(offset for ((_, offset),) in found) == list(range(1, 201))
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
            reply = await here.publish("t", b"a", b"b", b"c", partitions=[0, 1, 0])
            first, second, third = reply.payload["results"]
            assert reply.status == 200
            assert (first["offset"], third["offset"]) == (0, 1)
            assert second["code"] == "NOT_ENOUGH_REPLICAS"

    simulate(main())


def test_a_partition_without_a_leader_is_given_up_before_the_request_is() -> None:
    async def main() -> None:
        async with stage() as here:
            here.cluster.add_topic("t", 1)
            here.cluster.lead("t", 0, None)
            began = asyncio.get_running_loop().time()
            reply = await here.publish("t", b"b")
            assert (reply.status, reply.payload["code"]) == (503, "REQUEST_TIMEOUT")
            assert reply.payload["retriable"]
            assert asyncio.get_running_loop().time() - began < 30

    simulate(main())


def test_new_partitions_can_be_used_at_once() -> None:
    async def main() -> None:
        async with stage() as here:
            here.cluster.add_topic("t", 1)
            await here.publish("t", b"a")
            await here.clients.admin.add_partitions("t", 3)
            assert await here.places("t", b"b", partitions=[2]) == [(2, 0)]

    simulate(main())


def test_a_topic_that_was_deleted_and_made_again_is_another_one() -> None:
    async def main() -> None:
        async with stage() as here:
            admin = here.clients.admin
            await admin.create_topic("t", 4, 1)
            for _ in range(3):
                await here.publish("t", b"a", b"b", partitions=[0, 3])
            await admin.delete_topic("t")
            here.metadata.drop("t")
            await admin.create_topic("t", 1, 1)
            began = asyncio.get_running_loop().time()
            assert await here.places("t", b"c") == [(0, 0)]
            assert asyncio.get_running_loop().time() - began < 1

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
            await here.clients.close()
            assert asyncio.get_running_loop().time() - began < 3
            assert (await waiting).payload["code"] == "QUEUE_CLOSED"

    simulate(main())
