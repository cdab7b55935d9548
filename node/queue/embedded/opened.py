"""Shell: an open queue directory with its lock, its parts and its threads.

One lock guards the engine; nothing waits for a disk while it holds it. A consumer that waits is
woken by an enqueue, by the keeper (a retry, a delay, a lease that ended), or by close.
"""

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from raftq.client.common.disk import Disk, RealDisk
from raftq.client.common.errors import (
    InvalidArgument,
    LeaseLost,
    QueueClosed,
    RaftqError,
    StorageError,
    StorageFailed,
    TooLarge,
)
from raftq.client.common.names import LANE_NAMES
from raftq.node.queue.embedded.check import check_path
from raftq.node.queue.embedded.consume import GroupConsumer
from raftq.node.queue.embedded.dead import EmbeddedDeadLetters
from raftq.node.queue.embedded.engine import QueueEngine, Target
from raftq.node.queue.embedded.files import open_files
from raftq.node.queue.embedded.keeper import Keeper
from raftq.node.queue.embedded.message import Message
from raftq.node.queue.embedded.options import EmbeddedOptions
from raftq.node.queue.embedded.publish import Draft, Publisher, Single, ids_of, lane_of
from raftq.node.queue.embedded.transaction import Transaction, merge_drafts
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.turns import Turns

logger = logging.getLogger("raftq.queue")


class OpenQueue:
    """What all verbs of a queue stand on."""

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
                # Both only save work for the next open, which finds out for itself.
                logger.warning("queue=%s event=unclean_close error=%s", self.path, error)
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"queue {self.path!r} is closed")
        if self._keeper.failure is not None:
            raise StorageFailed(f"queue {self.path!r} must be reopened: {self._keeper.failure!r}")

    def _wake_all(self) -> None:
        """Tell whoever waits for messages. Lock held."""
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
        if type(value) is not bytes:
            raise InvalidArgument(f"a value is bytes, not {type(value).__name__}")
        if len(value) > self.options.value_bytes_max:
            raise TooLarge(
                f"a value of {len(value)} bytes is over the limit of {self.options.value_bytes_max}"
            )
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
        assert message.offset >= 0, "whoever appended for this thread was interrupted"
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

    def _encode_transaction(
        self, tx: Transaction, now_ms: int
    ) -> tuple[list[tuple[str, bytearray]], list[str]]:
        """Batches for the logs, and the ids their messages will have. Lock held."""
        appends: list[tuple[str, bytearray]] = []
        ids: list[str] = []
        ends = {name: log.end_offset for name, log in self._files.logs.items()}
        for draft in merge_drafts(tx.drafts):
            delayed = draft.deliver_at_ms > now_ms
            name = "delays" if delayed else "data"
            appends += [(name, batch) for batch in self._publisher.encode(draft, now_ms)]
            ids += ids_of(ends[name], len(draft.values), delayed)
            ends[name] += len(draft.values)
            if delayed:
                self._keeper.plan(draft.deliver_at_ms / 1000)
        return appends, ids

    def _lease(self, group: str, count: int, visibility_timeout: float | None) -> list[Message]:
        """Lock held."""
        self._check_open()
        now = self._clock()
        due = self._engine.delays.next_due_ms()
        if due is not None and due <= now * 1000:
            self._keeper.tick(now)
        found = self._consumer.lease(group, count, now, visibility_timeout)
        if found:
            self._keeper.plan(now + (visibility_timeout or self.options.visibility_timeout))
        return found

    @contextmanager
    def listen(self, loop: asyncio.AbstractEventLoop) -> Iterator[asyncio.Event]:
        """An event of that loop which is set whenever consumers may find something new."""
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
            self._quietly(
                lambda: self._settle_one(lambda now: self._consumer.postpone(message, 0.0, now))
            )

    def finish(self, message: Message) -> None:
        """Ack for a subscriber, who may have settled the message itself."""
        self._quietly(lambda: self._settle_one(lambda now: self._consumer.ack((message,), now)))

    def _quietly(self, settle: Callable[[], None]) -> None:
        """Settle for a subscriber, who may have done so itself or lost the lease."""
        try:
            settle()
        except LeaseLost as error:
            logger.debug("queue=%s event=not_settled error=%s", self.path, error)


def _announce(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    # A loop that was closed with a consumer still waiting has nobody left to tell.
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
