"""What tests on real clusters share: produce, read everything back, look at the files."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from raftq import aio
from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.client.common.disk import RealDisk
from raftq.client.common.tasks import sleep
from raftq.client.results import Appended
from raftq.client.wire.batch import decode
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log

TOPIC = "t"


async def until(condition: Callable[[], Awaitable[bool]], within_s: float) -> None:
    """Wait for a condition on something outside this process."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + within_s
    while not await condition():
        assert loop.time() < ends_at, "not in time"
        await sleep(0.05)


async def all_in_sync(admin: aio.Admin, topic: str = TOPIC) -> bool:
    described = await admin.describe_topic(topic)
    return all(len(one.isr) == len(one.replicas) for one in described.partitions)


async def led_by_others(admin: aio.Admin, node_id: int, topic: str = TOPIC) -> bool:
    described = await admin.describe_topic(topic)
    return all(one.leader not in (None, node_id) for one in described.partitions)


async def produce(
    producer: aio.Producer, values: list[bytes], partition: int = 0
) -> list[Appended]:
    deliveries = [await producer.send(TOPIC, value, partition=partition) for value in values]
    await producer.flush()
    return [await one for one in deliveries]


async def read_all(bootstrap: str, partition: int = 0) -> list[bytes]:
    """Every readable record of a partition, in order."""
    async with aio.Admin(bootstrap) as admin, aio.Consumer(bootstrap) as consumer:
        end = (await admin.describe_topic(TOPIC)).partitions[partition].high_watermark
        assert end is not None
        await consumer.assign([(TOPIC, partition)])
        await consumer.seek(TOPIC, partition, to="earliest")
        values: list[bytes] = []
        while len(values) < end:
            records = await consumer.poll(max_records=1000, timeout=10.0)
            assert records, f"only {len(values)} of {end} records came"
            assert [one.offset for one in records] == list(
                range(len(values), len(values) + len(records))
            )
            values += [one.value for one in records]
        return values


def stored_bytes(cluster: LocalCluster, node_id: int, partition: int = 0) -> bytes:
    """Everything in the log of a node that is down, as it stands on its disk."""
    (topic,) = Path(cluster.files.directory).glob(f"node-{node_id}/logs/{TOPIC}-*")
    log = Log.open(RealDisk(), f"{topic}/{partition}/data", LogConfig(), 0)
    try:
        parts = []
        offset = log.start_offset
        while offset < log.end_offset:
            data = log.read(offset, 1 << 20)
            parts.append(data)
            offset = list(_ends(data))[-1]
        return b"".join(parts)
    finally:
        log.close(clean=False)


def _ends(data: bytes) -> list[int]:
    ends, at = [], 0
    while at < len(data):
        batch = decode(data, at)
        ends.append(batch.end_offset)
        at += batch.length
    return ends
