"""Who has fallen silent."""

from raftq.node.replication.liveness import FollowerLiveness

ALIVE = {1: 11, 2: 22, 3: 33}


def test_a_living_node_that_asks_for_nothing_is_silent_until_it_asks_again() -> None:
    liveness = FollowerLiveness(1, 3.0)
    liveness.note_request(2, 10.0)
    liveness.note_request(3, 10.0)
    assert not liveness.update(ALIVE, 13.0)
    liveness.note_request(3, 13.1)
    assert liveness.update(ALIVE, 13.2)
    assert liveness.unreachable == {2}
    assert not liveness.update(ALIVE, 14.0)
    liveness.note_request(2, 14.1)
    assert liveness.update(ALIVE, 14.2)
    assert not liveness.unreachable


def test_the_dead_are_not_silent_and_neither_is_this_node() -> None:
    liveness = FollowerLiveness(1, 3.0)
    assert liveness.update(ALIVE, 100.0)
    assert liveness.unreachable == {2, 3}
    assert liveness.update({1: 11, 3: 33}, 100.0)
    assert liveness.unreachable == {3}
