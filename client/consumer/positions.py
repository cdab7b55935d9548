"""Assigned partitions: where each one is, and what is fetched of it and not yet polled.

(Shell: the polling thread and the loop meet here.)

    position       next offset for the application
    fetch_offset   next offset to ask the leader for; between the two are the buffered batches

The fetcher fills, `poll` empties; each `seek` starts a new turn, and whatever was asked for in an
older turn is thrown away when it arrives. A position moves only when records are handed out, so
nothing is skipped or repeated, whatever happens on the way here.
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
    """One assigned partition. What follows `turn` belongs to the fetcher."""

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
        self.rows: list[Record] = []  # of the batch that is being handed out
        self.rows_at = 0
        self.error: RaftqError | None = None
        self.start: Start | None = None  # a position that still has to be asked for
        self.held = 0  # PAUSED, REVOKED or both: nothing is fetched or handed out
        self.turn = 0
        self.until: int | None = None  # where its reader stops
        self.whole = False  # all that is before `until` has been fetched
        self.fetch_offset: int | None = None
        self.in_flight: int | None = None  # the turn of the fetch that is under way
        self.timer: asyncio.TimerHandle | None = None
        self.doubtful = False  # a node did not know the topic since its last fetch
        self.node: int | None = None  # whom it was fetched from
        self.asked_at = 0.0  # when its last fetch ended
        self.asking: asyncio.Task[None] | None = None  # routes without which it must not go on
        self.attempts = 0
        self.bytes_max = bytes_max
        self.high_watermark: int | None = None
        self.topic_id: int | None = None  # of the topic that the position is in
        self.lost_since: float | None = None  # past the leader's end, or without topic, since

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
        self.parts: dict[PartitionKey, Assigned] = {}
        self.buffered_bytes = 0
        self.held = False  # the fetcher left a partition out because of full buffers
        self.called = False  # whoever polls is wanted for something else first
        self._loop = loop
        self._wake = wake
        self._turn: deque[Assigned] = deque()  # whose turn it is
        self._waiters: list[asyncio.Future[None]] = []

    def get(self, topic: str, partition: int) -> Assigned:
        part = self.parts.get((topic, partition))
        if part is None:
            raise InvalidArgument(f"{topic}/{partition} is not assigned to this consumer")
        return part

    def assign(self, keys: Iterable[PartitionKey], bytes_max: int) -> list[Assigned]:
        """Hold exactly these; those held before go on where they are. The new ones."""
        with self.lock:
            before = self.parts
            self.parts = {}
            for key in keys:
                held = before.pop(key) if key in before else None
                self.parts[key] = held or self.parts.get(key) or Assigned(*key, bytes_max)
            for gone in before.values():
                self._clear(gone)
                if gone.timer is not None:
                    gone.timer.cancel()
                    gone.timer = None
            self._turn = deque(self.parts.values())
            return [part for part in self.parts.values() if part.turn == 0]

    def move(self, part: Assigned, offset: int | None, start: Start | None) -> None:
        """Begin a new turn at an offset, or at one that is still to be asked for."""
        with self.lock:
            self._clear(part)
            part.position = part.fetch_offset = offset
            part.start = start
            part.error = None
            part.lost_since = None
            part.high_watermark = part.topic_id = None

    def hold(self, part: Assigned, why: int) -> None:
        """Hand out nothing of this one until it is let go on; what is buffered is thrown away."""
        with self.lock:
            part.held |= why
            self._clear(part)
            if part.position is not None:
                part.fetch_offset = part.position
            if why == REVOKED:
                part.error = None

    def let_go_on(self, part: Assigned, why: int) -> None:
        with self.lock:
            part.held &= ~why

    def call(self) -> None:
        """Whoever polls is wanted."""
        with self.lock:
            self.called = True
        self.notify()

    def stop_at(self, part: Assigned, offset: int) -> None:
        with self.lock:
            part.until = offset

    def _clear(self, part: Assigned) -> None:
        part.turn += 1
        part.whole = False
        self.buffered_bytes -= part.buffered_bytes
        part.buffered_bytes = 0
        part.batches.clear()
        part.rows = []
        part.rows_at = 0

    # The loop fills.

    def fill(self, part: Assigned, batches: list[Batch]) -> None:
        """Add what was fetched; `notify` tells whoever waits for it."""
        with self.lock:
            part.batches.extend(batches)
            last = batches[-1]
            # One without records wakes no reader, so something that does has to follow it.
            if part.until is not None and last.end_offset >= part.until and not is_empty(last):
                part.whole = True
            size = sum([batch.length for batch in batches])
            part.buffered_bytes += size
            self.buffered_bytes += size

    def fail(self, part: Assigned, error: RaftqError) -> None:
        """Let the next poll raise this."""
        part.error = error
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

    # Whoever polls empties.

    def wait(self, timeout_s: float) -> None:
        """Block this thread until there is something to take, or the consumer ends."""
        with self.lock:
            if not self.called and not any(part.batches or part.error for part in self._turn):
                self.ready.wait(timeout_s)

    def take_records(self, records_max: int) -> list[Record]:
        """Up to so many records, partition by partition; raises what a partition failed with."""
        found: list[Record] = []
        for _ in range(len(self._turn)):
            part = self._turn[0]
            while len(found) < records_max:
                if part.rows_at < len(part.rows):
                    self._hand_out(part, found, records_max)
                elif not self._next_rows(part, bool(found)):
                    break
            if len(found) >= records_max:
                break
            self._turn.rotate(-1)
        return found

    def _hand_out(self, part: Assigned, found: list[Record], records_max: int) -> None:
        with self.lock:
            at = part.rows_at
            rows = part.rows[at : at + records_max - len(found)]
            if rows:
                part.rows_at = at + len(rows)
                part.position = rows[-1].offset + 1
                found += rows

    def _next_rows(self, part: Assigned, have_some: bool) -> bool:
        """Decode the next batch; whether there was one. Errors wait while there are records."""
        fetched, turn = self._next_batch(part, have_some)
        if fetched is None:
            return False
        try:
            rows = to_records(fetched)
        except RaftqError:
            self._put_back(part, fetched.batch, turn)
            if have_some:
                return False
            self._refetch(part, turn)
            raise
        with self.lock:
            if part.turn == turn:
                part.rows, part.rows_at = rows, 0
                if not rows:
                    part.position = max(fetched.batch.end_offset, fetched.position)
        return True

    def take_batches(self, bytes_max: int) -> list[Fetched]:
        """Whole batches, about so many bytes; their records count as handed out."""
        found: list[Fetched] = []
        size = 0
        for _ in range(len(self._turn)):
            part = self._turn[0]
            while size < bytes_max:
                fetched, turn = self._next_batch(part, bool(found))
                if fetched is None:
                    break
                with self.lock:
                    if part.turn == turn:
                        part.position = max(fetched.batch.end_offset, fetched.position)
                if not is_empty(fetched.batch):
                    found.append(fetched)
                    size += fetched.batch.length
            if size >= bytes_max:
                break
            self._turn.rotate(-1)
        return found

    def _next_batch(self, part: Assigned, have_some: bool) -> tuple[Fetched | None, int]:
        with self.lock:
            if part.error is not None and not part.batches:
                if have_some:
                    return None, 0
                error = part.error
                if part.position is not None or part.start is not None:
                    part.error = None  # it goes on; without a position only a seek helps
                self._wake()
                raise copy_error(error)
            if not part.batches or part.position is None:
                return None, 0
            batch = part.batches.popleft()
            part.buffered_bytes -= batch.length
            self.buffered_bytes -= batch.length
            if self.held:
                self.held = False
                self._wake()
            return Fetched(part.topic, part.partition, part.position, batch), part.turn

    def _put_back(self, part: Assigned, batch: Batch, turn: int) -> None:
        with self.lock:
            if part.turn == turn:
                part.batches.appendleft(batch)
                part.buffered_bytes += batch.length
                self.buffered_bytes += batch.length

    def _refetch(self, part: Assigned, turn: int) -> None:
        """Throw away what is buffered: damage may be gone in another copy."""
        with self.lock:
            if part.turn == turn:
                self._clear(part)
                part.fetch_offset = part.position
        self._wake()
