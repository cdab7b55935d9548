"""The bytes of everything that a coordinator writes down about its groups; they never change."""

import pytest

from raftq.client.common.errors import CorruptBatch, UnknownFormat
from raftq.cluster.groups.records import (
    Beat,
    GroupDeleted,
    GroupKept,
    GroupRecord,
    MemberGone,
    MemberPut,
    Raised,
    Released,
    Retargeted,
    SnapshotBegun,
    SnapshotEnded,
    pack,
    unpack,
)

MEMBER = ("m-1", 3, "inst", "proc", "client", "10.0.0.1", 30000)
GOLDEN: list[tuple[GroupRecord, str]] = [
    (
        MemberPut("g", "stream", 7, *MEMBER, ("a", "b"), "x*"),
        "9d01a167a673747265616d07a36d2d3103a4696e7374a470726f63a6636c69656e74a831302e302e302e31"
        "cd753092a161a162a2782a",
    ),
    (MemberGone("g", "m-1", "left"), "9402a167a36d2d31a46c656674"),
    (
        Retargeted("g", 8, {"m-1": {"a": (0, 1)}, "": {"b": (300,)}}),
        "9403a1670882a36d2d3181a161920001a081a16291cd012c",
    ),
    (Released("g", "m-1", {"a": (0, 2)}), "9404a167a36d2d3181a161920002"),
    (GroupDeleted("g", 70000), "9305a167ce00011170"),
    (Beat(), "9106"),
    (SnapshotBegun(9), "920709"),
    (
        GroupKept(
            "g",
            "queue",
            7,
            ((*MEMBER, ("a",), ""),),
            {"a": ((0, 0, -1, 7, 0), (1, -1, 0, 6, 1700000000000))},
        ),
        "9608a167a57175657565079199a36d2d3103a4696e7374a470726f63a6636c69656e74a831302e302e302e31"
        "cd753091a161a081a16192950000ff07009501ff0006cf0000018bcfe56800",
    ),
    (SnapshotEnded(), "9109"),
    (Raised("g", 11), "930aa1670b"),
]


@pytest.mark.parametrize(("record", "golden"), GOLDEN)
def test_a_record_keeps_its_bytes(record: GroupRecord, golden: str) -> None:
    assert pack(record).hex() == golden
    assert unpack(bytes.fromhex(golden)) == record


def test_a_record_of_a_later_version_is_an_unknown_format() -> None:
    with pytest.raises(UnknownFormat):
        unpack(bytes.fromhex("920c01"))


@pytest.mark.parametrize("damaged", ["", "c1", "05", "9304a167", "9305a167ce000111"])
def test_bytes_that_are_no_record_are_a_corrupt_batch(damaged: str) -> None:
    with pytest.raises(CorruptBatch):
        unpack(bytes.fromhex(damaged))
