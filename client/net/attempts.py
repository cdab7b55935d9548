"""Shell: one operation that is repeated until it is answered, refused for good, or out of time."""

import asyncio

from raftq.client.common.backoff import out_of_time
from raftq.client.common.errors import Outcome, RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.options import ClientOptions


class Attempts:
    """The state between attempts.

    `unknown` says whether an earlier attempt may have taken effect. Then an error that means "it is
    so already" means success."""

    __slots__ = ("_backoff", "_loop", "deadline", "last", "timeout_s", "unknown", "what")

    def __init__(self, what: str, options: ClientOptions, timeout_s: float) -> None:
        self.what = what
        self.timeout_s = timeout_s
        self.last: RaftqError | None = None
        self.unknown = False
        self._loop = asyncio.get_running_loop()
        self.deadline = self._loop.time() + timeout_s
        self._backoff = options.backoff()

    def left_s(self) -> float:
        return max(self.deadline - self._loop.time(), 0.0)

    def note(self, error: RaftqError) -> None:
        self.last = error
        self.unknown = self.unknown or error.outcome == "unknown"

    async def failed(self, error: RaftqError) -> None:
        """Waits before the next attempt; raises if there is none."""
        self.note(error)
        if not error.retriable:
            if self.unknown:
                error.outcome = "unknown"  # an earlier attempt may have taken effect
            raise error
        await self.wait()

    async def wait(self) -> None:
        wait_s = self._backoff.next_s()
        if wait_s >= self.left_s():
            raise self.too_late() from self.last
        await sleep(wait_s)

    def too_late(self) -> RaftqError:
        outcome: Outcome = "unknown" if self.unknown else "failed"
        what = f"{self.what} was not done in {self.timeout_s:g} s"
        return out_of_time(what, self.last).with_outcome(outcome)
