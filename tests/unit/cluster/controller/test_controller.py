"""Whom the controller takes for alive, and when it gives way to another, as scripts."""

from random import Random
from typing import Any

import pytest
from controller_script import Answered, Script, only
from hypothesis import given, settings
from hypothesis import strategies as st
from metadatamodel import register

from raftq.client.common.errors import ConfigError, NoLeader
from raftq.cluster.controller.events import (
    Abdicate,
    ConnectionEnded,
    ControllerConfig,
    Demoted,
    HeartbeatCame,
    ProbeEnded,
    ProbeNode,
    ProposeCommand,
    Tick,
)
from raftq.cluster.metadata.commands import (
    CreateTopic,
    ElectPreferred,
    FenceNode,
    MoveReplicas,
    SetDraining,
)


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
    assert abdications[0][1].reason == "nodes [2] answer probes but cannot reach this node"
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
