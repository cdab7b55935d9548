"""A join whose answer is no good is repeated; the application does not hear of it."""

import asyncio
from typing import Any

from fakecluster import simulate
from fakegroups import fake_groups, fill

from raftq.client.consumer import Consumer
from raftq.client.wire.errors import FencedGeneration
from raftq.client.wire.group_messages import GroupHeartbeat


def test_a_join_that_the_coordinator_forgot_meanwhile_is_repeated() -> None:
    """Its answer had to wait for replicas for longer than the session lasted."""

    async def main() -> None:
        async with fake_groups(1) as cluster:
            cluster.add_topic("t", 1)
            fill(cluster.topics["t"][0], [b"a", b"b"])
            refused = 0

            def refuse(request: Any, node_id: int) -> None:
                nonlocal refused
                if isinstance(request, GroupHeartbeat) and refused < 2:
                    refused += 1
                    raise FencedGeneration("the member is gone")

            cluster.asking = refuse
            async with Consumer(
                cluster.bootstrap, group="g", topics=["t"], heartbeat_ms=200, session_ms=2_000
            ) as consumer:
                found: list[bytes] = []
                async with asyncio.timeout(20):
                    while len(found) < 2:
                        found += [one.value for one in await consumer.poll(timeout=0.1)]
            assert found == [b"a", b"b"]
            assert refused == 2

    simulate(main())
