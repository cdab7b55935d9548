"""The protocol of docs/PROTOCOL.md holds in every state of these scopes, and needs its rules.

`RAFTQ_MODEL=deep` also visits scopes that take minutes to hours each, and wanders for longer.
"""

import os
import random

import pytest
from explorer import Found, explore, wander
from isr_model import NODES, RULES, Left, Model, Scope

DEEP = os.environ.get("RAFTQ_MODEL") == "deep"
BEHIND = (0, 1)
"""An isr that node 2 is not in yet."""
SCOPES = {
    "changes of the isr": Scope(Left(records=1, proposals=2, fences=1, elections=1), isr=BEHIND),
    "changes of a small isr": Scope(
        Left(records=1, proposals=1, fences=1, returns=1, elections=1), 2, BEHIND
    ),
    "two moves": Scope(Left(records=1, proposals=2, moves=2)),
    "a lost tail": Scope(Left(records=1, proposals=1, crashes=1, fences=1, tails=1), isr=BEHIND),
    "a lost tail and another fsync": Scope(
        Left(records=1, crashes=2, tails=1, alters=1), 2, BEHIND
    ),
    "a lost disk and two moves": Scope(Left(proposals=1, moves=2, crashes=1, wipes=1), isr=BEHIND),
    "a lost disk": Scope(Left(records=1, proposals=2, crashes=1, wipes=1), isr=BEHIND),
}
DEEPER = {
    "moves and a fence": Scope(Left(records=1, proposals=2, moves=2, fences=1)),
    "moves and a lost tail": Scope(Left(records=1, proposals=1, moves=2, crashes=1, tails=1)),
    "all of it once": Scope(Left(1, 1, 1, 1, 1, 1, 1, 1, 0, 1), isr=BEHIND),
}
WITHOUT = {
    "epoch": (Left(records=1, proposals=1, fences=1, elections=1), 1, BEHIND),
    "version": (Left(records=1, proposals=2, moves=1), 1, BEHIND),
    "proposed": (Left(records=1, proposals=1, fences=1), 1, BEHIND),
    "assignment": (Left(records=1, proposals=1, moves=2), 1, NODES),
    "resubscribe": (Left(moves=2), 1, NODES),
    "promised": (Left(records=1, crashes=1, fences=1, tails=1, alters=1), 2, BEHIND),
    "longest": (Left(proposals=1, crashes=1, wipes=1), 1, BEHIND),
    "incarnation": (Left(records=2, crashes=1, tails=1), 1, BEHIND),
}
UNHEARD = "the leader never hears"
LOST = "is in the isr without everything that was acknowledged"
MUCH = Left(3, 4, 3, 3, 2, 2, 3, 2, 1, 2)


def without(rule: str) -> Found:
    return explore(Model(Scope(*WITHOUT[rule]), frozenset(RULES) - {rule}), 200_000)


@pytest.mark.full
@pytest.mark.parametrize("name", [*SCOPES, *(DEEPER if DEEP else ())])
def test_nothing_is_lost_and_everything_comes_to_rest_with_all_rules(name: str) -> None:
    found = explore(Model((SCOPES | DEEPER)[name]), 50_000_000 if DEEP else 250_000)
    assert not found.problem, str(found)
    assert found.states > 10_000, "a scope in which hardly anything happens shows nothing"


@pytest.mark.parametrize("rule", WITHOUT)
def test_each_rule_is_needed(rule: str) -> None:
    found = without(rule)
    assert (UNHEARD if rule == "resubscribe" else LOST) in found.problem, str(found)


def test_the_shortest_way_to_a_loss_is_told_in_words() -> None:
    """With nobody to be told, the longest of the copies that are left is cut to another."""
    story = str(without("longest"))
    assert [line.strip() for line in story.splitlines()[1::2]][-2:] == [
        "node 0 crashes",
        "node 0 restarts with nothing",
    ]


@pytest.mark.full
def test_deleting_without_confirmation_loses_copies_but_nothing_acknowledged() -> None:
    scope = Scope(Left(records=1, proposals=1, moves=2))
    assert not explore(Model(scope, frozenset(RULES) - {"confirmed"}), 100_000).problem


def test_a_process_vouches_for_the_log_it_found_only_when_that_is_synced() -> None:
    """Else: killed with a tail that only the kernel has, fsync altered to `always`, registered, and
    the power cut before the log was synced. What it is judged by then is `always`."""
    scope = Scope(Left(records=1, crashes=2, tails=1, alters=1), 2, BEHIND, vouches_late=False)
    found = explore(Model(scope), 100_000)
    assert LOST in found.problem, str(found)


def test_nobody_is_moved_away_while_the_longest_copy_is_looked_for() -> None:
    """A second move puts out what the first one had not brought in sync: that may be it."""
    scope = SCOPES["a lost disk and two moves"]._replace(moves_wait=False)
    found = explore(Model(scope), 100_000)
    assert LOST in found.problem, str(found)


def test_random_ways_through_more_than_can_be_visited() -> None:
    for seed in range(20_000 if DEEP else 200):
        scope = Scope(MUCH, 1 + seed % 2, NODES if seed % 4 < 2 else BEHIND)
        found = wander(Model(scope), random.Random(seed), 150)
        assert not found.problem, f"seed {seed}: {found}"
