"""Partitions whose last in-sync copy is gone for good, and processes that claim an id twice."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from clusterwork import TOPIC, all_in_sync, produce, read_all, until

from raftq import aio
from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.client.common.errors import InvalidArgument
from raftq.client.results import PartitionDescription

VALUES = [b"%d" % number for number in range(500)]


async def described(admin: aio.Admin) -> PartitionDescription:
    return (await admin.describe_topic(TOPIC)).partitions[0]


async def shrink_to_one(cluster: LocalCluster) -> tuple[int, int, int]:
    """The last one in sync, which has 500 records and is killed, and those before it, which have
    100 and 300 and are back."""
    async with aio.Admin(cluster.bootstrap) as admin:
        await admin.create_topic(TOPIC, partitions=1, replication=3, config={"min_insync": 1})
        before = await described(admin)
        last = before.leader
        assert last is not None
        short, longer = [node for node in before.replicas if node != last]

        async def in_sync(*nodes: int) -> bool:
            return sorted((await described(admin)).isr) == sorted(nodes)

        async with aio.Producer(cluster.bootstrap) as producer:
            await until(lambda: all_in_sync(admin), 20)
            await produce(producer, VALUES[:100])
            await asyncio.to_thread(cluster.kill, short)
            await until(lambda: in_sync(last, longer), 20)
            await produce(producer, VALUES[100:300])
            await asyncio.to_thread(cluster.kill, longer)
            await until(lambda: in_sync(last), 20)
            await produce(producer, VALUES[300:])
    await asyncio.to_thread(cluster.kill, last)
    for node in (short, longer):
        await asyncio.to_thread(cluster.restart, node)
    return last, short, longer


async def led_by(admin: aio.Admin, node: int | None) -> bool:
    return (await described(admin)).leader == node


def command(cluster: LocalCluster, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "raftq.node.cli", "--bootstrap", cluster.bootstrap, *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def run(tmp_path: Path, scene: Callable[[LocalCluster], Awaitable[None]], nodes: int = 5) -> None:
    async def main() -> None:
        await scene(cluster)

    with LocalCluster(tmp_path / "cluster", nodes=nodes) as cluster:
        asyncio.run(main())


@pytest.mark.full
def test_an_operator_recovers_a_partition_whose_last_copy_never_returns(tmp_path: Path) -> None:
    """1. The isr shrinks to one node, whose disk is destroyed for good.
    2. Nobody leads. A dry run says what would be lost, and changes nothing.
    3. The operator decides: the longest copy leads, with everything that it has.
    """

    async def scene(cluster: LocalCluster) -> None:
        last, short, longer = await shrink_to_one(cluster)
        await asyncio.to_thread(shutil.rmtree, f"{cluster.files.directory}/node-{last}")
        async with aio.Admin(cluster.bootstrap) as admin:
            await until(lambda: led_by(admin, None), 20)
            shown = await asyncio.to_thread(
                command, cluster, "cluster", "recover", "--dry-run", "--format", "json"
            )
            assert shown.returncode == 0, shown
            (one,) = json.loads(shown.stdout)
            assert (one["topic"], one["partition"], one["isr"]) == (TOPIC, 0, [last])
            assert [copy["node_id"] for copy in one["copies"]] == [longer, short]
            assert [copy["ends"][0][1] for copy in one["copies"]] == [300, 100]
            assert one["silent"] == [last]
            assert await led_by(admin, None)
            status = await asyncio.to_thread(command, cluster, "cluster", "status")
            assert status.returncode == 1
            assert f"no node of its isr ({last}) is alive" in status.stdout
            refused = await asyncio.to_thread(command, cluster, "cluster", "recover")
            assert "needs --yes" in refused.stderr
            done = await asyncio.to_thread(command, cluster, "cluster", "recover", TOPIC, "--yes")
            assert done.returncode == 0, done
            assert f"{TOPIC}/0: node {longer} leads" in done.stdout
            assert await read_all(cluster.bootstrap) == VALUES[:300]
            with pytest.raises(InvalidArgument, match=f"node {longer} of the isr of t/0 is alive"):
                await admin.recover(TOPIC, 0)
            async with aio.Producer(cluster.bootstrap) as producer:
                await produce(producer, VALUES[:10])

            async def caught_up() -> bool:
                return sorted((await described(admin)).isr) == sorted((short, longer))

            await until(caught_up, 20)

    run(tmp_path, scene)


def test_the_longest_copy_leads_when_the_last_in_sync_returns_empty(tmp_path: Path) -> None:
    """1. The isr shrinks to one node, whose disk is replaced by an empty one.
    2. The others tell where they end, and the longest leads, by itself.
    3. All copies are whole again, with everything that it had.
    """

    async def scene(cluster: LocalCluster) -> None:
        last, _, longer = await shrink_to_one(cluster)
        await asyncio.to_thread(shutil.rmtree, f"{cluster.files.directory}/node-{last}")
        await asyncio.to_thread(cluster.restart, last)
        async with aio.Admin(cluster.bootstrap) as admin:
            await until(lambda: led_by(admin, longer), 20)
            assert await read_all(cluster.bootstrap) == VALUES[:300]
            await until(lambda: all_in_sync(admin), 20)

    run(tmp_path, scene)


def imposter(cluster: LocalCluster, node_id: int, data_dir: Path) -> "subprocess.Popen[str]":
    """A second process with the id of a node, as a typo in its settings makes it."""
    files = cluster.files
    settings = {
        "node_id": str(node_id),
        "data_dir": str(data_dir),
        "secret_file": files.secret,
        "native": "127.0.0.1:0",
        "http": "none",
        "seeds": cluster.bootstrap,
    }
    arguments = [f"--set={name}={value}" for name, value in settings.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "raftq.node", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.full
def test_a_second_process_with_the_id_of_a_live_node_ends_with_one_line(tmp_path: Path) -> None:
    """1. A process with an empty directory, and one with a copy of the node's own, are refused;
       a copy of a voter's directory is refused before it asks anybody.
    2. The node goes on as it was, and nothing is lost.
    3. Killed, it is back on its directory without waiting for the lease of its old process.
    """
    voter, observer = 2, 4

    async def copy_of(cluster: LocalCluster, node: int) -> Path:
        copied = tmp_path / f"copy-{node}"
        await asyncio.to_thread(
            shutil.copytree, f"{cluster.files.directory}/node-{node}", copied,
            ignore=shutil.ignore_patterns("lock"),
        )  # fmt: skip
        return copied

    async def refused(cluster: LocalCluster, node: int, directory: Path) -> tuple[int, str]:
        process = imposter(cluster, node, directory)
        _, said = await asyncio.to_thread(process.communicate, None, 30)
        assert "Traceback" not in said
        return process.returncode, said

    async def scene(cluster: LocalCluster) -> None:
        async with aio.Admin(cluster.bootstrap) as admin:
            await admin.create_topic(TOPIC, partitions=1, replication=4)
            epoch = (await described(admin)).epoch
            async with aio.Producer(cluster.bootstrap) as producer:
                await produce(producer, VALUES)
            await until(lambda: all_in_sync(admin), 20)
            where = cluster.addresses(observer).native
            for directory in (tmp_path / "empty", await copy_of(cluster, observer)):
                code, said = await refused(cluster, observer, directory)
                assert code == 1, said
                assert f"error: node {observer} is alive at {where}" in said
            code, said = await refused(cluster, voter, await copy_of(cluster, voter))
            assert code == 2, said
            assert "is a voter's, of the voters 1, 2, 3" in said
            assert (await described(admin)).epoch == epoch
            assert len((await described(admin)).isr) == 4
            assert cluster.is_running(observer)
            await asyncio.to_thread(cluster.kill, observer)
            await asyncio.to_thread(cluster.restart, observer)
            assert "waits until the lease" not in cluster.files.log_tail(observer)
            assert await read_all(cluster.bootstrap) == VALUES

    run(tmp_path, scene, nodes=4)


@pytest.mark.full
def test_a_process_that_was_replaced_ends_and_does_not_take_its_id_back(tmp_path: Path) -> None:
    """1. A node stands still until its lease is over; a process with its id and an empty directory
       waits for that, and registers.
    2. The node goes on, finds itself replaced, and ends with a line that says so.
    """

    async def scene(cluster: LocalCluster) -> None:
        async with aio.Admin(cluster.bootstrap) as admin:
            await admin.create_topic(TOPIC, partitions=1, replication=3)
            async with aio.Producer(cluster.bootstrap) as producer:
                await produce(producer, VALUES)
            cluster.pause(2)
            process = imposter(cluster, 2, tmp_path / "empty")
            try:

                async def replaced() -> bool:
                    (node,) = [one for one in await admin.nodes() if one.node_id == 2]
                    old = cluster.addresses(2).native.rpartition(":")[2]
                    return node.alive and str(node.port) != old

                await until(replaced, 30)
                cluster.resume(2)
                await until(lambda: asyncio.to_thread(lambda: not cluster.is_running(2)), 20)
                tail = cluster.files.log_tail(2)
                assert "registered as node 2 after this one, which ends" in tail
                assert "Traceback" not in tail
                await until(lambda: all_in_sync(admin), 30)
                assert await read_all(cluster.bootstrap) == VALUES
            finally:
                process.terminate()
                await asyncio.to_thread(process.communicate, None, 30)

    run(tmp_path, scene, nodes=3)
