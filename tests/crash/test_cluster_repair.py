"""Bits that rot on one node are put right with the bytes of another."""

import asyncio
from pathlib import Path

from clusterwork import TOPIC, all_in_sync, produce, read_all, stored_bytes, until

from raftq import aio
from raftq.chaos.harness.local_cluster import LocalCluster


def test_a_damaged_batch_is_repaired_from_a_replica(tmp_path: Path) -> None:
    """1. A partition with several sealed segments.
    2. A bit of a sealed segment flips on the leader's disk while it is down; it comes back and
       leads again.
    3. The scrub finds the damage and repairs it: all records can be read, all files are the same.
    """

    async def fill(cluster: LocalCluster) -> int:
        async with aio.Admin(cluster.bootstrap) as admin:
            described = await admin.create_topic(
                TOPIC, partitions=1, replication=3, config={"segment_bytes": 64 * 1024}
            )
        async with aio.Producer(cluster.bootstrap, linger_ms=0) as producer:
            for number in range(300):
                await produce(producer, [b"%d" % number + b"." * 1000])
        leader = described.partitions[0].leader
        assert leader is not None
        return leader

    async def wait_until_repaired(cluster: LocalCluster, damaged: Path, good: bytes) -> None:
        async def is_repaired() -> bool:
            return await asyncio.to_thread(damaged.read_bytes) == good

        async with aio.Admin(cluster.bootstrap) as admin:
            await until(lambda: all_in_sync(admin), 20)
        await until(is_repaired, 30)

    with LocalCluster(tmp_path / "cluster", nodes=3) as cluster:
        leader = asyncio.run(fill(cluster))
        cluster.stop(leader)
        folder = next(Path(cluster.files.directory).glob(f"node-{leader}/logs/{TOPIC}-*/0/data"))
        segment = sorted(folder.glob("*.log"))[1]
        good = segment.read_bytes()
        broken = bytearray(good)
        broken[len(good) // 2] ^= 4
        segment.write_bytes(broken)
        cluster.restart(leader)
        asyncio.run(wait_until_repaired(cluster, segment, good))
        assert len(asyncio.run(read_all(cluster.bootstrap))) == 300
        for node_id in cluster.ids:
            cluster.stop(node_id)
        assert len({stored_bytes(cluster, node_id) for node_id in cluster.ids}) == 1
