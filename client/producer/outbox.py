"""Shell: what waits for one partition: its batches, from the first record to the acknowledgement.

This is plain state that two parties change: the accumulator fills and closes batches under its
lock; the sender encodes, sends and settles them on the loop. Each field belongs to one of them.

A batch is in one of these states:

    open       closed=False; `plain` may be True; in outbox.open
    closed     closed=True, raw=None; in outbox.closed. `due` only says that an open batch should
               be closed now
    in flight  raw set, waits=False; in outbox.window
    to retry   raw set, waits=True; in outbox.window; back to in flight when it is sent again
    returned   maybe_written=False; in outbox.returned; it was certainly not written, and gets new
               sequence numbers when it goes to the window (again)
    settled    an outcome or an error; in none of the queues

`maybe_written` is True after an attempt without a clear answer, and never becomes False again.
`by_key` and `by_number` only matter when the topic is created again: they restrict where the batch
may go.

Flags of an outbox: `connecting`, `timer` and `identifying` each say that something calls `pump`
later, and nothing is sent until then; `identifying` waits for the producer id. After a `gap` only
the batches of the window are sent again. When the window is empty, the gap ends: the next epoch
begins, at sequence 0. `stuck` only steers records without a key to other partitions. `gone` is
final: nothing is sent any more.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from raftq.client.common.backoff import copy_error, out_of_time
from raftq.client.common.errors import RaftqError
from raftq.client.common.types import Times
from raftq.client.results import Appended, BatchOutcome
from raftq.client.wire.layout import LANE_COUNT
from raftq.client.wire.record import Headers

C = TypeVar("C")


class MoreColumns(NamedTuple):
    """What records of one `send_many` have beyond values and keys."""

    headers: Sequence[Headers | None] | None = None
    timestamps: Sequence[int | None] | None = None
    times: Sequence[Times] | None = None


NO_COLUMNS = MoreColumns()


class OutgoingBatch(BatchOutcome):
    """Records of one partition and lane, from the first `send` to the acknowledgement."""

    __slots__ = (
        "base_offset", "by_key", "by_number", "closed", "count", "deadline", "deliver_at", "due",
        "expiries", "headers", "keys", "lane", "maybe_written", "number", "outbox", "plain", "raw",
        "size", "timestamp", "timestamps", "turn", "values", "waits",
    )  # fmt: skip

    def __init__(
        self,
        lock: threading.Lock,
        loop: asyncio.AbstractEventLoop,
        outbox: "Outbox",
        lane: int,
        timestamp: int,
    ) -> None:
        super().__init__(lock, loop)
        self.outbox = outbox
        self.lane = lane
        self.values: list[bytes] = []
        self.keys: list[bytes | None] | None = None
        self.headers: list[Headers | None] | None = None
        self.timestamps: list[int] | None = None
        self.timestamp = timestamp
        self.expiries: list[int] | None = None  # 0: never
        self.deliver_at: list[int] | None = [] if outbox.delayed else None
        self.plain = True  # open, and only values so far
        self.size = 0
        self.count = 0  # set when it is closed
        self.closed = False
        self.due = False  # it has waited long enough for more records
        self.by_key = False  # a key has chosen the partition of a record
        self.by_number = False  # a caller has chosen the partition of a record
        self.base_offset = -1
        # Fields of the sender.
        self.deadline = float("inf")
        self.raw: bytearray | None = None
        self.turn = 0  # attempts made; an answer to an older one is ignored
        self.waits = False  # in the window, to be sent again
        self.number = 0  # among the outbox's batches, by sequence
        self.maybe_written = False  # an attempt ended without a clear answer

    def add(
        self, value: bytes, key: bytes | None, headers: Headers | None, timestamp: int | None
    ) -> None:
        count = len(self.values)
        self.values.append(value)
        if key is not None and self.keys is None:
            self.keys = [None] * count
        if headers and self.headers is None:
            self.headers = [None] * count
        if timestamp is not None and self.timestamps is None:
            self.timestamps = [self.timestamp] * count
        if self.keys is not None:
            self.keys.append(key)
        if self.headers is not None:
            self.headers.append(headers)
        if self.timestamps is not None:
            self.timestamps.append(self.timestamp if timestamp is None else timestamp)
        if self.expiries is not None:
            self.expiries.append(0)
        self.plain = self._is_plain()

    def add_times(self, times: Times) -> None:
        """Sets the due time and the expiry of the record that was added last."""
        deliver_at, expires_at = times
        if self.deliver_at is not None:
            self.deliver_at.append(deliver_at)
        if expires_at:
            if self.expiries is None:
                self.expiries = [0] * len(self.values)
            self.expiries[-1] = expires_at
        self.plain = False

    def _is_plain(self) -> bool:
        return (
            self.keys is None
            and self.headers is None
            and self.timestamps is None
            and self.expiries is None
            and self.deliver_at is None
        )

    def extend(
        self,
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None,
        more: MoreColumns = NO_COLUMNS,
    ) -> None:
        """Add records as columns; a column that is None is missing for all of them."""
        counts = len(self.values), len(values)
        self.values.extend(values)
        if self.plain and keys is None and more is NO_COLUMNS:
            return
        timestamps = None
        if more.timestamps is not None:
            timestamps = [self.timestamp if one is None else one for one in more.timestamps]
        self.keys = _extended(self.keys, keys, counts, None)
        self.headers = _extended(self.headers, more.headers, counts, None)
        self.timestamps = _extended(self.timestamps, timestamps, counts, self.timestamp)
        expiries = None
        if more.times is not None:
            expiries = [times[1] for times in more.times]
            if self.deliver_at is not None:
                self.deliver_at.extend([times[0] for times in more.times])
        self.expiries = _extended(
            self.expiries, expiries if any(expiries or ()) else None, counts, 0
        )
        self.plain = self._is_plain()

    def close(self) -> None:
        self.closed = True
        self.plain = False
        self.count = len(self.values)
        self.outbox.open[self.lane] = None

    def appended(self, index: int) -> Appended:
        if self.error is not None:
            raise copy_error(self.error)
        timestamp = self.timestamp if self.timestamps is None else self.timestamps[index]
        offset = self.base_offset + index if self.base_offset >= 0 else -1
        where = self.outbox.topic, self.outbox.partition
        if self.deliver_at is not None:
            return Appended(*where, offset, timestamp, True, self.deliver_at[index])
        return Appended(*where, offset, timestamp)

    def drop_columns(self) -> None:
        """Drops what is not needed after encoding; keeps what results need."""
        self.values = []
        self.keys = self.headers = self.expiries = None


class Outbox:
    """What waits for one partition. `window` and the fields after it belong to the sender.

    Delayed records go to another log with its own sequence numbers, so they have their own outbox,
    `later`. It is made for the first delayed record."""

    __slots__ = (
        "attempts", "closed", "connecting", "delayed", "doubts", "encoded", "gap", "gone",
        "identifying", "identity", "last_error", "later", "node", "open", "partition", "returned",
        "sequence", "stuck", "timer", "topic", "window",
    )  # fmt: skip

    def __init__(self, topic: str, partition: int, delayed: bool = False) -> None:
        self.topic = topic
        self.partition = partition
        self.delayed = delayed
        self.later: Outbox | None = None
        self.open: list[OutgoingBatch | None] = [None] * LANE_COUNT
        self.closed: deque[OutgoingBatch] = deque()
        self.stuck = False  # nothing gets through now: records without a key go elsewhere
        self.window: deque[OutgoingBatch] = deque()  # encoded and not settled, by sequence
        self.returned: deque[OutgoingBatch] = deque()  # not written, will get new sequences
        self.identity: tuple[int, int] | None = None  # producer id and epoch
        self.sequence = 0
        self.encoded = 0  # batches that have sequence numbers
        self.gap = False  # a sequence number was given up: later ones will be refused
        self.identifying = False
        self.connecting = False
        self.timer: asyncio.TimerHandle | None = None
        self.attempts = 0
        self.last_error: RaftqError | None = None
        self.node: int | None = None  # the node to which the window was sent
        self.doubts = 0  # refusals that a new topic of the same name would explain
        self.gone: RaftqError | None = None  # the topic is gone: nothing more is sent

    @property
    def label(self) -> str:
        return f"{self.topic}/{self.partition}"

    @property
    def avoided(self) -> bool:
        """Whether the partition accepts nothing now, of either kind of records."""
        return self.stuck or (self.later is not None and self.later.stuck)

    def begin_epoch(self) -> None:
        """Ends a gap: what comes next has another epoch and begins at sequence 0."""
        self.gap = False
        self.sequence = 0
        if self.identity is not None:
            producer_id, epoch = self.identity
            self.identity = producer_id, epoch + 1

    def end_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def for_later(self) -> "Outbox":
        if self.later is None:
            self.later = Outbox(self.topic, self.partition, delayed=True)
        return self.later


def _extended(
    column: list[C] | None, more: Sequence[C] | None, counts: tuple[int, int], missing: C
) -> list[C] | None:
    """A column of a batch with (records before, records added) after the records were added."""
    before, added = counts
    if more is None:
        if column is not None:
            column.extend([missing] * added)
        return column
    if column is None:
        column = [missing] * before
    column.extend(more)
    return column


def too_late(batch: OutgoingBatch, timeout_ms: int) -> RaftqError:
    """The error of a batch whose time is over."""
    count = batch.count or len(batch.values)
    outbox = batch.outbox
    what = f"{count} records for {outbox.label} were not acknowledged in {timeout_ms} ms"
    return out_of_time(what, outbox.last_error).with_outcome("failed")


class OutgoingTopic:
    """The outboxes of a topic's partitions.

    A topic that is deleted and created again is another topic: it has another id."""

    __slots__ = ("name", "next", "outboxes", "sticky", "sticky_later", "topic_id")

    def __init__(self, name: str, partitions: int, topic_id: int) -> None:
        self.name = name
        self.topic_id = topic_id
        self.outboxes = [Outbox(name, number) for number in range(partitions)]
        # By priority as callers give it: where records without a key go until that batch is closed.
        self.sticky: dict[str | int, OutgoingBatch] = {}
        self.sticky_later: dict[str | int, OutgoingBatch] = {}
        self.next = 0

    def every(self) -> "Iterator[Outbox]":
        """All outboxes, also those of delayed records."""
        for outbox in self.outboxes:
            yield outbox
            if outbox.later is not None:
                yield outbox.later

    def choose(self) -> Outbox:
        """Chooses by round robin, without partitions that are stuck while others are not."""
        outboxes = self.outboxes
        count = len(outboxes)
        for step in range(count):
            outbox = outboxes[(self.next + step) % count]
            if not outbox.avoided:
                self.next = (self.next + step + 1) % count
                return outbox
        self.next = (self.next + 1) % count
        return outboxes[self.next - 1]
