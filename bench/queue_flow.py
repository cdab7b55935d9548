"""Shell: how many records four workers lease and ack, how much many leases slow that, and the
shares of the lanes.

Records are produced before each slice, untimed; nothing is produced during a slice.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raftq.client.common.names import LANE_NAMES
from raftq.client.sync.producer import Producer
from raftq.node.queue.core.lanes import STARVATION_S, WEIGHTS
from raftq_bench.bare_socket import bare_nodes
from raftq_bench.cluster_runs import ClusterSettings, Target, target, tell
from raftq_bench.report import Bar, Result
from raftq_bench.runner import (
    BATCH_RECORDS,
    Timing,
    endless,
    interleave,
    make_batches,
    make_values,
)
from raftq_bench.workers import WorkerProcesses, WorkersSide, lane_sums

NODES = 3
WORKERS = 4
PARTITIONS = 6
LEASE_RECORDS = 500
STREAMS = 2
"""Portions in progress in each worker process: one is acked while the next is leased."""
AHEAD, AHEAD_QUICK = 200_000, 40_000
"""Records that are there when a slice begins: more than it takes."""
HELD, HELD_QUICK = 500_000, 5_000
HOLD_S = 3_600.0
IN_FLIGHT_MAX = 1_000_000
RATE_MIN, KEPT_MIN = 60_000, 0.9
SHARE_POINTS_MAX = 2.0
LANES_S = 35
WORK = {"records": LEASE_RECORDS, "streams": STREAMS}


class Supply:
    """Keeps this many records per lane waiting in a topic."""

    def __init__(self, producer: Producer, topic: str, lanes: Sequence[int] = (2,)) -> None:
        self._producer = producer
        self._topic = topic
        self._lanes = lanes
        self._following = endless(make_batches(make_values()))
        self._turn = 0

    def add(self, count: int) -> None:
        """Adds whole batches, the same number to each lane of each partition."""
        for _ in range(-(-count // (BATCH_RECORDS * len(self._lanes)))):
            partition = self._turn % PARTITIONS
            self._turn += 1
            for lane in self._lanes:
                values = self._following()
                self._producer.send_many(self._topic, values, priority=lane, partition=partition)
        self._producer.flush()


def _side(workers: WorkerProcesses, supply: Supply) -> WorkersSide:
    """Four workers that find the same number of records before each slice."""

    def rest() -> None:
        supply.add(side.last_count())
        os.sync()

    side = WorkersSide(workers, "drain", WORK, rest)
    return side


def measure_rate(settings: ClusterSettings) -> list[Result]:
    ahead = settings.base.size(AHEAD, AHEAD_QUICK)
    with (
        target(settings, NODES) as found,
        bare_nodes(found.directory, NODES) as port,
        Producer(found.bootstrap) as producer,
    ):
        topic = found.create("lease", PARTITIONS, NODES, in_flight_max=IN_FLIGHT_MAX)
        supply = Supply(producer, topic)
        supply.add(ahead)
        with WorkerProcesses(WORKERS, "drain", bootstrap=found.bootstrap, topic=topic) as workers:
            ours = _side(workers, supply)
            bare = WorkersSide(workers, "bare", {"records": LEASE_RECORDS, "port": port})
            before = found.cpu_s()
            timings = interleave(found.settings, {"raftq": ours, "bare": bare})
            after = found.cpu_s()
    notes = [
        f"{WORKERS} worker processes on {PARTITIONS} partitions, each with {STREAMS} portions of "
        f"{LEASE_RECORDS} under way",
        f"processor time per record: {ours.cpu_us():.2f} us in the workers"
        + _nodes_cpu(before, after, timings["raftq"], " in the nodes, producing included"),
    ]
    return [
        Result(
            figure="lease-ack",
            title=f"3 nodes, replication 3, {WORKERS} workers: lease + ack",
            unit="records/s",
            value=timings["raftq"].rate,
            measured_s=timings["raftq"].seconds,
            fsync="interval",
            baseline_name="bare sockets and files: two notes written to three files and the "
            "records read, by as many processes, in turns with it",
            baseline=timings["bare"].rate,
            bar=Bar("value", RATE_MIN),
            notes=notes,
            detail={name: timing.facts() for name, timing in timings.items()},
        ).judge(settings.base)
    ]


def _nodes_cpu(before: float | None, after: float | None, timing: Timing, where: str) -> str:
    if before is None or after is None:
        return ""
    return f", {(after - before) / timing.count * 1e6:.2f} us{where}"


def measure_in_flight(settings: ClusterSettings) -> list[Result]:
    """Two topics in turns: in one of them half a million records are leased and not settled."""
    ahead = settings.base.size(AHEAD, AHEAD_QUICK)
    held = settings.base.size(HELD, HELD_QUICK)
    with target(settings, NODES) as found, Producer(found.bootstrap) as producer:
        sides: dict[str, WorkersSide] = {}
        groups: list[WorkerProcesses] = []
        try:
            for name, count in (("held", held), ("free", 0)):
                topic = found.create(name, PARTITIONS, NODES, in_flight_max=IN_FLIGHT_MAX)
                supply = Supply(producer, topic)
                supply.add(count + ahead)
                if count:
                    groups.append(_hold(found, topic, count))
                groups.append(
                    WorkerProcesses(WORKERS, "drain", bootstrap=found.bootstrap, topic=topic)
                )
                sides[name] = _side(groups[-1], supply)
            timings = interleave(found.settings, dict(sides))
        finally:
            for workers in groups:
                workers.end()
    return [
        Result(
            figure="in-flight",
            title=f"the same with {held:,} records in flight",
            unit="records/s",
            value=timings["held"].rate,
            measured_s=timings["held"].seconds,
            fsync="interval",
            baseline_name="the same with none, in turns with it",
            baseline=timings["free"].rate,
            bar=Bar("ratio", KEPT_MIN),
            notes=[f"held by one more process, in leases of {LEASE_RECORDS} and less"],
            detail={name: timing.facts() for name, timing in timings.items()},
        ).judge(settings.base)
    ]


def _hold(found: Target, topic: str, count: int) -> WorkerProcesses:
    workers = WorkerProcesses(
        1, "drain", bootstrap=found.bootstrap, topic=topic, visibility_timeout=HOLD_S
    )
    got = workers.processes[0].ask("hold", count=count, records=LEASE_RECORDS)["count"]
    tell(f"{got:,} records are held")
    assert got >= count, "so many could not be leased"
    return workers


def measure_lanes(settings: ClusterSettings) -> list[Result]:
    """All lanes have records all the time."""
    ahead = settings.base.size(AHEAD, AHEAD_QUICK)
    every = range(len(LANE_NAMES))
    with target(settings, NODES) as found, Producer(found.bootstrap) as producer:
        topic = found.create("lanes", PARTITIONS, NODES, in_flight_max=IN_FLIGHT_MAX)
        supply = Supply(producer, topic, every)
        # The first lane gives half of what is taken, so each needs that much.
        supply.add(ahead * 3)

        with WorkerProcesses(WORKERS, "drain", bootstrap=found.bootstrap, topic=topic) as workers:

            def rest() -> None:
                taken = lane_sums(side.answers[-1:])
                supply.add(max(taken) * len(every))

            side = WorkersSide(workers, "drain", WORK, rest)
            # As long as a lane may wait, and more.
            seconds = settings.base.size(LANES_S, 0) or found.settings.seconds
            longer = replace(found.settings, seconds=max(seconds, found.settings.seconds))
            timing = interleave(longer, {"raftq": side})["raftq"]
    return _lane_results(settings, timing, side.answers)


def _lane_results(
    settings: ClusterSettings, timing: Timing, answers: Sequence[Sequence[dict[str, Any]]]
) -> list[Result]:
    counts = lane_sums(answers)
    points = [100 * count / sum(counts) for count in counts]
    off = max(abs(found - weight) for found, weight in zip(points, WEIGHTS, strict=True))
    shares = ", ".join(
        f"{name} {share:.2f}" for name, share in zip(LANE_NAMES, points, strict=True)
    )
    gaps = [max(gap) for gap in zip(*(one["gaps_s"] for some in answers for one in some),
                                    strict=True)]  # fmt: skip
    detail = {"counts": counts, "shares": points, "gaps_s": gaps}
    return [
        Result(
            figure="lanes",
            title="five busy lanes: worst distance from 50/25/15/7/3",
            unit="points",
            value=off,
            measured_s=timing.seconds,
            fsync="interval",
            bar=Bar("value", SHARE_POINTS_MAX, at_most=True),
            notes=[f"shares in %: {shares}", f"{timing.count:,} records, {timing.rate:,.0f}/s"],
            detail=detail,
        ).judge(settings.base),
        Result(
            figure="lanes",
            title="the same: longest time that one worker saw nothing of a lane",
            unit="s",
            value=max(gaps),
            measured_s=timing.seconds,
            fsync="interval",
            bar=Bar("value", STARVATION_S, at_most=True),
            detail=detail,
        ).judge(settings.base),
    ]
