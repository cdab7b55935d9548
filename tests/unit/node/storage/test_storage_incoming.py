"""What a leader takes from a client, and what it refuses, with the reason."""

import random

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.client.common.errors import (
    CorruptBatch,
    InvalidArgument,
    RaftqError,
    TooLarge,
    UnknownFormat,
)
from raftq.client.wire.batch import (
    CODEC_LZ4,
    CODEC_ZSTD,
    HEADER_BYTES,
    Batch,
    BatchProducer,
    encode,
    encode_one,
    stamp,
    validate,
)
from raftq.client.wire.encoder import encode_control
from raftq.client.wire.headers import CRCS, CRCS_AT, REST_AT
from raftq.node.storage.incoming import Limits, check_incoming

CODECS = st.sampled_from([0, CODEC_LZ4, CODEC_ZSTD])


def view(*batches: bytes | bytearray) -> memoryview:
    return memoryview(bytearray().join(batches))


def sealed(batch: bytearray) -> bytearray:
    """Both checksums made right again after a change."""
    CRCS.pack_into(batch, CRCS_AT, crc32c(batch[:CRCS_AT]), crc32c(batch[REST_AT:]))
    return batch


def changed(at: int, value: bytes, batch: bytearray | None = None) -> memoryview:
    batch = bytearray(batch or encode([b"one", b"two", b"three"], timestamps=7))
    batch[at : at + len(value)] = value
    return memoryview(sealed(batch))


def test_facts_of_every_batch_come_back_with_its_place() -> None:
    first = encode([b"a", b"b"], timestamps=[5, 9], producer=BatchProducer(7, 2, 40))
    second = encode_one(b"c", 3, lane=4)
    third = encode([b"x" * 100] * 50, [b"k"] * 50, codec=CODEC_LZ4, producer=BatchProducer(8, 0, 0))
    raw = view(first, second, third)
    assert check_incoming(raw) == [
        (0, len(first), 7, 2, 40, 2, 9),
        (len(first), len(second), -1, 0, 0, 1, 3),
        (len(first) + len(second), len(third), 8, 0, 0, 50, 0),
    ]


def test_a_batch_that_was_stamped_before_is_as_good() -> None:
    batch = encode_one(b"c", 3)
    stamp(batch, 77, 5)
    assert check_incoming(view(batch))[0][1] == len(batch)


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=20),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    CODECS,
    st.integers(0, 4),
)
@settings(deadline=None)
def test_what_a_client_encodes_is_accepted(
    values: list[bytes], keys: bool, headers: bool, times: bool, codec: int, lane: int
) -> None:
    batch = encode(
        values,
        [None if number % 3 else b"k%d" % number for number in range(len(values))]
        if keys
        else None,
        [{"h": b"1"}] * len(values) if headers else None,
        list(range(len(values))) if times else 5,
        lane=lane,
        codec=codec,
    )
    ((_, length, *_),) = check_incoming(view(batch))
    assert length == len(batch)


@given(st.integers(0, 10**9), CODECS)
@settings(max_examples=300, deadline=None)
def test_any_flipped_bit_is_refused(seed: int, codec: int) -> None:
    good = encode([b"hello" * 9] * 5, [b"k"] * 5, codec=codec, producer=BatchProducer(1, 0, 0))
    bit = random.Random(seed).randrange(8 * len(good))
    good[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RaftqError):
        check_incoming(view(good))


@given(st.integers(REST_AT, HEADER_BYTES + 60), st.binary(min_size=1, max_size=4))
@settings(max_examples=500, deadline=None)
def test_a_lie_with_right_checksums_is_refused_or_harmless(at: int, value: bytes) -> None:
    """Whatever is accepted has a header that a full check accepts as well."""
    raw = changed(at, value, encode([b"hello" * 3] * 4, [b"k"] * 4, timestamps=[1, 2, 3, 4]))
    try:
        check_incoming(raw)
    except (CorruptBatch, InvalidArgument, TooLarge):
        return
    batch = Batch(raw)
    batch.check_crc()
    assert 0 < batch.count == batch.span
    assert batch.length == len(raw)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((CorruptBatch, InvalidArgument)):
        check_incoming(memoryview(data))


@pytest.mark.parametrize("cut", [1, 50, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3])
def test_a_cut_batch_is_refused_wherever_it_is_cut(cut: int) -> None:
    good = encode_one(b"value", 1)
    with pytest.raises(CorruptBatch):
        check_incoming(view(good[:cut]))
    with pytest.raises(CorruptBatch):
        check_incoming(view(good, good[:cut]))


@pytest.mark.parametrize(
    ("raw", "error", "match"),
    [
        (view(), InvalidArgument, "no batch"),
        (view(encode_control(b"x")), InvalidArgument, "not for clients"),
        (view(encode([b"a"], offset_deltas=[3], span=4)), InvalidArgument, "not for clients"),
        (view(encode([], offset_deltas=[], span=4)), InvalidArgument, "not for clients"),
        (view(encode([b"a"], delay_offsets=[3])), InvalidArgument, "not for clients"),
        (changed(30, b"\x05"), InvalidArgument, "lane 5"),
        (changed(40, b"\xfe" + b"\xff" * 7), InvalidArgument, "producer id -2"),
        (changed(2, b"\x09"), UnknownFormat, "newer version"),
        (changed(3, b"\x07"), CorruptBatch, "contradicts"),
        (changed(0, b"XX"), CorruptBatch, "magic"),
        (changed(28, b"\x00\x02"), CorruptBatch, "contradicts"),
        (changed(31, b"\x01"), CorruptBatch, "contradicts"),
        (changed(36, b"\x04"), CorruptBatch, "contradicts"),
        (changed(84, b"\xff\xff\xff\xff"), CorruptBatch, "contradicts"),
        (changed(4, b"\xff\xff\xff\x7f"), CorruptBatch, "contradicts"),
        (changed(HEADER_BYTES, b"\x01"), CorruptBatch, "offsets of the values"),
        (changed(HEADER_BYTES + 12, b"\x09"), CorruptBatch, "offsets of the values"),
    ],
)
def test_each_refusal_names_its_reason(
    raw: memoryview, error: type[RaftqError], match: str
) -> None:
    with pytest.raises(error, match=match):
        check_incoming(raw)


@pytest.mark.parametrize("codec", [0, CODEC_LZ4])
def test_a_value_over_the_limit_is_refused_also_when_packed(codec: int) -> None:
    limits = Limits(value_bytes_max=1000)
    fits = encode([b"x" * 1000] * 5, codec=codec)
    assert len(check_incoming(view(fits), limits)) == 1
    with pytest.raises(TooLarge, match="1001 bytes are over the limit of 1000"):
        check_incoming(view(fits, encode([b"x" * 5, b"x" * 1001], codec=codec)), limits)


def test_keys_and_headers_over_their_limits_are_refused() -> None:
    with pytest.raises(TooLarge, match="keys"):
        check_incoming(view(encode([b""], [b"k" * 70_000])))
    with pytest.raises(TooLarge, match="headers"):
        check_incoming(view(encode([b""], None, [{"h": b"v" * 70_000}])))
    assert check_incoming(view(encode([b""] * 20, [b"k" * 60_000] * 20)))


def test_a_batch_over_the_limit_is_refused_packed_or_not() -> None:
    limits = Limits(batch_bytes_max=2000)
    batch = encode([b"\0" * 3000], codec=CODEC_LZ4)
    assert len(batch) < 2000
    for large in (batch, encode([b"\0" * 3000])):
        with pytest.raises(TooLarge, match="3096 bytes is over the limit of 2000"):
            check_incoming(view(large), limits)


def test_too_many_batches_in_one_request_are_refused() -> None:
    one = encode_one(b"", 0)
    assert len(check_incoming(view(*[one] * 3), Limits(batches_max=3))) == 3
    with pytest.raises(TooLarge, match="more than 3"):
        check_incoming(view(*[one] * 4), Limits(batches_max=3))


def test_accepted_batches_stay_writable_in_place_for_the_stamp() -> None:
    raw = view(encode([b"a", b"b"]), encode_one(b"c", 0))
    for number, (start, length, *_) in enumerate(check_incoming(raw)):
        stamp(raw[start : start + length], 10 + number, 3)
    first = Batch(raw)
    validate(first)
    assert (first.base_offset, Batch(raw, first.length).base_offset) == (10, 11)


def test_delayed_batches_say_when_they_are_due_and_others_do_not() -> None:
    later = encode([b"a", b"b"], deliver_at=[5, 9])
    assert len(check_incoming(view(later, later), Limits(delayed=True))) == 2
    with pytest.raises(InvalidArgument, match="not sent as a delayed one"):
        check_incoming(view(later))
    with pytest.raises(InvalidArgument, match="without the times"):
        check_incoming(view(later, encode([b"a"])), Limits(delayed=True))
