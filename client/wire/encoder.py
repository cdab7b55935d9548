"""Writing record batches: columns in, bytes out. (Pure.)

Encodes and stamps; batch.py draws the layout and reads it. Everything that would make a batch
unreadable is refused as InvalidArgument or TooLarge before a byte leaves.
"""

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError

from crc32c import crc32c

from raftq.client.common.errors import InvalidArgument, TooLarge
from raftq.client.wire import columns
from raftq.client.wire.codecs import CODEC_NONE, compress
from raftq.client.wire.headers import CRC, CRCS, CRCS_AT, FRONT, REST, REST_AT, STAMP, STAMP_AT
from raftq.client.wire.layout import (
    BATCH_BYTES_MAX,
    FLAG_CONTROL,
    FLAG_EXPIRIES,
    FLAG_HEADERS,
    FLAG_KEY_NULLS,
    FLAG_KEYS,
    FLAG_OFFSET_DELTAS,
    HEADER_BYTES,
    LANE_COUNT,
    LANE_NORMAL,
    MAGIC,
    NO_PRODUCER,
    RECORDS_MAX,
    VERSION,
    WIDE,
    BatchProducer,
)
from raftq.client.wire.record import Headers, pack_headers

_LANES = range(LANE_COUNT)
# What crc covers before the bytes of one record, by the flags that encode_one can set.
_ONE = {
    expiry | key | headers: Struct(
        REST.format + "q" * bool(expiry) + "II" * (1 + bool(key) + bool(headers))
    )
    for expiry in (0, FLAG_EXPIRIES)
    for key in (0, FLAG_KEYS)
    for headers in (0, FLAG_HEADERS)
}
_PLAIN = _ONE[0]


def encode(  # noqa: PLR0913 - the columns of a batch are its arguments
    values: Sequence[bytes],
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Headers | None] | None = None,
    timestamps: int | Sequence[int] = 0,
    expiries: Sequence[int] | None = None,
    *,
    deliver_at: Sequence[int] | None = None,
    delay_offsets: Sequence[int] | None = None,
    offset_deltas: Sequence[int] | None = None,
    span: int | None = None,
    lane: int = LANE_NORMAL,
    codec: int = CODEC_NONE,
    control: bool = False,
    producer: BatchProducer = NO_PRODUCER,
) -> bytearray:
    """Encode records given as columns, stamped with offset 0 and epoch 0 until a leader does.

    The caller has checked the limits on single records (`check_record_limits`); what would break
    the format itself is refused here.
    """
    count = len(values)
    if (
        count == 1
        and codec == CODEC_NONE
        and producer is NO_PRODUCER
        and not control
        and span is None
        and deliver_at is delay_offsets is offset_deltas is None
    ):
        one = _encode_alone(values[0], keys, headers, timestamps, expiries, lane)
        if one is not None:
            return one
    span = count if span is None else span
    _check_shape(count, span, lane, offset_deltas)
    flags, parts, bounds = _wide_columns(count, timestamps, expiries, deliver_at, delay_offsets)
    if control:
        flags |= FLAG_CONTROL
    if offset_deltas is not None:
        flags |= FLAG_OFFSET_DELTAS
        parts.append(columns.pack_numbers("I", offset_deltas, count, "offset_deltas"))
    section_flags, ends, items, lengths = _sections(values, keys, headers)
    parts += ends
    body_length = sum(map(len, parts)) + sum(lengths)
    origin = (producer.id, producer.epoch, producer.base_sequence)
    shape = (flags | section_flags, lane, 0, count, span)
    return assemble(codec, (*shape, *origin, *bounds, *lengths, body_length), parts + items)


def _sections(
    values: Sequence[bytes],
    keys: Sequence[bytes | None] | None,
    headers: Sequence[Headers | None] | None,
) -> tuple[int, list[bytes], list[bytes], tuple[int, int, int]]:
    """Flags, the offset columns and bitmap, the bytes of all sections, and their lengths."""
    count = len(values)
    flags = keys_length = headers_length = 0
    column, values_length = columns.pack_ends(values, "values")
    parts = [column]
    items: list[bytes] = []
    validity = b""
    if keys is not None:
        columns.check_length(keys, count, "keys")
        flags |= FLAG_KEYS
        items += [b"" if key is None else key for key in keys]
        column, keys_length = columns.pack_ends(items, "keys")
        parts.append(column)
        if None in keys:
            flags |= FLAG_KEY_NULLS
            validity = columns.pack_validity(keys)
    items += values
    if headers is not None:
        columns.check_length(headers, count, "headers")
        if any(headers):
            flags |= FLAG_HEADERS
            packed = [pack_headers(item) for item in headers]
            column, headers_length = columns.pack_ends(packed, "headers")
            parts.append(column)
            items += packed
    parts.append(validity)
    return flags, parts, items, (keys_length, values_length, headers_length)


def _encode_alone(
    value: bytes,
    keys: Sequence[bytes | None] | None,
    headers: Sequence[Headers | None] | None,
    timestamps: int | Sequence[int],
    expiries: Sequence[int] | None,
    lane: int,
) -> bytearray | None:
    """The same bytes by the short way, or None when only the long way gives them (or an error)."""
    key, packed, expiry = None, b"", 0
    if not isinstance(timestamps, int):
        return None
    if keys is not None:
        if len(keys) != 1 or keys[0] is None:
            return None
        key = keys[0]
    if expiries is not None:
        if len(expiries) != 1 or not expiries[0]:
            return None
        expiry = expiries[0]
    if headers is not None:
        if len(headers) != 1:
            return None
        packed = pack_headers(headers[0])
    return encode_one(value, timestamps, lane, key, packed, expiry)


def _check_shape(count: int, span: int, lane: int, offset_deltas: Sequence[int] | None) -> None:
    if lane not in _LANES:
        raise InvalidArgument(f"lane {lane} is not in 0..{LANE_COUNT - 1}")
    if count > RECORDS_MAX:
        raise TooLarge(f"a batch of {count} records is over the limit of {RECORDS_MAX}")
    if span < 1:
        raise InvalidArgument("a batch covers at least one offset: no values need a span")
    if offset_deltas is None:
        if span != count:
            raise InvalidArgument(f"{count} values in a span of {span} need offset_deltas")
    elif offset_deltas and not columns.increase(offset_deltas, span):
        raise InvalidArgument(f"offset_deltas must increase and stay below the span of {span}")


def _wide_columns(
    count: int, timestamps: int | Sequence[int], *optional: Sequence[int] | None
) -> tuple[int, list[bytes], tuple[int, int]]:
    """Flags, the 8-byte columns in their order, and (base, max) timestamp."""
    flags = 0
    parts: list[bytes] = []
    bounds = (0, 0)
    every: list[Sequence[int] | None] = [None, *optional]
    if isinstance(timestamps, int):
        bounds = (timestamps, timestamps)
    elif count:
        every[0] = timestamps
    for column, (flag, name) in zip(every, WIDE.items(), strict=True):
        if column is not None:
            flags |= flag
            parts.append(columns.pack_numbers("q", column, count, name))
    if every[0] is not None:
        bounds = (every[0][0], max(every[0]))
    return flags, parts, bounds


def assemble(codec: int, fields: tuple[int, ...], parts: list[bytes]) -> bytearray:
    """Join header and parts with one copy, and checksum the result in place."""
    body_length = fields[-1]
    if HEADER_BYTES + body_length > BATCH_BYTES_MAX:
        raise TooLarge(f"a body of {body_length} bytes is over the limit of {BATCH_BYTES_MAX}")
    try:
        rest = REST.pack(*fields)
        batch = bytearray().join((bytes(REST_AT), rest, *parts))
    except (StructError, TypeError) as error:
        raise InvalidArgument(f"this does not fit in a batch: {error}") from error
    if len(batch) != HEADER_BYTES + body_length:
        raise InvalidArgument("keys and values must be bytes")
    if codec != CODEC_NONE:
        codec, body = compress(codec, bytes(batch[HEADER_BYTES:]))
        batch[HEADER_BYTES:] = body
    batch[:CRCS_AT] = front = FRONT.pack(MAGIC, VERSION, codec, len(batch), 0, 0)
    with memoryview(batch) as view, view[REST_AT:] as covered:
        CRCS.pack_into(batch, CRCS_AT, crc32c(front), crc32c(covered))
    return batch


def encode_one(
    value: bytes,
    timestamp: int,
    lane: int = LANE_NORMAL,
    key: bytes | None = None,
    headers: bytes = b"",
    expiry: int = 0,
) -> bytearray:
    """Encode one record the shortest way; `headers` are packed already (`pack_headers`)."""
    if lane not in _LANES:
        raise InvalidArgument(f"lane {lane} is not in 0..{LANE_COUNT - 1}")
    try:
        size = len(value)
        if key is None and not headers and not expiry:
            rest = _PLAIN.pack(
                0, lane, 0, 1, 1, -1, 0, 0, timestamp, timestamp, 0, size, 0, 8 + size, 0, size
            )
            body_length = 8 + size
            rest += value
        else:
            rest, body_length = _one(value, timestamp, lane, key, headers, expiry)
    except (StructError, TypeError) as error:
        raise InvalidArgument(f"this does not fit in a batch: {error}") from error
    return _seal_one(rest, body_length)


def encode_control(value: bytes) -> bytearray:
    """Encode one control record of a ledger or delays log, the shortest way."""
    size = len(value)
    rest = _PLAIN.pack(
        FLAG_CONTROL, LANE_NORMAL, 0, 1, 1, -1, 0, 0, 0, 0, 0, size, 0, 8 + size, 0, size
    )  # fmt: skip
    return _seal_one(rest + value, 8 + size)


def _seal_one(rest: bytes, body_length: int) -> bytearray:
    """Put the header's front and both checksums before the rest of a batch of one record."""
    if len(rest) != REST.size + body_length:
        raise InvalidArgument("key and value must be bytes")
    length = HEADER_BYTES + body_length
    if length > BATCH_BYTES_MAX:
        raise TooLarge(f"a batch of {length} bytes is over the limit of {BATCH_BYTES_MAX}")
    front = FRONT.pack(MAGIC, VERSION, CODEC_NONE, length, 0, 0)
    return bytearray().join((front, CRCS.pack(crc32c(front), crc32c(rest)), rest))


def _one(
    value: bytes, timestamp: int, lane: int, key: bytes | None, headers: bytes, expiry: int
) -> tuple[bytes, int]:
    """Everything that crc covers and the body's length, for a record with more than a value."""
    flags = 0
    value_size, header_size = len(value), len(headers)
    numbers = [0, value_size]
    if expiry:
        flags = FLAG_EXPIRIES
        numbers = [expiry, 0, value_size]
    if key is None:
        key = b""
    else:
        flags |= FLAG_KEYS
        numbers += (0, len(key))
    if header_size:
        flags |= FLAG_HEADERS
        numbers += (0, header_size)
    layout = _ONE[flags]
    key_size = len(key)
    body_length = layout.size - REST.size + key_size + value_size + header_size
    rest = layout.pack(
        flags, lane, 0, 1, 1, -1, 0, 0, timestamp, timestamp,
        key_size, value_size, header_size, body_length, *numbers,
    )  # fmt: skip
    return b"".join((rest, key, value, headers)), body_length


def stamp(batch: bytearray | memoryview, base_offset: int, epoch: int) -> None:
    """Write the leader's fields in place; the producer's checksum stays valid."""
    assert base_offset >= 0, base_offset
    STAMP.pack_into(batch, STAMP_AT, base_offset, epoch)
    CRC.pack_into(batch, CRCS_AT, crc32c(batch[:CRCS_AT]))
