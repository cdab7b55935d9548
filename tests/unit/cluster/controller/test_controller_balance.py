"""Whom the controller gives leadership back to, and what it moves off nodes, as scripts."""

from controller_script import Answered, Script, only
from metadatamodel import register

from raftq.client.common.errors import InvalidArgument
from raftq.cluster.controller.events import ProbeNode, ProposeCommand
from raftq.cluster.metadata.commands import (
    CreateTopic,
    ElectPreferred,
    FenceNode,
    MoveReplicas,
    RemoveNode,
    Resign,
    SetDraining,
)


def test_a_leader_that_resigned_gets_nothing_back_for_a_while() -> None:
    script = Answered(balance_ms=2000, resigned_ms=30_000)
    script.decide(CreateTopic("t", 6, 3))
    script.promote(1, 2, 3)
    script.beating = {1, 2, 3}
    script.decide(Resign(1, 0, 1, 1))
    assert script.state.topics["t"].partitions[0].leader != 1
    assert only([one for _, one in script.wait(29)], ProposeCommand) == []
    script.wait(4)
    assert script.asked == [ElectPreferred(((1, 0),))]


def test_leadership_goes_back_to_preferred_leaders_that_have_settled() -> None:
    """1. Node 1 dies and comes back. 2. It leads nothing until a round of balance that is at least
    the settle time after its return. 3. Then it is probed, and when it answers, all of its
    partitions are asked for at once."""
    script = Answered(balance_ms=2000)
    script.decide(CreateTopic("t", 6, 3))
    script.promote(1, 2, 3)
    script.beating = {1, 2, 3}
    script.decide(FenceNode(1, 1))
    script.decide(register(1, 2))
    assert script.wait(4.9) == []
    found = script.wait(4.5)
    assert [one for _, one in found] == [
        ProbeNode(1, 2),
        ProposeCommand(
            ElectPreferred(((1, 0), (1, 3))), "2 partitions go back to their preferred leaders"
        ),
    ]
    script.grant()
    assert script.state.leading(1) == 2
    assert script.wait(20) == []


def test_a_node_that_beats_and_cannot_be_reached_gets_no_leadership_and_others_do() -> None:
    """1. Nodes 1 and 2 come back, and nobody can connect to node 1. 2. Node 2 gets its partitions,
    though those of node 1 would fill a round. 3. Node 1 gets its own when it answers."""
    script = Answered(balance_ms=2000, balance_settle_ms=1, balance_max=4)
    script.decide(CreateTopic("t", 12, 3))
    for command in (FenceNode(1, 1), FenceNode(2, 1), register(1), register(2)):
        script.decide(command)
    script.promote(1, 2, 3)
    script.answering = (2, 3)
    script.beating = {1, 2, 3}
    script.live(12)
    assert (script.state.leading(1), script.state.leading(2)) == (0, 4)
    assert script.state.is_alive(1)
    script.answering = (1, 2, 3)
    script.live(12)
    assert (script.state.leading(1), script.state.leading(2)) == (4, 4)


def test_a_round_of_balance_is_bounded_and_rounds_go_on() -> None:
    script = Answered(balance_max=5, balance_settle_ms=1)
    script.decide(CreateTopic("t", 36, 3))
    script.decide(FenceNode(1, 1))
    script.decide(register(1))
    script.promote(1, 2, 3)
    script.beating = {1, 2, 3}
    script.live(11.5)
    assert script.state.leading(1) == 5
    script.live(24)
    assert script.state.leading(1) == 12


def test_a_draining_or_suspected_node_gets_no_leadership() -> None:
    script = Answered(balance_settle_ms=1)
    script.decide(CreateTopic("t", 6, 3))
    script.decide(SetDraining(1, True))
    script.promote(1, 2, 3)
    script.beating = {1, 2, 3}
    script.live(30)
    assert script.state.leading(1) == 0
    script.decide(SetDraining(1, False))
    script.live(30)
    assert script.state.leading(1) == 2


def test_a_decommissioned_node_is_emptied_a_few_partitions_at_a_time() -> None:
    script = Script(4, moves_max=2)
    script.decide(CreateTopic("t", 12, 3))
    script.promote(1, 2, 3, 4)
    script.beating = {1, 2, 3, 4}
    script.decide(SetDraining(2, True, decommissioning=True))
    held = script.state.replica_count(2)
    assert held >= 8
    rounds = 0
    while script.state.replica_count(2):
        script.live(1)
        assert script.state.summary().moves <= 2
        script.catch_up()
        rounds += 1
    assert held // 2 <= rounds <= held
    script.live(20)
    assert script.asked == []
    for _, _, one in script.state.all_partitions():
        assert sorted(one.replicas) == [1, 3, 4]
        assert one.target is None
    script.decide(FenceNode(2, 1))
    script.decide(RemoveNode(2))
    assert sorted(script.state.nodes) == [1, 3, 4]


def test_moves_that_have_nowhere_to_go_are_not_asked_for() -> None:
    script = Script(3)
    script.decide(CreateTopic("t", 3, 3))
    script.promote(1, 2, 3)
    script.beating = {1, 2, 3}
    script.decide(SetDraining(2, True, decommissioning=True, force=True))
    assert script.wait(60) == []
    script.decide(register(4))
    assert len(only(script.asked, MoveReplicas)) == 1


def test_a_refused_move_is_not_repeated_at_every_change() -> None:
    script = Script(4, balance_ms=10_000)
    script.decide(CreateTopic("t", 2, 3))
    script.promote(1, 2, 3, 4)
    script.beating = {1, 2, 3, 4}
    script.decide(SetDraining(2, True, decommissioning=True))
    (move,) = script.asked
    script.grant(InvalidArgument("no"))
    for number in range(50):
        script.decide(CreateTopic(f"u{number}", 1, 1))
    assert script.asked == []
    script.wait(1.1)
    assert script.asked == [move]


def test_a_move_to_a_node_that_is_lost_is_planned_anew() -> None:
    """1. A replica is to move from 1 to the only node left. 2. That node dies. 3. Another one
    joins, but only after the patience is used up the move goes there."""
    script = Script(3)
    script.decide(CreateTopic("t", 1, 2))
    one = script.state.topics["t"].partitions[0]
    script.promote(1, 2, 3)
    script.decide(SetDraining(one.replicas[0], True, decommissioning=True))
    script.grant()
    (adding,) = script.state.topics["t"].partitions[0].adding
    script.decide(FenceNode(adding, 1))
    script.decide(register(4))
    script.beating = {1, 2, 3, 4} - {adding}
    script.live(29)
    assert script.state.topics["t"].partitions[0].adding == (adding,)
    script.live(2)
    assert script.state.topics["t"].partitions[0].adding == (4,)
    script.catch_up()
    assert script.state.replica_count(one.replicas[0]) == 0
