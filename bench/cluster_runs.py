"""Shell: what the cluster figures share: the cluster under test, its topics, and its processes."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.harness.local_files import Setting
from raftq.client.common.errors import InvalidArgument
from raftq.client.options import ProducerOptions
from raftq.client.sync.admin import Admin
from raftq.client.wire.batch import encode
from raftq_bench.report import Bar, Result
from raftq_bench.runner import VALUE_BYTES, Settings, Timing, make_values

TICKS_S = os.sysconf("SC_CLK_TCK")
RETENTION_BYTES = 1024**3
RECORDS_PER_BATCH = ProducerOptions().batch_bytes // VALUE_BYTES
NOW_MS = 1_700_000_000_000


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What was asked for on the command line."""

    base: Settings
    bootstrap: str | None = None
    """A running cluster to measure; without it each figure starts its own."""
    rounds: int = 30
    """How many leaders are killed."""
    data_bytes: int = 0
    """How much is read or written, for figures that take a size."""


@dataclass(slots=True)
class Target:
    """The cluster of one figure."""

    bootstrap: str
    nodes: int
    local: LocalCluster | None
    settings: Settings
    directory: Path
    topics: list[str] = field(default_factory=list)

    def create(
        self, name: str, partitions: int, replication: int, **config: int | str | bool | None
    ) -> str:
        """Creates a topic with a unique name."""
        topic = f"bench-{name}-{os.getpid()}-{len(self.topics)}"
        config = {"retention_bytes": RETENTION_BYTES, **config}
        with Admin(self.bootstrap) as admin:
            admin.create_topic(topic, partitions, replication, config)
        self.topics.append(topic)
        return topic

    def delete(self, topic: str) -> None:
        with Admin(self.bootstrap) as admin:
            admin.delete_topic(topic)
        self.topics.remove(topic)

    def processes(self) -> LocalCluster:
        if self.local is None:
            raise InvalidArgument("this figure stops nodes: it runs only on a cluster of its own")
        return self.local

    def cpu_s(self) -> float | None:
        """Processor time of all nodes so far."""
        if self.local is None:
            return None
        pids = [self.local.pid(node_id) for node_id in self.local.ids]
        return sum(cpu_seconds(pid) for pid in pids if pid is not None)


@contextmanager
def target(
    settings: ClusterSettings, nodes: int, node_settings: Mapping[str, Setting] | None = None
) -> Iterator[Target]:
    """A cluster of `nodes` with these settings, or the given one, where all created topics are
    deleted at the end."""
    with settings.base.scratch() as path:
        if settings.bootstrap is not None:
            with Admin(settings.bootstrap) as admin:
                count = len(admin.nodes())
            if count < nodes:
                raise InvalidArgument(f"this figure needs {nodes} nodes, the cluster has {count}")
            found = Target(settings.bootstrap, nodes, None, settings.base, path)
            try:
                yield found
            finally:
                for topic in list(found.topics):
                    found.delete(topic)
            return
        with LocalCluster(path / "cluster", nodes, settings=node_settings) as local:
            yield Target(local.bootstrap, nodes, local, settings.base, path)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, with its threads."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S


def bare_batch() -> bytes:
    """A batch as a producer makes it."""
    return bytes(encode(make_values(RECORDS_PER_BATCH), timestamps=NOW_MS))


def quantile(samples: Sequence[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@dataclass(slots=True, kw_only=True)
class Line:
    """The text of a figure besides its numbers."""

    figure: str
    title: str
    bar: Bar | None = None
    notes: list[str] = field(default_factory=list)


def rate_result(
    settings: Settings, line: Line, timings: Mapping[str, Timing], nodes_cpu_s: float | None
) -> Result:
    """Records/s of the side "raftq" against the side "bare"."""
    ours, bare = timings["raftq"], timings["bare"]
    notes = list(line.notes)
    if nodes_cpu_s is not None:
        notes.append(
            f"processor time per record: {ours.cpu_us:.2f} us here, "
            f"{nodes_cpu_s / ours.count * 1e6:.2f} us in the nodes"
        )
    return Result(
        figure=line.figure,
        title=line.title,
        unit="records/s",
        value=ours.rate,
        measured_s=ours.seconds,
        fsync="interval",
        baseline_name="a bare socket and file loop of the same bytes, in turns with it",
        baseline=bare.rate,
        bar=line.bar,
        notes=notes,
        detail={name: timing.facts() for name, timing in timings.items()},
    ).judge(settings)


def latency_results(
    settings: Settings,
    line: Line,
    samples: Mapping[str, Sequence[float]],
    bars: Mapping[float, Bar | None],
    measured_s: float | None = None,
) -> list[Result]:
    """One line per quantile in `bars`, in ms, of the side "raftq" against the side "bare".

    Without `measured_s` the samples are one after the other, and their sum is the time measured.
    """
    ours, bare = samples["raftq"], samples["bare"]
    detail: dict[str, Any] = {
        name: {f"p{share * 100:g}_ms": quantile(some, share) * 1000 for share in (0.5, 0.9, 0.99)}
        | {"count": len(some), "max_ms": max(some) * 1000}
        for name, some in samples.items()
    }
    return [
        Result(
            figure=line.figure,
            title=f"{line.title}: p{share * 100:g}",
            unit="ms",
            value=quantile(ours, share) * 1000,
            measured_s=sum(ours) if measured_s is None else measured_s,
            fsync="interval",
            baseline_name="the same bytes through a bare socket and file, one at a time",
            baseline=quantile(bare, share) * 1000,
            bar=bar,
            notes=line.notes,
            detail=detail,
        ).judge(settings)
        for share, bar in bars.items()
    ]


def tell(text: str) -> None:
    """Shows progress on stderr; results go to stdout."""
    print(text, file=sys.stderr, flush=True)
