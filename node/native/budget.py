"""Core: who may take memory for requests, over all connections of a listener.

Counted are the buffers of big frames while they arrive, and the bytes of requests in flight. Over
the limit, a connection that needs memory for a big frame waits its turn, first come first served;
small frames go on: they are few bytes, and often they free memory or keep a lease.

When frames that have only partly arrived hold all the memory, and no big request is in flight that
would give some back, the connection that waits longest may exceed the limit, alone, until its
frame is whole. So memory stays within the limit plus one frame, and a connection waits at most for
a slow sender, which the listener cuts.
"""

from typing import Generic, TypeVar

from raftq.client.wire.frames import OWN_BYTES_MIN, SCRATCH_BYTES

W = TypeVar("W")

SMALL_BYTES_MAX = OWN_BYTES_MIN
SPARE_BYTES = 16 * 1024  # what a connection may have in flight when memory is short


class MemoryBudget(Generic[W]):
    """Counts the bytes of all connections. A waiter stands for a connection."""

    __slots__ = ("_bytes_max", "_granted", "_pending", "_through", "_waiting", "used")

    def __init__(self, bytes_max: int) -> None:
        self.used = 0
        self._bytes_max = bytes_max
        self._pending = 0  # big requests in flight
        self._waiting: dict[W, int] = {}
        self._granted: dict[W, int] = {}
        self._through: W | None = None  # goes on over the limit

    @property
    def short(self) -> bool:
        """Whether a connection waits or would have to."""
        return bool(self._waiting) or self.used >= self._bytes_max

    @property
    def window(self) -> int:
        """Return how many bytes a connection should read at once."""
        return 0 if self.used >= self._bytes_max else SCRATCH_BYTES

    def waits(self, who: W) -> bool:
        return who in self._waiting

    def is_full(self, in_flight_bytes: int) -> bool:
        """Report whether a connection with that much in flight has to wait for its own answers."""
        return self.used >= self._bytes_max and in_flight_bytes >= SPARE_BYTES

    def ask(self, who: W, count: int) -> bool:
        """Take memory for a frame that arrives; if there is none, `who` waits in the queue."""
        granted = self._granted.pop(who, None)
        if granted is not None:
            self.used += count - granted
            return True
        if self._through is not who and (self._waiting or not self._fits(count)):
            if self._waiting or not self._may_overdraw():
                self._waiting.setdefault(who, count)
                return False
            self._through = who
        self.used += count
        return True

    def whole(self, who: W, count: int) -> None:
        """Note that a frame has arrived: `start` counts its `count` bytes from here on."""
        self.used -= count
        if self._through is who:
            self._through = None

    def start(self, count: int) -> None:
        """Note a request in flight."""
        self.used += count
        self._pending += count > SMALL_BYTES_MAX

    def finish(self, count: int) -> None:
        self.used -= count
        self._pending -= count > SMALL_BYTES_MAX

    def leave(self, who: W, count: int) -> None:
        """Note a connection that is gone, with `count` bytes of a frame that never became whole."""
        self.used -= count + self._granted.pop(who, 0)
        self._waiting.pop(who, None)
        if self._through is who:
            self._through = None

    def next_waiting(self) -> W | None:
        """Return who may go on now, or None. It has the memory it asked for, and asks again."""
        if not self._waiting:
            return None
        who, count = next(iter(self._waiting.items()))
        if not self._fits(count):
            if not self._may_overdraw():
                return None
            self._through = who
        del self._waiting[who]
        self._granted[who] = count
        self.used += count
        return who

    def _fits(self, count: int) -> bool:
        return self.used + count <= self._bytes_max

    def _may_overdraw(self) -> bool:
        return self._through is None and not self._pending
