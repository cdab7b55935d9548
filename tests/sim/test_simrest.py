"""A calm time excuses who is late until it has come to the leader, and nobody else."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from clusterchecks import Broken
from decided_replicas import ALIVE, LAG_S, decided
from simrest import Leavers

from raftq.cluster.metadata.state import PartitionState
from raftq.node.replication.replica import Replica

LATE = 2


class NewLeader:
    """Node 1 has just begun to lead one partition, and node 2 hears of everything late.

    Everybody has heard of the leader, and node 3 has come to it.
    """

    def __init__(self) -> None:
        facts = decided()
        self.leader = Replica(1, LAG_S, lambda node: True)
        self.leader.lead(facts, [(10, 10)], 0.0)
        followers = {one: Replica(one, LAG_S, lambda node: True) for one in (2, 3)}
        for replica in followers.values():
            replica.follow(facts)
        copies = {1: self.leader, **followers}
        self.state = PartitionState(
            facts.replicas, facts.isr, facts.leader, facts.epoch, facts.version, facts.assignments
        )
        self.cluster: Any = SimpleNamespace(
            plan=SimpleNamespace(
                voters=(1, 2, 3), world=SimpleNamespace(lags_s={1: 0.0, LATE: 1.0, 3: 0.02})
            ),
            nodes={
                one: SimpleNamespace(copy_of=lambda key, own=own: SimpleNamespace(replica=own))
                for one, own in copies.items()
            },
            consensus=SimpleNamespace(
                state=SimpleNamespace(
                    all_partitions=lambda: [(SimpleNamespace(name="t"), 0, self.state)]
                )
            ),
            describe=lambda: "",
        )
        self.comes(3)

    def comes(self, node: int, end: int = 10) -> None:
        self.leader.data.on_progress(node, ALIVE[node], end, 1.0)

    def put_out(self, node: int) -> None:
        isr = tuple(one for one in self.state.isr if one != node)
        self.state = replace(self.state, isr=isr, version=self.state.version + 1)


def test_who_is_late_and_has_not_come_may_leave() -> None:
    world = NewLeader()
    leavers = Leavers(world.cluster)
    world.put_out(LATE)
    leavers.check()


def test_who_is_late_and_came_with_less_than_the_leader_has_may_leave() -> None:
    world = NewLeader()
    world.comes(LATE, 5)
    leavers = Leavers(world.cluster)
    world.put_out(LATE)
    leavers.check()


def test_who_came_after_the_leader_proposed_to_go_on_without_it_may_leave() -> None:
    world = NewLeader()
    change = world.leader.next_change(ALIVE, LAG_S + 0.1)
    assert change is not None
    assert change.leaves == 1
    world.comes(LATE)
    leavers = Leavers(world.cluster)
    world.put_out(LATE)
    leavers.check()


def test_who_is_late_and_has_come_may_not_leave() -> None:
    world = NewLeader()
    world.comes(LATE)
    leavers = Leavers(world.cluster)
    leavers.check()
    world.put_out(LATE)
    with pytest.raises(Broken, match="node-2 left the isr of t/0"):
        leavers.check()


def test_who_comes_in_the_calm_time_may_not_leave_from_then_on() -> None:
    world = NewLeader()
    leavers = Leavers(world.cluster)
    world.comes(LATE)
    leavers.check()
    world.put_out(LATE)
    with pytest.raises(Broken, match="node-2 left the isr of t/0"):
        leavers.check()


def test_who_is_not_late_may_never_leave() -> None:
    world = NewLeader()
    leavers = Leavers(world.cluster)
    world.put_out(3)
    with pytest.raises(Broken, match="node-3 left the isr of t/0"):
        leavers.check()
