"""Commands survive their encoding, and nothing else is taken for one."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.client.common.errors import InvalidArgument, RaftqError, UnknownFormat
from raftq.cluster.metadata.commands import (
    COMMAND_BYTES_MAX,
    AddPartitions,
    AllocateProducerIds,
    AlterTopic,
    ChangeIsr,
    Command,
    Confirm,
    CreateTopic,
    DeleteTopic,
    ElectPreferred,
    EnableQueues,
    FenceNode,
    InitNamedProducer,
    MoveReplicas,
    Recover,
    RegisterNode,
    RemoveNode,
    Resign,
    SetDraining,
    TellEnds,
    command_classes,
    decode_command,
    encode_command,
)

EXAMPLES: list[Command] = [
    RegisterNode(1, "10.0.0.1", 7070, 8080, "10.0.0.1:7000", "r1", 1 << 61, "tail", 5, False, 5),
    FenceNode(1, 7),
    SetDraining(1, True, False, True),
    RemoveNode(3),
    CreateTopic("orders", 6, 3, {"min_insync": 2, "fsync": "always"}),
    AlterTopic("orders", {"retention_ms": None}),
    DeleteTopic("orders"),
    AddPartitions("orders", 12),
    ChangeIsr(5, 0, 1, 4, 9, ((1, 1 << 61), (2, 8))),
    Resign(5, 0, 1, 4),
    ElectPreferred(((5, 0), (5, 1))),
    MoveReplicas("orders", 0, (3, 1, 2)),
    AllocateProducerIds(1, 1000),
    InitNamedProducer("billing"),
    EnableQueues(5),
    Confirm(),
    TellEnds(2, 1 << 61, ((5, 0, 9, 4, 900), (5, 1, 9, 4, 900, 3, 20, 0, 0))),
    Recover(5, 0, 9),
]


def test_every_kind_has_an_example_that_survives_its_encoding() -> None:
    assert [type(one) for one in EXAMPLES] == list(command_classes())
    for one in EXAMPLES:
        assert decode_command(encode_command(one)) == one


def test_the_bytes_of_a_command_stay_as_they_are_in_logs_already_written() -> None:
    assert encode_command(FenceNode(1, 7)) == msgpack.packb([2, 2, 1, 7])
    isr = msgpack.packb([2, 9, 5, 0, 1, 4, 9, [[1, 1 << 61], [2, 8]]])
    assert encode_command(EXAMPLES[8]) == isr


@pytest.mark.parametrize("value", [[1, 1], [3, 1, 5], [2, 200], [2, "x"], [0, 2, 1, 7]])
def test_an_unknown_version_or_kind_is_named_as_such(value: list[Any]) -> None:
    with pytest.raises(UnknownFormat, match=r"version|kind"):
        decode_command(msgpack.packb(value))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([2, 2, 1], "1 fields in place of 2"),
        ([2, 2, 1, 7, 8], "3 fields in place of 2"),
        ([2, 2, -1, 7], "FenceNode.node_id"),
        ([2, 2, True, 7], "FenceNode.node_id"),
        ([2, 2, 1, 1 << 63], "FenceNode.incarnation"),
        ([2, 5, "t" * 300, 1, 1, {}], "CreateTopic.topic"),
        ([2, 5, "t", 1, 1, {"a": [1]}], "CreateTopic.config"),
        (
            [2, 9, 5, 0, 1, 4, 9, [[1, 2, 3]]],
            r"ChangeIsr.isr\[0\]: Expected `array` of length 2, got 3",
        ),
        ([2, 10, [[1]]], r"ElectPreferred.partitions\[0\]: .* got 1"),
        ([2, 11, "t", 0, [1] * 65], "MoveReplicas.replicas: Expected `array` of length <= 64"),
        ([2, 12, 1, 0], "AllocateProducerIds.count"),
        ([2, 16, 1, 1, [[5, 0, 9, 4]]], "not a partition and pairs of ends"),
        ([2], "not a list of version, kind and fields"),
        ({}, "not a list of version, kind and fields"),
        (7, "not a list of version, kind and fields"),
    ],
)
def test_a_bad_command_is_refused_by_the_name_of_its_field(value: Any, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        decode_command(msgpack.packb(value))


@pytest.mark.parametrize(
    "command",
    [
        FenceNode(-1, 1),
        CreateTopic("\ud800", 1, 1, {}),
        CreateTopic("t", 1, 1, {"retention_ms": 1 << 70}),
        MoveReplicas("t", 0, tuple(range(65))),
    ],
)
def test_a_command_that_nobody_could_read_is_not_encoded(command: Command) -> None:
    with pytest.raises(InvalidArgument, match=type(command).__name__):
        encode_command(command)


def test_a_huge_command_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidArgument, match="too large"):
        decode_command(bytes(COMMAND_BYTES_MAX + 1))


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_with_a_raftq_error(data: bytes) -> None:
    try:
        decode_command(data)
    except RaftqError:
        return


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=300, deadline=None)
def test_a_command_with_a_flipped_byte_is_read_or_refused(command: Command, data: Any) -> None:
    packed = bytearray(encode_command(command))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] = data.draw(st.integers(0, 255))
    try:
        found = decode_command(bytes(packed))
    except RaftqError:
        return
    assert decode_command(encode_command(found)) == found
