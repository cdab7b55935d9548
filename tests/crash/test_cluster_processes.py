"""Real nodes, killed, paused, wiped and cut off: nothing acknowledged is lost or comes back."""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from clusterwork import (
    TOPIC,
    all_in_sync,
    led_by_others,
    produce,
    read_all,
    stored_bytes,
    until,
)
from cutproxy import CutProxies

from raftq import aio
from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.harness.local_files import LocalNode
from raftq.client.common.errors import RaftqError
from raftq.client.net.connection import Connection
from raftq.client.wire.batch import encode
from raftq.client.wire.messages import Produce
from raftq.node.config import Address


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", nodes=3) as made:
        yield made


def test_all_nodes_killed_at_once_lose_nothing_acknowledged(cluster: LocalCluster) -> None:
    async def before() -> list[bytes]:
        async with aio.Admin(cluster.bootstrap) as admin:
            await admin.create_topic(TOPIC, partitions=1, replication=3)
        async with aio.Producer(cluster.bootstrap, linger_ms=0) as producer:
            values = [b"%d" % number for number in range(500)]
            await produce(producer, values)
            return values

    async def after(values: list[bytes]) -> None:
        assert await read_all(cluster.bootstrap) == values
        async with aio.Producer(cluster.bootstrap) as producer:
            (appended,) = await produce(producer, [b"and on"])
        assert appended.offset == len(values)

    values = asyncio.run(before())
    for node_id in cluster.ids:
        cluster.kill(node_id)
    for node_id in cluster.ids:
        cluster.restart(node_id, timeout=None)
    cluster.wait_ready()
    asyncio.run(after(values))


@pytest.mark.full
def test_a_node_whose_directory_was_deleted_rejoins_and_catches_up(cluster: LocalCluster) -> None:
    async def before() -> int:
        async with aio.Admin(cluster.bootstrap) as admin:
            described = await admin.create_topic(TOPIC, partitions=1, replication=3)
            leader = described.partitions[0].leader
        async with aio.Producer(cluster.bootstrap) as producer:
            await produce(producer, [b"%d" % number for number in range(300)])
        assert leader is not None
        return leader

    async def after() -> None:
        async with aio.Admin(cluster.bootstrap) as admin:
            await until(lambda: all_in_sync(admin), 20)
        async with aio.Producer(cluster.bootstrap) as producer:
            await produce(producer, [b"more"] * 10)

    wiped = asyncio.run(before())
    cluster.kill(wiped)
    shutil.rmtree(Path(cluster.files.directory) / f"node-{wiped}")
    cluster.restart(wiped)
    asyncio.run(after())
    assert len(asyncio.run(read_all(cluster.bootstrap))) == 310
    for node_id in cluster.ids:
        cluster.stop(node_id)
    logs = {stored_bytes(cluster, node_id) for node_id in cluster.ids}
    assert len(logs) == 1, "all copies are the same bytes"


@pytest.mark.full
def test_a_diverged_follower_is_cut_to_the_history_of_the_leader(cluster: LocalCluster) -> None:
    """1. The leader alone has records that nobody else took (acks=leader, the others paused).
    2. It dies; another is elected and writes other records at the same offsets.
    3. It comes back as a follower: its own records are cut, and all logs are the same bytes.
    """

    async def first_half() -> int:
        async with aio.Admin(cluster.bootstrap) as admin:
            described = await admin.create_topic(TOPIC, partitions=1, replication=3)
            leader = described.partitions[0].leader
            assert leader is not None
        async with aio.Producer(cluster.bootstrap) as producer:
            await produce(producer, [b"common %d" % number for number in range(50)])
        others = [one for one in cluster.ids if one != leader]
        async with aio.Producer(cluster.bootstrap, acks="leader", linger_ms=0) as producer:
            await producer.flush()
            (await (await producer.send(TOPIC, b"warm", partition=0)))
            for one in others:
                cluster.pause(one)
            # The first of these may still sit in the sockets of those that stand still.
            for number in range(300):
                value = b"alone %d" % number + b"." * 20_000
                await (await producer.send(TOPIC, value, partition=0))
        return leader

    async def second_half(old: int) -> list[bytes]:
        async with aio.Admin(cluster.bootstrap) as admin:
            await until(lambda: led_by_others(admin, old), 20)
        async with aio.Producer(cluster.bootstrap) as producer:
            await produce(producer, [b"later %d" % number for number in range(50)])
        cluster.restart(old)
        async with aio.Admin(cluster.bootstrap) as admin:
            await until(lambda: all_in_sync(admin), 20)
        return await read_all(cluster.bootstrap)

    old = asyncio.run(first_half())
    cluster.kill(old)
    for node_id in cluster.ids:
        if node_id != old:
            cluster.resume(node_id)
    values = asyncio.run(second_half(old))
    assert sum(value.startswith(b"common") for value in values) == 50
    assert sum(value.startswith(b"later") for value in values) == 50
    assert sum(value.startswith(b"alone") for value in values) < 300, "some were cut"
    for node_id in cluster.ids:
        cluster.stop(node_id)
    logs = {stored_bytes(cluster, node_id) for node_id in cluster.ids}
    assert len(logs) == 1, "all copies are the same bytes"


@pytest.mark.full
def test_without_a_majority_nothing_is_acknowledged(cluster: LocalCluster) -> None:
    async def scenario() -> None:
        async with aio.Admin(cluster.bootstrap) as admin:
            described = await admin.create_topic(TOPIC, partitions=1, replication=3)
            leader = described.partitions[0].leader
            assert leader is not None
        others = [one for one in cluster.ids if one != leader]
        bootstrap = cluster.addresses(leader).native
        async with aio.Producer(bootstrap, linger_ms=0, delivery_timeout_ms=3000) as producer:
            await produce(producer, [b"before"])
            for one in others:
                cluster.kill(one)
            with pytest.raises(RaftqError):
                await (await producer.send(TOPIC, b"alone", partition=0))
        for one in others:
            cluster.restart(one, timeout=None)
        cluster.wait_ready()
        async with aio.Producer(cluster.bootstrap) as producer:
            await produce(producer, [b"after"])
        values = await read_all(cluster.bootstrap)
        assert values[0] == b"before"
        assert values[-1] == b"after"

    asyncio.run(scenario())


@pytest.fixture
def proxies() -> Iterator[CutProxies]:
    made = CutProxies()
    try:
        yield made
    finally:
        made.close()


def behind(proxies: CutProxies, nodes: Mapping[int, LocalNode]) -> dict[int, dict[str, str]]:
    """Settings that lead every connection between two nodes through a proxy of its own."""

    def through(source: int, address: Callable[[LocalNode], str]) -> str:
        found = []
        for target, node in nodes.items():
            where = Address.parse(address(node))
            port = where.port
            if target != source:
                port = proxies.add(source, target, where.host, where.port)
            found.append(f"{target}=127.0.0.1:{port}")
        return ",".join(found)

    return {
        source: {
            "voters": through(source, lambda node: node.raft),
            "peers": through(source, lambda node: node.native),
        }
        for source in nodes
    }


@pytest.mark.full
def test_a_leader_cut_off_from_its_peers_acknowledges_nothing_and_its_writes_never_show(
    tmp_path: Path, proxies: CutProxies
) -> None:
    """1. The leader is cut off from both others, in both directions; clients reach everybody.
    2. It acknowledges nothing with acks=all; the others elect a new leader and go on.
    3. Healed, it follows: what it took meanwhile is gone, everywhere.
    """

    async def scenario(cluster: LocalCluster) -> None:
        async with aio.Admin(cluster.bootstrap) as admin:
            described = await admin.create_topic(TOPIC, partitions=1, replication=3)
            old = described.partitions[0].leader
            assert old is not None
            async with aio.Producer(cluster.bootstrap) as producer:
                await produce(producer, [b"before"] * 20)
            others = [one for one in cluster.ids if one != old]
            proxies.cut(*[pair for one in others for pair in ((old, one), (one, old))])
            late = await late_writes(cluster.addresses(old).native)
            assert late.count("acknowledged") == 0
            assert late.count("refused or unknown") == 5
            elsewhere = ",".join(cluster.addresses(one).native for one in others)
            async with aio.Admin(elsewhere) as survivors:
                await until(lambda: led_by_others(survivors, old), 30)
                async with aio.Producer(elsewhere) as producer:
                    await produce(producer, [b"after"] * 20)
                assert not await all_in_sync(survivors)
                proxies.heal()
                await until(lambda: all_in_sync(survivors), 30)
        values = await read_all(cluster.bootstrap)
        assert values == [b"before"] * 20 + [b"after"] * 20

    with LocalCluster(tmp_path / "cluster", nodes=3, links=partial(behind, proxies)) as cluster:
        asyncio.run(scenario(cluster))
        for node_id in cluster.ids:
            cluster.stop(node_id)
        logs = {stored_bytes(cluster, node_id) for node_id in cluster.ids}
        assert len(logs) == 1, "all copies are the same bytes"


async def late_writes(address: str) -> list[str]:
    """Five tries to write to a node that still takes itself for the leader, by hand: a client
    would look for the new leader."""
    host, port = address.split(":")
    outcomes = []
    async with await Connection.open(host, int(port)) as connection:
        for number in range(5):
            batch = encode([b"late %d" % number])
            try:
                await connection.request(Produce(TOPIC, 0, timeout_ms=300), [batch])
            except RaftqError:
                outcomes.append("refused or unknown")
            else:
                outcomes.append("acknowledged")
    return outcomes
