"""Pure: leased records, and the receipts by which they are settled.

A receipt is `topic:partition:offset:attempt:nonce`. The node knows a lease by its nonce, which
covers a range of offsets. Neighbours that are settled alike are sent as one range.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from raftq.client.common.errors import InvalidArgument
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.records import NO_HEADERS, is_empty
from raftq.client.wire.batch import FLAG_HEADERS, Batch
from raftq.client.wire.queue_messages import LeasedRange

Row = tuple[int, int, int]  # nonce, start, end


class LeaseInfo:
    """What the records of one lease have in common; they all share this object."""

    __slots__ = ("attempt", "first_delivery", "lane", "nonce", "partition", "topic")

    def __init__(self, topic: str, partition: int, lane: int, leased: LeasedRange) -> None:
        self.topic = topic
        self.partition = partition
        self.lane = lane
        self.attempt = leased.attempt
        self.nonce = leased.nonce
        self.first_delivery = leased.first_delivery


class LeasedRecord:
    """One delivery of one record."""

    __slots__ = ("deadline", "grant", "headers", "key", "lost", "offset", "timestamp", "value")

    def __init__(  # noqa: PLR0913 - built by map() over columns, so every field is positional
        self,
        offset: int,
        key: bytes | None,
        value: bytes,
        timestamp: int,
        headers: Mapping[str, bytes],
        grant: LeaseInfo,
        deadline: int,
    ) -> None:
        self.offset = offset
        self.key = key
        self.value = value
        self.timestamp = timestamp
        self.headers = headers
        self.grant = grant
        self.deadline = deadline
        """The end of the lease in ms since 1970, by the node's clock."""
        self.lost = False
        """A worker sets this when another client may have the record."""

    @property
    def topic(self) -> str:
        return self.grant.topic

    @property
    def partition(self) -> int:
        return self.grant.partition

    @property
    def priority(self) -> int:
        return self.grant.lane

    @property
    def attempt(self) -> int:
        """1 for the first delivery to this group."""
        return self.grant.attempt

    @property
    def first_delivery(self) -> int:
        """The time of the first delivery to the group, in ms since 1970."""
        return self.grant.first_delivery

    @property
    def receipt(self) -> str:
        """Proof of this one delivery."""
        return receipt_of(self).text

    def __repr__(self) -> str:
        more = "..." if len(self.value) > 32 else ""
        return f"<LeasedRecord {self.receipt} value={self.value[:32]!r}{more}>"


class Receipt(NamedTuple):
    """The fields of a receipt."""

    topic: str
    partition: int
    offset: int
    nonce: int
    attempt: int = 1

    @property
    def text(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}:{self.attempt}:{self.nonce}"


def receipt_of(proof: LeasedRecord | str) -> Receipt:
    """The receipt of a record, or of its text."""
    if isinstance(proof, LeasedRecord):
        grant = proof.grant
        return Receipt(grant.topic, grant.partition, proof.offset, grant.nonce, grant.attempt)
    if not isinstance(proof, str):
        raise InvalidArgument(f"a leased record or its receipt is needed, not {proof!r:.60}")
    parts = proof.rsplit(":", 4)
    numbers = [int(part) for part in parts[1:] if part.isdecimal() and len(part) < 20]
    if len(numbers) != 4 or not parts[0] or max(numbers) >= 1 << 63:
        raise InvalidArgument(f"{proof!r:.80} is no receipt")
    partition, offset, attempt, nonce = numbers
    return Receipt(parts[0], partition, offset, nonce, attempt)


def rows_by_partition(receipts: Iterable[Receipt]) -> dict[PartitionKey, list[Row]]:
    """Receipts as rows of their partitions, neighbours merged."""
    found: dict[PartitionKey, list[Row]] = {}
    for topic, partition, offset, nonce, _ in receipts:
        row = nonce, offset, offset + 1
        partition_key = topic, partition
        rows = found.get(partition_key)
        if rows is None:
            found[partition_key] = [row]
        elif rows[-1][0] == nonce and rows[-1][2] == offset:
            rows[-1] = nonce, rows[-1][1], offset + 1  # records mostly come in order
        else:
            rows.append(row)
    return {partition_key: merge(rows) for partition_key, rows in found.items()}


def merge(rows: Iterable[Row]) -> list[Row]:
    """Rows in order; rows that touch or overlap under one nonce are merged."""
    merged: list[Row] = []
    for nonce, start, end in sorted(rows):
        if merged and merged[-1][0] == nonce and merged[-1][2] >= start:
            merged[-1] = nonce, merged[-1][1], max(end, merged[-1][2])
        else:
            merged.append((nonce, start, end))
    return merged


def to_leased(
    partition_key: PartitionKey, ranges: Sequence[LeasedRange], batches: list[Batch]
) -> list[Any]:
    """The leased records from the batches that hold them, in the order of the ranges."""
    found: list[LeasedRecord] = []
    bases = [batch.base_offset for batch in batches]
    columns: dict[int, list[Sequence[Any]]] = {}
    for leased in ranges:
        at = max(bisect_right(bases, leased.start) - 1, 0)
        while at < len(batches) and bases[at] < leased.end:
            batch = batches[at]
            if at not in columns:
                columns[at] = _columns(batch)
            grant = LeaseInfo(*partition_key, batch.lane, leased)
            first, last = _span(columns[at][0], leased.start, leased.end)
            if first < last:
                rows = [column[first:last] for column in columns[at]]
                found += map(LeasedRecord, *rows, repeat(grant), repeat(leased.deadline))
            at += 1
    return found


def _columns(batch: Batch) -> list[Sequence[Any]]:
    """Offsets, keys, values, timestamps and headers. Raises CorruptBatch for a damaged batch."""
    batch.check_crc()
    if is_empty(batch):
        return [(), (), (), (), ()]
    headers: Sequence[Any] = (
        batch.headers() if batch.flags & FLAG_HEADERS else [NO_HEADERS] * batch.count
    )
    return [batch.offsets(), batch.keys(), batch.values(), batch.timestamps(), headers]


def _span(offsets: Sequence[int], start: int, end: int) -> tuple[int, int]:
    if isinstance(offsets, range):
        base = offsets.start
        return max(start - base, 0), min(end - base, len(offsets))
    return bisect_left(offsets, start), bisect_left(offsets, end)
