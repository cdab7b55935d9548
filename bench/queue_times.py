"""Shell: the time from a publish to a handler, and how late delayed records come."""

import time
from collections.abc import Sequence
from typing import Any

from raftq.client.common.errors import RequestTimeout
from raftq.client.sync.consumer import Consumer
from raftq.client.wire.batch import encode
from raftq_bench.bare_socket import BareLatency, bare_nodes
from raftq_bench.cluster_runs import (
    NOW_MS,
    ClusterSettings,
    Line,
    Target,
    latency_results,
    quantile,
    target,
    tell,
)
from raftq_bench.report import Bar, Result
from raftq_bench.runner import Side, interleave, make_values
from raftq_bench.worker_main import STAMP
from raftq_bench.workers import WorkerProcesses

NODES = 3
PARTITIONS = 3
RATE = 1_000
P50_MS, P99_MS = 3.0, 20.0
WAIT_S = 30.0
POLL_S = 0.01

PENDING, PENDING_QUICK = 1_000_000, 2_000
FIRING, FIRING_QUICK = 20_000, 500
DELAY_BYTES = 128
LATE_MS_MAX = 50.0
FAR_MS = 3_600_000.0
LEAD_S, LEAD_QUICK_S = 5.0, 1.0
"""Between the last record that is scheduled and the first that is due."""
SLOWEST_FILL = 10_000
"""The lowest rate of scheduling: otherwise records are due before all are there."""


class Handling(Side):
    """A producer at its pace and a worker in another process; a slice ends when all is handled."""

    def __init__(self, producers: WorkerProcesses, workers: WorkerProcesses) -> None:
        super().__init__(lambda: 0)
        self._producer = producers.processes[0]
        self._worker = workers.processes[0]
        self._handled = 0
        self.late_s = 0.0
        self.ages: list[float] = []

    def slice(self, seconds: float) -> tuple[int, float]:
        start = time.perf_counter()
        sent = self._producer.ask("send", seconds=seconds, rate=RATE)
        self.late_s = max(self.late_s, sent["late_s"])
        while self._worker.ask("count")["count"] < sent["count"]:
            if time.perf_counter() > start + seconds + WAIT_S:
                raise RequestTimeout(f"not all records are handled after {WAIT_S:g} s")
            time.sleep(POLL_S)
        self.ages += self._worker.ask("ages")["ages"]
        return sent["count"], time.perf_counter() - start


def measure_latency(settings: ClusterSettings) -> list[Result]:
    with target(settings, NODES) as found, bare_nodes(found.directory, NODES) as port:
        topic = found.create("handler", PARTITIONS, NODES)
        where: dict[str, Any] = {"bootstrap": found.bootstrap, "topic": topic}
        with (
            WorkerProcesses(1, "pace", **where) as producers,
            WorkerProcesses(1, "handle", **where) as workers,
        ):
            ours = Handling(producers, workers)
            bare = BareLatency(port, bytes(encode(make_values(1), timestamps=NOW_MS)))
            for side in (ours, bare):
                side.slice(found.settings.slice_s)
            ours.ages.clear()
            bare.samples.clear()
            try:
                timings = interleave(found.settings, {"raftq": ours, "bare": bare})
            finally:
                bare.close()
    line = Line(
        figure="latency",
        title=f"3 nodes, acks=all, {RATE:,} records/s: from send() to the handler",
        notes=[
            f"the producer fell behind its pace by {ours.late_s * 1000:.1f} ms at most",
            "a record is replicated, then its lease is, then it travels: the bare one only the "
            "first of these",
        ],
    )
    bars = {0.5: Bar("value", P50_MS, at_most=True), 0.99: Bar("value", P99_MS, at_most=True)}
    samples = {"raftq": ours.ages, "bare": bare.samples}
    return latency_results(settings.base, line, samples, bars, timings["raftq"].seconds)


def measure_delays(settings: ClusterSettings) -> list[Result]:
    base = settings.base
    pending, rate = base.size(PENDING, PENDING_QUICK), base.size(FIRING, FIRING_QUICK)
    firing = int(rate * base.seconds * 1.1)
    with target(settings, NODES) as found, WorkerProcesses(
        1, "delay", bootstrap=found.bootstrap, topic=(topic := found.create(
            "delays", PARTITIONS, NODES))
    ) as workers, Reader(found, topic) as reader:  # fmt: skip
        lead_s = (LEAD_QUICK_S if base.quick else LEAD_S) + firing / SLOWEST_FILL
        process = workers.processes[0]
        filled = process.ask(
            "fill", count=pending, first_ms=_wall_ms() + FAR_MS, rate=rate, value_bytes=DELAY_BYTES
        )
        tell(f"{pending:,} records are scheduled in {filled['seconds']:.1f} s")
        first = _wall_ms() + lead_s * 1000
        due = process.ask("fill", count=firing, first_ms=first, rate=rate, value_bytes=DELAY_BYTES)
        spare_ms = first - _wall_ms()
        tell(
            f"{firing:,} more in {due['seconds']:.1f} s, {spare_ms:.0f} ms before the first is due"
        )
        late = reader.read(firing, lead_s + firing / rate + WAIT_S)
        plain = _undelayed(found, reader, rate)
    return _delay_results(settings, pending, rate, (late, plain), reader, spare_ms)


class Reader:
    """Reads all partitions from their ends on, and compares each record's stamp with the clock."""

    def __init__(self, found: Target, topic: str) -> None:
        self._consumer = Consumer(found.bootstrap, fetch_wait_ms=100)
        self._consumer.assign([(topic, number) for number in range(PARTITIONS)])
        for number in range(PARTITIONS):
            self._consumer.seek(topic, number, to="latest")
        self.seconds = 0.0
        self.fired: list[float] = []
        """When records were written to the log, in ms after they were due."""

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def read(self, count: int, seconds: float) -> list[float]:
        """The ages of this many records, in ms."""
        late: list[float] = []
        first = 0.0
        ends = time.perf_counter() + seconds
        while len(late) < count:
            if time.perf_counter() > ends:
                raise RequestTimeout(f"{len(late)} of {count} records have come in {seconds:.0f} s")
            records = self._consumer.poll(5_000, 0.2)
            now = _wall_ms()
            if records and not first:
                first = time.perf_counter()
            for record in records:
                due = STAMP.unpack_from(record.value)[0]
                late.append(now - due)
                self.fired.append(record.timestamp - due)
        self.seconds = time.perf_counter() - first
        return late


def _undelayed(found: Target, reader: Reader, rate: int) -> list[float]:
    """The time of the same number of records that are due at once: the baseline."""
    seconds, fired = reader.seconds, list(reader.fired)
    with WorkerProcesses(
        1, "pace", bootstrap=found.bootstrap, topic=found.topics[-1], value_bytes=DELAY_BYTES
    ) as workers:
        process = workers.processes[0]
        process.order("send", seconds=found.settings.seconds, rate=rate, wall=True)
        ages = reader.read(int(found.settings.seconds * rate * 0.99), WAIT_S * 2)
        process.answer()
    reader.seconds, reader.fired = seconds, fired
    return ages


def _delay_results(
    settings: ClusterSettings,
    pending: int,
    rate: int,
    both: tuple[Sequence[float], Sequence[float]],
    reader: Reader,
    spare_ms: float,
) -> list[Result]:
    late, plain = both
    early = sum(age < 0 for age in late)
    about = f"3 nodes, {pending:,} pending and {rate:,} more due per second"
    points = ", ".join(f"p{share * 100:g} {quantile(late, share):.1f}" for share in (0.5, 0.9))
    shared = [
        f"{len(late):,} records of {DELAY_BYTES} B, read in {reader.seconds:.1f} s; late by ms: "
        f"{points}, worst {max(late):.1f}",
        f"in the log after it is due by ms: p50 {quantile(reader.fired, 0.5):.1f}, "
        f"p99 {quantile(reader.fired, 0.99):.1f}",
    ]
    if spare_ms < 0:
        shared.append("some were due before the last was scheduled: the figure does not count")
    detail = {"late_ms_p50": quantile(late, 0.5), "late_ms_max": max(late), "early": early}
    lateness = Result(
        figure="delays",
        title=f"{about}: late at a reader, p99",
        unit="ms",
        value=quantile(late, 0.99),
        measured_s=reader.seconds,
        fsync="interval",
        baseline_name="records without a delay, sent at the same pace to the same reader",
        baseline=quantile(plain, 0.99),
        bar=Bar("value", LATE_MS_MAX, at_most=True),
        value_bytes=DELAY_BYTES,
        notes=shared,
        detail=detail,
    )
    earliness = Result(
        figure="delays",
        title="the same: records that came early",
        unit="records",
        value=float(early),
        measured_s=reader.seconds,
        fsync="interval",
        bar=Bar("value", 0, at_most=True),
        value_bytes=DELAY_BYTES,
        detail=detail,
    )
    return [lateness.judge(settings.base), earliness.judge(settings.base)]


def _wall_ms() -> float:
    return time.time() * 1000
