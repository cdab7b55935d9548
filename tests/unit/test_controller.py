"""The controller's decisions, as scripts: what happens when, and what it asks for then."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadatamodel import register

from raftq.client.wire.errors import ConfigError, InvalidArgument, NoLeader, RaftqError
from raftq.cluster.commands import (
    ChangeIsr,
    Command,
    CreateTopic,
    ElectPreferred,
    FenceNode,
    MoveReplicas,
    RemoveNode,
    Resign,
    SetDraining,
)
from raftq.cluster.controller import Controller
from raftq.cluster.controller_events import (
    Abdicate,
    Changed,
    ConnectionEnded,
    ControllerConfig,
    Demoted,
    Effect,
    Event,
    HeartbeatCame,
    ProbeEnded,
    ProbeNode,
    Promoted,
    ProposalEnded,
    ProposeCommand,
    Tick,
)
from raftq.cluster.metadata import apply
from raftq.cluster.state import ClusterState


class Script:
    """A controller, its state and its clock. Proposals wait in `asked` until they are decided."""

    def __init__(self, nodes: int = 3, seed: int = 1, **config: int) -> None:
        self.state = ClusterState("c")
        self.index = 0
        self.now = 100.0
        self.core = Controller(ControllerConfig(**config), Random(seed))
        self.asked: list[Command] = []
        self.beating: set[int] = set()
        for node_id in range(1, nodes + 1):
            self.decide(register(node_id))

    def decide(self, command: Command) -> list[Effect]:
        """A command takes its place in the log, from wherever it came."""
        self.index += 1
        _, changes = apply(self.state, command, self.index)
        return self.step(Changed(changes, self.state))

    def step(self, event: Event) -> list[Effect]:
        effects = self.core.step(event, self.now)
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now, self.core.describe()
        self.asked += [one.command for one in effects if isinstance(one, ProposeCommand)]
        return effects

    def promote(self, *connected: int, rivals: tuple[int, ...] = ()) -> list[Effect]:
        return self.step(Promoted(self.state, connected, rivals))

    def grant(self, error: RaftqError | None = None) -> list[Effect]:
        """Decide the oldest proposal, or refuse it."""
        command = self.asked.pop(0)
        effects = [] if error is not None else self.decide(command)
        return effects + self.step(ProposalEnded(command, error))

    def beat(self, *nodes: int) -> list[Effect]:
        effects = []
        for node_id in nodes:
            node = self.state.nodes[node_id]
            effects += self.step(HeartbeatCame(node_id, node.incarnation))
        return effects

    def wait(self, seconds: float) -> list[tuple[float, Effect]]:
        """Let time pass as the shell does: a Tick at every deadline, beats twice a second."""
        found: list[tuple[float, Effect]] = []
        end, begin, beats = self.now + seconds, self.now, 0
        for _ in range(100_000):
            deadline = self.core.next_deadline() or end
            beat_at = begin + beats / 2
            self.now = min(deadline, beat_at, end)
            if self.now >= end:
                return found
            if self.now == beat_at:
                beats += 1
                effects = self.beat(*sorted(self.beating))
            else:
                effects = self.step(Tick())
            found += [(round(self.now - begin, 3), one) for one in effects]
        raise AssertionError(f"it spins: {self.core.describe()}")

    def live(self, seconds: float) -> None:
        """Let time pass, and decide whatever is asked for at once."""
        for _ in range(int(seconds * 10)):
            self.wait(0.1)
            while self.asked:
                self.grant()

    def catch_up(self) -> None:
        """Every leader takes in what its move waits for, where it is alive."""
        for topic, number, one in list(self.state.all_partitions()):
            adding = [node for node in one.adding if self.state.nodes[node].alive]
            if one.leader is not None and adding:
                members = (*one.isr, *adding)
                pairs = tuple((node, self.state.nodes[node].incarnation) for node in members)
                self.decide(
                    ChangeIsr(topic.topic_id, number, one.leader, one.epoch, one.version, pairs)
                )


class Answered(Script):
    """The same, where probes are answered at once, by the nodes that are `answering`."""

    answering: tuple[int, ...] = (1, 2, 3)

    def step(self, event: Event) -> list[Effect]:
        effects = super().step(event)
        for one in only(effects, ProbeNode):
            answer = one.incarnation if one.node_id in self.answering else None
            effects += super().step(ProbeEnded(one.node_id, answer, False, one.incarnation))
        return effects


def only(effects: list[Any], kind: type[Any]) -> list[Any]:
    return [one for one in effects if isinstance(one, kind)]


def test_a_node_that_is_not_in_control_does_nothing() -> None:
    script = Script()
    assert script.core.next_deadline() is None
    assert script.step(ConnectionEnded(1)) == []
    assert script.step(Tick()) == []
    script.promote()
    assert script.step(Demoted()) == []
    assert script.core.next_deadline() is None
    assert script.core.describe() == "controller: not in control"


def test_promotion_probes_every_alive_node_without_a_connection() -> None:
    script = Script(4)
    script.decide(FenceNode(2, 1))
    assert script.promote(3) == [ProbeNode(1, 1), ProbeNode(4, 1)]


def test_a_killed_process_is_fenced_as_soon_as_its_port_refuses() -> None:
    script = Script()
    script.promote(1, 2, 3)
    script.now += 1
    assert script.step(ConnectionEnded(2)) == [ProbeNode(2, 1)]
    script.now += 0.01
    (effect,) = script.step(ProbeEnded(2, None, refused=True, probed=1))
    assert effect == ProposeCommand(FenceNode(2, 1), "nobody listens at its address")
    script.grant()
    assert not script.state.is_alive(2)
    assert script.asked == []


def test_a_process_that_still_closes_its_sockets_is_probed_again_soon() -> None:
    """The kernel may close the connection some time before the port that it listens on."""
    script = Script()
    script.promote(1, 2, 3)
    script.beating = {1, 3}
    script.step(ConnectionEnded(2))
    script.step(ProbeEnded(2, None, refused=False, probed=1))
    assert script.wait(0.2) == [(0.1, ProbeNode(2, 1))]
    script.step(ProbeEnded(2, None, refused=True, probed=1))
    assert script.asked == [FenceNode(2, 1)]


def test_a_node_that_answers_the_probe_keeps_its_lease() -> None:
    script = Script()
    script.promote(1, 2, 3)
    script.beating = {1, 2, 3}
    script.step(ConnectionEnded(2))
    assert script.step(ProbeEnded(2, 1, refused=False, probed=1)) == []
    assert only([one for _, one in script.wait(9)], ProbeNode) == []
    assert script.asked == []


def test_another_process_at_the_address_means_that_the_old_one_is_gone() -> None:
    script = Script()
    script.promote(1, 2, 3)
    script.step(ConnectionEnded(2))
    script.step(ProbeEnded(2, 99, refused=False, probed=1))
    assert script.asked == [FenceNode(2, 1)]


def test_a_paused_node_is_fenced_when_its_lease_ends_and_not_before() -> None:
    script = Script()
    script.promote(1, 2, 3)
    script.beating = {1, 2, 3}
    script.wait(2)
    script.beating = {1, 3}
    script.now += 0.25
    found = script.wait(4)
    fences = only([one for _, one in found], ProposeCommand)
    assert fences == [ProposeCommand(FenceNode(2, 1), "its lease expired")]
    (at,) = [when for when, one in found if isinstance(one, ProposeCommand)]
    assert 2.0 <= at <= 3.0


def test_a_heartbeat_of_another_incarnation_renews_nothing() -> None:
    script = Script(1)
    script.promote(1)
    script.now += 2
    script.step(HeartbeatCame(1, 2))
    script.step(HeartbeatCame(9, 1))
    assert [when for when, _ in script.wait(2)] == [1.0]
    assert script.asked == [FenceNode(1, 1)]


def test_an_old_probe_says_nothing_about_a_new_process() -> None:
    """1. Node 2 is probed. 2. It registers anew. 3. The old probe ends with a refusal. 4. The new
    process is probed as well, and only its own result counts."""
    script = Script()
    script.promote(1, 2, 3)
    script.step(ConnectionEnded(2))
    script.decide(register(2, 2))
    assert script.step(ProbeEnded(2, None, refused=True, probed=1)) == []
    assert script.step(ConnectionEnded(2)) == [ProbeNode(2, 2)]
    assert script.step(ProbeEnded(2, None, refused=True, probed=1)) == []
    script.step(ProbeEnded(2, None, refused=True, probed=2))
    assert script.asked == [FenceNode(2, 2)]


def test_a_sign_of_life_outweighs_a_refusal_that_comes_after_it() -> None:
    script = Script()
    script.promote(1, 2, 3)
    script.step(ConnectionEnded(2))
    script.beat(2)
    assert script.step(ProbeEnded(2, None, refused=True, probed=1)) == []


def test_a_fence_without_success_is_tried_again_at_growing_distances() -> None:
    script = Script()
    script.promote(1, 2, 3)
    script.beating = {1, 3}
    script.step(ConnectionEnded(2))
    script.step(ProbeEnded(2, None, refused=True, probed=1))
    waits = []
    for _ in range(7):
        script.grant(NoLeader("no leader"))
        begin = script.now
        while not script.asked:
            script.wait(0.05)
        waits.append(round(script.now - begin))
    assert waits == [1, 2, 4, 8, 10, 10, 10]
    script.grant()
    script.wait(20)
    assert script.asked == []


def test_a_proposal_without_an_answer_is_made_again() -> None:
    script = Script()
    script.promote(1, 2, 3)
    script.beating = {1, 3}
    script.step(ConnectionEnded(2))
    script.step(ProbeEnded(2, None, refused=True))
    script.wait(9.9)
    assert script.asked == [FenceNode(2, 1)]
    script.wait(0.2)
    assert script.asked == [FenceNode(2, 1)] * 2


def test_a_probe_without_a_result_is_made_again() -> None:
    script = Script(lease_ms=60_000)
    script.promote(1, 2, 3)
    script.step(ConnectionEnded(2))
    assert script.wait(3) == [(2.1, ProbeNode(2, 1))]


def test_a_flapping_connection_causes_few_probes() -> None:
    script = Script()
    script.promote(1, 2, 3)
    probes = 0
    for _ in range(1000):
        script.now += 0.001
        for effect in only(script.step(ConnectionEnded(2)), ProbeNode):
            probes += 1
            script.step(ProbeEnded(effect.node_id, 1, refused=False, probed=1))
    assert 9 <= probes <= 11


def test_a_node_that_is_fenced_and_comes_back_again_and_again_is_followed_each_time() -> None:
    script = Script()
    script.promote(1, 2, 3)
    for incarnation in range(2, 30):
        script.now += 0.2
        script.beat(1, 3)
        script.step(ConnectionEnded(2))
        script.now += 0.1
        script.step(ProbeEnded(2, None, refused=True))
        assert script.asked == [FenceNode(2, incarnation - 1)]
        script.grant()
        script.decide(register(2, incarnation))
    assert script.state.is_alive(2, 29)


def test_many_suspects_are_probed_a_few_at_a_time() -> None:
    script = Script(50, probes_max=8)
    probed = [one.node_id for one in only(script.promote(), ProbeNode)]
    assert len(probed) == 8
    while len(probed) < 50:
        done = probed[len(probed) - 8]
        effects = script.step(ProbeEnded(done, 1, refused=False, probed=1))
        assert len(effects) == 1
        probed += [one.node_id for one in only(effects, ProbeNode)]
    assert sorted(probed) == list(range(1, 51))


def test_a_controller_that_was_stopped_does_not_fence_those_it_could_not_hear() -> None:
    script = Script()
    script.promote(1, 2, 3)
    script.beating = {1, 2, 3}
    script.wait(5)
    script.now += 60
    assert only(script.step(Tick()), ProposeCommand) == []
    script.wait(5)
    assert script.asked == []
    script.beating = {1, 3}
    script.wait(4)
    assert script.asked == [FenceNode(2, 1)]


def test_leases_are_fresh_after_promotion() -> None:
    script = Script()
    script.promote(1, 2, 3)
    script.wait(2)
    script.step(Demoted())
    script.now += 50
    script.promote(1, 2, 3)
    assert script.wait(2.9) == []


def test_a_node_that_a_new_controller_neither_hears_nor_reaches_has_half_a_lease() -> None:
    """It may have been silent for the controller before as well; and whoever can, beats at once."""
    script = Script()
    script.promote()
    script.beating = {1, 3}
    found = script.wait(3)
    (at,) = [when for when, one in found if isinstance(one, ProposeCommand)]
    assert script.asked == [FenceNode(2, 1)]
    assert 1.4 <= at <= 1.6


def test_a_node_that_answers_a_new_controller_has_a_whole_lease_to_beat() -> None:
    script = Script()
    script.promote()
    script.beating = {1, 3}
    script.step(ProbeEnded(2, 1, refused=False, probed=1))
    assert only([one for _, one in script.wait(2.9)], ProposeCommand) == []
    script.wait(0.2)
    assert script.asked == [FenceNode(2, 1)]


class Deaf(Answered):
    """Node 1 is in control; what it probes answers, though nothing else comes from there."""

    def __init__(self, nodes: int = 3, answering: tuple[int, ...] = (2, 3)) -> None:
        super().__init__(nodes)
        self.answering = answering
        self.promote(*range(1, nodes + 1), rivals=tuple(range(2, nodes + 1)))


def test_a_controller_whom_nobody_reaches_abdicates_and_fences_nobody() -> None:
    script = Deaf()
    script.beating = {1, 2, 3}
    script.wait(2)
    script.beating = {1}
    for node_id in (2, 3):  # refused by whatever stands before this node, and well
        script.step(ConnectionEnded(node_id))
    found = script.wait(6)
    abdications = [(at, one) for at, one in found if isinstance(one, Abdicate)]
    assert abdications[0][0] <= 1.6
    assert abdications[0][1].reason == "nodes [2] answer and do not get here"
    assert len(abdications) == 2, "again after a lease, if it has not come about"
    assert script.asked == []
    script.step(Demoted())
    assert script.core.next_deadline() is None


def test_a_controller_that_is_heard_by_as_many_as_not_stays() -> None:
    script = Deaf()
    script.beating = {1, 2}
    script.live(6)
    assert not script.state.is_alive(3)
    assert script.state.is_alive(2)


def test_a_controller_abdicates_for_nobody_who_does_not_answer() -> None:
    """Who neither beats nor answers may be dead, and is fenced when its lease ends."""
    script = Deaf(answering=())
    script.beating = {1}
    script.live(6)
    assert [one for one in (2, 3) if script.state.is_alive(one)] == []


def test_a_controller_without_rivals_fences_whom_it_does_not_hear() -> None:
    """Node 2 is no voter: nobody could take over."""
    script = Deaf(2)
    script.promote(1, 2)
    script.beating = {1}
    assert only([one for _, one in script.wait(4)], Abdicate) == []
    assert script.asked == [FenceNode(2, 1)]


def test_a_rival_that_beats_again_is_not_held_against_the_controller() -> None:
    script = Deaf(answering=())
    script.beating = {1}
    script.wait(1.6)
    script.beat(2, 3)
    script.answering = (2, 3)
    script.beating = {1, 2, 3}
    assert only([one for _, one in script.wait(5)], Abdicate) == []
    assert script.asked == []


def test_a_pause_of_the_controller_is_no_silence_of_others() -> None:
    script = Deaf()
    script.beating = {1, 2, 3}
    script.wait(2)
    script.now += 10
    assert only(script.step(Tick()), Abdicate) == []
    assert only([one for _, one in script.wait(3)], Abdicate) == []


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


def test_settings_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        ControllerConfig(lease_ms=0, moves_max=-1, balance_max=9000, retry_ms=20_000)
    for name in ("lease_ms", "moves_max", "balance_max", "retry_ms"):
        assert name in str(caught.value)


EVENTS = st.one_of(
    st.builds(HeartbeatCame, st.integers(0, 5), st.integers(1, 2)),
    st.builds(ConnectionEnded, st.integers(0, 5)),
    st.builds(
        ProbeEnded,
        st.integers(0, 5),
        st.sampled_from([None, 1, 2]),
        st.booleans(),
        st.sampled_from([None, 1, 2]),
    ),
    st.just(Tick()),
    st.just(Demoted()),
    st.sampled_from(["promote", "grant", "refuse", "register", "drain", "catch up", "deadline"]),
)


@given(st.lists(st.tuples(EVENTS, st.sampled_from([0, 0.001, 0.3, 2.0, 20.0])), max_size=60))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_it_neither_spins_nor_piles_up_proposals(
    happenings: list[tuple[Any, float]],
) -> None:
    script = Script(4)
    script.decide(CreateTopic("t", 4, 3))
    script.promote(rivals=(2, 3, 4))
    rng = Random(1)
    for what, pause in happenings:
        script.now += pause
        if what == "promote":
            script.asked.clear()
            script.promote(rivals=(2, 3, 4))
        elif what == "deadline":
            script.now = max(script.now, script.core.next_deadline() or 0.0)
            script.step(Tick())
        elif what == "register":
            script.decide(register(rng.randrange(1, 6), rng.randrange(1, 3)))
        elif what == "drain":
            node_id = rng.randrange(1, 5)
            script.decide(SetDraining(node_id, True, rng.random() < 0.7, force=True))
        elif what == "catch up":
            script.catch_up()
        elif what in ("grant", "refuse"):
            if script.asked:
                script.grant(NoLeader("no") if what == "refuse" else None)
        else:
            script.step(what)  # asserts that the next deadline is in the future
        # One in flight, and one more each time that one was given up without an answer.
        given_up = (script.now - 100.0) / 10
        assert len(only(script.asked, MoveReplicas)) <= 1 + given_up
        assert len(only(script.asked, ElectPreferred)) <= 1 + given_up
