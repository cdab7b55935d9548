"""Clients do not hear of what ends by itself: directed runs of whole clusters.

A disk that fails to sync ends its node at once, also when nobody waits for that sync, and producers
go on at the next leader. Who asks a node without a copy is told who leads.
"""

import asyncio

import pytest
from simcluster import SimCluster
from test_replica_versions import KEY, Sending, begin, check_nothing_lost, make_cluster, partition

from raftq.client.common.errors import NotLeader


async def nobody_waits_for_the_sync(cluster: SimCluster) -> None:
    """
    1. A record is written under fsync `interval`, and acknowledged.
    2. The sync of the leader's log in the background fails. Nobody writes any more.
    3. The leader's node ends all the same, is started again, and everything is whole.
    """
    await begin(cluster, min_insync=2)
    leader = partition(cluster).leader
    assert leader is not None
    node = cluster.nodes[leader]
    sending = Sending(cluster, "producer", pace=100.0)
    await cluster.until("it is acknowledged", lambda: bool(sending.acknowledged), 5)
    run = node.process
    node.disk.fail_sync = True
    await asyncio.sleep(1.2)
    node.disk.fail_sync = False
    assert [one for one in cluster.exits if "simulated I/O error" in one], "it runs on"
    await cluster.until("it runs again", lambda: node.up and node.process is not run, 5)
    await cluster.until("everything is whole", cluster.is_whole, 60)


@pytest.mark.parametrize("seed", range(2))
def test_a_failed_sync_that_nobody_waits_for_ends_the_node(seed: int) -> None:
    cluster = make_cluster(seed, nodes=3)
    cluster.run(nobody_waits_for_the_sync(cluster), lambda: None)
    assert not cluster.bugs, cluster.bugs


async def written_to_all_the_time(cluster: SimCluster, fsync: str) -> None:
    """Whatever the leader's disk does, every record is acknowledged in the end."""
    await begin(cluster, min_insync=2, fsync=fsync)
    sending = Sending(cluster, "producer", pace=0.003)
    for _ in range(5):
        await asyncio.sleep(0.7)
        leader = partition(cluster).leader
        if leader is not None:
            disk = cluster.nodes[leader].disk
            disk.fail_sync = True
            await asyncio.sleep(0.6)
            disk.fail_sync = False
        await cluster.until("everything is whole", cluster.is_whole, 60)
    await sending.stop()
    assert cluster.exits, "no sync has failed"
    assert not sending.failed, sending.failed
    check_nothing_lost(cluster, sending.acknowledged)


@pytest.mark.parametrize("fsync", ["interval", "always"])
@pytest.mark.parametrize("seed", range(3))
def test_producers_do_not_hear_of_disks_that_fail(seed: int, fsync: str) -> None:
    cluster = make_cluster(seed, nodes=3)
    cluster.run(written_to_all_the_time(cluster, fsync), lambda: None)
    assert not cluster.bugs, cluster.bugs


async def asked_where_there_is_no_copy(cluster: SimCluster) -> None:
    """Who asks a node that has no copy is told that others lead, not that there is no partition:
    a client that hears that for a while gives up."""
    await begin(cluster)
    state = partition(cluster)
    for node_id, node in cluster.nodes.items():
        if node_id not in state.replicas:
            assert node.node is not None
            with pytest.raises(NotLeader) as found:
                node.node.partitions.of(*KEY)
            assert found.value.details == {"leader": state.leader, "epoch": state.epoch}


def test_a_node_without_a_copy_says_who_leads() -> None:
    cluster = make_cluster(1)
    cluster.run(asked_where_there_is_no_copy(cluster), lambda: None)
    assert not cluster.bugs, cluster.bugs
