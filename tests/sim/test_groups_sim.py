"""Groups under random faults: no partition has two owners, and everything comes to rest.

`RAFTQ_SIM_SEED=17` runs one seed, `RAFTQ_SIM_SEEDS=5000` that many; `RAFTQ_SIM_STORY=1` prints what
happened.
"""

import os

import pytest
from groupsim import simulate
from replay import assert_same_trace_elsewhere, replayable, seed_groups

SEEDS_PER_TEST = 25
TEST = "test_no_partition_has_two_owners_and_the_group_comes_to_rest"


@pytest.mark.parametrize("group", seed_groups(300, SEEDS_PER_TEST))
def test_no_partition_has_two_owners_and_the_group_comes_to_rest(group: list[int]) -> None:
    takeovers = moves = 0
    for seed in group:
        with replayable(TEST, seed):
            world = simulate(seed, story="RAFTQ_SIM_STORY" in os.environ)
        takeovers += world.takeovers
        moves += world.moves
    if len(group) == SEEDS_PER_TEST:
        assert takeovers > 1.5 * len(group), "coordinators were replaced"
        assert moves > 10 * len(group), "partitions changed hands"


def test_the_same_seed_gives_the_same_trace() -> None:
    """Also in another process, where sets of strings have another order."""
    mine = simulate(3).loop.trace_hash()
    assert_same_trace_elsewhere("simulate(3)", "groupsim", mine)
    assert simulate(4).loop.trace_hash() != mine
