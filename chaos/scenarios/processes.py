"""Data: nodes that are killed, stopped and paused."""

from raftq.chaos.faults.processes import Kill, KillMany, Pause, RollingRestart, Wipe
from raftq.chaos.scenario import Scenario, Step
from raftq.chaos.scenarios.loads import GAP_S, PROGRESS, SAFETY, appends, changes

PROCESSES = (
    Scenario(
        name="kill-leader",
        rows=(1,),
        promise="Every acknowledged record is readable exactly at its offset when its leader is "
        "killed.",
        workloads=appends,
        plan=(Step(2, Kill("leader", "appends"), 4), Step(9, Kill("leader", "appends"), 4)),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="kill-leader-behind-proxies",
        rows=(1,),
        promise="A killed node whose address still takes connections is replaced after its lease.",
        workloads=appends,
        plan=(Step(2, Kill("leader", "appends"), 6), Step(11, Kill("leader", "appends"), 6)),
        rules=PROGRESS,
        gap_s_max=GAP_S,
        proxied=True,
    ),
    Scenario(
        name="kill-follower",
        rows=(2,),
        promise="No write is refused while enough copies are in sync, and the killed follower "
        "becomes identical again.",
        workloads=appends,
        plan=(Step(2, Kill("follower", "appends"), 4), Step(9, Kill("follower", "appends"), 4)),
        rules=PROGRESS,
        gap_s_max=2.0,
    ),
    Scenario(
        name="kill-controller",
        rows=(1, 8),
        promise="Partitions go on, and metadata changes move to the next controller, when the "
        "controller is killed.",
        workloads=changes,
        plan=(Step(2, Kill("controller"), 4), Step(9, Kill("controller"), 4)),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="kill-all",
        rows=(3,),
        promise="Nothing acknowledged is lost when all nodes are killed at once.",
        workloads=appends,
        plan=(Step(3, KillMany(), 2, majority=False), Step(13, KillMany(), 2, majority=False)),
        rules=SAFETY,
        gap_s_max=15.0,
        quiet_s=8.0,
    ),
    Scenario(
        name="kill-majority",
        rows=(3,),
        promise="Without a majority nothing is acknowledged that could be lost.",
        workloads=appends,
        plan=(Step(2, KillMany(2), 6, majority=False),),
        rules=SAFETY,
        gap_s_max=20.0,
        quiet_s=8.0,
    ),
    Scenario(
        name="rolling-restart",
        rows=(4,),
        promise="Restarting every node in turn costs no partition more than the bar, and doubles "
        "nothing.",
        workloads=appends,
        plan=(Step(2, RollingRestart(), 1),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="rolling-kills",
        rows=(4,),
        promise="The same holds when every node in turn is killed.",
        workloads=appends,
        plan=(Step(2, RollingRestart(hard=True, gap_s=2.0), 1),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="pause-leader",
        rows=(5,),
        promise="What a leader that stood still appends afterwards is fenced: no offset has two "
        "values.",
        workloads=appends,
        plan=(Step(2, Pause("leader", "appends"), 12),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
        quiet_s=6.0,
    ),
    Scenario(
        name="pause-leader-often",
        rows=(5,),
        promise="Pauses around the length of a lease neither lose nor double anything.",
        workloads=appends,
        plan=tuple(
            Step(2 + 5.0 * number, Pause("leader", "appends"), lasts)
            for number, lasts in enumerate((2.8, 3.0, 3.2, 3.6))
        ),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="pause-follower",
        rows=(6,),
        promise="A follower that stands still leaves the in-sync replicas, and rejoins without a "
        "gap.",
        workloads=appends,
        plan=(Step(2, Pause("follower", "appends"), 14),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="pause-controller",
        rows=(8,),
        promise="Metadata changes fail or go to the next controller while one stands still.",
        workloads=changes,
        plan=(Step(2, Pause("controller"), 10),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="wipe-follower",
        rows=(24,),
        promise="A node that comes back empty gets everything again, and does not count before.",
        workloads=appends,
        plan=(Step(3, Wipe("follower", "appends"), 3),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="wipe-leader",
        rows=(24,),
        promise="The same holds for a leader that lost its disk.",
        workloads=appends,
        plan=(Step(3, Wipe("leader", "appends"), 3),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
)
