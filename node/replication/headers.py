"""Walking over stored batches by their headers alone. (Pure.)

For bytes that a log has read: they are checked by whoever decodes them, so here is only what keeps
a walk over damaged bytes from going astray.
"""

from collections.abc import Iterator
from struct import Struct

from raftq.client.common.errors import CorruptBatch
from raftq.client.common.types import Buffer
from raftq.client.wire.batch import HEADER_BYTES, MAGIC

# magic, version, codec, length, base_offset, epoch; then span at 36
_FRONT = Struct("<2sBBIqI16xI")


def end_of_batches(data: Buffer) -> int:
    """The offset after the last of these whole batches."""
    end = at = 0
    size = len(data)
    while at < size:
        length, base, span = _front(data, at)
        end = base + span
        at += length
    return end


def below(data: Buffer, offset: int) -> Buffer:
    """The batches that begin below the offset."""
    at = 0
    size = len(data)
    while at < size:
        length, base, _ = _front(data, at)
        if base >= offset:
            return memoryview(data)[:at]
        at += length
    return data


def each_batch(data: memoryview) -> Iterator[memoryview]:
    at = 0
    size = len(data)
    while at < size:
        length, _, _ = _front(data, at)
        yield data[at : at + length]
        at += length


def _front(data: Buffer, at: int) -> tuple[int, int, int]:
    if len(data) - at < HEADER_BYTES:
        raise CorruptBatch(f"{len(data) - at} bytes are left where a batch header is due")
    magic, _, _, length, base, _, span = _FRONT.unpack_from(data, at)
    if magic != MAGIC or length < HEADER_BYTES or length > len(data) - at or base < 0:
        raise CorruptBatch(f"no batch where one is due, {at} bytes into what was read")
    return length, base, span
