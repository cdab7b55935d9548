"""The copies that a partition has to send to other topics: a section of its ledger. (Core.)

A partition sends copies in streams, one per target partition. A stream is a queue of rows, and a
row is a range of the partition's own records. The first rows are always sent next. The ledger has
these entries, each a msgpack list of a number for its kind (the `tag`) and its fields:

    CopiesAdded     rows are added to a stream: from now on their copies are sure to be sent
    CopyBatch       the next `count` records of a stream go out as one batch, numbered from
                    `sequence`
    CopiesDone      the first `count` records of a stream need nothing more: their batch has
                    arrived, or the records are gone and there was nothing to copy
    CopiesDropped   the stream forgets all its rows: its target does not exist any more
    CopiesParked    the target refuses the first records for good: they are kept aside, and the
                    records behind them go first
    CopiesUnparked  the parked rows go to the end of the stream
    CopyProducer    the producer id of all copies of this partition

The target drops a batch that it has already, by producer id, epoch and sequence. So each leader of
the partition sends the open batch again, exactly as it was numbered, until it is done; and it sends
a batch only when its numbers are replicated. Each record therefore has one copy.

A target forgets a producer after some days, or may be created anew. It then refuses the sequence,
and it has nothing of the open batch either. So the stream begins at sequence 0 of the next producer
epoch (a CopyBatch that replaces the open one).

A target that refuses a batch for good has appended nothing of it: its numbers are free. The batch
is made shorter (a CopyBatch of one record with the same numbers) until the record that is to blame
is found; then the numbers are given back (a CopyBatch of no record).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta
from msgspec.msgpack import Decoder

from raftq.node.queue.core.codec import encode_stored, stored_decoder
from raftq.node.queue.core.entries import LedgerStruct

SNAPSHOT_ROWS = 1_000
NO_PRODUCER = -1
_SEQUENCE_MASK = (1 << 32) - 1

Count = Annotated[int, Meta(ge=0)]
Target = tuple[str, int]
"""Topic and partition."""


class Death(LedgerStruct, frozen=True):
    """Why records died."""

    group: str
    nonce: int
    attempt: int
    first: float
    last: float
    reason: str
    error: str


class CopyRow(LedgerStruct, frozen=True):
    """[start, end) of one lane are to be copied: dead records, or letters that are redriven."""

    start: int
    end: int
    lane: int
    death: Death | None
    """None for a redrive."""


class CopiesAdded(LedgerStruct, tag=1, frozen=True):
    """Rows are added to a stream."""

    topic: str
    partition: int
    rows: tuple[CopyRow, ...]


class CopyBatch(LedgerStruct, tag=2, frozen=True):
    """The next `count` records of a stream get their numbers."""

    topic: str
    partition: int
    count: Count
    epoch: int
    sequence: int


class CopiesDone(LedgerStruct, tag=3, frozen=True):
    """The first records of a stream need nothing more."""

    topic: str
    partition: int
    count: Count


class CopiesDropped(LedgerStruct, tag=4, frozen=True):
    """A stream forgets all its rows."""

    topic: str
    partition: int


class CopyProducer(LedgerStruct, tag=5, frozen=True):
    """The producer id of all copies."""

    producer_id: int


class CopiesParked(LedgerStruct, tag=6, frozen=True):
    """The target refuses the first records of a stream for good."""

    topic: str
    partition: int
    count: Count
    why: str


class CopiesUnparked(LedgerStruct, tag=7, frozen=True):
    """Parked rows go to the end of their stream."""

    topic: str
    partition: int


CopyEntry = (
    CopiesAdded
    | CopyBatch
    | CopiesDone
    | CopiesDropped
    | CopyProducer
    | CopiesParked
    | CopiesUnparked
)
_decode = stored_decoder(Decoder[CopyEntry](CopyEntry), "entry about copies")


@dataclass(slots=True)
class OpenBatch:
    """A batch of `count` records that is being sent, numbered from `sequence`."""

    count: int
    epoch: int
    sequence: int


@dataclass(slots=True)
class CopyStream:
    """The copies for one target partition."""

    target: Target
    rows: deque[CopyRow] = field(default_factory=deque)
    epoch: int = 0
    sequence: int = 0
    open: OpenBatch | None = None
    parked: list[tuple[CopyRow, str]] = field(default_factory=list)
    """Rows that the target refuses, and why; they are not in `rows`."""
    pending: int = 0
    """Records in `rows`."""
    finished: int = 0
    """Records that left `rows` since this leader began."""

    def add(self, row: CopyRow) -> None:
        self.rows.append(row)
        self.pending += row.end - row.start

    def first(self, count: int) -> list[CopyRow]:
        """The rows of the next `count` records, the last one cut."""
        found: list[CopyRow] = []
        for row in self.rows:
            if count <= 0:
                break
            end = min(row.end, row.start + count)
            found.append(CopyRow(row.start, end, row.lane, row.death))
            count -= end - row.start
        return found

    def remove(self, count: int) -> None:
        """Remove the first `count` records; the open batch ends with them."""
        self.open = None
        count = min(count, self.pending)
        self.pending -= count
        self.finished += count
        while count:
            row = self.rows.popleft()
            size = row.end - row.start
            if size > count:
                self.rows.appendleft(CopyRow(row.start + count, row.end, row.lane, row.death))
                break
            count -= size

    # Entries

    def next_batch(self, count: int) -> CopyBatch:
        """Number the next records."""
        assert self.open is None, self
        return CopyBatch(*self.target, count, self.epoch, self.sequence)

    def renumbered(self, epoch: int) -> CopyBatch:
        """Number the open batch from 0 in a new epoch."""
        assert self.open is not None, self
        return CopyBatch(*self.target, self.open.count, epoch, 0)

    def shortened(self, count: int) -> CopyBatch:
        """The open batch was refused: keep its numbers for fewer records, or for none."""
        assert self.open is not None, self
        return CopyBatch(*self.target, count, self.open.epoch, self.open.sequence)


class CopyLedger:
    """All streams of a partition. Only `apply` changes them, live and in the replay."""

    def __init__(self) -> None:
        self.streams: dict[Target, CopyStream] = {}
        self.producer_id = NO_PRODUCER

    def apply(self, entry: CopyEntry) -> None:
        """Make the change that the entry describes."""
        if isinstance(entry, CopyProducer):
            self.producer_id = entry.producer_id
            return
        stream = self.stream((entry.topic, entry.partition))
        if isinstance(entry, CopiesAdded):
            for row in entry.rows:
                stream.add(row)
        elif isinstance(entry, CopyBatch):
            count, epoch, sequence = entry.count, entry.epoch, entry.sequence
            stream.open = OpenBatch(count, epoch, sequence) if count else None
            stream.epoch, stream.sequence = epoch, (sequence + count) & _SEQUENCE_MASK
        elif isinstance(entry, CopiesDone):
            stream.remove(entry.count)
        elif isinstance(entry, CopiesDropped):
            stream.remove(stream.pending)
        elif isinstance(entry, CopiesParked):
            stream.parked += [(row, entry.why) for row in stream.first(entry.count)]
            stream.remove(entry.count)
        else:
            for row, _ in stream.parked:
                stream.add(row)
            stream.parked = []

    def stream(self, target: Target) -> CopyStream:
        found = self.streams.get(target)
        if found is None:
            found = self.streams[target] = CopyStream(target)
        return found

    # The section of the ledger

    def replay(self, content: bytes) -> None:
        self.apply(_decode(content))

    def snapshot(self) -> Iterator[bytes]:
        return map(encode_stored, self._snapshot())

    def _snapshot(self) -> Iterator[CopyEntry]:
        if self.producer_id != NO_PRODUCER:
            yield CopyProducer(self.producer_id)
        for stream in self.streams.values():
            target = stream.target
            for row, why in stream.parked:
                yield CopiesAdded(*target, (row,))
                yield CopiesParked(*target, row.end - row.start, why)
            # The rows first: a batch consists of rows that are there.
            rows = tuple(stream.rows)
            for start in range(0, len(rows), SNAPSHOT_ROWS):
                yield CopiesAdded(*target, rows[start : start + SNAPSHOT_ROWS])
            if stream.open is not None:
                yield stream.shortened(stream.open.count)
            elif stream.epoch or stream.sequence:
                yield CopyBatch(*target, 0, stream.epoch, stream.sequence)
