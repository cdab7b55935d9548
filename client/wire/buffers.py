"""Memory for big frames, used again. (Pure.)

A buffer that is allocated for every frame costs more than all that is done with the frame: its
pages come from the kernel one fault at a time, and go back when it is freed. So buffers are kept,
and one is given out again when nothing refers to it any more: neither the frame, nor a batch or an
Arrow table over it. CPython's reference counts tell; a view of a buffer is a reference to it.

One owner per event loop: `take` is called by that loop's thread only, users may be anywhere.
"""

from sys import getrefcount

BUFFER_BYTES_MIN = 64 * 1024
BUFFER_BYTES_MAX = 4 * 1024 * 1024  # bigger frames are rare: they get memory of their own
KEPT_BYTES_MAX = 32 * 1024 * 1024
_UNUSED = 3  # the list, the loop variable, the argument of getrefcount


class Buffers:
    """Gives out buffers, and first those that are not used any more."""

    __slots__ = ("_by_size", "_kept_bytes")

    def __init__(self) -> None:
        self._by_size: dict[int, list[bytearray]] = {}
        self._kept_bytes = 0

    def take(self, count: int) -> memoryview:
        """`count` writable bytes, with anything in them."""
        if not BUFFER_BYTES_MIN <= count <= BUFFER_BYTES_MAX:
            return memoryview(bytearray(count))
        size = 1 << (count - 1).bit_length()
        kept = self._by_size.setdefault(size, [])
        for buffer in kept:
            if getrefcount(buffer) == _UNUSED:
                return memoryview(buffer)[:count]
        if self._kept_bytes + size > KEPT_BYTES_MAX:
            self._let_go()
        if self._kept_bytes + size > KEPT_BYTES_MAX:
            return memoryview(bytearray(count))
        buffer = bytearray(size)
        kept.append(buffer)
        self._kept_bytes += size
        return memoryview(buffer)[:count]

    def _let_go(self) -> None:
        """Frames have another size now: keep only what is in use."""
        for size, kept in self._by_size.items():
            used = [buffer for buffer in kept if getrefcount(buffer) > _UNUSED]
            self._kept_bytes -= size * (len(kept) - len(used))
            kept[:] = used
