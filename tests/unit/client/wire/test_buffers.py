"""Memory for big frames is used again, and never while somebody still looks at it."""

from raftq.client.wire.buffers import BUFFER_BYTES_MAX, KEPT_BYTES_MAX, Buffers

MIB = 1024 * 1024


def test_a_buffer_is_given_out_again_once_nothing_refers_to_it() -> None:
    buffers = Buffers()
    first = buffers.take(MIB)
    memory = id(first.obj)
    first.release()
    first = buffers.take(MIB - 5)
    assert id(first.obj) == memory
    assert len(first) == MIB - 5


def test_a_buffer_in_use_is_not_given_out() -> None:
    buffers = Buffers()
    first = buffers.take(MIB)
    slice_of_it = first[10:20].toreadonly()
    slice_of_it_bytes = bytes(slice_of_it)
    memory = id(first.obj)
    del first
    second = buffers.take(MIB)
    assert id(second.obj) != memory
    second[:] = b"x" * MIB
    assert bytes(slice_of_it) == slice_of_it_bytes


def test_little_and_huge_frames_get_memory_of_their_own() -> None:
    buffers = Buffers()
    for count in (1, BUFFER_BYTES_MAX + 1):
        first = buffers.take(count)
        assert len(first) == count
        memory = id(first.obj)
        del first
        assert id(buffers.take(count).obj) != memory


def test_what_is_kept_is_bounded_and_follows_the_size_of_frames() -> None:
    buffers = Buffers()
    held = [buffers.take(4 * MIB) for _ in range(KEPT_BYTES_MAX // (4 * MIB))]
    extra = buffers.take(MIB)
    assert len(extra) == MIB, "more than is kept can still be had"
    memory = id(extra.obj)
    del extra
    assert id(buffers.take(MIB).obj) != memory, "it was not kept"
    held.clear()
    first = buffers.take(MIB)
    memory = id(first.obj)
    del first
    assert id(buffers.take(MIB).obj) == memory, "what was kept for bigger frames made room"
