"""Shell: how fast one member of a stream group reads, storing its positions on the way."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from operator import attrgetter

from raftq.client.common.errors import RequestTimeout
from raftq.client.results import Record
from raftq.client.sync.consumer import Consumer
from raftq.client.sync.producer import Producer
from raftq_bench.bare_socket import BareReader, bare_nodes
from raftq_bench.cluster_flow import FETCH_BYTES, POLL_RECORDS, Timed, compare
from raftq_bench.cluster_runs import (
    RECORDS_PER_BATCH,
    ClusterSettings,
    Line,
    bare_batch,
    rate_result,
    target,
)
from raftq_bench.report import Bar, Result
from raftq_bench.runner import BATCH_RECORDS, endless, make_batches, make_values

NODES = 3
PARTITIONS = 3
FILL_RECORDS = 30_000
"""Of each partition: less than a node keeps in memory, otherwise the disk is measured."""
COMMIT_RECORDS = 20_000
RATE_MIN = 300_000
JOIN_S = 30.0


class Member:
    """Reads its partitions from end to end, repeatedly, and commits meanwhile."""

    def __init__(self, consumer: Consumer, topic: str) -> None:
        self._consumer = consumer
        self._topic = topic
        self._left = [FILL_RECORDS] * PARTITIONS
        self._uncommitted = 0
        self.commits = 0
        ends = time.perf_counter() + JOIN_S
        while len(consumer.assignment()) < PARTITIONS:
            if time.perf_counter() > ends:
                raise RequestTimeout(f"{JOIN_S:g} s after joining the partitions are not there")
            self._took(consumer.poll(1, 0.1))

    def _took(self, records: Sequence[Record]) -> int:
        left = self._left
        for partition, count in Counter(map(attrgetter("partition"), records)).items():
            left[partition] -= count
        for partition, count in enumerate(left):
            if count <= 0:
                self._consumer.seek(self._topic, partition, offset=0)
                left[partition] = FILL_RECORDS
        return len(records)

    def __call__(self, seconds: float) -> int:
        until = time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < until:
            got = self._took(self._consumer.poll(POLL_RECORDS, 10.0))
            assert got, "nothing came from a topic that is full"
            count += got
            self._uncommitted += got
            if self._uncommitted >= COMMIT_RECORDS:
                self._consumer.commit()
                self.commits += 1
                self._uncommitted = 0
        return count


def measure(settings: ClusterSettings) -> list[Result]:
    line = Line(
        figure="consume",
        title=f"3 nodes, one member of a group, a commit every {COMMIT_RECORDS:,} records",
        bar=Bar("value", RATE_MIN),
    )
    with target(settings, NODES) as found, ExitStack() as stack:
        port = stack.enter_context(bare_nodes(found.directory))
        topic = found.create(line.figure, PARTITIONS, NODES, retention_bytes=None)
        following = endless(make_batches(make_values()))
        with Producer(found.bootstrap) as producer:
            for partition in range(PARTITIONS):
                for _ in range(FILL_RECORDS // BATCH_RECORDS):
                    producer.send_many(topic, following(), partition=partition)
        consumer = stack.enter_context(
            Consumer(found.bootstrap, group="bench-consume", topics=[topic], auto_commit=False)
        )
        member = Member(consumer, topic)
        records = RECORDS_PER_BATCH * FETCH_BYTES // len(bare_batch())
        bare = BareReader(port, bytes(FETCH_BYTES), records)
        timings, cpu_s = compare(found, Timed(member, rest=lambda: None), bare)
        line.notes.append(f"{member.commits:,} commits, each answered when it is replicated")
        return [rate_result(settings.base, line, timings, cpu_s)]
