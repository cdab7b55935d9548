"""Frames and messages against hostile bytes: a clean ProtocolError or a valid message, no more."""

import random
import tracemalloc

import msgpack
import pytest

from raftq.client.common.errors import RemoteProtocolError
from raftq.client.wire.frames import HEADER_BYTES_MAX, PREFIX, Frame, FrameDecoder
from raftq.client.wire.messages import (
    Fetch,
    FetchPartition,
    Hello,
    Metadata,
    Produce,
    WireMessage,
    decode_message,
    encode_message,
    request_kinds,
)

MESSAGES: list[tuple[WireMessage, list[bytes]]] = [
    (Hello(1, 1, "client", "fuzz", b"proof"), []),
    (Metadata(("a", "b")), []),
    (Produce("orders", 3, 7, "leader", 100), [b"batch" * 20]),
    (Fetch((FetchPartition("orders", 1, 5), FetchPartition("x", 2, 0)), 10, 1), []),
]
STREAM = b"".join(
    b"".join(encode_message(one, number + 1, raw)) for number, (one, raw) in enumerate(MESSAGES)
)


def read_all(stream: bytes) -> tuple[list[WireMessage], bool]:
    """The messages before the first error, and whether there was one."""
    decoder, view = FrameDecoder(request_kinds()), memoryview(stream)
    found: list[WireMessage] = []
    try:
        while view:
            buffer = decoder.get_buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            decoder.received(count)
            view = view[count:]
            while (frame := decoder.next_frame()) is not None:
                found.append(decode_message(frame))
    except RemoteProtocolError:
        return found, True
    return found, False


def test_random_bytes_are_an_error_or_wait_for_more() -> None:
    rng = random.Random(1)
    refused = 0
    for _ in range(3_000):
        found, failed = read_all(rng.randbytes(rng.randrange(200)))
        refused += failed
        assert not found
    assert refused > 2_000


def test_a_stream_cut_anywhere_gives_only_what_was_whole() -> None:
    everything = [one for one, _ in MESSAGES]
    for cut in range(len(STREAM)):
        found, failed = read_all(STREAM[:cut])
        assert not failed
        assert found == everything[: len(found)]
        assert len(found) < len(everything)
    assert read_all(STREAM) == (everything, False)


def test_flipped_bits_give_an_error_a_wait_or_another_valid_message() -> None:
    outcomes = {"error": 0, "fine": 0}
    for position in range(len(STREAM)):
        for bit in range(8):
            damaged = bytearray(STREAM)
            damaged[position] ^= 1 << bit
            _, failed = read_all(bytes(damaged))
            outcomes["error" if failed else "fine"] += 1
    assert outcomes["error"] > 500
    assert outcomes["fine"] > 100


def test_random_headers_of_every_kind_are_a_clean_error_or_a_message() -> None:
    rng = random.Random(2)
    refused = 0
    for kind in sorted(request_kinds()):
        for _ in range(400):
            try:
                decode_message(Frame(kind, 1, rng.randbytes(rng.randrange(40))))
            except RemoteProtocolError:
                refused += 1
    assert refused > 300 * len(request_kinds())


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x80\x00",
        b"\x81\xa4name\xa2\xff\xff",
        b"\x81\xa4name\xd6\xff\x00\x00\x00\x00",
        msgpack.packb([1, 2]),
        msgpack.packb(None),
        msgpack.packb({1: 2}),
    ],
)
def test_headers_that_are_no_map_of_fields_are_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="Hello"):
        decode_message(Frame(Hello.kind, 1, header))


def test_a_header_of_nested_claims_costs_bounded_memory() -> None:
    """Each level claims a list of a million; msgpack would reserve 8 MB for each."""
    hostile = b"\xdd\x00\x0f\xff\xff" * 500
    header = hostile.ljust(HEADER_BYTES_MAX, b"\x91")
    within = (b"\xdc\x1f\xff" * 500).ljust(HEADER_BYTES_MAX, b"\xc0")
    tracemalloc.start()
    try:
        for one in (header, within):
            with pytest.raises(RemoteProtocolError):
                decode_message(Frame(Metadata.kind, 1, one))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 48 * 1024 * 1024


def test_absurd_lengths_allocate_nothing() -> None:
    tracemalloc.start()
    try:
        for length in (0x7FFF_FFFF, 0xFFFF_FFFF, (72 << 20) - 3):
            _, failed = read_all(PREFIX.pack(length, Produce.kind, 0, 0, 5, 1) + b"x" * 3000)
            assert failed
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * 1024
