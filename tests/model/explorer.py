"""Visits all states of a model, or a few at random, and tells the way to what is wrong. (Core.)

All states of a scope are found breadth first, so the way that is told is the shortest. Hashes of
64 bits stand for the states that were seen: two of a million are the same once in 30 million runs.
"""

import random
from typing import NamedTuple

from isr_model import Model


class Found(NamedTuple):
    states: int
    problem: str = ""
    way: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join([f"{self.problem or 'nothing'} ({self.states} states)", *self.way])


def explore(model: Model, states_max: int = 2_000_000) -> Found:
    """Breadth first through all states; the shortest way to a violation, if there is one."""
    first = model.first()
    parents = {hash(first): 0}
    layer, following = [first], []
    while layer:
        for state in layer:
            here, rests = hash(state), True
            for _, plain, after in model.steps(state):
                rests = rests and not plain
                if (key := hash(after)) in parents:
                    continue
                parents[key] = here
                following.append(after)
                if problem := model.violation(after):
                    return Found(len(parents), problem, way_to(model, parents, key))
            if rests and (problem := model.unrest(state)):
                return Found(len(parents), problem, way_to(model, parents, here))
        assert len(parents) < states_max, f"more than {states_max} states"
        layer, following = following, []
    return Found(len(parents))


def way_to(model: Model, parents: dict[int, int], last: int) -> tuple[str, ...]:
    keys, state, way = [last], model.first(), []
    while keys[-1]:
        keys.append(parents[keys[-1]])
    for key in keys[-3::-1]:
        what, state = next((what, one) for what, _, one in model.steps(state) if hash(one) == key)
        way.append(f"{what[0].format(*what[1:])}\n      {state.describe()}")
    return tuple(way)


def wander(model: Model, rng: random.Random, steps: int) -> Found:
    """One way at random, for scopes that are too large to see all of."""
    state, way = model.first(), []
    for _ in range(steps):
        found = list(model.steps(state))
        by_itself = [step for step in found if step[1]]
        if not by_itself and (problem := model.unrest(state)):
            return Found(len(way), problem, tuple(way))
        if not found:
            break
        what, _, state = rng.choice(by_itself if by_itself and rng.random() < 0.5 else found)
        way.append(f"{what[0].format(*what[1:])}\n      {state.describe()}")
        if problem := model.violation(state):
            return Found(len(way), problem, tuple(way))
    return Found(len(way))
