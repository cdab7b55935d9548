"""Where replicas go."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadatamodel import register
from msgspec import structs

from raftq.cluster.metadata.apply import apply
from raftq.cluster.metadata.commands import CreateTopic, FenceNode, MoveReplicas, SetDraining
from raftq.cluster.metadata.placement import Load, place
from raftq.cluster.metadata.state import ClusterState


def cluster(*racks: str) -> ClusterState:
    """One node per rack named, numbered from 1."""
    state = ClusterState("c")
    for node_id, rack in enumerate(racks, 1):
        apply(state, structs.replace(register(node_id), rack=rack), node_id)
    return state


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("replication", [1, 2, 3])
def test_leaders_are_even_and_replicas_nearly(nodes: int, replication: int) -> None:
    if replication > nodes:
        return
    found = place(cluster(*map(str, range(nodes))), 4 * nodes, replication)
    leaders = Counter(one[0] for one in found)
    replicas = Counter(node for one in found for node in one)
    assert max(leaders.values()) - min(leaders.values()) <= 1
    assert max(replicas.values()) - min(replicas.values()) <= 2
    assert all(len(set(one)) == replication for one in found)


def test_the_followers_of_one_leader_share_its_partitions_when_it_is_gone() -> None:
    found = place(cluster("a", "b", "c"), 12, 3)
    for leader in (1, 2, 3):
        seconds = Counter(one[1] for one in found if one[0] == leader)
        assert sorted(seconds.values()) == [2, 2]


def test_copies_are_in_different_racks_while_there_are_enough() -> None:
    racks = ("a", "a", "a", "b", "b", "c")
    for one in place(cluster(*racks), 30, 3):
        assert sorted(racks[node - 1] for node in one) == ["a", "b", "c"]
    for one in place(cluster("a", "a", "a", "b"), 12, 3):
        assert 4 in one


def test_hosts_count_where_no_rack_is_given() -> None:
    state = ClusterState("c")
    for node_id, host in enumerate(("x", "x", "y"), 1):
        apply(state, structs.replace(register(node_id), host=host), node_id)
    assert all(3 in one for one in place(state, 6, 2))


def test_nodes_that_are_down_or_drain_are_the_last_choice() -> None:
    state = cluster("a", "b", "c", "d", "e", "f")
    apply(state, FenceNode(1, 1), 7)
    apply(state, SetDraining(2, True), 8)
    apply(state, SetDraining(3, True, True), 9)
    assert all(set(one) == {4, 5, 6} for one in place(state, 6, 3))
    assert all(set(one) == {4, 5, 6, 2} and one[3] == 2 for one in place(state, 3, 4))
    assert all(one[3:] == (2, 1) for one in place(state, 3, 5))
    assert all(one[3:] == (2, 1, 3) for one in place(state, 3, 6))


def test_a_new_topic_makes_up_for_what_is_uneven() -> None:
    state = cluster("a", "b", "c")
    apply(state, CreateTopic("t", 1, 1), 4)
    apply(state, CreateTopic("u", 1, 1), 5)
    apply(state, CreateTopic("v", 1, 1), 6)
    assert sorted(state.topics[name].partitions[0].leader or 0 for name in "tuv") == [1, 2, 3]


def test_a_node_that_joins_gets_what_comes_next() -> None:
    state = cluster("a", "b")
    apply(state, CreateTopic("t", 6, 1), 3)
    apply(state, register(3), 4)
    assert place(state, 3, 1) == [(3,), (3,), (3,)]


def test_a_move_under_way_counts_where_it_goes() -> None:
    state = cluster("a", "b", "c")
    apply(state, CreateTopic("t", 2, 1), 4)
    apply(state, MoveReplicas("t", 0, (3,)), 5)
    load = Load(state)
    assert load.replicas == {1: 0, 2: 1, 3: 1}


def test_a_replacement_keeps_order_and_racks() -> None:
    state = cluster("a", "b", "c", "b", "c")
    apply(state, CreateTopic("t", 1, 3), 6)
    apply(state, MoveReplicas("t", 0, (1, 2, 3)), 7)
    one = state.topics["t"].partitions[0]
    one = replace(one, replicas=(1, 2, 3), target=None)
    assert Load(state).replacement(one, 2) == (1, 4, 3)
    assert Load(state).replacement(one, 2, unwanted=(4,)) == (1, 5, 3)
    assert Load(state).replacement(one, 2, unwanted=(4, 5)) is None


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.integers(1, 20), st.data())
@settings(max_examples=60, deadline=None)
def test_placement_does_not_depend_on_the_order_of_registration(
    racks: list[str], partitions: int, data: st.DataObject
) -> None:
    state = cluster(*racks)
    replication = data.draw(st.integers(1, len(racks)))
    order = data.draw(st.permutations(list(state.nodes)))
    other = ClusterState("c", {node_id: state.nodes[node_id] for node_id in order})
    assert place(state, partitions, replication) == place(other, partitions, replication)
