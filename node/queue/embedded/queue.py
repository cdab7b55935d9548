"""Shell: the embedded queue that applications use: `from raftq import Queue`.

One lock guards the engine; no thread waits for a disk while it holds the lock. A consumer that
waits is woken by an enqueue, by the keeper (a retry, a delay, a lease that ended), or by close.
"""

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Self, Unpack

from raftq.client.common.disk import Disk, RealDisk
from raftq.client.common.errors import (
    InvalidArgument,
    LeaseLost,
    QueueClosed,
    RaftqError,
    StorageError,
    StorageFailed,
)
from raftq.client.common.names import LANE_NAMES
from raftq.client.wire.record import Headers
from raftq.node.queue.embedded.browse import PEEK_MAX, browse, peek
from raftq.node.queue.embedded.check import (
    check_count,
    check_limit,
    check_number,
    check_offset,
    check_path,
    check_seconds,
    check_text,
)
from raftq.node.queue.embedded.consume import GroupConsumer, message_list
from raftq.node.queue.embedded.dead import EmbeddedDeadLetters
from raftq.node.queue.embedded.engine import DEFAULT_GROUP, QueueEngine, Target
from raftq.node.queue.embedded.files import open_files
from raftq.node.queue.embedded.keeper import Keeper
from raftq.node.queue.embedded.ledger import CheckpointMade
from raftq.node.queue.embedded.message import (
    DELAYED_ID_PREFIX,
    DeadMessage,
    DelayedMessage,
    Message,
    QueueStats,
)
from raftq.node.queue.embedded.options import EmbeddedOptions, OpenSettings
from raftq.node.queue.embedded.publish import (
    DEDUP_ID_CHARS_MAX,
    Draft,
    Publisher,
    Single,
    check_list,
    check_values,
    lane_of,
    message_times,
)
from raftq.node.queue.embedded.stats import take_stats
from raftq.node.queue.embedded.transaction import Transaction
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.turns import Turns

logger = logging.getLogger("raftq.queue")

LEASE_RECORDS_MAX = 100_000


class Queue:
    """A durable queue in a directory, for all threads of one process.

    `with Queue.open("./orders") as q: ...` is the usual way to have one.
    """

    @classmethod
    def open(cls, path: str | Path, **settings: Unpack[OpenSettings]) -> "Queue":
        """Open the queue in a directory, which is created when it does not exist.

        The settings are the fields of EmbeddedOptions.
        """
        return cls(path, EmbeddedOptions(**settings))

    def __init__(  # noqa: PLR0913 - the world, replaceable for tests
        self,
        path: str | Path,
        options: EmbeddedOptions,
        *,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,  # noqa: TID251 - the shell's one clock
        keeper: bool = True,
        flusher: Flusher | None = None,
        rng: random.Random | None = None,
    ) -> None:
        # A queue stays where it is when the process changes its directory.
        self.path = os.path.abspath(check_path(path))
        self.options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0
        self._listeners: dict[object, Callable[[], None]] = {}
        self._closed = False
        self._lanes: dict[str | int, int] = {name: lane for lane, name in enumerate(LANE_NAMES)}
        self._always = options.fsync == "always"
        self._together = Turns(self._append_together)
        now = clock()
        name = Path(self.path).resolve().name
        self._files = open_files(disk or RealDisk(), self.path, options, int(now * 1000), flusher)
        try:
            # Seeded by the system: receipts must not repeat those of an earlier process.
            self._engine = QueueEngine(self._files, options, name, rng or random.Random(), now)
            self._consumer = GroupConsumer(self._engine)
            self._publisher = Publisher(self._engine)
            self._dead = EmbeddedDeadLetters(self._engine)
            for group in list(self._engine.state.groups.values()):
                self._consumer.abandon(group, now)
        except BaseException:
            self._files.close()
            raise
        self._keeper = Keeper(
            self._engine, self._consumer, self._dead, self._lock, self._wake_all, clock
        )
        if keeper:
            self._keeper.start()

    def close(self) -> None:
        """Give back what is in flight, sync, and release the directory. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._wake_all()
        self._keeper.stop()
        with self._lock:
            try:
                self._consumer.release_all(self._clock())
                self._engine.delays.upkeep(force=True)
            except StorageError as error:
                # Both only save work for the next open.
                logger.warning("queue=%s event=unclean_close error=%s", self.path, error)
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Publishing

    def enqueue(  # noqa: PLR0913 - what can be said about a message
        self,
        value: bytes,
        *,
        key: bytes | None = None,
        priority: str | int = "normal",
        delay: float | None = None,
        deliver_at: float | datetime | None = None,
        ttl: float | None = None,
        headers: Headers | None = None,
        dedup_id: str | None = None,
    ) -> str:
        """Add one message; returns its id. It is safe against the death of this process.

        `delay` (seconds) or `deliver_at` (a datetime, or seconds since 1970) hide it until then.
        `ttl` (seconds, from when it is due) ends it. A `dedup_id` that was used within the dedup
        window adds nothing; the id of the first message is returned.
        """
        if (
            key is None and delay is None and deliver_at is None and ttl is None
            and headers is None and dedup_id is None
        ):  # fmt: skip
            return self._enqueue_plain(value, priority)
        if dedup_id is not None:
            check_text(dedup_id, "a dedup_id", DEDUP_ID_CHARS_MAX)
        check_values([value], [key], [headers], self.options.value_bytes_max)
        now = self._clock()
        draft = Draft(
            [value],
            None if key is None else [key],
            [headers] if headers else None,
            lane_of(priority),
            *message_times(delay, deliver_at, ttl, now),
            dedup_id=dedup_id,
        )
        return self._publish(draft, now)[0]

    def enqueue_batch(  # noqa: PLR0913 - what can be said about messages
        self,
        values: Sequence[bytes],
        *,
        keys: Sequence[bytes | None] | None = None,
        priority: str | int = "normal",
        delay: float | None = None,
        deliver_at: float | datetime | None = None,
        ttl: float | None = None,
        headers: Sequence[Headers | None] | None = None,
    ) -> list[str]:
        """Add many messages at once, far faster than one by one; returns their ids in order."""
        values = check_list(values)
        check_values(values, keys, headers, self.options.value_bytes_max)
        now = self._clock()
        times = message_times(delay, deliver_at, ttl, now)
        draft = Draft(values, keys, headers, lane_of(priority), *times)
        return self._publish(draft, now)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Enqueue and ack together: all or nothing, also across a crash.

        An exception in the block leaves everything as it was.
        """
        with self._lock:
            self._check_open()
        tx = Transaction(self.options, self._clock())
        try:
            yield tx
        finally:
            tx.end()
        if not tx.drafts and not tx.acked:
            return
        with self._lock:
            self._check_open()
            now = self._clock()
            deliveries = self._consumer.ack_entries(tx.acked, now)
            self._consumer.keep_settled(tx.acked)
            if tx.drafts:
                # What is acked makes room for what is enqueued.
                self._publisher.check_room(len(tx.drafts) - len(tx.acked), tx.size_bytes)
            appends, ids = self._publisher.encode_all(tx.drafts, int(now * 1000))
            if appends:
                targets = self._engine.commit(appends, deliveries)
            else:
                targets = [self._engine.write(deliveries)]
            self._engine.published += len(ids)
            for draft in tx.drafts:
                if draft.deliver_at_ms:
                    self._keeper.plan(draft.deliver_at_ms / 1000)
            self._wake_all()
        tx.ids = ids
        self._wait_durable(targets)

    # Consuming

    def dequeue(
        self,
        timeout: float | None = 0.0,
        *,
        group: str = DEFAULT_GROUP,
        visibility_timeout: float | None = None,
    ) -> Message | None:
        """The next message, or None if none came within `timeout` seconds (None: no limit)."""
        found = self.dequeue_batch(1, timeout, group=group, visibility_timeout=visibility_timeout)
        return found[0] if found else None

    def dequeue_batch(
        self,
        max_messages: int,
        timeout: float | None = 0.0,
        *,
        group: str = DEFAULT_GROUP,
        visibility_timeout: float | None = None,
    ) -> list[Message]:
        """Up to `max_messages` messages; [] when none came in time.

        Each is hidden from others of its group until it is settled or its visibility ends.
        """
        if type(max_messages) is not int or not 0 < max_messages <= LEASE_RECORDS_MAX:
            check_count(max_messages, "max_messages", LEASE_RECORDS_MAX)
        give_up = None if timeout is None else check_seconds(timeout, "timeout")
        if visibility_timeout is not None:
            check_seconds(visibility_timeout, "visibility_timeout", least=0.001)
        until = None
        with self._changed:
            while True:
                found = self._lease(group, max_messages, visibility_timeout)
                if self._consumer.unfinished:
                    self._changed.wait(0.0)  # let others have the lock, then look on
                    continue
                if found or give_up == 0.0:
                    return found
                moment = time.monotonic()  # noqa: TID251 - waiting for real threads
                if until is None and give_up is not None:
                    until = moment + give_up
                left = float("inf") if until is None else until - moment
                if left <= 0:
                    return []
                due_in = self._keeper.next_deadline() - self._clock()
                self._waiters += 1
                self._changed.wait(max(0.0, min(left, due_in, 3600.0)))
                self._waiters -= 1

    def subscribe(
        self,
        group: str,
        *,
        timeout: float | None = None,
        auto_ack: bool = True,
        visibility_timeout: float | None = None,
    ) -> Iterator[Message]:
        """Iterate over all messages of the queue, with the progress of this group.

        A message is acked when the loop asks for the next one; leaving the loop by an exception or
        `break` gives it back. The loop ends when none came for `timeout` seconds.
        """
        while True:
            message = self.dequeue(timeout, group=group, visibility_timeout=visibility_timeout)
            if message is None:
                return
            done = False
            try:
                yield message
                done = True
            finally:
                if auto_ack and not done:
                    self.give_back(message)
            if auto_ack:
                self.finish(message)

    def ack(self, message: Message) -> None:
        """The work is done: never deliver this message to its group again."""
        self.ack_batch((message,))

    def ack_batch(self, messages: Iterable[Message]) -> None:
        """Ack many at once; when one of them is no longer held, none is acked."""
        if not isinstance(messages, list | tuple):
            # An iterator may use the queue itself, so it runs without the lock.
            messages = message_list(messages)
        with self._lock:
            self._check_open()
            targets = self._consumer.ack(messages, self._clock())
            if self._waiters or self._listeners:
                self._wake_all()
        self._wait_durable(targets)

    def nack(self, message: Message, delay: float | None = None) -> None:
        """The work failed: deliver it again after `delay` seconds (None: the growing backoff)."""
        if delay is not None:
            check_seconds(delay, "delay")
        self._settle_one(lambda now: self._consumer.nack(message, delay, now))

    def postpone(self, message: Message, delay: float) -> None:
        """Deliver it again after `delay` seconds without spending an attempt."""
        check_seconds(delay, "delay")
        self._settle_one(lambda now: self._consumer.postpone(message, delay, now))

    def reject(self, message: Message, reason: str, error: str = "") -> None:
        """The work can never succeed: make the message a dead letter now."""
        if not isinstance(reason, str) or not isinstance(error, str):
            raise InvalidArgument("the reason and the error of a reject are text")
        self._settle_one(lambda now: self._consumer.reject(message, reason, error, now))

    def extend(self, message: Message, extension: float) -> None:
        """Keep it hidden until `extension` seconds from now."""
        check_seconds(extension, "extension")
        self._settle_one(lambda now: self._consumer.extend(message, extension, now))

    # Looking

    def peek(self, max_messages: int = 10, *, group: str = DEFAULT_GROUP) -> list[Message]:
        """What would come next, highest priority first, without taking it."""
        with self._opened() as engine:
            return peek(engine, engine.known_group(group), max_messages)

    def browse(
        self, offset: int, max_messages: int = 100, *, timeout: float | None = 0.0
    ) -> tuple[list[Message], int]:
        """Messages from an offset on, settled or not, and the offset to go on from.

        Waits up to `timeout` seconds (None: for ever) while the queue ends at that offset.
        Nothing is taken: these messages cannot be acked.
        """
        check_offset(offset)
        check_count(max_messages, "max_messages", PEEK_MAX)
        if timeout is not None:
            check_seconds(timeout, "timeout")
        with self._changed:
            self._check_open()
            if timeout != 0.0:
                self._waiters += 1
                try:
                    self._changed.wait_for(
                        lambda: self._closed or self._files.data.end_offset > offset, timeout
                    )
                finally:
                    self._waiters -= 1
                self._check_open()
            return browse(self._engine, offset, max_messages)

    def delayed(self, limit: int = 1000) -> list[DelayedMessage]:
        """Messages that are not yet due, the next one first."""
        check_limit(limit)
        with self._opened() as engine:
            return engine.delays.messages(limit)

    def dead_letters(
        self, *, reason: str | None = None, limit: int | None = None
    ) -> list[DeadMessage]:
        """Messages that were given up, oldest first."""
        check_limit(limit)
        with self._opened():
            return self._dead.browse(reason, limit)

    def checkpoints(self) -> dict[str, int]:
        with self._opened() as engine:
            return dict(engine.state.checkpoints)

    def groups(self) -> list[str]:
        with self._opened() as engine:
            return sorted(engine.state.groups)

    def stats(self) -> QueueStats:
        with self._opened() as engine:
            now = self._clock()
            found = take_stats(engine, self._dead)
            found.rates = self._keeper.rates(now)
            return found

    def verify(self) -> list[str]:
        """Read every byte again; returns one line for each damaged range."""
        problems = []
        if self._engine.ledger_damage:
            # Opening replaced the damaged part by a snapshot, so only this memory is left of it.
            problems.append(f"ledger: {self._engine.ledger_damage} damaged ranges found at open")
        for name in self._files.logs:
            with self._opened() as engine:
                problems += engine.verify(name)
        return problems

    # Changing

    def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message; False when it is due, delivered or cancelled already."""
        digits = str(message_id).removeprefix(DELAYED_ID_PREFIX)
        if not digits.isdecimal() or len(digits) > 19:
            raise InvalidArgument(f"{message_id!r} is not a message id")
        if not str(message_id).startswith(DELAYED_ID_PREFIX):
            return False
        with self._opened() as engine:
            self._keeper.tick(self._clock())
            cancelled = bool(engine.delays.cancel([int(digits)]))
            target = (self._files.delays, self._files.delays.end_offset)
        self._wait_durable([target] if cancelled else [])
        return cancelled

    def redrive(self, reason: str | None = None, limit: int | None = None) -> int:
        """Put dead letters back into the queue, each once; returns how many."""
        check_limit(limit)
        with self._opened():
            count = self._dead.redrive(reason, limit, int(self._clock() * 1000))
            self._wake_all()
            targets = [(log, log.end_offset) for log in (self._files.data, self._files.ledger)]
        self._wait_durable(targets)
        return count

    def purge_dead_letters(self) -> int:
        """Forget all dead letters; returns how many there were."""
        with self._opened():
            count = self._dead.purge()
            target = (self._files.ledger, self._files.ledger.end_offset)
        self._wait_durable([target])
        return count

    def checkpoint(self, name: str, *, group: str = DEFAULT_GROUP) -> int:
        """Remember, by name, the first message the group has not settled; returns its offset."""
        check_text(name, "a checkpoint name")
        with self._opened() as engine:
            offset = engine.known_group(group).settled.prefix
            target = engine.write_shell(CheckpointMade(name, offset))
        self._wait_durable([target])
        return offset

    def replay_from(
        self,
        *,
        offset: int | None = None,
        timestamp: float | None = None,
        checkpoint: str | None = None,
        group: str = DEFAULT_GROUP,
    ) -> int:
        """Deliver everything from an offset on again, settled or not; returns the offset.

        What was in flight is taken from its holders: their receipts no longer count.
        """
        if (offset, timestamp, checkpoint).count(None) != 2:
            raise InvalidArgument("give exactly one of offset, timestamp and checkpoint")
        if offset is not None:
            check_offset(offset)
        if timestamp is not None:
            check_number(timestamp, "timestamp")
        if checkpoint is not None:
            check_text(checkpoint, "a checkpoint name")
        with self._opened() as engine:
            start = engine.find_offset(offset, timestamp, checkpoint)
            core = engine.group(group)
            target = engine.write([core.reset(start)])
            engine.note_damage()
            self._wake_all()
        self._wait_durable([target])
        return start

    def purge(self) -> int:
        """Drop every message, also those in flight and delayed, for every group; returns how many.

        Dead letters stay; see purge_dead_letters.
        """
        with self._opened() as engine:
            count = self._publisher.unsettled()
            engine.delays.cancel_all()
            end = self._files.data.end_offset
            groups = engine.state.groups.values()
            target = engine.write([group.reset(end) for group in groups])
            delays = (self._files.delays, self._files.delays.end_offset)
        self._wait_durable([target, delays])
        return count

    def pause(self, *, group: str = DEFAULT_GROUP) -> None:
        """Deliver nothing more until resume; what is in flight can still be settled."""
        self._pause(group, True)

    def resume(self, *, group: str = DEFAULT_GROUP) -> None:
        self._pause(group, False)

    def delete_group(self, group: str) -> bool:
        """Forget a group and its progress; it no longer holds back the release of disk space."""
        check_text(group, "a group name")
        if group == DEFAULT_GROUP:
            raise InvalidArgument("the default group cannot be deleted")
        with self._opened() as engine:
            if group not in engine.state.groups:
                return False
            target = engine.delete_group(group)
        self._wait_durable([target])
        return True

    def compact(self) -> int:
        """Drop at once what every group has settled; returns the bytes freed."""
        with self._opened() as engine:
            before = self._files.size_bytes
            engine.drop_settled()
            engine.delays.upkeep(force=True)
            self._dead.upkeep(0, None)
        self._keeper.snapshot()
        with self._lock:
            return before - self._files.size_bytes

    def sync(self) -> None:
        """Everything accepted so far is on disk when this returns."""
        with self._opened():
            targets = [(log, log.end_offset) for log in self._files.logs.values()]
        self._files.flusher.wait(targets)

    def _pause(self, group: str, paused: bool) -> None:
        with self._opened() as engine:
            core = engine.known_group(group)
            target = engine.write([core.pause(paused)])
            self._wake_all()
        self._wait_durable([target])

    # For consumers in an event loop, and for subscribers

    @contextmanager
    def listen(self, loop: asyncio.AbstractEventLoop) -> Iterator[asyncio.Event]:
        """An event of that loop. It is set whenever consumers may find something new."""
        event = asyncio.Event()
        with self._lock:
            self._listeners[event] = lambda: _announce(loop, event)
        try:
            yield event
        finally:
            with self._lock:
                del self._listeners[event]

    def due_in(self) -> float:
        """Seconds until something becomes due by itself."""
        with self._lock:
            return self._keeper.next_deadline() - self._clock()

    def give_back(self, message: Message) -> None:
        """Return a message that a subscriber did not finish; it may have settled it itself."""
        if not self._closed:
            self._settle_quietly(lambda now: self._consumer.postpone(message, 0.0, now))

    def finish(self, message: Message) -> None:
        """Ack for a subscriber, who may have settled the message itself."""
        self._settle_quietly(lambda now: self._consumer.ack((message,), now))

    def _settle_quietly(self, change: Callable[[float], list[Target]]) -> None:
        try:
            self._settle_one(change)
        except LeaseLost as error:
            logger.debug("queue=%s event=not_settled error=%s", self.path, error)

    # Parts of the verbs

    @contextmanager
    def _opened(self) -> Iterator[QueueEngine]:
        """The engine of the open queue, with the lock held."""
        with self._lock:
            self._check_open()
            yield self._engine

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"queue {self.path!r} is closed")
        if self._keeper.failure is not None:
            raise StorageFailed(f"queue {self.path!r} must be reopened: {self._keeper.failure!r}")

    def _wake_all(self) -> None:
        """Wake all that wait for messages. Lock held."""
        if self._waiters:
            self._changed.notify_all()
        for listener in list(self._listeners.values()):
            listener()

    def _wait_durable(self, targets: Sequence[Target]) -> None:
        """Under `always`, answer only when it is on disk."""
        if self._always and targets:
            self._files.flusher.wait(list(targets))

    def _settle_one(self, change: Callable[[float], list[Target]]) -> None:
        with self._lock:
            self._check_open()
            targets = change(self._clock())
            if self._waiters or self._listeners:
                self._wake_all()
        self._wait_durable(targets)

    def _enqueue_plain(self, value: bytes, priority: str | int) -> str:
        """A message with nothing but a value: the path that is taken most."""
        lane = self._lanes.get(priority) if type(priority) is str else None
        if lane is None:
            lane = lane_of(priority)
        if type(value) is not bytes or len(value) > self.options.value_bytes_max:
            check_values([value], None, None, self.options.value_bytes_max)
        if self._always:
            return self._enqueue_together(Single(value, lane))
        with self._lock:
            if self._closed:
                self._check_open()
            offset = self._publisher.publish_one(value, lane, int(self._clock() * 1000))
            if self._waiters or self._listeners:
                self._wake_all()
        return str(offset)

    def _enqueue_together(self, message: Single) -> str:
        """Under `always`, threads that enqueue at the same time share one write and one fsync."""
        self._together.take(message)
        if message.error is not None:
            raise message.error
        assert message.offset >= 0, "the thread that appended for this one was interrupted"
        return str(message.offset)

    def _append_together(self, messages: list[Single]) -> None:
        try:
            with self._lock:
                self._check_open()
                self._publisher.publish_singles(messages, int(self._clock() * 1000))
                if self._waiters or self._listeners:
                    self._wake_all()
            if any(message.offset >= 0 for message in messages):
                # This group is a round of its own: no need to queue for one of the flusher's.
                self._files.data.sync()
        except RaftqError as error:
            for message in messages:
                message.error = message.error or error

    def _publish(self, draft: Draft, now: float) -> list[str]:
        with self._lock:
            self._check_open()
            ids, targets = self._publisher.publish(draft, int(now * 1000))
            if draft.deliver_at_ms:
                self._keeper.plan(draft.deliver_at_ms / 1000)
            if self._waiters or self._listeners:
                self._wake_all()
        self._wait_durable(targets)
        return ids

    def _lease(self, group: str, count: int, visibility_timeout: float | None) -> list[Message]:
        """Deliver what is there. Lock held."""
        self._check_open()
        now = self._clock()
        due = self._engine.delays.next_due_ms()
        if due is not None and due <= now * 1000:
            self._keeper.tick(now)
        found = self._consumer.lease(group, count, now, visibility_timeout)
        if found:
            self._keeper.plan(now + (visibility_timeout or self.options.visibility_timeout))
        return found


def _announce(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    # A consumer may still be registered when its loop is closed.
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
