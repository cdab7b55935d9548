"""The `.index` file of a sealed segment: written once, checked when read. (Pure.)

All numbers are little-endian.

    head  0   4   magic          'RQIX'
          4   2   version        1
          6   2   flags          1 = with lanes
          8   4   head_length    bytes of the head
          12  4   head_crc       CRC32C of the head without this field
          16  4   body_crc       CRC32C of the body
          20  4   reserved       0
          24  i64 base_offset, end_offset, log_bytes, first_timestamp, max_timestamp
              i64 entries, epochs, damaged
              i64[5] lane_records, i64[5] lane_runs
              (i64 epoch, i64 start)[epochs]
              (i64 start, end, position, end_position)[damaged]
    body      i64[entries] offsets, positions, times
              i64[runs] starts, ends      for each lane

Opening a log needs only the head; the body is read at the first lookup. An index is a cache: when
it fails its checks, it is rebuilt from its segment. A newer version is refused and not overwritten,
because it belongs to a newer segment.
"""

from array import array
from dataclasses import dataclass
from struct import Struct

from crc32c import crc32c

from raftq.client.common.errors import CorruptFile, UnknownFormat
from raftq.client.wire.batch import LANE_COUNT
from raftq.node.storage.damage import DamagedRange
from raftq.node.storage.index import LaneRuns, SegmentIndex

MAGIC = b"RQIX"
VERSION = 1
HEAD_BYTES_MAX = 16 * 1024 * 1024
FLAG_LANES = 1

_FIXED = Struct("<4sHHIIII")
_NUMBERS = 8 + 2 * LANE_COUNT
HEAD_BYTES_MIN = _FIXED.size + 8 * _NUMBERS
DAMAGE_REASON = "found damaged when its segment was indexed"


@dataclass(slots=True)
class SegmentSummary:
    """What stays in memory of a sealed segment."""

    base_offset: int
    end_offset: int
    size: int
    first_timestamp: int
    max_timestamp: int
    with_lanes: bool
    lane_records: list[int]
    epochs: list[tuple[int, int]]
    damaged: list[DamagedRange]


def summarize(index: SegmentIndex) -> SegmentSummary:
    return SegmentSummary(
        index.base_offset,
        index.end_offset,
        index.size,
        index.first_timestamp,
        index.max_timestamp,
        index.lanes is not None,
        index.lane_records,
        list(index.epochs),
        list(index.damaged),
    )


def encode_index(index: SegmentIndex) -> bytes:
    lanes = index.lanes or []
    columns = [index.offsets, index.positions, index.times]
    for runs in lanes:
        columns += [runs.starts, runs.ends]
    body = b"".join(column.tobytes() for column in columns)
    run_counts = [len(runs.starts) for runs in lanes] or [0] * LANE_COUNT
    numbers = array(
        "q",
        [
            *(index.base_offset, index.end_offset, index.size),
            *(index.first_timestamp, index.max_timestamp),
            *(len(index.offsets), len(index.epochs), len(index.damaged)),
            *index.lane_records,
            *run_counts,
            *(number for entry in index.epochs for number in entry),
        ],
    )
    for damage in index.damaged:
        numbers.extend((damage.start, damage.end, damage.position, damage.end_position))
    flags = FLAG_LANES if lanes else 0
    length = _FIXED.size + 8 * len(numbers)
    head = bytearray(_FIXED.pack(MAGIC, VERSION, flags, length, 0, crc32c(body), 0))
    head += numbers.tobytes()
    head[12:16] = _head_crc(bytes(head)).to_bytes(4, "little")
    return bytes(head) + body


def _head_crc(head: bytes) -> int:
    return int(crc32c(head[16:], crc32c(head[:12])))


def head_length(data: bytes, path: str) -> int:
    """Return the length of the head from its first bytes, checked against a bound."""
    if len(data) < HEAD_BYTES_MIN:
        raise CorruptFile(f"{path} has {len(data)} bytes, an index needs {HEAD_BYTES_MIN}")
    magic, _, _, length, *_ = _FIXED.unpack_from(data)
    if magic != MAGIC or not HEAD_BYTES_MIN <= length <= HEAD_BYTES_MAX:
        raise CorruptFile(f"{path} does not start like an index")
    return int(length)


def decode_head(head: bytes, path: str, log_path: str) -> SegmentSummary:
    """Return the checked head. `head` is exactly the bytes that `head_length` announced."""
    _, version, flags, length, crc, _, _ = _FIXED.unpack_from(head)
    if length != len(head) or _head_crc(head) != crc:
        raise CorruptFile(f"the head of {path} fails its checksum")
    if version != VERSION:
        raise UnknownFormat(
            f"{path} has index version {version}, not known here (newest known: {VERSION}); "
            "it was written by a newer version of RaftQ"
        )
    numbers = memoryview(head)[_FIXED.size :].cast("q").tolist()
    base, end, size, first_time, max_time, _, epochs, damaged = numbers[:8]
    records = numbers[8 : 8 + LANE_COUNT]
    rest = numbers[_NUMBERS:]
    if len(rest) != 2 * epochs + 4 * damaged or not 0 <= base <= end or size < 0:
        raise CorruptFile(f"the head of {path} contradicts itself")
    pairs = [(rest[at], rest[at + 1]) for at in range(0, 2 * epochs, 2)]
    ranges = []
    for at in range(2 * epochs, len(rest), 4):
        start, stop, position, end_position = rest[at : at + 4]
        ranges.append(DamagedRange(start, stop, log_path, position, end_position, DAMAGE_REASON))
    lanes = bool(flags & FLAG_LANES)
    return SegmentSummary(base, end, size, first_time, max_time, lanes, records, pairs, ranges)


def decode_index(data: bytes, path: str, log_path: str, interval: int) -> SegmentIndex:
    """Return the whole checked index."""
    length = head_length(data, path)
    summary = decode_head(data[:length], path, log_path)
    _, _, flags, _, _, body_crc, _ = _FIXED.unpack_from(data)
    numbers = memoryview(data)[_FIXED.size : HEAD_BYTES_MIN].cast("q").tolist()
    entries, run_counts = numbers[5], numbers[8 + LANE_COUNT : _NUMBERS]
    body = memoryview(data)[length:]
    if min(entries, *run_counts) < 0 or len(body) != 24 * entries + 16 * sum(run_counts):
        raise CorruptFile(f"{path} has {len(body)} bytes of tables, not what its head announces")
    if crc32c(body) != body_crc:
        raise CorruptFile(f"the tables of {path} fail their checksum")
    lengths = [entries] * 3 + [count for count in run_counts for _ in range(2)]
    columns = []
    at = 0
    for count in lengths:
        column = array("q")
        column.frombytes(body[at : at + 8 * count])
        columns.append(column)
        at += 8 * count
    index = SegmentIndex(summary.base_offset, interval, with_lanes=False)
    index.end_offset, index.size = summary.end_offset, summary.size
    index.first_timestamp, index.max_timestamp = summary.first_timestamp, summary.max_timestamp
    index.epochs, index.damaged = summary.epochs, summary.damaged
    index.offsets, index.positions, index.times = columns[:3]
    if flags & FLAG_LANES:
        pairs = zip(columns[3::2], columns[4::2], strict=True)
        index.lanes = [LaneRuns(starts, ends) for starts, ends in pairs]
    return index
