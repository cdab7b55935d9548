"""The header of a record batch: one layout, and the parts of it that loops read or write. (Pure.)

batch.py draws the whole batch. Every struct here is derived from the one table of fields, so a
part cannot disagree with the whole. The functions pass over stored batches by their headers alone:
they stop at bytes that cannot be a batch, and leave all other checks to the decoder of the batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct, calcsize

from crc32c import crc32c

from raftq.client.common.errors import CorruptBatch, UnknownFormat
from raftq.client.common.types import Buffer
from raftq.client.wire.layout import BATCH_BYTES_MAX, HEADER_BYTES, LANE_COUNT, MAGIC, VERSION

FORMATS = {
    "magic": "2s",
    "version": "B",
    "codec": "B",
    "length": "I",
    "base_offset": "q",
    "epoch": "I",
    "stamp_crc": "I",
    "crc": "I",
    "flags": "H",
    "lane": "B",
    "reserved": "B",
    "count": "I",
    "span": "I",
    "producer_id": "q",
    "producer_epoch": "I",
    "base_sequence": "I",
    "base_timestamp": "q",
    "max_timestamp": "q",
    "keys_length": "I",
    "values_length": "I",
    "headers_length": "I",
    "body_length": "I",
}
"""Every field in its order, with its struct format."""


def position_of(field: str) -> int:
    """Return the byte at which the field starts."""
    names = list(FORMATS)
    return calcsize("<" + "".join(FORMATS[name] for name in names[: names.index(field)]))


def fields_struct(*fields: str) -> Struct:
    """Make a struct that starts at the first of these fields and skips the bytes between them."""
    layout, at = "<", position_of(fields[0])
    for field in fields:
        start = position_of(field)
        layout += f"{start - at}x" * (start > at) + FORMATS[field]
        at = start + calcsize("<" + FORMATS[field])
    return Struct(layout)


_ALL = tuple(FORMATS)
HEADER = fields_struct(*_ALL)
assert HEADER.size == HEADER_BYTES

# The three parts in which an encoder writes a header.
FRONT = fields_struct(*_ALL[: _ALL.index("stamp_crc")])  # what stamp_crc covers
CRCS = fields_struct("stamp_crc", "crc")
CRCS_AT = position_of("stamp_crc")
CRC = fields_struct("crc")
CRC_AT = position_of("crc")
REST = fields_struct(*_ALL[_ALL.index("flags") :])  # the header's part of what crc covers
REST_AT = position_of("flags")

# What a leader writes into a batch; stamp_crc, at CRCS_AT, goes with it.
STAMP = fields_struct("base_offset", "epoch")
STAMP_AT = position_of("base_offset")

PRODUCER = fields_struct("producer_id", "producer_epoch", "base_sequence")
PRODUCER_AT = position_of("producer_id")

# What an index needs of a batch, from REST_AT on.
FACTS = fields_struct("flags", "lane", "count", "span", "max_timestamp")

# What a walk from batch to batch needs.
BOUNDS = fields_struct("magic", "version", "length", "base_offset", "stamp_crc", "span")

# What a check of a whole stored batch needs.
CHECKED = fields_struct(
    "magic", "version", "length", "base_offset", "epoch", "stamp_crc", "crc", "flags", "lane",
    "count", "span", "producer_id", "producer_epoch", "base_sequence", "base_timestamp",
    "max_timestamp",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StampedFront:
    """The part of a header that its stamp_crc proves."""

    length: int
    base_offset: int


def read_front(buffer: Buffer, at: int) -> StampedFront | None:
    """Return the stamped fields at `at`, or None when nothing trustworthy is there.

    A batch of another version is not damage: its stamp is right, so it raises UnknownFormat.
    """
    if at + HEADER_BYTES > len(buffer):
        return None
    magic, version, length, base, stamp_crc, _ = BOUNDS.unpack_from(buffer, at)
    if magic != MAGIC or crc32c(buffer[at : at + CRCS_AT]) != stamp_crc:
        return None
    if version != VERSION:
        raise UnknownFormat(
            f"batch version {version} is not known here (newest known: {VERSION}); "
            "it was written by a newer version of RaftQ"
        )
    if not HEADER_BYTES <= length <= BATCH_BYTES_MAX or base < 0:
        return None
    return StampedFront(length, base)


def facts_make_sense(lane: int, count: int, span: int) -> bool:
    """Report whether an index can hold these fields; decoding checks everything else."""
    return lane < LANE_COUNT and span >= 1 and count <= span


def iter_batches(data: memoryview) -> Iterator[memoryview]:
    """Yield each of these whole batches."""
    at = 0
    size = len(data)
    while at < size:
        length, _, _ = _bounds(data, at)
        yield data[at : at + length]
        at += length


def end_offset_of(data: Buffer) -> int:
    """Return the offset after the last of these whole batches; 0 when there is none."""
    end = at = 0
    size = len(data)
    while at < size:
        length, base, span = _bounds(data, at)
        end = base + span
        at += length
    return end


def clip_below(data: Buffer, offset: int) -> Buffer:
    """Return the batches that begin below the offset."""
    at = 0
    size = len(data)
    while at < size:
        length, base, _ = _bounds(data, at)
        if base >= offset:
            return memoryview(data)[:at]
        at += length
    return data


def _bounds(data: Buffer, at: int) -> tuple[int, int, int]:
    """Return (length, base_offset, span) of the batch at `at`."""
    if len(data) - at < HEADER_BYTES:
        raise CorruptBatch(f"a batch header is due, but only {len(data) - at} bytes are left")
    magic, _, length, base, _, span = BOUNDS.unpack_from(data, at)
    if magic != MAGIC or length < HEADER_BYTES or length > len(data) - at or base < 0:
        raise CorruptBatch(f"a batch is due at byte {at} of what was read, but there is none")
    return length, base, span
