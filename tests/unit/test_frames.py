"""Frames: what is encoded comes back, however the stream is cut, and big parts are not copied."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.client.wire import frames
from raftq.client.wire.errors import LocalProtocolError, RemoteProtocolError, TooLarge
from raftq.client.wire.frames import PREFIX, Frame, FrameDecoder, encode_frame

KINDS = frozenset(range(1, 20))


def take(decoder: FrameDecoder, data: bytes) -> list[Frame]:
    """Give the decoder bytes, in as many pieces as it asks for."""
    found, view = [], memoryview(data)
    while view:
        buffer = decoder.get_buffer()
        count = min(len(buffer), len(view))
        buffer[:count] = view[:count]
        decoder.received(count)
        view = view[count:]
        while (frame := decoder.next_frame()) is not None:
            found.append(frame)
    return found


def facts(found: Iterable[Frame]) -> list[tuple[int, int, bytes, bytes]]:
    return [(one.kind, one.correlation_id, one.header, bytes(one.raw)) for one in found]


parts = st.lists(
    st.binary(max_size=60) | st.integers(0, 9000).map(lambda size: b"x" * size), max_size=4
)
contents = st.tuples(
    st.sampled_from(sorted(KINDS)), st.integers(0, 2**32 - 1), st.binary(max_size=300), parts
)


@settings(deadline=None, max_examples=150)
@given(st.lists(contents, max_size=6), st.data())
def test_frames_come_back_however_the_stream_is_cut(
    sent: list[tuple[int, int, bytes, list[bytes]]], data: st.DataObject
) -> None:
    stream = b"".join(b"".join(encode_frame(*one)) for one in sent)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    decoder, found = FrameDecoder(KINDS), []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(stream)], strict=True):
        found += take(decoder, stream[start:end])
    wanted = [(kind, id_, header, b"".join(raw)) for kind, id_, header, raw in sent]
    assert facts(found) == wanted


def test_a_stream_read_byte_by_byte_gives_the_same_frames() -> None:
    stream = b"".join(
        b"".join(encode_frame(3, number, b"head", [b"r" * size]))
        for number, size in enumerate((0, 1, 4000, 4090, 9000))
    )
    decoder = FrameDecoder(KINDS)
    found = [frame for byte in stream for frame in take(decoder, bytes([byte]))]
    assert [len(frame.raw) for frame in found] == [0, 1, 4000, 4090, 9000]
    assert [frame.correlation_id for frame in found] == [0, 1, 2, 3, 4]


def test_big_parts_are_passed_on_uncopied_and_small_neighbours_are_joined() -> None:
    big, other = bytearray(100_000), memoryview(bytearray(5_000))
    fragments = encode_frame(1, 7, b"head", [b"a", b"b", big, b"c", b"", b"d", other])
    assert len(fragments) == 4
    assert fragments[0] == PREFIX.pack(12 + 4 + 105_004, 1, 0, 0, 4, 7) + b"headab"
    assert fragments[1] is big
    assert fragments[2] == b"cd"
    assert fragments[3] is other


def test_a_small_frame_is_a_single_fragment() -> None:
    assert len(encode_frame(1, 7, b"head", [b"x" * 1000, b"y" * 3000])) == 1


def test_the_rest_of_a_big_frame_is_received_into_its_own_buffer() -> None:
    """1. The decoder learns of the frame from its window. 2. It then asks for exactly the rest.
    3. The raw part is that same memory."""
    stream = b"".join(encode_frame(1, 7, b"head", [bytes(1_000_000)]))
    decoder = FrameDecoder(KINDS)
    first = len(decoder.get_buffer())
    assert take(decoder, stream[:first]) == []
    rest = decoder.get_buffer()
    assert len(rest) == len(stream) - first
    rest[-1] = 42
    decoder.received(len(rest))
    frame = decoder.next_frame()
    assert frame is not None
    assert frame.raw[-1] == 42
    assert frame.raw.obj is rest.obj
    assert not frame.raw.readonly


def test_the_raw_part_of_a_small_frame_is_memory_of_its_own() -> None:
    decoder = FrameDecoder(KINDS)
    (first,) = take(decoder, b"".join(encode_frame(1, 1, b"", [b"first"])))
    take(decoder, b"".join(encode_frame(1, 2, b"", [b"other"])))
    assert bytes(first.raw) == b"first"
    first.raw[0:1] = b"F"


def test_the_window_grows_with_small_frames_and_shrinks_after_a_big_one() -> None:
    decoder = FrameDecoder(KINDS)
    assert len(decoder.get_buffer()) == frames.WINDOW_BYTES_MIN
    small = b"".join(encode_frame(1, 1, b"h" * 100))
    take(decoder, small * 5_000)
    assert len(decoder.get_buffer()) >= frames.WINDOW_BYTES_MAX // 2
    take(decoder, b"".join(encode_frame(1, 1, b"", [bytes(500_000)])))
    assert len(decoder.get_buffer()) == frames.WINDOW_BYTES_MIN


def test_frames_that_are_not_taken_wait_in_the_window() -> None:
    decoder = FrameDecoder(KINDS)
    stream = b"".join(b"".join(encode_frame(1, number, b"")) for number in range(10))
    decoder.get_buffer()[: len(stream)] = stream
    decoder.received(len(stream))
    taken = [frame.correlation_id for _ in range(4) if (frame := decoder.next_frame())]
    assert taken == [0, 1, 2, 3]
    more = take(decoder, b"".join(encode_frame(1, 10, b"")))
    assert [frame.correlation_id for frame in more] == [4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (PREFIX.pack(0xFFFF_FFFF, 1, 0, 0, 0, 1), "over the limit of 75497472"),
        (PREFIX.pack(72 << 20, 1, 0, 0, 0, 1), "over the limit"),
        (PREFIX.pack(11, 1, 0, 0, 0, 1), "no room for its own prefix"),
        (PREFIX.pack(0, 1, 0, 0, 0, 1), "no room for its own prefix"),
        (PREFIX.pack(12, 99, 0, 0, 0, 1), "kind 99 is not known"),
        (PREFIX.pack(12, 0, 0, 0, 0, 1), "kind 0 is not known"),
        (PREFIX.pack(12, 1, 1, 0, 0, 1), "flags 0x1"),
        (PREFIX.pack(12, 1, 0, 1, 0, 1), "are not known"),
        (PREFIX.pack(12, 1, 0, 0, 1, 1), "does not fit in a frame"),
        (PREFIX.pack(100, 1, 0, 0, 0xFFFF_FFFF, 1), "does not fit in a frame"),
        (PREFIX.pack(2 << 20, 1, 0, 0, (1 << 20) + 1, 1), "over the limit of 1048576"),
        (b"GET / HTTP/1.1\r\n", "over the limit"),
    ],
)
def test_a_bad_prefix_is_refused_before_anything_is_allocated_and_for_good(
    prefix: bytes, reason: str
) -> None:
    decoder = FrameDecoder(KINDS)
    with pytest.raises(RemoteProtocolError, match=reason):
        take(decoder, prefix)
    assert len(decoder.get_buffer()) <= frames.WINDOW_BYTES_MIN
    with pytest.raises(RemoteProtocolError, match=reason):
        decoder.next_frame()


def test_the_limits_are_inclusive() -> None:
    stream = b"".join(encode_frame(1, 1, b"h" * 10, [b"r" * 74], bytes_max=100))
    assert len(stream) == 100
    assert len(take(FrameDecoder(KINDS, 100, 10), stream)) == 1
    with pytest.raises(RemoteProtocolError):
        take(FrameDecoder(KINDS, 99, 10), stream)
    with pytest.raises(RemoteProtocolError):
        take(FrameDecoder(KINDS, 100, 9), stream)
    with pytest.raises(TooLarge, match="frame of 101 bytes"):
        encode_frame(1, 1, b"h" * 10, [b"r" * 75], bytes_max=100)
    with pytest.raises(TooLarge, match="header of 1048577 bytes"):
        encode_frame(1, 1, bytes(frames.HEADER_BYTES_MAX + 1))


def test_a_raw_part_that_is_not_plain_bytes_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="plain bytes"):
        encode_frame(1, 1, b"", [memoryview(bytes(8)).cast("I")])
    with pytest.raises(LocalProtocolError, match="plain bytes"):
        encode_frame(1, 1, b"", [memoryview(bytes(8))[::2]])
