"""What clients give back: deliveries, records, descriptions of topics. (Shell: it waits.)

A Delivery is two slots, a batch and the record's place in it; everything that costs something (an
event, futures, callbacks) belongs to the batch and is made at the first wait for it. So a record
without a waiter costs nothing, and a thousand waits for records of a batch cost one event.
"""

import asyncio
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple, Protocol

from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import Detail, InvalidArgument, RaftqError, RequestTimeout
from raftq.client.common.tasks import resolve


class Appended(NamedTuple):
    """Where a record is. `offset` is -1 when no node reports it, as with acks="none"."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    delayed: bool = False
    """Whether it waits until `deliver_at` (ms): the offset is its place among the delayed then."""
    deliver_at: int | None = None


class Record(NamedTuple):
    """One record as a consumer gets it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes
    timestamp: int
    headers: Mapping[str, bytes]
    priority: int


class Settling(Protocol):
    """The outcome of a batch, shared by the deliveries of all its records."""

    done: bool
    error: RaftqError | None
    claimed: bool
    closed: bool

    def appended(self, index: int) -> Appended: ...
    def event(self) -> threading.Event: ...
    def waiter(self) -> "asyncio.Future[None]": ...
    def on_done(self, call: Callable[[], object]) -> None: ...
    def loop_runs_here(self) -> bool: ...


class BatchOutcome:
    """The state of a batch's delivery: pending, then appended or failed, once and for ever.

    `lock` guards the step from pending to done against those who begin to wait.
    """

    __slots__ = ("_callbacks", "_event", "_waiters", "claimed", "done", "error", "lock", "loop")

    def __init__(self, lock: threading.Lock, loop: asyncio.AbstractEventLoop) -> None:
        self.lock = lock
        self.loop = loop
        self.done = False
        self.error: RaftqError | None = None
        self.claimed = False  # the application has asked what became of it
        self._event: threading.Event | None = None
        self._waiters: list[asyncio.Future[None]] | None = None
        self._callbacks: list[Callable[[], object]] | None = None

    def event(self) -> threading.Event:
        with self.lock:
            if self._event is None:
                self._event = threading.Event()
                if self.done:
                    self._event.set()
            return self._event

    def waiter(self) -> "asyncio.Future[None]":
        """A future of the running loop that ends with the batch. Each waiter gets its own, because
        a cancelled waiter cancels its future."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if loop is self.loop:
            self._add_waiter(future)  # batches are settled on this loop, so not meanwhile
        else:
            with self.lock:
                self._add_waiter(future)
        return future

    def _add_waiter(self, future: "asyncio.Future[None]") -> None:
        if self.done:
            future.set_result(None)
        elif self._waiters is None:
            self._waiters = [future]
        else:
            self._waiters.append(future)

    def on_done(self, call: Callable[[], object]) -> None:
        with self.lock:
            if not self.done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(call)
                return
        call()

    def loop_runs_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def settle(self, error: RaftqError | None) -> None:
        """The end, told to everyone who waits. On the loop only."""
        assert not self.done
        self.error = error
        with self.lock:
            self.done = True
            event, waiters, callbacks = self._event, self._waiters, self._callbacks
            self._event = self._waiters = self._callbacks = None
        if event is not None:
            event.set()
        for future in waiters or ():
            if future.get_loop() is self.loop:
                resolve(future)
            else:
                future.get_loop().call_soon_threadsafe(resolve, future)
        for call in callbacks or ():
            self._call(call)

    def _call(self, call: Callable[[], object]) -> None:
        """A callback's error is the application's: it must not keep others from being told."""
        try:
            call()
        except Exception as error:
            self.loop.call_exception_handler(
                {"message": "a delivery callback failed", "exception": error}
            )


class Delivery:
    """What becomes of one record: `result()` in a thread, `await delivery` on the loop."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Settling, index: int) -> None:
        self._batch = batch
        self._index = index

    def done(self) -> bool:
        return self._batch.done

    def closed_batch(self) -> bool:
        """Whether the record's batch takes no more records."""
        return self._batch.closed

    def result(self, timeout: float | None = None) -> Appended:
        """Wait for the acknowledgement. Raises the RaftqError that ended the delivery, or
        RequestTimeout (outcome unknown) when `timeout` seconds pass; the delivery goes on then."""
        batch = self._batch
        batch.claimed = True
        if not batch.done:
            if batch.loop_runs_here():
                raise InvalidArgument("result() would block the event loop; use `await delivery`")
            if not batch.event().wait(timeout):
                raise RequestTimeout(f"the record is not acknowledged after {timeout} s")
        return batch.appended(self._index)

    def exception(self, timeout: float | None = None) -> RaftqError | None:
        """Wait like `result`, and give the error instead of raising it."""
        batch = self._batch
        if not batch.done:
            try:
                self.result(timeout)
            except RaftqError:
                if not batch.done:
                    raise
        batch.claimed = True
        return None if batch.error is None else copy_error(batch.error)

    def add_done_callback(self, call: "Callable[[Delivery], object]") -> None:
        """Call `call(delivery)` once it is done: on the client's loop, or at once if it is. It must
        not block."""
        self._batch.claimed = True
        self._batch.on_done(lambda: call(self))

    def __await__(self) -> Generator[object, None, Appended]:
        batch = self._batch
        batch.claimed = True
        if not batch.done:
            yield from batch.waiter().__await__()
        return batch.appended(self._index)


_NONE_REFUSED: Mapping[int, RaftqError] = MappingProxyType({})


class Deliveries:
    """What becomes of the records of one `send_many`, in the order of its values."""

    __slots__ = ("_count", "_parts", "_refused")

    def __init__(self, count: int) -> None:
        self._count = count
        self._refused = _NONE_REFUSED
        # (batch, first index in it, positions among the values)
        self._parts: list[tuple[Settling, int, Sequence[int]]] = []

    def __len__(self) -> int:
        return self._count

    def _add(self, batch: Settling, first: int, positions: Sequence[int]) -> None:
        self._parts.append((batch, first, positions))

    def _refuse(self, positions: Sequence[int], error: RaftqError) -> None:
        """These were not taken."""
        self._refused = {**self._refused, **dict.fromkeys(positions, error)}

    def done(self) -> bool:
        return all(batch.done for batch, _, _ in self._parts)

    def result(self, timeout: float | None = None) -> list[Appended]:
        """Wait for all of them; raises the first error."""
        self.wait(timeout)
        return self._results()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all are done, without making a result for each; raises the first error."""
        deadline = None if timeout is None else perf_counter() + timeout
        for batch, first, _ in self._parts:
            left = None if deadline is None else max(deadline - perf_counter(), 0)
            Delivery(batch, first).result(left)
        self._raise_refused()

    def __await__(self) -> Generator[object, None, list[Appended]]:
        for batch, _, _ in self._parts:
            batch.claimed = True
        for batch, _, _ in self._parts:
            if not batch.done:
                yield from batch.waiter().__await__()
        return self._results()

    async def outcomes(self) -> list[Appended | RaftqError]:
        """Wait for all of them: where each record is, or why it was not appended."""
        for batch, _, _ in self._parts:
            batch.claimed = True
            if not batch.done:
                await batch.waiter()
        found: dict[int, Appended | RaftqError] = dict(self._refused)
        for batch, first, positions in self._parts:
            for index, position in enumerate(positions, first):
                found[position] = batch.error or batch.appended(index)
        return [found[position] for position in range(self._count)]

    def _raise_refused(self) -> None:
        if self._refused:
            raise copy_error(next(iter(self._refused.values())))

    def _results(self) -> list[Appended]:
        self._raise_refused()
        results: list[Appended | None] = [None] * self._count
        for batch, first, positions in self._parts:
            for index, position in enumerate(positions, first):
                results[position] = batch.appended(index)
        return [result for result in results if result is not None]


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """One partition; the offsets are None while it has no leader."""

    partition: int
    leader: int | None
    epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    target: tuple[int, ...]
    start_offset: int | None
    high_watermark: int | None
    waits_for: tuple[int, ...] = ()
    """Nodes that have to tell where their copies end before anybody leads."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic as the cluster has it."""

    name: str
    topic_id: int
    config: Mapping[str, Detail]
    partitions: tuple[PartitionDescription, ...]

    @property
    def replication(self) -> int:
        return max((len(partition.replicas) for partition in self.partitions), default=0)
