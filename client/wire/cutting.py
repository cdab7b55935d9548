"""Cutting some records out of a batch without touching the others. (Pure.)

A queue worker may have leased a few records of a big batch: what it gets is a batch with just
those, made from slices of the columns. It is a new batch of the same offsets: uncompressed, without
a producer, with a checksum of its own. So the checksum of the source is to be checked before.
"""

from array import array

from raftq.client.common.errors import CorruptBatch
from raftq.client.wire import columns
from raftq.client.wire.batch import Batch
from raftq.client.wire.codecs import CODEC_NONE
from raftq.client.wire.encoder import assemble, stamp
from raftq.client.wire.layout import (
    FLAG_HEADERS,
    FLAG_KEY_NULLS,
    FLAG_KEYS,
    FLAG_OFFSET_DELTAS,
    FLAG_TIMESTAMPS,
    WIDE,
)


def cut_batch(batch: Batch, start: int, end: int) -> bytearray:
    """The records at the offsets [start, end) of a checked batch without gaps."""
    assert batch.base_offset <= start < end <= batch.end_offset, (batch.describe(), start, end)
    assert not batch.flags & FLAG_OFFSET_DELTAS, batch.describe()
    first, last = start - batch.base_offset, end - batch.base_offset
    flags = batch.flags
    body, base = batch.body()
    parts: list[bytes] = []
    for flag in WIDE:
        if flags & flag:
            at = base + batch.wide_at(flag)
            parts.append(bytes(body[at + 8 * first : at + 8 * last]))
    bounds = (batch.base_timestamp, batch.max_timestamp)
    if flags & FLAG_TIMESTAMPS:
        timestamps = memoryview(parts[0]).cast("q")
        bounds = (timestamps[0], max(timestamps))
    sections: dict[str, bytes] = {"keys": b"", "values": b"", "headers": b""}
    for name, flag in (("values", 0), ("keys", FLAG_KEYS), ("headers", FLAG_HEADERS)):
        if flags & flag == flag:
            ends, sections[name] = _section(batch, name, first, last)
            parts.append(ends)
    if flags & FLAG_KEY_NULLS:
        bits = int.from_bytes(batch.key_validity(), "little") >> first
        count = last - first
        parts.append((bits & ((1 << count) - 1)).to_bytes((count + 7) >> 3, "little"))
    parts += sections.values()
    lengths = [len(section) for section in sections.values()]
    body_length = sum(map(len, parts))
    shape = (flags, batch.lane, 0, last - first, last - first)
    made = assemble(CODEC_NONE, (*shape, -1, 0, 0, *bounds, *lengths, body_length), parts)
    stamp(made, start, batch.epoch)
    return made


def _section(batch: Batch, name: str, first: int, last: int) -> tuple[bytes, bytes]:
    """The offsets and the bytes of records [first, last) of one section."""
    body, base = batch.body()
    at = base + batch.column_at(name)
    ends = columns.unpack_numbers("I", body, at + 4 * first, at + 4 * (last + 1))
    start, length = batch.section(name)
    low, high = ends[0], ends[-1]
    if sorted(ends) != ends or high > length:
        raise CorruptBatch(f"the offsets of the {name} of {batch} are damaged")
    moved = array("I", [each - low for each in ends]).tobytes()
    return moved, bytes(body[base + start + low : base + start + high])
