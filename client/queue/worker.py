"""Shell: the asyncio worker: leases records, calls a handler with each, settles them.

    leased ──room──> running ──returned──> acked
       │                ├──raised──> nacked, or rejected with Reject
       │                └──lease lost──> cancelled, and not settled
       └──stopped──> released

The number of records of a worker is limited: those in its handlers and those that wait for one,
which are as many as handlers do in AHEAD_S unless `prefetch` is set. Handled records that wait for
the answer of a node do not count, up to UNSETTLED_MAX. Every lease is renewed when two thirds are
left, so a handler may take as long as it wants. A lease that cannot be renewed is lost when it
ends: a coroutine is cancelled, and a function in a thread can check `record.lost`.

`stop` ends leasing, releases records that no handler has begun with, and lets running handlers
finish within `grace` seconds.
"""

import asyncio
import inspect
import logging
import signal
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

from raftq.client.common.errors import InvalidArgument, LeaseLost, RaftqError
from raftq.client.common.tasks import resolve, sleep
from raftq.client.options import Address, Bootstrap
from raftq.client.queue.client import CLOSE_S, WAIT_S_MAX, QueueBase
from raftq.client.queue.handler_ends import settlement_of
from raftq.client.queue.handler_threads import Ended, HandlerThreads
from raftq.client.queue.leased import LeasedRecord, receipt_of
from raftq.client.queue.leasing import Partitions
from raftq.client.queue.options import WorkerOptions, WorkerSettings
from raftq.client.queue.settling import SettleFailure, Settlement

logger = logging.getLogger(__name__)

TICK_S = 0.001  # timers may ring a little early
GATHER_S = 0.005  # how long an ack waits for others, unless there is little room
AHEAD_S = 0.05  # handlers have work for this long while more is leased
AHEAD_MAX = 1_000
UNSETTLED_MAX = 4_096


class Job:
    """One leased record of a worker."""

    __slots__ = ("is_begun", "is_settling", "lease_end", "record", "task")

    def __init__(self, record: LeasedRecord, lease_end: float) -> None:
        self.record = record
        self.lease_end = lease_end  # on the loop's clock, and never later than the node's
        self.task: asyncio.Task[None] | None = None  # while it runs
        self.is_begun = False
        self.is_settling = False


class Worker(QueueBase):
    """Works on records until it is stopped. Settings are the fields of WorkerOptions."""

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[WorkerSettings]) -> None:
        if "handler" not in settings:
            raise InvalidArgument("a worker needs a handler")
        self.options = WorkerOptions(**settings)
        super().__init__(bootstrap, self.options, "worker")
        self.counts: Counter[str] = Counter()
        """How many records were acked, nacked, rejected, lost and released so far."""
        self._is_async = is_coroutine_function(self.options.handler)
        self._jobs: dict[Job, None] = {}
        self._queued: deque[Job] = deque()
        self._running = 0
        self._settling = 0  # jobs that are done
        self._handler_s = AHEAD_S  # how long a handler takes, a moving average
        self._done: list[Job] = []  # to be acked
        self._gathering: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None  # at the end of the lease that ends first
        self._asked: dict[Address, tuple[asyncio.Task[None], Partitions, int]] = {}
        self._hot: dict[Address, None] = {}  # had records at the last request
        self._stopping = False
        self._changed: asyncio.Future[None] | None = None
        self._threads: HandlerThreads[Job] | None = None

    def _on_start(self) -> None:
        super()._on_start()
        self._leasing.watch(self._wake)
        if not self._is_async:
            self._threads = HandlerThreads(
                self._loop, self.options.concurrency, self._begin_in_thread, self._ended_in_threads
            )

    async def run(self) -> None:
        """Works until `stop` or a signal. Raises UnknownTopic if a topic does not exist."""
        self._ensure_started()
        with self._signals():
            graceful = False
            renewing = self._tasks.spawn(self._renew())
            try:
                if not self._stopping:
                    await self._leasing.find()
                while not self._stopping:
                    self._ask()
                    await self._something()
                graceful = True
            finally:
                await self._shut_down(self.options.grace if graceful else 0.0)
                renewing.cancel()
                await self.close()

    def stop(self) -> None:
        """Ends soon: `run` returns when it is done. On the loop's thread."""
        self._stopping = True
        self._wake()

    async def close(self) -> None:
        for timer in (self._gathering, self._alarm):
            if timer is not None:
                timer.cancel()
        if self._threads is not None:
            # A running function cannot be ended; it may notice that its lease is lost.
            self._threads.close()
        await self._end()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        here = threading.current_thread() is threading.main_thread()
        if not here or not self.options.handle_signals:
            yield
            return
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            try:
                self._loop.add_signal_handler(number, self.stop)
            except (NotImplementedError, RuntimeError):
                del before[number]
        try:
            yield
        finally:
            for number, handler in before.items():
                self._loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _wake(self) -> None:
        if self._changed is not None:
            resolve(self._changed)

    async def _something(self) -> None:
        self._changed = self._loop.create_future()
        try:
            await self._changed
        finally:
            self._changed = None

    # Leasing.

    def _ask(self) -> None:
        """Waits at every node.

        Nodes that had records at the last request share the free room. The others are asked for a
        few each, so that none is forgotten however little room there is."""
        if self._leasing.problem is not None:
            logger.warning("nothing can be leased: %s", self._leasing.problem)
            self._leasing.problem = None
        nodes = self._leasing.nodes()
        capacity = self._capacity()
        for address, partitions in nodes.items():
            asked = self._asked.get(address)
            if asked is not None:
                if asked[1] != partitions:
                    self._leasing.call_off(address, asked[1])  # it leads other partitions by now
            elif address not in self._hot:
                if self._held() < capacity:
                    self._start(address, partitions, max(capacity // (4 * len(nodes)), 1))
            else:
                # A request that finds nothing waits with its share, so none may have all the room.
                unasked = sum(node not in self._asked for node in self._hot if node in nodes)
                count = self._room() // max(unasked, 1)
                if count < 1 and self._held() < capacity:
                    count = 1
                # Not one by one, unless handlers are idle: a request costs more than a record.
                is_idle = self._held() < self.options.concurrency
                if count >= (1 if is_idle else max(capacity // (4 * len(nodes)), 1)):
                    self._start(address, partitions, count)

    def _capacity(self) -> int:
        """How many records to have at a time."""
        options = self.options
        if options.prefetch is not None:
            return options.concurrency + options.prefetch
        ahead = int(options.concurrency * AHEAD_S / max(self._handler_s, 1e-6))
        return options.concurrency + max(options.concurrency, min(ahead, AHEAD_MAX))

    def _held(self) -> int:
        """The records that count, without those that only wait for the answer of a node."""
        return len(self._jobs) - min(self._settling, UNSETTLED_MAX)

    def _start(self, address: Address, partitions: Partitions, count: int) -> None:
        work = self._take(address, partitions, count)
        self._asked[address] = (self._tasks.spawn(work), partitions, count)

    def _room(self) -> int:
        asked = [count for address, (_, _, count) in self._asked.items() if address in self._hot]
        return self._capacity() - self._held() - sum(asked)

    async def _take(self, address: Address, partitions: Partitions, records_max: int) -> None:
        lease_s = self.options.lease_s
        # The lease counts from the request, so most of it must be left after the wait.
        wait_ms = int(min(WAIT_S_MAX, lease_s / 4) * 1000)
        began = self._loop.time()
        try:
            found = await self._leasing.take(
                address, partitions, records_max, wait_ms, int(lease_s * 1000)
            )
            self._hot.pop(address, None)
            if found:
                self._hot[address] = None
            self._add(found, began + lease_s)
        except RaftqError as error:
            logger.warning("a lease failed: %s", error)
        finally:
            del self._asked[address]
            self._wake()

    def _add(self, records: list[LeasedRecord], lease_end: float) -> None:
        if not records:
            return
        jobs = [Job(record, lease_end) for record in records]
        self._jobs.update(dict.fromkeys(jobs))
        self._queued.extend(jobs)
        if self._loop.time() >= lease_end:
            self._ring()  # the answer took too long
        elif self._alarm is None or lease_end < self._alarm.when():
            self._set_alarm(lease_end)
        self._begin()

    # Working.

    def _begin(self) -> None:
        if self._threads is not None:
            while self._queued and not self._stopping:
                self._threads.give(self._queued.popleft())
            return
        while self._queued and self._running < self.options.concurrency and not self._stopping:
            job = self._queued.popleft()
            self._running += 1
            job.task = self._tasks.spawn(self._work(job))

    async def _work(self, job: Job) -> None:
        job.is_begun = True
        error: BaseException | None = None
        began = self._loop.time()
        try:
            if not job.record.lost:
                await self.options.handler(job.record)
        except (asyncio.CancelledError, Exception) as raised:
            error = raised
        finally:
            self._running -= 1
            job.task = None
        self._done_with(job, error, self._loop.time() - began)
        self._begin()

    def _begin_in_thread(self, job: Job) -> Callable[[], Any] | None:
        """Runs in a thread."""
        job.is_begun = True
        return None if job.record.lost else partial(self.options.handler, job.record)

    def _ended_in_threads(self, calls: list[Ended[Job]]) -> None:
        for call in calls:
            if call.item not in self._jobs:
                continue  # its lease was lost before it began
            if inspect.isawaitable(call.result):
                call.item.task = self._tasks.spawn(self._await(call.item, call.result))
            else:
                self._done_with(call.item, call.error, call.seconds)
        self._wake()

    async def _await(self, job: Job, result: Awaitable[Any]) -> None:
        """Awaits the result of a function that is not a coroutine function but returned an
        awaitable."""
        error: BaseException | None = None
        began = self._loop.time()
        try:
            await result
        except (asyncio.CancelledError, Exception) as raised:
            error = raised
        finally:
            job.task = None
        self._done_with(job, error, self._loop.time() - began)

    def _done_with(self, job: Job, error: BaseException | None, seconds: float) -> None:
        """A handler has ended."""
        self._handler_s += (seconds - self._handler_s) / 16
        if job.record.lost:
            self._forget(job)
            return
        job.is_settling = True
        self._settling += 1
        if error is None:
            self._gather(job)
        else:
            self._tasks.spawn(self._settle([job], settlement_of(job.record, error)))

    def _gather(self, job: Job) -> None:
        """Gathers acks, since a request costs more than a record, but not for so long that
        others wait for the room."""
        self._done.append(job)
        if 4 * len(self._done) >= self._capacity() or self._stopping:
            self._ack_done()
        elif self._gathering is None:
            self._gathering = self._loop.call_later(GATHER_S, self._ack_done)

    def _ack_done(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        by_place: dict[tuple[str, int], list[Job]] = {}
        for job in self._done:
            by_place.setdefault((job.record.topic, job.record.partition), []).append(job)
        self._done.clear()
        for some in by_place.values():
            self._tasks.spawn(self._settle(some, Settlement("ack")))

    async def _settle(self, jobs: list[Job], settlement: Settlement) -> None:
        """Settles records of one partition alike."""
        receipts = [receipt_of(job.record) for job in jobs]
        try:
            bad = _by_record(await self._settler.settle(receipts, settlement))
            for job, receipt in zip(jobs, receipts, strict=True):
                error = bad.get((receipt.nonce, receipt.offset))
                if error is None:
                    self.counts[_PAST[settlement.verb]] += 1
                else:
                    name = "lost" if isinstance(error, LeaseLost) else "unsettled"
                    self.counts[name] += 1
                    logger.warning("%s of %r failed: %s", settlement.verb, job.record, error)
        finally:
            for job in jobs:
                self._forget(job)

    def _forget(self, job: Job) -> None:
        if job in self._jobs:
            del self._jobs[job]
            self._settling -= job.is_settling
        self._wake()

    # Renewing.

    def _set_alarm(self, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        """Leases end, unless they were renewed since the timer was set."""
        now = self._loop.time() + TICK_S
        held = [job for job in self._jobs if not job.is_settling and not job.record.lost]
        for job in held:
            if now >= job.lease_end:
                self._lose(job)
        ends = [job.lease_end for job in held if not job.record.lost]
        if ends:
            self._set_alarm(min(ends))
        elif self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def _renew(self) -> None:
        """Renews leases of which less than two thirds are left."""
        lease_s = self.options.lease_s
        step_s = lease_s / 6
        while True:
            await sleep(step_s)
            now = self._loop.time()
            held = [job for job in self._jobs if not job.is_settling and not job.record.lost]
            due = [job for job in held if job.lease_end - now < 4.5 * step_s]
            if due:
                # Not waited for: a partition without an answer must not cost the leases of others.
                self._tasks.spawn(self._extend(due))

    async def _extend(self, jobs: list[Job]) -> None:
        lease_s = self.options.lease_s
        lease_ms = int(lease_s * 1000)
        began = self._loop.time()
        by_place: dict[tuple[str, int], list[Job]] = {}
        for job in jobs:
            by_place.setdefault((job.record.topic, job.record.partition), []).append(job)

        async def extend(some: list[Job]) -> None:
            receipts = [receipt_of(job.record) for job in some]
            bad = _by_record(await self._settler.settle(receipts, Settlement("extend", lease_ms)))
            for job, receipt in zip(some, receipts, strict=True):
                error = bad.get((receipt.nonce, receipt.offset))
                if error is None:
                    job.lease_end = max(job.lease_end, began + lease_s)
                    job.record.deadline = self.options.wall_ms() + lease_ms
                elif isinstance(error, LeaseLost) and not job.is_settling:
                    self._lose(job)

        await asyncio.gather(*[extend(some) for some in by_place.values()])

    def _lose(self, job: Job) -> None:
        """Another client may have the record by now."""
        if job.record.lost or job not in self._jobs:
            return
        job.record.lost = True
        self.counts["lost"] += 1
        logger.warning("the lease of %r is lost", job.record)
        if job.task is not None:
            if job.is_begun:
                job.task.cancel()  # a job that has not begun will see it
        elif not job.is_begun:
            if job in self._queued:
                self._queued.remove(job)
            self._forget(job)

    # The end.

    async def _shut_down(self, grace_s: float) -> None:
        """Releases records that no handler has begun with, and lets the others finish in time."""
        self._stopping = True
        for address, (_, partitions, _) in self._asked.items():
            self._leasing.call_off(address, partitions)
        asked = [task for task, _, _ in self._asked.values()]
        if asked:
            await asyncio.wait(asked, timeout=CLOSE_S)
        await self._release_queued()
        await self._until_idle(grace_s)
        for job in self._jobs:
            if job.task is not None:
                job.task.cancel()
            elif self._is_beyond(job):
                job.record.lost = True  # nothing waits for it any more
        await self._until_idle(CLOSE_S, is_forced=True)
        await self._depart()

    async def _release_queued(self) -> None:
        waiting = list(self._queued)
        self._queued.clear()
        if self._threads is not None:
            waiting += self._threads.take_back()
        if waiting:
            receipts = [receipt_of(job.record) for job in waiting]
            failed = await self._settler.settle(receipts, Settlement("release"))
            self.counts["released"] += len(waiting) - len(failed)
        for job in waiting:
            self._forget(job)

    async def _until_idle(self, seconds: float, is_forced: bool = False) -> None:
        end = self._loop.time() + seconds
        while (left_s := end - self._loop.time()) > 0:
            jobs = [job for job in self._jobs if not (is_forced and self._is_beyond(job))]
            if not jobs:
                return
            try:
                async with asyncio.timeout(left_s):
                    await self._something()
            except TimeoutError:
                return

    def _is_beyond(self, job: Job) -> bool:
        """Whether it is a function in a thread, which cannot be ended."""
        return not self._is_async and job.is_begun and not job.is_settling and job.task is None


_PAST = {"ack": "acked", "nack": "nacked", "reject": "rejected", "release": "released"}


def _by_record(failed: list[SettleFailure]) -> dict[tuple[int, int], RaftqError]:
    """The errors, by the nonce and offset of each record of one partition."""
    return {
        (failure.row[0], offset): failure.error
        for failure in failed
        for offset in range(failure.row[1], failure.row[2])
    }


def is_coroutine_function(handler: Any) -> bool:
    call = getattr(handler, "__call__", None)  # noqa: B004 - of objects that can be called
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call)
