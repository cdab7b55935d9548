"""Frames: what is encoded comes back, however the stream is cut, and big parts are not copied."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.client.common.errors import LocalProtocolError, RemoteProtocolError, TooLarge
from raftq.client.wire import frames
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


def test_a_big_frame_after_another_is_received_into_its_own_buffer() -> None:
    """1. The decoder peeks at the frame. 2. It then asks for exactly the rest. 3. The raw part is
    that same memory."""
    stream = b"".join(encode_frame(1, 7, b"head", [bytes(1_000_000)]))
    decoder = FrameDecoder(KINDS)
    assert len(take(decoder, stream)) == 1
    first = len(decoder.get_buffer())
    assert first == frames.PEEK_BYTES
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


def test_memory_for_a_frame_is_taken_as_its_bytes_arrive() -> None:
    asked: list[int] = []

    def allow(count: int) -> bool:
        asked.append(count)
        return True

    stream = b"".join(encode_frame(1, 7, b"head", [bytes(range(250)) * 40_000]))
    decoder = FrameDecoder(KINDS, allow=allow)
    for at in range(0, len(stream), 5_000):
        found = take(decoder, stream[at : at + 5_000])
        assert sum(asked) <= max(frames.FIRST_BYTES, 2 * (at + 5_000))
    assert bytes(found[0].raw) == bytes(range(250)) * 40_000
    assert sum(asked) == len(stream) - frames.PREFIX_BYTES


def test_a_decoder_without_memory_is_starved_until_there_is_some() -> None:
    """1. It may not begin a frame. 2. It may. 3. It may not grow. 4. It may. Nothing is lost."""
    stream = b"".join(encode_frame(1, 7, b"head", [bytes(range(250)) * 800]))
    answers = [False, False, True, False, True, True]
    decoder = FrameDecoder(KINDS, allow=lambda count: answers.pop(0))
    assert take(decoder, stream[:10_000]) == []
    assert decoder.starved
    assert decoder.next_frame() is None
    assert decoder.starved
    assert decoder.next_frame() is None
    assert not decoder.starved
    assert take(decoder, stream[10_000 : frames.FIRST_BYTES + 16]) == []
    assert decoder.starved
    assert decoder.receiving == frames.FIRST_BYTES + 16
    assert decoder.next_frame() is None
    assert not decoder.starved
    (frame,) = take(decoder, stream[frames.FIRST_BYTES + 16 :])
    assert bytes(frame.raw) == bytes(range(250)) * 800
    assert not answers


@settings(deadline=None, max_examples=60)
@given(st.lists(contents, max_size=6), st.lists(st.integers(1, 6000), min_size=1), st.randoms())
def test_decoders_that_read_in_turns_share_a_scratch_buffer(
    sent: list[tuple[int, int, bytes, list[bytes]]], cuts: list[int], rng: random.Random
) -> None:
    scratch = memoryview(bytearray(frames.SCRATCH_BYTES))
    stream = b"".join(b"".join(encode_frame(*one)) for one in sent)
    decoders = [FrameDecoder(KINDS, scratch=scratch) for _ in range(3)]
    left = [stream] * 3
    found: list[list[Frame]] = [[], [], []]
    while any(left):
        one = rng.randrange(3)
        cut = rng.choice(cuts)
        found[one] += take(decoders[one], left[one][:cut])
        left[one] = left[one][cut:]
        scratch[:] = bytes(len(scratch))
    wanted = [(kind, id_, header, b"".join(raw)) for kind, id_, header, raw in sent]
    assert [facts(one) for one in found] == [wanted] * 3


def test_the_raw_part_of_a_small_frame_is_memory_of_its_own() -> None:
    decoder = FrameDecoder(KINDS)
    (first,) = take(decoder, b"".join(encode_frame(1, 1, b"", [b"first"])))
    take(decoder, b"".join(encode_frame(1, 2, b"", [b"other"])))
    assert bytes(first.raw) == b"first"
    first.raw[0:1] = b"F"


def test_after_a_big_frame_it_only_peeks_until_there_is_a_small_one() -> None:
    decoder = FrameDecoder(KINDS)
    assert len(decoder.get_buffer()) == frames.SCRATCH_BYTES
    take(decoder, b"".join(encode_frame(1, 1, b"", [bytes(500_000)])))
    assert len(decoder.get_buffer()) == frames.PEEK_BYTES
    take(decoder, b"".join(encode_frame(1, 1, b"h" * 100)))
    assert len(decoder.get_buffer()) == frames.SCRATCH_BYTES
    assert len(decoder.get_buffer(window=0)) == frames.PEEK_BYTES


def test_frames_that_are_not_taken_wait_in_the_decoder() -> None:
    scratch = memoryview(bytearray(frames.SCRATCH_BYTES))
    decoder = FrameDecoder(KINDS, scratch=scratch)
    stream = b"".join(b"".join(encode_frame(1, number, b"")) for number in range(10))
    decoder.get_buffer()[: len(stream)] = stream
    decoder.received(len(stream))
    taken = [frame.correlation_id for _ in range(4) if (frame := decoder.next_frame())]
    assert taken == [0, 1, 2, 3]
    decoder.keep()
    scratch[:] = bytes(len(scratch))
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
    assert decoder.receiving == 0
    with pytest.raises(RemoteProtocolError, match=reason):
        decoder.next_frame()


def test_frames_far_over_the_scratch_buffer_wait_too() -> None:
    decoder = FrameDecoder(KINDS)
    stream = b"".join(b"".join(encode_frame(1, number, b"h" * 90)) for number in range(5_000))
    view = memoryview(stream)
    while view:
        buffer = decoder.get_buffer()
        count = min(len(buffer), len(view))
        buffer[:count] = view[:count]
        decoder.received(count)
        decoder.keep()
        view = view[count:]
    found = []
    while (frame := decoder.next_frame()) is not None:
        found.append(frame.correlation_id)
    assert found == list(range(5_000))


def test_a_cleared_decoder_lets_go_of_everything() -> None:
    decoder = FrameDecoder(KINDS)
    take(decoder, b"".join(encode_frame(1, 1, b"", [bytes(500_000)]))[:-1])
    assert decoder.receiving
    decoder.clear()
    assert decoder.receiving == 0
    with pytest.raises(RemoteProtocolError, match="over"):
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
