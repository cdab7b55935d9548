"""The dump of a state: the same bytes everywhere, and nothing but a dump is loaded."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import metadatamodel
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.client.common.errors import CorruptFile, RaftqError, UnknownFormat
from raftq.cluster.metadata.apply import dump, load
from raftq.cluster.metadata.state import ClusterState

PROGRAM = """
import hashlib, metadatamodel
from raftq.cluster.metadata.apply import dump
for seed in range(3):
    print(hashlib.sha256(dump(metadatamodel.run(seed, 150).state)).hexdigest())
"""


@pytest.fixture(scope="module")
def lived() -> ClusterState:
    """A state with everything in it: moves, dead nodes, named producers, several topics."""
    for seed in range(100):
        state = metadatamodel.run(seed, 150).state
        found = state.summary()
        if found.moves and found.topics > 1 and found.leaderless and state.producers:
            return state
    raise AssertionError("no such state among the seeds")


def test_a_state_survives_its_dump(lived: ClusterState) -> None:
    again = load(dump(lived))
    assert again == lived
    assert dump(again) == dump(lived)
    assert list(again.nodes) == list(lived.nodes)
    assert list(again.topics) == list(lived.topics)


def test_an_empty_state_survives_its_dump() -> None:
    assert load(dump(ClusterState("c"))) == ClusterState("c")


def test_the_same_commands_give_the_same_bytes_under_any_hash_seed() -> None:
    here = "".join(
        hashlib.sha256(dump(metadatamodel.run(seed, 150).state)).hexdigest() + "\n"
        for seed in range(3)
    )
    path = str(Path(metadatamodel.__file__).parent)
    for hash_seed in ("0", "1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == here


def test_another_format_is_named_as_such() -> None:
    with pytest.raises(UnknownFormat, match="format 4"):
        load(msgpack.packb([4, "from the future"]))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x00", msgpack.packb([]), msgpack.packb({})])
def test_what_is_no_dump_is_a_corrupt_file(data: bytes) -> None:
    with pytest.raises(CorruptFile):
        load(data)


def parts(state: ClusterState) -> list[Any]:
    value: list[Any] = msgpack.unpackb(dump(state))
    return value


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((6, 0, 4, 0, 0), []),  # no replicas
        ((6, 0, 4, 0, 1), []),  # no isr
        ((6, 0, 4, 0, 1), [77]),  # isr outside the replicas
        ((6, 0, 4, 0, 2), 77),  # a leader out of sync
        ((6, 0, 4, 0, 3), -1),  # epoch
        ((6, 0, 4, 0, 5), []),  # target
        ((6, 0, 4, 0, 5), "ab"),
        ((6, 0, 4), []),  # no partitions
        ((6, 0, 0), "a/b"),  # name
        ((6, 0, 1), 1 << 40),  # an id that was not given
        ((6, 0, 2), {"nothing": 1}),  # settings
        ((6, 0, 2), [1]),
        ((5, 0, 0), "one"),  # a node's id
        ((5, 0), [1]),
        ((3,), None),
        ((7,), [["p"]]),
    ],
)
def test_a_dump_that_contradicts_itself_is_not_loaded(
    lived: ClusterState, place: tuple[int, ...], value: Any
) -> None:
    whole: Any = parts(lived)
    inner = whole
    for at in place[:-1]:
        inner = inner[at]
    inner[place[-1]] = value
    with pytest.raises(CorruptFile):
        load(msgpack.packb(whole))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_flipped_byte_gives_a_state_or_a_raftq_error(lived: ClusterState, data: Any) -> None:
    packed = bytearray(dump(lived))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = load(bytes(packed))
    except RaftqError:
        return
    assert load(dump(found)) == found
