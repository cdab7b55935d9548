"""What encode refuses, and the error it gives; what a header may not claim."""

import tracemalloc
from array import array
from collections.abc import Callable
from struct import Struct
from typing import Any

import pytest
from crc32c import crc32c

from raftq.client.common.errors import CorruptBatch, InvalidArgument, TooLarge, UnknownFormat
from raftq.client.wire.batch import (
    BATCH_BYTES_MAX,
    RECORDS_MAX,
    Batch,
    BatchProducer,
    decode,
    encode,
    encode_one,
    stamp,
    validate,
)
from raftq.client.wire.record import (
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    check_record_limits,
    pack_headers,
    unpack_headers,
)

U16, U32, I64, U8 = Struct("<H"), Struct("<I"), Struct("<q"), Struct("<B")


def patched(data: bytearray, *changes: tuple[int, Struct, int]) -> bytes:
    """The batch with fields changed and both checksums made right again."""
    data = bytearray(data)
    for at, layout, number in changes:
        layout.pack_into(data, at, number)
    U32.pack_into(data, 20, crc32c(bytes(data[:20])))
    U32.pack_into(data, 24, crc32c(bytes(data[28:])))
    return bytes(data)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keys": [b"k"]}, "2 values but 1 keys"),
        ({"headers": [{"a": b""}]}, "2 values but 1 headers"),
        ({"headers": [None, None, None]}, "2 values but 3 headers"),
        ({"timestamps": [1]}, "2 values but 1 timestamps"),
        ({"expiries": [1, 2, 3]}, "2 values but 3 expiries"),
        ({"deliver_at": []}, "2 values but 0 deliver_at"),
        ({"delay_offsets": [1]}, "2 values but 1 delay_offsets"),
        ({"offset_deltas": [0], "span": 2}, "2 values but 1 offset_deltas"),
        ({"offset_deltas": [1, 1], "span": 5}, "must increase"),
        ({"offset_deltas": [0, 5], "span": 5}, "below the span of 5"),
        ({"offset_deltas": [-1, 0]}, "must increase"),
        ({"span": 3}, "need offset_deltas"),
        ({"span": 1}, "need offset_deltas"),
        ({"offset_deltas": [0, 1], "span": 2**32}, "does not fit"),
        ({"lane": 5}, "lane 5 is not in 0..4"),
        ({"lane": -1}, "lane -1 is not in 0..4"),
        ({"codec": 3}, "codec 3 is unknown"),
        ({"codec": -1}, "codec -1 is unknown"),
        ({"timestamps": 2**63}, "does not fit"),
        ({"timestamps": [1, 2**63]}, "timestamps: "),
        ({"expiries": [1, 0.5]}, "expiries: "),
        ({"producer": BatchProducer(1, -1, 0)}, "does not fit"),
        ({"keys": ["text", b""]}, "does not fit"),
        ({"keys": [7, b""]}, "keys must be bytes"),
        ({"headers": [{"a": "text"}, None]}, "headers map str names to bytes"),
        ({"headers": [{1: b""}, None]}, "headers map str names to bytes"),
        ({"headers": [{"\ud800": b""}, None]}, "not valid text"),
    ],
)
def test_encode_refuses_what_could_not_be_read_back(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        encode([b"a", b"b"], **arguments)


@pytest.mark.parametrize("value", ["text", 7, None, array("I", [1, 2])])
def test_values_that_are_not_bytes_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        encode([value, b""])
    with pytest.raises(InvalidArgument):
        encode_one(value, 0)
    with pytest.raises(InvalidArgument):
        encode_one(value, 0, key=b"k")


@pytest.mark.parametrize(
    "call",
    [
        lambda: encode_one(b"", 0, 5),
        lambda: encode_one(b"", 0, -1),
        lambda: encode_one(b"", 2**63),
        lambda: encode_one(b"", 0, expiry=2**63),
        lambda: encode_one(b"", 0, key="text"),  # type: ignore[arg-type]
        lambda: encode([]),
        lambda: encode([], span=0, offset_deltas=[]),
        lambda: encode([], span=3),
    ],
)
def test_encode_one_and_fillers_are_checked_alike(call: Callable[[], bytearray]) -> None:
    with pytest.raises(InvalidArgument):
        call()


def test_a_batch_over_the_limit_on_bytes_is_too_large() -> None:
    value = bytes(BATCH_BYTES_MAX)
    with pytest.raises(TooLarge, match="over the limit of 67108864"):
        encode_one(value, 0)
    with pytest.raises(TooLarge, match="over the limit of 67108864"):
        encode([value, b""], codec=2)


def test_values_of_more_than_four_gibibytes_together_are_too_large() -> None:
    with pytest.raises(TooLarge, match="values of"):
        encode([bytes(BATCH_BYTES_MAX)] * 65)


def test_a_batch_over_the_limit_on_records_is_too_large() -> None:
    with pytest.raises(TooLarge, match=f"over the limit of {RECORDS_MAX}"):
        encode([b""] * (RECORDS_MAX + 1))


def test_a_batch_at_the_limit_on_records_is_read_back_with_null_keys() -> None:
    keys: list[bytes | None] = [None, b""] * (RECORDS_MAX // 2)
    assert decode(encode([b""] * RECORDS_MAX, keys)).keys() == keys


@pytest.mark.parametrize("version", [0, 2, 255])
def test_an_unknown_version_with_a_right_stamp_is_an_unknown_format(version: int) -> None:
    data = patched(encode([b"a"]), (2, U8, version))
    with pytest.raises(UnknownFormat, match=f"version {version} is not known here"):
        Batch(data)


def test_an_unknown_version_with_a_wrong_stamp_is_damage() -> None:
    data = encode([b"a"])
    data[2] = 2
    with pytest.raises(CorruptBatch, match="stamp"):
        Batch(data)


@pytest.mark.parametrize(
    "changes",
    [
        [(3, U8, 3)],
        [(3, U8, 255)],
        [(4, U32, 87)],
        [(4, U32, 2**31)],
        [(4, U32, BATCH_BYTES_MAX + 1)],
        [(8, I64, -1)],
        [(8, I64, 2**63 - 1)],
        [(28, U16, 512)],
        [(28, U16, 2)],
        [(28, U16, 0xFFFF)],
        [(30, U8, 5)],
        [(31, U8, 1)],
        [(32, U32, 2**32 - 1)],
        [(32, U32, 0)],
        [(36, U32, 0)],
        [(36, U32, 2)],
        [(32, U32, 0), (36, U32, 0), (76, U32, 5)],
        [(72, U32, 1), (76, U32, 0)],
        [(80, U32, 1), (76, U32, 0)],
        [(76, U32, 2**32 - 1)],
        [(84, U32, 2**31)],
        [(3, U8, 2), (32, U32, 2**32 - 1), (36, U32, 2**32 - 1), (84, U32, 2**31)],
    ],
)
def test_a_header_that_contradicts_itself_is_damage(changes: list[tuple[int, Struct, int]]) -> None:
    with pytest.raises(CorruptBatch, match="contradicts itself"):
        Batch(patched(encode([b"a"]), *changes))


@pytest.mark.parametrize(
    "changes",
    [
        # A bitmap of null keys without keys: one value byte fewer makes room for the bitmap.
        [(28, U16, 2), (76, U32, 0)],
        # Compressed, so that the length of the batch does not give the lie away.
        [(3, U8, 2), (32, U32, RECORDS_MAX + 1), (36, U32, RECORDS_MAX + 1), (76, U32, 0),
         (84, U32, 4 * (RECORDS_MAX + 2))],
        [(3, U8, 2), (76, U32, BATCH_BYTES_MAX - 7), (84, U32, BATCH_BYTES_MAX + 1)],
    ],
)  # fmt: skip
def test_a_header_whose_sums_are_right_is_still_held_to_the_limits(
    changes: list[tuple[int, Struct, int]],
) -> None:
    with pytest.raises(CorruptBatch, match="contradicts itself"):
        Batch(patched(encode([b"a"]), *changes))


def test_bytes_behind_a_zstd_frame_are_damage() -> None:
    data = encode([bytes(1_000)], codec=2)
    assert data[3] == 2
    data += b"x"
    with pytest.raises(CorruptBatch, match="does not decompress"):
        decode(patched(data, (4, U32, len(data)))).values()


def test_headers_that_claim_long_arrays_allocate_nothing_for_them() -> None:
    packed = b"\xdd\x00\xff\xff\xff" * 20 + bytes(2**24)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatch):
            unpack_headers(packed)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_an_untouched_batch_passes_the_same_way() -> None:
    assert decode(patched(encode([b"a"]))).values() == [b"a"]


def test_bits_past_the_last_key_are_damage() -> None:
    data = encode([b"", b""], [None, b""])
    at = 88 + 4 * 3 * 2
    assert data[at] == 0b10
    with pytest.raises(CorruptBatch, match="past the last record"):
        decode(patched(data, (at, U8, 0b110))).keys()


def test_validate_catches_a_header_that_lies_about_timestamps() -> None:
    batch = decode(patched(encode([b"a", b"b"], timestamps=[5, 9]), (64, I64, 8)))
    with pytest.raises(CorruptBatch, match="does not match its timestamps"):
        validate(batch)


def test_a_batch_without_all_its_bytes_is_damage() -> None:
    data = bytes(encode([b"abc"]))
    for end in range(len(data)):
        with pytest.raises(CorruptBatch):
            decode(data[:end])
    with pytest.raises(CorruptBatch, match="cut"):
        Batch(data[:-1]).values()
    with pytest.raises(CorruptBatch, match="-1 bytes left"):
        Batch(data, len(data) + 1)


def test_one_value_of_several_records_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="2 records"):
        decode(encode([b"a", b"b"])).one_value()


def test_limits_on_one_record_name_the_limit() -> None:
    check_record_limits(b"12", b"k", {"a": b"b"}, 2)
    check_record_limits(b"", bytes(KEY_BYTES_MAX), {"a": bytes(HEADERS_BYTES_MAX - 1)}, 0)
    with pytest.raises(TooLarge, match="3 bytes is over the limit of 2"):
        check_record_limits(b"123", None, None, 2)
    with pytest.raises(TooLarge, match="key of 65537 bytes"):
        check_record_limits(b"", bytes(KEY_BYTES_MAX + 1), None, 2)
    with pytest.raises(TooLarge, match="headers of 65537 bytes"):
        check_record_limits(b"", None, {"a": bytes(HEADERS_BYTES_MAX)}, 2)
    with pytest.raises(InvalidArgument, match="not valid text"):
        check_record_limits(b"", None, {"\ud800": b""}, 2)


@pytest.mark.parametrize(
    "packed",
    [b"\x01", b"\x90", b"\x81", b"\x81\xa1a\xa1b", b"\x81\xc4\x01a\xc4\x00", b"\x80\x00",
     b"\x81\xa1\xff\xc4\x00", b"\xdd\x7f\xff\xff\xff", b"\xdd\x00\xff\xff\xff" * 500 + bytes(2**24),
     b"\x81\xa1a" * 5000, b"\xc1"],
)  # fmt: skip
def test_headers_that_are_not_a_map_of_str_to_bytes_are_damage(packed: bytes) -> None:
    with pytest.raises(CorruptBatch, match="record headers"):
        unpack_headers(packed)


def test_headers_come_back_and_none_take_no_bytes() -> None:
    assert unpack_headers(pack_headers({"a": b"b", "": b""})) == {"a": b"b", "": b""}
    assert pack_headers({}) == pack_headers(None) == b""
    assert unpack_headers(b"") == {}


def test_a_stamp_outside_the_field_is_a_programming_error() -> None:
    data = encode([b"a"])
    with pytest.raises(AssertionError):
        stamp(data, -1, 0)
