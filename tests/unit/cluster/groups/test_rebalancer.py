"""Revoke before assign: one partition's way from owner to owner, and many at random."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.cluster.groups.rebalancer import Ownership

P = ("t", 0)


def owned_by(member: str, generation: int = 1) -> Ownership:
    ownership = Ownership(generation - 1)
    ownership.retarget(generation, {P: member})
    return ownership


def test_a_free_partition_is_given_at_once() -> None:
    ownership = owned_by("a")
    assert ownership.may_own("a") == {P: 1}
    assert ownership.is_settled
    assert not ownership.is_promised("a")


def test_a_partition_waits_for_its_owner_to_let_go() -> None:
    ownership = owned_by("a")
    ownership.retarget(2, {P: "b"})
    assert ownership.may_own("a") == {}
    assert ownership.may_own("b") == {}
    assert ownership.is_promised("b")
    assert ownership.let_go("a", 2, [P]) == []
    assert ownership.let_go("b", 2, []) == []
    found = ownership.let_go("a", 2, [])
    ownership.release("a", found)
    assert ownership.may_own("b") == {P: 2}
    assert ownership.is_settled
    ownership.check()


def test_a_heartbeat_that_does_not_know_of_the_revocation_lets_go_of_nothing() -> None:
    """It may have been sent before its member took what it had been given."""
    ownership = owned_by("a", 4)
    ownership.retarget(5, {P: "b"})
    assert ownership.let_go("a", 4, []) == []
    assert ownership.let_go("a", 0, []) == []
    # What should be had is kept, even by a member that does not name it yet.
    assert owned_by("a").let_go("a", 1, []) == []


def test_an_owner_that_never_let_go_keeps_its_epoch_when_the_partition_comes_back() -> None:
    ownership = owned_by("a")
    ownership.retarget(2, {P: "b"})
    ownership.retarget(3, {P: "a"})
    assert ownership.may_own("a") == {P: 1}
    assert not ownership.is_promised("b")
    # A heartbeat that was on its way since the second generation changes nothing now, ...
    assert ownership.let_go("a", 2, []) == []
    # ... nor when it is revoked once more: it has been taken back in between.
    ownership.retarget(4, {P: "b"})
    assert ownership.let_go("a", 3, []) == []
    assert ownership.let_go("a", 4, []) == [P]


def test_what_a_lost_member_had_goes_on_at_once() -> None:
    ownership = owned_by("a")
    ownership.retarget(2, {P: "b"})
    ownership.drop("a")
    assert ownership.may_own("b") == {P: 2}
    ownership.drop("b")
    assert ownership.owner == {}
    assert ownership.target == {}
    ownership.retarget(3, {P: "c"})
    assert ownership.may_own("c") == {P: 3}


def test_a_partition_that_nobody_should_have_is_let_go_of_too() -> None:
    ownership = owned_by("a")
    ownership.retarget(2, {P: None})
    assert not ownership.is_settled
    ownership.release("a", ownership.let_go("a", 2, []))
    assert ownership.is_settled
    assert ownership.owner == {}


def test_another_process_of_a_member_gets_newer_epochs_and_nothing_that_is_revoked() -> None:
    q = ("t", 1)
    ownership = Ownership()
    ownership.retarget(1, {P: "a", q: "a"})
    ownership.retarget(2, {q: "b"})
    ownership.renew("a", 3)
    assert ownership.may_own("a") == {P: 3}
    assert ownership.may_own("b") == {q: 3}
    ownership.check()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 80))
def test_owner_epochs_grow_and_nobody_shares_under_any_sequence(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    members = ["a", "b", "c", "d"]
    slots = [("t", number) for number in range(5)]
    ownership = Ownership()
    had: dict[tuple[str, int], tuple[str, int]] = {}
    for _ in range(steps):
        member = rng.choice(members)
        verb = rng.choice(("retarget", "retarget", "let go", "let go", "drop", "renew"))
        if verb == "retarget":
            some = rng.sample(slots, rng.randint(0, 5))
            changes = {slot: rng.choice([*members, None]) for slot in some}
            ownership.retarget(ownership.generation + 1, changes)
        elif verb == "let go":
            named = rng.sample(slots, rng.randint(0, 5))
            generation = ownership.generation - rng.choice((0, 0, 1, 2))
            ownership.release(member, ownership.let_go(member, generation, named))
        elif verb == "drop":
            ownership.drop(member)
        else:
            ownership.renew(member, ownership.generation + 1)
        ownership.check()
        for slot, (owner, epoch) in ownership.owner.items():
            before = had.get(slot, (owner, 0))
            assert epoch > before[1] or (owner, epoch) == before, slot
            had[slot] = (owner, epoch)
        seen = [slot for one in members for slot in ownership.may_own(one)]
        assert len(seen) == len(set(seen))
