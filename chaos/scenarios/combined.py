"""Data: several faults at once, under several workloads."""

from raftq.chaos.faults.disk import BadDisk, PowerCut
from raftq.chaos.faults.network import Isolate, OneWay
from raftq.chaos.faults.processes import Kill, KillMany, Pause, RollingRestart
from raftq.chaos.faults.streams import Latency, ResetStorm
from raftq.chaos.scenario import Scenario, Step
from raftq.chaos.scenarios.loads import SAFETY, changes, delays, everything, queues, streams
from raftq.chaos.verdict import Rules

COMBINED = (
    Scenario(
        name="pause-then-kill",
        rows=(1, 5),
        promise="A paused leader, and another that is killed meanwhile, cost time only.",
        workloads=everything,
        plan=(
            Step(2, Pause("leader", "appends"), 6, majority=False),
            Step(6.5, Kill("leader", "queues"), 5, majority=False),
        ),
        rules=SAFETY,
        gap_s_max=20.0,
        quiet_s=8.0,
    ),
    Scenario(
        name="cut-off-then-power-cut",
        rows=(7, 19),
        promise="A leader that is cut off, then loses power, takes nothing acknowledged with it.",
        workloads=everything,
        plan=(
            Step(2, Isolate("leader", "appends"), 6, majority=False),
            Step(6, PowerCut("leader", "appends"), 5, majority=False),
        ),
        rules=SAFETY,
        gap_s_max=20.0,
        quiet_s=8.0,
    ),
    Scenario(
        name="slow-network-and-kills",
        rows=(1, 13),
        promise="Kills on a slow network lose nothing.",
        workloads=queues,
        plan=(
            Step(2, Latency("everywhere", latency_ms=40, jitter_ms=30), 16),
            Step(4, Kill("leader", "queues"), 4),
            Step(12, Kill("controller"), 4),
        ),
        rules=SAFETY,
        gap_s_max=10.0,
        quiet_s=6.0,
    ),
    Scenario(
        name="resets-and-pauses",
        rows=(5, 15),
        promise="Members that lose connections and leaders at once skip and store nothing wrong.",
        workloads=streams,
        plan=(
            Step(2, Pause("leader", "streams"), 5),
            Step(4, ResetStorm("clients", rounds=8), 5),
        ),
        rules=SAFETY,
        gap_s_max=12.0,
        quiet_s=6.0,
    ),
    Scenario(
        name="slow-disk-and-deaf-node",
        rows=(9, 28),
        promise="A slow disk on one node and a deaf other one lose nothing.",
        workloads=everything,
        plan=(
            Step(2, BadDisk("follower", "appends", trouble="slow syncs"), 10, majority=False),
            Step(4, OneWay("leader", "appends"), 6, majority=False),
        ),
        rules=SAFETY,
        gap_s_max=20.0,
        quiet_s=8.0,
    ),
    Scenario(
        name="kill-all-with-delays",
        rows=(3, 40),
        promise="Delayed records survive the death of all nodes.",
        workloads=delays,
        plan=(Step(4, KillMany(), 2, majority=False),),
        rules=Rules(max_deliveries=100),
        gap_s_max=15.0,
        quiet_s=8.0,
    ),
    Scenario(
        name="rolling-restart-under-everything",
        rows=(4, 34, 36),
        promise="A rolling restart is survived by producers, groups and queues alike.",
        workloads=everything,
        plan=(Step(3, RollingRestart(), 1),),
        rules=SAFETY,
        gap_s_max=8.0,
    ),
    Scenario(
        name="changes-behind-a-split",
        rows=(8, 39),
        promise="Topic changes during a split and a kill leave all nodes with the same metadata.",
        workloads=changes,
        plan=(
            Step(2, Isolate("controller", clients=True), 6, majority=False),
            Step(10, Kill("controller"), 3),
        ),
        nodes=5,
        rules=SAFETY,
        gap_s_max=10.0,
        quiet_s=6.0,
    ),
)
