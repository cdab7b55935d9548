"""Batches without their keys, values and headers, for readers that only want numbers. (Pure.)

A reader that counts records, or looks at offsets and times, does not need what they hold. The
outline of a batch is a batch, too: it has as many records with the same offsets, times, lane and
producer, all of them empty, and a checksum of its own. So it is read like any other batch. It is
made from a batch whose checksum was compared; a damaged batch is passed on as it is, and its reader
finds the damage.
"""

from raftq.client.common.errors import CorruptBatch, UnknownFormat
from raftq.client.common.types import Buffer
from raftq.client.wire.batch import Batch
from raftq.client.wire.codecs import CODEC_NONE
from raftq.client.wire.encoder import assemble, stamp
from raftq.client.wire.layout import (
    FLAG_CONTROL,
    FLAG_HEADERS,
    FLAG_KEY_NULLS,
    FLAG_KEYS,
    HEADER_BYTES,
)

_LEFT_OUT = FLAG_KEYS | FLAG_KEY_NULLS | FLAG_HEADERS


def outlines(raw: Buffer) -> bytes:
    """The outlines of whole batches, one after the other as they are stored."""
    view = memoryview(raw)
    parts: list[Buffer] = []
    at, end = 0, len(raw)
    while at < end:
        try:
            batch = Batch(raw, at)
            parts.append(outline(batch))
        except (CorruptBatch, UnknownFormat):
            parts.append(view[at:])
            break
        at += batch.length
    return b"".join(parts)


def outline(batch: Batch) -> Buffer:
    """Control batches stay as they are, because what they say is in their values, and so do those
    that are packed so well that there is nothing to gain: an answer never grows by this."""
    starts, count = batch.column_at("values"), batch.count
    if batch.flags & FLAG_CONTROL or HEADER_BYTES + starts + 4 * (count + 1) >= batch.length:
        return memoryview(batch.buffer)[batch.position : batch.position + batch.length]
    batch.check_crc()
    body, base = batch.body()
    numbers = bytes(body[base : base + starts])
    ends = bytes(4 * (count + 1))
    shape = (batch.flags & ~_LEFT_OUT, batch.lane, 0, count, batch.span)
    origin = (batch.producer_id, batch.producer_epoch, batch.base_sequence)
    times = (batch.base_timestamp, batch.max_timestamp)
    fields = (*shape, *origin, *times, 0, 0, 0, len(numbers) + len(ends))
    made = assemble(CODEC_NONE, fields, [numbers, ends])
    stamp(made, batch.base_offset, batch.epoch)
    return made
