"""Data: copies that are moved, added and removed while another fault is present."""

from raftq.chaos.faults.changes import MoveAway, MoveToAndFro
from raftq.chaos.faults.disk import BadDisk, PowerCut
from raftq.chaos.faults.expansion import SplitAtExpansion
from raftq.chaos.faults.network import Isolate
from raftq.chaos.faults.processes import Kill
from raftq.chaos.scenario import Scenario, Step
from raftq.chaos.scenarios.loads import (
    GAP_S,
    PROGRESS,
    SAFETY,
    appends,
    appends_of_many_partitions,
    appends_on_both_sides,
    appends_with_tails,
    growing_queues,
    pairs_on_both_sides,
)

REST_S = 5.0
SPLIT_S = 20.0
"""Longer than two proposals wait for their outcome."""

OPERATORS = (
    Scenario(
        name="expansion-under-a-split",
        rows=(7, 39),
        promise="A leader that asked to let a follower in, and was cut off before it was told what "
        "became of it, acknowledges nothing that this follower lacks.",
        workloads=appends_on_both_sides,
        plan=(Step(2, SplitAtExpansion("appends"), SPLIT_S, majority=False),),
        nodes=5,
        rules=SAFETY,
        gap_s_max=10.0,
        quiet_s=8.0,
        rest_s=REST_S,
    ),
    Scenario(
        name="expansion-under-a-split-of-three",
        rows=(7, 39),
        promise="The same holds for a leader that is alone on its side, with two copies.",
        workloads=pairs_on_both_sides,
        plan=(Step(2, SplitAtExpansion("appends"), SPLIT_S, majority=False),),
        rules=SAFETY,
        gap_s_max=10.0,
        quiet_s=8.0,
        rest_s=REST_S,
    ),
    Scenario(
        name="moves-to-and-fro-slow-metadata",
        rows=(28, 39),
        promise="A copy that is moved away and back, and whose node learns of both late, counts "
        "only with what it has kept: the death of the leader loses nothing.",
        workloads=appends,
        plan=(
            Step(2, MoveToAndFro("appends", slow_s=0.2, kills=True, rounds=6), 2, majority=False),
        ),
        nodes=5,
        rules=SAFETY,
        gap_s_max=10.0,
        quiet_s=8.0,
        rest_s=REST_S,
    ),
    Scenario(
        name="truncations-with-slow-syncs",
        rows=(7, 20, 28),
        promise="What a follower cut off and got anew is synced before it is called so: with fsync "
        "always a power cut of all nodes takes nothing acknowledged.",
        workloads=appends_with_tails,
        plan=(
            Step(1, BadDisk(None, trouble="slow syncs", seconds=0.01), 31),
            *(Step(2 + 7.0 * n, Isolate("leader", "appends-always"), 4) for n in range(4)),
            Step(28.5, PowerCut(None), 2, majority=False),
        ),
        rules=SAFETY,
        gap_s_max=15.0,
        quiet_s=8.0,
    ),
    Scenario(
        name="large-dead-letters",
        rows=(32, 33),
        promise="Records that became larger than the dead letters were made for end there like "
        "all others, each once, and hold up none behind them.",
        workloads=growing_queues,
        plan=(Step(8, Kill("leader", "queues"), 3),),
        quiet_s=6.0,
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="rest-after-moves",
        rows=(39,),
        promise="When partitions were moved away from their leaders, and nobody does anything any "
        "more, nothing is decided any more.",
        workloads=appends_of_many_partitions,
        plan=(Step(2, MoveAway("appends", back=False), 2),),
        nodes=4,
        rules=PROGRESS,
        gap_s_max=GAP_S,
        rest_s=REST_S,
    ),
)
