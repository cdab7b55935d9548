"""Data: workers and members that die, are late, fail, join and leave; delays across failovers."""

from raftq.chaos.faults.letters import KillCoordinator, LettersRefused
from raftq.chaos.faults.processes import Kill, Pause
from raftq.chaos.scenario import Scenario, Step
from raftq.chaos.scenarios.loads import (
    CARELESS,
    GAP_S,
    PROGRESS,
    PUNCTUAL,
    changes,
    delays,
    queues,
    streams,
)
from raftq.chaos.scene import Workload
from raftq.chaos.workloads.queues import QueueWorkload
from raftq.chaos.workloads.streams import StreamWorkload


def mortal_workers() -> list[Workload]:
    return [QueueWorkload(deaths_per_minute=60.0)]


def late_workers() -> list[Workload]:
    return [QueueWorkload(habits=CARELESS)]


def busy_door() -> list[Workload]:
    return [StreamWorkload(turnover_s=0.7, members=5)]


CLIENTS = (
    Scenario(
        name="workers-killed",
        rows=(30,),
        promise="The records of a killed worker go to another after the lease, once, and counted.",
        workloads=mortal_workers,
        plan=(Step(10, Kill("follower", "queues"), 3),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="late-acks",
        rows=(31,),
        promise="Settlements of a lease that has ended are refused.",
        workloads=late_workers,
        plan=(Step(8, Kill("leader", "queues"), 3),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="poison",
        rows=(32,),
        promise="A poison record becomes one dead letter, and is not given out again.",
        workloads=queues,
        plan=(Step(4, Kill("leader", "queues"), 3), Step(11, Pause("leader", "queues"), 5)),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="dead-letters-refused",
        rows=(33,),
        promise="A record that is given up stays where it is until its dead letter is safe.",
        workloads=queues,
        plan=(Step(6, LettersRefused(), 8),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="kill-leader-of-queue",
        rows=(34,),
        promise="Leases, attempts and settlements outlive the leader that gave them.",
        workloads=queues,
        plan=(Step(2, Kill("leader", "queues"), 3), Step(8, Kill("leader", "queues"), 3)),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="pause-leader-of-queue",
        rows=(34, 5),
        promise="A leader of a queue that was paused grants nothing under its old epoch.",
        workloads=queues,
        plan=(Step(2, Pause("leader", "queues"), 8),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="members-come-and-go",
        rows=(35,),
        promise="A partition has one owner per generation, and no record is skipped at a handover.",
        workloads=busy_door,
        plan=(Step(6, Kill("follower", "streams"), 3),),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="kill-coordinator",
        rows=(36,),
        promise="A group survives its coordinator, and stored positions never go back.",
        workloads=busy_door,
        plan=(Step(4, KillCoordinator(), 3), Step(11, KillCoordinator(), 3)),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="kill-leader-of-stream",
        rows=(36, 1),
        promise="Stored positions survive the leader that keeps them.",
        workloads=streams,
        plan=(Step(3, Kill("leader", "streams"), 3), Step(9, Kill("leader", "streams"), 3)),
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="moves-under-kill",
        rows=(39,),
        promise="Topics, partitions and copies change while nodes are killed: nothing is lost, and "
        "all copies are there again.",
        workloads=changes,
        plan=(
            Step(3, Kill("any"), 3),
            Step(9, Kill("any"), 3),
            Step(15, Kill("controller"), 3),
        ),
        nodes=5,
        rules=PROGRESS,
        gap_s_max=GAP_S,
    ),
    Scenario(
        name="delays-across-kill",
        rows=(40,),
        promise="Delayed records are neither early nor lost nor late by more than the bar when "
        "their leader is killed; ended ones are not given out.",
        workloads=delays,
        plan=(Step(3, Kill("leader", "delays"), 3), Step(10, Kill("leader", "delays"), 3)),
        rules=PUNCTUAL,
        gap_s_max=GAP_S,
    ),
)
