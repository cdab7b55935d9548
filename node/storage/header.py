"""A batch header read without building a `Batch`: for loops over many batches. (Pure.)

The layout is that of `client/wire/batch.py`; a test compares the two.
"""

from dataclasses import dataclass
from struct import Struct

from crc32c import crc32c

from raftq.client.common.errors import UnknownFormat
from raftq.client.wire.batch import BATCH_BYTES_MAX, HEADER_BYTES, LANE_COUNT, MAGIC, VERSION

# magic version codec length base_offset epoch stamp_crc crc flags lane count span max_timestamp
HEADER = Struct("<2sBBIqIIIHBxII24xq")
# flags lane count span max_timestamp, from byte 28
FACTS = Struct("<HBxII24xq")
FACTS_AT = 28
STAMP = Struct("<qI")
STAMP_AT = 8
STAMP_CRC = Struct("<I")
STAMP_CRC_AT = 20


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Offsets [start, end) that cannot be read, and the bytes [position, end_position) they held.

    A range of offsets whose file is missing has no bytes; bytes that never held a batch have no
    offsets.
    """

    start: int
    end: int
    path: str
    position: int
    end_position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Front:
    """The part of a header that its stamp vouches for."""

    length: int
    base_offset: int


def read_front(buffer: bytes, at: int) -> Front | None:
    """The stamped fields at `at`, or None when nothing trustworthy is there.

    A batch of another version is not damage: its stamp is right and so it raises UnknownFormat.
    """
    if at + HEADER_BYTES > len(buffer):
        return None
    magic, version, _, length, base, _, stamp_crc, *_ = HEADER.unpack_from(buffer, at)
    if magic != MAGIC or crc32c(buffer[at : at + STAMP_CRC_AT]) != stamp_crc:
        return None
    if version != VERSION:
        raise UnknownFormat(
            f"batch version {version} is not known here (newest known: {VERSION}); "
            "it was written by a newer version of RaftQ"
        )
    if not HEADER_BYTES <= length <= BATCH_BYTES_MAX or base < 0:
        return None
    return Front(length, base)


def facts_make_sense(lane: int, count: int, span: int) -> bool:
    """Whether an index can be built from these fields; everything else is checked on decoding."""
    return lane < LANE_COUNT and span >= 1 and count <= span
