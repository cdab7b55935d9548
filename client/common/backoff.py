"""How long to wait before the next attempt, and errors that several callers get. (Pure.)"""

import random
from typing import TypeVar

from raftq.client.common.errors import RaftqError, RequestTimeout

E = TypeVar("E", bound=RaftqError)


def doubled_ms(first_ms: int, times: int, most_ms: int) -> int:
    """`first_ms` doubled so many times, at most `most_ms`."""
    return min(first_ms << min(times, 20), most_ms)


class Backoff:
    """Waits that double from `first_ms` up to `most_ms`, each between half and all of itself.

    The chance keeps clients that failed together from coming back together.
    """

    __slots__ = ("_first_ms", "_most_ms", "_rng", "attempts")

    def __init__(self, first_ms: int, most_ms: int, rng: random.Random) -> None:
        self._first_ms = first_ms
        self._most_ms = most_ms
        self._rng = rng
        self.attempts = 0

    def next_s(self) -> float:
        wait_s = self.after_s(self.attempts)
        self.attempts += 1
        return wait_s

    def after_s(self, attempts: int) -> float:
        """The wait after this many attempts, for callers that count them themselves."""
        wait_ms = doubled_ms(self._first_ms, attempts, self._most_ms)
        return wait_ms / 1000 * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.attempts = 0


def copy_error(error: E) -> E:
    """A copy to raise: an error that many callers raise would collect all their tracebacks."""
    copy = type(error)(*error.args)
    copy.outcome = error.outcome
    copy.retriable = error.retriable
    copy.refresh_route = error.refresh_route
    copy.details = error.details
    copy.__cause__ = error.__cause__
    return copy


def out_of_time(what: str, last: RaftqError | None) -> RequestTimeout:
    """The end of an operation whose time is spent; it names the last problem, if there was one."""
    problem = f"; the last problem: {last.code}: {last}" if last is not None else ""
    error = RequestTimeout(f"{what}{problem}")
    error.__cause__ = last
    return error
