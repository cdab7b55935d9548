"""Records on their way into batches. (Shell: callers' threads and the loop meet here.)

    open ──full, lingered, flush, nothing in flight──> closed ──> the sender's window ──> settled

There is one open batch per (partition, lane), as plain lists of columns: adding a record is a few
list appends under one lock. Work for the sender is noted, and its loop is woken once, not once per
record. Records without a key go to one partition until its batch is closed, then to the
next one.

Invariants: `used` is the bytes of all batches that are not settled, and stays within
`buffer_bytes` unless a single record is bigger; a closed batch never gets another record; batches
of a partition are closed in the order in which they were opened per lane.

Records of a batch that do not bring a timestamp share the time at which the batch was opened.
Not done here: encoding, sequences, sending (sender.py).
"""

import asyncio
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import mmh3

from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import RaftqError
from raftq.client.common.types import Times
from raftq.client.options import LANES, ProducerOptions
from raftq.client.producer.outbox import (
    NO_COLUMNS,
    MoreColumns,
    Outbox,
    OutgoingBatch,
    OutgoingTopic,
)
from raftq.client.results import Deliveries, Delivery
from raftq.client.wire.record import Headers

RECORD_BYTES = 16  # what a record costs beyond its key, value and headers


def partition_of(key: bytes, partitions: int) -> int:
    """Return the partition of a key: murmur3 (32 bits, seed 0, unsigned) modulo the partitions."""
    return int(mmh3.hash(key, signed=False)) % partitions


def headers_size(headers: Headers | None) -> int:
    return sum([len(name) + len(item) + 4 for name, item in headers.items()]) if headers else 0


class Accumulator:
    """Takes records from any thread; its sender takes batches on the loop.

    `wake` is called, under the lock and at most once until the sender calls `look`, when the sender
    has something to see.
    """

    def __init__(
        self,
        options: ProducerOptions,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], object],
    ) -> None:
        self.options = options
        self.loop = loop
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.used = 0
        self.topics: dict[str, OutgoingTopic] = {}
        self.unsettled: dict[OutgoingBatch, None] = {}
        self.refusal: RaftqError | None = None  # why nothing is taken any more
        self.starved = 0  # threads that wait for room
        self.starving: deque[asyncio.Future[None]] = deque()  # tasks of the loop that do
        self._wake = wake
        self._woken = False
        self._opened: list[OutgoingBatch] = []
        self._ready: dict[Outbox, None] = {}
        self._batch_bytes = options.batch_bytes
        self._batch_records = options.batch_records
        self._buffer_bytes = options.buffer_bytes
        self._size_max = options.value_bytes_max + RECORD_BYTES

    def set_partitions(self, name: str, partitions: int, topic_id: int) -> OutgoingTopic | None:
        """Make a topic known, or give it more partitions: they never become fewer. Returns another
        topic that had the name before, if any. Nothing is added to that one any more."""
        with self.lock:
            topic = self.topics.get(name)
            if topic is not None and topic.topic_id == topic_id:
                known = len(topic.outboxes)
                topic.outboxes += [Outbox(name, number) for number in range(known, partitions)]
                return None
            self.topics[name] = OutgoingTopic(name, partitions, topic_id)
            return self._cut_off(topic)

    def forget(self, name: str) -> OutgoingTopic | None:
        """Forget a topic that is gone, and return it. Nothing is added to it any more."""
        with self.lock:
            return self._cut_off(self.topics.pop(name, None))

    def _cut_off(self, topic: OutgoingTopic | None) -> OutgoingTopic | None:
        for outbox in topic.every() if topic is not None else ():
            for batch in outbox.open:
                if batch is not None:
                    batch.close()
                    outbox.closed.append(batch)
        return topic

    def lacks(self, name: str, partition: int | None) -> bool:
        """Return whether a topic, or its partition with this number, is not known."""
        topic = self.topics.get(name)
        return topic is None or (partition is not None and partition >= len(topic.outboxes))

    def offer_value(self, topic_name: str, value: bytes, priority: str | int) -> Delivery | None:
        """Take a value alone, on the shortest way. None when only `offer` can decide.

        Most records come here, so everything that can be done once per batch is done elsewhere.
        """
        size = len(value) + RECORD_BYTES
        with self.lock:
            topic = self.topics.get(topic_name)
            if topic is None:
                return None
            batch = topic.sticky.get(priority)
            if batch is None or not batch.plain or size > self._size_max:
                return None
            used = self.used + size
            if used > self._buffer_bytes:
                return None
            values = batch.values
            index = len(values)
            values.append(value)
            self.used = used
            batch.size += size
            if batch.size >= self._batch_bytes or index >= self._batch_records - 1:
                self._close(batch)
        return Delivery(batch, index)

    def offer(  # noqa: PLR0913 - a record's fields, on the hot path
        self,
        topic_name: str,
        value: bytes,
        key: bytes | None,
        headers: Headers | None,
        priority: str | int,
        partition: int | None,
        timestamp: int | None,
        times: Times | None = None,
    ) -> Delivery | None:
        """Take one checked record. None when there is no room, or its topic or partition is
        unknown."""
        lane = LANES[priority]
        with self.lock:
            if self.refusal is not None:
                raise copy_error(self.refusal)
            if self.lacks(topic_name, partition):
                return None
            topic = self.topics[topic_name]
            size = len(value) + RECORD_BYTES + (0 if key is None else len(key))
            if headers:
                size += headers_size(headers)
            if self.used + size > self._buffer_bytes and self.used:
                return None
            later = times is not None and times[0] > 0
            if partition is not None:
                batch = self._batch(topic.outboxes[partition], lane, later)
                batch.by_number = True
            elif key is not None:
                number = mmh3.hash(key, signed=False) % len(topic.outboxes)
                batch = self._batch(topic.outboxes[number], lane, later)
                batch.by_key = True
            else:
                batch = self._sticky(topic, priority, lane, later)
            index = len(batch.values)
            batch.add(value, key, headers, timestamp)
            if times is not None:
                batch.add_times(times)
            self.used += size
            batch.size += size
            if batch.size >= self._batch_bytes or index + 1 >= self._batch_records:
                self._close(batch)
            return Delivery(batch, index)

    def offer_values(
        self, topic_name: str, values: list[bytes], priority: str | int
    ) -> Deliveries | None:
        """Take checked values alone, if the open batch has room for all of them. None when only
        `offer_many` can decide."""
        count = len(values)
        size = sum(map(len, values)) + RECORD_BYTES * count
        with self.lock:
            topic = self.topics.get(topic_name)
            batch = None if topic is None else topic.sticky.get(priority)
            if batch is None or not batch.plain:
                return None
            first = len(batch.values)
            used = self.used + size
            filled = batch.size + size
            if (
                used > self._buffer_bytes
                or filled > self._batch_bytes
                or first + count > self._batch_records
            ):
                return None
            batch.values += values
            batch.size = filled
            self.used = used
            if filled == self._batch_bytes or first + count == self._batch_records:
                self._close(batch)
        deliveries = Deliveries(count)
        deliveries._add(batch, first, range(count))
        return deliveries

    def offer_many(
        self,
        topic_name: str,
        rows: "SendRows",
        priority: str | int,
        partition: int | None,
        deliveries: Deliveries,
    ) -> bool:
        """Take as many rows as there is room for, and return whether all were taken. `rows.at` says
        how far it got."""
        lane = LANES[priority]
        with self.lock:
            if self.refusal is not None:
                raise copy_error(self.refusal)
            if self.lacks(topic_name, partition):
                return False
            topic = self.topics[topic_name]
            while rows.at < rows.count:
                room = self._buffer_bytes - self.used
                if self.used and rows.next_size() > room:
                    return False
                if partition is not None:
                    batch = self._batch(topic.outboxes[partition], lane, rows.later)
                    batch.by_key = batch.by_key or rows.by_key
                    batch.by_number = batch.by_number or rows.by_number
                else:
                    batch = self._sticky(topic, priority, lane, rows.later)
                limits = (self._batch_records - len(batch.values), self._batch_bytes - batch.size)
                end, size = rows.cut(limits, room)
                deliveries._add(batch, len(batch.values), rows.positions[rows.at : end])
                batch.extend(*rows.take(end))
                self.used += size
                batch.size += size
                if batch.size >= self._batch_bytes or len(batch.values) >= self._batch_records:
                    self._close(batch)
            return True

    def wait_for_room(self, size: int, timeout_s: float) -> bool:
        """Block this thread until `size` bytes fit, and return whether they did in time."""
        with self.lock:
            self.starved += 1
            try:
                return self.room.wait_for(
                    lambda: (
                        not self.used
                        or self.used + size <= self._buffer_bytes
                        or self.refusal is not None
                    ),
                    timeout_s,
                )
            finally:
                self.starved -= 1

    def refuse(self, error: RaftqError) -> None:
        """Take nothing any more."""
        with self.lock:
            self.refusal = error
            for topic in self.topics.values():
                topic.sticky.clear()
                topic.sticky_later.clear()
            self.room.notify_all()

    def _sticky(
        self, topic: OutgoingTopic, priority: str | int, lane: int, later: bool = False
    ) -> OutgoingBatch:
        """Return the open batch that records without a key go to now."""
        sticky = topic.sticky_later if later else topic.sticky
        batch = sticky.get(priority)
        if batch is None or batch.closed:
            batch = sticky[priority] = self._batch(topic.choose(), lane, later)
        return batch

    def _batch(self, outbox: Outbox, lane: int, later: bool = False) -> OutgoingBatch:
        """Return the open batch of a partition and lane."""
        if later:
            outbox = outbox.for_later()
        batch = outbox.open[lane]
        if batch is None:
            now = self.options.wall_ms()
            batch = outbox.open[lane] = OutgoingBatch(self.lock, self.loop, outbox, lane, now)
            self.unsettled[batch] = None
            self._opened.append(batch)
            self._call()
        return batch

    def _close(self, batch: OutgoingBatch) -> None:
        batch.close()
        batch.outbox.closed.append(batch)
        self._ready[batch.outbox] = None
        self._call()

    def _call(self) -> None:
        if not self._woken:
            self._woken = True
            self._wake()

    # What the sender calls, on the loop.

    def look(self) -> tuple[list[OutgoingBatch], list[Outbox]]:
        """Return the batches opened and the outboxes with batches closed since the last look."""
        with self.lock:
            self._woken = False
            opened, self._opened = self._opened, []
            ready = list(self._ready)
            self._ready.clear()
            return opened, ready

    def take(self, outbox: Outbox, idle: bool) -> OutgoingBatch | None:
        """Return the next batch to send: a closed batch, or an open one that need not wait."""
        with self.lock:
            if not outbox.closed:
                for batch in outbox.open:
                    if batch is not None and (batch.due or (idle and batch.values)):
                        batch.close()
                        return batch
                return None
            return outbox.closed.popleft()

    def has_work(self, outbox: Outbox, idle: bool) -> bool:
        """Return whether `take` would give a batch."""
        if outbox.closed:
            return True
        return any(batch is not None and (batch.due or idle) for batch in outbox.open)

    def finish(self, batch: OutgoingBatch, error: RaftqError | None) -> None:
        """End a batch: free its bytes, and settle its deliveries."""
        with self.lock:
            if not batch.closed:
                batch.close()
            del self.unsettled[batch]
            self.used -= batch.size
            if self.starved:
                self.room.notify_all()
        if self.starving:
            self._feed(batch.count if self.used else len(self.starving))
        batch.raw = None
        batch.drop_columns()
        batch.settle(error)

    def _feed(self, count: int) -> None:
        """Let `count` tasks try again, the longest waiting first: there is room for about as many
        records as the batch had. A task that still finds no room waits for the next batch."""
        starving = self.starving
        while starving and count > 0:
            future = starving.popleft()
            if not future.done():
                future.set_result(None)
                count -= 1

    def withdraw(self, batch: OutgoingBatch) -> None:
        """Take a batch back that `take` has not given out."""
        with self.lock:
            if not batch.closed:
                batch.close()
            elif batch in batch.outbox.closed:
                batch.outbox.closed.remove(batch)

    def push_out(self) -> list[OutgoingBatch]:
        """Make every open batch due, and return all batches that are not settled."""
        with self.lock:
            for batch in self.unsettled:
                batch.due = True
            return list(self.unsettled)


def _ends(
    values: Sequence[bytes],
    keys: Sequence[bytes | None] | None,
    headers: Sequence[Headers | None] | None,
) -> Sequence[int]:
    """Return where the records end when they are laid side by side, from 0 on."""
    lengths = list(map(len, values))
    if headers is not None:
        lengths = [size + headers_size(one) for size, one in zip(lengths, headers, strict=True)]
    if keys is not None:
        sizes = [
            size + RECORD_BYTES + (0 if key is None else len(key))
            for size, key in zip(lengths, keys, strict=True)
        ]
    elif lengths and lengths.count(lengths[0]) == len(lengths):
        # Records of one size are common where there are many of them.
        step = lengths[0] + RECORD_BYTES
        return range(0, step * len(lengths) + 1, step)
    else:
        sizes = [size + RECORD_BYTES for size in lengths]
    return list(accumulate(sizes, initial=0))


class SendRows:
    """Records of one `send_many` on their way to one choice of partition."""

    __slots__ = (
        "at", "by_key", "by_number", "count", "ends", "keys", "later", "more", "positions",
        "values",
    )  # fmt: skip

    def __init__(
        self,
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None = None,
        positions: Sequence[int] | None = None,
        by_key: bool = False,
        more: MoreColumns = NO_COLUMNS,
    ) -> None:
        self.by_key = by_key  # a key has chosen the partition
        self.by_number = not by_key  # a caller has
        self.later = False  # they are not yet due
        self.values = values
        self.keys = keys
        self.more = more
        self.count = len(values)
        self.positions: Sequence[int] = range(self.count) if positions is None else positions
        self.ends = _ends(values, keys, more.headers)
        self.at = 0

    def next_size(self) -> int:
        return self.ends[self.at + 1] - self.ends[self.at]

    def cut(self, limits: tuple[int, int], room: int) -> tuple[int, int]:
        """(end, bytes) of the rows from `at` on that fit, at least one."""
        records, batch_bytes = limits
        start = self.at
        ends = self.ends
        base = ends[start]
        most = min(start + records, self.count)
        # The record that reaches batch_bytes closes the batch, so it is the last to go in.
        end = min(bisect_left(ends, base + batch_bytes, start + 1, most + 1), most)
        if ends[end] - base > room:
            end = max(bisect_right(ends, base + room, start, end) - 1, start + 1)
        return end, ends[end] - base

    def take(self, end: int) -> tuple[Sequence[bytes], Sequence[bytes | None] | None, MoreColumns]:
        start, self.at = self.at, end
        more = self.more
        if more is not NO_COLUMNS:
            cut = [None if column is None else column[start:end] for column in more]
            more = MoreColumns(*cut)  # type: ignore[arg-type]
        keys = None if self.keys is None else self.keys[start:end]
        return self.values[start:end], keys, more
