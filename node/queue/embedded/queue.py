"""Shell: the embedded queue that applications use: `from raftq import Queue`."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from raftq.client.common.errors import InvalidArgument
from raftq.client.wire.record import Headers
from raftq.node.queue.embedded.check import check_count, check_seconds, check_text
from raftq.node.queue.embedded.consume import message_list
from raftq.node.queue.embedded.engine import DEFAULT_GROUP
from raftq.node.queue.embedded.message import Message
from raftq.node.queue.embedded.options import EmbeddedOptions
from raftq.node.queue.embedded.publish import (
    DEDUP_ID_CHARS_MAX,
    Draft,
    check_list,
    check_values,
    due_ms,
    expiry_ms,
    lane_of,
)
from raftq.node.queue.embedded.steering import SteeredQueue
from raftq.node.queue.embedded.transaction import Transaction

LEASE_RECORDS_MAX = 100_000


class Queue(SteeredQueue):
    """A durable queue in a directory, for all threads of one process.

    `with Queue.open("./orders") as q: ...` is the usual way to have one.
    """

    @classmethod
    def open(  # noqa: PLR0913 - the settings of a queue, each explained in QueueOptions
        cls,
        path: str | Path,
        *,
        fsync: str = "interval",
        fsync_interval: float = 1.0,
        visibility_timeout: float = 30.0,
        max_deliveries: int = 3,
        backoff: float = 1.0,
        backoff_max: float = 60.0,
        backoff_jitter: float = 0.0,
        in_flight_max: int = 100_000,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        value_bytes_max: int = 1024 * 1024,
        retention: float | None = 168 * 3600.0,
        retention_bytes: int | None = None,
        dead_letter_retention: float | None = 336 * 3600.0,
        dead_letter_expired: bool = False,
        dedup_window: float = 300.0,
        compression: str = "none",
        segment_bytes: int = 64 * 1024 * 1024,
        reserve_bytes: int = 1024 * 1024,
        page_cache_bytes: int | None = 256 * 1024 * 1024,
    ) -> "Queue":
        """Open the queue in a directory, which is created when it does not exist."""
        options = EmbeddedOptions(
            fsync=fsync,
            fsync_interval=fsync_interval,
            visibility_timeout=visibility_timeout,
            max_deliveries=max_deliveries,
            backoff=backoff,
            backoff_max=backoff_max,
            backoff_jitter=backoff_jitter,
            in_flight_max=in_flight_max,
            max_messages=max_messages,
            max_bytes=max_bytes,
            value_bytes_max=value_bytes_max,
            retention=retention,
            retention_bytes=retention_bytes,
            dead_letter_retention=dead_letter_retention,
            dead_letter_expired=dead_letter_expired,
            dedup_window=dedup_window,
            compression=compression,
            segment_bytes=segment_bytes,
            reserve_bytes=reserve_bytes,
            page_cache_bytes=page_cache_bytes,
        )
        return cls(path, options)

    # Publishing

    def enqueue(  # noqa: PLR0913 - what can be said about a message
        self,
        value: bytes,
        *,
        key: bytes | None = None,
        priority: str | int = "normal",
        delay: float | None = None,
        deliver_at: float | None = None,
        ttl: float | None = None,
        headers: Headers | None = None,
        dedup_id: str | None = None,
    ) -> str:
        """Add one message; returns its id. It is safe against the death of this process.

        `delay` (seconds) or `deliver_at` (seconds since 1970) hide it until then, `ttl` (seconds,
        from when it is due) ends it, and a `dedup_id` seen in the dedup window adds nothing and
        returns the first message's id.
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
        due = due_ms(delay, deliver_at, now)
        draft = Draft(
            [value],
            None if key is None else [key],
            [headers] if headers else None,
            lane_of(priority),
            due,
            expiry_ms(ttl, due, now),
            dedup_id,
        )
        return self._publish(draft, now)[0]

    def enqueue_batch(  # noqa: PLR0913 - what can be said about messages
        self,
        values: Sequence[bytes],
        *,
        keys: Sequence[bytes | None] | None = None,
        priority: str | int = "normal",
        delay: float | None = None,
        deliver_at: float | None = None,
        ttl: float | None = None,
        headers: Sequence[Headers | None] | None = None,
    ) -> list[str]:
        """Add many messages at once, far faster than one by one; returns their ids in order."""
        values = check_list(values)
        check_values(values, keys, headers, self.options.value_bytes_max)
        now = self._clock()
        due = due_ms(delay, deliver_at, now)
        draft = Draft(values, keys, headers, lane_of(priority), due, expiry_ms(ttl, due, now))
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
            appends, ids = self._encode_transaction(tx, int(now * 1000))
            if appends:
                targets = self._engine.commit(appends, deliveries)
            else:
                targets = [self._engine.write(deliveries)]
            self._engine.published += len(ids)
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
        """The next message, or None when none came within `timeout` seconds (None: wait on)."""
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
        """Every message of the queue, with progress of the group's own.

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
            # What makes the messages may use the queue, so not under its lock.
            messages = message_list(messages)
        with self._lock:
            self._check_open()
            targets = self._consumer.ack(messages, self._clock())
            if self._waiters or self._listeners:
                self._wake_all()
        self._wait_durable(targets)

    def nack(self, message: Message, delay: float | None = None) -> None:
        """It failed: deliver it again after `delay` seconds (None: the growing backoff)."""
        if delay is not None:
            check_seconds(delay, "delay")
        self._settle_one(lambda now: self._consumer.nack(message, delay, now))

    def postpone(self, message: Message, delay: float) -> None:
        """Deliver it again after `delay` seconds without spending an attempt."""
        check_seconds(delay, "delay")
        self._settle_one(lambda now: self._consumer.postpone(message, delay, now))

    def reject(self, message: Message, reason: str, error: str = "") -> None:
        """It can never succeed: make it a dead letter now."""
        if not isinstance(reason, str) or not isinstance(error, str):
            raise InvalidArgument("the reason and the error of a reject are text")
        self._settle_one(lambda now: self._consumer.reject(message, reason, error, now))

    def extend(self, message: Message, extension: float) -> None:
        """Keep it hidden until `extension` seconds from now."""
        check_seconds(extension, "extension")
        self._settle_one(lambda now: self._consumer.extend(message, extension, now))
