"""Random lives of a cluster, with the invariants of metadatamodel.py after every command."""

from random import Random
from typing import Any

import metadatamodel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadatamodel import Model, random_command, register

from raftq.client.common.errors import RaftqError
from raftq.cluster.metadata.apply import apply, dump, load
from raftq.cluster.metadata.commands import (
    AddPartitions,
    AllocateProducerIds,
    AlterTopic,
    ChangeIsr,
    Command,
    CreateTopic,
    DeleteTopic,
    ElectPreferred,
    FenceNode,
    InitNamedProducer,
    MoveReplicas,
    Recover,
    RegisterNode,
    RemoveNode,
    Resign,
    SetDraining,
    TellEnds,
)
from raftq.cluster.metadata.state import ClusterState

SMALL = st.integers(0, 6)
NUMBER = st.one_of(SMALL, st.sampled_from([4095, 4096, 4097, (1 << 31) - 1]))
WIDE = st.one_of(SMALL, st.sampled_from([(1 << 62), (1 << 63) - 1]))
NAME = st.one_of(
    st.sampled_from(["a", "b", "", "..", "a/b", "ä", "x" * 245, "x" * 249]), st.text(max_size=5)
)
VALUE = st.one_of(st.none(), st.booleans(), st.integers(-2, 5), st.sampled_from(["always", "x"]))
SETTING = st.sampled_from(["min_insync", "retention_ms", "fsync", "cleanup", "nothing"])
CONFIG = st.dictionaries(SETTING, VALUE, max_size=4)
NODES = st.lists(SMALL, max_size=5).map(tuple)
PAIRS = st.lists(st.tuples(SMALL, SMALL), max_size=5).map(tuple)
BOOL = st.booleans()

ANY: st.SearchStrategy[Command] = st.one_of(
    st.builds(RegisterNode, SMALL, st.just("h"), SMALL, SMALL, NAME, NAME, SMALL, BOOL),
    st.builds(RegisterNode, SMALL, st.just("h"), SMALL, SMALL, NAME, NAME, SMALL, BOOL),
    st.builds(FenceNode, SMALL, SMALL),
    st.builds(SetDraining, SMALL, BOOL, BOOL, BOOL),
    st.builds(RemoveNode, SMALL),
    st.builds(CreateTopic, NAME, SMALL, SMALL, CONFIG),
    st.builds(CreateTopic, NAME, NUMBER, NUMBER, CONFIG),
    st.builds(AlterTopic, NAME, CONFIG),
    st.builds(DeleteTopic, NAME),
    st.builds(AddPartitions, NAME, st.one_of(SMALL, st.just(4097))),
    st.builds(ChangeIsr, SMALL, SMALL, SMALL, SMALL, SMALL, PAIRS),
    st.builds(ElectPreferred, PAIRS),
    st.builds(Resign, SMALL, SMALL, SMALL, SMALL),
    st.builds(MoveReplicas, NAME, NUMBER, NODES),
    st.builds(AllocateProducerIds, SMALL, st.integers(1, 1_000_000)),
    st.builds(InitNamedProducer, NAME),
    st.builds(TellEnds, SMALL, SMALL, st.lists(st.tuples(*[SMALL] * 5), max_size=3).map(tuple)),
    st.builds(Recover, SMALL, SMALL, SMALL),
    st.builds(ChangeIsr, WIDE, NUMBER, SMALL, WIDE, WIDE, PAIRS),
)


@given(st.lists(ANY, max_size=25))
@settings(max_examples=150, deadline=None)
def test_no_command_breaks_a_replica_whatever_it_says(commands: list[Command]) -> None:
    model = Model()
    for node_id in (1, 2, 3):
        model.apply(register(node_id))
    for command in commands:
        try:
            model.apply(command)
        except RaftqError:
            continue


@given(st.integers(0, 1 << 32), st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_the_invariants_hold_through_the_life_of_a_cluster(seed: int, steps: int) -> None:
    metadatamodel.run(seed, steps)


def test_random_lives_get_to_where_it_is_dangerous() -> None:
    """The model would prove little if its commands were refused or its moves never finished."""
    seen: dict[str, int] = {}

    def note(what: str, holds: object) -> None:
        seen[what] = seen.get(what, 0) + bool(holds)

    for seed in range(24):
        rng, model = Random(seed), Model()
        for node_id in metadatamodel.NODES:
            model.apply(register(node_id))
        for _ in range(250):
            command = random_command(model.state, rng)
            before = {(t.topic_id, n): one for t, n, one in model.state.all_partitions()}
            try:
                model.apply(command)
            except RaftqError:
                note(f"{type(command).__name__} refused", True)
                continue
            note(f"{type(command).__name__} applied", True)
            for topic, number, new in model.state.all_partitions():
                old: Any = before.get((topic.topic_id, number))
                if old is None or old == new:
                    continue
                note("leader lost", old.leader is not None and new.leader is None)
                note("leader found", old.leader is None and new.leader is not None)
                note("same leader, new epoch", old.leader == new.leader and old.epoch != new.epoch)
                note("move finished", old.target and not new.target)
                note("isr grew", len(new.isr) > len(old.isr))
                note("recovery begun", new.recovery and not old.recovery)
                note("recovery ended", old.recovery and not new.recovery)
                note("isr shrank", len(new.isr) < len(old.isr))
    rare = {what: count for what, count in seen.items() if count < 3}
    assert not [what for what in rare if not what.endswith("refused")], rare
    assert len([what for what in seen if what.endswith("applied")]) == 16, seen


@given(st.integers(0, 1 << 32), st.integers(0, 60))
@settings(max_examples=25, deadline=None)
def test_a_replica_that_joins_by_a_dump_goes_the_same_way(seed: int, cut: int) -> None:
    rng = Random(seed)
    one = ClusterState("c")
    other: ClusterState | None = None
    commands: list[Command] = [register(node_id) for node_id in (3, 1, 2, 5)]
    for index in range(1, 90):
        command = commands.pop(0) if commands else random_command(one, rng)
        if index == cut:
            other = load(dump(one))
        answers = []
        for state in (one, other):
            if state is not None:
                try:
                    answers.append(apply(state, command, index))
                except RaftqError as error:
                    answers.append((error.code, str(error)))
        assert answers[0] == answers[-1]
    assert other is None or dump(one) == dump(other)


@pytest.mark.parametrize("seed", range(12))
def test_long_lives_keep_the_invariants(seed: int) -> None:
    model = metadatamodel.run(seed, 300)
    assert model.refused < 280
