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

Every number is checked before anything is allocated for it, and memory for a frame is taken as its
bytes arrive, not when they are announced. What does not fit is a RemoteProtocolError, after which
the stream has no meaning and the decoder refuses to go on. What a header says is not looked at
here.
"""

from collections.abc import Callable, Collection, Sequence
from struct import Struct

from raftq.client.common.errors import LocalProtocolError, RemoteProtocolError, TooLarge
from raftq.client.common.types import Buffer
from raftq.client.wire.buffers import Buffers

FRAME_BYTES_MAX = 72 * 1024 * 1024  # a batch of BATCH_BYTES_MAX and its header, with room to spare
HEADER_BYTES_MAX = 1024 * 1024
JOIN_BYTES_MAX = 4096  # below this a copy is cheaper than one more fragment
SCRATCH_BYTES = 128 * 1024
PEEK_BYTES = 4096
OWN_BYTES_MIN = 4096  # a frame over this that has not arrived whole gets a buffer of its own
DIRECT_BYTES_MIN = (
    128 * 1024
)  # from here on one more read is cheaper than copying what one read got
FIRST_BYTES = 64 * 1024  # taken for a frame before it has shown that it is really as big
TRUST_BYTES_MAX = 8 * 1024 * 1024  # the same, where the frame before it was

PREFIX = Struct("<IBBHII")
PREFIX_BYTES = PREFIX.size
LENGTH_BYTES = 4
_LEAST = PREFIX_BYTES - LENGTH_BYTES

_NOTHING = memoryview(b"")


class Frame:
    """One received frame. Its raw part is writable memory that nothing else uses."""

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


def _always(count: int) -> bool:
    return True


class FrameDecoder:
    """Cuts a stream into frames: write into `get_buffer()`, tell `received()`, take `next_frame()`
    until it gives None.

    Bytes are received into a scratch buffer, from which small frames are cut. All decoders of one
    event loop may share it, because between two reads a decoder keeps nothing there: what is left
    of a small frame it copies, and a frame over 4 KiB whose end has not arrived gets a buffer of
    its own, which `get_buffer` then gives, and not a byte more. That buffer grows with what has
    arrived, so that a length alone takes no memory. After a frame of 128 KiB or more the decoder
    only peeks at the next one, so that little of it has to be copied.

    `allow(bytes)` is asked before memory is taken for a big frame. If it says no, the decoder is
    `starved`: the caller must not read on until `next_frame()` was called again with more success.
    A caller that stops before it got None calls `keep()`: frames not taken wait in the decoder.
    """

    __slots__ = (
        "_allow", "_buffers", "_data", "_end", "_failed", "_filled", "_kinds", "_last_bytes",
        "_own", "_own_bytes", "_peek", "_prefix", "_prior", "_scratch", "_start", "_target",
        "frame_bytes_max", "header_bytes_max", "starved",
    )  # fmt: skip

    def __init__(
        self,
        kinds: Collection[int],
        frame_bytes_max: int = FRAME_BYTES_MAX,
        header_bytes_max: int = HEADER_BYTES_MAX,
        scratch: memoryview | None = None,
        allow: Callable[[int], bool] = _always,
        buffers: Buffers | None = None,
    ) -> None:
        self._buffers = Buffers() if buffers is None else buffers
        self.frame_bytes_max = frame_bytes_max
        self.header_bytes_max = header_bytes_max
        self.starved = False
        self._kinds = kinds
        self._allow = allow
        self._scratch = memoryview(bytearray(SCRATCH_BYTES)) if scratch is None else scratch
        self._data = _NOTHING  # holds what was received and not yet taken, from _start to _end
        self._start = self._end = 0
        self._target = _NOTHING  # what get_buffer gave a part of: it begins with _prior old bytes
        self._prior = 0
        self._peek = False
        self._own: memoryview | None = None  # header and raw part of a big frame, as far as taken
        self._own_bytes = 0  # what _own must have in the end
        self._filled = 0  # bytes of _own that have arrived
        self._last_bytes = 0  # of the big frame before
        self._prefix = (0, 0, 0)  # kind, header_length, correlation_id of the big frame
        self._failed = ""

    @property
    def receiving(self) -> int:
        """Bytes that have arrived of a big frame which is not whole yet."""
        return PREFIX_BYTES + self._filled if self._own is not None else 0

    def get_buffer(self, window: int = SCRATCH_BYTES) -> memoryview:
        """Where the next bytes belong, never empty; about `window` bytes for small frames. It is
        valid until the next call of a method."""
        if self._own is not None:
            if self._filled == len(self._own) < self._own_bytes:
                self._grow()
            return self._own[self._filled :]
        if self._peek or window < PEEK_BYTES:
            window = PEEK_BYTES
        self._prior = prior = self._end - self._start
        target = self._scratch
        if prior:
            window = max(window, prior + PEEK_BYTES)
            if window > len(target):
                target = memoryview(bytearray(window))
            target[:prior] = self._data[self._start : self._end]
        self._target = target
        return target[prior:window]

    def received(self, count: int) -> None:
        """`count` bytes were written to the start of the last `get_buffer()`."""
        if self._own is not None:
            self._filled += count
        else:
            self._data = self._target
            self._start, self._end = 0, self._prior + count

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more bytes arrive. Raises RemoteProtocolError."""
        if self._failed:
            raise RemoteProtocolError(self._failed)
        if self._own is not None:
            return self._take_own()
        start = self._start
        if self._end - start < PREFIX_BYTES:
            self.keep()
            return None
        data = self._data
        length, kind, flags, reserved, header_length, correlation_id = PREFIX.unpack_from(
            data, start
        )
        header_at = start + PREFIX_BYTES
        raw_at = header_at + header_length
        end = start + LENGTH_BYTES + length
        if (
            end - start > self.frame_bytes_max
            or raw_at > end
            or header_length > self.header_bytes_max
            or flags
            or reserved
            or kind not in self._kinds
        ):
            self._refuse(PREFIX.unpack_from(data, start))
        if end > self._end:
            if end - start > OWN_BYTES_MIN:
                self._begin_own(end - header_at, (kind, header_length, correlation_id))
            else:
                self.keep()
            return None
        self._start = end
        self._peek = False
        return Frame(
            kind,
            correlation_id,
            bytes(data[header_at:raw_at]),
            memoryview(bytearray(data[raw_at:end])) if raw_at < end else _NOTHING,
        )

    def keep(self) -> None:
        """Leave the scratch buffer to others: copy what is left in it."""
        data = self._data
        if data.obj is not self._scratch.obj:
            return  # kept already
        left = self._end - self._start
        self._data = memoryview(bytearray(data[self._start : self._end])) if left else _NOTHING
        self._start, self._end = 0, left

    def clear(self) -> None:
        """Let go of all memory; the stream is over."""
        self._data = self._target = self._scratch = _NOTHING
        self._start = self._end = self._prior = 0
        self._own = None
        self._allow = _always
        self._failed = "the stream is over"

    def _refuse(self, fields: tuple[int, ...]) -> None:
        length, kind, flags, reserved, header_length, _ = fields
        size = length + LENGTH_BYTES
        if size > self.frame_bytes_max:
            reason = f"a frame of {size} bytes is over the limit of {self.frame_bytes_max}"
        elif length < _LEAST:
            reason = f"a frame of {size} bytes has no room for its own prefix"
        elif kind not in self._kinds:
            reason = f"frame kind {kind} is not known here"
        elif flags or reserved:
            reason = f"frame flags {flags:#x} and {reserved:#x} are not known here"
        elif header_length > length - _LEAST:
            reason = f"a header of {header_length} bytes does not fit in a frame of {size}"
        else:
            reason = (
                f"a header of {header_length} bytes is over the limit of {self.header_bytes_max}"
            )
        self._failed = reason
        raise RemoteProtocolError(reason)

    def _begin_own(self, size: int, prefix: tuple[int, int, int]) -> None:
        """Move the frame that has begun, and nothing else is left, to a buffer of its own."""
        start = self._start + PREFIX_BYTES
        arrived = self._end - start
        trusted = min(self._last_bytes, TRUST_BYTES_MAX)
        room = min(size, max(FIRST_BYTES, 2 * arrived, trusted))
        self.starved = not self._allow(room)
        if self.starved:
            self.keep()
            return
        self._own = self._buffers.take(room)
        self._own[:arrived] = self._data[start : self._end]
        self._own_bytes, self._filled = size, arrived
        self._prefix = prefix
        self._data = _NOTHING
        self._start = self._end = 0

    def _grow(self) -> None:
        own = self._own
        assert own is not None
        self._own = self._buffers.take(min(self._own_bytes, 2 * len(own)))
        self._own[: len(own)] = own

    def _take_own(self) -> Frame | None:
        own = self._own
        assert own is not None
        filled = self._filled
        if filled < self._own_bytes:
            if filled == len(own):
                self.starved = not self._allow(min(self._own_bytes, 2 * filled) - filled)
                if not self.starved:
                    self._grow()
            return None
        self._own = None
        self._last_bytes = filled
        self._peek = filled >= DIRECT_BYTES_MIN
        kind, header_length, correlation_id = self._prefix
        return Frame(kind, correlation_id, bytes(own[:header_length]), own[header_length:])
