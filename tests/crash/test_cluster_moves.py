"""Replicas that move while records are produced, and a node that leaves for good."""

import asyncio
from pathlib import Path

import pytest
from clusterwork import TOPIC, all_in_sync, produce, read_all, until

from raftq import aio
from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.client.common.errors import InvalidArgument


async def replicas(admin: aio.Admin) -> list[tuple[int, ...]]:
    return [one.replicas for one in (await admin.describe_topic(TOPIC)).partitions]


async def moved(admin: aio.Admin, partition: int, nodes: tuple[int, ...]) -> bool:
    one = (await admin.describe_topic(TOPIC)).partitions[partition]
    return one.replicas == nodes and sorted(one.isr) == sorted(nodes) and not one.target


async def holds_nothing(admin: aio.Admin, node: int) -> bool:
    return all(node not in one for one in await replicas(admin))


def test_replicas_move_to_a_node_that_is_no_voter_and_a_node_leaves(tmp_path: Path) -> None:
    """1. Four nodes, the fourth is no voter; partition 0 moves there while records come in.
    2. Everything is there, in order, also when the nodes that had it before are down.
    3. A node is decommissioned: it ends without replicas, is stopped, and is removed.
    """

    async def scenario(cluster: LocalCluster) -> None:
        async with aio.Admin(cluster.bootstrap) as admin:
            await admin.create_topic(TOPIC, partitions=2, replication=3)
            async with aio.Producer(cluster.bootstrap) as producer:
                values = [b"%d" % number for number in range(2000)]
                await produce(producer, values[:1000])
                before = (await replicas(admin))[0]
                target = (4, *[one for one in before if one != 4][:2])
                await admin.move_replica(TOPIC, 0, target)
                await produce(producer, values[1000:])
            await until(lambda: moved(admin, 0, target), 30)
            assert await read_all(cluster.bootstrap) == values
            leaver = next(one for one in target if one != 4)
            with pytest.raises(InvalidArgument, match="alive"):
                await admin.remove_node(leaver)
            await admin.drain(leaver, decommission=True)
            await until(lambda: holds_nothing(admin, leaver), 60)
            await until(lambda: all_in_sync(admin), 30)
            await asyncio.to_thread(cluster.stop, leaver)
            await admin.remove_node(leaver)
            assert leaver not in [one.node_id for one in await admin.nodes()]
        assert await read_all(cluster.bootstrap) == values

    with LocalCluster(tmp_path / "cluster", nodes=4) as cluster:
        asyncio.run(scenario(cluster))
