"""Settings that name other voters, on real nodes: they are refused with the reason, and there are
never two controllers."""

import asyncio
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from clusterwork import TOPIC, all_in_sync, produce, read_all, until

from raftq import aio
from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.harness.local_ports import free_ports
from raftq.client.common.errors import InternalError
from raftq.node.config import Address

REFUSED = "cannot be changed by editing the settings"


@pytest.fixture
def five(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", nodes=5) as made:
        yield made


def edit(cluster: LocalCluster, node_id: int, name: str, value: str) -> None:
    """Change one line of a node's settings file, or add it."""
    path = Path(cluster.files.config(node_id))
    lines = [one for one in path.read_text().splitlines() if not one.startswith(f"{name} = ")]
    path.write_text("\n".join([*lines, f'{name} = "{value}"', ""]))


def seats(cluster: LocalCluster, ids: Sequence[int]) -> str:
    return ",".join(f"{one}={cluster.nodes[one].raft}" for one in ids)


def refused_at_start(cluster: LocalCluster, node_id: int) -> str:
    """Start a node that must end at once; what it said."""
    began = time.monotonic()
    with pytest.raises(InternalError) as caught:
        cluster.restart(node_id, timeout=30)
    assert not cluster.is_running(node_id)
    assert time.monotonic() - began < 15, "it took its time"
    cluster.died()
    return str(caught.value)


def logged(cluster: LocalCluster, node_id: int) -> str:
    return Path(cluster.files.log(node_id)).read_text()


async def controllers(cluster: LocalCluster, ids: Sequence[int]) -> set[int | None]:
    """Who is the controller, as each of these nodes says."""
    found = set()
    for node_id in ids:
        async with aio.Admin(cluster.nodes[node_id].native) as admin:
            found.add((await admin.cluster_status()).controller)
    return found


@pytest.mark.full
def test_voters_that_are_changed_node_by_node_never_make_two_controllers(
    five: LocalCluster,
) -> None:
    """1. Five voters. Nodes 1 and 2 are started again with voters 1, 2, 3: by their settings they
    are a majority, and so are 3, 4 and 5 by theirs. They end at once and say why.
    2. Node 2 loses its disk and is started with voters 1, 2, 3: it is refused by the others, both
    sides say so, and it never serves. The others go on.
    3. With the old settings all are back, and nothing that was acknowledged is missing."""
    everyone, three = seats(five, five.ids), seats(five, (1, 2, 3))

    async def first() -> None:
        async with aio.Admin(five.bootstrap) as admin:
            await admin.create_topic(TOPIC, partitions=1, replication=5)
        async with aio.Producer(five.bootstrap) as producer:
            await produce(producer, [b"before"])

    asyncio.run(first())
    for node_id in (1, 2):
        five.stop(node_id)
        edit(five, node_id, "voters", three)
    for node_id in (1, 2):
        words = refused_at_start(five, node_id)
        assert "belongs to the voters 1, 2, 3, 4, 5, but the settings name 1, 2, 3:" in words
        assert REFUSED in words

    shutil.rmtree(Path(five.files.directory) / "node-2")
    five.restart(2, timeout=None)

    async def apart() -> None:
        async with aio.Producer(five.bootstrap, linger_ms=0) as producer:
            for number in range(20):
                await produce(producer, [b"%d" % number])
                await asyncio.sleep(0.1)
        (controller,) = await controllers(five, (3, 4, 5))
        assert controller in (3, 4, 5)

    asyncio.run(apart())
    for me, other, theirs, own in ((3, 2, "1, 2, 3", "1, 2, 3, 4, 5"),
                                   (2, 3, "1, 2, 3, 4, 5", "1, 2, 3")):  # fmt: skip
        wanted = f"node={me} refuses peer node={other} for its voters: it has {theirs}, "
        told = [one for one in logged(five, me).splitlines() if wanted in one]
        assert len(told) == 1, logged(five, me)[-3000:]
        assert f"here they are {own};" in told[0]
        assert re.search(r"\berror\b", told[0], re.IGNORECASE)
    assert five.is_running(2)
    assert five.files.ready_facts(2) is None, "it must not serve"

    five.kill(2)
    for node_id in (1, 2):
        edit(five, node_id, "voters", everyone)
        five.restart(node_id)

    async def last() -> None:
        async with aio.Admin(five.bootstrap) as admin:
            await until(lambda: all_in_sync(admin), 30)
        assert await read_all(five.bootstrap) == [b"before", *(b"%d" % one for one in range(20))]
        assert len(await controllers(five, five.ids)) == 1

    asyncio.run(last())


@pytest.mark.full
def test_a_voter_comes_back_at_another_address_with_an_empty_disk(tmp_path: Path) -> None:
    """Ids make the set, not addresses: first its settings change, then those of the others."""
    with LocalCluster(tmp_path / "cluster", nodes=3) as cluster:

        async def before() -> None:
            async with aio.Admin(cluster.bootstrap) as admin:
                await admin.create_topic(TOPIC, partitions=1, replication=3)
            async with aio.Producer(cluster.bootstrap) as producer:
                await produce(producer, [b"1", b"2", b"3"])

        asyncio.run(before())
        cluster.kill(3)
        shutil.rmtree(Path(cluster.files.directory) / "node-3")
        (port,) = free_ports("127.0.0.1", 1)
        cluster.nodes[3] = replace(cluster.nodes[3], raft=str(Address("127.0.0.1", port)))
        edit(cluster, 3, "raft", cluster.nodes[3].raft)
        for node_id in cluster.ids:
            edit(cluster, node_id, "voters", seats(cluster, cluster.ids))
        cluster.restart(3, timeout=None)
        for node_id in (1, 2):
            cluster.stop(node_id)
            cluster.restart(node_id, timeout=None)
            cluster.wait_ready()

        async def after() -> None:
            async with aio.Admin(cluster.bootstrap) as admin:
                await until(lambda: all_in_sync(admin), 30)
            assert await read_all(cluster.bootstrap) == [b"1", b"2", b"3"]

        asyncio.run(after())


def test_a_node_that_is_no_voter_is_held_to_the_voters_of_its_cluster(tmp_path: Path) -> None:
    """1. Node 4 follows three voters, and its settings name another one: it ends and says why.
    2. A voter whose settings do not name it any more ends, too: it cannot leave like that.
    3. A node that names no voters learns them."""
    with LocalCluster(tmp_path / "cluster", nodes=4) as cluster:
        seeds = ",".join(cluster.nodes[one].native for one in (1, 2))
        right = seats(cluster, (1, 2, 3))
        wrong = seats(cluster, (1, 2)) + ",5=127.0.0.1:1"
        for node_id in (4, 3):
            cluster.stop(node_id)
            edit(cluster, node_id, "seeds", seeds)
            edit(cluster, node_id, "voters", wrong)
        words = refused_at_start(cluster, 4)
        assert "the settings name the voters 1, 2, 5, but the cluster's are 1, 2, 3" in words
        words = refused_at_start(cluster, 3)
        assert "of the voters 1, 2, 3, but the settings name 1, 2, 5 and not this node" in words
        edit(cluster, 3, "voters", right)
        cluster.restart(3)
        edit(cluster, 4, "voters", "")
        cluster.restart(4)

        async def voters() -> tuple[int, ...]:
            async with aio.Admin(cluster.nodes[4].native) as admin:
                return (await admin.cluster_status()).voters

        assert asyncio.run(voters()) == (1, 2, 3)
