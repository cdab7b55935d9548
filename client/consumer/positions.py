"""Shell: assigned partitions: the position of each, and its fetched records that were not polled.

The polling thread and the loop share this state.

    position       next offset for the application
    fetch_offset   next offset to ask the leader for; between the two are the buffered batches

The fetcher fills and `poll` empties. Each `seek` starts a new turn; replies to requests of an older
turn are dropped. A position moves only when records are returned, so none is skipped or repeated.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import InvalidArgument, RaftqError
from raftq.client.common.tasks import resolve
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.records import Fetched, is_empty, to_records
from raftq.client.results import Record
from raftq.client.wire.batch import Batch

PAUSED = 1
REVOKED = 2

Start = tuple[Literal["earliest", "latest", "time"], int]  # the number is for "time"


class Assigned:
    """One assigned partition. The fields after `turn` belong to the fetcher."""

    __slots__ = (
        "asked_at", "asking", "attempts", "batches", "buffered_bytes", "bytes_max", "doubtful",
        "error", "fetch_offset", "held", "high_watermark", "in_flight", "lost_since", "node",
        "partition", "position", "rows", "rows_at", "start", "timer", "topic", "topic_id", "turn",
        "until", "whole",
    )  # fmt: skip

    def __init__(self, topic: str, partition: int, bytes_max: int) -> None:
        self.topic = topic
        self.partition = partition
        self.position: int | None = None
        self.batches: deque[Batch] = deque()
        self.buffered_bytes = 0
        self.rows: list[Record] = []  # of the batch that is being returned
        self.rows_at = 0
        self.error: RaftqError | None = None
        self.start: Start | None = None  # a position that still has to be requested
        self.held = 0  # PAUSED, REVOKED or both: nothing is fetched or returned
        self.turn = 0
        self.until: int | None = None  # where its reader stops
        self.whole = False  # everything before `until` has been fetched
        self.fetch_offset: int | None = None
        self.in_flight: int | None = None  # the turn of the fetch in flight
        self.timer: asyncio.TimerHandle | None = None
        self.doubtful = False  # a node did not know the topic since its last fetch
        self.node: int | None = None  # the node that it was fetched from
        self.asked_at = 0.0  # when its last fetch ended
        self.asking: asyncio.Task[None] | None = None  # routes that it must wait for
        self.attempts = 0
        self.bytes_max = bytes_max
        self.high_watermark: int | None = None
        self.topic_id: int | None = None  # of the topic of the position
        self.lost_since: float | None = None  # beyond the leader's end, or no topic, since

    @property
    def key(self) -> PartitionKey:
        return self.topic, self.partition

    def describe(self) -> str:
        return f"{self.topic}/{self.partition}"


class Positions:
    """All assigned partitions. `wake` is called when a full buffer has room again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], object]) -> None:
        self.lock = threading.Lock()
        self.ready = threading.Condition(self.lock)
        self.partitions: dict[PartitionKey, Assigned] = {}
        self.buffered_bytes = 0
        self.held = False  # the fetcher left a partition out because of full buffers
        self.called = False  # the poller must do something else first
        self._loop = loop
        self._wake = wake
        self._turn: deque[Assigned] = deque()  # the partition whose turn it is
        self._waiters: list[asyncio.Future[None]] = []

    def get(self, topic: str, partition: int) -> Assigned:
        assigned = self.partitions.get((topic, partition))
        if assigned is None:
            raise InvalidArgument(f"{topic}/{partition} is not assigned to this consumer")
        return assigned

    def assign(self, keys: Iterable[PartitionKey], bytes_max: int) -> list[Assigned]:
        """Holds exactly these partitions; the old ones keep their state. Returns the new ones."""
        with self.lock:
            before = self.partitions
            self.partitions = {}
            for key in keys:
                held = before.pop(key) if key in before else None
                self.partitions[key] = held or self.partitions.get(key) or Assigned(*key, bytes_max)
            for gone in before.values():
                self._clear(gone)
                if gone.timer is not None:
                    gone.timer.cancel()
                    gone.timer = None
            self._turn = deque(self.partitions.values())
            return [assigned for assigned in self.partitions.values() if assigned.turn == 0]

    def move(self, assigned: Assigned, offset: int | None, start: Start | None) -> None:
        """Begins a new turn at an offset, or at one that still has to be requested."""
        with self.lock:
            self._clear(assigned)
            assigned.position = assigned.fetch_offset = offset
            assigned.start = start
            assigned.error = None
            assigned.lost_since = None
            assigned.high_watermark = assigned.topic_id = None

    def hold(self, assigned: Assigned, why: int) -> None:
        """Returns nothing of this partition until it is released; drops its buffer."""
        with self.lock:
            assigned.held |= why
            self._clear(assigned)
            if assigned.position is not None:
                assigned.fetch_offset = assigned.position
            if why == REVOKED:
                assigned.error = None

    def let_go_on(self, assigned: Assigned, why: int) -> None:
        with self.lock:
            assigned.held &= ~why

    def call(self) -> None:
        """Calls the poller."""
        with self.lock:
            self.called = True
        self.notify()

    def stop_at(self, assigned: Assigned, offset: int) -> None:
        with self.lock:
            assigned.until = offset

    def _clear(self, assigned: Assigned) -> None:
        assigned.turn += 1
        assigned.whole = False
        self.buffered_bytes -= assigned.buffered_bytes
        assigned.buffered_bytes = 0
        assigned.batches.clear()
        assigned.rows = []
        assigned.rows_at = 0

    # Called by the loop, which fills.

    def fill(self, assigned: Assigned, batches: list[Batch]) -> None:
        """Adds fetched batches; `notify` wakes the poller."""
        with self.lock:
            assigned.batches.extend(batches)
            last = batches[-1]
            # A batch without records wakes no reader, so another one has to follow it.
            if (
                assigned.until is not None
                and last.end_offset >= assigned.until
                and not is_empty(last)
            ):
                assigned.whole = True
            size = sum([batch.length for batch in batches])
            assigned.buffered_bytes += size
            self.buffered_bytes += size

    def fail(self, assigned: Assigned, error: RaftqError) -> None:
        """The next poll raises this error."""
        assigned.error = error
        self.notify()

    def notify(self) -> None:
        """There is something to poll."""
        with self.lock:
            self.ready.notify_all()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            resolve(waiter)

    def waiter(self) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(future)
        return future

    # Called by the poller, which empties.

    def wait(self, timeout_s: float) -> None:
        """Blocks this thread until there is something to take, or the consumer ends."""
        with self.lock:
            if not self.called and not any(
                assigned.batches or assigned.error for assigned in self._turn
            ):
                self.ready.wait(timeout_s)

    def take_records(self, records_max: int) -> list[Record]:
        """Takes up to `count` records, partition by partition. Raises the error of a failed
        partition."""
        found: list[Record] = []
        for _ in range(len(self._turn)):
            assigned = self._turn[0]
            while len(found) < records_max:
                if assigned.rows_at < len(assigned.rows):
                    self._hand_out(assigned, found, records_max)
                elif not self._next_rows(assigned, bool(found)):
                    break
            if len(found) >= records_max:
                break
            self._turn.rotate(-1)
        return found

    def _hand_out(self, assigned: Assigned, found: list[Record], records_max: int) -> None:
        with self.lock:
            at = assigned.rows_at
            rows = assigned.rows[at : at + records_max - len(found)]
            if rows:
                assigned.rows_at = at + len(rows)
                assigned.position = rows[-1].offset + 1
                found += rows

    def _next_rows(self, assigned: Assigned, have_some: bool) -> bool:
        """Decodes the next batch; says whether there was one. Errors wait while there are
        records."""
        fetched, turn = self._next_batch(assigned, have_some)
        if fetched is None:
            return False
        try:
            rows = to_records(fetched)
        except RaftqError:
            self._put_back(assigned, fetched.batch, turn)
            if have_some:
                return False
            self._refetch(assigned, turn)
            raise
        with self.lock:
            if assigned.turn == turn:
                assigned.rows, assigned.rows_at = rows, 0
                if not rows:
                    assigned.position = max(fetched.batch.end_offset, fetched.position)
        return True

    def take_batches(self, bytes_max: int) -> list[Fetched]:
        """Takes whole batches of about this many bytes; their records count as returned."""
        found: list[Fetched] = []
        size = 0
        for _ in range(len(self._turn)):
            assigned = self._turn[0]
            while size < bytes_max:
                fetched, turn = self._next_batch(assigned, bool(found))
                if fetched is None:
                    break
                with self.lock:
                    if assigned.turn == turn:
                        assigned.position = max(fetched.batch.end_offset, fetched.position)
                if not is_empty(fetched.batch):
                    found.append(fetched)
                    size += fetched.batch.length
            if size >= bytes_max:
                break
            self._turn.rotate(-1)
        return found

    def _next_batch(self, assigned: Assigned, have_some: bool) -> tuple[Fetched | None, int]:
        with self.lock:
            if assigned.error is not None and not assigned.batches:
                if have_some:
                    return None, 0
                error = assigned.error
                if assigned.position is not None or assigned.start is not None:
                    assigned.error = None  # it continues; without a position only a seek helps
                self._wake()
                raise copy_error(error)
            if not assigned.batches or assigned.position is None:
                return None, 0
            batch = assigned.batches.popleft()
            assigned.buffered_bytes -= batch.length
            self.buffered_bytes -= batch.length
            if self.held:
                self.held = False
                self._wake()
            return Fetched(
                assigned.topic, assigned.partition, assigned.position, batch
            ), assigned.turn

    def _put_back(self, assigned: Assigned, batch: Batch, turn: int) -> None:
        with self.lock:
            if assigned.turn == turn:
                assigned.batches.appendleft(batch)
                assigned.buffered_bytes += batch.length
                self.buffered_bytes += batch.length

    def _refetch(self, assigned: Assigned, turn: int) -> None:
        """Drops the buffer and fetches again: another copy may be undamaged."""
        with self.lock:
            if assigned.turn == turn:
                self._clear(assigned)
                assigned.fetch_offset = assigned.position
        self._wake()
