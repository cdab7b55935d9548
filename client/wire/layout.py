"""The numbers of the record batch: limits, flags and lanes. (Pure.)

batch.py draws the layout, headers.py reads and writes the header.
"""

from dataclasses import dataclass

MAGIC = b"RQ"
VERSION = 1

HEADER_BYTES = 88
BATCH_BYTES_MAX = 64 * 1024 * 1024
RECORDS_MAX = 1 << 20  # a decoded record costs far more memory than its 4 bytes of body
OFFSET_MAX = (1 << 63) - 1
LANE_COUNT = 5
LANE_NORMAL = 2

FLAG_KEYS = 1
FLAG_KEY_NULLS = 2
FLAG_TIMESTAMPS = 4
FLAG_EXPIRIES = 8
FLAG_HEADERS = 16
FLAG_DELIVER_AT = 32
FLAG_DELAY_OFFSETS = 64
FLAG_OFFSET_DELTAS = 128
FLAG_CONTROL = 256  # the values are control records of a ledger or delays log, not user data
FLAGS_KNOWN = 511

# The 8-byte columns: their order in the body is the order of their flags.
WIDE = {
    FLAG_TIMESTAMPS: "timestamps",
    FLAG_EXPIRIES: "expiries",
    FLAG_DELIVER_AT: "deliver_at",
    FLAG_DELAY_OFFSETS: "delay_offsets",
}
WIDE_FLAGS = sum(WIDE)


def _column_bytes(flags: int) -> tuple[int, int, int]:
    starts = 8 * (flags & WIDE_FLAGS).bit_count() + 4 * bool(flags & FLAG_OFFSET_DELTAS)
    sections = 1 + bool(flags & FLAG_KEYS) + bool(flags & FLAG_HEADERS)
    return starts, starts + 4 * sections, 4 * sections


# By flags: bytes per record in front of the value offsets, bytes per record of all number columns,
# and the bytes of their last slots.
COLUMN_BYTES = [_column_bytes(flags) for flags in range(FLAGS_KNOWN + 1)]


@dataclass(slots=True, frozen=True)
class BatchProducer:
    """Who made a batch, for idempotent appends; `NO_PRODUCER` without them."""

    id: int = -1
    epoch: int = 0
    base_sequence: int = 0


NO_PRODUCER = BatchProducer()
