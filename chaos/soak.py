"""Pure: a long run with random faults, made from a seed.

    quiet ── fault ── quiet ── fault and fault ── quiet ── ...

Most faults are single ones, which leave a majority healthy. Some come in pairs or hit all nodes. At
least a quarter of the time is quiet, so that the damage of a fault shows. The same seed makes the
same plan; the node is chosen when a fault is injected.
"""

from collections.abc import Callable
from random import Random

from raftq.chaos.faults.changes import (
    AlterTopics,
    GrowTopics,
    MoveAway,
    MoveToAndFro,
    OtherTopics,
)
from raftq.chaos.faults.disk import BadDisk, PowerCut
from raftq.chaos.faults.files import BitFlip
from raftq.chaos.faults.network import Bridge, Isolate, MajoritiesRing, OneWay, Split, Swizzle
from raftq.chaos.faults.processes import Kill, KillMany, Pause, RollingRestart, Wipe
from raftq.chaos.faults.streams import Bandwidth, Latency, LimitData, Refuse, ResetStorm
from raftq.chaos.scenario import Scenario, Step
from raftq.chaos.scene import Workload
from raftq.chaos.verdict import Rules
from raftq.chaos.workloads.appends import Appends
from raftq.chaos.workloads.queues import QueueWorkload
from raftq.chaos.workloads.streams import StreamWorkload
from raftq.chaos.world import Fault
from raftq.client.common.errors import Detail

Make = Callable[[], Fault]

SINGLE: tuple[Make, ...] = (
    lambda: Kill("leader"),
    lambda: Kill("follower"),
    lambda: Kill("controller"),
    lambda: Kill("any"),
    lambda: Pause("leader"),
    lambda: Pause("follower"),
    lambda: Pause("controller"),
    lambda: PowerCut("leader"),
    lambda: PowerCut("any", torn=True),
    lambda: Wipe("follower"),
    lambda: BadDisk("any", trouble="slow syncs", seconds=0.2),
    lambda: BadDisk("leader", trouble="failing syncs"),
    lambda: BadDisk("leader", trouble="full"),
    lambda: BitFlip("follower", kind="old segment"),
    RollingRestart,
    lambda: Isolate("leader"),
    lambda: Isolate("leader", clients=True),
    lambda: Isolate("controller"),
    lambda: OneWay("leader"),
    lambda: OneWay("any", mute=True),
    lambda: Split("leader"),
    lambda: Bridge("any"),
    lambda: Bandwidth("follower"),
    lambda: ResetStorm("clients"),
    lambda: Refuse("leader"),
    lambda: Refuse("controller"),
    lambda: MoveAway(count=4),
    lambda: MoveToAndFro(rounds=3),
    lambda: MoveToAndFro(rounds=2, slow_s=0.2),
    AlterTopics,
    GrowTopics,
    OtherTopics,
)
"""A majority stays healthy, and clients get answers."""
GRAVE: tuple[Make, ...] = (
    KillMany,
    lambda: PowerCut(None),
    lambda: PowerCut(None, torn=True),
    Swizzle,
    MajoritiesRing,
    lambda: ResetStorm("everywhere"),
    lambda: LimitData("everywhere"),
    lambda: Latency("everywhere", latency_ms=50, jitter_ms=30),
)
"""While these last only safety is promised."""
PAIRS: tuple[tuple[Make, Make], ...] = (
    (lambda: Pause("leader"), lambda: Kill("any")),
    (lambda: Isolate("leader"), lambda: PowerCut("leader")),
    (lambda: Latency("peers", latency_ms=30, jitter_ms=20), lambda: Kill("controller")),
    (lambda: OneWay("controller"), lambda: Pause("follower")),
    (lambda: BadDisk("leader", trouble="slow syncs", seconds=0.2), lambda: Kill("follower")),
    (lambda: MoveToAndFro(rounds=2, slow_s=0.2), lambda: Kill("leader")),
    (lambda: MoveAway(count=4), lambda: Isolate("leader")),
    (OtherTopics, lambda: Kill("controller")),
)
GRAVE_SHARE, PAIR_SHARE = 0.12, 0.15
FIRST_S = 5.0
SEGMENTS: dict[str, Detail] = {"segment_bytes": 16 * 1024}
SYNCED: dict[str, Detail] = {"fsync": "always"}
"""All nodes may lose power at once, which loses records that are acknowledged before they are
synced."""
QUIET_S = 15.0
REST_S = 5.0
PROGRESS = Rules(progress_min=20.0, recovery_s=5.0)


def soak_scenario(minutes: float, nodes: int, seed: int, abilities: frozenset[str]) -> Scenario:
    """Makes a run of about this many minutes, with the faults that the world can do."""
    return Scenario(
        name=f"soak-{nodes}-nodes",
        rows=(),
        promise=f"{minutes:g} minutes of random faults violate nothing, and a healthy majority "
        "always makes progress.",
        workloads=_workloads,
        plan=tuple(_plan(minutes * 60, Random(f"soak {seed}"), abilities)),
        quiet_s=QUIET_S,
        nodes=nodes,
        rules=PROGRESS,
        overtime_s=60.0,
        finish_s=300.0,
        rest_s=REST_S,
        proxied="toxiproxy" in abilities,
    )


def _workloads() -> list[Workload]:
    return [
        Appends(per_second=15.0, config=SYNCED | SEGMENTS),
        StreamWorkload(per_second=10.0, config=SYNCED),
        QueueWorkload(per_second=8.0, config=SYNCED),
    ]


def _plan(seconds: float, rng: Random, abilities: frozenset[str]) -> list[Step]:
    plan: list[Step] = []
    at = FIRST_S
    while True:
        drawn = rng.random()
        lasts = rng.uniform(2.0, 10.0)
        if drawn < GRAVE_SHARE:
            steps = [Step(at, _possible(GRAVE, rng, abilities), min(lasts, 5.0), majority=False)]
        elif drawn < GRAVE_SHARE + PAIR_SHARE:
            first, second = (one() for one in rng.choice(PAIRS))
            steps = [
                Step(at, first, lasts + 2.0, majority=False),
                Step(at + rng.uniform(0.0, 2.0), second, lasts, majority=False),
            ]
            steps = [step for step in steps if step.fault.needs <= abilities]
        else:
            steps = [Step(at, _possible(SINGLE, rng, abilities), lasts)]
        ends = max((step.ends_at for step in steps), default=at)
        if ends + QUIET_S > seconds:
            return plan
        plan += steps
        at = ends + rng.uniform(3.0, 8.0)


def _possible(faults: tuple[Make, ...], rng: Random, abilities: frozenset[str]) -> Fault:
    while True:
        fault = rng.choice(faults)()
        if fault.needs <= abilities:
            return fault
