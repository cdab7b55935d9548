"""The event loop's copy of the metadata, and those who wait for its changes. (Shell.)

Both a voter and an observer hold it: the state, the index up to which it is complete, the last few
thousand commands for watchers that are a little behind, and the subscribers.

Commands are applied as soon as they arrive. The subscribers are called a moment later, once for
everything that came together. They are called before anyone who waits for an index or for the
answer to a proposal goes on, because their call is scheduled first. Invariant: `index` never goes
back.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from raftq.cluster.metadata.apply import Change, apply, differences, dump, load
from raftq.cluster.metadata.commands import decode_command
from raftq.cluster.metadata.log import ControllerSubscriber, Subscriber, Watched
from raftq.cluster.metadata.state import ClusterState

logger = logging.getLogger(__name__)

KEPT_MAX = 4096
KEPT_BYTES_MAX = 8 * 1024 * 1024
WATCHED_BYTES_MAX = 1024 * 1024
"""The bytes of commands in one answer to a watcher; a single larger one goes alone."""


class MetadataCopy:
    """A copy of the metadata. Made on the event loop that it belongs to."""

    def __init__(self, cluster_id: str) -> None:
        self.state = ClusterState(cluster_id)
        self.index = 0
        self.controller: int | None = None
        self.term = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._forgotten = 0
        """Every command above this index is in `_kept`."""
        self._changes: list[Change] = []
        self._flushing = False
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._subscribers: list[Subscriber] = []
        self._controller_subscribers: list[ControllerSubscriber] = []

    # Input.

    def subscribe(self, callback: Subscriber) -> None:
        self._subscribers.append(callback)

    def on_controller(self, callback: ControllerSubscriber) -> None:
        self._controller_subscribers.append(callback)

    def applied(self, index: int, command: bytes | None) -> None:
        """Apply this command (None: it left no trace). Everything up to `index` is here then."""
        assert index > self.index, f"command {index} after {self.index}"
        if command is not None:
            # It was applied before it was handed over, so a refusal means that the copies differ.
            _, changes = apply(self.state, decode_command(command), index)
            self._changes += changes
            self._keep(index, command)
        self.index = index
        self._schedule()

    def reached(self, index: int) -> None:
        """Move on to `index`: only commands that left no trace lie in between."""
        if index > self.index:
            self.applied(index, None)

    def restored(self, index: int, dumped: bytes) -> None:
        assert index >= self.index, f"a dump of {index} after {self.index}"
        before, self.state = self.state, load(dumped)
        self._changes += differences(before, self.state)
        self._kept.clear()
        self._kept_bytes = 0
        self._forgotten = self.index = index
        self._schedule()

    def set_controller(self, controller: int | None, term: int) -> None:
        if (controller, term) != (self.controller, self.term):
            logger.info("metadata controller=%s term=%d", controller, term)
            self.controller, self.term = controller, term
            for callback in self._controller_subscribers:
                _guarded(callback, controller, term)
            self._wake()

    def _keep(self, index: int, command: bytes) -> None:
        self._kept.append((index, command))
        self._kept_bytes += len(command)
        while len(self._kept) > KEPT_MAX or self._kept_bytes > KEPT_BYTES_MAX:
            self._forgotten, old = self._kept.popleft()
            self._kept_bytes -= len(old)

    def _schedule(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        changes, self._changes = list(dict.fromkeys(self._changes)), []
        if changes:
            for callback in self._subscribers:
                _guarded(callback, changes)
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # Waiting.

    async def moved(self) -> None:
        """Return when the index or the controller has changed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    async def has_reached(self, index: int) -> None:
        """Return when everything up to `index` is here and its subscribers were called."""
        while self.index < index or self._flushing:
            await self.moved()

    async def watch(self, index: int | None, wait_s: float) -> Watched:
        """As `MetadataLog.watch`. It also answers when the controller changes."""
        if index is not None and index >= self.index:
            if wait_s <= 0:
                return Watched(index)
            try:
                async with asyncio.timeout(wait_s):
                    await self.moved()
            except TimeoutError:
                return Watched(index)
        if index is None or index < self._forgotten:
            return Watched(self.index, dump=dump(self.state))
        return self._since(index)

    def _since(self, index: int) -> Watched:
        found: list[tuple[int, bytes]] = []
        size = 0
        for entry in reversed(self._kept):
            if entry[0] <= index:
                break
            found.append(entry)
        for count, (_, command) in enumerate(reversed(found)):
            size += len(command)
            if size > WATCHED_BYTES_MAX and count:
                part = tuple(found[: -count - 1 : -1])
                return Watched(part[-1][0], part)
        return Watched(max(index, self.index), tuple(found[::-1]))


class CopiedMetadata:
    """The part of a MetadataLog that a voter and an observer have in common: it reads the copy."""

    def __init__(self, cluster_id: str, voters: Iterable[int]) -> None:
        self._copy = MetadataCopy(cluster_id)
        self._voters = tuple(sorted(voters))
        self.subscribe = self._copy.subscribe
        self.on_controller = self._copy.on_controller
        self.watch = self._copy.watch

    @property
    def state(self) -> ClusterState:
        return self._copy.state

    @property
    def index(self) -> int:
        return self._copy.index

    @property
    def controller(self) -> int | None:
        return self._copy.controller

    @property
    def term(self) -> int:
        return self._copy.term

    @property
    def voters(self) -> tuple[int, ...]:
        return self._voters


def _guarded(callback: Callable[..., None], *args: object) -> None:
    """Log the error of a subscriber: the copy and the other subscribers must not suffer for it."""
    try:
        callback(*args)
    except Exception:
        logger.exception("metadata subscriber=%r failed", callback)
