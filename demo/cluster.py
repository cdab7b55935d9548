"""Shell: the second part of the demo: three nodes, two producers, and the busiest leader killed
twice.

The nodes are real processes. Everything that was acknowledged is compared with everything that can
be read at the end: nothing is lost, nothing comes twice, everything is in order.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from raftq import aio
from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.client.common.errors import RaftqError
from raftq.client.results import TopicDescription
from raftq_demo.checks import Check
from raftq_demo.cluster_writer import (
    TOPIC,
    ClusterWriter,
    WriterReport,
    clock,
    value_of,
)

PARTITIONS = 6
KILLS = 2
FAILOVER_S_MAX = 5.0
CALM_S = 1.5
WAIT_S = 60.0

Read = dict[int, list[bytes]]  # partition -> values, by offset


@dataclass(slots=True)
class Kill:
    """One leader killed with SIGKILL."""

    node_id: int
    led: tuple[int, ...]
    at: float
    controller: bool


@dataclass(slots=True)
class ClusterStory:
    """What happened, for the report."""

    kills: list[Kill]
    reports: list[WriterReport]
    read: Read

    @property
    def records(self) -> int:
        return sum(map(len, self.read.values()))

    def failovers(self) -> list[float]:
        """For each kill: the time until a record that was sent after it was acknowledged in a
        partition that the killed node had led."""
        found = []
        for kill in self.kills:
            waits = [
                one.at - kill.at
                for report in self.reports
                for one in report.acknowledged
                if one.partition in kill.led and one.sent >= kill.at
            ]
            found.append(min(waits, default=float("inf")))
        return found


@contextmanager
def started_cluster(directory: str, say: Callable[[str], None]) -> Iterator[LocalCluster]:
    began = time.perf_counter()
    with LocalCluster(directory, nodes=3) as cluster:
        starts_s = time.perf_counter() - began
        say(f"5. three nodes serve after {starts_s:.1f} s: {cluster.bootstrap}")
        yield cluster


def run_cluster_story(cluster: LocalCluster, say: Callable[[str], None]) -> ClusterStory:
    asyncio.run(_create(cluster.bootstrap))
    say(f"6. two processes produce to {PARTITIONS} partitions with acks=all")
    writers = [ClusterWriter(cluster.bootstrap, number) for number in (1, 2)]
    try:
        _wait_for_progress(writers, 2000)
        kills = [asyncio.run(_kill_busiest(cluster, writers, say)) for _ in range(KILLS)]
        for writer in writers:
            writer.finish(WAIT_S)
    finally:
        for writer in writers:
            writer.end()
    say("7. everything is read back")
    read = asyncio.run(_read_all(cluster.bootstrap))
    return ClusterStory(kills, [writer.report for writer in writers], read)


async def _create(bootstrap: str) -> None:
    async with aio.Admin(bootstrap) as admin:
        await admin.create_topic(TOPIC, partitions=PARTITIONS, replication=3)


def _wait_for_progress(writers: Sequence[ClusterWriter], count: int) -> None:
    """Waits until each writer got this many more acknowledgements."""
    goals = [len(writer.report.acknowledged) + count for writer in writers]
    ends_at = time.perf_counter() + WAIT_S
    while any(
        len(writer.report.acknowledged) < goal for writer, goal in zip(writers, goals, strict=True)
    ):
        if time.perf_counter() > ends_at:
            raise RaftqError("the producers make no progress")
        time.sleep(0.01)


async def _kill_busiest(
    cluster: LocalCluster, writers: Sequence[ClusterWriter], say: Callable[[str], None]
) -> Kill:
    """Kills the node that leads most, waits until everything goes on, and starts it again."""
    async with aio.Admin(cluster.bootstrap) as admin:
        led = defaultdict(list)
        for partition in (await admin.describe_topic(TOPIC)).partitions:
            if partition.leader is not None:
                led[partition.leader].append(partition.partition)
        victim = max(led, key=lambda node: len(led[node]))
        controller = (await admin.cluster_status()).controller == victim
        cluster.kill(victim)
        kill = Kill(victim, tuple(led[victim]), clock(), controller)
        also = ", which is also the controller," if controller else ""
        say(f"   kill -9 of node {victim}{also} leader of {len(kill.led)} partitions")
        await asyncio.to_thread(_wait_for_progress, writers, 2000)
        await asyncio.to_thread(cluster.restart, victim)
        await _wait_until_whole(admin)
    return kill


async def _wait_until_whole(admin: aio.Admin) -> None:
    """Waits until every replica is in sync again."""
    ends_at = time.perf_counter() + WAIT_S
    while not _is_whole(await admin.describe_topic(TOPIC)):
        if time.perf_counter() > ends_at:
            raise RaftqError("the restarted node does not catch up")
        await asyncio.to_thread(time.sleep, 0.05)


def _is_whole(topic: TopicDescription) -> bool:
    return all(len(partition.isr) == len(partition.replicas) for partition in topic.partitions)


async def _read_all(bootstrap: str) -> Read:
    read: Read = {}
    async with aio.Admin(bootstrap) as admin, aio.Consumer(bootstrap) as consumer:
        topic = await admin.describe_topic(TOPIC)
        ends = {
            partition.partition: partition.high_watermark or 0 for partition in topic.partitions
        }
        read = {number: [] for number in ends}
        await consumer.assign([(TOPIC, number) for number in ends])
        for number in ends:
            await consumer.seek(TOPIC, number, to="earliest")
        while any(len(read[number]) < end for number, end in ends.items()):
            records = await consumer.poll(max_records=5000, timeout=5.0)
            if not records:
                break
            for record in records:
                read[record.partition].append(record.value)
    return read


def judge_cluster(story: ClusterStory) -> list[Check]:
    """The claims, each with the expected and the found value."""
    lost = phantom = out_of_order = acknowledged = failed = 0
    where: dict[bytes, int] = Counter(value for values in story.read.values() for value in values)
    sent = {
        value_of(report.writer, number) for report in story.reports for number in range(report.sent)
    }
    for report in story.reports:
        acknowledged += len(report.acknowledged)
        failed += len(report.failed)
        for one in report.acknowledged:
            values = story.read[one.partition]
            found = values[one.offset] if one.offset < len(values) else None
            lost += found != value_of(report.writer, one.number)
    phantom = sum(value not in sent for value in where)
    duplicated = sum(count - 1 for count in where.values())
    for values in story.read.values():
        out_of_order += _out_of_order(values)
    worst = max(story.failovers(), default=0.0)
    return [
        _count("cluster: records that were refused or given up", 0, failed),
        _count("cluster: acknowledged records that are lost", 0, lost),
        _count("cluster: records that are there twice", 0, duplicated),
        _count("cluster: records out of the order they were sent in", 0, out_of_order),
        _count("cluster: records nobody sent", 0, phantom),
        Check("cluster: acknowledged records", "some", str(acknowledged), acknowledged > 0),
        Check(
            "cluster: longest failover", f"under {FAILOVER_S_MAX:.0f} s", f"{worst:.2f} s",
            worst < FAILOVER_S_MAX,
        ),
    ]  # fmt: skip


def _out_of_order(values: Sequence[bytes]) -> int:
    last: dict[bytes, int] = {}
    count = 0
    for value in values:
        writer, number, _ = value.split(b":", 2)
        count += int(number) <= last.get(writer, -1)
        last[writer] = int(number)
    return count


def _count(claim: str, expected: int, found: int) -> Check:
    return Check(claim, str(expected), str(found), found == expected)
