"""Shell: what members of a group notice when one joins, one dies, or two hundred join at once.

A producer sends a record to each partition in turn, all the time. So a partition that is not read
for a while shows as a gap between the arrival times of its records.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from raftq.client.common.errors import RequestTimeout
from raftq_bench.cluster_runs import ClusterSettings, Target, quantile, target, tell
from raftq_bench.report import Bar, Result
from raftq_bench.workers import WorkerProcess, WorkerProcesses, clock

NODES = 3
SETTLE_S_LIMIT = 60.0
POLL_S = 0.02
AFTER_S = 2.0
"""How long to watch after a group has settled."""
PAUSE_S = 0.1
"""The pause between two records of one partition."""

JOIN_PARTITIONS, JOIN_MEMBERS = 64, 8
MOVED_S_MAX, UNTOUCHED_MAX = 1.0, 1.1

KILL_PARTITIONS, KILL_MEMBERS = 12, 3
SESSION_MS, HEARTBEAT_MS = 6_000, 1_000
KILL_S_MAX = SESSION_MS / 1000 + 1.0

CROWD, CROWD_QUICK = 200, 12
CROWD_PARTITIONS, CROWD_PARTITIONS_QUICK = 256, 16
CROWD_HANDS = 2
CROWD_JOIN_S, CROWD_S_MAX = 5.0, 10.0

Seen = dict[int, list[tuple[float, int]]]  # by partition: when records came, and to which member


class Group:
    """Members in several processes, and the load."""

    def __init__(self, found: Target, partitions: int, **settings: Any) -> None:
        self.partitions = partitions
        self.topic = found.create("group", partitions, NODES)
        self._settings = {"bootstrap": found.bootstrap, "topic": self.topic,
                      "group": f"bench-{self.topic}", **settings}  # fmt: skip
        self._stack = ExitStack()
        self.processes: list[WorkerProcess] = []

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def load(self) -> None:
        """Sends a record to each partition every PAUSE_S, from now on."""
        (process,) = self._stack.enter_context(
            WorkerProcesses(1, "pace", **self._settings)
        ).processes
        process.ask("begin_rounds", partitions=self.partitions, pause_s=PAUSE_S)

    def add_process(self) -> WorkerProcess:
        """Starts a process that can have members."""
        (process,) = self._stack.enter_context(
            WorkerProcesses(1, "members", **self._settings)
        ).processes
        self.processes.append(process)
        return process

    def owned(self) -> dict[int, list[int]]:
        return {
            int(number): partitions
            for process in self.processes
            for number, partitions in process.ask("owned")["owned"].items()
        }

    def settle(self, members: int) -> float:
        """Waits until this many members have fair shares of all partitions. Returns when that
        was seen."""
        ends = time.perf_counter() + SETTLE_S_LIMIT
        while True:
            owned = self.owned()
            if len(owned) == members and is_settled(owned, self.partitions):
                return clock()
            if time.perf_counter() > ends:
                sizes = {number: len(some) for number, some in owned.items()}
                raise RequestTimeout(f"{members} members have not settled: {sizes}")
            time.sleep(POLL_S)

    def seen(self) -> Seen:
        """Everything that came since the last call, in order."""
        return together(
            {int(number): rows for number, rows in process.ask("seen")["seen"].items()}
            for process in self.processes
        )


def is_settled(owned: Mapping[int, Sequence[int]], partitions: int) -> bool:
    """Whether each partition has one owner, and no member has two more than another."""
    given = [partition for some in owned.values() for partition in some]
    sizes = [len(some) for some in owned.values()]
    return sorted(given) == list(range(partitions)) and max(sizes) - min(sizes) <= 1


def together(parts: Iterable[Mapping[int, Sequence[Sequence[Any]]]]) -> Seen:
    found: Seen = {}
    for part in parts:
        for partition, rows in part.items():
            found.setdefault(partition, []).extend((at, number) for at, number in rows)
    for rows in found.values():
        rows.sort()
    return found


def gaps(seen: Seen, partitions: Iterable[int]) -> list[float]:
    """Seconds between consecutive records of the same partition."""
    return [
        after[0] - before[0]
        for partition in partitions
        for before, after in pairwise(seen.get(partition, []))
    ]


def pauses(seen: Seen) -> dict[int, float]:
    """For each partition that changed its owner: the longest time from the last record of one
    member to the first of the next."""
    found: dict[int, float] = {}
    for partition, rows in seen.items():
        for before, after in pairwise(rows):
            if before[1] != after[1]:
                found[partition] = max(found.get(partition, 0.0), after[0] - before[0])
    return found


def measure_join(settings: ClusterSettings) -> list[Result]:
    base = settings.base
    moved: list[float] = []
    normal: list[float] = []
    untouched: list[float] = []
    settled: list[float] = []
    seconds = 0.0
    with target(settings, NODES) as found, Group(found, JOIN_PARTITIONS) as group:
        group.add_process().ask("join", first=0, count=JOIN_MEMBERS)
        newcomer = group.add_process()
        group.settle(JOIN_MEMBERS)
        group.load()
        time.sleep(AFTER_S)
        rounds = base.size(settings.rounds, 1)
        for number in range(rounds):
            group.seen()
            time.sleep(base.seconds / rounds)
            normal += gaps(group.seen(), range(JOIN_PARTITIONS))
            began = newcomer.ask("join", first=JOIN_MEMBERS, count=1)["began"]
            settled.append(group.settle(JOIN_MEMBERS + 1) - began)
            time.sleep(AFTER_S)
            seen = group.seen()
            seconds += clock() - began
            changed = pauses(seen)
            moved += changed.values()
            untouched += gaps(seen, [one for one in seen if one not in changed])
            tell(
                f"round {number + 1}: {len(changed)} partitions moved, settled after "
                f"{settled[-1]:.2f} s, longest pause {max(changed.values(), default=0):.3f} s"
            )
            newcomer.ask("leave", number=JOIN_MEMBERS)
            group.settle(JOIN_MEMBERS)
    return _join_results(settings, (moved, normal, untouched, settled), seconds)


def _join_results(
    settings: ClusterSettings, times: tuple[list[float], ...], seconds: float
) -> list[Result]:
    moved, normal, untouched, settled = times
    about = f"1 member joins {JOIN_MEMBERS} on {JOIN_PARTITIONS} partitions under load"
    detail = {
        "moved": len(moved), "settled_s": settled,
        "normal_worst_ms": max(normal) * 1000, "untouched_worst_ms": max(untouched) * 1000,
    }  # fmt: skip
    measured_s = seconds + settings.base.seconds
    pause = Result(
        figure="join",
        title=f"{about}: longest pause of a moved partition",
        unit="s",
        value=max(moved, default=float("inf")),
        measured_s=measured_s,
        fsync="interval",
        bar=Bar("value", MOVED_S_MAX, at_most=True),
        notes=[f"{len(moved)} moves in {len(settled)} rounds; settled after "
               f"{max(settled):.2f} s at most"],
        detail=detail,
    )  # fmt: skip
    gap = Result(
        figure="join",
        title="the same: gap between records of an untouched partition, p99",
        unit="ms",
        value=quantile(untouched, 0.99) * 1000,
        measured_s=measured_s,
        fsync="interval",
        baseline_name="the same before anybody joined",
        baseline=quantile(normal, 0.99) * 1000,
        bar=Bar("ratio", UNTOUCHED_MAX, at_most=True),
        notes=[f"worst {max(untouched) * 1000:.1f} ms of {len(untouched):,}, before "
               f"{max(normal) * 1000:.1f} ms of {len(normal):,}; a record is sent every "
               f"{PAUSE_S * 1000:.0f} ms"],
        detail=detail,
    )  # fmt: skip
    return [pause.judge(settings.base), gap.judge(settings.base)]


def measure_kill(settings: ClusterSettings) -> list[Result]:
    times: list[float] = []
    start = time.perf_counter()
    with target(settings, NODES) as found, Group(
        found, KILL_PARTITIONS, session_ms=SESSION_MS, heartbeat_ms=HEARTBEAT_MS
    ) as group:  # fmt: skip
        group.add_process().ask("join", first=0, count=KILL_MEMBERS - 1)
        group.load()
        for number in range(settings.base.size(settings.rounds, 1)):
            member = KILL_MEMBERS + number
            victim = group.add_process()
            victim.ask("join", first=member, count=1)
            group.settle(KILL_MEMBERS)
            time.sleep(AFTER_S)
            lost = group.owned()[member]
            group.seen()
            group.processes.remove(victim)
            victim.kill()
            killed_at = clock()
            times.append(_taken_over(group, lost, killed_at))
            tell(f"round {number + 1}: {len(lost)} partitions taken over in {times[-1]:.2f} s")
            group.settle(KILL_MEMBERS - 1)
    worst = max(times)
    return [
        Result(
            figure="kill",
            title=f"a member is killed -9, session {SESSION_MS / 1000:g} s: until others read all "
            "of its partitions, worst",
            unit="s",
            value=worst,
            measured_s=time.perf_counter() - start,
            fsync="interval",
            bar=Bar("value", KILL_S_MAX, at_most=True),
            notes=[f"{len(times)} kills, median {quantile(times, 0.5):.2f} s; counted from the "
                   f"kill, the last heartbeat was up to {HEARTBEAT_MS / 1000:g} s before"],
            detail={"times_s": times},
        ).judge(settings.base)
    ]  # fmt: skip


def _taken_over(group: Group, lost: Sequence[int], killed_at: float) -> float:
    """Seconds from the kill until the last of the partitions is read again."""
    first: dict[int, float] = {}
    ends = time.perf_counter() + SETTLE_S_LIMIT
    while len(first) < len(lost):
        if time.perf_counter() > ends:
            raise RequestTimeout(f"only {len(first)} of {len(lost)} partitions are read again")
        time.sleep(POLL_S)
        for partition, rows in group.seen().items():
            if partition in lost and partition not in first:
                first[partition] = rows[0][0]
    return max(first.values(), default=killed_at) - killed_at


def measure_crowd(settings: ClusterSettings) -> list[Result]:
    members = settings.base.size(CROWD, CROWD_QUICK)
    partitions = settings.base.size(CROWD_PARTITIONS, CROWD_PARTITIONS_QUICK)
    over_s = CROWD_JOIN_S if not settings.base.quick else 0.5
    with target(settings, NODES) as found, Group(found, partitions) as group:
        share = members // CROWD_HANDS
        for _ in range(CROWD_HANDS):
            group.add_process()
        for at, process in enumerate(group.processes):
            process.order("join", first=at * share, count=share, over_s=over_s)
        joins = [process.answer() for process in group.processes]
        began, ended = min(join["began"] for join in joins), max(join["ended"] for join in joins)
        seconds = group.settle(members) - began
    bar = Bar("value", CROWD_S_MAX, at_most=True)
    return [
        Result(
            figure="crowd",
            title=f"{members} members join on {partitions} partitions: from the first join until "
            "all have their shares",
            unit="s",
            value=seconds,
            measured_s=seconds,
            fsync="interval",
            bar=bar,
            passed=bar.met(seconds, None),
            notes=[f"the last join was {ended - began:.1f} s after the first; "
                   f"{CROWD_HANDS} processes have all members"],
        )
    ]  # fmt: skip
