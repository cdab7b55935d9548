"""Shell: a cluster with a thousand partitions: the cost of being idle, of starting, of changes."""

import asyncio
import time
from collections.abc import Sequence

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.client.common.errors import RaftqError, RequestTimeout
from raftq.client.net.connection import Connection
from raftq.client.net.transport import run
from raftq.client.options import addresses
from raftq.client.sync.admin import Admin
from raftq.client.wire.admin_messages import CreateTopic, DeleteTopic
from raftq.client.wire.messages import Metadata
from raftq_bench.cluster_runs import (
    ClusterSettings,
    Target,
    cpu_seconds,
    quantile,
    target,
    tell,
)
from raftq_bench.report import Bar, Result

NODES = 3
PARTITIONS, PARTITIONS_QUICK = 1_000, 30
TOPICS = 10
CPU_SHARE_MAX, START_S_MAX, CHANGE_MS_MAX = 0.10, 10.0, 200.0
SETTLE_S = 5.0
PAUSE_S = 0.05
ASK_MS = 3_000
START_S_LIMIT = 120.0
CHANGES, CHANGES_QUICK = 50, 5
CHANGE_S_LIMIT = 10.0


def measure(settings: ClusterSettings) -> list[Result]:
    count = settings.base.size(PARTITIONS, PARTITIONS_QUICK)
    with target(settings, NODES) as found:
        local = found.processes()
        started = time.perf_counter()
        for _ in range(TOPICS):
            found.create("many", count // TOPICS, NODES)
        tell(f"created {count} partitions in {time.perf_counter() - started:.1f} s")
        idle = _idle(found, local)
        changes = run(_changes(found, settings.base.size(CHANGES, CHANGES_QUICK)))
        starts = {
            "stopped in good order": _restart(found, local, kill=False),
            "killed with -9": _restart(found, local, kill=True),
        }
    return [
        _idle_result(settings, count, idle),
        *(_start_result(count, how, seconds) for how, seconds in starts.items()),
        _change_result(count, changes),
    ]


def _idle(found: Target, local: LocalCluster) -> tuple[dict[int, float], float]:
    """The share of a core that each node uses while there are no requests."""
    time.sleep(SETTLE_S if not found.settings.quick else 0.5)
    pids = {node_id: local.pid(node_id) for node_id in local.ids}
    before = {one: cpu_seconds(pid) for one, pid in pids.items() if pid is not None}
    start = time.perf_counter()
    time.sleep(found.settings.seconds)
    seconds = time.perf_counter() - start
    return {one: (cpu_seconds(pids[one] or 0) - spent) / seconds
            for one, spent in before.items()}, seconds  # fmt: skip


def _restart(found: Target, local: LocalCluster, kill: bool) -> float:
    """Seconds from starting all nodes until every partition has a leader that answers."""
    for node_id in local.ids:
        if kill:
            local.kill(node_id)
        else:
            local.stop(node_id, timeout=60.0)
    start = time.perf_counter()
    for node_id in local.ids:
        local.restart(node_id, timeout=None)
    why = "nobody answered"
    while time.perf_counter() - start < START_S_LIMIT:
        try:
            with Admin(found.bootstrap, timeout_ms=ASK_MS) as admin:
                why = _what_is_missing(admin, found.topics)
        except RaftqError as error:
            why = str(error)
        if not why:
            return time.perf_counter() - start  # now: the admin itself may have waited for long
        time.sleep(PAUSE_S)
    ended = "; ".join(f"node {one}: {how}" for one, how in local.died())
    raise RequestTimeout(f"the cluster is not up after {START_S_LIMIT:g} s: {why}. {ended}")


def _what_is_missing(admin: Admin, topics: Sequence[str]) -> str:
    """What a cluster that has just started still lacks; "" for nothing.

    What a node remembers from before does not count: leaders must answer."""
    status = admin.cluster_status()
    if status.controller is None or status.leaderless:
        return f"controller {status.controller}, {status.leaderless} without leader"
    for topic in topics:
        silent = [partition for partition in admin.describe_topic(topic).partitions
                  if partition.high_watermark is None]  # fmt: skip
        if silent:
            return f"{len(silent)} leaders of {topic} do not answer"
    return ""


async def _changes(found: Target, count: int) -> list[float]:
    """Seconds from the request for a topic until every node knows it."""
    links = [await Connection.open(*address) for address in addresses(found.bootstrap)]
    taken = []
    try:
        for number in range(count):
            topic = f"bench-change-{number}"
            asked = links[number % len(links)]
            start = time.perf_counter()
            made = asked.submit(CreateTopic(topic, 1, 1))
            ends = await asyncio.gather(*(_until_known(link, topic) for link in links))
            taken.append(max(ends) - start)
            await made
            await asked.request(DeleteTopic(topic))
    finally:
        for link in links:
            await link.close()
    return taken


async def _until_known(link: Connection, topic: str) -> float:
    async with asyncio.timeout(CHANGE_S_LIMIT):
        while True:
            reply = await link.request(Metadata((topic,)))
            if all(not topic.error and topic.partitions for topic in reply.message.topics):
                return time.perf_counter()


def _idle_result(
    settings: ClusterSettings, count: int, idle: tuple[dict[int, float], float]
) -> Result:
    shares, seconds = idle
    return Result(
        figure="partitions",
        title=f"3 nodes, {count:,} partitions with 3 replicas each, idle: busiest node",
        unit="cores",
        value=max(shares.values()),
        measured_s=seconds,
        fsync="interval",
        bar=Bar("value", CPU_SHARE_MAX, at_most=True),
        detail={f"node {one}": share for one, share in shares.items()},
    ).judge(settings.base)


def _start_result(count: int, how: str, seconds: float) -> Result:
    bar = Bar("value", START_S_MAX, at_most=True)
    return Result(
        figure="partitions",
        title=f"3 nodes, {count:,} partitions, {how}: started until all are led",
        unit="s",
        value=seconds,
        measured_s=seconds,
        fsync="interval",
        bar=bar,
        passed=bar.met(seconds, None),
    )


def _change_result(count: int, changes: Sequence[float]) -> Result:
    bar = Bar("value", CHANGE_MS_MAX, at_most=True)
    worst = max(changes) * 1000
    return Result(
        figure="partitions",
        title=f"3 nodes, {count:,} partitions: a new topic known everywhere, worst of "
        f"{len(changes)}",
        unit="ms",
        value=worst,
        measured_s=sum(changes),
        fsync="interval",
        bar=bar,
        passed=bar.met(worst, None),
        notes=[f"p50 {quantile(changes, 0.5) * 1000:.1f} ms, counted from the request"],
    )
