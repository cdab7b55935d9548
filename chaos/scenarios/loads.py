"""Data: workloads and promises that scenarios share.

With a healthy majority there is progress: at least 20 operations per second in every 10 s, and an
answer within 5 s after a single fault.
"""

from dataclasses import replace

from raftq.chaos.scene import Workload
from raftq.chaos.verdict import Rules
from raftq.chaos.workers import Habits
from raftq.chaos.workloads.appends import Appends
from raftq.chaos.workloads.changes import Changes
from raftq.chaos.workloads.delays import DelayWorkload
from raftq.chaos.workloads.growing import GrowingQueues
from raftq.chaos.workloads.queues import QueueWorkload
from raftq.chaos.workloads.streams import StreamWorkload

GAP_S = 5.0
"""The limit for the longest time without an acknowledged record after a single fault."""
PROGRESS = Rules(progress_min=20.0, recovery_s=GAP_S)
SLOW = Rules(progress_min=3.0, recovery_s=GAP_S)
"""If every message is late, there is less progress."""
SAFETY = Rules()
"""Without a majority only safety is promised: nothing is lost."""
PUNCTUAL = Rules(progress_min=20.0, recovery_s=GAP_S, max_deliveries=100, late_s=GAP_S)
"""For delayed records: the topic allows a hundred attempts."""
WRONG_CLOCKS = Rules(
    progress_min=20.0, recovery_s=GAP_S, max_deliveries=100, skew_s=4000.0, early_s=0.25
)
"""The times of nodes are wrong by an hour. Whether a record came too early is judged by clients."""
WRONG_CLOCKS_OF_QUEUES = replace(WRONG_CLOCKS, max_deliveries=3)
SYNCED = {"fsync": "always"}
SMALL_SEGMENTS = {"segment_bytes": 4096}
CARELESS = Habits(lease_s=2.0, hold=25, late=10)
"""Many workers forget their records, or settle them too late."""


def appends() -> list[Workload]:
    return [Appends()]


def few_appends() -> list[Workload]:
    """So few records that hardly any is in flight when a fault comes."""
    return [Appends(producers=1, per_second=6.0)]


def appends_in_small_segments() -> list[Workload]:
    return [Appends(config=SMALL_SEGMENTS)]


def durable_appends() -> list[Workload]:
    """Records are synced before they are acknowledged, so they survive a power cut of all nodes."""
    return [Appends(config=SYNCED)]


def durable_queues() -> list[Workload]:
    return [QueueWorkload(config=SYNCED)]


def appends_on_both_sides() -> list[Workload]:
    return [Appends(partitions=5, insiders=True, hasty=1, per_second=20.0)]


def pairs_on_both_sides() -> list[Workload]:
    return [Appends(copies=2, insiders=True, hasty=1, per_second=20.0)]


def appends_of_many_partitions() -> list[Workload]:
    return [Appends(partitions=20)]


def appends_with_tails() -> list[Workload]:
    """Some producers wait for leaders only, so a replaced leader has records that others lack.

    Nothing is promised for the second topic, as all nodes lose power; it keeps the syncs busy."""
    return [
        Appends("appends-always", hasty=2, config=SYNCED),
        Appends("appends-interval", producers=0, hasty=2, readers=0),
    ]


def growing_queues() -> list[Workload]:
    return [GrowingQueues()]


def streams() -> list[Workload]:
    return [StreamWorkload()]


def queues() -> list[Workload]:
    return [QueueWorkload()]


def delays() -> list[Workload]:
    return [DelayWorkload()]


def changes() -> list[Workload]:
    return [Changes()]


def everything() -> list[Workload]:
    """All workloads that have the same rules."""
    return [
        Appends(per_second=20.0),
        StreamWorkload(per_second=15.0),
        QueueWorkload(per_second=12.0),
    ]
