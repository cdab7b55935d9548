"""Shell: reads the state of a healed cluster: logs as clients see them, and each node's copies.

Every function waits for the cluster to come to rest, until a deadline on the loop's clock. After
that it raises NotDrained with the last problem.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any

from raftq.chaos.history import DeadLetterSeen, Final
from raftq.chaos.scene import NotDrained, Scene
from raftq.client.admin.admin import Admin
from raftq.client.common.errors import OffsetOutOfRange, RaftqError, UnknownPartition
from raftq.client.common.names import DLQ_HEADER
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.consumer import Consumer
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions, addresses
from raftq.client.results import Record, TopicDescription
from raftq.client.wire.batch import Batch
from raftq.client.wire.node_messages import ReadReplica
from raftq.client.wire.proof import cluster_proof

LOG_NAMES = ("data", "ledger", "delays")
LOOK_EVERY_S = 0.2

Rows = list[tuple[int, str]]
Copies = dict[int, Rows]


async def until(
    condition: Callable[[], Awaitable[str]], deadline: float, what: str = "the cluster"
) -> None:
    """Waits until `condition` returns "". It returns what is still missing; an error counts as
    that."""
    loop = asyncio.get_running_loop()
    missing = "was not looked at"
    while True:
        try:
            # A node that hangs must not extend the wait beyond the deadline.
            async with asyncio.timeout_at(deadline):
                missing = await condition()
        except RaftqError as error:
            missing = repr(error)
        except TimeoutError:
            missing = f"no answer ({missing})"
        if not missing:
            return
        if loop.time() >= deadline:
            raise NotDrained(f"{what} is not as it should be in time: {missing}")
        await sleep(LOOK_EVERY_S)


async def whole(admin: Admin, topic: str, deadline: float) -> TopicDescription:
    """The topic, as soon as every partition has a leader and all its copies are in sync."""
    found: list[TopicDescription] = []

    async def is_whole() -> str:
        found[:] = [await admin.describe_topic(topic)]
        for partition in found[0].partitions:
            if partition.leader is None or partition.high_watermark is None or partition.target:
                return f"partition {partition.partition} is {partition}"
            if set(partition.isr) != set(partition.replicas):
                in_sync = f"in sync are {partition.isr} of {partition.replicas}"
                return f"partition {partition.partition}: {in_sync}"
        return ""

    await until(is_whole, deadline, f"topic {topic}")
    return found[0]


async def read_topic(scene: Scene, topic: str, deadline: float) -> dict[int, list[Record]]:
    """Reads every readable record of a topic, by partition, in order."""
    async with Admin(scene.bootstrap) as admin:
        described = await whole(admin, topic, deadline)
    ends = {
        partition.partition: partition.high_watermark or 0 for partition in described.partitions
    }
    found: dict[int, list[Record]] = {number: [] for number in ends}
    async with Consumer(scene.bootstrap) as consumer:
        await consumer.assign([(topic, number) for number in ends])
        for number in ends:
            await consumer.seek(topic, number, to="earliest")

        async def is_read() -> str:
            for record in await consumer.poll(max_records=5000, timeout=1.0):
                found[record.partition].append(record)
            for number, end in ends.items():
                position = await consumer.position(topic, number)
                if position < end:
                    return f"partition {number} is read up to {position} of {end}"
            return ""

        for _ in range(1_000_000):  # no pause while there is more
            before = sum(map(len, found.values()))
            if not await _quietly(is_read) or sum(map(len, found.values())) == before:
                break
        await until(is_read, deadline, f"reading {topic}")
    return found


async def _quietly(condition: Callable[[], Awaitable[str]]) -> str:
    try:
        return await condition()
    except RaftqError as error:
        return repr(error)


async def read_back(scene: Scene, topic: str, final: Final, deadline: float) -> None:
    """Adds the topic's logs and all their copies to `final`."""
    records = await read_topic(scene, topic, deadline)
    for number, rows in records.items():
        final.logs[topic, number] = [(row.offset, row.value.decode()) for row in rows]
    async with Admin(scene.bootstrap) as admin:
        described = await whole(admin, topic, deadline)
    if scene.secret:
        await read_copies(scene, described, final, deadline)


async def read_letters(scene: Scene, topic: str, final: Final, deadline: float) -> None:
    """Adds the dead letters of a topic to `final`."""
    dead = f"{topic}.dlq"
    async with Admin(scene.bootstrap) as admin:
        if dead not in await admin.list_topics():
            return
    for rows in (await read_topic(scene, dead, deadline)).values():
        final.letters += [letter_of(row.value, row.headers) for row in rows]


def letter_of(value: bytes, headers: Mapping[str, bytes]) -> DeadLetterSeen:
    """Makes a dead letter from a record's value and headers."""
    texts = {name: text.decode() for name, text in headers.items()}
    return DeadLetterSeen(
        topic=texts[DLQ_HEADER + "topic"],
        partition=int(texts[DLQ_HEADER + "partition"]),
        offset=int(texts[DLQ_HEADER + "offset"]),
        group=texts[DLQ_HEADER + "group"],
        value=value.decode(),
        attempts=int(texts[DLQ_HEADER + "attempts"]),
        reason=texts[DLQ_HEADER + "reason"],
    )


# Copies.


async def read_copies(scene: Scene, topic: TopicDescription, final: Final, deadline: float) -> None:
    """Adds each node's copy of every log to `final`, as soon as the copies agree.

    If they do not agree for a long time, they are added as they are, for the checkers."""
    loop = asyncio.get_running_loop()
    settled_at = min(deadline, loop.time() + scene.settle_s)
    for partition in topic.partitions:
        for number, partition_log in enumerate(LOG_NAMES):
            log = (topic.topic_id, partition.partition, number)
            copies = await _read_all(scene, log, partition.replicas, deadline)
            while not _agree(copies) and loop.time() < settled_at:
                await sleep(LOOK_EVERY_S)
                copies = await _read_all(scene, log, partition.replicas, deadline)
            if any(copies.values()):
                final.copies[topic.name, partition.partition, partition_log] = copies


async def _read_all(
    scene: Scene, log: tuple[int, int, int], nodes: Iterable[int], deadline: float
) -> Copies:
    copies: Copies = {}

    async def are_read() -> str:
        for node in nodes:
            copies[node] = await read_copy(scene, node, *log)
        return ""

    await until(are_read, deadline, f"reading the copies of {log}")
    return copies


def _agree(copies: Copies) -> bool:
    start = max((rows[0][0] for rows in copies.values() if rows), default=0)
    same = [[row for row in rows if row[0] >= start] for rows in copies.values()]
    return all(rows == same[0] for rows in same)


async def read_copy(
    scene: Scene, node: int, topic_id: int, partition: int, partition_log: int
) -> Rows:
    """Base offset and digest of every batch in a node's own copy; [] if it has no such log."""
    rows: Rows = []
    offset = 0
    async with _as_node(scene, scene.direct[node]) as connection:
        while True:
            request = ReadReplica(topic_id, partition, offset, 1 << 20, partition_log)
            try:
                raw = (await connection.request(request, timeout_s=10.0)).raw
            except UnknownPartition:
                if partition_log == 0:
                    raise
                return []
            except OffsetOutOfRange as error:
                start = error.details.get("start_offset")
                if rows or not isinstance(start, int) or start <= offset:
                    raise
                offset = start  # the beginning was removed
                continue
            if not len(raw):
                return rows
            for base, end, digest in _batches(raw):
                if base >= offset or not rows:
                    rows.append((base, digest))
                offset = max(offset, end)


def _batches(raw: memoryview) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    at = 0
    while at < len(raw):
        batch = Batch(raw, at)
        data = raw[at : at + batch.length]
        found.append(
            (batch.base_offset, batch.end_offset, blake2b(data, digest_size=8).hexdigest())
        )
        at += batch.length
    return found


@asynccontextmanager
async def _as_node(scene: Scene, address: str) -> AsyncIterator[Connection]:
    """Opens a connection as a node of the cluster. The cluster's id is in the reply to any
    client."""
    ((host, port),) = addresses(address)
    async with await Connection.open(host, port, ConnectionOptions(connect_ms=2_000)) as asking:
        assert asking.hello is not None
        proof = cluster_proof(scene.secret, asking.hello.cluster_id)
    options = ConnectionOptions(name="readback", role="node", cluster_proof=proof, connect_ms=2_000)
    async with await Connection.open(host, port, options) as connection:
        yield connection


def deadline_of(scene: Scene) -> float:
    """The deadline for the whole end of a workload, counted from now."""
    return asyncio.get_running_loop().time() + scene.drain_s


def ends_of(final: Final, partition_keys: Iterable[PartitionKey]) -> dict[PartitionKey, int]:
    """The end offsets of these logs, by what was read back."""
    return {
        partition_key: final.logs[partition_key][-1][0] + 1 if final.logs[partition_key] else 0
        for partition_key in partition_keys
    }


def unique(scene: Scene, name: str) -> str:
    """A name that no other run or workload has."""
    return f"{name}-{scene.rng.randrange(1 << 40):010x}"


async def create_topic(scene: Scene, topic: str, **settings: Any) -> None:
    """Creates a topic on a cluster that may just have started."""
    async with Admin(scene.bootstrap, timeout_ms=20_000) as admin:
        await admin.create_topic(topic, **settings)
