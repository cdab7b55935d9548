"""The copies that a partition owes other topics: chapter T of its ledger. (Core.)

A partition sends copies in streams, one per target partition. A stream is a queue of rows, ranges
of the partition's own records; what is sent next is always the first of them:

    OWED      rows are added to a stream: from now on their copies are sure to come
    BATCH     the next `count` records of a stream go out as one batch, numbered from `sequence`
    DONE      the first `count` records of a stream need nothing more: their batch has arrived, or
              they are gone and there was nothing to copy
    DROPPED   everything a stream owes is forgotten: its target is no more
    PARKED    the target refuses the first records of a stream for good: they are owed still, but
              those behind them go first
    UNPARKED  what was parked is owed again, behind the others
    PRODUCER  the producer id under which all copies of this partition go out

The target drops a batch that it has already, by producer id, epoch and sequence. So whoever leads
the partition sends the open batch again, exactly as it was numbered, until it is DONE; and a batch
is sent only when its numbers are replicated. Each record therefore has one copy.

A target that knows nothing of the producer any more (it forgets them after some days, or has been
made anew) refuses the sequence: then it has nothing of the open batch either, and the stream begins
at sequence 0 of the next producer epoch (a BATCH that replaces the open one).

A target that refuses a batch as a whole, and would refuse it again, has appended nothing of it: its
numbers are free. The batch is made shorter (a BATCH of one record with the same numbers) until the
record is found that is to blame; then the numbers are given back (a BATCH of none).

A row is (start, end, lane, letter): consecutive records of one lane; the letter says why they died
(group, nonce, attempt, first, last, reason, error), or is None for a redrive.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from raftq.client.common.errors import CorruptFile

OWED, BATCH, DONE, DROPPED, PRODUCER, PARKED, UNPARKED = 1, 2, 3, 4, 5, 6, 7
SNAPSHOT_ROWS = 1_000
NO_PRODUCER = -1
_SEQUENCE_MASK = (1 << 32) - 1

Target = tuple[str, int]
"""Topic and partition."""


class Death(NamedTuple):
    """Why records died."""

    group: str
    nonce: int
    attempt: int
    first: float
    last: float
    reason: str
    error: str


class Owed(NamedTuple):
    """[start, end) of one lane are owed to a target."""

    start: int
    end: int
    lane: int
    letter: Death | None


@dataclass(slots=True)
class Open:
    """A batch on its way: of so many records, numbered from `sequence`."""

    count: int
    epoch: int
    sequence: int


@dataclass(slots=True)
class Stream:
    """The copies for one target partition."""

    target: Target
    rows: deque[Owed] = field(default_factory=deque)
    epoch: int = 0
    sequence: int = 0
    open: Open | None = None
    parked: list[tuple[Owed, str]] = field(default_factory=list)
    """What the target refuses, and why; not in `rows`."""
    owed: int = 0
    """Records in `rows`."""
    given: int = 0
    """Records that ever left `rows`, since this leader began: who waits for theirs looks here."""

    def first(self, count: int) -> list[Owed]:
        """The rows of the next `count` records, the last one cut."""
        found: list[Owed] = []
        for row in self.rows:
            if count <= 0:
                break
            end = min(row.end, row.start + count)
            found.append(row._replace(end=end))
            count -= end - row.start
        return found


class CopyLedger:
    """See the module's docstring. Changed by `apply` only, live and in the replay."""

    def __init__(self) -> None:
        self.streams: dict[Target, Stream] = {}
        self.producer_id = NO_PRODUCER

    def apply(self, entry: Sequence[Any]) -> None:
        """Make the change that the entry says."""
        kind = entry[0]
        if kind == PRODUCER:
            self.producer_id = int(entry[1])
            return
        stream = self._stream((str(entry[1]), int(entry[2])))
        if kind == OWED:
            for start, end, lane, letter in entry[3]:
                stream.rows.append(Owed(start, end, lane, letter and Death(*letter)))
                stream.owed += end - start
        elif kind == BATCH:
            count, epoch, sequence = entry[3:6]
            stream.open = Open(count, epoch, sequence) if count else None
            stream.epoch, stream.sequence = epoch, (sequence + count) & _SEQUENCE_MASK
        elif kind == DONE:
            self._give(stream, int(entry[3]))
        elif kind == DROPPED:
            self._give(stream, stream.owed)
        elif kind == PARKED:
            stream.parked += [(row, str(entry[4])) for row in stream.first(int(entry[3]))]
            self._give(stream, int(entry[3]))
        elif kind == UNPARKED:
            for row, _ in stream.parked:
                stream.rows.append(row)
                stream.owed += row.end - row.start
            stream.parked = []
        else:
            raise CorruptFile(f"transfers have an unknown entry {kind!r}")

    def _give(self, stream: Stream, count: int) -> None:
        stream.open = None
        count = min(count, stream.owed)
        stream.owed -= count
        stream.given += count
        while count:
            row = stream.rows.popleft()
            size = row.end - row.start
            if size > count:
                stream.rows.appendleft(row._replace(start=row.start + count))
                break
            count -= size

    def _stream(self, target: Target) -> Stream:
        found = self.streams.get(target)
        if found is None:
            found = self.streams[target] = Stream(target)
        return found

    def stream(self, target: Target) -> Stream:
        return self._stream(target)

    # Entries

    @staticmethod
    def owed(target: Target, rows: Iterable[Owed]) -> list[Any]:
        return [OWED, *target, [tuple(row) for row in rows]]

    @staticmethod
    def batch(stream: Stream, count: int) -> list[Any]:
        """Give numbers to the next records of a stream."""
        assert stream.open is None, stream
        return [BATCH, *stream.target, count, stream.epoch, stream.sequence]

    @staticmethod
    def renumbered(stream: Stream, epoch: int) -> list[Any]:
        """The open batch begins a new epoch."""
        assert stream.open is not None, stream
        return [BATCH, *stream.target, stream.open.count, epoch, 0]

    @staticmethod
    def shortened(stream: Stream, count: int) -> list[Any]:
        """The open batch was refused: fewer records have its numbers, or none."""
        assert stream.open is not None, stream
        return [BATCH, *stream.target, count, stream.open.epoch, stream.open.sequence]

    @staticmethod
    def refused(stream: Stream, count: int, why: str) -> list[Any]:
        return [PARKED, *stream.target, count, why]

    @staticmethod
    def unparked(stream: Stream) -> list[Any]:
        return [UNPARKED, *stream.target]

    @staticmethod
    def done(stream: Stream, count: int) -> list[Any]:
        return [DONE, *stream.target, count]

    @staticmethod
    def dropped(stream: Stream) -> list[Any]:
        return [DROPPED, *stream.target]

    @staticmethod
    def producer(producer_id: int) -> list[Any]:
        return [PRODUCER, producer_id]

    # The chapter

    def replay(self, content: bytes) -> None:
        try:
            self.apply(msgpack.unpackb(content, use_list=False, strict_map_key=True))
        except CorruptFile:
            raise
        except Exception as error:
            # msgpack raises several unrelated types on bad input; all of them mean the same here.
            raise CorruptFile(f"transfers make no sense: {error!r:.100}") from error

    def snapshot(self) -> Iterator[bytes]:
        if self.producer_id != NO_PRODUCER:
            yield pack(self.producer(self.producer_id))
        for stream in self.streams.values():
            for row, why in stream.parked:
                yield pack(self.owed(stream.target, [row]))
                yield pack(self.refused(stream, row.end - row.start, why))
            # The rows first: a batch is of rows that are there.
            rows = list(stream.rows)
            for start in range(0, len(rows), SNAPSHOT_ROWS):
                yield pack(self.owed(stream.target, rows[start : start + SNAPSHOT_ROWS]))
            if stream.open is not None:
                sent = stream.open
                yield pack([BATCH, *stream.target, sent.count, sent.epoch, sent.sequence])
            elif stream.epoch or stream.sequence:
                yield pack([BATCH, *stream.target, 0, stream.epoch, stream.sequence])


def pack(entry: Sequence[Any]) -> bytes:
    packed: bytes = msgpack.packb(entry)
    return packed
