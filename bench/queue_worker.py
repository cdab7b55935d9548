"""Shell: how many records one `Worker` process handles if its handlers return at once.

Portions of records are produced, untimed, while the worker is idle. Then it takes them all, timed
from its first record to its last. A `QueueClient` that leases and acks by hundreds shows what a
call per record costs.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raftq.client.sync.producer import Producer
from raftq.client.sync.queue_client import QueueClient
from raftq.client.sync.worker import Worker
from raftq_bench.cluster_runs import ClusterSettings, Target, target
from raftq_bench.queue_flow import IN_FLIGHT_MAX, LEASE_RECORDS, NODES, PARTITIONS, Supply
from raftq_bench.report import Bar, Result

PORTION, PORTION_QUICK = 60_000, 12_000
CONCURRENCY = {"a coroutine function": 64, "a function in threads": 8}
RATE_MIN = 10_000


@dataclass(slots=True)
class Progress:
    """From the first record of a portion to its last."""

    wanted: int
    count: int = 0
    began: float = 0.0
    ended: float = 0.0

    def note(self, count: int = 1) -> bool:
        """Counts a record. Says whether it was the last."""
        if not self.count:
            self.began = time.perf_counter()
        self.count += count
        if self.count >= self.wanted:
            self.ended = time.perf_counter()
        return self.count >= self.wanted


def _by_hand(found: Target, topic: str, wanted: int) -> float:
    progress = Progress(wanted)
    with QueueClient(found.bootstrap, group="workers", topics=[topic]) as client:
        while True:
            records = client.lease(LEASE_RECORDS, timeout=5.0)
            client.ack_many(records)
            if progress.note(len(records)):
                return progress.ended - progress.began


def _by_worker(found: Target, topic: str, wanted: int, kind: str) -> float:
    progress, lock = Progress(wanted), threading.Lock()

    async def on_loop(record: Any) -> None:
        if progress.note():
            worker.stop()

    def in_thread(record: Any) -> None:
        with lock:
            if progress.note():
                worker.stop()

    worker = Worker(
        found.bootstrap, group="workers", topics=[topic], concurrency=CONCURRENCY[kind],
        handler=on_loop if kind == "a coroutine function" else in_thread,
    )  # fmt: skip
    worker.run()
    return progress.ended - progress.began


def measure(settings: ClusterSettings) -> list[Result]:
    portion = settings.base.size(PORTION, PORTION_QUICK)
    ways: dict[str, Callable[[Target, str, int], float]] = {"by hand": _by_hand}
    for kind in CONCURRENCY:
        ways[kind] = lambda found, topic, wanted, kind=kind: _by_worker(found, topic, wanted, kind)  # type: ignore[misc]
    seconds = dict.fromkeys(ways, 0.0)
    counts = dict.fromkeys(ways, 0)
    with target(settings, NODES) as found, Producer(found.bootstrap) as producer:
        topic = found.create("worker", PARTITIONS, NODES, in_flight_max=IN_FLIGHT_MAX)
        supply = Supply(producer, topic)
        while min(seconds.values()) < settings.base.seconds:
            for name, way in ways.items():
                supply.add(portion)
                seconds[name] += way(found, topic, portion)
                counts[name] += portion
    rates = {name: counts[name] / seconds[name] for name in ways}
    return [
        Result(
            figure="worker",
            title=f"3 nodes, one Worker process, {kind}, concurrency {concurrency}",
            unit="records/s",
            value=rates[kind],
            measured_s=seconds[kind],
            fsync="interval",
            baseline_name=f"QueueClient: lease({LEASE_RECORDS}) and ack_many, in turns with it",
            baseline=rates["by hand"],
            bar=Bar("value", RATE_MIN),
            notes=["handlers return at once; from a worker's first record to its last"],
        ).judge(settings.base)
        for kind, concurrency in CONCURRENCY.items()
    ]
