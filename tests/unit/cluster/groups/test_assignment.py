"""The assignment of a group: complete, balanced, sticky, deterministic, and fast."""

import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.cluster.groups.assignment import Slot, assign

TOPICS = ("a", "b", "c", "d")
Wanted = dict[str, list[str]]


@st.composite
def situations(draw: st.DrawFn) -> tuple[Wanted, dict[str, int], dict[Slot, str]]:
    """Members with any subscriptions, and any owners before, also members that are gone."""
    members = [f"m{at}" for at in range(draw(st.integers(0, 7)))]
    topics = st.lists(st.sampled_from(TOPICS), max_size=4, unique=True)
    wanted = {member: draw(topics) for member in members}
    counts = {topic: draw(st.integers(0, 9)) for topic in TOPICS}
    owners = st.sampled_from([*members, "gone", None])
    current = {
        (topic, number): owner
        for topic, count in counts.items()
        for number in range(count + 1)  # one of them is not there any more
        if (owner := draw(owners)) is not None
    }
    return wanted, counts, current


def loads(wanted: Wanted, found: dict[Slot, str]) -> dict[str, int]:
    counted = Counter(found.values())
    return {member: counted[member] for member in wanted}


def improvement(wanted: Wanted, found: dict[Slot, str]) -> str | None:
    """A chain of moves that makes two counts more even, searched the slow way."""
    load = loads(wanted, found)
    for first in wanted:
        reached, todo = {first}, [first]
        while todo:
            member = todo.pop()
            topics = {topic for (topic, _), owner in found.items() if owner == member}
            for other in wanted:
                if other not in reached and topics & set(wanted[other]):
                    if load[other] <= load[first] - 2:
                        return f"{first} has {load[first]} and could pass on to {other}"
                    reached.add(other)
                    todo.append(other)
    return None


@settings(max_examples=400, deadline=None)
@given(situations())
def test_it_is_complete_balanced_and_gives_nobody_what_it_does_not_want(
    situation: tuple[Wanted, dict[str, int], dict[Slot, str]],
) -> None:
    wanted, counts, current = situation
    found = assign(wanted, counts, current)
    somebody = {topic for topics in wanted.values() for topic in topics}
    assert set(found) == {(t, n) for t in somebody for n in range(counts[t])}
    assert all(topic in wanted[member] for (topic, _), member in found.items())
    assert improvement(wanted, found) is None


@settings(max_examples=200, deadline=None)
@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_its_arguments_does_not_matter(
    situation: tuple[Wanted, dict[str, int], dict[Slot, str]], rng: random.Random
) -> None:
    wanted, counts, current = situation
    found = assign(wanted, counts, current)

    def shuffled(items: dict) -> dict:  # type: ignore[type-arg]
        pairs = list(items.items())
        rng.shuffle(pairs)
        return dict(pairs)

    mixed = {member: sorted(topics, reverse=True) for member, topics in wanted.items()}
    assert assign(shuffled(mixed), shuffled(counts), shuffled(current)) == found


@settings(max_examples=400, deadline=None)
@given(situations())
def test_what_is_assigned_well_stays_as_it_is(
    situation: tuple[Wanted, dict[str, int], dict[Slot, str]],
) -> None:
    wanted, counts, current = situation
    found = assign(wanted, counts, current)
    assert assign(wanted, counts, found) == found


def test_moves_that_others_made_useless_are_taken_back_too() -> None:
    wanted = {"m0": ["b", "c", "d"], "m1": [], "m2": [], "m3": [], "m4": ["c"], "m5": ["b", "d"]}
    counts = {"b": 4, "c": 9, "d": 4}
    found = assign(wanted, counts, {(topic, at): "m0" for topic in "bcd" for at in range(10)})
    assert assign(wanted, counts, found) == found


@settings(max_examples=400, deadline=None)
@given(situations())
def test_no_single_move_can_be_taken_back(
    situation: tuple[Wanted, dict[str, int], dict[Slot, str]],
) -> None:
    """A partition that its member might have kept has moved only where that made counts even."""
    wanted, counts, current = situation
    found = assign(wanted, counts, current)
    load = loads(wanted, found)
    for slot, member in found.items():
        before = current.get(slot)
        if before != member and before in wanted and slot[0] in wanted[before]:
            assert load[before] >= load[member], f"{slot} moved from {before} to {member}"


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(0, 60),
    st.lists(st.integers(0, 14), min_size=60, max_size=60),
)
def test_with_equal_subscriptions_the_fewest_possible_partitions_move(
    members: int, count: int, owners: list[int]
) -> None:
    wanted = {f"m{at:02}": ["a"] for at in range(members)}
    current = {("a", at): f"m{owners[at]:02}" for at in range(count)}
    found = assign(wanted, {"a": count}, current)
    load = sorted(loads(wanted, found).values())
    assert not load or load[-1] - load[0] <= 1
    # Whoever had most keeps the larger share.
    low, larger = divmod(count, members)
    had = sorted((sum(o == m for o in current.values()) for m in wanted), reverse=True)
    shares = [low + 1] * larger + [low] * (members - larger)
    kept = sum(min(one, share) for one, share in zip(had, shares, strict=True))
    assert sum(found[slot] == current[slot] for slot in found) == kept


def test_a_new_member_takes_a_fair_share_and_no_more() -> None:
    eight = {f"m{at}": ["t"] for at in range(8)}
    before = assign(eight, {"t": 64}, {})
    after = assign({**eight, "new": ["t"]}, {"t": 64}, before)
    moved = {slot for slot in after if after[slot] != before[slot]}
    assert len(moved) == 7
    assert all(after[slot] == "new" for slot in moved)


def test_the_partitions_of_each_topic_are_spread_too() -> None:
    wanted = {f"m{at}": ["hot", "cold"] for at in range(4)}
    found = assign(wanted, {"hot": 8, "cold": 8}, {})
    for topic in ("hot", "cold"):
        counted = Counter(member for (one, _), member in found.items() if one == topic)
        assert set(counted.values()) == {2}, topic


@pytest.mark.parametrize("kind", ["cold", "skewed", "changed", "mixed cold", "mixed skewed"])
def test_two_hundred_members_and_a_thousand_partitions_take_no_time(kind: str) -> None:
    rng = random.Random(kind)
    members = [f"m{at:03}" for at in range(200)]
    counts = {f"t{at}": 10 for at in range(100)} if "mixed" in kind else {"t": 1000}
    wanted = {
        one: rng.sample(sorted(counts), rng.choice((1, 5, 30, 100)) if "mixed" in kind else 1)
        for one in members
    }
    current: dict[Slot, str] = {}
    if kind == "changed":
        current = assign(wanted, counts, {})
        wanted = {one: topics for one, topics in wanted.items() if rng.random() < 0.8}
    if "skewed" in kind:
        wanted["m000"] = sorted(counts)
        current = {(t, number): "m000" for t, count in counts.items() for number in range(count)}
    took = []
    for _ in range(5):
        began = time.process_time()
        assign(wanted, counts, current)
        took.append(time.process_time() - began)
    assert min(took) < 0.05, took
