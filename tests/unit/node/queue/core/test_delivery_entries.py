"""Ledger entries: round trips, and no exception but CorruptFile for any bytes."""

import random
from typing import get_args

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raftq.client.common.errors import CorruptFile
from raftq.node.queue.core import entries
from raftq.node.queue.core.entries import pack, unpack
from raftq.node.queue.core.group_delivery import DeliveryConfig, GroupDelivery


class OneLane:
    """A hundred records, all normal."""

    def next_run(self, lane: int, offset: int) -> tuple[int, int] | None:
        return (offset, 100) if lane == 2 and offset < 100 else None

    def count_from(self, lane: int, offset: int) -> int:
        return max(100 - offset, 0) if lane == 2 else 0


def new_group() -> GroupDelivery:
    return GroupDelivery("g", DeliveryConfig(), OneLane(), random.Random(1), 0, 0.0)


def one_of_each() -> list[entries.Entry]:
    group = new_group()
    kept: list[entries.Entry] = [entries.CreatedEntry("g", 0)]

    def do(entry):
        group.apply(entry)
        kept.append(entry)

    grants = group.lease(10, 1.0, "worker") + group.lease(5, 1.0, "other")
    kept.append(group.granted_entry(grants[:1], 1.0, "worker"))
    kept.append(group.granted_entry(grants[1:], 1.0, "other"))
    nonce = grants[0].nonce
    do(group.ack([(nonce, 2, 4)], 2.0))
    returned, _ = group.nack(nonce, 5, 7, 2.0)
    do(returned)
    do(group.extend(nonce, 8, 9, 2.0, 100.0))
    do(group.skip([(0, 40, 42)]))
    do(group.pause(True))
    do(group.state.snapshot())
    do(group.clip(80))
    do(entries.ClockEntry(None, 3.0, -1.5))
    do(group.reset(3))
    do(entries.DeletedEntry("g"))
    return kept


def test_each_kind_of_entry_survives_pack_and_unpack():
    kept = one_of_each()
    assert {type(entry) for entry in kept} == set(get_args(entries.Entry))
    assert unpack(pack(kept)) == kept


def test_an_empty_list_is_fine():
    assert unpack(pack([])) == []


PACKED = pack(one_of_each())


def damage(data, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    return bytes(
        changed[: data.draw(st.integers(0, len(raw)))] if data.draw(NOW_AND_THEN) else changed
    )


NOW_AND_THEN = st.integers(0, 9).map(lambda n: n == 0)


@given(data=st.data())
@settings(deadline=None, max_examples=400)
def test_flipped_bytes_give_entries_or_corrupt_file_and_nothing_else(data):
    try:
        found = unpack(damage(data, PACKED))
    except CorruptFile:
        return
    assert unpack(pack(found)) == found


class NoRecords:
    """A lane index that cannot say which records a damaged snapshot forgot."""

    def next_run(self, lane: int, offset: int) -> tuple[int, int] | None:
        return None

    def count_from(self, lane: int, offset: int) -> int:
        return 0


PACKED_SNAPSHOT = pack(
    [entry for entry in one_of_each() if isinstance(entry, entries.SnapshotEntry)]
)


@given(data=st.data())
@settings(deadline=None, max_examples=400)
def test_a_damaged_snapshot_is_refused_or_holds_together(data):
    group = GroupDelivery("g", DeliveryConfig(), NoRecords(), random.Random(1), 0, 0.0)
    try:
        for entry in unpack(damage(data, PACKED_SNAPSHOT)):
            if isinstance(entry, entries.SnapshotEntry) and entry.group == "g":
                group.apply(entry)
    except CorruptFile:
        assert group.state.snapshot() == new_group().state.snapshot()
        return
    group.check_invariants()
    assert unpack(pack([group.state.snapshot()])) == [group.state.snapshot()]


@given(st.binary(max_size=200))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x91\xc6\xff\xff\xff\xff")
@example(b"\xd6\xff\x00\x00\x00\x00")
@example(b"\x91" * 3000)
@settings(deadline=None, max_examples=300)
def test_random_bytes_are_refused_as_a_corrupt_file(raw):
    try:
        found = unpack(raw)
    except CorruptFile:
        return
    assert pack(found) == pack(unpack(pack(found)))


GRANT = (2, 0, 10, 1, 77, 30.0, 0.0, True)
GRANTED, SETTLED, RETURNED, EXTENDED, RESET, PAUSED, CREATED, DELETED, CLIPPED, SNAPSHOT, CLOCK = (
    range(1, 12)
)


@pytest.mark.parametrize(
    "entry",
    [
        7,
        (),
        (DELETED,),
        (99, "g"),
        (True, "g"),
        ("1", "g"),
        (DELETED, None),
        (DELETED, "g", 1),
        (CLIPPED, "g", 5),
        (RESET, "g", -1),
        (RESET, "g", 1 << 63),
        (RESET, "g", 1.0),
        (PAUSED, "g", 1),
        (CREATED, "x" * 5000, 0),
        (SETTLED, "g", 4, ()),
        (SETTLED, "g", 0, 5),
        (SETTLED, "g", 0, (5,)),
        (SETTLED, "g", 0, ((1, 2),)),
        (SETTLED, "g", 0, ((1, 5, 5),)),
        (SETTLED, "g", 0, ((1, 6, 5),)),
        (SETTLED, "g", 0, ((1, 0, (1 << 32) + 1),)),
        (RETURNED, "g", 0, ((0, 0, 1, 1, 1.0),)),
        (RETURNED, "g", 0, ((1, 0, 1, -1, 1.0),)),
        (RETURNED, "g", 0, ((1, 0, 1, 1, float("nan")),)),
        (RETURNED, "g", 0, ((1, 0, 1, 1, float("inf")),)),
        (EXTENDED, "g", ((1, 0, 1, "soon"),)),
        (GRANTED, "g", 0.0, 5, (GRANT,)),
        (GRANTED, "g", 0.0, "h", ((5, *GRANT[1:]),)),
        (GRANTED, "g", 0.0, "h", ((*GRANT[:3], 0, *GRANT[4:]),)),
        (GRANTED, "g", 0.0, "h", ((*GRANT[:2], 1 << 30, *GRANT[3:]),)),
        (GRANTED, "g", 0.0, "h", ((*GRANT[:7], 1),)),
        (SNAPSHOT, "g", ()),
        (SNAPSHOT, "g", ((0, ()), (0,) * 4, False, (0,) * 9, (), ())),
        (SNAPSHOT, "g", ((0, ()), (0,) * 5, False, (0,) * 8, (), ())),
        (SNAPSHOT, "g", (0, (0,) * 5, False, (0,) * 9, (), ())),
    ],
)
def test_an_entry_of_the_wrong_shape_is_refused(entry):
    with pytest.raises(CorruptFile):
        unpack(msgpack.packb([entry]))


def decoded(entry):
    (found,) = unpack(msgpack.packb([entry]))
    return found


@pytest.mark.parametrize(
    "follow_up",
    [
        (GRANTED, "g", 0.0, "h", ((2, 20, 30, 1, 77, 30.0, 0.0, True),)),
        (GRANTED, "g", 0.0, "h", ((2, 5, 15, 1, 78, 30.0, 0.0, True),)),
        (GRANTED, "g", 0.0, "h", ((2, 5, 6, 2, 78, 30.0, 0.0, False),)),
    ],
)
def test_a_grant_that_cannot_follow_is_refused(follow_up):
    group = new_group()
    group.apply(decoded((GRANTED, "g", 0.0, "h", (GRANT,))))
    before = group.state.snapshot()
    with pytest.raises(CorruptFile):
        group.apply(decoded(follow_up))
    assert group.state.snapshot() == before


WAIT = (2, 5, 8, 1, 0.0, 0.0)
LEASE = (77, "h", 2, 0, 5, 1, 0.0, 0.0, 30.0, ((0, 5),), ())


@pytest.mark.parametrize(
    ("settled", "waiting", "leases"),
    [
        ((0, ((1, 1 << 40),)), (), ()),
        ((6, ()), (WAIT,), ()),
        ((0, ()), (WAIT, (2, 7, 9, 1, 0.0, 0.0)), ()),
        ((0, ()), ((2, 4, 9, 1, 0.0, 0.0),), (LEASE,)),
        ((0, ()), ((2, 9, 11, 1, 0.0, 0.0),), ()),
        ((0, ()), (), (LEASE, LEASE)),
        ((0, ()), (), ((*LEASE[:9], (), ()),)),
        ((0, ()), (), ((*LEASE[:9], ((3, 6),), ()),)),
        ((0, ()), (), ((*LEASE[:9], ((3, 4), (1, 2)), ()),)),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_refused_and_changes_nothing(
    settled, waiting, leases
):
    group = new_group()
    group.apply(decoded((GRANTED, "g", 0.0, "h", (GRANT,))))
    before = group.state.snapshot()
    snapshot = (SNAPSHOT, "g", (settled, (10,) * 5, False, (0,) * 9, waiting, leases))
    entry = decoded(snapshot)
    with pytest.raises(CorruptFile):
        group.apply(entry)
    assert group.state.snapshot() == before
