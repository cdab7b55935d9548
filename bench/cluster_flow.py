"""Shell: throughput of a cluster: produced in columns, singly, by many at once, and consumed."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Literal

from raftq.client.net.transport import new_event_loop
from raftq.client.producer.producer import Producer as AsyncProducer
from raftq.client.sync.consumer import Consumer
from raftq.client.sync.producer import Producer
from raftq_bench.bare_socket import BareClient, BareReader, bare_nodes
from raftq_bench.cluster_runs import (
    RECORDS_PER_BATCH,
    ClusterSettings,
    Line,
    Target,
    bare_batch,
    rate_result,
    target,
)
from raftq_bench.report import Bar, Result
from raftq_bench.runner import (
    BATCH_RECORDS,
    Side,
    Timing,
    endless,
    interleave,
    make_batches,
    make_values,
)

FILL_RECORDS = 56_000  # less than a node keeps in memory: otherwise the disk is measured
FETCH_BYTES = 1024 * 1024
POLL_RECORDS = 5_000
PUBLISHERS = 1_000
PARTITIONS = 3
Acks = Literal["none", "leader", "all"]


class Timed(Side):
    """A side whose slice ends when everything it began is done."""

    def __init__(self, run: Callable[[float], int], rest: Callable[[], object] = os.sync) -> None:
        """Sides that write rest by `os.sync`, so that unwritten data does not slow the other
        side."""
        super().__init__(lambda: 0, rest)
        self._run = run

    def slice(self, seconds: float) -> tuple[int, float]:
        start = time.perf_counter()
        count = self._run(seconds)
        return count, time.perf_counter() - start


def compare(found: Target, ours: Side, bare: BareClient) -> tuple[dict[str, Timing], float | None]:
    """Runs both sides in turns, and measures the nodes' processor time meanwhile."""
    before = found.cpu_s()
    try:
        timings = interleave(found.settings, {"raftq": ours, "bare": bare})
    finally:
        bare.close()
    after = found.cpu_s()
    return timings, None if after is None or before is None else after - before


def send_columns(producer: Producer, topic: str) -> Callable[[float], int]:
    following = endless(make_batches(make_values()))

    def run(seconds: float) -> int:
        until = time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < until:
            producer.send_many(topic, following())
            count += BATCH_RECORDS
        producer.flush()
        return count

    return run


def send_singly(producer: Producer, topic: str) -> Callable[[float], int]:
    values = make_values()[:BATCH_RECORDS]

    def run(seconds: float) -> int:
        until = time.perf_counter() + seconds
        count = 0
        send = producer.send
        while time.perf_counter() < until:
            for value in values:
                send(topic, value)
            count += len(values)
        producer.flush()
        return count

    return run


def _measure_producer(
    settings: ClusterSettings,
    nodes: int,
    acks: Acks,
    line: Line,
    make: Callable[[Producer, str], Callable[[float], int]],
) -> Result:
    with target(settings, nodes) as found, bare_nodes(found.directory, nodes) as port:
        topic = found.create(line.figure, PARTITIONS, nodes)
        bare = BareClient(port, bare_batch(), RECORDS_PER_BATCH)
        with Producer(found.bootstrap, acks=acks) as producer:
            timings, cpu_s = compare(found, Timed(make(producer, topic)), bare)
        return rate_result(settings.base, line, timings, cpu_s)


def measure_produce_1(settings: ClusterSettings) -> list[Result]:
    line = Line(
        figure="produce-1",
        title="1 node, acks=leader, one producer, send_many",
        bar=Bar("value", 700_000),
    )
    result = _measure_producer(settings, 1, "leader", line, send_columns)
    return [result, _against_bare(result, 0.5, settings)]


def _against_bare(result: Result, ratio: float, settings: ClusterSettings) -> Result:
    """The same figure again, judged by its ratio."""
    return Result(
        figure=result.figure,
        title=f"{result.title}: share of the bare loop",
        unit=result.unit,
        value=result.value,
        measured_s=result.measured_s,
        fsync=result.fsync,
        baseline_name=result.baseline_name,
        baseline=result.baseline,
        bar=Bar("ratio", ratio),
        detail=result.detail,
    ).judge(settings.base)


def measure_produce_3(settings: ClusterSettings) -> list[Result]:
    line = Line(
        figure="produce-3",
        title="3 nodes, replication 3, acks=all, one producer, send_many",
        bar=Bar("value", 250_000),
        notes=["the bare loop writes three files too, in three processes"],
    )
    return [_measure_producer(settings, 3, "all", line, send_columns)]


def measure_send(settings: ClusterSettings) -> list[Result]:
    line = Line(
        figure="send",
        title="1 node, acks=leader, producer.send() in a loop",
        bar=Bar("value", 300_000),
    )
    return [_measure_producer(settings, 1, "leader", line, send_singly)]


class AsyncSide(Timed):
    """A side that runs on its own loop, which stops between slices."""

    def __init__(self, begin: Callable[[AsyncExitStack], Coroutine[Any, Any, Any]]) -> None:
        super().__init__(self._run_slice)
        self._runner = asyncio.Runner(loop_factory=new_event_loop)
        self._stack = AsyncExitStack()
        self._work = self._runner.run(begin(self._stack))

    def _run_slice(self, seconds: float) -> int:
        count: int = self._runner.run(self._work(seconds))
        return count

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


def measure_concurrent(settings: ClusterSettings) -> list[Result]:
    line = Line(
        figure="concurrent",
        title=f"1 node, acks=leader, {PUBLISHERS:,} publishers that each await every record",
        bar=Bar("value", 100_000),
    )
    values = make_values(PUBLISHERS)
    with target(settings, 1) as found, bare_nodes(found.directory) as port:
        topic = found.create(line.figure, PARTITIONS, 1)

        async def begin(stack: AsyncExitStack) -> Any:
            producer = await stack.enter_async_context(
                AsyncProducer(found.bootstrap, acks="leader", linger_ms=0)
            )

            async def publish(value: bytes, until: float) -> int:
                count = 0
                while time.perf_counter() < until:
                    await (await producer.send(topic, value))
                    count += 1
                return count

            async def work(seconds: float) -> int:
                until = time.perf_counter() + seconds
                return sum(await asyncio.gather(*(publish(value, until) for value in values)))

            return work

        side = AsyncSide(begin)
        try:
            bare = BareClient(port, bare_batch(), RECORDS_PER_BATCH)
            timings, cpu_s = compare(found, side, bare)
        finally:
            side.close()
        return [rate_result(settings.base, line, timings, cpu_s)]


class Reading:
    """Reads a filled topic from end to end, repeatedly."""

    def __init__(self, consumer: Consumer, topic: str, poll: Callable[[], int]) -> None:
        self._consumer = consumer
        self._topic = topic
        self._poll = poll
        consumer.assign([(topic, 0)])
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._consumer.seek(self._topic, 0, offset=0)
        self._left = FILL_RECORDS

    def __call__(self, seconds: float) -> int:
        until = time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < until:
            got = self._poll()
            assert got, "nothing came from a topic that is full"
            count += got
            self._left -= got
            if self._left <= 0:
                self._begin_anew()
        return count


def _measure_consumer(
    settings: ClusterSettings, line: Line, poll_of: Callable[[Consumer], Callable[[], int]]
) -> Result:
    with target(settings, 1) as found, ExitStack() as stack:
        port = stack.enter_context(bare_nodes(found.directory))
        topic = found.create(line.figure, 1, 1, retention_bytes=None)
        following = endless(make_batches(make_values()))
        with Producer(found.bootstrap, acks="leader") as producer:
            for _ in range(FILL_RECORDS // BATCH_RECORDS):
                producer.send_many(topic, following())
        consumer = stack.enter_context(Consumer(found.bootstrap))
        reading = Reading(consumer, topic, poll_of(consumer))
        records = RECORDS_PER_BATCH * FETCH_BYTES // len(bare_batch())
        bare = BareReader(port, bytes(FETCH_BYTES), records)
        timings, cpu_s = compare(found, Timed(reading, rest=lambda: None), bare)
        return rate_result(settings.base, line, timings, cpu_s)


def measure_consume_records(settings: ClusterSettings) -> list[Result]:
    line = Line(
        figure="consume-records",
        title="1 node, consumed to Record objects",
        bar=Bar("value", 800_000),
    )

    def poll_of(consumer: Consumer) -> Callable[[], int]:
        return lambda: len(consumer.poll(POLL_RECORDS, 10.0))

    return [_measure_consumer(settings, line, poll_of)]


def measure_consume_arrow(settings: ClusterSettings) -> list[Result]:
    line = Line(
        figure="consume-arrow",
        title="1 node, consumed to Arrow tables",
        bar=Bar("value", 2_000_000),
    )

    def poll_of(consumer: Consumer) -> Callable[[], int]:
        return lambda: int(consumer.poll_arrow(timeout=10.0).num_rows)

    return [_measure_consumer(settings, line, poll_of)]
