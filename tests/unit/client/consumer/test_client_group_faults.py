"""What a member of a group makes of answers that are lost or come too late."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from fake_cluster import lost, simulate
from fake_groups import fake_groups, fill

from raftq.client.common.errors import FencedGeneration
from raftq.client.consumer.consumer import Consumer
from raftq.client.wire.group_messages import GroupHeartbeat
from raftq.client.wire.queue_messages import ReadOffsets, StoreOffsets


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


def test_a_commit_that_is_fenced_after_a_lost_answer_may_have_happened() -> None:
    """Its first attempt was stored, and the next owner goes on from there."""

    async def main() -> None:
        async with fake_groups(1) as cluster:
            cluster.add_topic("t", 1)
            fill(cluster.topics["t"][0], [b"a", b"b"])
            async with Consumer(
                cluster.bootstrap, group="g", topics=["t"], auto_commit=False, heartbeat_ms=200,
                session_ms=2_000,
            ) as consumer:  # fmt: skip
                found: list[bytes] = []
                while len(found) < 2:
                    found += [one.value for one in await consumer.poll(timeout=0.1)]
                attempts = 0

                def asking(request: Any, node_id: int) -> None:
                    if isinstance(request, StoreOffsets) and attempts:
                        raise FencedGeneration("it has another owner")

                def answering(request: Any, node_id: int) -> None:
                    nonlocal attempts
                    if isinstance(request, StoreOffsets):
                        attempts += 1
                        raise lost()

                cluster.asking, cluster.answering = asking, answering
                with pytest.raises(FencedGeneration) as raised:
                    await consumer.commit()
                assert raised.value.outcome == "unknown"
                assert [one for one in cluster.history if one[0] == "store"]
                cluster.asking = cluster.answering = None

    simulate(main())


def test_a_partition_that_comes_back_while_its_loss_is_told_is_assigned_again() -> None:
    """1. Another member joins, and a partition is to be given up: the application is told, and
    takes its time. 2. The other member leaves, so the partition is given back meanwhile. 3. The
    application is told of it before it gets records of it."""

    async def main() -> None:
        async with fake_groups(1) as cluster:
            cluster.add_topic("t", 2)
            revoking = asyncio.Event()
            told: list[Any] = []

            async def on_revoked(keys: Any) -> None:
                told.append(("revoked", keys))
                revoking.set()
                await asyncio.sleep(1.5)

            async def follow(consumer: Consumer) -> None:
                while True:
                    told.extend(record.partition for record in await consumer.poll(timeout=0.1))

            settings: dict[str, Any] = {"group": "g", "topics": ["t"], "heartbeat_ms": 200}
            async with Consumer(
                cluster.bootstrap, **settings, session_ms=2_000, auto_commit=False,
                on_assigned=lambda keys: told.append(("assigned", keys)), on_revoked=on_revoked,
            ) as consumer:  # fmt: skip
                following = asyncio.create_task(follow(consumer))
                await asyncio.sleep(2)
                assert told == [("assigned", [("t", 0), ("t", 1)])]
                async with Consumer(cluster.bootstrap, **settings):
                    await revoking.wait()
                await asyncio.sleep(4)
                for log in cluster.topics["t"]:
                    fill(log, [b"new"])
                await asyncio.sleep(1)
                following.cancel()
                (lost,) = told[1][1]
                assert told[1:3] == [("revoked", [lost]), ("assigned", [lost])]
                assert sorted(told[3:]) == [0, 1]

    simulate(main())


def test_a_late_answer_to_an_older_claim_changes_nothing() -> None:
    """1. A claim is not answered yet. 2. The session ends for the member, not for the coordinator,
    which gives the partition again with the same owner epoch. 3. The second claim is answered, and
    the application reads and stores. 4. The answer to the first claim comes."""

    async def main() -> None:
        async with fake_groups(1) as cluster:
            cluster.add_topic("t", 1)
            fill(cluster.topics["t"][0], [b"a", b"b"])
            loop = asyncio.get_running_loop()
            began = loop.time()
            claims = 0
            told: list[Any] = []

            def answering(request: Any, node_id: int) -> Awaitable[None] | None:
                nonlocal claims
                if isinstance(request, ReadOffsets):
                    claims += 1
                    return asyncio.sleep(4) if claims == 1 else None
                is_heartbeat = isinstance(request, GroupHeartbeat) and request.member_epoch
                if is_heartbeat and loop.time() < began + 2.5:
                    raise lost()
                return None

            cluster.answering = answering
            async with Consumer(
                cluster.bootstrap, group="g", topics=["t"], auto_commit=False, heartbeat_ms=200,
                session_ms=2_000, on_assigned=lambda keys: told.append(("assigned", keys)),
                on_revoked=lambda keys: told.append(("revoked", keys)),
            ) as consumer:  # fmt: skip
                found: list[bytes] = []
                while loop.time() < began + 6:
                    if records := await consumer.poll(timeout=0.1):
                        assert loop.time() < began + 4
                        found += [one.value for one in records]
                        await consumer.commit()
                assert claims == 2
                assert found == [b"a", b"b"]
                assert told == [("assigned", [("t", 0)])]
                assert consumer.assignment() == [("t", 0)]

    simulate(main())
