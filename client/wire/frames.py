"""Frames: how messages are cut out of a byte stream. (Pure: the caller does the I/O.)

    byte  size  field
    0     4     length          bytes after this field
    4     1     kind            which message, see messages.py
    5     1     flags           none is known yet
    6     2     reserved        0
    8     4     header_length   bytes of the msgpack header
    12    4     correlation_id  of the request, repeated in its reply; 0 = about the connection
    16          header          a msgpack map
                raw             record batches as they are stored, to the end of the frame

All numbers are little-endian. Batches are never inside msgpack, so they can be sent from and
received into buffers of their own: `encode_frame` gives fragments instead of joining big buffers,
and the decoder asks for the rest of a big frame to be read straight into that frame's own buffer.

Every number is checked before anything is allocated for it; what does not fit is a
RemoteProtocolError, after which the stream has no meaning and the decoder refuses to go on. What a
header says is not looked at here.
"""

from collections.abc import Collection, Sequence
from struct import Struct

from raftq.client.wire.errors import LocalProtocolError, RemoteProtocolError, TooLarge

Buffer = bytes | bytearray | memoryview

FRAME_BYTES_MAX = 72 * 1024 * 1024  # a batch of BATCH_BYTES_MAX and its header, with room to spare
HEADER_BYTES_MAX = 1024 * 1024
JOIN_BYTES_MAX = 4096  # below this a copy is cheaper than one more fragment
WINDOW_BYTES_MIN = 4096
WINDOW_BYTES_MAX = 64 * 1024
FLAGS_KNOWN = 0

PREFIX = Struct("<IBBHII")
PREFIX_BYTES = PREFIX.size
LENGTH_BYTES = 4
_LEAST = PREFIX_BYTES - LENGTH_BYTES

_NOTHING = memoryview(b"")


class Frame:
    """One received frame. Its raw part is writable memory that nobody else uses."""

    __slots__ = ("correlation_id", "header", "kind", "raw")

    def __init__(
        self, kind: int, correlation_id: int, header: bytes, raw: memoryview = _NOTHING
    ) -> None:
        self.kind = kind
        self.correlation_id = correlation_id
        self.header = header
        self.raw = raw

    @property
    def size(self) -> int:
        """Bytes of the frame on the wire."""
        return PREFIX_BYTES + len(self.header) + len(self.raw)


def encode_frame(
    kind: int,
    correlation_id: int,
    header: bytes,
    raw: Sequence[Buffer] = (),
    bytes_max: int = FRAME_BYTES_MAX,
) -> list[Buffer]:
    """The frame as fragments to be written in order. Big parts of `raw` are passed on uncopied."""
    header_length = len(header)
    if header_length > HEADER_BYTES_MAX:
        raise TooLarge(
            f"a message header of {header_length} bytes is over the limit of {HEADER_BYTES_MAX}"
        )
    length = _LEAST + header_length
    for part in raw:
        if type(part) is memoryview and not (part.itemsize == 1 and part.c_contiguous):
            raise LocalProtocolError("the raw part of a frame must be plain bytes in one piece")
        length += len(part)
    if length + LENGTH_BYTES > bytes_max:
        raise TooLarge(f"a frame of {length + LENGTH_BYTES} bytes is over the limit of {bytes_max}")
    front = PREFIX.pack(length, kind, 0, 0, header_length, correlation_id) + header
    if not raw:
        return [front]
    if length <= JOIN_BYTES_MAX:
        return [b"".join((front, *raw))]
    return _fragments(front, raw)


def _fragments(front: bytes, raw: Sequence[Buffer]) -> list[Buffer]:
    """Join small neighbours, leave big parts alone."""
    fragments: list[Buffer] = []
    small: list[Buffer] = [front]
    held = len(front)
    for part in raw:
        size = len(part)
        if held + size > JOIN_BYTES_MAX and small:
            fragments.append(b"".join(small) if len(small) > 1 else small[0])
            small, held = [], 0
        if size > JOIN_BYTES_MAX:
            fragments.append(part)
        elif size:
            small.append(part)
            held += size
    if small:
        fragments.append(b"".join(small))
    return fragments


class FrameDecoder:
    """Cuts a stream into frames: write into `get_buffer()`, tell `received()`, take `next_frame()`.

    Small frames are cut from a window that grows with the traffic, from 4 KiB to 64 KiB. A frame
    over 4 KiB whose end has not arrived gets a buffer of its own, and `get_buffer` then gives the
    rest of that buffer and not a byte more. After it the window is small again, so that of the
    next big frame little has to be copied.

    Frames that were received but not taken stay in the window: a caller that takes none and reads
    none holds no more memory than it has.
    """

    __slots__ = (
        "_buffer", "_end", "_failed", "_filled", "_kinds", "_own", "_prefix", "_start", "_window",
        "frame_bytes_max", "header_bytes_max",
    )  # fmt: skip

    def __init__(
        self,
        kinds: Collection[int],
        frame_bytes_max: int = FRAME_BYTES_MAX,
        header_bytes_max: int = HEADER_BYTES_MAX,
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.header_bytes_max = header_bytes_max
        self._kinds = kinds
        self._buffer = bytearray(WINDOW_BYTES_MIN)
        self._start = self._end = 0  # the part of _buffer that is received and not yet taken
        self._window = WINDOW_BYTES_MIN  # bytes asked for at once
        self._own: memoryview | None = None  # header and raw part of a big frame
        self._filled = 0  # bytes of _own that have arrived
        self._prefix = (0, 0, 0)  # kind, header_length, correlation_id of the big frame
        self._failed = ""

    def get_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty. It is valid until the next call of a method."""
        if self._own is not None and self._filled < len(self._own):
            return self._own[self._filled :]
        if self._start:
            # Move what is left to the front; it is less than one small frame, mostly nothing.
            left = self._end - self._start
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left
        room_end = max(self._window, self._end + PREFIX_BYTES)
        if room_end > len(self._buffer):
            self._buffer = self._buffer.ljust(room_end, b"\0")
        return memoryview(self._buffer)[self._end : room_end]

    def received(self, count: int) -> None:
        """`count` bytes were written to the start of the last `get_buffer()`."""
        if self._own is not None and self._filled < len(self._own):
            self._filled += count
            return
        self._end += count
        if self._end >= self._window < WINDOW_BYTES_MAX:
            self._window *= 2

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more bytes arrive. Raises RemoteProtocolError."""
        if self._failed:
            raise RemoteProtocolError(self._failed)
        if self._own is not None:
            return self._take_own()
        start = self._start
        available = self._end - start
        if available < PREFIX_BYTES:
            return None
        fields = PREFIX.unpack_from(self._buffer, start)
        length, kind, _, _, header_length, correlation_id = fields
        self._check(fields)
        header_at = start + PREFIX_BYTES
        end = start + LENGTH_BYTES + length
        if end > self._end:
            if LENGTH_BYTES + length > WINDOW_BYTES_MIN:
                self._give_own(length - _LEAST, (kind, header_length, correlation_id))
            return None
        raw_at = header_at + header_length
        header = bytes(self._buffer[header_at:raw_at])
        raw = memoryview(self._buffer[raw_at:end]) if raw_at < end else _NOTHING
        self._start = end
        return Frame(kind, correlation_id, header, raw)

    def _check(self, fields: tuple[int, ...]) -> None:
        length, kind, flags, reserved, header_length, _ = fields
        size = length + LENGTH_BYTES
        if size > self.frame_bytes_max:
            self._fail(f"a frame of {size} bytes is over the limit of {self.frame_bytes_max}")
        if length < _LEAST:
            self._fail(f"a frame of {size} bytes has no room for its own prefix")
        if kind not in self._kinds:
            self._fail(f"frame kind {kind} is not known here")
        if flags & ~FLAGS_KNOWN or reserved:
            self._fail(f"frame flags {flags:#x} and {reserved:#x} are not known here")
        if header_length > length - _LEAST:
            self._fail(f"a header of {header_length} bytes does not fit in a frame of {size}")
        if header_length > self.header_bytes_max:
            self._fail(
                f"a header of {header_length} bytes is over the limit of {self.header_bytes_max}"
            )

    def _fail(self, reason: str) -> None:
        self._failed = reason
        raise RemoteProtocolError(reason)

    def _give_own(self, size: int, prefix: tuple[int, int, int]) -> None:
        """Move the frame that has begun, and nothing else is left, to a buffer of its own."""
        start = self._start + PREFIX_BYTES
        self._filled = self._end - start
        self._own = memoryview(bytearray(size))
        self._own[: self._filled] = memoryview(self._buffer)[start : self._end]
        self._prefix = prefix
        self._start = self._end = 0
        self._window = WINDOW_BYTES_MIN

    def _take_own(self) -> Frame | None:
        own = self._own
        assert own is not None
        if self._filled < len(own):
            return None
        self._own = None
        kind, header_length, correlation_id = self._prefix
        return Frame(kind, correlation_id, bytes(own[:header_length]), own[header_length:])
