"""Who has fallen silent."""

from raftq.node.hearing import Hearing

ALIVE = {1: 11, 2: 22, 3: 33}


def test_a_living_node_that_asks_for_nothing_is_silent_until_it_asks_again() -> None:
    hearing = Hearing(1, 3.0)
    hearing.heard(2, 10.0)
    hearing.heard(3, 10.0)
    assert not hearing.changed(ALIVE, 13.0)
    hearing.heard(3, 13.1)
    assert hearing.changed(ALIVE, 13.2)
    assert hearing.silent == {2}
    assert not hearing.changed(ALIVE, 14.0)
    hearing.heard(2, 14.1)
    assert hearing.changed(ALIVE, 14.2)
    assert not hearing.silent


def test_the_dead_are_not_silent_and_neither_is_this_node() -> None:
    hearing = Hearing(1, 3.0)
    assert hearing.changed(ALIVE, 100.0)
    assert hearing.silent == {2, 3}
    assert hearing.changed({1: 11, 3: 33}, 100.0)
    assert hearing.silent == {3}
