"""Shell: leaders killed with SIGKILL under load: how long nothing is acknowledged, and what is
lost.

Two writers run all the time: one sends single records to each partition, the other many. Each
record contains its writer and its number. A round kills the leader of some partitions. It lasts
until each of those partitions has acknowledged a record that was sent after the kill; the slowest
counts. Then the node starts again and all replicas catch up. At the end everything is read back:
every acknowledged record is there once, and in the order of sending.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from struct import Struct

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.client.common.errors import RaftqError, RequestTimeout
from raftq.client.net.transport import run
from raftq.client.producer.producer import Producer
from raftq.client.results import TopicDescription
from raftq.client.sync.admin import Admin
from raftq.client.sync.consumer import Consumer
from raftq_bench.cluster_runs import (
    ClusterSettings,
    Target,
    quantile,
    target,
    tell,
)
from raftq_bench.report import Bar, Result
from raftq_bench.runner import VALUE_BYTES

NODES = 3
PARTITIONS = 12
BULK_RECORDS = 100
BULK_PAUSE_S = 0.01  # between two turns of the bulk writer, so that killing and starting proceed
P50_S, WORST_S = 1.5, 5.0
ROUND_S_LIMIT = 60.0
POLL_S = 0.02
MARK = Struct("<BHQ")  # writer, partition, number
SINGLE, BULK = 0, 1
READ_S = 5.0


class Writers:
    """Both writers, on their own loop in a thread."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._bootstrap = bootstrap
        self._topic = topic
        self._thread = threading.Thread(target=lambda: run(self._write()), name="writers")
        self._stop = threading.Event()
        self.acknowledged: dict[tuple[int, int], set[int]] = {
            (writer, partition): set()
            for writer in (SINGLE, BULK)
            for partition in range(PARTITIONS)
        }
        self.newest = [0.0] * PARTITIONS
        """When the newest acknowledged single record was sent."""
        self.ended_at = [0.0] * PARTITIONS
        """When that acknowledgement came."""
        self.errors: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    async def _write(self) -> None:
        async with (
            Producer(self._bootstrap, acks="all", linger_ms=0) as single,
            Producer(self._bootstrap, acks="all") as bulk,
            asyncio.TaskGroup() as group,
        ):
            for partition in range(PARTITIONS):
                group.create_task(self._write_singly(single, partition))
                group.create_task(self._write_many(bulk, partition))

    async def _write_singly(self, producer: Producer, partition: int) -> None:
        number = 0
        while not self._stop.is_set():
            value = MARK.pack(SINGLE, partition, number)
            sent_at = time.perf_counter()
            try:
                await (await producer.send(self._topic, value, partition=partition))
            except RaftqError as error:
                self.errors.append(repr(error))
            else:
                self.acknowledged[SINGLE, partition].add(number)
                self.ended_at[partition] = time.perf_counter()
                self.newest[partition] = sent_at
            number += 1
            await asyncio.sleep(0.001)

    async def _write_many(self, producer: Producer, partition: int) -> None:
        number = 0
        while not self._stop.is_set():
            numbers = range(number, number + BULK_RECORDS)
            values = [
                MARK.pack(BULK, partition, number).ljust(VALUE_BYTES, b".") for number in numbers
            ]
            try:
                await (await producer.send_many(self._topic, values, partition=partition))
            except RaftqError as error:
                self.errors.append(repr(error))
            else:
                self.acknowledged[BULK, partition].update(numbers)
            number += BULK_RECORDS
            await asyncio.sleep(BULK_PAUSE_S)


class Rounds:
    """Kills, waits, and starts again."""

    def __init__(self, found: Target, topic: str, writers: Writers) -> None:
        self._bootstrap = found.bootstrap
        self._local: LocalCluster = found.processes()
        self._topic = topic
        self._writers = writers
        self.times: list[float] = []
        self.controllers = 0

    def kill_one(self, number: int) -> None:
        """Kills a leader; every third time the one that is also the controller."""
        victim, parts, controls = self._choose(number)
        self.controllers += controls
        killed_at = time.perf_counter()
        self._local.kill(victim)
        seconds = self._first_new(parts, killed_at, gone_at=time.perf_counter())
        self.times.append(seconds)
        also = ", the controller" if controls else ""
        tell(f"round {number + 1}: node {victim}{also}, {len(parts)} led: {seconds:.2f} s")
        self._local.restart(victim)
        self._wait_for(_in_sync, "all replicas are in sync again")

    def _choose(self, number: int) -> tuple[int, list[int], bool]:
        wants_controller = number % 3 == 0
        seen: list[tuple[int, list[int], bool]] = []

        def chosen(topic: TopicDescription, controller: int | None) -> bool:
            led: dict[int, list[int]] = {}
            for part in topic.partitions:
                if part.leader is not None:
                    led.setdefault(part.leader, []).append(part.partition)
            fitting = [one for one in sorted(led) if (one == controller) == wants_controller]
            if fitting:
                victim = fitting[number % len(fitting)]
                seen.append((victim, led[victim], wants_controller))
            return bool(fitting)

        self._wait_for(chosen, "a node with the wanted role leads something")
        return seen[-1]

    def _first_new(self, parts: list[int], killed_at: float, gone_at: float) -> float:
        """The time from the kill. A record that was sent before the process was gone does not
        count, since the process may still have answered it."""
        newest, ended_at = self._writers.newest, self._writers.ended_at
        slowest = 0.0
        for partition in parts:
            while newest[partition] < gone_at:
                if time.perf_counter() > killed_at + ROUND_S_LIMIT:
                    raise RequestTimeout(f"partition {partition} acknowledges nothing any more")
                time.sleep(0.001)
            slowest = max(slowest, ended_at[partition] - killed_at)
        return slowest

    def _wait_for(self, holds: Callable[[TopicDescription, int | None], bool], what: str) -> None:
        ends_at = time.perf_counter() + ROUND_S_LIMIT
        while time.perf_counter() < ends_at:
            try:
                with Admin(self._bootstrap, timeout_ms=2_000) as admin:
                    topic = admin.describe_topic(self._topic)
                    controller = admin.cluster_status().controller
                if holds(topic, controller):
                    return
            except RaftqError as error:
                tell(f"asked in vain: {error}")
            time.sleep(POLL_S)
        raise RequestTimeout(f"after {ROUND_S_LIMIT:g} s it is not so that {what}")


def _in_sync(topic: TopicDescription, controller: int | None) -> bool:
    return all(len(part.isr) == len(part.replicas) for part in topic.partitions)


def read_back(bootstrap: str, topic: str) -> dict[tuple[int, int], list[int]]:
    """The numbers of every writer in every partition, in the order of the log."""
    found: dict[tuple[int, int], list[int]] = {}
    with Admin(bootstrap) as admin:
        ends = {partition.partition: partition.high_watermark or 0
                for partition in admin.describe_topic(topic).partitions}  # fmt: skip
    with Consumer(bootstrap) as consumer:
        for partition, end in ends.items():
            consumer.assign([(topic, partition)])
            consumer.seek(topic, partition, offset=0)
            while consumer.position(topic, partition) < end:
                records = consumer.poll(5_000, READ_S)
                if not records:
                    raise RequestTimeout(f"partition {partition} gives nothing before its end")
                for record in records:
                    writer, meant, number = MARK.unpack_from(record.value)
                    assert meant == partition, "a record is in a partition it was not sent to"
                    found.setdefault((writer, partition), []).append(number)
    return found


def verdict(
    acknowledged: Mapping[tuple[int, int], set[int]], read: Mapping[tuple[int, int], list[int]]
) -> dict[str, int]:
    """How many acknowledged records are lost, and how many are doubled or out of order."""
    lost = duplicated = out_of_order = 0
    for key, numbers in acknowledged.items():
        got = read.get(key, [])
        lost += len(numbers.difference(got))
        duplicated += len(got) - len(set(got))
        out_of_order += sum(after < before for before, after in pairwise(got))
    return {"lost": lost, "duplicated": duplicated, "out_of_order": out_of_order}


def measure(settings: ClusterSettings) -> list[Result]:
    rounds = settings.base.size(settings.rounds, 3)
    with target(settings, NODES) as found:
        topic = found.create("failover", PARTITIONS, NODES, min_insync=2, retention_bytes=None)
        writers = Writers(found.bootstrap, topic)
        writers.start()
        start = time.perf_counter()
        try:
            killing = Rounds(found, topic, writers)
            for number in range(rounds):
                killing.kill_one(number)
            seconds = time.perf_counter() - start
        finally:
            writers.stop()
        bad = verdict(writers.acknowledged, read_back(found.bootstrap, topic))
    return _results(settings, killing, writers, seconds, bad)


def _results(
    settings: ClusterSettings,
    killing: Rounds,
    writers: Writers,
    seconds: float,
    bad: dict[str, int],
) -> list[Result]:
    count = sum(map(len, writers.acknowledged.values()))
    about = (
        f"{len(killing.times)} kills, {killing.controllers} of them the controller; {count:,} "
        f"records acknowledged in {seconds:.0f} s, {len(writers.errors)} sends failed"
    )
    detail = {"times_s": killing.times, "errors": writers.errors[:20], **bad}
    results = []
    for title, value, limit in (
        ("p50", quantile(killing.times, 0.5), P50_S),
        ("worst", max(killing.times), WORST_S),
    ):
        results.append(
            Result(
                figure="failover",
                title=f"3 nodes, acks=all, leader killed -9: first new acknowledgement, {title}",
                unit="s",
                value=value,
                measured_s=seconds,
                fsync="interval",
                bar=Bar("value", limit, at_most=True),
                notes=[about],
                detail=detail,
            ).judge(settings.base)
        )
    results.append(
        Result(
            figure="failover",
            title="the same: lost + duplicated + out of order",
            unit="records",
            value=float(sum(bad.values())),
            measured_s=seconds,
            fsync="interval",
            bar=Bar("value", 0, at_most=True),
            notes=[", ".join(f"{name.replace('_', ' ')} {number}" for name, number in bad.items())],
            detail=detail,
        ).judge(settings.base)
    )
    return results
