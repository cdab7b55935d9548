"""The record batch: the unit of append, checksum, compression, replication and fetch. (Pure.)

A batch is encoded once by its producer and stays the same bytes on every disk and connection; only
the leader writes `base_offset`, `epoch` and `stamp_crc` in front. All numbers are little-endian.

    byte  size  field
    0     2     magic            'RQ'
    2     1     version          1
    3     1     codec            0 none, 1 lz4, 2 zstd: how the body is compressed
    4     4     length           bytes of the whole batch, header included
    8     8     base_offset      offset of the first record            ─┐ written by
    16    4     epoch            of the leader that appended it         │ the leader
    20    4     stamp_crc        CRC32C of bytes 0..20                 ─┘
    24    4     crc              CRC32C of bytes 28..length, by the producer
    28    2     flags            which columns follow, see FLAG_*
    30    1     lane             0 critical .. 4 background: one batch, one lane
    31    1     reserved         0
    32    4     count            records in the batch
    36    4     span             offsets covered: [base_offset, base_offset + span)
    40    8     producer_id      -1 none
    48    4     producer_epoch
    52    4     base_sequence
    56    8     base_timestamp   ms; every record's timestamp when there is no timestamp column
    64    8     max_timestamp    ms
    72    4     keys_length      bytes of the keys section
    76    4     values_length
    80    4     headers_length
    84    4     body_length      bytes of the body once decompressed
    88          body

    body  i64[count]    timestamps      FLAG_TIMESTAMPS
          i64[count]    expiries        FLAG_EXPIRIES       ms, 0 = never
          i64[count]    deliver_at      FLAG_DELIVER_AT     ms
          i64[count]    delay_offsets   FLAG_DELAY_OFFSETS  where each record waited before it fired
          u32[count]    offset_deltas   FLAG_OFFSET_DELTAS  compaction left gaps
          u32[count+1]  value_offsets   always; the first is 0, the last values_length
          u32[count+1]  key_offsets     FLAG_KEYS
          u32[count+1]  header_offsets  FLAG_HEADERS
          bitmap        key_validity    FLAG_KEY_NULLS      bit i set = record i has a key
          bytes         keys | values | headers (a msgpack map str -> bin per record, or nothing)

Offsets have count+1 slots and nulls a validity bitmap because those are Arrow's own buffers: a
batch becomes Arrow arrays without a copy (see arrow.py). A batch with count 0 is a filler that
compaction leaves so that offsets stay contiguous. A section whose flag is not set is empty. The
first 24 bytes mean the same in every version, so that a newer version can be told from damage; a
new flag or codec needs a new version.

Whatever is read here is checked before it is believed or allocated: any damage is a CorruptBatch,
an unknown version an UnknownFormat. What a single record may hold is not decided here (record.py).
"""

from collections.abc import Sequence

from crc32c import crc32c

from raftq.client.common.errors import CorruptBatch, InvalidArgument, UnknownFormat
from raftq.client.common.types import Buffer
from raftq.client.wire import columns
from raftq.client.wire.codecs import CODEC_LZ4, CODEC_NONE, CODEC_ZSTD, decompress
from raftq.client.wire.encoder import encode, encode_one, stamp
from raftq.client.wire.headers import CRCS, CRCS_AT, HEADER, REST_AT
from raftq.client.wire.layout import (
    BATCH_BYTES_MAX,
    COLUMN_BYTES,
    FLAG_CONTROL,
    FLAG_DELAY_OFFSETS,
    FLAG_DELIVER_AT,
    FLAG_EXPIRIES,
    FLAG_HEADERS,
    FLAG_KEY_NULLS,
    FLAG_KEYS,
    FLAG_OFFSET_DELTAS,
    FLAG_TIMESTAMPS,
    FLAGS_KNOWN,
    HEADER_BYTES,
    LANE_COUNT,
    LANE_NORMAL,
    MAGIC,
    NO_PRODUCER,
    OFFSET_MAX,
    RECORDS_MAX,
    VERSION,
    WIDE_FLAGS,
    BatchProducer,
)
from raftq.client.wire.record import BatchRecord, Headers, unpack_headers

__all__ = [
    "BATCH_BYTES_MAX", "CODEC_LZ4", "CODEC_NONE", "CODEC_ZSTD", "FLAGS_KNOWN", "FLAG_CONTROL",
    "FLAG_DELAY_OFFSETS", "FLAG_DELIVER_AT", "FLAG_EXPIRIES", "FLAG_HEADERS", "FLAG_KEYS",
    "FLAG_KEY_NULLS", "FLAG_OFFSET_DELTAS", "FLAG_TIMESTAMPS", "HEADER_BYTES", "LANE_COUNT",
    "LANE_NORMAL", "MAGIC", "NO_PRODUCER", "RECORDS_MAX", "VERSION", "Batch", "BatchProducer",
    "decode", "encode", "encode_one", "stamp", "validate",
]  # fmt: skip


class Batch:
    """A batch over a buffer, its header checked. The body is checked as its columns are read."""

    __slots__ = (
        "_at", "_base", "_body", "_starts", "base_offset", "base_sequence", "base_timestamp",
        "body_length", "buffer", "codec", "count", "crc", "epoch", "flags", "headers_length",
        "keys_length", "lane", "length", "max_timestamp", "position", "producer_epoch",
        "producer_id", "span", "values_length",
    )  # fmt: skip

    _at: int  # where the keys' bytes start in the body
    _starts: int  # where the value offsets start in the body
    base_offset: int
    base_timestamp: int
    body_length: int
    codec: int
    count: int
    flags: int
    headers_length: int
    keys_length: int
    lane: int
    length: int
    max_timestamp: int
    span: int
    values_length: int

    def __init__(self, buffer: Buffer, position: int = 0) -> None:
        """Check the header at `position`: magic, version, stamp and the relations of its fields."""
        left = len(buffer) - position
        if left < HEADER_BYTES:
            raise CorruptBatch(f"{left} bytes left, a batch header needs {HEADER_BYTES}")
        (
            magic, version, self.codec, self.length, self.base_offset, self.epoch, stamp_crc,
            self.crc, self.flags, self.lane, reserved, self.count, self.span,
            self.producer_id, self.producer_epoch, self.base_sequence,
            self.base_timestamp, self.max_timestamp,
            self.keys_length, self.values_length, self.headers_length, self.body_length,
        ) = HEADER.unpack_from(buffer, position)  # fmt: skip
        if magic != MAGIC:
            raise CorruptBatch(f"no batch starts here: magic is {magic!r}")
        if crc32c(buffer[position : position + CRCS_AT]) != stamp_crc:
            raise CorruptBatch("the batch's stamp does not match its checksum")
        if version != VERSION:
            raise UnknownFormat(
                f"batch version {version} is not known here (newest known: {VERSION}); "
                "it was written by a newer version of RaftQ"
            )
        self.buffer = buffer
        self.position = position
        self._body: bytes | memoryview | None = None
        self._base = 0
        if reserved or not self._fields_agree():
            raise CorruptBatch(f"the batch header contradicts itself: {self.describe()}")

    def _fields_agree(self) -> bool:
        flags, count, span, codec = self.flags, self.count, self.span, self.codec
        body, keys, headers = self.body_length, self.keys_length, self.headers_length
        if flags > FLAGS_KNOWN or body > BATCH_BYTES_MAX or count > RECORDS_MAX:
            return False
        starts, per_record, more = COLUMN_BYTES[flags]
        at = per_record * count + more
        if flags & FLAG_KEY_NULLS:
            if not flags & FLAG_KEYS:
                return False
            at += (count + 7) >> 3
        self._starts = starts * count
        self._at = at
        return (
            at + keys + self.values_length + headers == body
            and (self.length == HEADER_BYTES + body if codec == CODEC_NONE else self._is_packed())
            and (not keys or flags & FLAG_KEYS != 0)
            and (not headers or flags & FLAG_HEADERS != 0)
            and self.lane < LANE_COUNT
            and (span == count or (count < span and flags & FLAG_OFFSET_DELTAS != 0))
            and span > 0
            and 0 <= self.base_offset <= OFFSET_MAX - span
        )

    def _is_packed(self) -> bool:
        return self.codec <= CODEC_ZSTD and HEADER_BYTES < self.length <= BATCH_BYTES_MAX

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.span

    def check_crc(self) -> None:
        """Compare the producer's checksum; the whole batch must be in the buffer."""
        buffer, start = self.buffer, self.position + REST_AT
        end = self.position + self.length
        if end > len(buffer):
            raise CorruptBatch(
                f"{self} is cut: {len(buffer) - self.position} of {self.length} bytes"
            )
        # A short slice is cheaper as a copy, a long one as a view.
        covered = buffer[start:end] if self.length < 2048 else memoryview(buffer)[start:end]
        if crc32c(covered) != self.crc:
            raise CorruptBatch(f"{self} fails its checksum")

    def body(self) -> tuple[bytes | memoryview, int]:
        """What holds the decompressed body, and where it starts in it.

        A buffer that cannot be written to is used in place; one that can is copied first, as its
        owner could change what was checked.
        """
        if self._body is None:
            buffer = self.buffer
            start, end = self.position + HEADER_BYTES, self.position + self.length
            if end > len(buffer):
                raise CorruptBatch(f"{self} is cut: its body is not all there")
            if self.codec != CODEC_NONE:
                packed = memoryview(buffer)[start:end]
                self._body = decompress(self.codec, packed, self.body_length)
            elif isinstance(buffer, bytes) or (isinstance(buffer, memoryview) and buffer.readonly):
                self._body, self._base = buffer, start
            else:
                self._body = bytes(buffer[start:end])
        return self._body, self._base

    def values(self) -> list[bytes]:
        return [self.one_value()] if self.count == 1 else self._items("values")

    def one_value(self) -> bytes:
        """The value of a batch that holds one record, the shortest way."""
        if self.count != 1:
            raise InvalidArgument(f"{self} has {self.count} records, not one")
        body, base = self.body()
        size = self.values_length
        if CRCS.unpack_from(body, base + self._starts) != (0, size):
            raise CorruptBatch(f"the offsets of the values of {self} are damaged")
        start = base + self._at + self.keys_length
        return bytes(body[start : start + size])

    def keys(self) -> list[bytes | None]:
        if not self.flags & FLAG_KEYS:
            return [None] * self.count
        keys = self._items("keys")
        if self.flags & FLAG_KEY_NULLS:
            return columns.mask(keys, self.key_validity())
        return list(keys)

    def headers(self) -> list[Headers]:
        if not self.flags & FLAG_HEADERS:
            return [{} for _ in range(self.count)]
        return [unpack_headers(item) for item in self._items("headers")]

    def timestamps(self) -> list[int]:
        column = self._wide(FLAG_TIMESTAMPS)
        return [self.base_timestamp] * self.count if column is None else column

    def expiries(self) -> list[int] | None:
        return self._wide(FLAG_EXPIRIES)

    def deliver_at(self) -> list[int] | None:
        return self._wide(FLAG_DELIVER_AT)

    def delay_offsets(self) -> list[int] | None:
        return self._wide(FLAG_DELAY_OFFSETS)

    def offsets(self) -> Sequence[int]:
        """The records' offsets: a range, or a list when compaction left gaps."""
        base_offset = self.base_offset
        if not self.flags & FLAG_OFFSET_DELTAS:
            return range(base_offset, base_offset + self.count)
        body, base = self.body()
        end = base + self._starts
        deltas = columns.unpack_numbers("I", body, end - 4 * self.count, end)
        if deltas and not columns.increase(deltas, self.span):
            raise CorruptBatch(f"the offsets inside {self} do not increase")
        return [base_offset + delta for delta in deltas]

    def tuples(self) -> list[tuple[int, int, bytes | None, bytes, Headers]]:
        """(offset, timestamp, key, value, headers) of every record."""
        numbers = self.offsets(), self.timestamps()
        return list(zip(*numbers, self.keys(), self.values(), self.headers(), strict=True))

    def records(self) -> list[BatchRecord]:
        lane = self.lane
        expiries = self.expiries() or [0] * self.count
        return [
            BatchRecord(*row, lane, expiry)
            for row, expiry in zip(self.tuples(), expiries, strict=True)
        ]

    def key_validity(self) -> bytes:
        """The bitmap of FLAG_KEY_NULLS, as it is in the body."""
        body, base = self.body()
        end = base + self._at
        return bytes(body[end - ((self.count + 7) >> 3) : end])

    def section(self, name: str) -> tuple[int, int]:
        """(start, length) of 'keys', 'values' or 'headers' bytes inside the body."""
        if name == "keys":
            return self._at, self.keys_length
        if name == "values":
            return self._at + self.keys_length, self.values_length
        assert name == "headers", name
        return self._at + self.keys_length + self.values_length, self.headers_length

    def column_at(self, name: str) -> int:
        """Where the offsets of 'values', 'keys' or 'headers' start inside the body."""
        place = 0
        if name != "values":
            place = 2 if name == "headers" and self.flags & FLAG_KEYS else 1
        return self._starts + 4 * (self.count + 1) * place

    def wide_at(self, flag: int) -> int:
        """Where the 8-byte column of a flag that is set starts inside the body."""
        return 8 * self.count * (self.flags & WIDE_FLAGS & (flag - 1)).bit_count()

    def ends(self, name: str) -> list[int]:
        """The checked offsets of 'values', 'keys' or 'headers': from 0 up to its length."""
        body, base = self.body()
        length = self.section(name)[1]
        ends = columns.unpack_ends(body, base + self.column_at(name), self.count)
        if not columns.rise(ends, length):
            raise CorruptBatch(f"the offsets of the {name} of {self} are damaged")
        return ends

    def describe(self) -> str:
        return (
            f"base_offset={self.base_offset} epoch={self.epoch} length={self.length} "
            f"codec={self.codec} flags={self.flags} lane={self.lane} count={self.count} "
            f"span={self.span} sections={self.keys_length},{self.values_length},"
            f"{self.headers_length} body={self.body_length}"
        )

    def __str__(self) -> str:
        return f"the batch at offset {self.base_offset}"

    def check_ends(self, name: str) -> None:
        """CorruptBatch when the offsets of 'values', 'keys' or 'headers' are damaged."""
        if not self._common_size(name):
            self.ends(name)

    def _common_size(self, name: str) -> int:
        body, base = self.body()
        at, length = base + self.column_at(name), self.section(name)[1]
        return columns.common_size(body, at, self.count, length)

    def _items(self, name: str) -> list[bytes]:
        body, base = self.body()
        start = base + self.section(name)[0]
        if size := self._common_size(name):
            return columns.unpack_equal(body, start, size, self.count)
        return columns.unpack_slices(body, start, self.ends(name))

    def _wide(self, flag: int) -> list[int] | None:
        if not self.flags & flag:
            return None
        body, base = self.body()
        start = base + self.wide_at(flag)
        return columns.unpack_numbers("q", body, start, start + 8 * self.count)


def decode(buffer: Buffer, position: int = 0) -> Batch:
    """Check header and checksum, then give the batch."""
    batch = Batch(buffer, position)
    batch.check_crc()
    return batch


def validate(batch: Batch) -> None:
    """Check every column once, as a leader does before it accepts a stranger's batch."""
    batch.check_crc()
    for column in (batch.values, batch.keys, batch.headers, batch.offsets):
        column()
    # The time index believes the header, so the header must not lie about the column.
    if batch.count:
        timestamps = batch.timestamps()
        if (timestamps[0], max(timestamps)) != (batch.base_timestamp, batch.max_timestamp):
            raise CorruptBatch(f"the header of {batch} does not match its timestamps")
