"""Check the batches of a client before a leader stamps and appends them. (Pure.)

Clients are not trusted: magic, version, checksums, lengths, flags, lane and the limits of the topic
are checked for every batch, and one bad batch refuses the whole request. The cost is per batch and
per byte, not per record. The columns of single records are looked at only where a limit could be
broken. All else is checked when the batch is decoded.
"""

from dataclasses import dataclass
from itertools import pairwise

from crc32c import crc32c

from raftq.client.common.errors import CorruptBatch, InvalidArgument, RaftqError, TooLarge
from raftq.client.wire.batch import (
    BATCH_BYTES_MAX,
    CODEC_NONE,
    CODEC_ZSTD,
    FLAG_CONTROL,
    FLAG_DELAY_OFFSETS,
    FLAG_DELIVER_AT,
    FLAG_HEADERS,
    FLAG_KEY_NULLS,
    FLAG_KEYS,
    FLAG_OFFSET_DELTAS,
    FLAGS_KNOWN,
    HEADER_BYTES,
    LANE_COUNT,
    MAGIC,
    RECORDS_MAX,
    VERSION,
    Batch,
)
from raftq.client.wire.columns import PAIR
from raftq.client.wire.headers import CRC, CRCS_AT, FORMATS, HEADER, REST_AT
from raftq.client.wire.layout import COLUMN_BYTES
from raftq.client.wire.record import HEADERS_BYTES_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX

# Columns that only nodes write.
_FLAGS_REFUSED = FLAG_CONTROL | FLAG_OFFSET_DELTAS | FLAG_DELAY_OFFSETS
# These flags must match exactly: none is set except, in delayed batches, the due times.
_FLAGS_FIXED = ~FLAGS_KNOWN | _FLAGS_REFUSED | FLAG_DELIVER_AT

Incoming = tuple[int, int, int, int, int, int, int]
"""(start, length, producer_id, producer_epoch, base_sequence, count, max_timestamp) of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one request for one partition."""

    batch_bytes_max: int = BATCH_BYTES_MAX
    """The most bytes of one batch, compressed and uncompressed."""

    value_bytes_max: int = VALUE_BYTES_MAX
    """The most bytes of the value of one record."""

    batches_max: int = 1024
    """The most batches of one request. Each costs the leader time, however small it is."""

    delayed: bool = False
    """Whether the batches are delayed: then every batch has due times, otherwise none has."""


DEFAULT_LIMITS = Limits()


def check_incoming(raw: memoryview, limits: Limits = DEFAULT_LIMITS) -> list[Incoming]:
    """Check every batch of the bytes of a request, back to back, and return them.

    Raises CorruptBatch (UnknownFormat for a newer version) for bytes that are no batch,
    InvalidArgument for what clients may not send, and TooLarge for what is over a limit.
    """
    found: list[Incoming] = []
    at, size, bytes_max = 0, len(raw), limits.batch_bytes_max
    value_max = limits.value_bytes_max
    fixed = FLAG_DELIVER_AT if limits.delayed else 0
    while at + HEADER_BYTES <= size and len(found) < limits.batches_max:
        (
            magic, version, codec, length, _, _, stamp_crc, crc, flags, lane, reserved, count, span,
            producer_id, producer_epoch, base_sequence, _, time, keys, values, headers, body,
        ) = HEADER.unpack_from(raw, at)  # fmt: skip
        end = at + length
        starts, per_record, more = COLUMN_BYTES[flags & FLAGS_KNOWN]
        if flags & FLAG_KEY_NULLS:
            more += (count + 7) >> 3
        if (
            magic != MAGIC
            or version != VERSION
            or flags & _FLAGS_FIXED != fixed
            or not 0 < count <= RECORDS_MAX
            or span != count
            or end > size
            or length > bytes_max
            or HEADER_BYTES + body > bytes_max
            or per_record * count + more + keys + values + headers != body
            or (length != HEADER_BYTES + body if codec == CODEC_NONE else length <= HEADER_BYTES)
            or codec > CODEC_ZSTD
            or (keys and not flags & FLAG_KEYS)
            or (headers and not flags & FLAG_HEADERS)
            or flags & (FLAG_KEYS | FLAG_KEY_NULLS) == FLAG_KEY_NULLS
            or lane >= LANE_COUNT
            or reserved
            or producer_id < -1
            or crc32c(raw[at : at + CRCS_AT]) != stamp_crc
            or crc32c(raw[at + REST_AT : end]) != crc
        ):
            raise _refusal(raw, at, limits)
        if values > value_max or keys > KEY_BYTES_MAX or headers > HEADERS_BYTES_MAX:
            _check_sizes(Batch(raw, at), limits)
        elif codec == CODEC_NONE and not _bounds_fit(raw, at + HEADER_BYTES, starts, count, values):
            raise CorruptBatch(f"the offsets of the values of the batch at byte {at} are damaged")
        found.append((at, length, producer_id, producer_epoch, base_sequence, count, time))
        at = end
    if at != size or not found:
        raise _wrong_shape(len(found), size - at, limits)
    return found


def _bounds_fit(raw: memoryview, body_at: int, starts: int, count: int, values: int) -> bool:
    """Report whether the first and the last value offset are right. Decoding checks the others."""
    at = body_at + starts * count
    if count == 1:
        return bool(PAIR.unpack_from(raw, at) == (0, values))
    (first,) = CRC.unpack_from(raw, at)
    (last,) = CRC.unpack_from(raw, at + 4 * count)
    return bool(first == 0 and last == values)


def _check_sizes(batch: Batch, limits: Limits) -> None:
    """Check every record of a section that is larger than one record may be."""
    sections = (
        ("values", batch.values_length, limits.value_bytes_max),
        ("keys", batch.keys_length, KEY_BYTES_MAX),
        ("headers", batch.headers_length, HEADERS_BYTES_MAX),
    )
    for name, total, bytes_max in sections:
        if total > bytes_max:
            largest = max(end - start for start, end in pairwise(batch.ends(name)))
            if largest > bytes_max:
                raise TooLarge(
                    f"a record's {name} of {largest} bytes are over the limit of {bytes_max}"
                )


def _wrong_shape(count: int, left: int, limits: Limits) -> RaftqError:
    if count == limits.batches_max:
        return TooLarge(f"more than {count} batches at once are over the limit")
    if left:
        return CorruptBatch(f"{left} bytes at the end are less than a batch header")
    return InvalidArgument("there is no batch to append")


def _refusal(raw: memoryview, at: int, limits: Limits) -> RaftqError:
    """Return why the batch at `at` is refused. A newer version is raised as UnknownFormat."""
    length, body, producer_id, lane = _claims(raw, at)
    try:
        batch = Batch(raw, at)
    except CorruptBatch as error:
        if lane >= LANE_COUNT:
            return InvalidArgument(f"lane {lane} is not in 0..{LANE_COUNT - 1}")
        return CorruptBatch(f"the batch at byte {at} of the request: {error}")
    if max(length, HEADER_BYTES + body) > limits.batch_bytes_max:
        return TooLarge(
            f"a batch of {max(length, HEADER_BYTES + body)} bytes is over the limit of "
            f"{limits.batch_bytes_max}"
        )
    if batch.flags & _FLAGS_REFUSED:
        return InvalidArgument(
            f"flags {batch.flags & _FLAGS_REFUSED} are not for clients: control records, gaps "
            "between offsets and delay offsets are written by nodes only"
        )
    if bool(batch.flags & FLAG_DELIVER_AT) != limits.delayed:
        return InvalidArgument(
            "a delayed batch without the times when its records are due"
            if limits.delayed
            else "a batch with times when its records are due is not sent as a delayed one"
        )
    if producer_id < -1:
        return InvalidArgument(f"producer id {producer_id} is neither an id nor -1 for none")
    try:
        batch.check_crc()
    except CorruptBatch as error:
        return CorruptBatch(f"the batch at byte {at} of the request: {error}")
    return CorruptBatch(f"the batch at byte {at} makes no sense: {batch.describe()}")


def _claims(raw: memoryview, at: int) -> tuple[int, int, int, int]:
    """Return (length, body_length, producer_id, lane) as the header claims them, unchecked."""
    fields = dict(zip(FORMATS, HEADER.unpack_from(raw, at), strict=True))
    return fields["length"], fields["body_length"], fields["producer_id"], fields["lane"]
