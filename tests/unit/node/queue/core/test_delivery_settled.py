"""SettledOffsets against a plain set, and what its dump may look like."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Decoder

from raftq.client.common.errors import CorruptFile
from raftq.node.queue.core.codec import encode_stored, stored_decoder
from raftq.node.queue.core.settled_offsets import CHUNK, FULL, SettledDump, SettledOffsets

decode = stored_decoder(Decoder(SettledDump), "settled offsets")

SPAN = 4 * CHUNK

offsets = st.integers(0, SPAN)
lengths = st.one_of(st.integers(1, 5), st.integers(1, 3 * CHUNK), st.just(CHUNK))
commands = st.one_of(
    st.tuples(st.just("add"), offsets, lengths),
    st.tuples(st.just("add"), offsets.map(lambda n: n // CHUNK * CHUNK), lengths),
    st.tuples(st.just("truncate"), offsets, st.just(0)),
    st.tuples(st.just("fill"), st.just(0), lengths),
)


def assert_equal(settled: SettledOffsets, model: set[int], start: int) -> None:
    prefix = start
    while prefix in model:
        prefix += 1
    assert settled.prefix == prefix
    assert settled.count_above == sum(1 for offset in model if offset >= prefix)
    holes = settled.holes(start, SPAN * 2)
    covered = {offset for low, high in holes for offset in range(low, high)}
    assert covered == set(range(start, SPAN * 2)) - model
    for (_, end), (next_start, _) in pairwise(holes):
        assert end < next_start


@given(start=st.integers(0, 2 * CHUNK), steps=st.lists(commands, max_size=12))
@settings(deadline=None, max_examples=150)
def test_settled_offsets_behave_like_a_plain_set(start, steps):
    settled = SettledOffsets(start)
    model: set[int] = set()
    for name, offset, length in steps:
        if name == "truncate":
            settled.truncate(offset)
            model = {each for each in model if each < offset}
            start = min(start, offset)
        else:
            low = settled.prefix if name == "fill" else offset
            settled.add(low, low + length)
            model |= set(range(max(low, start), low + length))
    assert_equal(settled, model, start)
    for offset in range(0, SPAN, 97):
        assert (offset in settled) == (offset < start or offset in model)


@given(
    start=st.integers(0, CHUNK),
    ranges=st.lists(st.tuples(offsets, lengths), max_size=10),
    low=offsets,
    length=st.integers(0, SPAN),
)
@settings(deadline=None, max_examples=150)
def test_holes_of_any_window_are_the_unsettled_offsets_of_it(start, ranges, low, length):
    settled = SettledOffsets(start)
    model = set(range(start))
    for offset, count in ranges:
        settled.add(offset, offset + count)
        model |= set(range(offset, offset + count))
    holes = settled.holes(low, low + length)
    covered = [offset for first, end in holes for offset in range(first, end)]
    assert covered == [each for each in range(low, low + length) if each not in model]


@given(start=st.integers(0, CHUNK), ranges=st.lists(st.tuples(offsets, lengths), max_size=10))
@settings(deadline=None, max_examples=100)
def test_a_dump_through_msgpack_loads_as_the_same_set(start, ranges):
    settled = SettledOffsets(start)
    for offset, count in ranges:
        settled.add(offset, offset + count)
    loaded = SettledOffsets.load(decode(encode_stored(settled.dump())))
    assert loaded.dump() == settled.dump()
    assert (loaded.prefix, loaded.count_above) == (settled.prefix, settled.count_above)
    loaded.add(0, 3 * SPAN)
    assert (loaded.prefix, loaded.count_above) == (3 * SPAN + 0, 0)


def test_single_offsets_in_random_order_end_as_one_prefix():
    settled = SettledOffsets()
    order = list(range(3 * CHUNK + 17))
    random.Random(5).shuffle(order)
    for offset in order:
        settled.add(offset, offset + 1)
    assert settled.prefix == len(order)
    assert settled.count_above == 0
    assert settled.dump() == (len(order), ())


def test_full_chunks_share_one_integer_and_a_million_offsets_dump_in_few_bytes():
    settled = SettledOffsets()
    settled.add(1, 1_000_001)
    assert settled.prefix == 0
    assert settled.count_above == 1_000_000
    assert sum(bits is FULL for bits in settled._chunks.values()) >= 243
    assert len(encode_stored(settled.dump())) < 2000
    settled.add(0, 1)
    assert settled.prefix == 1_000_001
    assert settled.count_above == 0


def test_a_jump_of_the_prefix_over_a_huge_range_touches_only_chunks_that_exist():
    settled = SettledOffsets()
    settled.add(5, 6)
    settled.add(1 << 50, (1 << 50) + 3)
    settled.add(0, 1 << 50)
    assert settled.prefix == (1 << 50) + 3
    assert settled.count_above == 0


@pytest.mark.parametrize(
    "dumped",
    [
        None,
        7,
        [],
        [0],
        [-1, []],
        [True, []],
        [0.0, []],
        [1 << 63, []],
        [0, None],
        [0, [5]],
        [0, [[1]]],
        [0, [["1", 1]]],
        [0, [[1, 0]]],
        [0, [[1, -3]]],
        [0, [[1, 1 << 40]]],
        [0, [[1, 1 << 19], [1 << 20, (1 << 19) + 1]]],
        [0, [[1 << 60, 1]]],
        [0, [[2, 1], [1, 1]]],
        [0, [[1, 2], [2, 1]]],
        [0, [[1, b""]]],
        [0, [[1, b"\x00"]]],
        [0, [[1, b"\xff" * 512]]],
        [0, [[1, b"\x01" * 513]]],
        [0, [[1, "text"]]],
        [0, [[0, b"\x01"]]],
        [0, [[0, 1]]],
        [5, [[0, b"\x10"]]],
        [CHUNK, [[0, 1]]],
    ],
)
def test_nonsense_is_refused_as_a_corrupt_file(dumped):
    with pytest.raises(CorruptFile):
        SettledOffsets.load(decode(encode_stored(dumped)))
